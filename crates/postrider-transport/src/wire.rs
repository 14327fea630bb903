//! One HTTP/1.1 connection, driven by whoever is using it.
//!
//! hyper splits a connection into a handle that takes requests and a future that moves the bytes. The
//! usual place for that future is a task of its own, at the price of two wake-ups between tasks for
//! every request. Here it stays beside its handle, and the task that waits for the answer polls it.

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use postrider_core::time::{Clock, Sleep};
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::coop::unconstrained;
use tokio_rustls::client::TlsStream;

/// What a peer can make one connection buffer: a response head beyond this is refused. The number of
/// headers is bounded by hyper's default of 100, which saves an allocation over setting it.
const BUFFER_MAX: usize = 64 * 1024;

/// How much of a response body is kept for people to look at.
pub const SNIPPET_MAX: usize = 4 * 1024;

pub(crate) type Message = Request<Full<Bytes>>;

pub(crate) struct Wire {
    sender: SendRequest<Full<Bytes>>,
    /// Gone once the connection is closed.
    driver: Option<Connection<TokioIo<Socket>, Full<Bytes>>>,
}

/// Why there is no response.
pub(crate) enum Unanswered {
    /// Not a byte of the request was written; here it is again.
    NeverSent(Box<Message>, hyper::Error),
    /// The peer may have seen the request.
    Broken(hyper::Error),
}

/// What was read of a response body.
pub(crate) struct BodyRead {
    /// The first `SNIPPET_MAX` bytes.
    pub snippet: Bytes,
    /// Nothing of it is left on the wire.
    pub complete: bool,
}

impl Wire {
    pub async fn new(socket: Socket) -> hyper::Result<Wire> {
        let (sender, driver) = http1::Builder::new()
            .max_buf_size(BUFFER_MAX)
            .handshake(TokioIo::new(socket))
            .await?;
        Ok(Wire {
            sender,
            driver: Some(driver),
        })
    }

    /// Sends the request and waits for the head of the response.
    pub async fn request(&mut self, message: Message) -> Result<Response<Incoming>, Unanswered> {
        // The response can only become ready while the driver is polled below, so it needs no waker;
        // it must not be held back by the task's budget either, for nobody would wake it then.
        let mut response = pin!(unconstrained(self.sender.try_send_request(message)));
        poll_fn(|cx| {
            drive(&mut self.driver, cx);
            response.as_mut().poll(&mut without_waker())
        })
        .await
        .map_err(|mut unsent| match unsent.take_message() {
            Some(message) => Unanswered::NeverSent(Box::new(message), unsent.into_error()),
            None => Unanswered::Broken(unsent.into_error()),
        })
    }

    /// Reads the body until it ends, breaks, exceeds `cap` bytes or takes longer than `time`.
    pub async fn read(
        &mut self,
        mut body: Incoming,
        cap: usize,
        time: Duration,
        clock: &dyn Clock,
    ) -> BodyRead {
        let mut snippet = BytesMut::new();
        let mut read = 0;
        // Most bodies arrive with their head; only the others are worth a timer.
        let mut expiry: Option<Sleep<'_>> = None;
        let complete = poll_fn(|cx| {
            let mut driven = false;
            loop {
                match Pin::new(&mut body).poll_frame(&mut without_waker()) {
                    Poll::Ready(Some(Ok(frame))) => {
                        driven = false;
                        let Some(data) = frame.data_ref() else {
                            continue;
                        };
                        let wanted = data.len().min(SNIPPET_MAX - snippet.len());
                        snippet.extend_from_slice(&data[..wanted]);
                        read += data.len();
                        if read > cap {
                            return Poll::Ready(false);
                        }
                    }
                    Poll::Ready(Some(Err(_))) => return Poll::Ready(false),
                    Poll::Ready(None) => return Poll::Ready(true),
                    Poll::Pending if !driven => {
                        drive(&mut self.driver, cx);
                        driven = true;
                    }
                    Poll::Pending => {
                        let expiry = expiry.get_or_insert_with(|| clock.sleep_until(clock.now() + time));
                        return expiry.as_mut().poll(cx).map(|()| false);
                    }
                }
            }
        })
        .await;
        BodyRead {
            snippet: snippet.freeze(),
            complete,
        }
    }

    /// Whether the connection could take a request now, as far as is known: looks at what the peer
    /// has sent in the meantime, a goodbye for one. Forgets the task that used the connection last.
    pub fn is_idle(&mut self) -> bool {
        drive(&mut self.driver, &mut without_waker());
        self.driver.is_some() && self.sender.is_ready()
    }
}

/// Moves what bytes can be moved. The handle learns from the driver's end what became of a request.
fn drive(driver: &mut Option<Connection<TokioIo<Socket>, Full<Bytes>>>, cx: &mut Context<'_>) {
    if let Some(running) = driver
        && Pin::new(running).poll(cx).is_ready()
    {
        *driver = None;
    }
}

fn without_waker() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

/// A TCP connection, private or not.
pub(crate) enum Socket {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Socket::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Socket::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Socket::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Socket::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Socket::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Socket::Plain(stream) => stream.is_write_vectored(),
            Socket::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Socket::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Socket::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
