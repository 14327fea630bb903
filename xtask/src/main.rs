//! `cargo xtask test`: installs the tests' requirements and runs every check that a commit must
//! pass.
//!
//! `cargo xtask nightly`: the same with long runs, and with known vulnerabilities of dependencies.

mod words;

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// Our crates that each of our crates may depend on. A missing line in a `Cargo.toml` is the wall.
const EDGES: &[(&str, &[&str])] = &[
    ("postrider-core", &[]),
    ("postrider-store", &["postrider-core"]),
    ("postrider-embedded", &["postrider-core", "postrider-store"]),
    ("postrider-jetstream", &["postrider-core", "postrider-store"]),
    ("postrider-engine", &["postrider-core", "postrider-store"]),
    ("postrider-transport", &["postrider-core", "postrider-engine"]),
    ("postrider-blobs", &["postrider-core", "postrider-engine"]),
    ("postrider-recorder", &["postrider-core", "postrider-engine"]),
    ("postrider-otlp", &["postrider-core", "postrider-engine"]),
    ("postrider-wire", &["postrider-core"]),
    ("postrider-portal", &[]),
    ("postrider-audit", &["postrider-core"]),
    (
        "postrider-api",
        &[
            "postrider-core",
            "postrider-wire",
            "postrider-store",
            "postrider-engine",
            "postrider-portal",
            "postrider-audit",
        ],
    ),
    (
        "postrider-sim",
        &["postrider-core", "postrider-store", "postrider-engine"],
    ),
    (
        "postrider",
        &[
            "postrider-core",
            "postrider-store",
            "postrider-embedded",
            "postrider-jetstream",
            "postrider-engine",
            "postrider-transport",
            "postrider-blobs",
            "postrider-recorder",
            "postrider-otlp",
            "postrider-wire",
            "postrider-api",
            "postrider-audit",
        ],
    ),
];

const CARGO_DENY: &str = "0.20";
const CARGO_FUZZ: &str = "0.13";
/// A usual run tries a fixed number of inputs from a fixed seed, besides the corpus: the same ones
/// however busy the machine is. New findings are the nightly run's business.
const FUZZ_USUAL: &[&str] = &["-runs=100000", "-seed=1"];
/// Seconds that each fuzz target runs at night.
const FUZZ_LONG: &[&str] = &["-max_total_time=600"];

fn main() -> ExitCode {
    let task = std::env::args().nth(1).unwrap_or_default();
    let result = match task.as_str() {
        "test" => test(Runs::Usual),
        "nightly" => test(Runs::Long).and_then(|()| step("advisories", || deny(&["advisories"]))),
        "edges" => edges(),
        "words" => words::check(&root()),
        _ => {
            eprintln!("usage: cargo xtask test|nightly|edges|words");
            return ExitCode::FAILURE;
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("xtask: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace's root.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the workspace")
        .to_owned()
}

/// Length of the checks that can run for any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Runs {
    Usual,
    Long,
}

/// Runs all checks, those that fail soonest first. The last line counts the tests.
fn test(runs: Runs) -> Result<()> {
    step("imports go one way", edges)?;
    step("words", || words::check(&root()))?;
    step("formatting", || {
        cargo(&["fmt", "--all", "--check"])?;
        cargo(&["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"])
    })?;
    step("clippy", || {
        cargo(&[
            "clippy",
            "--workspace",
            "--all-targets",
            "--quiet",
            "--",
            "-D",
            "warnings",
        ])
    })?;
    step("licences, sources and duplicates of dependencies", || {
        deny(&["bans", "licenses", "sources"])
    })?;
    step("fuzzing", || fuzz(runs))?;
    let clients = step("the clients and storage servers that tests drive", clients)?;
    println!("== tests");
    let (passed, failed) = run_tests(&clients, runs)?;
    println!("{passed} passed, {failed} failed");
    if failed > 0 || passed == 0 {
        bail!("tests failed");
    }
    Ok(())
}

fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    println!("== {name}");
    work().with_context(|| name.to_owned())
}

fn cargo(args: &[&str]) -> Result<()> {
    run(Command::new("cargo").args(args))
}

fn run(command: &mut Command) -> Result<()> {
    let status = command
        .current_dir(root())
        .status()
        .with_context(|| format!("running {command:?}"))?;
    if !status.success() {
        bail!("{command:?} failed: {status}");
    }
    Ok(())
}

fn deny(what: &[&str]) -> Result<()> {
    run(Command::new(tool("cargo-deny", CARGO_DENY)?)
        .args(["--log-level", "error", "check"])
        .args(what))
}

/// The program of a cargo subcommand, installed under `target/tools` if it is not there yet.
fn tool(name: &str, version: &str) -> Result<PathBuf> {
    let tools = root().join("target/tools");
    let program = tools.join("bin").join(name);
    if !program.exists() {
        let version = format!("{name}@^{version}");
        run(Command::new("cargo")
            .args(["install", "--locked", "--quiet", &version, "--root"])
            .arg(&tools))?;
    }
    Ok(program)
}

