//! Outcomes of attempts, by the names that dead letters and metrics use.

use std::fmt;

/// The outcome of one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Outcome {
    Success,
    NotFound,
    Disabled,
    Full,
    Unauthorized,
    BadRequest,
    TimedOut,
    Busy,
    PayloadTooLarge,
    Probation,
    Canceled,
    Aborted,
    SocketError,
    ResolutionError,
    SessionQueueNotSupported,
    Forbidden,
    InvalidAzureFunctionDestination,
    GenericError,
    /// The outgoing proxy failed: nothing is known about the endpoint.
    ProxyError,
}

impl Outcome {
    pub const ALL: [Outcome; 19] = [
        Outcome::Success,
        Outcome::NotFound,
        Outcome::Disabled,
        Outcome::Full,
        Outcome::Unauthorized,
        Outcome::BadRequest,
        Outcome::TimedOut,
        Outcome::Busy,
        Outcome::PayloadTooLarge,
        Outcome::Probation,
        Outcome::Canceled,
        Outcome::Aborted,
        Outcome::SocketError,
        Outcome::ResolutionError,
        Outcome::SessionQueueNotSupported,
        Outcome::Forbidden,
        Outcome::InvalidAzureFunctionDestination,
        Outcome::GenericError,
        Outcome::ProxyError,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Outcome::Success => "Success",
            Outcome::NotFound => "NotFound",
            Outcome::Disabled => "Disabled",
            Outcome::Full => "Full",
            Outcome::Unauthorized => "Unauthorized",
            Outcome::BadRequest => "BadRequest",
            Outcome::TimedOut => "TimedOut",
            Outcome::Busy => "Busy",
            Outcome::PayloadTooLarge => "PayloadTooLarge",
            Outcome::Probation => "Probation",
            Outcome::Canceled => "Canceled",
            Outcome::Aborted => "Aborted",
            Outcome::SocketError => "SocketError",
            Outcome::ResolutionError => "ResolutionError",
            Outcome::SessionQueueNotSupported => "SessionQueueNotSupported",
            Outcome::Forbidden => "Forbidden",
            Outcome::InvalidAzureFunctionDestination => "InvalidAzureFunctionDestination",
            Outcome::GenericError => "GenericError",
            Outcome::ProxyError => "ProxyError",
        }
    }

    /// The outcome's number in stored records; never changes.
    pub fn code(self) -> u8 {
        Outcome::ALL
            .iter()
            .position(|o| *o == self)
            .expect("every outcome is listed") as u8
    }

    pub fn from_code(code: u8) -> Outcome {
        Outcome::ALL
            .get(usize::from(code))
            .copied()
            .unwrap_or(Outcome::GenericError)
    }

    /// The outcome of a request with this status, which is not a success in the profile.
    pub fn of_failure_status(status: u16) -> Outcome {
        match status {
            400 => Outcome::BadRequest,
            401 => Outcome::Unauthorized,
            403 => Outcome::Forbidden,
            404 => Outcome::NotFound,
            408 => Outcome::TimedOut,
            413 => Outcome::PayloadTooLarge,
            429 | 503 => Outcome::Busy,
            _ => Outcome::GenericError,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
