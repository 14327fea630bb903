//! Errors of refused publish requests, and the error bodies of the cloud and of the edge module.

use postrider_core::event::EventSchema;
use postrider_core::json;

/// Characters of a publisher's value that a message quotes at most.
const QUOTED_CHARS_MAX: usize = 256;

/// Why a publish request is refused.
///
/// Messages are those of the cloud service wherever they are known, since clients search them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status} {detail}: {message}")]
pub struct PublishError {
    pub status: u16,
    /// The name of the status: `BadRequest`.
    pub code: &'static str,
    /// The detail code: `InputJsonInvalid`.
    pub detail: &'static str,
    pub message: String,
}

impl PublishError {
    fn new(status: u16, detail: &'static str, message: impl Into<String>) -> PublishError {
        PublishError {
            status,
            code: status_name(status),
            detail,
            message: message.into(),
        }
    }

    /// The body is not JSON, or not JSON of the topic's schema. `why` is a sentence, or empty.
    pub fn nonconforming(schema: EventSchema, why: &str) -> PublishError {
        let gap = if why.is_empty() { "" } else { " " };
        let schema = schema_name(schema);
        PublishError::new(
            400,
            "InputJsonInvalid",
            format!(
                "This resource is configured to receive event in '{schema}' schema. \
                 The JSON received does not conform to the expected schema.{gap}{why}"
            ),
        )
    }

    /// A JSON token has another kind than the one that is required there.
    pub fn unexpected_token(schema: EventSchema, expected: &str, actual: &str) -> PublishError {
        let why = format!("Token Expected: {expected}, Actual Token Received: {actual}.");
        PublishError::nonconforming(schema, &why)
    }

    /// A required property is absent, null or (where that is refused too) empty.
    pub fn property_missing(schema: EventSchema, property: &str) -> PublishError {
        PublishError::property_unset(schema, property, "to be set.")
    }

    /// A property has another value than the only one that is allowed.
    pub fn property_fixed(schema: EventSchema, property: &str, only: &str) -> PublishError {
        PublishError::property_unset(schema, property, &format!("to be set to '{only}'."))
    }

    fn property_unset(schema: EventSchema, property: &str, how: &str) -> PublishError {
        let (schema, property) = (schema_name(schema), quoted(property));
        PublishError::new(
            400,
            "InputJsonInvalid",
            format!(
                "This resource is configured for '{schema}' schema and requires '{property}' property {how}"
            ),
        )
    }

    /// An event sent to a domain does not name its domain topic.
    pub fn domain_topic_invalid(found: &str) -> PublishError {
        let found = quoted(found);
        PublishError::new(
            400,
            "InputJsonInvalid",
            format!(
                "Required property 'topic' needs to either be a full resource id or should be just \
                 the name of the domain topic. Found: {found}."
            ),
        )
    }

    /// At the edge, an event's `topic` must be absent or that of the URL.
    pub fn edge_topic_mismatch(found: &str, topic: &str) -> PublishError {
        let found = quoted(found);
        PublishError::new(
            400,
            "InputJsonInvalid",
            format!(
                "Property 'topic' must be '{topic}', the topic that the event is published to. Found: {found}."
            ),
        )
    }

    /// In the cloud, an event's `topic` must be absent or the topic's full resource id.
    pub fn cloud_topic_mismatch(found: &str) -> PublishError {
        let found = quoted(found);
        PublishError::new(
            401,
            "Unauthorized",
            format!("The request is not authorized to publish events for the topic '{found}'."),
        )
    }

    /// A header of a CloudEvent in binary mode is absent.
    pub fn ce_header_missing(header: &str) -> PublishError {
        PublishError::ce_header(header, "is missing")
    }

    /// A header of a CloudEvent in binary mode has no value.
    pub fn ce_header_empty(header: &str) -> PublishError {
        PublishError::ce_header(header, "is empty")
    }

    /// A header of a CloudEvent in binary mode cannot be parsed.
    pub fn ce_header_invalid(header: &str) -> PublishError {
        PublishError::ce_header(header, "is invalid")
    }

    /// A header of our own cannot be parsed.
    pub fn header_invalid(header: &str, expected: &str) -> PublishError {
        let message = format!("{header} header is invalid: it must be given once and be {expected}.");
        PublishError::new(400, "InvalidHeader", message)
    }

    fn ce_header(header: &str, fault: &str) -> PublishError {
        let header = quoted(header);
        PublishError::new(
            400,
            "InvalidCloudEventHeader",
            format!(
                "{header} header {fault} for the cloud event. Please check required attributes at \
                 https://github.com/cloudevents/spec/blob/v1.0/spec.md#required-attributes."
            ),
        )
    }

