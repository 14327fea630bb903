//! `postrider doctor`: examines an installation, and says what is wrong and how to fix it. Changes
//! nothing.

mod disk;
mod finding;
mod jetstream;
mod machine;
mod network;
mod subscriptions;
mod tls;

use crate::config::{self, LoadedConfig, ServeFlags, StoreKind};
use crate::output::{OutputFlags, OutputFormat};
use crate::serve::runtime;
use crate::{terminal, test_clock};
use anyhow::Result;
use disk::DirectoryUse;
use finding::Finding;
use machine::ClockReferences;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::clock::SystemClock;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// Longest wait for other programs of the machine.
const PATIENCE: Duration = Duration::from_secs(3);

/// Check configuration, disk, certificate, clock, endpoints, subscriptions and the running server,
/// and say what to do
#[derive(Clone, Debug, clap::Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    flags: ServeFlags,
    /// Read everything that is stored, not only its newest part; may take long
    #[arg(long)]
    deep: bool,
    #[command(flatten)]
    output: OutputFlags,
}

/// Exit code 0 when everything works, even with warnings; 1 otherwise.
pub fn run(args: &DoctorArgs) -> Result<ExitCode> {
    // Reading a damaged database panics; the panic is caught and reported as a finding.
    std::panic::set_hook(Box::new(|_| {}));
    let runtime = runtime(None)?;
    let findings = runtime.block_on(examine(args, std::env::vars().collect()));
    // A program that hangs must not delay the exit.
    runtime.shutdown_timeout(Duration::ZERO);
    let colors = std::io::stdout().is_terminal();
    match args.output.form() {
        OutputFormat::Text => terminal::print(finding::as_text(&findings, colors))?,
        OutputFormat::Json => terminal::print(format!("{:#}", finding::as_json(&findings)))?,
    }
    Ok(match finding::has_problems(&findings) {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}

async fn examine(args: &DoctorArgs, env: Vec<(String, String)>) -> Vec<Finding> {
    let (mut found, loaded) = configuration(&args.flags, env);
    let now = SystemClock.now();
    let mut times = ClockReferences {
        synchronized: synchronized().await,
        ..ClockReferences::default()
    };
    if let Some(loaded) = &loaded {
        found.extend(installation(args, loaded, now, &mut times).await);
    }
    found.extend(machine::clock(SystemClock.now(), &times));
    found.push(machine::open_files(machine::open_files_max()));
    found.push(machine::memory(machine::memory_available()));
    found
}

fn configuration(flags: &ServeFlags, env: Vec<(String, String)>) -> (Vec<Finding>, Option<LoadedConfig>) {
    let about = "configuration";
    match config::load_reporting_all(flags, env) {
        Err(refused) => {
            let told = refused.iter().map(|one| {
                let todo = "change it; \"postrider config\" prints every key with its meaning";
                Finding::problem(about, one.to_string(), todo)
            });
            (told.collect(), None)
        }
        Ok(loaded) => {
            let from = match &loaded.file {
                Some(file) => format!("{}", file.display()),
                None => "no file: defaults, variables and flags".to_owned(),
            };
            let mut found = vec![Finding::ok(about, from)];
            let todo = "look whether that is what was meant; --print-config shows what is in force";
            found.extend(
                loaded
                    .warnings
                    .iter()
                    .map(|one| Finding::warning(about, one, todo)),
            );
            (found, Some(loaded))
        }
    }
}

async fn installation(
    args: &DoctorArgs,
    loaded: &LoadedConfig,
    now: Timestamp,
    times: &mut ClockReferences,
) -> Vec<Finding> {
    let config = &loaded.config;
    let data_dir = config.data_dir.clone();
    let mut found = blocking({
        let data_dir = data_dir.clone();
        move || disk::directory(&data_dir)
    })
    .await;
    times.written = disk::last_written(&data_dir);
    let used = disk::find_use(&data_dir).unwrap_or_else(|finding| {
        found.push(finding);
        DirectoryUse::Absent
    });
    let running = matches!(used, DirectoryUse::Server);
    let mut endpoints = Vec::new();
    let mut dead_letter_places = Vec::new();
    let mut server = None;
    match &used {
        DirectoryUse::Server => {
            let (told, running) = network::running(config).await;
            found.extend(told);
            times.server = running.date;
            if let Some(url) = &running.url {
                match network::endpoints_of(config, url).await {
                    Ok(all) => endpoints = all,
                    Err(finding) => found.push(finding),
                }
                match network::dead_letter_places_of(config, url).await {
                    Ok(all) => dead_letter_places = all,
                    Err(finding) => found.push(finding),
                }
                let (told, failures) = subscriptions::examine(config, url).await;
                found.extend(told);
                network::add_earlier_failures(&mut endpoints, failures);
            }
            server = running.url;
        }
        DirectoryUse::Free { .. } | DirectoryUse::Absent => {
            let mut catalogue = None;
            // A node of a cluster keeps nothing of that here.
            let clustered = config.store.kind == StoreKind::Jetstream;
            if let (DirectoryUse::Free { .. }, false) = (&used, clustered) {
                found.extend(untouched_by_tests(args, &data_dir, now));
                let path = data_dir.clone();
                let deep = args.deep;
                found.extend(blocking(move || disk::log(&path, deep)).await);
                let (told, read) = disk::databases(config, args.deep).await;
                found.extend(told);
                catalogue = read;
            }
            found.extend(network::free_ports(config).await);
            let (told, all) = network::endpoints_in(config, catalogue.as_ref());
            found.extend(told);
            endpoints = all;
            dead_letter_places = network::dead_letter_places_in(config, catalogue.as_ref());
        }
    }
    // The directory's lock is released: servers may be started from here on.
    drop(used);
    if let Some(settings) = crate::cluster::settings(config) {
        let (told, ahead) = jetstream::examine(&settings).await;
        found.extend(told);
        times.nats = ahead;
    }
    found.extend(
        blocking({
            let config = config.clone();
            move || tls::examine(&config, now, running)
        })
        .await,
    );
    found.extend(network::proxy(config).await);
    let unknown = running && server.is_none();
    if !unknown {
        found.extend(network::reach(loaded, endpoints).await);
    }
    found.extend(network::storage(config, &dead_letter_places).await);
    found.extend(network::issuer(config).await);
    found
}

/// Reports a directory whose events lie in the future of the machine's clock: a server refuses to
/// start with it.
fn untouched_by_tests(args: &DoctorArgs, data_dir: &std::path::Path, now: Timestamp) -> Option<Finding> {
    let stood = match test_clock::stored_position(data_dir) {
        Ok(stood) => stood?,
        Err(e) => return Some(Finding::problem("clock", format!("{e:#}"), "remove the file")),
    };
    if args.flags.test_clock || stood <= now + Duration::from_secs(60) {
        return None;
    }
    let what = format!("the data directory was used with a test clock that stood at {stood}, in the future");
    Some(Finding::problem(
        "clock",
        what,
        "start with --test-clock, or with another data directory",
    ))
}

async fn synchronized() -> Option<bool> {
    let asking = timeout(PATIENCE, spawn_blocking(machine::synchronized)).await;
    asking.ok()?.ok()?
}

/// Runs a check of the disk on a blocking thread.
async fn blocking(look: impl FnOnce() -> Vec<Finding> + Send + 'static) -> Vec<Finding> {
    match spawn_blocking(look).await {
        Ok(found) => found,
        Err(e) => vec![Finding::problem(
            "doctor",
            format!("a check failed: {e}"),
            "please report this",
        )],
    }
}
