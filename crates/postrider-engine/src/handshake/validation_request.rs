//! The request of a handshake, and the record of the reply.

use super::HandshakeRules;
use crate::attempt::fixed_headers;
use crate::deliver::{DeliveryReply, DeliveryRequest};
use crate::directory::TopicEntry;
use crate::masking::SentSecrets;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, ORIGIN};
use http::{Method, Uri};
use postrider_core::event::EventSchema;
use postrider_core::handshake::{ValidationQuestion, ValidationReply, method};
use postrider_core::json::write_string;
use postrider_core::subscription::{Destination, Subscription};
use postrider_core::time::Timestamp;
use postrider_store::{Handshake, HandshakeResponse};
use std::sync::Arc;

/// The part of a body that is kept for people to look at.
const BODY_KEPT_MAX: usize = 4096;
/// Headers of an answer that are kept, and the longest value of each.
const HEADERS_KEPT_MAX: usize = 64;
const HEADER_KEPT_MAX: usize = 1024;
const HIDDEN: &str = "(hidden)";

pub(super) const EVENT_TYPE: HeaderName = HeaderName::from_static("aeg-event-type");
pub(super) const DELIVERY_COUNT: HeaderName = HeaderName::from_static("aeg-delivery-count");
pub(super) const DATA_VERSION: HeaderName = HeaderName::from_static("aeg-data-version");
const METADATA_VERSION: HeaderName = HeaderName::from_static("aeg-metadata-version");
const SUBSCRIPTION_NAME: HeaderName = HeaderName::from_static("aeg-subscription-name");
const REQUEST_ORIGIN: HeaderName = HeaderName::from_static("webhook-request-origin");
const REQUEST_CALLBACK: HeaderName = HeaderName::from_static("webhook-request-callback");
const REQUEST_RATE: HeaderName = HeaderName::from_static("webhook-request-rate");

/// The URL that may be visited instead of answering.
pub(super) fn callback(
    base: &str,
    name: &str,
    operation: &str,
    begun: Timestamp,
    api_version: &str,
    token: &str,
) -> String {
    let base = base.trim_end_matches('/');
    let name: String = name
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || "-_.~".contains(*c))
        .collect();
    format!(
        "{base}/eventsubscriptions/{name}/validate?id={operation}&t={begun}&apiVersion={api_version}&token={token}"
    )
}

pub(super) fn is_options(handshake: &Handshake) -> bool {
    handshake.subscription.delivery_schema == EventSchema::CloudEvent
}

pub(super) fn web_hook_url(subscription: &Subscription) -> Option<Arc<Uri>> {
    match &subscription.destination {
        Destination::WebHook(hook) => hook.url.expose().parse().ok().map(Arc::new),
        _ => None,
    }
}

/// The webhook's URL without its query, which may hold a secret.
pub(super) fn without_query(subscription: &Subscription) -> String {
    match &subscription.destination {
        Destination::WebHook(hook) => {
            let url = hook.url.expose();
            let end = url.find(['?', '#']).unwrap_or(url.len());
            url[..end].to_owned()
        }
        _ => String::new(),
    }
}

pub(super) fn asked<'a>(
    handshake: &'a Handshake,
    rules: &'a HandshakeRules,
    tries: u32,
) -> ValidationQuestion<'a> {
    ValidationQuestion {
        delivery: handshake.subscription.delivery_schema,
        code: &handshake.code,
        origin: &rules.origin,
        manual: handshake.callback.is_some(),
        tries,
    }
}

