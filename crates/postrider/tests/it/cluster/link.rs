//! A link between two processes on this machine that a test can cut.

use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// State of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    Clear,
    /// Data is held back in both directions without an error, and arrives late if both sides still
    /// exist then.
    Lost,
    /// Data from the connecting side is held back; the other direction works.
    LostThere,
    /// Data to the connecting side is held back; the other direction works.
    LostBack,
    /// Connections are reset, new ones too.
    Cut,
}

impl LinkState {
    fn passes_there(self) -> bool {
        matches!(self, LinkState::Clear | LinkState::LostBack)
    }

    fn passes_back(self) -> bool {
        matches!(self, LinkState::Clear | LinkState::LostThere)
    }
}

/// Runtime on which links run.
pub struct LinkRuntime(Option<Runtime>);

impl LinkRuntime {
    pub fn new() -> LinkRuntime {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build();
        LinkRuntime(Some(runtime.expect("a runtime")))
    }

    /// Opens a link to that address, on a free port.
    pub fn link(&self, to: SocketAddr) -> CuttableLink {
        let runtime = self.0.as_ref().expect("it is there until it is dropped");
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"));
        let listener = listener.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let (weather, known) = watch::channel(LinkState::Clear);
        runtime.spawn(accept(listener, to, known));
        CuttableLink { address, weather }
    }
}

impl Drop for LinkRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Dropping a link closes its connections.
pub struct CuttableLink {
    pub address: SocketAddr,
    weather: watch::Sender<LinkState>,
}

impl CuttableLink {
    pub fn set(&self, weather: LinkState) {
        self.weather.send_replace(weather);
    }
}

async fn accept(listener: TcpListener, to: SocketAddr, weather: watch::Receiver<LinkState>) {
    let mut end = weather.clone();
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((near, _)) = accepted {
                    connections.spawn(connection(near, to, weather.clone()));
                }
            }
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            gone = end.wait_for(|_| false) => {
                assert!(gone.is_err(), "only the link's end is waited for");
                return;
            }
        }
    }
}

async fn connection(near: TcpStream, to: SocketAddr, weather: watch::Receiver<LinkState>) {
    // However the connection ends, the other side sees a reset.
    let _ = near.set_zero_linger();
    let _ = near.set_nodelay(true);
    let mut cut = weather.clone();
    tokio::select! {
        biased;
        _ = cut.wait_for(|weather| *weather == LinkState::Cut) => {}
        () = carry(near, to, weather) => {}
    }
}

async fn carry(near: TcpStream, to: SocketAddr, mut weather: watch::Receiver<LinkState>) {
    if weather
        .wait_for(|weather| *weather == LinkState::Clear)
        .await
        .is_err()
    {
        return;
    }
    let Ok(far) = TcpStream::connect(to).await else {
        return;
    };
    let _ = far.set_zero_linger();
    let _ = far.set_nodelay(true);
    let (near_in, near_out) = near.into_split();
    let (far_in, far_out) = far.into_split();
    tokio::join!(
        pass(near_in, far_out, weather.clone(), LinkState::passes_there),
        pass(far_in, near_out, weather, LinkState::passes_back),
    );
}

async fn pass(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut weather: watch::Receiver<LinkState>,
    passes: fn(LinkState) -> bool,
) {
    let mut buffer = vec![0; 16 << 10];
    loop {
        let read = from.read(&mut buffer).await.unwrap_or(0);
        // The end of the stream is held back as well.
        if weather.wait_for(|weather| passes(*weather)).await.is_err() {
            return;
        }
        if read == 0 || to.write_all(&buffer[..read]).await.is_err() {
            let _ = to.shutdown().await;
            return;
        }
    }
}
