//! A single HTTP/1.1 connection, driven by the task that uses it.
//!
//! Written by hand because delivering is most of the server's work: a request goes out in one
//! write, head and body from where they are in memory, and its answer is read in the same task. A
//! general client builds message objects and passes them between tasks: with hyper the server took
//! 52 instead of 45 µs of CPU per delivered event (one event per request). The connection
//! implements only what a delivery needs, and ends on anything unusual that a peer does.

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use postrider_core::body::DeliveryBody;
use postrider_core::time::{Clock, Sleep};
use postrider_engine::deliver::ChargedBody;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// The most bytes that a peer can make one connection buffer: a longer response head is refused.
/// Preceding interim responses (1xx) count too.
const BUFFER_MAX: usize = 64 * 1024;
/// The most interim responses to one request.
const INTERIM_MAX: usize = 32;
/// Most answers have few headers; space for more is allocated only when needed.
const HEADERS_FEW: usize = 24;
/// The most headers of a response.
const HEADERS_MAX: usize = 100;
/// The greatest length of a chunk-size line, and of each trailer.
const LINE_MAX: usize = 4 * 1024;
/// The greatest length of all chunk-size lines, with extensions, and trailers of one body. They are
/// not part of the body, so that the body limit does not bound them.
const FRAMING_MAX: usize = 64 * 1024;
/// The size of a read. A shorter result means that nothing more has arrived.
const READ_BYTES: usize = 8 * 1024;

/// The most pieces of a request in one write.
const SLICES_MAX: usize = 16;

/// The part of a response body that is kept for people to look at.
pub const SNIPPET_MAX: usize = 4 * 1024;

/// A request to be sent.
pub(crate) struct OutgoingMessage<'a> {
    pub method: &'a Method,
    /// Path and query.
    pub path: &'a str,
    pub authority: &'a str,
    pub headers: &'a HeaderMap,
    pub more: &'a [(HeaderName, HeaderValue)],
    /// Sent unless the headers contain one.
    pub user_agent: Option<&'a HeaderValue>,
}

/// Why there is no response.
#[derive(Debug)]
pub(crate) enum NoResponse {
    /// No byte of the request was written.
    NeverSent(io::Error),
    /// The peer may have seen the request.
    Broken(io::Error),
}

/// The head of a response.
#[derive(Debug)]
pub(crate) struct ResponseHead {
    pub status: u16,
    pub headers: HeaderMap,
    framing: BodyFraming,
    /// Whether the connection can be used again once the body has been read.
    keep: bool,
}

/// How the end of a body is determined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyFraming {
    Length(u64),
    Chunked,
    UntilClosed,
}

/// The result of reading a response body.
pub(crate) struct BodyRead {
    /// The first `SNIPPET_MAX` bytes.
    pub snippet: Bytes,
    /// Whether the connection can be used again: nothing of the answer is left on the wire.
    pub reusable: bool,
}

/// The progress of reading one response head.
#[derive(Default)]
struct HeadProgress {
    /// Interim responses skipped so far, and their bytes.
    interim: usize,
    interim_bytes: usize,
    /// Bytes of the input that are known not to contain a complete head.
    parsed: usize,
}

pub(crate) struct HttpConnection {
    socket: PeerSocket,
    /// Bytes that have been read and not consumed.
    input: BytesMut,
    /// The head of the request that is being sent.
    output: Vec<u8>,
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "connection closed before an answer")
}

impl HttpConnection {
    pub fn new(socket: PeerSocket) -> HttpConnection {
        HttpConnection {
            socket,
            input: BytesMut::new(),
            output: Vec::new(),
        }
    }