/// The handshake request; none if the URL is not valid.
pub(super) fn request(
    handshake: &Handshake,
    topic: &TopicEntry,
    rules: &HandshakeRules,
    event_id: &str,
    now: Timestamp,
) -> Option<DeliveryRequest> {
    let subscription = &handshake.subscription;
    let url = web_hook_url(subscription)?;
    let delivery = subscription.delivery_schema;
    let (mut headers, _) = fixed_headers(subscription, delivery, delivery != EventSchema::CloudEvent);
    let mut body = Vec::new();
    if delivery == EventSchema::CloudEvent {
        for absent in [
            CONTENT_TYPE,
            EVENT_TYPE,
            METADATA_VERSION,
            SUBSCRIPTION_NAME,
            ORIGIN,
        ] {
            headers.remove(absent);
        }
        put(&mut headers, REQUEST_ORIGIN, &rules.origin);
        if let Some(callback) = &handshake.callback {
            put(&mut headers, REQUEST_CALLBACK, callback.expose());
        }
        put(&mut headers, REQUEST_RATE, &rules.rate.to_string());
    } else {
        headers.insert(EVENT_TYPE, HeaderValue::from_static("SubscriptionValidation"));
        headers.insert(DELIVERY_COUNT, HeaderValue::from_static("0"));
        headers.insert(DATA_VERSION, HeaderValue::from_static("1"));
        let mut data = vec![("validationCode", handshake.code.as_str())];
        if let Some(callback) = &handshake.callback {
            data.push(("validationUrl", callback.expose()));
        }
        let kind = "Microsoft.EventGrid.SubscriptionValidationEvent";
        body = event_grid_event(event_id, &topic.full_id, kind, now, &data);
    }
    Some(DeliveryRequest {
        method: Method::from_bytes(method(delivery).as_bytes()).expect("it is a method"),
        url,
        headers: Arc::new(headers),
        more: Vec::new(),
        body: body.into(),
        guard: None,
    })
}

