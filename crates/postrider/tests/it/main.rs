//! The real program over real sockets: its promises to clients, checked from outside.
//!
//! Each test starts its own server in its own directory and talks to it as any client would.
//! Longer runs happen when `POSTRIDER_SLOW_TESTS` is set.

#[path = "../../src/bench/ports.rs"]
mod ports;
mod server;
mod client;
mod receiver;
mod wait;
mod signals;
mod clock_lab;

mod quickstart;
mod edge_api;
mod publishing;
mod delivery;
mod retry;
mod test_clock;
mod profiles;
mod late_answers;
mod time_to_live;
mod probation;
mod pause;
mod edge_profile;
mod restarts;
mod changes;
mod dead_letters;
mod azurite;
mod destinations;
mod durability;
mod isolation;
mod limits;
mod private_files;
mod secrets;
mod full_disk;
mod damage;
mod shutdown;
mod egress;
mod delivery_loops;
mod store_and_forward;
mod configuration;
mod login;
mod metrics;
mod traces;
mod portal;
mod logs;
mod health;
mod doctor;
mod docs;
mod azure_resources;
mod azure_subscriptions;
mod handshake;
mod cli;
mod listen;
mod azure_clients;
mod cluster;
mod cluster_nodes;
mod cluster_page;
mod cluster_answers;
mod bench;
mod jepsen;
mod migrate;
mod attempts;
mod audit;
