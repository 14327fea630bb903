//! Masks the secrets of a request, by value, in its answer: receivers echo requests, under any name
//! and in any encoding.

use base64::Engine as _;
use base64::prelude::{BASE64_STANDARD_NO_PAD, BASE64_URL_SAFE_NO_PAD};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use postrider_core::connection::part;
use postrider_core::ids::Secret;
use postrider_core::json::write_string;
use postrider_core::subscription::{AttributeValue, BrokerAddress, Destination, Subscription};
use std::collections::BTreeMap;

/// A shorter secret is masked only as a whole word: inside a longer word it is likely to be
/// something else.
const ANYWHERE_MIN: usize = 6;
/// Shorter values of query parameters are flags and versions.
const QUERY_VALUE_MIN: usize = 4;
/// The least part of a secret that is recognized at the point where the answer was truncated.
const CUT_MIN: usize = 3;
/// The most query values of one URL that are looked for. With more of them, no answer is shown at
/// all.
const QUERY_VALUES_MAX: usize = 64;

/// A secret that deliveries carry although their subscription does not contain it: one of a
/// `[[destination]]` or of a storage account in the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfiguredSecret {
    Value(Secret),
    /// Its secrets are the parts that [`SentSecrets::add_url`] names.
    Url(Secret),
}

/// The secrets of a request, in every form in which they may be echoed.
#[derive(Debug, Default)]
pub struct SentSecrets {
    /// By their first byte in lower case; the longest first.
    forms: BTreeMap<u8, Vec<SecretForm>>,
    /// Whether requests carry signatures, which differ each time.
    signed: bool,
    /// Whether there were more values than are looked for.
    too_many: bool,
}

#[derive(Debug, PartialEq, Eq)]
struct SecretForm {
    bytes: Vec<u8>,
    /// Whether to match whole words only.
    alone: bool,
}

impl SentSecrets {
    /// The secrets of the subscription itself, and those that the configuration adds.
    pub fn of(subscription: &Subscription, configured: &[ConfiguredSecret]) -> SentSecrets {
        let mut secrets = SentSecrets::default();
        for attribute in subscription.destination.attributes() {
            if let AttributeValue::Static { value, secret: true } = &attribute.value {
                secrets.add_header(value.expose());
            }
        }
        match &subscription.destination {
            Destination::WebHook(hook) => secrets.add_url(hook.url.expose()),
            Destination::EventGrid { url, sas_key, .. } => {
                secrets.add_url(url);
                secrets.add(sas_key.expose());
            }
            Destination::EventHub { resource, .. }
            | Destination::HybridConnection { resource, .. }
            | Destination::ServiceBusQueue { resource, .. }
            | Destination::ServiceBusTopic { resource, .. } => {
                secrets.signed = true;
                if let BrokerAddress::Connection(text) = resource {
                    secrets.add_connection(text.expose());
                }
            }
            Destination::StorageQueue { resource, .. } => {
                secrets.signed = true;
                // Without `=` the resource is the name or the id of an account.
                if resource.contains('=') {
                    secrets.add_connection(resource);
                }
            }
            Destination::AzureFunction { .. } | Destination::EdgeHub { .. } => {}
        }
        for secret in configured {
            match secret {
                ConfiguredSecret::Value(value) => secrets.add(value.expose()),
                ConfiguredSecret::Url(url) => secrets.add_url(url.expose()),
            }
        }
        secrets
    }

    pub fn is_empty(&self) -> bool {
        self.forms.is_empty() && !self.signed && !self.too_many
    }

    /// Adds a connection string of a broker or a storage account, and the parts of it that give
    /// access.
    fn add_connection(&mut self, connection: &str) {
        self.add(connection);
        for name in ["SharedAccessKey", "AccountKey"] {
            part(connection, name).into_iter().for_each(|key| self.add(key));
        }
        if let Some(signature) = part(connection, "SharedAccessSignature") {
            self.add(signature);
            let query = signature.trim_start_matches("SharedAccessSignature ");
            let mut parameters = query.trim_start_matches('?').split('&');
            let sig = parameters.find_map(|pair| pair.strip_prefix("sig="));
            sig.into_iter().for_each(|sig| self.add(sig));
        }
    }

    /// Adds a header's value: with an authorization scheme also its credential, and for `Basic` the
    /// password in it.
    pub fn add_header(&mut self, value: &str) {
        self.add(value);
        let Some((scheme, credential)) = value.trim().split_once(' ') else {
            return;
        };
        let credential = credential.trim();
        self.add(credential);
        if scheme.eq_ignore_ascii_case("basic") {
            let plain = BASE64_STANDARD_NO_PAD
                .decode(credential.trim_end_matches('='))
                .ok();
            let plain = plain.and_then(|bytes| String::from_utf8(bytes).ok());
            if let Some((user, password)) = plain.as_deref().and_then(|text| text.split_once(':')) {
                self.add(&format!("{user}:{password}"));
                self.add(password);
            }
        }
    }

