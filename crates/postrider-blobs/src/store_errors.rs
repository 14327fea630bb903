//! Error answers of stores, and the parts of them that may be shown.

use ::http::{HeaderMap, StatusCode};

/// The longest part of a store's message that is shown.
const MESSAGE_CHARS_MAX: usize = 300;

/// Why an exchange with a store failed. Its text contains no credentials.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StoreFailure {
    #[error("{host} answered {}", told(*.status, .code, .message))]
    Answered {
        host: String,
        status: StatusCode,
        /// The store's error code, such as `ContainerNotFound`; empty if there is none.
        code: String,
        message: String,
    },
    #[error("{host}: {reason}")]
    Lost { host: String, reason: String },
}

fn told(status: StatusCode, code: &str, message: &str) -> String {
    let mut told = status.as_u16().to_string();
    for (before, part) in [(" ", code), (": ", message)] {
        if !part.is_empty() {
            told.push_str(before);
            told.push_str(part);
        }
    }
    told
}

/// The meaning of an error answer for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreErrorMeaning {
    NoContainer,
    NoBlob,
    AlreadyThere,
    Refused,
    Unclear,
}

impl StoreFailure {
    /// Reads the error of an answer: Azure's header and the XML of all three stores. The rest of
    /// the body is left out: stores explain a wrong signature by quoting it.
    pub fn read(host: String, status: StatusCode, headers: &HeaderMap, body: &str) -> StoreFailure {
        let header = headers.get("x-ms-error-code").and_then(|v| v.to_str().ok());
        let code = header.or_else(|| element(body, "Code")).unwrap_or_default();
        let message = element(body, "Message").unwrap_or_default();
        // Azure's second line names the request and the time.
        let message = message.lines().next().unwrap_or_default().trim();
        StoreFailure::Answered {
            host,
            status,
            code: code.to_owned(),
            message: message.chars().take(MESSAGE_CHARS_MAX).collect(),
        }
    }

    pub fn meaning(&self) -> StoreErrorMeaning {
        let StoreFailure::Answered { status, code, .. } = self else {
            return StoreErrorMeaning::Unclear;
        };
        match (status.as_u16(), code.as_str()) {
            (404, "ContainerNotFound" | "NoSuchBucket") => StoreErrorMeaning::NoContainer,
            (404, _) => StoreErrorMeaning::NoBlob,
            (409, "ContainerAlreadyExists" | "BucketAlreadyOwnedByYou" | "BucketAlreadyExists") => {
                StoreErrorMeaning::AlreadyThere
            }
            (401 | 403, _) => StoreErrorMeaning::Refused,
            (400, "InvalidAuthenticationInfo" | "AuthorizationHeaderMalformed" | "InvalidToken") => {
                StoreErrorMeaning::Refused
            }
            _ => StoreErrorMeaning::Unclear,
        }
    }
}

/// The text between the first `<name>` and `</name>`.
fn element<'a>(xml: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    let (text, _) = rest.split_once(&format!("</{name}>"))?;
    Some(text)
}

/// Removes secrets from a text that is about to be shown.
pub(crate) fn scrub<'a>(text: &str, secrets: impl IntoIterator<Item = &'a str>) -> String {
    secrets
        .into_iter()
        .filter(|secret| !secret.is_empty())
        .fold(text.to_owned(), |text, secret| text.replace(secret, "…"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(status: u16, body: &str) -> StoreFailure {
        let status = StatusCode::from_u16(status).unwrap();
        StoreFailure::read("host".to_owned(), status, &HeaderMap::new(), body)
    }

    #[test]
    fn an_answer_is_told_by_its_code_and_the_first_line_of_its_message() {
        let azure = "<?xml version=\"1.0\"?><Error><Code>AuthenticationFailed</Code><Message>Server failed to \
                     authenticate the request.\nRequestId:1\nTime:2</Message><AuthenticationErrorDetail>The MAC \
                     signature found in the HTTP request 'c2lnbmF0dXJl' is not the same</AuthenticationErrorDetail></Error>";
        let check = |status, body: &str, expected: &str| {
            assert_eq!(read(status, body).to_string(), expected, "{body}");
        };
        check(
            403,
            azure,
            "host answered 403 AuthenticationFailed: Server failed to authenticate the request.",
        );
        check(503, "<html>busy</html>", "host answered 503");
        check(500, "\u{0}", "host answered 500");
        let long = format!("<Code>A</Code><Message>{}</Message>", "x".repeat(5000));
        assert!(read(500, &long).to_string().len() < 400);
    }

    #[test]
    fn codes_tell_a_missing_container_from_a_missing_blob() {
        let check = |status, code: &str, expected| {
            let body = format!("<Error><Code>{code}</Code></Error>");
            assert_eq!(read(status, &body).meaning(), expected, "{status} {code}");
        };
        check(404, "ContainerNotFound", StoreErrorMeaning::NoContainer);
        check(404, "NoSuchBucket", StoreErrorMeaning::NoContainer);
        check(404, "BlobNotFound", StoreErrorMeaning::NoBlob);
        check(404, "NoSuchKey", StoreErrorMeaning::NoBlob);
        check(409, "ContainerAlreadyExists", StoreErrorMeaning::AlreadyThere);
        check(409, "ContainerBeingDeleted", StoreErrorMeaning::Unclear);
        check(401, "NoAuthenticationInformation", StoreErrorMeaning::Refused);
        check(403, "SignatureDoesNotMatch", StoreErrorMeaning::Refused);
        check(400, "AuthorizationHeaderMalformed", StoreErrorMeaning::Refused);
        check(400, "InvalidBlobOrBlock", StoreErrorMeaning::Unclear);
        check(301, "PermanentRedirect", StoreErrorMeaning::Unclear);
        check(503, "ServerBusy", StoreErrorMeaning::Unclear);
    }

    #[test]
    fn secrets_are_struck_out() {
        let text = "key abc123 and again abc123, signature s=";
        assert_eq!(
            scrub(text, ["abc123", "", "s="]),
            "key … and again …, signature …"
        );
    }
}
