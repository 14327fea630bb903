//! The messages of OTLP, as far as traces need them. Numbers and names are those of
//! `opentelemetry-proto` 1.x, which never change; fields that traces do not need are omitted.

use serde::{Deserialize, Serialize, Serializer};

#[derive(Clone, PartialEq, prost::Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ExportTraceServiceRequest {
    #[prost(message, repeated, tag = "1")]
    pub resource_spans: Vec<ResourceSpans>,
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    pub resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    pub scope_spans: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct Resource {
    #[prost(message, repeated, tag = "1")]
    pub attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct ScopeSpans {
    #[prost(message, optional, tag = "1")]
    pub scope: Option<Scope>,
    #[prost(message, repeated, tag = "2")]
    pub spans: Vec<Span>,
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct Scope {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub version: String,
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Span {
    #[prost(bytes = "vec", tag = "1")]
    #[serde(serialize_with = "hex")]
    pub trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    #[serde(serialize_with = "hex")]
    pub span_id: Vec<u8>,
    #[prost(string, tag = "3")]
    #[serde(skip_serializing_if = "String::is_empty")]
    pub trace_state: String,
    /// Empty for the first span of a trace.
    #[prost(bytes = "vec", tag = "4")]
    #[serde(serialize_with = "hex", skip_serializing_if = "Vec::is_empty")]
    pub parent_span_id: Vec<u8>,
    #[prost(fixed32, tag = "16")]
    pub flags: u32,
    #[prost(string, tag = "5")]
    pub name: String,
    #[prost(int32, tag = "6")]
    pub kind: i32,
    #[prost(fixed64, tag = "7")]
    #[serde(serialize_with = "digits")]
    pub start_time_unix_nano: u64,
    #[prost(fixed64, tag = "8")]
    #[serde(serialize_with = "digits")]
    pub end_time_unix_nano: u64,
    #[prost(message, repeated, tag = "9")]
    pub attributes: Vec<KeyValue>,
    #[prost(message, repeated, tag = "13")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
    #[prost(message, optional, tag = "15")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
}

/// `SpanKind`
pub const KIND_SERVER: i32 = 2;
pub const KIND_CLIENT: i32 = 3;
/// `StatusCode`
pub const STATUS_ERROR: i32 = 2;
/// `SpanFlags`: whether the parent is remote is known, and it is.
pub const REMOTE: u32 = 0x300;
/// The parent is a span of this process.
pub const LOCAL: u32 = 0x100;

#[derive(Clone, PartialEq, prost::Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Link {
    #[prost(bytes = "vec", tag = "1")]
    #[serde(serialize_with = "hex")]
    pub trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    #[serde(serialize_with = "hex")]
    pub span_id: Vec<u8>,
    #[prost(fixed32, tag = "6")]
    pub flags: u32,
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct Status {
    #[prost(string, tag = "2")]
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    #[prost(int32, tag = "3")]
    pub code: i32,
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct KeyValue {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(message, optional, tag = "2")]
    pub value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct AnyValue {
    #[prost(oneof = "Value", tags = "1, 2, 3, 5")]
    #[serde(flatten)]
    pub value: Option<Value>,
}

#[derive(Clone, PartialEq, prost::Oneof, Serialize)]
pub enum Value {
    #[prost(string, tag = "1")]
    #[serde(rename = "stringValue")]
    Text(String),
    #[prost(int64, tag = "3")]
    #[serde(rename = "intValue", serialize_with = "digits")]
    Number(i64),
    #[prost(message, tag = "5")]
    #[serde(rename = "arrayValue")]
    List(ArrayValue),
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct ArrayValue {
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<AnyValue>,
}

#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ExportTraceServiceResponse {
    #[prost(message, optional, tag = "1")]
    pub partial_success: Option<PartialSuccess>,
}

#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PartialSuccess {
    #[prost(int64, tag = "1")]
    #[serde(deserialize_with = "number")]
    pub rejected_spans: i64,
    #[prost(string, tag = "2")]
    pub error_message: String,
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::Text(text)
    }
}

impl From<i64> for Value {
    fn from(number: i64) -> Value {
        Value::Number(number)
    }
}

impl From<&[Box<str>]> for Value {
    fn from(texts: &[Box<str>]) -> Value {
        let values = texts.iter().map(|text| AnyValue {
            value: Some(Value::from(&**text)),
        });
        Value::List(ArrayValue {
            values: values.collect(),
        })
    }
}

impl KeyValue {
    pub fn new(key: &str, value: impl Into<Value>) -> KeyValue {
        KeyValue {
            key: key.to_owned(),
            value: Some(AnyValue {
                value: Some(value.into()),
            }),
        }
    }
}

/// OTLP's JSON writes ids in hex, not in base64 like other bytes.
fn hex<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    let digits = bytes.iter().map(|byte| format!("{byte:02x}"));
    to.serialize_str(&digits.collect::<String>())
}

/// Protobuf's JSON writes 64-bit numbers as text.
fn digits<S: Serializer>(number: &impl std::fmt::Display, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(number)
}

fn number<'de, D: serde::Deserializer<'de>>(from: D) -> Result<i64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Number(i64),
        Text(String),
    }
    match Either::deserialize(from)? {
        Either::Number(number) => Ok(number),
        Either::Text(text) => text.parse().map_err(serde::de::Error::custom),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;
    use serde_json::json;

    #[test]
    fn values_are_written_as_protobuf_s_json_wants_them() {
        let check = |value: Value, expected: serde_json::Value| {
            let shown = serde_json::to_value(KeyValue::new("k", value)).unwrap();
            assert_eq!(shown, json!({"key": "k", "value": expected}));
        };
        check("a".into(), json!({"stringValue": "a"}));
        check(5.into(), json!({"intValue": "5"}));
        let list: Value = ["a".into(), "b".into()].as_slice().into();
        let values = json!([{"stringValue": "a"}, {"stringValue": "b"}]);
        check(list, json!({"arrayValue": {"values": values}}));
    }

    // Made with PyPI's opentelemetry-proto 1.37:
    // ExportTraceServiceResponse(partial_success=ExportTracePartialSuccess( rejected_spans=3,
    // error_message="no")).SerializeToString().hex()
    #[test]
    fn answers_are_read_in_both_forms() {
        let expected = ExportTraceServiceResponse {
            partial_success: Some(PartialSuccess {
                rejected_spans: 3,
                error_message: "no".into(),
            }),
        };
        let bytes = [0x0a, 0x06, 0x08, 0x03, 0x12, 0x02, 0x6e, 0x6f];
        assert_eq!(ExportTraceServiceResponse::decode(&bytes[..]).unwrap(), expected);
        for text in [
            r#"{"partialSuccess":{"rejectedSpans":"3","errorMessage":"no"}}"#,
            r#"{"partialSuccess":{"rejectedSpans":3,"errorMessage":"no","more":1}}"#,
        ] {
            let read: ExportTraceServiceResponse = serde_json::from_str(text).unwrap();
            assert_eq!(read, expected, "{text}");
        }
        let read: ExportTraceServiceResponse = serde_json::from_str("{}").unwrap();
        assert_eq!(read, ExportTraceServiceResponse::default());
    }
}
