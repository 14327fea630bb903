//! `postrider bench --store jetstream`: checks what is measured, not the speed.

use crate::cluster::nats;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// JSON output of a measurement.
#[track_caller]
fn measured(program: &Path, options: &[&str]) -> Value {
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_postrider"))
        .args([
            "bench",
            "--json",
            "--store",
            "jetstream",
            "--sync",
            "interval",
            "--secs",
            "0.5",
        ])
        .arg("--nats-server")
        .arg(program)
        .arg("--dir")
        .arg(directory.path())
        .args(options)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
    assert!(left.is_empty(), "it leaves nothing behind: {left:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_load_is_run_on_both_stores_and_nothing_is_lost() {
    let Some(program) = nats::installed() else { return };
    let found = measured(&program, &["--load", "fan-out"]);
    let cells = found["cells"].as_array().unwrap();
    let stores: Vec<&str> = cells.iter().filter_map(|cell| cell["store"].as_str()).collect();
    assert_eq!(stores, ["embedded", "jetstream R1"]);
    for cell in cells {
        assert_eq!(
            cell["delivered"],
            cell["published"].as_u64().unwrap() * 10,
            "{cell}"
        );
        assert_eq!(
            (&cell["missing"], &cell["duplicates"]),
            (&0.into(), &0.into()),
            "{cell}"
        );
    }
    assert!(
        cells[0].get("store_cpu_us_per_delivery").is_none(),
        "it has no server of its own"
    );
    assert!(cells[1]["store_cpu_us_per_delivery"].as_f64().unwrap() > 0.0);
    assert!(found["ratios"][0]["deliveries_per_s"].as_f64().unwrap() > 0.0);
    assert!(found["raw"][0]["messages_per_s"].as_f64().unwrap() > 0.0);
}

#[test]
fn nodes_share_the_work_and_go_on_for_one_that_dies() {
    let Some(program) = nats::installed() else { return };
    let found = measured(&program, &["--nodes", "2", "--takeover", "50"]);
    let point = &found["curve"][0];
    let nodes = point["per_node"].as_array().unwrap();
    assert_eq!(nodes.len(), 2);
    for node in nodes {
        assert!(node["deliveries"].as_u64().unwrap() > 0, "{point}");
    }
    assert_eq!(point["missing"], 0, "{point}");
    let takeover = &found["takeovers"][0];
    assert_eq!(
        (&takeover["waiting"], &takeover["missing"]),
        (&50.into(), &0.into()),
        "{takeover}"
    );
    // A partition is taken over only after its owner was silent for a whole lease, less the age of
    // its last heartbeat.
    assert!(takeover["first_ms"].as_f64().unwrap() > 1000.0, "{takeover}");
}

#[test]
fn what_belongs_together_is_asked_for_together() {
    let refused = |options: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_postrider"))
            .arg("bench")
            .args(options)
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refused(&["--nodes", "2"]).contains("--store"));
    assert!(refused(&["--store", "jetstream", "--nodes", "0"]).contains("from 1 to 16"));
    assert!(refused(&["--store", "jetstream", "--replicas", "2"]).contains("1, 3 or 5"));
    let nowhere = refused(&["--store", "jetstream", "--nats-server", "/nowhere/nats-server"]);
    assert!(nowhere.contains("/nowhere/nats-server"), "{nowhere}");
}
