//! Signatures that authenticate requests to Azure resources: storage accounts and everything on
//! Service Bus.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use postrider_core::time::Timestamp;
use ring::hmac;
use std::fmt::Write;
use std::time::Duration;

/// The lifetime of a Service Bus token: long enough for clocks that differ.
const TOKEN_LIFE: Duration = Duration::from_secs(3600);

/// The key of a storage account.
#[derive(Clone, Debug)]
pub struct StorageAccountKey {
    account: String,
    key: hmac::Key,
}

/// The parts of a request to a storage account that are signed.
pub struct SignedStorageRequest<'a> {
    pub method: &'a str,
    /// The length of the body.
    pub length: usize,
    pub content_type: &'a str,
    /// The `x-ms-` headers in the order of their names.
    pub headers: &'a [(&'a str, &'a str)],
    /// The path as written in the URL.
    pub path: &'a str,
    /// Parameters in the order of their names.
    pub parameters: &'a [(&'a str, &'a str)],
}

impl StorageAccountKey {
    /// None if the key is not base64.
    pub fn new(account: &str, key: &str) -> Option<StorageAccountKey> {
        let key = BASE64.decode(key).ok()?;
        Some(StorageAccountKey {
            account: account.to_owned(),
            key: hmac::Key::new(hmac::HMAC_SHA256, &key),
        })
    }

    /// The value of the header `Authorization`.
    pub fn authorization(&self, request: &SignedStorageRequest<'_>) -> String {
        let length = match request.length {
            0 => String::new(),
            length => length.to_string(),
        };
        // The empty lines stand for encoding, language, digest, dates, conditions and range, which
        // are never sent.
        let mut text = format!(
            "{}\n\n\n{length}\n\n{}\n\n\n\n\n\n\n",
            request.method, request.content_type
        );
        let written = "text can be written to";
        for (name, value) in request.headers {
            writeln!(text, "{name}:{value}").expect(written);
        }
        // Where the account is also the first segment of the path, its name appears twice.
        write!(text, "/{}{}", self.account, request.path).expect(written);
        for (name, value) in request.parameters {
            write!(text, "\n{name}:{value}").expect(written);
        }
        let signature = BASE64.encode(hmac::sign(&self.key, text.as_bytes()));
        format!("SharedKey {}:{signature}", self.account)
    }
}

/// A named key of a Service Bus namespace, or of one of its entities.
#[derive(Clone, Debug)]
pub struct ServiceBusKey {
    name: String,
    key: hmac::Key,
}

impl ServiceBusKey {
    /// The key is used as written and never base64-decoded, even if it looks like base64.
    pub fn new(name: &str, key: &str) -> ServiceBusKey {
        ServiceBusKey {
            name: name.to_owned(),
            key: hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes()),
        }
    }

    /// A token for `url`.
    pub fn token(&self, url: &str, now: Timestamp) -> String {
        let expires = (now + TOKEN_LIFE).nanos() / 1_000_000_000;
        let resource = escaped(url);
        let signature = hmac::sign(&self.key, format!("{resource}\n{expires}").as_bytes());
        let signature = escaped(&BASE64.encode(signature));
        let name = escaped(&self.name);
        format!("SharedAccessSignature sr={resource}&sig={signature}&se={expires}&skn={name}")
    }
}

/// Percent-encodes every character that could have a meaning in a query.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(byte)),
            _ => write!(out, "%{byte:02X}").expect("text can be written to"),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Azurite's well-known key.
    const KEY: &str =
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

    // Expected values: the signatures that the Python SDK (azure-storage-queue 12.18.1) makes for
    // such requests.
    #[test]
    fn storage_requests_are_signed_as_the_azure_sdk_signs_them() {
        let key = StorageAccountKey::new("devstoreaccount1", KEY).unwrap();
        let headers = [
            ("x-ms-date", "Sun, 15 Nov 2026 20:19:29 GMT"),
            ("x-ms-version", "2021-12-02"),
        ];
        let create = SignedStorageRequest {
            method: "PUT",
            length: 0,
            content_type: "",
            headers: &headers,
            path: "/devstoreaccount1/qwire",
            parameters: &[],
        };
        assert_eq!(
            key.authorization(&create),
            "SharedKey devstoreaccount1:nHB2i60UfQpXmpPJgmXblI2bwWbFhvy7s0y4odusZVI="
        );
        let put = SignedStorageRequest {
            method: "POST",
            length: 111,
            content_type: "application/xml",
            headers: &headers,
            path: "/devstoreaccount1/qwire/messages",
            parameters: &[("messagettl", "300")],
        };
        assert_eq!(
            key.authorization(&put),
            "SharedKey devstoreaccount1:1mvRx88yu0By9/67VjiHxAqt94ro5lrpwjt+k3bv3bE="
        );
        assert!(StorageAccountKey::new("a", "no base64!").is_none());
    }

    // The expected signatures were computed with Python's hmac.
    #[test]
    fn tokens_for_the_service_bus_name_the_resource_the_key_and_the_time() {
        let now = Timestamp::from_secs(1_403_733_277);
        let key = ServiceBusKey::new("RootManageSharedAccessKey", "c2VjcmV0IGtleQ==");
        assert_eq!(
            key.token("https://ns.servicebus.windows.net/orders", now),
            "SharedAccessSignature sr=https%3A%2F%2Fns.servicebus.windows.net%2Forders\
             &sig=L4YBKe%2Fwr9g2tejJQGJvAuwl%2BIh7UvQA3sRFDO5gi%2F8%3D&se=1403736877&skn=RootManageSharedAccessKey"
        );
        let key = ServiceBusKey::new("send & listen", "k+/=");
        assert_eq!(
            key.token("http://127.0.0.1:9/a~b", now),
            "SharedAccessSignature sr=http%3A%2F%2F127.0.0.1%3A9%2Fa~b&sig=EfMvTX6BF3l1pltIHA6dmhlBCjrrKkX3tq9jkKOxQCA%3D&se=1403736877&skn=send%20%26%20listen"
        );
    }
}