    /// Sends the request and waits for the head of the response. Drops the body once it is sent.
    pub async fn request(
        &mut self,
        message: &OutgoingMessage<'_>,
        body: &mut ChargedBody,
    ) -> Result<ResponseHead, NoResponse> {
        message.write_head(body.bytes.len(), &mut self.output);
        let total = self.output.len() + body.bytes.len();
        let mut sent = 0;
        let mut progress = HeadProgress::default();
        poll_fn(|cx| {
            loop {
                match self.poll_send(cx, &body.bytes, &mut sent) {
                    Poll::Ready(Ok(())) => *body = ChargedBody::default(),
                    // A peer may refuse a long body before it has read all of it, and close.
                    Poll::Ready(Err(error)) if sent == 0 => {
                        return Poll::Ready(Err(NoResponse::NeverSent(error)));
                    }
                    Poll::Ready(Err(error)) => match self.early_answer(cx, &mut progress) {
                        Some(head) => return Poll::Ready(Ok(head)),
                        None => return Poll::Ready(Err(NoResponse::Broken(error))),
                    },
                    Poll::Pending => {}
                }
                let all_sent = sent == total;
                match self.take_head(message.method, &mut progress) {
                    Err(error) => return Poll::Ready(Err(NoResponse::Broken(error))),
                    Ok(Some(mut head)) => {
                        head.keep &= all_sent;
                        return Poll::Ready(Ok(head));
                    }
                    Ok(None) => {}
                }
                match self.poll_fill(cx) {
                    Poll::Ready(Ok(0)) => return Poll::Ready(Err(NoResponse::Broken(closed()))),
                    Poll::Ready(Ok(_)) => {}
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(NoResponse::Broken(error))),
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await
    }

    /// Writes the rest of the request after the first `sent` bytes.
    fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        body: &DeliveryBody,
        sent: &mut usize,
    ) -> Poll<io::Result<()>> {
        while *sent < self.output.len() + body.len() {
            let (slices, filled) = unsent(&self.output, body, *sent);
            match Pin::new(&mut self.socket).poll_write_vectored(cx, &slices[..filled]) {
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(written)) => *sent += written,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
        // TLS buffers records until it is flushed.
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    /// The answer of a peer that has stopped reading, if one has come.
    fn early_answer(&mut self, cx: &mut Context<'_>, progress: &mut HeadProgress) -> Option<ResponseHead> {
        while self.input.len() <= BUFFER_MAX
            && let Poll::Ready(Ok(1..)) = self.poll_fill(cx)
        {}
        let mut head = self.take_head(&Method::POST, progress).ok()??;
        head.keep = false;
        Some(head)
    }

    /// Reads more input. Zero bytes mean that the peer has closed.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let filled = self.input.len();
        self.input.resize(filled + READ_BYTES, 0);
        let mut buffer = ReadBuf::new(&mut self.input[filled..]);
        let read = Pin::new(&mut self.socket).poll_read(cx, &mut buffer);
        let got = buffer.filled().len();
        self.input.truncate(filled + got);
        read.map_ok(|()| got)
    }

    /// Consumes a complete response head, skipping interim ones.
    fn take_head(
        &mut self,
        method: &Method,
        progress: &mut HeadProgress,
    ) -> io::Result<Option<ResponseHead>> {
        loop {
            let fresh = &self.input[progress.parsed..];
            if fresh.is_empty() {
                return Ok(None);
            }
            // Reparsed only when a line has ended: parsing for every byte that trickles in would be
            // quadratic.
            let is_worth_parsing = progress.parsed == 0 || fresh.contains(&b'\n');
            progress.parsed = self.input.len();
            let parsed = match is_worth_parsing {
                true => parse_head(&self.input, method)?,
                false => None,
            };
            let Some((used, head)) = parsed else {
                if progress.interim_bytes + self.input.len() > BUFFER_MAX {
                    return Err(invalid("response head too large"));
                }
                return Ok(None);
            };
            self.input.advance(used);
            progress.parsed = 0;
            // 101 is final: the peer switches to another protocol.
            if (100..200).contains(&head.status) && head.status != 101 {
                progress.interim += 1;
                progress.interim_bytes += used;
                if progress.interim > INTERIM_MAX || progress.interim_bytes > BUFFER_MAX {
                    return Err(invalid("too many interim responses (1xx) before the answer"));
                }
                continue;
            }
            return Ok(Some(head));
        }
    }

    /// Reads the body until it ends, breaks, exceeds `cap` bytes or takes longer than `time`.
    pub async fn read(
        &mut self,
        head: &ResponseHead,
        cap: usize,
        time: Duration,
        clock: &dyn Clock,
    ) -> BodyRead {
        let mut body = BodySnippet {
            snippet: BytesMut::new(),
            read: 0,
            cap,
        };
        let mut decoder = BodyDecoder::new(head.framing);
        // Most bodies arrive with their head; only the others need a timer.
        let mut expiry: Option<Sleep<'_>> = None;
        let complete = poll_fn(|cx| {
            loop {
                match decoder.take(&mut self.input, &mut body) {
                    DecodeProgress::End => return Poll::Ready(true),
                    DecodeProgress::Bad => return Poll::Ready(false),
                    DecodeProgress::More => {}
                }
                match self.poll_fill(cx) {
                    Poll::Ready(Ok(0)) => return Poll::Ready(head.framing == BodyFraming::UntilClosed),
                    Poll::Ready(Ok(_)) => {}
                    Poll::Ready(Err(_)) => return Poll::Ready(false),
                    Poll::Pending => {
                        let expiry = expiry.get_or_insert_with(|| clock.sleep_until(clock.now() + time));
                        return expiry.as_mut().poll(cx).map(|()| false);
                    }
                }
            }
        })
        .await;
        BodyRead {
            snippet: body.snippet.freeze(),
            reusable: complete && head.keep && self.input.is_empty(),
        }
    }

    /// Whether the connection could take a request now, as far as is known: checks whether the peer
    /// has sent anything in the meantime, such as a close. Forgets the waker of the task that used
    /// the connection last.
    pub fn is_idle(&mut self) -> bool {
        self.poll_fill(&mut Context::from_waker(Waker::noop()))
            .is_pending()
    }
}

/// The first unsent pieces of a request, and their number.
fn unsent<'a>(head: &'a [u8], body: &'a DeliveryBody, sent: usize) -> ([IoSlice<'a>; SLICES_MAX], usize) {
    let mut slices = [IoSlice::new(&[]); SLICES_MAX];
    let mut filled = 0;
    let mut skip = sent;
    for piece in std::iter::once(head).chain(body.pieces().map(|piece| &piece[..])) {
        let skipped = skip.min(piece.len());
        skip -= skipped;
        if skipped < piece.len() {
            slices[filled] = IoSlice::new(&piece[skipped..]);
            filled += 1;
            if filled == SLICES_MAX {
                break;
            }
        }
    }
    (slices, filled)
}

impl OutgoingMessage<'_> {
    fn write_head(&self, body_len: usize, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(self.method.as_str().as_bytes());
        out.push(b' ');
        if !self.path.starts_with('/') {
            out.push(b'/');
        }
        out.extend_from_slice(self.path.as_bytes());
        out.extend_from_slice(b" HTTP/1.1\r\n");
        let mut agent = self.user_agent;
        let more = self.more.iter().map(|(name, value)| (name, value));
        for (name, value) in self.headers.iter().chain(more) {
            // Framing headers are set here only: one that contradicts the body would smuggle a
            // second request.
            if name == HOST || name == CONTENT_LENGTH || name == TRANSFER_ENCODING {
                continue;
            }
            if name == http::header::USER_AGENT {
                agent = None;
            }
            write_header(out, name.as_str(), value.as_bytes());
        }
        if let Some(agent) = agent {
            write_header(out, "user-agent", agent.as_bytes());
        }
        write_header(out, "host", self.authority.as_bytes());
        let owes_length = [Method::POST, Method::PUT, Method::PATCH].contains(self.method);
        if body_len > 0 || owes_length {
            write_header(out, "content-length", body_len.to_string().as_bytes());
        }
        out.extend_from_slice(b"\r\n");
    }
}