fn put(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

/// The body of one Event Grid event from the service itself: an array.
pub(super) fn event_grid_event(
    id: &str,
    topic: &str,
    kind: &str,
    time: Timestamp,
    data: &[(&str, &str)],
) -> Vec<u8> {
    let mut out = b"[".to_vec();
    let members = [
        ("id", id),
        ("topic", topic),
        ("subject", ""),
        ("eventType", kind),
        ("eventTime", &time.to_string()),
        ("metadataVersion", "1"),
        ("dataVersion", "1"),
    ];
    object(&mut out, &members, data);
    out.push(b']');
    out
}

/// The body of one CloudEvent from the service itself.
pub(super) fn cloud_event(
    id: &str,
    source: &str,
    kind: &str,
    time: Timestamp,
    data: &[(&str, &str)],
) -> Vec<u8> {
    let mut out = Vec::new();
    let members = [
        ("specversion", "1.0"),
        ("id", id),
        ("source", source),
        ("type", kind),
        ("time", &time.to_string()),
        ("datacontenttype", "application/json"),
    ];
    object(&mut out, &members, data);
    out
}

fn object(out: &mut Vec<u8>, members: &[(&str, &str)], data: &[(&str, &str)]) {
    let member = |out: &mut Vec<u8>, first: bool, (name, value): &(&str, &str)| {
        if !first {
            out.push(b',');
        }
        write_string(name, out);
        out.push(b':');
        write_string(value, out);
    };
    out.push(b'{');
    for (i, one) in members.iter().enumerate() {
        member(out, i == 0, one);
    }
    out.extend_from_slice(br#","data":{"#);
    for (i, one) in data.iter().enumerate() {
        member(out, i == 0, one);
    }
    out.extend_from_slice(b"}}");
}

/// A reply in the form that the handshake rules need.
pub(super) fn heard(reply: Option<&DeliveryReply>) -> ValidationReply<'_> {
    match reply {
        None => ValidationReply::TimedOut,
        Some(DeliveryReply::Failed(failure)) => ValidationReply::Failed(&failure.detail),
        Some(DeliveryReply::Answered(answer)) => {
            let header = |name: &str| answer.headers.get(name).and_then(|value| value.to_str().ok());
            ValidationReply::Answer {
                status: answer.status,
                allowed_origin: header("webhook-allowed-origin"),
                allowed_rate: header("webhook-allowed-rate"),
                body: &answer.body,
            }
        }
    }
}

/// The headers of a request with secrets hidden.
pub(super) fn redacted_headers(request: &DeliveryRequest) -> Vec<(String, String)> {
    let own = request.more.iter().map(|(name, value)| (name, value));
    let shown = request.headers.iter().chain(own).map(|(name, value)| {
        let text = match value.to_str() {
            _ if value.is_sensitive() || is_secret(name) => HIDDEN.to_owned(),
            // The query of the callback URL carries the token.
            Ok(url) if *name == REQUEST_CALLBACK => url.split('?').next().unwrap_or_default().to_owned(),
            Ok(text) => text.to_owned(),
            Err(_) => HIDDEN.to_owned(),
        };
        (name.to_string(), text)
    });
    shown.collect()
}

/// The reply with secrets hidden: a webhook may echo the request.
pub(super) fn received(reply: Option<&DeliveryReply>, handshake: &Handshake) -> HandshakeResponse {
    let secrets = secrets_of(handshake);
    match reply {
        None => HandshakeResponse::Nothing("no answer in time".into()),
        Some(DeliveryReply::Failed(failure)) => {
            HandshakeResponse::Nothing(secrets.mask_text(&failure.detail, HIDDEN))
        }
        Some(DeliveryReply::Answered(answer)) => {
            let header = |(name, value): (&HeaderName, &HeaderValue)| {
                let mut text = match is_secret(name) {
                    true => HIDDEN.to_owned(),
                    false => {
                        let masked = secrets.mask(value.as_bytes(), false, HIDDEN);
                        String::from_utf8_lossy(&masked).into_owned()
                    }
                };
                cut(&mut text, HEADER_KEPT_MAX);
                (name.to_string(), text)
            };
            let kept = &answer.body[..answer.body.len().min(BODY_KEPT_MAX)];
            let cut_off = kept.len() < answer.body.len() || kept.len() == BODY_KEPT_MAX;
            let mut body = String::from_utf8_lossy(&secrets.mask(kept, cut_off, HIDDEN)).into_owned();
            cut(&mut body, BODY_KEPT_MAX);
            HandshakeResponse::Answer {
                status: answer.status,
                headers: answer.headers.iter().take(HEADERS_KEPT_MAX).map(header).collect(),
                body,
            }
        }
    }
}

/// The secrets that the handshake request carries.
fn secrets_of(handshake: &Handshake) -> SentSecrets {
    let mut secrets = SentSecrets::of(&handshake.subscription, &[]);
    secrets.add(handshake.token.expose());
    secrets.add(&handshake.code);
    secrets
}

fn is_secret(name: &HeaderName) -> bool {
    let secret = [
        "authorization",
        "proxy-authorization",
        "cookie",
        "set-cookie",
        "x-functions-key",
        "aeg-sas-key",
        "aeg-sas-token",
        "x-api-key",
    ];
    secret.contains(&name.as_str())
}

fn cut(text: &mut String, max: usize) {
    let end = (0..=max.min(text.len()))
        .rev()
        .find(|at| text.is_char_boundary(*at));
    text.truncate(end.unwrap_or(0));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_to_be_visited_has_the_services_form() {
        let at = Timestamp::parse("2022-10-28T04:23:35.1981776Z").unwrap();
        let url = callback("https://here:8443/", "my-sub", "op", at, "2021-12-01", "secret");
        assert_eq!(
            url,
            "https://here:8443/eventsubscriptions/my-sub/validate?id=op&t=2022-10-28T04:23:35.1981776Z\
             &apiVersion=2021-12-01&token=secret"
        );
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        let check = |text: &str, max: usize, expected: &str| {
            let mut cut_text = text.to_owned();
            cut(&mut cut_text, max);
            assert_eq!(cut_text, expected);
        };
        check("abc", 2, "ab");
        check("abc", 9, "abc");
        check("aüb", 2, "a");
        check("", 4, "");
    }
}
