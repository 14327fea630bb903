//! Other users of the machine cannot read or change anything in the data directory.

use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, event};
use crate::wait;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

fn mode(path: &Path) -> u32 {
    let metadata = fs::metadata(path).expect("a file has a mode");
    metadata.permissions().mode() & 0o777
}

/// Asserts private modes of all files and directories; returns their number.
fn assert_private(directory: &Path) -> usize {
    assert_eq!(mode(directory), 0o700, "{}", directory.display());
    let mut count = 0;
    for entry in fs::read_dir(directory).expect("a directory can be read") {
        let path = entry.expect("an entry").path();
        count += 1;
        if path.is_dir() {
            count += assert_private(&path);
        } else {
            assert_eq!(mode(&path), 0o600, "{}", path.display());
        }
    }
    count
}

// The most permissive umask, a server that has used all its features, and a restart.
#[test]
fn every_file_is_private_whatever_the_umask() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(400));
    let config = format!(
        "[dead_letter]\ndelay = 0\ndefault = \"local\"\n[[topic]]\nname = \"t\"\n[[topic.subscription]]\nname = \"s\"\n\
         destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{}\" }} }}\n",
        receiver.url("/in")
    );
    let mut server = ServerSetup {
        umask: Some("000"),
        ..ServerSetup::config(config)
    }
    .start();
    server.publish("t", &[event("1")]);
    let blobs = server.data_dir().join("deadletters/deadletters");
    assert!(wait::is_true_in_time(|| blobs.is_dir()), "a blob of dead letters");
    assert!(assert_private(&server.data_dir()) > 15);
    server.kill();
    server.start();
    assert_private(&server.data_dir());
    server.stop();
    assert_private(&server.data_dir());
    assert!(
        !server.log().join("\n").contains("has mode"),
        "{}",
        server.log().join("\n")
    );
}

#[test]
fn a_directory_that_others_can_read_is_warned_of() {
    let mut server = ServerSetup::default().start();
    server.stop();
    let lock = server.data_dir().join("lock");
    fs::set_permissions(&lock, fs::Permissions::from_mode(0o666)).unwrap();
    fs::set_permissions(server.data_dir(), fs::Permissions::from_mode(0o755)).unwrap();
    server.start();
    let log = server.log().join("\n");
    let shown = server.data_dir().display().to_string();
    assert!(
        log.contains(&format!("data directory {shown} has mode 0755")),
        "{log}"
    );
    assert!(log.contains(&format!("chmod 700 {shown}")), "{log}");
    assert_eq!(mode(&lock), 0o600);
}
