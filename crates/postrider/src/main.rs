mod config;
mod material;

mod bench;
mod receiver;
fn main() {}
