//! The portal in a real browser, on a server with real traffic: every page in every size and
//! colour, also by keyboard, with hostile text wherever text can come from others.
//!
//! `tests/clients/setup.sh DIR` installs the browser driver; `POSTRIDER_CLIENTS=DIR` makes this
//! test use it, and `POSTRIDER_SHOTS=DIR` keeps screenshots.

use crate::azure_clients::{installed, scripts};
use crate::server::ServerSetup;
use crate::wait;
use std::process::Command;

/// Retries happen during the visit, and dead letters are in their blobs at once.
const CONFIG: &str = r#"
profile = "custom"
dead_letter.delay = 0
client = [
  { id = "dispatcher", secret = "portal-secret" },
  { id = "eye", secret = "reader-secret", role = "reader" },
]
[profile_custom]
schedule = ["1s", "2s", "1m", "10m"]
other_floor = "1s"
floors = { "500" = "1s", "503" = "1s" }
final = [400, 413]
"#;

/// Dead letters wait for minutes, and have a default destination. The server generates its own
/// secret.
const CONFIG_DELAYED: &str = r#"
dead_letter.delay = "5m"
dead_letter.default = "local/kept"
"#;

/// Least number of checks in the walk-through: one that ends early has failed.
const HELD_MIN: usize = 70;

#[test]
fn the_portal_holds_in_a_real_browser() {
    let Some(directory) = installed() else { return };
    let server = ServerSetup::config(CONFIG).start();
    let delayed = ServerSetup::config(CONFIG_DELAYED).start();
    let begun = wait::now();
    let output = Command::new("node")
        .arg(scripts().join("js/portal.mjs"))
        .args([
            &format!("http://{}", server.http),
            "portal-secret",
            "reader-secret",
            &format!("http://{}", delayed.http),
        ])
        .env("NODE_PATH", directory.join("js/node_modules"))
        .output()
        .expect("node can be run");
    let took = begun.elapsed();
    let told = String::from_utf8_lossy(&output.stdout);
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}\n{failed}\n{:#?}", server.log());
    let held = told.lines().filter(|line| line.starts_with("ok ")).count();
    assert!(held >= HELD_MIN, "only {held} things were looked at: {told}");
    println!("{held} things held in {took:?}");
}
