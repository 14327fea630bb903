//! A webhook that records requests and answers as scripted.

use crate::client::{find, read_head};
use crate::wait::{self, PATIENCE};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A request that was received.
#[derive(Clone, Debug)]
pub struct ReceivedDelivery {
    pub method: String,
    pub path: String,
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub at: Instant,
}

impl ReceivedDelivery {
    pub fn header(&self, name: &str) -> Option<&str> {
        find(&self.headers, name)
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("deliveries are text")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e} in {:?}", self.text()))
    }

    /// Ids of the events in the body, an array or a single event.
    pub fn ids(&self) -> Vec<String> {
        let body = self.json();
        let events = body.as_array().cloned().unwrap_or_else(|| vec![body]);
        events
            .iter()
            .map(|event| event["id"].as_str().expect("events have ids").to_owned())
            .collect()
    }
}

/// Reaction of a receiver to a request.
pub enum ScriptedReply {
    Status(u16),
    /// Never answers while the connection lasts.
    Silence,
    /// Resets the connection, so that the client gets an error.
    Reset,
    /// Writes these bytes, then closes.
    Bytes(Vec<u8>),
    /// Writes the pattern repeatedly until the client disconnects.
    Endless {
        head: Vec<u8>,
        piece: Vec<u8>,
    },
}

type ReplyScript = dyn Fn(&ReceivedDelivery) -> ScriptedReply + Send + Sync;

pub struct TestReceiver {
    pub address: SocketAddr,
    deliveries: mpsc::Receiver<ReceivedDelivery>,
    stop: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    accepting: Option<JoinHandle<()>>,
}

impl TestReceiver {
    /// A receiver that answers 200 to everything.
    pub fn start() -> TestReceiver {
        TestReceiver::answering(|_| ScriptedReply::Status(200))
    }

    /// A receiver that answers with the status at the start of the path.
    pub fn by_path() -> TestReceiver {
        TestReceiver::answering(|delivery| {
            let status = delivery.path[1..].split(['/', '?']).next().unwrap_or_default();
            ScriptedReply::Status(status.parse().expect("paths begin with a status"))
        })
    }

    pub fn answering(
        script: impl Fn(&ReceivedDelivery) -> ScriptedReply + Send + Sync + 'static,
    ) -> TestReceiver {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let (sender, deliveries) = mpsc::channel();
        let stop = Arc::new(AtomicBool::new(false));
        let streams = Arc::new(Mutex::new(Vec::new()));
        let accepting = {
            let (stop, streams, script) = (stop.clone(), streams.clone(), Arc::new(script));
            std::thread::spawn(move || accept(&listener, &stop, &streams, &script, &sender))
        };
        TestReceiver {
            address,
            deliveries,
            stop,
            streams,
            accepting: Some(accepting),
        }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The next request; panics if none comes in time.
    #[track_caller]
    pub fn next(&self) -> ReceivedDelivery {
        self.deliveries
            .recv_timeout(PATIENCE)
            .expect("a delivery arrives")
    }

    /// Fails if anything arrives within this time.
    #[track_caller]
    pub fn nothing_within(&self, time: Duration) {
        match self.deliveries.recv_timeout(time) {
            Err(RecvTimeoutError::Timeout) => {}
            other => panic!("nothing should have arrived: {other:?}"),
        }
    }

    /// All received requests that were not taken yet.
    pub fn take_received(&self) -> Vec<ReceivedDelivery> {
        self.deliveries.try_iter().collect()
    }

    /// Takes deliveries until all of these ids were among them. Returns every id seen.
    #[track_caller]
    pub fn all_of(&self, ids: &BTreeSet<String>) -> BTreeSet<String> {
        let mut seen = BTreeSet::new();
        let deadline = wait::now() + 2 * PATIENCE;
        let mut missing = ids.len();
        while missing > 0 {
            let left = deadline.saturating_duration_since(wait::now());
            let Ok(delivery) = self.deliveries.recv_timeout(left) else {
                let lost: Vec<_> = ids.difference(&seen).take(5).collect();
                panic!("{missing} of {} did not arrive, such as {lost:?}", ids.len());
            };
            for id in delivery.ids() {
                missing -= usize::from(ids.contains(&id) && !seen.contains(&id));
                seen.insert(id);
            }
        }
        seen
    }
}

impl Drop for TestReceiver {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let _ = TcpStream::connect(self.address);
        for stream in self.streams.lock().expect("no panic holds it").iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

fn accept(
    listener: &TcpListener,
    stop: &AtomicBool,
    streams: &Mutex<Vec<TcpStream>>,
    script: &Arc<impl Fn(&ReceivedDelivery) -> ScriptedReply + Send + Sync + 'static>,
    sender: &mpsc::Sender<ReceivedDelivery>,
) {
    for stream in listener.incoming() {
        if stop.load(Relaxed) {
            return;
        }
        let Ok(stream) = stream else { continue };
        if let Ok(known) = stream.try_clone() {
            streams.lock().expect("no panic holds it").push(known);
        }
        let (script, sender) = (script.clone(), sender.clone());
        // The thread ends with its connection; a script may block it for longer, at most until the
        // test ends.
        std::thread::spawn(move || {
            let _ = converse(stream, &*script, &sender);
        });
    }
}

fn converse(
    stream: TcpStream,
    script: &ReplyScript,
    sender: &mpsc::Sender<ReceivedDelivery>,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut out = stream.try_clone()?;
    let mut stream = BufReader::new(stream);
    loop {
        let (first, headers) = read_head(&mut stream)?;
        let length = find(&headers, "content-length")
            .and_then(|length| length.parse().ok())
            .unwrap_or(0);
        let mut body = vec![0; length];
        stream.read_exact(&mut body)?;
        let delivery = ReceivedDelivery {
            method: first.split(' ').next().unwrap_or_default().to_owned(),
            path: first.split(' ').nth(1).unwrap_or_default().to_owned(),
            headers,
            body,
            at: wait::now(),
        };
        let _ = sender.send(delivery.clone());
        match script(&delivery) {
            // These statuses have neither a body nor a content length.
            ScriptedReply::Status(status @ (204 | 304)) => write!(out, "HTTP/1.1 {status} Scripted\r\n\r\n")?,
            ScriptedReply::Status(status) => {
                write!(out, "HTTP/1.1 {status} Scripted\r\ncontent-length: 0\r\n\r\n")?
            }
            ScriptedReply::Silence => {
                io::copy(&mut stream, &mut io::sink())?;
                return Ok(());
            }
            ScriptedReply::Reset => return out.shutdown(Shutdown::Both),
            ScriptedReply::Bytes(bytes) => {
                out.write_all(&bytes)?;
                return out.shutdown(Shutdown::Both);
            }
            ScriptedReply::Endless { head, piece } => {
                out.write_all(&head)?;
                loop {
                    out.write_all(&piece)?;
                }
            }
        }
    }
}

/// Blocks threads until it is opened, once and for all.
#[derive(Default)]
pub struct ReplyGate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl ReplyGate {
    pub fn wait(&self) {
        let open = self.open.lock().expect("no panic holds it");
        drop(
            self.opened
                .wait_while(open, |open| !*open)
                .expect("no panic holds it"),
        );
    }

    pub fn open(&self) {
        *self.open.lock().expect("no panic holds it") = true;
        self.opened.notify_all();
    }
}
