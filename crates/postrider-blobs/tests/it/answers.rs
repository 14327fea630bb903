//! Answers that no correct server gives.

use crate::{account, assert_refused, assert_unreachable};
use bytes::Bytes;
use postrider_blobs::{AccountLocation, ObjectStores};
use postrider_core::ids::Secret;
use postrider_engine::blobs::BlobStore;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

const KEY: &str = "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA==";

/// A server with a scripted answer, given the value of the request's authorization.
fn answering(answer: impl Fn(&str) -> Vec<u8> + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let (mut authorization, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                stream.read_line(&mut line).unwrap();
                match line.trim_end().split_once(": ") {
                    Some(("authorization", value)) => authorization = value.to_owned(),
                    Some(("content-length", value)) => length = value.parse().unwrap(),
                    Some(_) => {}
                    None if line.trim_end().is_empty() => break,
                    None => {}
                }
            }
            std::io::copy(&mut (&mut stream).take(length), &mut std::io::sink()).unwrap();
            // The client may have closed the connection already.
            let _ = stream.get_mut().write_all(&answer(&authorization));
        }
    });
    address
}

fn with_status(status: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
}

fn azure(address: SocketAddr) -> ObjectStores {
    let place = AccountLocation::Azure {
        account: "me".to_owned(),
        endpoint: format!("http://{address}/me"),
        key: Secret::new(KEY),
    };
    account(place, true)
}

fn s3(address: SocketAddr) -> ObjectStores {
    let place = AccountLocation::S3 {
        endpoint: Some(format!("http://{address}")),
        region: "eu".to_owned(),
        bucket: None,
        access_key_id: "id".to_owned(),
        secret_access_key: Secret::new(KEY),
    };
    account(place, true)
}

#[tokio::test]
async fn a_server_that_quotes_secrets_is_not_quoted() {
    let address = answering(|authorization| {
        let body = format!(
            "<Error><Code>Wrong</Code><Message>{authorization} and {KEY}</Message>\
             <Detail>{authorization} {KEY}</Detail></Error>"
        );
        with_status("403 Forbidden", &body)
    });
    for stores in [azure(address), s3(address)] {
        for told in [
            assert_refused(stores.put("dead", "letters", "a", Bytes::new()).await),
            assert_refused(stores.get("dead", "letters", "a").await),
            assert_refused(stores.delete("dead", "letters", "a").await),
            assert_refused(stores.probe("dead", "letters").await),
        ] {
            assert!(told.contains("answered 403 Wrong: "), "{told}");
            assert!(told.contains("… and …"), "{told}");
            assert!(!told.contains(KEY), "{told}");
        }
    }
}

#[tokio::test]
async fn anything_unexpected_is_unreachable() {
    for answer in [
        with_status(
            "500 Internal Server Error",
            "<Error><Code>InternalError</Code></Error>",
        ),
        with_status("503 Service Unavailable", "busy"),
        with_status("429 Too Many Requests", ""),
        with_status("301 Moved Permanently", ""),
        with_status("404 Not Found", "no store here"),
        with_status(
            "409 Conflict",
            "<Error><Code>ContainerBeingDeleted</Code></Error>",
        ),
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort".to_vec(),
        b"SSH-2.0-OpenSSH_9.2\r\n".to_vec(),
        Vec::new(),
    ] {
        let address = answering(move |_| answer.clone());
        for stores in [azure(address), s3(address)] {
            let told = assert_unreachable(stores.put("dead", "letters", "a", Bytes::from("1")).await);
            assert!(told.contains(&address.to_string()), "{told}");
            assert_unreachable(stores.probe("dead", "letters").await);
        }
    }
}

/// Time is paused, so it jumps to the client's next timeout.
#[tokio::test(start_paused = true)]
async fn a_server_that_says_nothing_is_given_up_after_half_a_minute() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stores = azure(listener.local_addr().unwrap());
    let started = tokio::time::Instant::now();
    assert_unreachable(stores.put("dead", "letters", "a", Bytes::from("1")).await);
    assert!(
        started.elapsed() <= Duration::from_secs(31),
        "{:?}",
        started.elapsed()
    );
}
