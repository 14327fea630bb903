//! The rules of the webhook handshake: what a webhook's answer means for its subscription.
//!
//! The delivery schema decides the form of the request. Event Grid and custom delivery send an
//! event with a code that the answer must repeat; CloudEvents delivery asks with OPTIONS whether
//! the origin is allowed.

use crate::event::EventSchema;
use crate::json::RawJson;
use crate::time::Timestamp;
use std::time::Duration;

/// The first API version whose validation event carries a URL to be visited.
pub const MANUAL_SINCE: &str = "2018-05-01-preview";

/// The parts of a handshake request that decide what its answer means.
#[derive(Clone, Copy, Debug)]
pub struct ValidationQuestion<'a> {
    pub delivery: EventSchema,
    /// The code that the answer to a validation event must repeat.
    pub code: &'a str,
    /// The origin that an OPTIONS request asks permission for.
    pub origin: &'a str,
    /// Whether the request came with a URL that may be visited instead of answering.
    pub manual: bool,
    /// The number of requests made, this one included.
    pub tries: u32,
}

/// How often the request is repeated, and after which wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValidationRetries {
    pub tries: u32,
    pub pause: Duration,
}

/// The webhook's reply, as far as the rules need it.
#[derive(Clone, Copy, Debug)]
pub enum ValidationReply<'a> {
    Answer {
        status: u16,
        allowed_origin: Option<&'a str>,
        allowed_rate: Option<&'a str>,
        body: &'a [u8],
    },
    /// No answer came in time.
    TimedOut,
    /// No connection could be made, or it broke; the reason is for people.
    Failed(&'a str),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValidationVerdict {
    /// `rate` is the most requests a minute that the webhook wants; none means no limit.
    Granted { rate: Option<u32> },
    /// The webhook received the request; it may still be confirmed by a visit.
    Manual,
    /// The request is to be repeated at this time.
    TryAgain(Timestamp),
    /// `reason` is a clause in Azure's own words, where it has any.
    Refused { reason: String },
}

impl ValidationQuestion<'_> {
    pub fn verdict(
        &self,
        heard: ValidationReply<'_>,
        patience: ValidationRetries,
        now: Timestamp,
    ) -> ValidationVerdict {
        let request = method(self.delivery);
        match heard {
            ValidationReply::TimedOut if self.tries < patience.tries => {
                ValidationVerdict::TryAgain(now + patience.pause)
            }
            ValidationReply::TimedOut => ValidationVerdict::Refused {
                reason: format!(
                    "Http {request} request failed with response code Unknown (no answer in time)"
                ),
            },
            ValidationReply::Failed(why) => ValidationVerdict::Refused {
                reason: format!("Http {request} request failed with response code Unknown ({why})"),
            },
            ValidationReply::Answer {
                status,
                allowed_origin,
                allowed_rate,
                body,
            } => match self.delivery {
                EventSchema::CloudEvent => self.permission(status, allowed_origin, allowed_rate),
                EventSchema::EventGrid | EventSchema::Custom => self.echo(status, body),
            },
        }
    }

    /// The verdict on the answer to a validation event: exactly 200, with the code.
    fn echo(&self, status: u16, body: &[u8]) -> ValidationVerdict {
        if status != 200 {
            return refused_status("POST", status);
        }
        if validation_response(body).as_deref() == Some(self.code) {
            return ValidationVerdict::Granted { rate: None };
        }
        self.unanswered("POST", status)
    }

    /// The verdict on the answer to OPTIONS: any success, and a header that names the origin.
    fn permission(&self, status: u16, origin: Option<&str>, rate: Option<&str>) -> ValidationVerdict {
        if !(200..300).contains(&status) {
            return refused_status("OPTIONS", status);
        }
        let Some(allowed) = origin else {
            return self.unanswered("OPTIONS", status);
        };
        let ours = |one: &str| one == "*" || one.eq_ignore_ascii_case(self.origin);
        if !allowed.split(',').map(str::trim).any(ours) {
            return ValidationVerdict::Refused {
                reason: format!(
                    "Http OPTIONS request was answered with a WebHook-Allowed-Origin that is neither {} nor *",
                    self.origin
                ),
            };
        }
        // A value that is not a number, or is zero, sets no limit: otherwise the webhook would
        // never get an event.
        let rate = rate.and_then(|text| text.trim().parse().ok()).filter(|n| *n > 0);
        ValidationVerdict::Granted { rate }
    }

    fn unanswered(&self, request: &str, status: u16) -> ValidationVerdict {
        if self.manual {
            return ValidationVerdict::Manual;
        }
        ValidationVerdict::Refused {
            reason: format!(
                "Http {request} request retuned 2XX response with response code {} but without a validation",
                status_name(status)
            ),
        }
    }
}

