//! The binary: `postrider serve` and the command line.

mod config;
mod profiles;
mod material;
mod test_clock;
mod serve;
mod bench;
mod receiver;
mod demo;
mod client;
mod deadletters;

use clap::{Parser, Subcommand};

/// Many small buffers live and die with every delivery.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
#[command(
    name = "postrider",
    version,
    about = "Durable event delivery that speaks Azure Event Grid"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the server
    Serve(config::ServeFlags),
    /// Print a configuration file with every key, its meaning and its default
    Config,
    /// List the profiles, or show all of one, as the configuration leaves them
    Profiles(profiles::ProfilesArgs),
    /// List dead letters, look at them, replay or purge them
    #[command(name = "deadletters")]
    DeadLetters(deadletters::DeadLettersArgs),
    /// Print webhook deliveries as they arrive
    Receiver(receiver::ReceiverArgs),
    /// Watch events being delivered, retried and dead-lettered, on a fast clock
    Demo(demo::DemoArgs),
    /// Measure publish-to-delivered on this machine, beside a minimal relay
    Bench(bench::BenchArgs),
    #[command(hide = true)]
    BenchSink(bench::SinkArgs),
    #[command(hide = true)]
    BenchRelay(bench::RelayArgs),
    #[command(hide = true)]
    BenchPublish(bench::PublishArgs),
}

fn main() -> std::process::ExitCode {
    let result = match Cli::parse().command {
        Command::Serve(flags) => serve::run(&flags),
        Command::Config => {
            print!("{}", config::default_config_text());
            Ok(())
        }
        Command::Profiles(args) => profiles::run(&args),
        Command::DeadLetters(args) => match deadletters::run(&args) {
            Ok(code) => return code,
            Err(e) => Err(e),
        },
        Command::Receiver(args) => receiver::run(args),
        Command::Demo(args) => demo::run(&args),
        Command::Bench(args) => bench::run(args),
        Command::BenchSink(args) => bench::run_sink(args),
        Command::BenchRelay(args) => bench::run_relay(args),
        Command::BenchPublish(args) => bench::run_publish(args),
    };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("postrider: {e:#}");
            std::process::ExitCode::FAILURE
        }
    }
}
