//! Responses of receivers: whatever bytes come back over a real connection, an exchange ends in an
//! answer or a failure, soon after the receiver has closed.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use postrider_core::time::{Clock, Sleep, Timestamp};
use postrider_engine::deliver::{DeliveryRequest, DeliveryTransport};
use postrider_transport::{Config, HttpTransport};
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

/// Longest time for an exchange: the receiver closes at once.
const TIME_MAX: Duration = Duration::from_secs(10);

/// Follows the runtime's clock.
struct RuntimeClock(tokio::time::Instant);

impl Clock for RuntimeClock {
    fn now(&self) -> Timestamp {
        let passed = i64::try_from(self.0.elapsed().as_nanos()).expect("a run is short");
        Timestamp::from_nanos(passed)
    }
    fn sleep_until(&self, deadline: Timestamp) -> Sleep<'_> {
        let at = self.0 + deadline.since(Timestamp::from_nanos(0));
        Box::pin(tokio::time::sleep_until(at))
    }
}

struct Bench {
    runtime: Runtime,
    listener: TcpListener,
    clock: Arc<RuntimeClock>,
}

impl Bench {
    fn new() -> Bench {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime starts");
        let listener = runtime
            .block_on(TcpListener::bind("127.0.0.1:0"))
            .expect("loopback has a free port");
        let clock = Arc::new(RuntimeClock(tokio::time::Instant::now()));
        Bench {
            runtime,
            listener,
            clock,
        }
    }

    fn exchange(&self, response: &[u8]) {
        let port = self.listener.local_addr().expect("the listener is bound").port();
        let transport = Arc::new(
            HttpTransport::new(Config::default(), self.clock.clone()).expect("the defaults are good"),
        );
        let request = DeliveryRequest {
            method: http::Method::POST,
            url: Arc::new(format!("http://127.0.0.1:{port}/").parse().expect("a URL")),
            headers: Arc::default(),
            more: Vec::new(),
            body: Bytes::from_static(b"[]").into(),
            guard: None,
        };
        let receiver = async {
            let (mut peer, _) = self.listener.accept().await.expect("the transport connects");
            let mut buffer = [0; 1024];
            let _ = peer.read(&mut buffer).await;
            let _ = peer.write_all(response).await;
            let _ = peer.shutdown().await;
        };
        self.runtime.block_on(async {
            let exchange = async { tokio::join!(transport.clone().send(request), receiver) };
            tokio::time::timeout(TIME_MAX, exchange)
                .await
                .expect("an exchange ends when the receiver has closed");
        });
    }
}

thread_local! {
    static BENCH: RefCell<Option<Bench>> = const { RefCell::new(None) };
}

fuzz_target!(|response: &[u8]| {
    BENCH.with_borrow_mut(|bench| bench.get_or_insert_with(Bench::new).exchange(response));
});
