//! Pages of lists in order of creation: `$top`, `$filter`, `$skiptoken`.

use super::{ArmContext, Result, json_answer};
use crate::http::{Answer, ApiCall, decoded};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use hyper::StatusCode;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use postrider_core::time::Timestamp;
use postrider_engine::directory::CreationKey;
use postrider_wire::arm::{ArmError, NameFilter};
use serde_json::{Value, json};

const TOP_DEFAULT: usize = 20;
const TOP_MAX: usize = 100;
/// Characters that need no escape in a query value. A plus is escaped, since it would be read as a
/// space.
const QUERY: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// Parameters of a list request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListRequest {
    pub top: usize,
    pub filter: Option<NameFilter>,
    /// Position of the last item on the previous page.
    pub after: Option<ListPosition>,
}

/// Position of an item in its list. Positions are unique and pages continue after one, so that
/// items added or deleted by others meanwhile are neither repeated nor hide the rest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ListPosition {
    pub created: Timestamp,
    /// Orders items that were created in the same instant.
    pub rank: String,
}

/// Digits of the largest 64-bit number: ranks padded to this width sort as numbers.
const RANK_DIGITS: usize = 20;

impl ListPosition {
    pub fn new(created: Timestamp, id: u64) -> ListPosition {
        ListPosition {
            created,
            rank: format!("{id:0RANK_DIGITS$}"),
        }
    }

    fn token(&self) -> String {
        let text = format!("{:0RANK_DIGITS$}/{}", self.created.nanos(), self.rank);
        BASE64_URL_SAFE_NO_PAD.encode(text)
    }

    fn from_token(token: &str) -> Option<ListPosition> {
        let text = String::from_utf8(BASE64_URL_SAFE_NO_PAD.decode(token).ok()?).ok()?;
        let (created, rank) = text.split_once('/')?;
        Some(ListPosition {
            created: Timestamp::from_nanos(digits(created)?.parse().ok()?),
            rank: rank.to_owned(),
        })
    }

    /// The key for lists whose items have an id.
    pub fn creation_key(&self) -> Result<CreationKey> {
        let id = digits(&self.rank).and_then(|rank| rank.parse().ok());
        Ok(CreationKey {
            created: self.created,
            id: id.ok_or_else(unknown_token)?,
        })
    }
}

impl From<CreationKey> for ListPosition {
    fn from(key: CreationKey) -> ListPosition {
        ListPosition::new(key.created, key.id)
    }
}

fn digits(text: &str) -> Option<&str> {
    let well_formed = text.len() == RANK_DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
    well_formed.then_some(text)
}

/// Refuses a token. Tokens of versions whose lists were ordered by name are refused too: they hold
/// no position in these lists.
fn unknown_token() -> ArmError {
    let message = "$skiptoken is not one that this server gave out; read the list from its beginning";
    ArmError::new(400, "InvalidRequest", message).at("$skiptoken")
}

impl ListRequest {
    /// Position to continue from, in a list whose items have an id.
    pub fn after_key(&self) -> Result<Option<CreationKey>> {
        self.after.as_ref().map(ListPosition::creation_key).transpose()
    }

    /// Reads the parameters. Pages have 20 items unless the client asks for another number.
    pub fn read(call: &ApiCall) -> Result<ListRequest> {
        let query = |name: &str| {
            let given = call.query(name).filter(|given| !given.is_empty())?;
            Some(decoded(&given.replace('+', " ")).into_owned())
        };
        read(query("$top"), query("$filter"), query("$skiptoken"))
    }

    /// Reads only `$skiptoken`, for lists with other rules about the remaining parameters.
    pub fn read_token(call: &ApiCall) -> Result<Option<ListPosition>> {
        let token = call.query("$skiptoken").filter(|given| !given.is_empty());
        Ok(read(None, None, token.map(|token| decoded(token).into_owned()))?.after)
    }
}

fn read(top: Option<String>, filter: Option<String>, token: Option<String>) -> Result<ListRequest> {
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
    let after = token
        .map(|token| ListPosition::from_token(&token).ok_or_else(unknown_token))
        .transpose()?;
    let filter = filter.map(|filter| NameFilter::parse(&filter)).transpose()?;
    Ok(ListRequest { top, filter, after })
}

/// An item of a list with its position and name.
pub struct ListItem<T> {
    pub position: ListPosition,
    pub name: String,
    pub of: T,
}

/// Answers with one page. `show` is called only for items on that page.
pub fn page<T>(
    call: &ApiCall,
    context: &ArmContext,
    asked: &ListRequest,
    items: impl IntoIterator<Item = ListItem<T>>,
    show: impl Fn(&T) -> Value,
) -> Answer {
    let (items, more) = cut(asked, items);
    let value: Vec<Value> = items.iter().map(|item| show(&item.of)).collect();
    let mut body = json!({ "value": value });
    if let (true, Some(last)) = (more, items.last()) {
        body["nextLink"] = json!(next_link(call, context, &last.position));
    }
    json_answer(call, StatusCode::OK, &body)
}

