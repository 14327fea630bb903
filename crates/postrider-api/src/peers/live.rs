//! The live stream of a cluster: events of all nodes as they happen.
//!
//! While a client of a node watches, that node announces so every few seconds, and the nodes that
//! receive the announcement report what happens at them. A node that attempts an event which
//! another node accepted requests the event's description from that node.

use super::{PeerResponses, Peers, gather};
use crate::Server;
use crate::events;
use crate::stream;
use bytes::{Bytes, BytesMut};
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::recorder::{EventPlace, LiveStreamLine};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{broadcast, oneshot};

/// Interval at which a watching node announces itself …
const SAY: Duration = Duration::from_secs(4);
/// Pauses between requests for an event's description: the event may be attempted before the node
/// that accepted it has recorded it.
const ASK_AGAIN: [Duration; 3] = [
    Duration::ZERO,
    Duration::from_millis(50),
    Duration::from_millis(500),
];
/// … and how long the announcement is valid.
const BELIEVE: Duration = Duration::from_secs(12);
/// Lines that are buffered for a slow watcher.
const LINES_MAX: usize = 4096;
/// Lines that are reported in one message.
const LINES_PER_PIECE: usize = 128;
/// Descriptions of other nodes' events that are remembered.
const KNOWN_MAX: usize = 16 << 10;
/// Subject of the messages with live lines.
const WHAT: &str = "live";

/// A line of the live stream as watchers read it, with the topic and subscription that it concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveLine {
    pub topic: TopicId,
    pub subscription: Option<SubscriptionId>,
    pub text: Bytes,
}

/// Live stream over all nodes.
pub(crate) struct ClusterLiveStream {
    /// Created for the first watcher: a single server does not need it.
    lines: OnceLock<broadcast::Sender<Arc<LiveLine>>>,
    state: Mutex<LiveStreamState>,
}

struct LiveStreamState {
    /// Until when other nodes watch.
    watched_until: Timestamp,
    telling: bool,
    hearing: bool,
}

impl Default for ClusterLiveStream {
    fn default() -> ClusterLiveStream {
        ClusterLiveStream {
            lines: OnceLock::new(),
            state: Mutex::new(LiveStreamState {
                watched_until: Timestamp::MIN,
                telling: false,
                hearing: false,
            }),
        }
    }
}

impl ClusterLiveStream {
    fn state(&self) -> MutexGuard<'_, LiveStreamState> {
        self.state.lock().expect("no panic holds it")
    }

    fn lines(&self) -> &broadcast::Sender<Arc<LiveLine>> {
        self.lines.get_or_init(|| broadcast::channel(LINES_MAX).0)
    }

    /// Whether a client of this node watches.
    fn is_read(&self) -> bool {
        self.lines.get().is_some_and(|lines| lines.receiver_count() > 0)
    }

    /// Handles the announcement of a watching node.
    pub fn watched(&self, server: &Arc<Server>) {
        let until = server.wall.now() + BELIEVE;
        self.state().watched_until = until;
        self.begin_telling(server);
    }

    /// Lines of all nodes from now on. Returns when all nodes that reply know that somebody
    /// watches.
    pub async fn watch(&self, server: &Arc<Server>) -> broadcast::Receiver<Arc<LiveLine>> {
        let lines = self.lines().subscribe();
        self.begin_telling(server);
        let begins = !std::mem::replace(&mut self.state().hearing, true);
        if begins && let Some(peers) = server.peers.clone() {
            let (told, knows) = oneshot::channel();
            server.streams.tasks.spawn(hear(server.clone(), peers, told));
            // Fails when the server is shutting down; no lines come then.
            let _ = knows.await;
        }
        lines
    }

    fn begin_telling(&self, server: &Arc<Server>) {
        let begins = !std::mem::replace(&mut self.state().telling, true);
        if begins && let Some(peers) = server.peers.clone() {
            // Subscribed before the task starts, so that no line from now on is missed.
            let lines = server.recordings.subscribe();
            server.streams.tasks.spawn(tell(server.clone(), peers, lines));
        }
    }

    /// Whether nobody at any node watches any more. The reporting task ends then.
    fn ends_telling(&self, now: Timestamp) -> bool {
        let mut state = self.state();
        let over = !self.is_read() && state.watched_until <= now;
        state.telling &= !over;
        over
    }

    fn ends_hearing(&self) -> bool {
        let mut state = self.state();
        let over = !self.is_read();
        state.hearing &= !over;
        over
    }
}