    /// Adds the secret parts of a URL: its query, the values in it, and a password before the host.
    pub fn add_url(&mut self, url: &str) {
        let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        if let Some((user, _)) = authority.rsplit_once('@') {
            let password = user.split_once(':').map_or(user, |(_, password)| password);
            self.add(password);
        }
        let Some((_, query)) = url.split_once('?') else {
            return;
        };
        let query = query.split('#').next().unwrap_or_default();
        if query.len() >= ANYWHERE_MIN {
            self.add(query);
        }
        let values = query
            .split('&')
            .map(|pair| pair.split_once('=').map_or(pair, |(_, value)| value));
        let mut values = values.filter(|value| value.len() >= QUERY_VALUE_MIN);
        values
            .by_ref()
            .take(QUERY_VALUES_MAX)
            .for_each(|value| self.add(value));
        self.too_many |= values.next().is_some();
    }

    pub fn add(&mut self, value: &str) {
        let decoded = percent_decode_str(value).decode_utf8_lossy().into_owned();
        let spaced = decoded.replace('+', " ");
        for plain in [value, &decoded, &spaced] {
            let encoded = utf8_percent_encode(plain, NON_ALPHANUMERIC).to_string();
            let mut quoted = Vec::new();
            write_string(plain, &mut quoted);
            let quoted = String::from_utf8_lossy(&quoted).trim_matches('"').to_owned();
            let slashed = quoted.replace('/', "\\/");
            let html = plain.replace('&', "&amp;");
            let angled = html.replace('<', "&lt;").replace('>', "&gt;");
            let html_forms = [
                ("&quot;", "&#39;"),
                ("&#34;", "&#39;"),
                ("&quot;", "&#x27;"),
                ("&quot;", "'"),
            ];
            for (double, single) in html_forms {
                self.put(angled.replace('"', double).replace('\'', single));
            }
            // `+` and `/` become `\u002b` and `%2b` in some writers' JSON and URLs.
            let unicode: String = plain
                .chars()
                .map(|c| match c {
                    '+' | '&' | '<' | '>' | '\'' | '=' => format!("\\u{:04x}", c as u32),
                    other => other.to_string(),
                })
                .collect();
            self.put(
                plain
                    .encode_utf16()
                    .map(|unit| format!("\\u{unit:04x}"))
                    .collect(),
            );
            let loosely: String = plain
                .bytes()
                .map(|byte| match byte {
                    b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
                    byte if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
                    byte => format!("%{byte:02X}"),
                })
                .collect();
            let forms = [plain.to_owned(), encoded, loosely, quoted, slashed, html, unicode];
            forms.into_iter().for_each(|form| self.put(form));
            // A shorter one would match by chance.
            if plain.len() >= ANYWHERE_MIN {
                self.put(BASE64_STANDARD_NO_PAD.encode(plain));
                self.put(BASE64_URL_SAFE_NO_PAD.encode(plain));
            }
        }
    }

    fn put(&mut self, form: String) {
        let form = SecretForm {
            alone: form.len() < ANYWHERE_MIN,
            bytes: form.into_bytes(),
        };
        let Some(first) = form.bytes.first() else { return };
        let forms = self.forms.entry(first.to_ascii_lowercase()).or_default();
        if !forms.contains(&form) {
            let at = forms.partition_point(|known| known.bytes.len() >= form.bytes.len());
            forms.insert(at, form);
        }
    }

    /// The answer without the secrets. `cut` means that more followed, so that the end may be the
    /// beginning of a secret.
    pub fn mask(&self, answer: &[u8], cut: bool, mask: &str) -> Vec<u8> {
        if self.too_many && !answer.is_empty() {
            return mask.as_bytes().to_vec();
        }
        let mut out = Vec::with_capacity(answer.len());
        let mut at = 0;
        while at < answer.len() {
            let rest = &answer[at..];
            let first = answer[at].to_ascii_lowercase();
            let forms = self.forms.get(&first).map_or(&[][..], Vec::as_slice);
            let found = forms.iter().find(|form| form.is_at(answer, at));
            if let Some(form) = found {
                out.extend_from_slice(mask.as_bytes());
                at += form.bytes.len();
            } else if let Some((name, value)) = signature_at(rest).filter(|_| self.signed) {
                out.extend_from_slice(&rest[..name]);
                out.extend_from_slice(mask.as_bytes());
                at += name + value;
            } else if cut && rest.len() >= CUT_MIN && forms.iter().any(|form| begins_with(&form.bytes, rest))
            {
                out.extend_from_slice(mask.as_bytes());
                break;
            } else {
                out.push(answer[at]);
                at += 1;
            }
        }
        out
    }

