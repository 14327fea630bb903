//! The binary: `postrider serve` and the command line.

mod config;
mod profiles;
mod private_files;
mod secrets;
mod credentials;
mod access_files;
mod counts_file;
mod test_clock;
mod traces;
mod outgoing;
mod cluster;
mod scrub;
mod serve;
mod offline_audit;
mod stop_watchdog;
mod migrate;
mod doctor;
mod restore;
mod fetch;
mod az_setup;
mod bench;
mod receiver;
mod demo;
mod terminal;
mod output;
mod examples;
mod contexts;
mod client;
mod dead_letters;
mod cli;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// Every delivery allocates and frees many small buffers.
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
    /// Move all data of a stopped server to the other kind of store, or back
    Migrate(migrate::MigrateArgs),
    /// Change the key under which stored secrets are sealed
    Secrets(secrets::SecretsArgs),
    /// Rewrite the databases of a stopped server without the data that was deleted from them
    Compact(secrets::DirectoryFlags),
    /// Check configuration, disk, certificate, clock and endpoints, and say what to do
    Doctor(doctor::DoctorArgs),
    /// Accept the files of a stopped server although they are of different times, or damaged
    Restore(restore::RestoreArgs),
    /// Print a configuration file with every key, its meaning and its default
    Config,
    /// List the profiles, or show one in full, as configured
    Profiles(profiles::ProfilesArgs),
    /// Print the commands that make az and the SDKs use this server, or run them
    AzSetup(az_setup::AzSetupArgs),
    /// List dead letters, look at them, replay or purge them
    #[command(name = "deadletters")]
    DeadLetters(dead_letters::DeadLettersArgs),
    #[command(flatten)]
    Grid(cli::Command),
    /// Name servers, and choose the one that the other commands use
    Context(contexts::ContextArgs),
    /// Print webhook deliveries as they arrive
    Receiver(receiver::ReceiverArgs),
    /// Watch events being delivered, retried and dead-lettered, on a fast clock
    Demo(demo::DemoArgs),
    /// Measure publish-to-delivery on this machine, beside a minimal relay
    Bench(bench::BenchArgs),
    /// Print a completion script for a shell
    Completions { shell: clap_complete::Shell },
    #[command(hide = true)]
    BenchSink(bench::SinkArgs),
    #[command(hide = true)]
    BenchRelay(bench::RelayArgs),
    #[command(hide = true)]
    BenchPublish(bench::PublishArgs),
    #[command(hide = true)]
    BenchRaw(bench::RawArgs),
}

fn main() -> std::process::ExitCode {
    let matches = examples::with_examples(Cli::command()).get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|refused| refused.exit());
    terminal::adapt();
    let result = match cli.command {
        Command::Serve(flags) => serve::run(&flags),
        Command::Migrate(args) => match migrate::run(&args) {
            Ok(code) => return code,
            Err(e) => Err(e),
        },
        Command::Doctor(args) => match doctor::run(&args) {
            Ok(code) => return code,
            Err(e) => Err(e),
        },
        Command::Secrets(args) => secrets::run(&args),
        Command::Compact(flags) => secrets::compact(&flags),
        Command::Restore(args) => restore::run(&args),
        Command::Config => {
            print!("{}", config::default_config_text());
            Ok(())
        }
        Command::Profiles(args) => profiles::run(&args),
        Command::AzSetup(args) => match az_setup::run(&args) {
            Ok(code) => return code,
            Err(e) => Err(e),
        },
        Command::DeadLetters(args) => match dead_letters::run(&args) {
            Ok(code) => return code,
            Err(e) => Err(e),
        },
        Command::Grid(command) => return cli::run(command),
        Command::Context(args) => contexts::run(&args),
        Command::Receiver(args) => receiver::run(args),
        Command::Demo(args) => demo::run(&args),
        Command::Bench(args) => bench::run(args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "postrider", &mut script);
            terminal::print(String::from_utf8_lossy(&script).trim_end())
        }
        Command::BenchSink(args) => bench::run_sink(args),
        Command::BenchRelay(args) => bench::run_relay(args),
        Command::BenchPublish(args) => bench::run_publish(args),
        Command::BenchRaw(args) => bench::run_raw(args),
    };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => cli::failed(&e),
    }
}