/// A line in a message between nodes.
#[derive(Debug, Serialize, Deserialize)]
struct LiveLineMessage {
    topic: u64,
    subscription: Option<u64>,
    text: String,
}

/// Receives the lines of other nodes while a client of this node watches.
async fn hear(server: Arc<Server>, peers: Arc<dyn Peers>, told: oneshot::Sender<()>) {
    let (clock, stop) = (server.wall.clone(), server.streams.stop.clone());
    let (mut heard, mut told) = (None, Some(told));
    loop {
        if heard.is_none() {
            heard = peers.hear(WHAT).await;
        }
        // Announced repeatedly, so that a node which joins later receives it too.
        let said = peers.ask("watch", Bytes::from_static(b"{}"));
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = said => {}
        }
        if let Some(told) = told.take() {
            // The first watcher may have disconnected.
            let _ = told.send(());
        }
        let mut again = clock.sleep_until(clock.now() + SAY);
        loop {
            let next = async {
                match &mut heard {
                    Some(heard) => heard.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = &mut again => break,
                piece = next => match piece {
                    Some(piece) => pass_on(server.live.lines(), &piece),
                    None => heard = None,
                },
            }
        }
        if server.live.ends_hearing() {
            return;
        }
    }
}

fn pass_on(lines: &broadcast::Sender<Arc<LiveLine>>, piece: &[u8]) {
    let Ok(passed) = serde_json::from_slice::<Vec<LiveLineMessage>>(piece) else {
        return;
    };
    for one in passed {
        // All watchers may have disconnected.
        let _ = lines.send(Arc::new(LiveLine {
            topic: TopicId(one.topic),
            subscription: one.subscription.map(SubscriptionId),
            text: one.text.into(),
        }));
    }
}

/// Reports what happens at this node while somebody watches at any node.
async fn tell(
    server: Arc<Server>,
    peers: Arc<dyn Peers>,
    mut lines: broadcast::Receiver<Arc<LiveStreamLine>>,
) {
    let (clock, stop) = (server.wall.clone(), server.streams.stop.clone());
    let mut known = EventDescriptionCache::default();
    loop {
        let pause = clock.sleep_until(clock.now() + SAY);
        let first = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            first = lines.recv() => first,
            () = pause => Err(RecvError::Lagged(0)),
        };
        if let Err(RecvError::Closed) = first {
            // Recording is off: ends without resetting `telling`, so that the task is not started
            // again and again.
            return;
        }
        if server.live.ends_telling(clock.now()) {
            return;
        }
        let piece = piece(first, &mut lines);
        if piece.is_empty() {
            continue;
        }
        let told = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            told = known.tell(&*peers, &*clock, &piece) => told,
        };
        pass(&server, &*peers, told).await;
    }
}

/// The lines that have arrived. Lines that were lost because this node was too slow are skipped.
fn piece(
    first: Result<Arc<LiveStreamLine>, RecvError>,
    lines: &mut broadcast::Receiver<Arc<LiveStreamLine>>,
) -> Vec<Arc<LiveStreamLine>> {
    let mut piece = Vec::new();
    let mut received = first.ok();
    loop {
        piece.extend(received.take());
        if piece.len() >= LINES_PER_PIECE {
            return piece;
        }
        match lines.try_recv() {
            Ok(line) => received = Some(line),
            Err(TryRecvError::Lagged(_)) => {}
            Err(TryRecvError::Empty | TryRecvError::Closed) => return piece,
        }
    }
}

