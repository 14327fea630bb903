//! Resource ids and paths of the management API. Keywords compare without case; names keep the
//! casing they were sent with.

/// A topic, domain or system topic: its group and its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventGridId {
    pub group: String,
    pub name: String,
}

/// Resource that event subscriptions belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The Azure subscription.
    Account,
    Group(String),
    Topic(EventGridId),
    Domain(EventGridId),
    DomainTopic {
        domain: EventGridId,
        name: String,
    },
    SystemTopic(EventGridId),
    /// A resource of another provider, by its whole id.
    Resource(String),
}

/// Parsed path of the management API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArmPath {
    /// `/subscriptions`
    Accounts,
    /// `/providers/Microsoft.EventGrid/…`: the remaining segments.
    Provider(Vec<String>),
    /// A scope other than `Resource`, and the remaining segments: `listKeys`,
    /// `providers/Microsoft.EventGrid/topics`, `providers/Microsoft.Storage/storageAccounts/a`, …
    Scope { scope: Scope, rest: Vec<String> },
    /// `{scope}/providers/Microsoft.EventGrid/eventSubscriptions[/{name}[/{action}]]`, or `nested`,
    /// without the provider, under a resource of Event Grid.
    EventSubscriptions {
        scope: Scope,
        nested: bool,
        name: Option<String>,
        action: Option<String>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    #[error("the path names no resource of the management API")]
    Unknown,
    #[error("The subscription '{0}' could not be found.")]
    OtherAccount(String),
}

const PROVIDER: &str = "Microsoft.EventGrid";

fn is(segment: Option<&String>, word: &str) -> bool {
    segment.is_some_and(|segment| segment.eq_ignore_ascii_case(word))
}

/// Parses a path, given without percent escapes and empty segments. `account` is the only
/// subscription id that exists.
pub fn parse_path(segments: &[String], account: &str) -> Result<ArmPath, IdError> {
    if is(segments.first(), "providers") && is(segments.get(1), PROVIDER) {
        return Ok(ArmPath::Provider(segments[2..].to_vec()));
    }
    if !is(segments.first(), "subscriptions") {
        return Err(IdError::Unknown);
    }
    let Some(given) = segments.get(1) else {
        return Ok(ArmPath::Accounts);
    };
    if !given.eq_ignore_ascii_case(account) {
        return Err(IdError::OtherAccount(given.clone()));
    }
    if let Some(found) = event_subscriptions(segments) {
        return Ok(found);
    }
    let (scope, taken) = own_scope(segments);
    Ok(ArmPath::Scope {
        scope,
        rest: segments[taken..].to_vec(),
    })
}

/// Parses the id of a scope, `/subscriptions/…`; none if it is no resource id.
pub fn parse_scope(id: &str, account: &str) -> Option<Scope> {
    let segments: Vec<String> = id.trim_matches('/').split('/').map(str::to_owned).collect();
    let ours = is(segments.first(), "subscriptions")
        && segments
            .get(1)
            .is_some_and(|given| given.eq_ignore_ascii_case(account));
    (ours && segments.iter().all(|segment| !segment.is_empty())).then(|| whole_scope(&segments))
}

fn event_subscriptions(segments: &[String]) -> Option<ArmPath> {
    // Followed by nothing, by a name, or by a name and an action.
    for behind in 0..=2 {
        let at = segments.len().checked_sub(behind + 1)?;
        if !is(segments.get(at), "eventSubscriptions") {
            continue;
        }
        let extension =
            at >= 2 && is(segments.get(at - 1), PROVIDER) && is(segments.get(at - 2), "providers");
        let scope = whole_scope(&segments[..if extension { at - 2 } else { at }]);
        let grid = matches!(
            scope,
            Scope::Topic(_) | Scope::Domain(_) | Scope::DomainTopic { .. } | Scope::SystemTopic(_)
        );
        if extension || grid {
            return Some(ArmPath::EventSubscriptions {
                scope,
                nested: !extension,
                name: segments.get(at + 1).cloned(),
                action: segments.get(at + 2).cloned(),
            });
        }
    }
    None
}

/// The scope that all segments together identify.
fn whole_scope(segments: &[String]) -> Scope {
    match own_scope(segments) {
        (scope, taken) if taken == segments.len() => scope,
        _ => Scope::Resource(format!("/{}", segments.join("/"))),
    }
}

/// The longest prefix that is the subscription, a group or a resource of Event Grid, and its
/// length.
fn own_scope(segments: &[String]) -> (Scope, usize) {
    let Some(group) = segments.get(3).filter(|_| is(segments.get(2), "resourceGroups")) else {
        return (Scope::Account, 2);
    };
    let of_group = (Scope::Group(group.clone()), 4);
    if !(is(segments.get(4), "providers") && is(segments.get(5), PROVIDER)) {
        return of_group;
    }
    let (Some(kind), Some(name)) = (segments.get(6), segments.get(7)) else {
        return of_group;
    };
    let id = EventGridId {
        group: group.clone(),
        name: name.clone(),
    };
    match kind.to_lowercase().as_str() {
        "topics" => (Scope::Topic(id), 8),
        "systemtopics" => (Scope::SystemTopic(id), 8),
        "domains" => match segments.get(9).filter(|_| is(segments.get(8), "topics")) {
            Some(topic) => {
                let name = topic.clone();
                (Scope::DomainTopic { domain: id, name }, 10)
            }
            None => (Scope::Domain(id), 8),
        },
        _ => of_group,
    }
}