    /// The `ce-` headers indicate binary mode, and the content type structured mode.
    pub fn ce_modes_mixed() -> PublishError {
        PublishError::new(
            400,
            "InvalidCloudEventHeader",
            "The request has the headers of a cloud event in binary mode and a Content-Type header of \
             a cloud event in structured mode.",
        )
    }

    pub fn content_type_unsupported() -> PublishError {
        PublishError::new(
            415,
            "InvalidContentType",
            "The Content-Type header is either missing or it doesn't have a valid value. The content \
             type header must either be application/cloudevents+json; charset=utf-8 or \
             application/cloudevents-batch+json; charset=UTF-8.",
        )
    }

    pub fn api_version_unsupported(version: &str, supported: &str) -> PublishError {
        let version = quoted(version);
        PublishError::new(
            400,
            "UnsupportedApiVersion",
            format!(
                "The api-version '{version}' is not supported. The supported versions are '{supported}'."
            ),
        )
    }

    /// The cloud service's message; the service's limit is 1536000.
    pub fn request_too_large(bytes_max: usize) -> PublishError {
        PublishError::too_large(format!("The maximum size ({bytes_max}) has been exceeded."))
    }

    pub fn event_too_large(index: usize, bytes_max: usize) -> PublishError {
        PublishError::too_large(format!(
            "The event at index {index} exceeds the limit of {bytes_max} bytes."
        ))
    }

    pub fn events_too_many(events_max: usize) -> PublishError {
        PublishError::too_large(format!("The request exceeds the limit of {events_max} events."))
    }

    /// The filters of the topic's subscriptions would examine more than this many bytes.
    pub fn filters_too_costly(index: usize, bytes_max: u64) -> PublishError {
        PublishError::too_large(format!(
            "The event at index {index} is too large for the filters of the topic's subscriptions: evaluating \
             them would look at more than {bytes_max} bytes (limits.filter_bytes_per_event_max). Publish \
             smaller events, or simplify the filters."
        ))
    }

    /// The filters would examine too many bytes for all events of the request together.
    pub fn batch_filters_too_costly(index: usize, bytes_max: u64) -> PublishError {
        PublishError::too_large(format!(
            "The request is too large for the filters of the topic's subscriptions: evaluating them up to the \
             event at index {index} would look at more than {bytes_max} bytes (four times \
             limits.filter_bytes_per_event_max). Publish fewer events in one request, or simplify the filters."
        ))
    }

    fn too_large(message: String) -> PublishError {
        PublishError::new(413, "PayloadTooLarge", message)
    }

    /// The request has no credential.
    pub fn credential_missing() -> PublishError {
        PublishError::new(
            401,
            "Unauthorized",
            "Request must contain one of the following authorization signature: aeg-sas-token, aeg-sas-key.",
        )
    }

    /// The credential is not valid for this topic.
    pub fn key_unauthorized(host: &str, reason: Option<&str>) -> PublishError {
        let host = quoted(host).to_uppercase();
        let mut message = format!("The request authorization key is not authorized for {host}.");
        if let Some(reason) = reason {
            message += &format!(" This is due to the reason: {reason}.");
        }
        PublishError::new(401, "Unauthorized", message)
    }

    /// `aeg-sas-key` or `aeg-sas-token` is present but empty.
    pub fn credential_empty(name: &str) -> PublishError {
        PublishError::new(
            401,
            "Unauthorized",
            format!("Request must have a value for {name}."),
        )
    }

    pub fn scheme_unsupported() -> PublishError {
        PublishError::new(
            401,
            "Unauthorized",
            "Request has an unsupported Authorization scheme (must be SharedAccessSignature or Bearer).",
        )
    }

    /// The edge module's answer to a missing or wrong key.
    pub fn edge_unauthorized() -> PublishError {
        PublishError::new(401, "UnAuthorized", "The request is not authorized.")
    }

    /// Refused by network rules, or because the bearer token lacks the permission to publish. `why`
    /// is a sentence.
    pub fn forbidden(why: &str) -> PublishError {
        PublishError::new(403, "Forbidden", why)
    }

    pub fn not_found(uri: &str) -> PublishError {
        let uri = quoted(uri);
        PublishError::new(
            404,
            "ResourceNotFound",
            format!("No HTTP resource was found that matches the request URI '{uri}'."),
        )
    }

    pub fn method_not_allowed(method: &str) -> PublishError {
        let method = quoted(method);
        PublishError::new(
            405,
            "MethodNotAllowed",
            format!("The requested resource does not support http method '{method}'."),
        )
    }

    /// The body arrived too slowly. `why` has no full stop.
    pub fn request_timeout(why: &str) -> PublishError {
        PublishError::new(408, "RequestTimeout", format!("The request timed out: {why}."))
    }

    /// The rate limit is exceeded. Clients retry only if the answer also has `Retry-After`.
    pub fn too_many_requests() -> PublishError {
        PublishError::new(
            429,
            "TooManyRequests",
            "The rate of events exceeds the limit of this resource.",
        )
    }