async fn pass(server: &Server, peers: &dyn Peers, told: Vec<LiveLine>) {
    let others = server.live.state().watched_until > server.wall.now();
    if others {
        let passed = told.iter().map(|told| LiveLineMessage {
            topic: told.topic.0,
            subscription: told.subscription.map(|id| id.0),
            text: String::from_utf8_lossy(&told.text).into_owned(),
        });
        let passed: Vec<LiveLineMessage> = passed.collect();
        let body = serde_json::to_vec(&passed).expect("names are strings");
        peers.tell(WHAT, body.into()).await;
    }
    if server.live.is_read() {
        for one in told {
            // The last watcher may have disconnected meanwhile.
            let _ = server.live.lines().send(Arc::new(one));
        }
    }
}

/// Description of an event, for the node that attempts an event which another node accepted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventDescription {
    place: String,
    id: String,
    topic: u64,
    topic_name: String,
    domain_topic: Option<String>,
    event_type: String,
    subject: String,
}

/// Descriptions of the events at these positions that this node accepted.
pub async fn answer_events_at(
    server: &Arc<Server>,
    places: Vec<String>,
) -> Result<Vec<EventDescription>, String> {
    if places.len() > LINES_PER_PIECE {
        return Err(format!(
            "no more than {LINES_PER_PIECE} events may be asked for at once"
        ));
    }
    let places: Result<Vec<EventPlace>, ()> = places.iter().map(|place| place.parse()).collect();
    let places = places.map_err(|()| "a place cannot be understood")?;
    let found = events::ask(server, move |recordings| recordings.events_at(&places)).await;
    let found = found.map_err(|problem| problem.detail)?;
    let event = |story: postrider_engine::recorder::EventHistory| {
        Some(EventDescription {
            place: story.place?.to_string(),
            id: story.id,
            topic: story.topic.0,
            topic_name: story.topic_name,
            domain_topic: story.domain_topic,
            event_type: story.event_type,
            subject: story.subject,
        })
    };
    Ok(found.into_iter().flatten().filter_map(event).collect())
}

/// Descriptions of other nodes' events that were requested.
#[derive(Default)]
struct EventDescriptionCache {
    events: HashMap<EventPlace, EventDescription>,
    order: VecDeque<EventPlace>,
}

impl EventDescriptionCache {
    /// Renders lines for watchers. Lines of events whose description no node has are left out.
    async fn tell(
        &mut self,
        peers: &dyn Peers,
        clock: &dyn Clock,
        piece: &[Arc<LiveStreamLine>],
    ) -> Vec<LiveLine> {
        let mut unknown: Vec<EventPlace> = piece.iter().filter_map(|line| line.elsewhere).collect();
        unknown.sort_unstable();
        unknown.dedup();
        for pause in ASK_AGAIN {
            unknown.retain(|place| !self.events.contains_key(place));
            if unknown.is_empty() {
                break;
            }
            clock.sleep_until(clock.now() + pause).await;
            let places: Vec<String> = unknown.iter().map(EventPlace::to_string).collect();
            let heard: PeerResponses<Vec<EventDescription>> = gather(peers, "events-at", &places).await;
            for event in heard.answers.into_iter().flat_map(|(_, events)| events) {
                self.learn(event);
            }
            if !heard.missing.is_empty() {
                break;
            }
        }
        piece.iter().filter_map(|line| self.told(line)).collect()
    }