/// The id with provider and type segments in lower case, as `properties.topic` of a subscription
/// has it except on a system topic.
pub fn lower_provider(id: &str) -> String {
    let parts: Vec<&str> = id.split('/').collect();
    let is_word = |at: usize| {
        let before = &parts[..at];
        let provider = before
            .iter()
            .rposition(|word| word.eq_ignore_ascii_case("providers"));
        // After the provider, types and names alternate.
        provider.is_some_and(|provider| at == provider + 1 || (at - provider).is_multiple_of(2))
    };
    let lowered = (0..parts.len()).map(|at| match is_word(at) {
        true => parts[at].to_lowercase(),
        false => parts[at].to_owned(),
    });
    lowered.collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCOUNT: &str = "aaaa-1";

    fn parsed(path: &str) -> Result<ArmPath, IdError> {
        let segments: Vec<String> = path
            .split('/')
            .filter(|s| !s.is_empty())
            .map(str::to_owned)
            .collect();
        parse_path(&segments, ACCOUNT)
    }

    fn grid(name: &str) -> EventGridId {
        EventGridId {
            group: "Rg".into(),
            name: name.into(),
        }
    }

    const G: &str = "/subscriptions/AAAA-1/resourcegroups/Rg";

    #[test]
    fn scopes() {
        let check = |path: &str, scope: Scope, rest: &[&str]| {
            let rest = rest.iter().map(|s| (*s).to_owned()).collect();
            assert_eq!(parsed(path), Ok(ArmPath::Scope { scope, rest }), "{path}");
        };
        check("/subscriptions/aaaa-1", Scope::Account, &[]);
        check(G, Scope::Group("Rg".into()), &[]);
        let topics = format!("{G}/providers/microsoft.eventgrid/topics");
        check(
            &topics,
            Scope::Group("Rg".into()),
            &["providers", "microsoft.eventgrid", "topics"],
        );
        check(
            &format!("{topics}/T1/LISTKEYS"),
            Scope::Topic(grid("T1")),
            &["LISTKEYS"],
        );
        let domain = format!("{G}/providers/Microsoft.EventGrid/domains/d");
        check(&format!("{domain}/topics"), Scope::Domain(grid("d")), &["topics"]);
        let name = "x".to_owned();
        let topic = Scope::DomainTopic {
            domain: grid("d"),
            name,
        };
        check(&format!("{domain}/topics/x"), topic, &[]);
        let account = "/subscriptions/aaaa-1/providers/Microsoft.EventGrid/locations/l/eventSubscriptions";
        let rest = [
            "providers",
            "Microsoft.EventGrid",
            "locations",
            "l",
            "eventSubscriptions",
        ];
        check(account, Scope::Account, &rest);
        assert_eq!(
            parsed("/subscriptions/b/x"),
            Err(IdError::OtherAccount("b".into()))
        );
        assert_eq!(parsed("/favicon.ico"), Err(IdError::Unknown));
    }

    #[test]
    fn event_subscriptions_hang_on_anything() {
        let check = |path: &str, scope: Scope, nested: bool, name: Option<&str>, action: Option<&str>| {
            let expected = ArmPath::EventSubscriptions {
                scope,
                nested,
                name: name.map(str::to_owned),
                action: action.map(str::to_owned),
            };
            assert_eq!(parsed(path), Ok(expected), "{path}");
        };
        let topic = format!("{G}/providers/Microsoft.EventGrid/topics/t");
        let of_topic = || Scope::Topic(grid("t"));
        check(
            &format!("{topic}/eventSubscriptions"),
            of_topic(),
            true,
            None,
            None,
        );
        check(
            &format!("{topic}/eventsubscriptions/s/getFullUrl"),
            of_topic(),
            true,
            Some("s"),
            Some("getFullUrl"),
        );
        let extension = format!("{topic}/providers/MICROSOFT.eventgrid/eventSubscriptions/s");
        check(&extension, of_topic(), false, Some("s"), None);
        let storage = format!("{G}/providers/Microsoft.Storage/storageAccounts/a");
        let scope = || Scope::Resource(storage.clone());
        let of_storage = format!("{storage}/providers/Microsoft.EventGrid/eventSubscriptions/s");
        check(&of_storage, scope(), false, Some("s"), None);
        let of_group = format!("{G}/providers/Microsoft.EventGrid/eventSubscriptions");
        check(&of_group, Scope::Group("Rg".into()), false, None, None);
    }

    #[test]
    fn provider_and_types_in_lower_case() {
        let id = "/subscriptions/S/resourceGroups/G/providers/Microsoft.EventGrid/Domains/D/Topics/T";
        let expected = "/subscriptions/S/resourceGroups/G/providers/microsoft.eventgrid/domains/D/topics/T";
        assert_eq!(lower_provider(id), expected);
        assert_eq!(
            lower_provider("/subscriptions/S/resourceGroups/G"),
            "/subscriptions/S/resourceGroups/G"
        );
    }
}