fn write_header(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

/// A response head and its length, if it has arrived completely.
fn parse_head(input: &[u8], method: &Method) -> io::Result<Option<(usize, ResponseHead)>> {
    let mut few = [httparse::EMPTY_HEADER; HEADERS_FEW];
    let mut response = httparse::Response::new(&mut few);
    match response.parse(input) {
        Ok(httparse::Status::Complete(used)) => Ok(Some((used, head(&response, method)?))),
        Ok(httparse::Status::Partial) => Ok(None),
        Err(httparse::Error::TooManyHeaders) => {
            let mut many = [httparse::EMPTY_HEADER; HEADERS_MAX];
            let mut response = httparse::Response::new(&mut many);
            match response.parse(input) {
                Ok(httparse::Status::Complete(used)) => Ok(Some((used, head(&response, method)?))),
                Ok(httparse::Status::Partial) => Ok(None),
                Err(_) => Err(invalid("the answer has too many headers or is not HTTP")),
            }
        }
        Err(_) => Err(invalid("the answer is not HTTP")),
    }
}

fn head(response: &httparse::Response<'_, '_>, method: &Method) -> io::Result<ResponseHead> {
    let status = response.code.unwrap_or(0);
    let mut headers = HeaderMap::with_capacity(response.headers.len());
    for header in response.headers.iter() {
        let name = HeaderName::from_bytes(header.name.as_bytes());
        let value = HeaderValue::from_bytes(header.value);
        if let (Ok(name), Ok(value)) = (name, value) {
            headers.append(name, value);
        }
    }
    let says = |name: HeaderName, word: &str| {
        headers.get_all(name).iter().any(|value| {
            let mut words = value.to_str().unwrap_or("").split(',');
            words.any(|w| w.trim().eq_ignore_ascii_case(word))
        })
    };
    let new = response.version == Some(1);
    let mut keep = if new {
        !says(CONNECTION, "close")
    } else {
        says(CONNECTION, "keep-alive")
    };
    let length = length(&headers)?;
    let bodiless = method == Method::HEAD || matches!(status, 100..200 | 204 | 304);
    let framing = if bodiless {
        BodyFraming::Length(0)
    } else if headers.contains_key(TRANSFER_ENCODING) {
        // With both headers, one of them is wrong.
        keep &= length.is_none();
        if says(TRANSFER_ENCODING, "chunked") {
            BodyFraming::Chunked
        } else {
            BodyFraming::UntilClosed
        }
    } else {
        length.map_or(BodyFraming::UntilClosed, BodyFraming::Length)
    };
    keep &= framing != BodyFraming::UntilClosed && status != 101;
    Ok(ResponseHead {
        status,
        headers,
        framing,
        keep,
    })
}

/// The value of `content-length`; several different ones are refused.
fn length(headers: &HeaderMap) -> io::Result<Option<u64>> {
    let mut found = None;
    for value in headers.get_all(CONTENT_LENGTH) {
        for part in value.to_str().unwrap_or("").split(',') {
            let digits = part.trim();
            let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
            let length = plain.then(|| digits.parse().ok()).flatten();
            let length: u64 = length.ok_or_else(|| invalid("the answer's content-length is not a number"))?;
            if found.is_some_and(|known| known != length) {
                return Err(invalid("the answer has two lengths"));
            }
            found = Some(length);
        }
    }
    Ok(found)
}

/// The part of a response body that is kept.
struct BodySnippet {
    snippet: BytesMut,
    read: usize,
    cap: usize,
}

impl BodySnippet {
    /// False when the body exceeds the limit.
    fn push(&mut self, data: &[u8]) -> bool {
        let wanted = data.len().min(SNIPPET_MAX - self.snippet.len());
        self.snippet.extend_from_slice(&data[..wanted]);
        self.read += data.len();
        self.read <= self.cap
    }
}

/// The decoder's position in a body.
struct BodyDecoder {
    state: DecoderState,
    /// Bytes of chunk-size lines and trailers so far.
    framing: usize,
    trailers: usize,
}

enum DecoderState {
    /// The number of data bytes left; the flag decides what follows them.
    Data {
        left: u64,
        chunked: bool,
    },
    ChunkSize,
    ChunkEnd,
    Trailers,
    UntilClosed,
}

enum DecodeProgress {
    More,
    End,
    Bad,
}

impl BodyDecoder {
    fn new(framing: BodyFraming) -> BodyDecoder {
        let state = match framing {
            BodyFraming::Length(left) => DecoderState::Data { left, chunked: false },
            BodyFraming::Chunked => DecoderState::ChunkSize,
            BodyFraming::UntilClosed => DecoderState::UntilClosed,
        };
        BodyDecoder {
            state,
            framing: 0,
            trailers: 0,
        }
    }

    /// Counts a line of framing. False when the peer has sent too much of it.
    fn charge(&mut self, line: &[u8]) -> bool {
        self.framing += line.len() + 2;
        self.framing <= FRAMING_MAX
    }

    /// Decodes the input that has arrived.
    fn take(&mut self, input: &mut BytesMut, body: &mut BodySnippet) -> DecodeProgress {
        loop {
            match &mut self.state {
                DecoderState::Data { left, chunked } => {
                    let now = (*left).min(input.len() as u64) as usize;
                    if !body.push(&input[..now]) {
                        return DecodeProgress::Bad;
                    }
                    input.advance(now);
                    *left -= now as u64;
                    match (*left, *chunked) {
                        (0, false) => return DecodeProgress::End,
                        (0, true) => self.state = DecoderState::ChunkEnd,
                        _ => return DecodeProgress::More,
                    }
                }
                DecoderState::UntilClosed => {
                    let good = body.push(input);
                    input.clear();
                    return if good {
                        DecodeProgress::More
                    } else {
                        DecodeProgress::Bad
                    };
                }
                DecoderState::ChunkSize => match take_line(input) {
                    FramingLine::Partial => return DecodeProgress::More,
                    FramingLine::TooLong => return DecodeProgress::Bad,
                    FramingLine::Whole(line) => match chunk_size(&line).filter(|_| self.charge(&line)) {
                        None => return DecodeProgress::Bad,
                        Some(0) => self.state = DecoderState::Trailers,
                        Some(left) => self.state = DecoderState::Data { left, chunked: true },
                    },
                },
                DecoderState::ChunkEnd => match take_line(input) {
                    FramingLine::Partial => return DecodeProgress::More,
                    FramingLine::Whole(line) if line.is_empty() => self.state = DecoderState::ChunkSize,
                    _ => return DecodeProgress::Bad,
                },
                DecoderState::Trailers => match take_line(input) {
                    FramingLine::Partial => return DecodeProgress::More,
                    FramingLine::TooLong => return DecodeProgress::Bad,
                    FramingLine::Whole(line) if line.is_empty() => return DecodeProgress::End,
                    FramingLine::Whole(line) => {
                        self.trailers += 1;
                        if self.trailers > HEADERS_MAX || !self.charge(&line) {
                            return DecodeProgress::Bad;
                        }
                    }
                },
            }
        }
    }
}

enum FramingLine {
    Whole(BytesMut),
    Partial,
    TooLong,
}

/// A line without its line end.
fn take_line(input: &mut BytesMut) -> FramingLine {
    match input.iter().position(|b| *b == b'\n') {
        Some(end) if end <= LINE_MAX => {
            let mut line = input.split_to(end + 1);
            line.truncate(end);
            if line.last() == Some(&b'\r') {
                line.truncate(end - 1);
            }
            FramingLine::Whole(line)
        }
        None if input.len() <= LINE_MAX => FramingLine::Partial,
        _ => FramingLine::TooLong,
    }
}

fn chunk_size(line: &[u8]) -> Option<u64> {
    let digits = line.split(|b| *b == b';').next()?.trim_ascii();
    let text = std::str::from_utf8(digits).ok()?;
    let hex = !text.is_empty() && text.len() <= 15 && text.bytes().all(|b| b.is_ascii_hexdigit());
    hex.then(|| u64::from_str_radix(text, 16).ok())?
}

/// A TCP connection, with or without TLS.
pub enum PeerSocket {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl AsyncRead for PeerSocket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            PeerSocket::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            PeerSocket::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for PeerSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            PeerSocket::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            PeerSocket::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            PeerSocket::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            PeerSocket::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            PeerSocket::Plain(stream) => Pin::new(stream).poll_flush(cx),
            PeerSocket::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            PeerSocket::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            PeerSocket::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes an answer in two pieces, cut at every position, and returns the results.
    fn decode(answer: &str) -> Vec<(u16, String, bool)> {
        let mut seen = Vec::new();
        for cut in 0..=answer.len() {
            let mut input = BytesMut::new();
            let mut found = None;
            let mut decoder = None;
            let mut body = BodySnippet {
                snippet: BytesMut::new(),
                read: 0,
                cap: 1000,
            };
            let mut ended = false;
            for piece in [&answer[..cut], &answer[cut..]] {
                input.extend_from_slice(piece.as_bytes());
                if found.is_none()
                    && let Ok(Some((used, head))) = parse_head(&input, &Method::POST)
                {
                    input.advance(used);
                    decoder = Some(BodyDecoder::new(head.framing));
                    found = Some(head);
                }
                if let Some(decoder) = &mut decoder
                    && !ended
                {
                    ended = matches!(decoder.take(&mut input, &mut body), DecodeProgress::End);
                }
            }
            let head = found.expect("a whole head");
            let text = String::from_utf8(body.snippet.to_vec()).unwrap();
            seen.push((head.status, text, ended && head.keep && input.is_empty()));
        }
        seen.dedup();
        seen
    }

    #[test]
    fn answers_are_read_the_same_however_they_are_cut() {
        let check = |answer: &str, status: u16, body: &str, reusable: bool| {
            assert_eq!(
                decode(answer),
                [(status, body.to_owned(), reusable)],
                "{answer:?}"
            );
        };
        check(
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
            200,
            "hello",
            true,
        );
        check("HTTP/1.1 204 No Content\r\n\r\n", 204, "", true);
        check("HTTP/1.1 200 OK\r\n\r\nhello", 200, "hello", false);
        check("HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", 200, "hi", false);
        check(
            "HTTP/1.1 200 OK\r\nconnection: Close\r\ncontent-length: 2\r\n\r\nhi",
            200,
            "hi",
            false,
        );
        let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nt: v\r\n\r\n";
        check(chunked, 200, "abc0123456789", true);
        check(
            &chunked.replace("\r\n\r\n3", "\r\ncontent-length: 3\r\n\r\n3"),
            200,
            "abc0123456789",
            false,
        );
        // Bytes after the answer belong to no request.
        check("HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab", 200, "a", false);
    }

    #[test]
    fn contradictions_are_refused() {
        for answer in [
            "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: +1\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999999\r\n\r\n",
            "SMTP ready\r\n\r\n",
        ] {
            assert!(
                parse_head(answer.as_bytes(), &Method::POST).is_err(),
                "{answer:?}"
            );
        }
        for line in ["", "x", "-1", "+1", "1 1", "1000000000000000"] {
            assert_eq!(chunk_size(line.as_bytes()), None, "{line:?}");
        }
        assert_eq!(chunk_size(b" 1f ;ext"), Some(31));
    }
}
