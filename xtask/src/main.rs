//! `cargo xtask test`: installs what the tests need and runs everything that must hold before a commit lands.
//! `cargo xtask nightly`: the same with the long runs, and whether anything is known against a dependency.

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// Which of our crates each of our crates may depend on. The wall is the line missing from a `Cargo.toml`.
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
    (
        "postrider-api",
        &[
            "postrider-core",
            "postrider-wire",
            "postrider-store",
            "postrider-engine",
            "postrider-portal",
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
        ],
    ),
];

const CARGO_DENY: &str = "0.20";

fn main() -> ExitCode {
    let task = std::env::args().nth(1).unwrap_or_default();
    let result = match task.as_str() {
        "test" => test(Runs::Usual),
        "nightly" => test(Runs::Long).and_then(|()| step("advisories", || deny(&["advisories"]))),
        "edges" => edges(),
        _ => {
            eprintln!("usage: cargo xtask test|nightly|edges");
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

/// How long tests go on that can go on for as long as one likes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Runs {
    Usual,
    Long,
}

/// Everything, in the order in which it fails soonest. The last line counts the tests.
fn test(runs: Runs) -> Result<()> {
    step("imports go one way", edges)?;
    step("formatting", || cargo(&["fmt", "--all", "--check"]))?;
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
    let tools = root().join("target/tools");
    let program = tools.join("bin/cargo-deny");
    if !program.exists() {
        let version = format!("cargo-deny@^{CARGO_DENY}");
        let mut install = Command::new("cargo");
        install
            .args(["install", "--locked", "--quiet", &version, "--root"])
            .arg(&tools);
        run(&mut install)?;
    }
    run(Command::new(program)
        .args(["--log-level", "error", "check"])
        .args(what))
}

/// Prepares the unmodified clients and servers under `target` and says where they are.
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
    fn counts_closing_lines() {
        let line = "ok. 31 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!((count(line, "passed"), count(line, "failed")), (31, 2));
    }
}
