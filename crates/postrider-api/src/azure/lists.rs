//! Pages of lists: `$top`, `$filter`, `$skiptoken`.

use super::{Context, Result, json_answer};
use crate::http::{Answer, Call, decoded};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use hyper::StatusCode;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use postrider_wire::arm::{ArmError, NameFilter};
use serde_json::{Value, json};

const TOP_DEFAULT: usize = 20;
const TOP_MAX: usize = 100;
/// What stands for itself in a query; a plus would be read as a space.
const QUERY: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// What a list request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub top: usize,
    pub filter: Option<NameFilter>,
    /// The key of the last thing on the page before this one.
    pub after: Option<String>,
}

impl Asked {
    /// With pages of 20 unless the client says otherwise.
    pub fn read(call: &Call) -> Result<Asked> {
        let query = |name: &str| {
            let given = call.query(name).filter(|given| !given.is_empty())?;
            Some(decoded(&given.replace('+', " ")).into_owned())
        };
        read(query("$top"), query("$filter"), query("$skiptoken"))
    }

    /// For lists with other rules about the rest.
    pub fn read_token(call: &Call) -> Result<Option<String>> {
        let token = call.query("$skiptoken").filter(|given| !given.is_empty());
        Ok(read(None, None, token.map(|token| decoded(token).into_owned()))?.after)
    }
}

fn read(top: Option<String>, filter: Option<String>, token: Option<String>) -> Result<Asked> {
    let refused = |name: &str, reason: String| {
        Err(ArmError::new(400, "InvalidRequest", format!("{name} {reason}")).at(name))
    };
    let top = match top.as_deref().map(str::parse) {
        None => TOP_DEFAULT,
        Some(Ok(top)) if (1..=TOP_MAX).contains(&top) => top,
        Some(_) => {
            let given = top.unwrap_or_default();
            return refused("$top", format!("must be between 1 and {TOP_MAX}, was {given:?}"));
        }
    };
    let after = match token {
        None => None,
        Some(token) => match BASE64_URL_SAFE_NO_PAD.decode(&token).map(String::from_utf8) {
            Ok(Ok(after)) => Some(after),
            _ => return refused("$skiptoken", "is not one that this server gave out".into()),
        },
    };
    let filter = filter.map(|filter| NameFilter::parse(&filter)).transpose()?;
    Ok(Asked { top, filter, after })
}

/// Something in a list: its place, its name, itself. Keys are unique, and pages go by them: what others add or
/// delete meanwhile neither repeats nor hides the rest.
pub struct Item<T> {
    pub key: String,
    pub name: String,
    pub of: T,
}

/// One page. `show` is asked for those on it only.
pub fn page<T>(
    call: &Call,
    context: &Context,
    asked: &Asked,
    items: impl IntoIterator<Item = Item<T>>,
    show: impl Fn(&T) -> Value,
) -> Answer {
    let (items, more) = cut(asked, items);
    let value: Vec<Value> = items.iter().map(|item| show(&item.of)).collect();
    let mut body = json!({ "value": value });
    if let (true, Some(last)) = (more, items.last()) {
        body["nextLink"] = json!(next_link(call, context, &last.key));
    }
    json_answer(call, StatusCode::OK, &body)
}

/// The things on the page in order, and whether there are more.
fn cut<T>(asked: &Asked, items: impl IntoIterator<Item = Item<T>>) -> (Vec<Item<T>>, bool) {
    let mut found: Vec<Item<T>> = items
        .into_iter()
        .filter(|item| asked.after.as_ref().is_none_or(|after| item.key > *after))
        .filter(|item| {
            asked
                .filter
                .as_ref()
                .is_none_or(|filter| filter.takes(&item.name))
        })
        .collect();
    let more = found.len() > asked.top;
    if more {
        // There may be many more than are shown: only those are put in order.
        found.select_nth_unstable_by(asked.top, |a, b| a.key.cmp(&b.key));
        found.truncate(asked.top);
    }
    found.sort_unstable_by(|a, b| a.key.cmp(&b.key));
    (found, more)
}

/// The same request again, from behind `last` on.
fn next_link(call: &Call, context: &Context, last: &str) -> String {
    let mut query = format!("api-version={}", context.api_version);
    for name in ["$top", "$filter", "$expand"] {
        if let Some(given) = call.query(name).filter(|given| !given.is_empty()) {
            let value = decoded(&given.replace('+', " ")).into_owned();
            query.push_str(&format!("&{name}={}", utf8_percent_encode(&value, QUERY)));
        }
    }
    let token = BASE64_URL_SAFE_NO_PAD.encode(last);
    format!(
        "{}{}?{query}&$skiptoken={token}",
        context.base_url,
        call.uri.path()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(top: usize, after: Option<&str>) -> Asked {
        Asked {
            top,
            filter: None,
            after: after.map(str::to_owned),
        }
    }

    fn items(names: &[&str]) -> Vec<Item<()>> {
        names
            .iter()
            .map(|name| Item {
                key: name.to_lowercase(),
                name: (*name).to_owned(),
                of: (),
            })
            .collect()
    }

    #[test]
    fn pages_go_on_where_the_one_before_ended() {
        let check = |asked: &Asked, names: &[&str], expected: (&[&str], bool)| {
            let (found, more) = cut(asked, items(names));
            let found: Vec<_> = found.iter().map(|item| item.name.as_str()).collect();
            assert_eq!((&*found, more), expected);
        };
        let names = ["d", "B", "a", "c"];
        check(&asked(2, None), &names, (&["a", "B"], true));
        check(&asked(2, Some("b")), &names, (&["c", "d"], false));
        // What was shown last has been deleted meanwhile, and something came before it.
        check(&asked(2, Some("b")), &["d", "A", "a2", "c"], (&["c", "d"], false));
        check(&asked(4, None), &names, (&["a", "B", "c", "d"], false));
        check(&asked(2, Some("d")), &names, (&[], false));
        let filter = NameFilter::parse("name ne 'b'").ok();
        let asked = Asked {
            filter,
            ..asked(2, None)
        };
        check(&asked, &names, (&["a", "c"], true));
    }

    #[test]
    fn parameters() {
        let none = Asked { ..asked(20, None) };
        assert_eq!(read(None, None, None), Ok(none));
        assert_eq!(
            read(Some("100".into()), None, Some("Yg".into())),
            Ok(asked(100, Some("b")))
        );
        let target = |asked: Result<Asked>| asked.unwrap_err().target;
        for top in ["0", "101", "-1", "x", "1.5", "99999999999999999999"] {
            assert_eq!(
                target(read(Some(top.into()), None, None)).as_deref(),
                Some("$top"),
                "{top}"
            );
        }
        assert_eq!(
            target(read(None, Some("x".into()), None)).as_deref(),
            Some("$filter")
        );
        assert_eq!(
            target(read(None, None, Some("!".into()))).as_deref(),
            Some("$skiptoken")
        );
    }
}