    /// The text without the secrets.
    pub fn mask_text(&self, text: &str, mask: &str) -> String {
        match self.is_empty() {
            true => text.to_owned(),
            false => String::from_utf8_lossy(&self.mask(text.as_bytes(), false, mask)).into_owned(),
        }
    }
}

/// The lengths of the name and the value of a signature at the beginning of a text: `sig=…` of a
/// shared access signature, `SharedKey account:…` of a storage account.
fn signature_at(text: &[u8]) -> Option<(usize, usize)> {
    let begins = |name: &str| {
        let begin = text.get(..name.len());
        begin.is_some_and(|begin| begin.eq_ignore_ascii_case(name.as_bytes()))
    };
    let name = ["sig=", "sig%3d", "SharedKey "]
        .into_iter()
        .find(|name| begins(name))?;
    let of_value = |byte: &u8| byte.is_ascii_alphanumeric() || b"+/=%:-_.~".contains(byte);
    let value = text[name.len()..]
        .iter()
        .take_while(|byte| of_value(byte))
        .count();
    (value > 0).then_some((name.len(), value))
}

/// Some receivers answer in upper or lower case, and escapes have either.
fn begins_with(text: &[u8], beginning: &[u8]) -> bool {
    let begin = text.get(..beginning.len());
    begin.is_some_and(|begin| begin.eq_ignore_ascii_case(beginning))
}