/// Runs every fuzz target on its corpus and on inputs derived from it; findings stay in
/// `fuzz/artifacts`.
///
/// The coverage instrumentation needs compiler flags that stable toolchains offer only with
/// `RUSTC_BOOTSTRAP`. New inputs go to a corpus under `target`, so that the committed seeds stay
/// few and readable; only nightly runs begin with what earlier ones found.
fn fuzz(runs: Runs) -> Result<()> {
    let program = tool("cargo-fuzz", CARGO_FUZZ)?;
    let command = |verb: &str| {
        let mut command = Command::new(&program);
        command
            .args(["fuzz", verb, "--sanitizer", "none"])
            .env("RUSTC_BOOTSTRAP", "1");
        command
    };
    run(&mut command("build"))?;
    let (bounds, grown) = match runs {
        Runs::Usual => (FUZZ_USUAL, root().join("target/fuzz-corpus/usual")),
        Runs::Long => (FUZZ_LONG, root().join("target/fuzz-corpus/nightly")),
    };
    if runs == Runs::Usual && grown.exists() {
        std::fs::remove_dir_all(&grown)?;
    }
    for target in fuzz_targets()? {
        println!("-- {target}");
        let grown = grown.join(&target);
        std::fs::create_dir_all(&grown)?;
        let mut fuzzing = command("run");
        fuzzing
            .arg(&target)
            .arg(&grown)
            .arg(root().join("fuzz/corpus").join(&target))
            .arg("--")
            .args(bounds)
            .args(["-verbosity=0", "-timeout=60", "-rss_limit_mb=2048"]);
        let output = fuzzing
            .current_dir(root())
            .output()
            .context("running cargo fuzz")?;
        if !output.status.success() {
            eprintln!("{}", String::from_utf8_lossy(&output.stderr));
            bail!("{target} found something; the input is in fuzz/artifacts/{target}");
        }
    }
    Ok(())
}

/// The names of the programs in `fuzz/fuzz_targets`, in order.
fn fuzz_targets() -> Result<Vec<String>> {
    let mut targets = Vec::new();
    for entry in std::fs::read_dir(root().join("fuzz/fuzz_targets"))? {
        let path = entry?.path();
        if let Some(name) = path.file_stem().and_then(|name| name.to_str()) {
            targets.push(name.to_owned());
        }
    }
    targets.sort();
    Ok(targets)
}

/// Installs the unmodified clients and servers under `target`; returns their directory.
fn clients() -> Result<PathBuf> {
    let directory = root().join("target/clients");
    let script = root().join("tests/clients/setup.sh");
    run(Command::new("bash").arg(script).arg(&directory))?;
    Ok(directory)
}

/// Runs all tests and counts them by the closing lines of the test binaries.
fn run_tests(clients: &Path, runs: Runs) -> Result<(u64, u64)> {
    let mut child = Command::new("cargo")
        .args(["test", "--workspace", "--no-fail-fast"])
        .env("POSTRIDER_CLIENTS", clients)
        .envs((runs == Runs::Long).then_some(("POSTRIDER_SLOW_TESTS", "1")))
        .current_dir(root())
        .stdout(Stdio::piped())
        .spawn()
        .context("running cargo test")?;
    let output = child.stdout.take().expect("piped above");
    let (mut passed, mut failed) = (0, 0);
    for line in BufReader::new(output).lines() {
        let line = line?;
        println!("{line}");
        if let Some(counts) = line.strip_prefix("test result: ") {
            passed += count(counts, "passed");
            failed += count(counts, "failed");
        }
    }
    if !child.wait()?.success() && failed == 0 {
        bail!("cargo test failed before a test could");
    }
    Ok((passed, failed))
}

/// The number before `word` in `ok. 3 passed; 0 failed; …`.
fn count(text: &str, word: &str) -> u64 {
    let before = text.split(word).next().unwrap_or("").trim_end();
    before
        .rsplit(' ')
        .next()
        .and_then(|n| n.parse().ok())
        .unwrap_or(0)
}

/// Checks every crate's dependencies on our other crates against [`EDGES`].
fn edges() -> Result<()> {
    let allowed: BTreeMap<&str, &[&str]> = EDGES.iter().copied().collect();
    for entry in std::fs::read_dir(root().join("crates"))? {
        let directory = entry?.path();
        let name = directory
            .file_name()
            .and_then(|n| n.to_str())
            .unwrap_or_default()
            .to_owned();
        let manifest = std::fs::read_to_string(directory.join("Cargo.toml"))?;
        if !manifest.contains(&format!("name = \"{name}\"")) {
            bail!("crates/{name} does not hold a crate of that name");
        }
        let Some(may) = allowed.get(name.as_str()) else {
            bail!("{name} is not in xtask's list of crates");
        };
        let dependencies = manifest.split("[dev-dependencies]").next().unwrap_or("");
        for line in dependencies.lines().filter(|l| l.starts_with("postrider")) {
            let other = line.split(['.', ' ', '=']).next().unwrap_or("");
            if !may.contains(&other) {
                bail!("{name} must not depend on {other}");
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imports_go_one_way() {
        edges().unwrap();
    }

    #[test]
    fn every_fuzz_target_has_seeds() {
        for target in fuzz_targets().unwrap() {
            let seeds = root().join("fuzz/corpus").join(&target);
            assert!(
                std::fs::read_dir(&seeds).is_ok_and(|mut d| d.next().is_some()),
                "{target}"
            );
        }
    }

    #[test]
    fn counts_closing_lines() {
        let line = "ok. 31 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!((count(line, "passed"), count(line, "failed")), (31, 2));
    }
}