    /// The client's address sent too many wrong credentials.
    pub fn locked_out(reason: String) -> PublishError {
        PublishError::new(429, "TooManyRequests", reason)
    }

    pub fn internal() -> PublishError {
        PublishError::new(500, "InternalServerError", "The request could not be completed.")
    }

    /// The events cannot be made durable at the moment.
    pub fn unavailable(why: &str) -> PublishError {
        PublishError::new(503, "ServiceUnavailable", why)
    }
}

/// The body of the cloud service's error. The service ends its messages with a reference to its
/// forums and the request's id; that sentence is left out, since the forums do not know requests to
/// this server.
pub fn cloud_error_body(error: &PublishError) -> Vec<u8> {
    let message = &error.message;
    let mut body = Vec::with_capacity(2 * message.len() + 96);
    body.extend_from_slice(b"{\"error\":{\"code\":");
    json::write_string(error.code, &mut body);
    body.extend_from_slice(b",\"message\":");
    json::write_string(message, &mut body);
    body.extend_from_slice(b",\"details\":[{\"code\":");
    json::write_string(error.detail, &mut body);
    body.extend_from_slice(b",\"message\":");
    json::write_string(message, &mut body);
    body.extend_from_slice(b"}]}}");
    body
}

/// The body of the edge module's error, for every part of its API.
pub fn edge_error_body(status: u16, code: &str, message: &str) -> Vec<u8> {
    let mut body = format!("{{\"error\":{{\"code\":\"{status}\",\"details\":{{\"code\":").into_bytes();
    json::write_string(code, &mut body);
    body.extend_from_slice(b",\"message\":");
    json::write_string(message, &mut body);
    body.extend_from_slice(b"}}}");
    body
}

/// A topic's input schema, as messages name it.
pub fn schema_name(schema: EventSchema) -> &'static str {
    match schema {
        EventSchema::EventGrid => "EventGridEvent",
        EventSchema::CloudEvent => "CloudEventV10",
        EventSchema::Custom => "CustomEvent",
    }
}

fn status_name(status: u16) -> &'static str {
    match status {
        400 => "BadRequest",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        405 => "MethodNotAllowed",
        408 => "RequestTimeout",
        413 => "RequestEntityTooLarge",
        415 => "UnsupportedMediaType",
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        _ => "InternalServerError",
    }
}