/// The method of the handshake request.
pub fn method(delivery: EventSchema) -> &'static str {
    match delivery {
        EventSchema::CloudEvent => "OPTIONS",
        EventSchema::EventGrid | EventSchema::Custom => "POST",
    }
}

fn refused_status(request: &str, status: u16) -> ValidationVerdict {
    ValidationVerdict::Refused {
        reason: format!(
            "Http {request} request failed with response code {}",
            status_name(status)
        ),
    }
}

/// The reason given when the validation window has passed without a confirmation.
pub fn expired(delivery: EventSchema, window: Duration) -> String {
    format!(
        "Http {} request retuned 2XX response with response code OK. When a validation request is accepted without \
         validation code in the response body, Http GET is expected on the validation url included in the \
         validation event(within {} minutes)",
        method(delivery),
        window.as_secs().div_ceil(60)
    )
}

/// The error message for the caller, in Azure's words, misspelling included. `endpoint` is without
/// its query.
pub fn message(delivery: EventSchema, endpoint: &str, reason: &str, activity: &str, at: Timestamp) -> String {
    let page = match delivery {
        EventSchema::CloudEvent => "https://aka.ms/esvalidationcloudevent",
        EventSchema::EventGrid | EventSchema::Custom => "https://aka.ms/esvalidation",
    };
    let c = at.civil();
    let half = if c.hour < 12 { "AM" } else { "PM" };
    let hour = (c.hour + 11) % 12 + 1;
    format!(
        "Webhook validation handshake failed for {endpoint}. {reason}. For troublehooting, visit {page}. \
         Activity id:{activity}, timestamp: {}/{}/{} {hour}:{:02}:{:02} {half} (UTC).",
        c.month, c.day, c.year, c.minute, c.second
    )
}

/// Whether this API version has manual validation: dates compare as text, a preview precedes its
/// release.
pub fn supports_manual_validation(api_version: &str) -> bool {
    let day = |version: &str| version.get(..10).map(str::to_owned);
    day(api_version) >= day(MANUAL_SINCE)
}

/// The text of `validationResponse`, in any case.
fn validation_response(body: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(body).ok()?;
    let text = text.trim_start_matches('\u{feff}').trim();
    let found = RawJson::parse(text).ok()?.get_any_case("validationResponse")?;
    Some(found.as_str()?.into_owned())
}