    fn learn(&mut self, event: EventDescription) {
        let Ok(place) = event.place.parse::<EventPlace>() else {
            return;
        };
        if self.events.insert(place, event).is_none() {
            self.order.push_back(place);
        }
        if self.order.len() > KNOWN_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.events.remove(&oldest);
        }
    }

    fn told(&self, line: &LiveStreamLine) -> Option<LiveLine> {
        let mut text = BytesMut::new();
        let topic = match line.elsewhere {
            None => {
                stream::write(&mut text, line);
                line.topic
            }
            Some(place) => {
                let event = self.events.get(&place)?;
                let line = LiveStreamLine {
                    id: event.id.clone(),
                    topic: TopicId(event.topic),
                    topic_name: event.topic_name.clone(),
                    domain_topic: event.domain_topic.clone(),
                    event_type: event.event_type.clone(),
                    subject: event.subject.clone(),
                    ..line.clone()
                };
                stream::write(&mut text, &line);
                line.topic
            }
        };
        Some(LiveLine {
            topic,
            subscription: line.subscription.as_ref().map(|(id, _)| *id),
            text: text.freeze(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::RawPeerReplies;
    use async_trait::async_trait;
    use postrider_core::ids::Position;
    use postrider_engine::clock::SystemClock;
    use postrider_engine::recorder::LiveStreamHappening;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use tokio::sync::mpsc;

    /// Knows one event, from the second request on.
    struct OtherNode {
        event: EventDescription,
        asked: AtomicUsize,
    }

    #[async_trait]
    impl Peers for OtherNode {
        fn name(&self) -> &str {
            "me"
        }
        fn id(&self) -> &str {
            "1"
        }
        fn is_present(&self, _: &str) -> bool {
            true
        }
        async fn ask(&self, question: &str, _: Bytes) -> RawPeerReplies {
            assert_eq!(question, "events-at");
            let known = &[&self.event][..self.asked.fetch_add(1, Relaxed).min(1)];
            let known = serde_json::to_vec(known).unwrap();
            RawPeerReplies {
                answers: vec![("other".into(), Ok(known.into()))],
                missing: Vec::new(),
            }
        }
        async fn ask_one(&self, _: &str, _: &str, _: Bytes, _: Duration) -> Result<Bytes, String> {
            Err("nobody".into())
        }
        async fn tell(&self, _: &str, _: Bytes) {}
        async fn hear(&self, _: &str) -> Option<mpsc::Receiver<Bytes>> {
            None
        }
    }

    fn line(elsewhere: Option<u64>) -> Arc<LiveStreamLine> {
        Arc::new(LiveStreamLine {
            what: LiveStreamHappening::Accepted { matched: 1 },
            at: Timestamp::from_secs(1),
            id: if elsewhere.is_some() { "" } else { "own" }.into(),
            topic: TopicId(1),
            topic_name: "mine".into(),
            domain_topic: None,
            event_type: "T".into(),
            subject: "s".into(),
            subscription: None,
            elsewhere: elsewhere.map(|first| EventPlace {
                first: Position(first),
                index: 3,
            }),
        })
    }

    #[tokio::test]
    async fn events_of_other_nodes_are_told_by_their_names() {
        let event = EventDescription {
            place: "7:3".into(),
            id: "theirs".into(),
            topic: 9,
            topic_name: "there".into(),
            domain_topic: None,
            event_type: "U".into(),
            subject: "t".into(),
        };
        let mut known = EventDescriptionCache::default();
        let other = OtherNode {
            event,
            asked: AtomicUsize::new(0),
        };
        let piece = [line(None), line(Some(7)), line(Some(8))];
        let told = known.tell(&other, &SystemClock, &piece).await;
        assert_eq!(other.asked.load(Relaxed), 3, "it does not ask for ever");
        let texts: Vec<&str> = told
            .iter()
            .map(|told| std::str::from_utf8(&told.text).unwrap())
            .collect();
        assert_eq!(texts.len(), 2, "nobody knows the third: {texts:?}");
        assert!(
            texts[0].contains(r#""id":"own""#) && told[0].topic == TopicId(1),
            "{texts:?}"
        );
        assert!(
            texts[1].contains(r#""id":"theirs""#) && told[1].topic == TopicId(9),
            "{texts:?}"
        );
        assert!(texts[1].contains(r#""topic":"there""#), "{texts:?}");
    }

    #[test]
    fn what_cannot_be_understood_is_passed_over() {
        let (lines, mut read) = broadcast::channel(4);
        pass_on(&lines, b"nonsense");
        pass_on(&lines, br#"[{"topic":3,"subscription":4,"text":"event: x\n\n"}]"#);
        let told = read.try_recv().unwrap();
        assert_eq!(
            (told.topic, told.subscription),
            (TopicId(3), Some(SubscriptionId(4)))
        );
        assert!(read.try_recv().is_err());
    }
}
