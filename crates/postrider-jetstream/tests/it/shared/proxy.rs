//! A connection to a server that can fail.

use crate::nats::{NatsProcess, connect};
use postrider_jetstream::connection::{JetStreamSettings, NatsConnection};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// A TCP proxy to a server that can be interrupted.
pub struct InterruptibleProxy {
    port: u16,
    whole: watch::Sender<bool>,
    _relaying: JoinSet<()>,
}

impl InterruptibleProxy {
    pub async fn to(nats: &NatsProcess) -> InterruptibleProxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let whole = watch::Sender::new(true);
        let (server, state) = (nats.port, whole.subscribe());
        let mut relaying = JoinSet::new();
        relaying.spawn(async move {
            let mut lines = JoinSet::new();
            loop {
                let (mut near, _) = listener.accept().await.unwrap();
                let mut state = state.clone();
                lines.spawn(async move {
                    let relay = async {
                        if let Ok(mut far) = TcpStream::connect(("127.0.0.1", server)).await {
                            let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
                        }
                    };
                    tokio::select! {
                        biased;
                        _ = state.wait_for(|whole| !whole) => {}
                        () = relay => {}
                    }
                });
            }
        });
        InterruptibleProxy {
            port,
            whole,
            _relaying: relaying,
        }
    }

    pub async fn connect(&self) -> NatsConnection {
        let settings = JetStreamSettings {
            urls: vec![format!("nats://127.0.0.1:{}", self.port)],
            ..JetStreamSettings::default()
        };
        connect(&settings).await
    }

    /// Stops forwarding until `mend`.
    pub fn cut(&self) {
        self.whole.send_replace(false);
    }

    pub fn mend(&self) {
        self.whole.send_replace(true);
    }
}