/// A status by its name in .NET; one without a name by its number.
pub fn status_name(status: u16) -> String {
    let name = match status {
        100 => "Continue",
        101 => "SwitchingProtocols",
        200 => "OK",
        201 => "Created",
        202 => "Accepted",
        203 => "NonAuthoritativeInformation",
        204 => "NoContent",
        205 => "ResetContent",
        206 => "PartialContent",
        300 => "MultipleChoices",
        301 => "MovedPermanently",
        302 => "Found",
        303 => "SeeOther",
        304 => "NotModified",
        305 => "UseProxy",
        307 => "TemporaryRedirect",
        308 => "PermanentRedirect",
        400 => "BadRequest",
        401 => "Unauthorized",
        402 => "PaymentRequired",
        403 => "Forbidden",
        404 => "NotFound",
        405 => "MethodNotAllowed",
        406 => "NotAcceptable",
        407 => "ProxyAuthenticationRequired",
        408 => "RequestTimeout",
        409 => "Conflict",
        410 => "Gone",
        411 => "LengthRequired",
        412 => "PreconditionFailed",
        413 => "RequestEntityTooLarge",
        414 => "RequestUriTooLong",
        415 => "UnsupportedMediaType",
        416 => "RequestedRangeNotSatisfiable",
        417 => "ExpectationFailed",
        421 => "MisdirectedRequest",
        422 => "UnprocessableEntity",
        423 => "Locked",
        424 => "FailedDependency",
        426 => "UpgradeRequired",
        428 => "PreconditionRequired",
        429 => "TooManyRequests",
        431 => "RequestHeaderFieldsTooLarge",
        451 => "UnavailableForLegalReasons",
        500 => "InternalServerError",
        501 => "NotImplemented",
        502 => "BadGateway",
        503 => "ServiceUnavailable",
        504 => "GatewayTimeout",
        505 => "HttpVersionNotSupported",
        507 => "InsufficientStorage",
        511 => "NetworkAuthenticationRequired",
        other => return other.to_string(),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: ValidationRetries = ValidationRetries {
        tries: 3,
        pause: Duration::from_secs(5),
    };

    fn now() -> Timestamp {
        Timestamp::parse("2024-01-21T20:37:25Z").unwrap()
    }

    fn question(delivery: EventSchema) -> ValidationQuestion<'static> {
        ValidationQuestion {
            delivery,
            code: "4D8DEF5B",
            origin: "eventgrid.azure.net",
            manual: true,
            tries: 1,
        }
    }

    fn refused(reason: &str) -> ValidationVerdict {
        ValidationVerdict::Refused {
            reason: reason.into(),
        }
    }

    const GRANTED: ValidationVerdict = ValidationVerdict::Granted { rate: None };

    #[test]
    fn an_event_is_answered_by_exactly_200_and_the_code() {
        let check = |status: u16, body: &str, expected: ValidationVerdict| {
            let heard = ValidationReply::Answer {
                status,
                allowed_origin: Some("*"),
                allowed_rate: Some("7"),
                body: body.as_bytes(),
            };
            for schema in [EventSchema::EventGrid, EventSchema::Custom] {
                let verdict = question(schema).verdict(heard, PATIENCE, now());
                assert_eq!(verdict, expected, "{status} {body:?}");
            }
        };
        let good = r#"{"validationResponse":"4D8DEF5B"}"#;
        check(200, good, GRANTED);
        check(
            200,
            r#" { "ValidationResponse" : "4D8DEF5B", "more": 1 } "#,
            GRANTED,
        );
        check(200, "\u{feff}{\"VALIDATIONRESPONSE\":\"4D8DEF5B\"}", GRANTED);
        check(200, r#"{"validationResponse":"4D8D\u0045F5B"}"#, GRANTED);
        // A wrong code, the code in another case, other content, an empty body: the URL may still
        // be visited.
        for other in [
            "",
            "ok",
            "4D8DEF5B",
            r#"{"validationResponse":"4d8def5b"}"#,
            r#"{"validationResponse":""}"#,
            r#"{"validationResponse":null}"#,
            r#"{"validationResponse":"4D8DEF5B""#,
            r#"[{"validationResponse":"4D8DEF5B"}]"#,
            "\u{0}",
        ] {
            check(200, other, ValidationVerdict::Manual);
        }
        check(
            201,
            good,
            refused("Http POST request failed with response code Created"),
        );
        check(
            202,
            good,
            refused("Http POST request failed with response code Accepted"),
        );
        check(
            204,
            "",
            refused("Http POST request failed with response code NoContent"),
        );
        check(
            302,
            good,
            refused("Http POST request failed with response code Found"),
        );
        check(
            404,
            good,
            refused("Http POST request failed with response code NotFound"),
        );
        check(
            429,
            "",
            refused("Http POST request failed with response code TooManyRequests"),
        );
        check(
            500,
            "",
            refused("Http POST request failed with response code InternalServerError"),
        );
        check(
            299,
            "",
            refused("Http POST request failed with response code 299"),
        );
    }

    #[test]
    fn options_is_answered_by_success_and_the_origin() {
        let check = |status: u16, origin: Option<&str>, rate: Option<&str>, expected: ValidationVerdict| {
            let heard = ValidationReply::Answer {
                status,
                allowed_origin: origin,
                allowed_rate: rate,
                body: br#"{"validationResponse":"4D8DEF5B"}"#,
            };
            let verdict = question(EventSchema::CloudEvent).verdict(heard, PATIENCE, now());
            assert_eq!(verdict, expected, "{status} {origin:?} {rate:?}");
        };
        let rated = |rate| ValidationVerdict::Granted { rate };
        for status in [200, 201, 202, 204] {
            check(status, Some("eventgrid.azure.net"), None, GRANTED);
            check(status, Some("*"), Some("*"), GRANTED);
            check(status, None, Some("120"), ValidationVerdict::Manual);
        }
        check(200, Some("EventGrid.azure.net"), Some("120"), rated(Some(120)));
        check(
            200,
            Some("a.example, eventgrid.azure.net"),
            Some(" 1 "),
            rated(Some(1)),
        );
        for nothing in ["0", "-1", "often", "", "99999999999"] {
            check(200, Some("*"), Some(nothing), GRANTED);
        }
        let other = "Http OPTIONS request was answered with a WebHook-Allowed-Origin that is neither \
                     eventgrid.azure.net nor *";
        check(200, Some("a.example"), None, refused(other));
        check(200, Some(""), None, refused(other));
        let failed = |name: &str| refused(&format!("Http OPTIONS request failed with response code {name}"));
        check(404, Some("*"), None, failed("NotFound"));
        check(301, Some("*"), None, failed("MovedPermanently"));
        check(405, None, None, failed("MethodNotAllowed"));
        check(503, None, None, failed("ServiceUnavailable"));
    }

    #[test]
    fn silence_is_asked_again_and_a_broken_connection_is_not() {
        let check = |tries: u32, heard: ValidationReply<'_>, expected: ValidationVerdict| {
            let question = ValidationQuestion {
                tries,
                ..question(EventSchema::EventGrid)
            };
            assert_eq!(
                question.verdict(heard, PATIENCE, now()),
                expected,
                "{tries} {heard:?}"
            );
        };
        let again = ValidationVerdict::TryAgain(now() + Duration::from_secs(5));
        check(1, ValidationReply::TimedOut, again.clone());
        check(2, ValidationReply::TimedOut, again);
        let late = "Http POST request failed with response code Unknown (no answer in time)";
        check(3, ValidationReply::TimedOut, refused(late));
        let broken = "Http POST request failed with response code Unknown (no such host)";
        check(1, ValidationReply::Failed("no such host"), refused(broken));
    }

    #[test]
    fn without_a_url_to_visit_there_is_no_second_way() {
        let silent = ValidationReply::Answer {
            status: 200,
            allowed_origin: None,
            allowed_rate: None,
            body: b"",
        };
        for schema in [
            EventSchema::EventGrid,
            EventSchema::Custom,
            EventSchema::CloudEvent,
        ] {
            let question = ValidationQuestion {
                manual: false,
                ..question(schema)
            };
            let verdict = question.verdict(silent, PATIENCE, now());
            assert!(
                matches!(verdict, ValidationVerdict::Refused { .. }),
                "{schema:?} {verdict:?}"
            );
        }
        for (version, manual) in [
            ("2018-01-01", false),
            ("2018-04-30-preview", false),
            ("2018-05-01-preview", true),
            ("2018-09-15-preview", true),
            ("2019-06-01", true),
            ("2025-02-15", true),
            ("2017-09-15-preview", false),
        ] {
            assert_eq!(supports_manual_validation(version), manual, "{version}");
        }
    }

    #[test]
    fn failures_are_told_in_the_services_own_words() {
        let check = |delivery: EventSchema, at: &str, expected: &str| {
            let at = Timestamp::parse(at).unwrap();
            let reason = format!(
                "Http {} request failed with response code NotFound",
                method(delivery)
            );
            assert_eq!(message(delivery, "https://a/b", &reason, "a1", at), expected);
        };
        check(
            EventSchema::CloudEvent,
            "2024-01-21T20:37:25Z",
            "Webhook validation handshake failed for https://a/b. Http OPTIONS request failed with response code \
             NotFound. For troublehooting, visit https://aka.ms/esvalidationcloudevent. Activity id:a1, timestamp: \
             1/21/2024 8:37:25 PM (UTC).",
        );
        check(
            EventSchema::EventGrid,
            "2024-11-02T00:07:05Z",
            "Webhook validation handshake failed for https://a/b. Http POST request failed with response code \
             NotFound. For troublehooting, visit https://aka.ms/esvalidation. Activity id:a1, timestamp: \
             11/2/2024 12:07:05 AM (UTC).",
        );
        let ten = expired(EventSchema::EventGrid, Duration::from_secs(600));
        assert!(ten.ends_with("validation event(within 10 minutes)"), "{ten}");
    }
}