/// At most the first [`QUOTED_CHARS_MAX`] characters.
fn quoted(text: &str) -> &str {
    match text.char_indices().nth(QUOTED_CHARS_MAX) {
        Some((end, _)) => &text[..end],
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_its_status_code_detail_and_text() {
        let check = |error: PublishError, status: u16, code: &str, detail: &str, message: &str| {
            assert_eq!(
                (error.status, error.code, error.detail),
                (status, code, detail),
                "{error}"
            );
            assert_eq!(error.message, message);
        };
        let bad = |error, detail, message| check(error, 400, "BadRequest", detail, message);
        let unauthorized = |error, message| check(error, 401, "Unauthorized", "Unauthorized", message);
        let too_large = |error, message| {
            check(error, 413, "RequestEntityTooLarge", "PayloadTooLarge", message);
        };
        bad(
            PublishError::nonconforming(EventSchema::EventGrid, ""),
            "InputJsonInvalid",
            "This resource is configured to receive event in 'EventGridEvent' schema. The JSON received does not conform to the expected schema.",
        );
        bad(
            PublishError::unexpected_token(EventSchema::CloudEvent, "StartObject", "StartArray"),
            "InputJsonInvalid",
            "This resource is configured to receive event in 'CloudEventV10' schema. The JSON received does not conform to the expected schema. Token Expected: StartObject, Actual Token Received: StartArray.",
        );
        bad(
            PublishError::property_missing(EventSchema::Custom, "subject"),
            "InputJsonInvalid",
            "This resource is configured for 'CustomEvent' schema and requires 'subject' property to be set.",
        );
        bad(
            PublishError::property_fixed(EventSchema::EventGrid, "metadataVersion", "1"),
            "InputJsonInvalid",
            "This resource is configured for 'EventGridEvent' schema and requires 'metadataVersion' property to be set to '1'.",
        );
        bad(
            PublishError::domain_topic_invalid("https://a/b"),
            "InputJsonInvalid",
            "Required property 'topic' needs to either be a full resource id or should be just the name of the domain topic. Found: https://a/b.",
        );
        bad(
            PublishError::edge_topic_mismatch("a", "b"),
            "InputJsonInvalid",
            "Property 'topic' must be 'b', the topic that the event is published to. Found: a.",
        );
        bad(
            PublishError::ce_header_missing("ce-id"),
            "InvalidCloudEventHeader",
            "ce-id header is missing for the cloud event. Please check required attributes at https://github.com/cloudevents/spec/blob/v1.0/spec.md#required-attributes.",
        );
        bad(
            PublishError::ce_header_empty("ce-id"),
            "InvalidCloudEventHeader",
            "ce-id header is empty for the cloud event. Please check required attributes at https://github.com/cloudevents/spec/blob/v1.0/spec.md#required-attributes.",
        );
        unauthorized(
            PublishError::credential_empty("aeg-sas-key"),
            "Request must have a value for aeg-sas-key.",
        );
        bad(
            PublishError::api_version_unsupported("1", "2018-01-01"),
            "UnsupportedApiVersion",
            "The api-version '1' is not supported. The supported versions are '2018-01-01'.",
        );
        unauthorized(
            PublishError::credential_missing(),
            "Request must contain one of the following authorization signature: aeg-sas-token, aeg-sas-key.",
        );
        unauthorized(
            PublishError::key_unauthorized("t.local", None),
            "The request authorization key is not authorized for T.LOCAL.",
        );
        unauthorized(
            PublishError::key_unauthorized("t.local", Some("it is late")),
            "The request authorization key is not authorized for T.LOCAL. This is due to the reason: it is late.",
        );
        unauthorized(
            PublishError::scheme_unsupported(),
            "Request has an unsupported Authorization scheme (must be SharedAccessSignature or Bearer).",
        );
        unauthorized(
            PublishError::cloud_topic_mismatch("x"),
            "The request is not authorized to publish events for the topic 'x'.",
        );
        check(
            PublishError::edge_unauthorized(),
            401,
            "Unauthorized",
            "UnAuthorized",
            "The request is not authorized.",
        );
        check(
            PublishError::forbidden("No."),
            403,
            "Forbidden",
            "Forbidden",
            "No.",
        );
        check(
            PublishError::not_found("https://h/x"),
            404,
            "NotFound",
            "ResourceNotFound",
            "No HTTP resource was found that matches the request URI 'https://h/x'.",
        );
        check(
            PublishError::method_not_allowed("PUT"),
            405,
            "MethodNotAllowed",
            "MethodNotAllowed",
            "The requested resource does not support http method 'PUT'.",
        );
        too_large(
            PublishError::request_too_large(1_536_000),
            "The maximum size (1536000) has been exceeded.",
        );
        too_large(
            PublishError::event_too_large(1, 9),
            "The event at index 1 exceeds the limit of 9 bytes.",
        );
        too_large(
            PublishError::events_too_many(9),
            "The request exceeds the limit of 9 events.",
        );
        check(
            PublishError::content_type_unsupported(),
            415,
            "UnsupportedMediaType",
            "InvalidContentType",
            "The Content-Type header is either missing or it doesn't have a valid value. The content type header must either be application/cloudevents+json; charset=utf-8 or application/cloudevents-batch+json; charset=UTF-8.",
        );
        let status_of = |error: PublishError| (error.status, error.code);
        assert_eq!(
            status_of(PublishError::too_many_requests()),
            (429, "TooManyRequests")
        );
        assert_eq!(status_of(PublishError::internal()), (500, "InternalServerError"));
        assert_eq!(
            status_of(PublishError::unavailable("No.")),
            (503, "ServiceUnavailable")
        );
    }

    #[test]
    fn the_cloud_body_repeats_the_message_and_names_no_forum() {
        let check = |error: &PublishError, expected: &str| {
            let body = String::from_utf8(cloud_error_body(error)).unwrap();
            assert_eq!(body, expected);
        };
        check(
            &PublishError::request_too_large(1_536_000),
            "{\"error\":{\"code\":\"RequestEntityTooLarge\",\
             \"message\":\"The maximum size (1536000) has been exceeded.\",\
             \"details\":[{\"code\":\"PayloadTooLarge\",\
             \"message\":\"The maximum size (1536000) has been exceeded.\"}]}}",
        );
        check(
            &PublishError::credential_empty("aeg-sas-key"),
            "{\"error\":{\"code\":\"Unauthorized\",\
             \"message\":\"Request must have a value for aeg-sas-key.\",\
             \"details\":[{\"code\":\"Unauthorized\",\
             \"message\":\"Request must have a value for aeg-sas-key.\"}]}}",
        );
    }

    #[test]
    fn the_edge_body_has_one_object_of_details() {
        assert_eq!(
            edge_error_body(404, "TopicNotFound", "say \"t1\""),
            br#"{"error":{"code":"404","details":{"code":"TopicNotFound","message":"say \"t1\""}}}"#
        );
    }

    #[test]
    fn what_the_publisher_sent_is_quoted_up_to_a_bound() {
        let long = "é".repeat(10_000);
        let message = PublishError::domain_topic_invalid(&long).message;
        assert_eq!(message.matches('é').count(), QUOTED_CHARS_MAX);
    }
}