/// The items of the page in order, and whether more follow.
fn cut<T>(asked: &ListRequest, items: impl IntoIterator<Item = ListItem<T>>) -> (Vec<ListItem<T>>, bool) {
    let mut found: Vec<ListItem<T>> = items
        .into_iter()
        .filter(|item| asked.after.as_ref().is_none_or(|after| item.position > *after))
        .filter(|item| {
            asked
                .filter
                .as_ref()
                .is_none_or(|filter| filter.takes(&item.name))
        })
        .collect();
    let more = found.len() > asked.top;
    if more {
        // Only the items of this page are sorted: a list can hold many more.
        found.select_nth_unstable_by(asked.top, |a, b| a.position.cmp(&b.position));
        found.truncate(asked.top);
    }
    found.sort_unstable_by(|a, b| a.position.cmp(&b.position));
    (found, more)
}

/// URL of the next page: the same request, continuing after `last`.
fn next_link(call: &ApiCall, context: &ArmContext, last: &ListPosition) -> String {
    let mut query = format!("api-version={}", context.api_version);
    for name in ["$top", "$filter", "$expand"] {
        if let Some(given) = call.query(name).filter(|given| !given.is_empty()) {
            let value = decoded(&given.replace('+', " ")).into_owned();
            query.push_str(&format!("&{name}={}", utf8_percent_encode(&value, QUERY)));
        }
    }
    let token = last.token();
    format!(
        "{}{}?{query}&$skiptoken={token}",
        context.base_url,
        call.uri.path()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(seconds: i64, id: u64) -> ListPosition {
        ListPosition::new(Timestamp::from_secs(seconds), id)
    }

    fn asked(top: usize, after: Option<(i64, u64)>) -> ListRequest {
        ListRequest {
            top,
            filter: None,
            after: after.map(|(seconds, id)| position(seconds, id)),
        }
    }

    fn items(made: &[(&str, i64, u64)]) -> Vec<ListItem<()>> {
        let item = |(name, seconds, id): &(&str, i64, u64)| ListItem {
            position: position(*seconds, *id),
            name: (*name).to_owned(),
            of: (),
        };
        made.iter().map(item).collect()
    }

    #[test]
    fn pages_go_on_where_the_one_before_ended() {
        let check = |asked: &ListRequest, made: &[(&str, i64, u64)], expected: (&[&str], bool)| {
            let (found, more) = cut(asked, items(made));
            let found: Vec<_> = found.iter().map(|item| item.name.as_str()).collect();
            assert_eq!((&*found, more), expected);
        };
        // Ids in a cluster do not follow the order of creation; two items were created in the same
        // instant.
        let all = [("d", 30, 4), ("B", 10, 900), ("a", 20, 11), ("c", 20, 2)];
        check(&asked(2, None), &all, (&["B", "c"], true));
        check(&asked(2, Some((20, 2))), &all, (&["a", "d"], false));
        // The last item of the previous page was deleted meanwhile, and another one was created.
        let later = [("d", 30, 4), ("B", 10, 900), ("a", 20, 11), ("0", 31, 1)];
        check(&asked(2, Some((20, 2))), &later, (&["a", "d"], true));
        check(&asked(4, None), &all, (&["B", "c", "a", "d"], false));
        check(&asked(2, Some((30, 4))), &all, (&[], false));
        let filter = NameFilter::parse("name ne 'b'").ok();
        let asked = ListRequest {
            filter,
            ..asked(2, None)
        };
        check(&asked, &all, (&["c", "a"], true));
    }

    #[test]
    fn parameters() {
        let none = ListRequest { ..asked(20, None) };
        assert_eq!(read(None, None, None), Ok(none));
        assert_eq!(
            read(Some("100".into()), None, Some(position(7, 8).token())),
            Ok(asked(100, Some((7, 8))))
        );
        let key = asked(1, Some((7, 8))).after_key().unwrap().unwrap();
        assert_eq!((key.created, key.id), (Timestamp::from_secs(7), 8));
        let target = |asked: Result<ListRequest>| asked.unwrap_err().target;
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
        // Not Base64, a name, a name with a group, an id: the last three are tokens of earlier
        // versions.
        let earlier = ["orders", "orders/rg1", "00000000000000000007", "7/8"]
            .map(|text| BASE64_URL_SAFE_NO_PAD.encode(text));
        for token in earlier.into_iter().chain(["!".to_owned()]) {
            assert_eq!(
                target(read(None, None, Some(token.clone()))).as_deref(),
                Some("$skiptoken"),
                "{token}"
            );
        }
        let of_domain_topic = ListPosition {
            created: Timestamp::from_secs(7),
            rank: "east".into(),
        };
        let asked = read(None, None, Some(of_domain_topic.token())).unwrap();
        assert_eq!(asked.after.as_ref(), Some(&of_domain_topic));
        assert_eq!(
            asked.after_key().unwrap_err().target.as_deref(),
            Some("$skiptoken")
        );
    }
}