impl SecretForm {
    fn is_at(&self, answer: &[u8], at: usize) -> bool {
        if !begins_with(&answer[at..], &self.bytes) {
            return false;
        }
        let is_word =
            |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || *byte >= 0x80);
        let before = at.checked_sub(1).and_then(|before| answer.get(before));
        !self.alone || !(is_word(before) || is_word(answer.get(at + self.bytes.len())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::ids::{SubscriptionId, TopicId};

    fn secrets(values: &[&str]) -> SentSecrets {
        let mut secrets = SentSecrets::default();
        values.iter().for_each(|value| secrets.add_header(value));
        secrets
    }

    #[test]
    fn a_secret_is_masked_whatever_it_is_called_and_however_it_is_written() {
        let secrets = secrets(&["p/ss+w\"rd=1"]);
        for form in [
            "p/ss+w\"rd=1",
            "p%2Fss%2Bw%22rd%3D1",
            "p%2fss%2bw%22rd%3d1",
            "p/ss+w\\\"rd=1",
            "p\\/ss+w\\\"rd=1",
            "P/SS+W\"RD=1",
            "p/ss+w&quot;rd=1",
            "p/ss+w&#34;rd=1",
            "\\u0070\\u002F\\u0073\\u0073\\u002B\\u0077\\u0022\\u0072\\u0064\\u003D\\u0031",
            &BASE64_STANDARD_NO_PAD.encode("p/ss+w\"rd=1"),
        ] {
            let answer = format!("you said {form}, did you?");
            let masked = secrets.mask_text(&answer, "***");
            assert_eq!(masked, "you said ***, did you?", "{form}");
        }
    }

    fn sent_to(destination: Destination, configured: &[ConfiguredSecret]) -> SentSecrets {
        let subscription = Subscription::new(SubscriptionId(1), TopicId(1), "s", destination);
        SentSecrets::of(&subscription, configured)
    }

    #[track_caller]
    fn check_masked(secrets: &SentSecrets, values: &[&str]) {
        for value in values {
            let answer = format!("{{\"got\":\"{value}\"}}");
            assert_eq!(secrets.mask_text(&answer, "***"), "{\"got\":\"***\"}", "{value}");
        }
    }

    #[test]
    fn secrets_of_the_configuration_are_masked() {
        let configured = [
            ConfiguredSecret::Url(Secret::new(
                "https://functions.example/api/f?code=function-code-1",
            )),
            ConfiguredSecret::Value(Secret::new("function-key-1")),
        ];
        let function = Destination::AzureFunction {
            resource: "/f".into(),
            batching: Default::default(),
            attributes: Vec::new(),
        };
        check_masked(
            &sent_to(function, &configured),
            &["function-code-1", "function-key-1"],
        );
    }

    #[test]
    fn the_parts_of_connection_strings_that_give_access_are_masked() {
        let hub = |connection: &str| Destination::EventHub {
            resource: BrokerAddress::Connection(Secret::new(connection)),
            attributes: Vec::new(),
        };
        let queue = |connection: &str| Destination::StorageQueue {
            resource: connection.into(),
            queue: "q".into(),
            message_ttl_secs: None,
        };
        let signature = "SharedAccessSignature sr=here&sig=c2lnbmF0dXJl%3D&se=1&skn=send";
        let connection = format!("Endpoint=sb://b.example/;EntityPath=h;SharedAccessSignature={signature}");
        let secrets = sent_to(hub(&connection), &[]);
        check_masked(
            &secrets,
            &[signature, connection.as_str(), "c2lnbmF0dXJl=", "c2lnbmF0dXJl%3D"],
        );
        let connection = "Endpoint=sb://b.example/;sharedaccesskeyname=n; sharedaccesskey = a2V5b2ZhYnJva2Vy";
        check_masked(&sent_to(hub(connection), &[]), &["a2V5b2ZhYnJva2Vy"]);
        let connection = "AccountName=a;AccountKey=a2V5b2Zhbg==;EndpointSuffix=s.example";
        check_masked(&sent_to(queue(connection), &[]), &[connection, "a2V5b2Zhbg=="]);
        let connection =
            "QueueEndpoint=https://a.example;SharedAccessSignature=?sv=2021-12-02&sig=c2lnbmF0dXJl";
        check_masked(&sent_to(queue(connection), &[]), &["c2lnbmF0dXJl"]);
        // Values derived from a key for each request are recognized by their names.
        let echoed =
            "authorization: SharedKey a:c2ln+bmF0/dXJl= and SharedAccessSignature sr=x&SIG=abc%3d&se=1";
        let expected = "authorization: SharedKey *** and SharedAccessSignature sr=x&SIG=***&se=1";
        assert_eq!(sent_to(queue("a"), &[]).mask_text(echoed, "***"), expected);
        assert_eq!(SentSecrets::default().mask_text(echoed, "***"), echoed);
    }

    #[test]
    fn many_secrets_are_all_masked() {
        let mut secrets = SentSecrets::default();
        let basic = |n: u32| base64::prelude::BASE64_STANDARD.encode(format!("user{n}:p@ss/w+rd-{n}"));
        for n in 0..10 {
            secrets.add_header(&format!("Basic {}", basic(n)));
        }
        let parameters: Vec<String> = (0..QUERY_VALUES_MAX).map(|n| format!("p{n}=value+{n}")).collect();
        secrets.add_url(&format!("https://h/?{}", parameters.join("&")));
        for n in 0..10 {
            check_masked(&secrets, &[&basic(n), &format!("p@ss/w+rd-{n}")]);
        }
        for n in 0..QUERY_VALUES_MAX {
            check_masked(&secrets, &[&format!("value+{n}"), &format!("value%2b{n}")]);
        }
        assert_eq!(secrets.mask_text("nothing of it", "***"), "nothing of it");
        // With more values than are looked for, nothing is shown.
        secrets.add_url(&format!("https://h/?{}&more=than+that", parameters.join("&")));
        assert_eq!(secrets.mask_text("nothing of it", "***"), "***");
    }

    #[test]
    fn what_is_no_secret_stays() {
        let mut secrets = secrets(&["abc", "hunter22"]);
        secrets.add_url("https://user:passw0rd@here/path?code=k3y%3Dvalue&v=1&mode=fast#end");
        let check = |answer: &str, expected: &str| {
            assert_eq!(secrets.mask_text(answer, "***"), expected);
        };
        check(
            "session-service.invalid: no such host",
            "session-service.invalid: no such host",
        );
        check(
            "the alphabet begins with abcdef, v=1",
            "the alphabet begins with abcdef, v=1",
        );
        check("token abc; xhunter22y", "token ***; x***y");
        check("k3y%3Dvalue or k3y=value", "*** or ***");
        check("mode fast, breakfast", "mode ***, breakfast");
        check("passw0rd", "***");
    }

    #[test]
    fn credentials_are_known_without_their_scheme() {
        let basic = format!("Basic {}", base64::prelude::BASE64_STANDARD.encode("me:s3cret!"));
        let secrets = secrets(&["Bearer eyJ.abc.def", &basic]);
        assert_eq!(secrets.mask_text("got eyJ.abc.def", "***"), "got ***");
        assert_eq!(
            secrets.mask_text("password s3cret! is old", "***"),
            "password *** is old"
        );
    }

    #[test]
    fn a_secret_that_is_cut_off_is_masked() {
        let secrets = secrets(&["supersecretvalue"]);
        assert_eq!(secrets.mask(b"it was supersec", true, "***"), b"it was ***");
        assert_eq!(secrets.mask(b"it was supersec", false, "***"), b"it was supersec");
        assert_eq!(secrets.mask(b"it was su", true, "***"), b"it was su");
    }
}
