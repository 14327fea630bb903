//! Client of the management API: resources, lists and long-running operations.

use super::ids::{ResourceIds, ResourceKind};
use super::normalize::ServerBatchDefaults;
use crate::client::{ApiAnswer, ApiClient, encoded};
use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http::Method;
use postrider_core::time::Clock;
use postrider_engine::clock::SystemClock;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt;
use std::time::Duration;

const VERSION: &str = "2025-02-15";
/// API version of subscription and group lists, which do not belong to Event Grid.
const ACCOUNTS_VERSION: &str = "2022-12-01";
/// Interval of polling an operation: short at first, then longer.
const LOOK_FIRST: Duration = Duration::from_millis(20);
const LOOK_MAX: Duration = Duration::from_secs(1);

/// Error with which the server refuses a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerRefusal {
    pub status: u16,
    pub code: String,
    pub message: String,
}

impl fmt::Display for ServerRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code.is_empty() {
            true => f.write_str(&self.message),
            false => write!(f, "({}) {}", self.code, self.message),
        }
    }
}

impl std::error::Error for ServerRefusal {}

impl ServerRefusal {
    pub fn of(answer: &ApiAnswer) -> ServerRefusal {
        let body: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        let text = |value: &Value, name: &str| value[name].as_str().map(str::to_owned);
        let error = match body.get("error") {
            Some(error) if error.is_object() => error,
            _ => &body,
        };
        let message = text(error, "message").or_else(|| text(error, "detail"));
        ServerRefusal {
            status: answer.status,
            code: text(error, "code").unwrap_or_default(),
            message: message.unwrap_or_else(|| format!("the server answers {}", answer.status)),
        }
    }
}

/// Whether an error is the server's refusal with this status.
pub fn is_refused(error: &anyhow::Error, status: u16) -> bool {
    error
        .downcast_ref::<ServerRefusal>()
        .is_some_and(|refused| refused.status == status)
}

pub struct ManagementClient {
    client: ApiClient,
    pub ids: ResourceIds,
    /// Group named on the command line.
    group: Option<String>,
}

/// A resource as read, with its ETag.
pub struct ReadResource {
    pub body: Value,
    pub etag: Option<String>,
}

impl ManagementClient {
    pub async fn connect(client: ApiClient, group: Option<String>) -> Result<ManagementClient> {
        let path = format!("/subscriptions?api-version={ACCOUNTS_VERSION}");
        let accounts = good(client.send(Method::GET, &path, true, &[], Bytes::new()).await?)?;
        let accounts: Value = json_of(&accounts)?;
        let Some(account) = accounts["value"][0]["subscriptionId"].as_str() else {
            bail!("the server names no subscription: is it Postrider?");
        };
        Ok(ManagementClient {
            ids: ResourceIds::new(account),
            client,
            group,
        })
    }

    pub async fn send(&self, method: Method, target: &str, body: Option<&Value>) -> Result<ApiAnswer> {
        self.send_if(method, target, body, None).await
    }

    async fn send_if(
        &self,
        method: Method,
        target: &str,
        body: Option<&Value>,
        etag: Option<&str>,
    ) -> Result<ApiAnswer> {
        let mut headers = vec![("content-type", "application/json")];
        headers.extend(etag.map(|etag| ("if-match", etag)));
        let body = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
        good(self.client.send(method, target, true, &headers, body).await?)
    }

    /// Sends a request outside the management API and returns any answer.
    pub async fn raw(
        &self,
        target: &str,
        with_secret: bool,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Result<ApiAnswer> {
        self.client
            .send(Method::POST, target, with_secret, headers, body)
            .await
    }

    pub async fn get(&self, id: &str) -> Result<ReadResource> {
        let answer = self.send(Method::GET, &target(id), None).await?;
        Ok(ReadResource {
            etag: answer.header("etag").map(str::to_owned),
            body: json_of(&answer)?,
        })
    }

    /// Like `get`, but `None` if the resource does not exist.
    pub async fn find(&self, id: &str) -> Result<Option<ReadResource>> {
        match self.get(id).await {
            Ok(read) => Ok(Some(read)),
            Err(e) if is_refused(&e, 404) => Ok(None),
            Err(e) => Err(e),
        }
    }

    pub async fn post(&self, id: &str, action: &str, body: Option<&Value>) -> Result<Value> {
        let answer = self
            .send(Method::POST, &target(&format!("{id}/{action}")), body)
            .await?;
        json_of(&answer)
    }

    /// All items of a list, across its pages.
    pub async fn list(&self, id: &str) -> Result<Vec<Value>> {
        self.pages(format!("{}&$top=100", target(id))).await
    }

    async fn pages(&self, mut path: String) -> Result<Vec<Value>> {
        let mut all = Vec::new();
        loop {
            let answer = self.send(Method::GET, &path, None).await?;
            let mut page: Value = json_of(&answer)?;
            if let Value::Array(items) = page["value"].take() {
                all.extend(items);
            }
            match page["nextLink"].as_str() {
                Some(next) => path = path_and_query(next)?,
                None => return Ok(all),
            }
        }
    }

    /// Creates or replaces a resource; with an ETag, only if it is unchanged since it was read.
    pub async fn put(&self, id: &str, body: Option<&Value>, etag: Option<&str>, wait: bool) -> Result<Value> {
        let answer = self.send_if(Method::PUT, &target(id), body, etag).await?;
        if !wait {
            return json_of(&answer);
        }
        self.settle(&answer, Some(id)).await?;
        Ok(self.get(id).await?.body)
    }

    /// Deletes a resource. Returns whether it existed.
    pub async fn delete(&self, id: &str, wait: bool) -> Result<bool> {
        let answer = self.send(Method::DELETE, &target(id), None).await?;
        if wait {
            self.settle(&answer, None).await?;
        }
        Ok(answer.status != 204)
    }

    /// Waits for the end of the operation that a request started.
    async fn settle(&self, answer: &ApiAnswer, id: Option<&str>) -> Result<()> {
        let Some(operation) = answer.header("azure-asyncoperation") else {
            return Ok(());
        };
        let path = path_and_query(operation)?;
        let mut pause = LOOK_FIRST;
        let mut told = false;
        loop {
            let state: Value = json_of(&self.send(Method::GET, &path, None).await?)?;
            if let Some(outcome) = outcome_of(&state) {
                return outcome.map_err(Into::into);
            }
            if let (Some(id), false) = (id, told) {
                told = self.tell_of_validation(id).await?;
            }
            SystemClock.sleep_until(SystemClock.now() + pause).await;
            pause = (pause * 2).min(LOOK_MAX);
        }
    }

    /// Tells the user if a webhook waits for manual validation. The validation URL is sent only to
    /// the endpoint, because opening it grants the endpoint's consent.
    async fn tell_of_validation(&self, id: &str) -> Result<bool> {
        let Some(read) = self.find(id).await? else {
            return Ok(false);
        };
        let waits = read.body["properties"]["provisioningState"] == json!("AwaitingManualAction");
        if waits {
            let until = self.validation_end(&read.body).await;
            let until = until.map(|until| format!(" until {until}")).unwrap_or_default();
            eprintln!(
                "the endpoint has not confirmed that it wants these events: open the validationUrl that was sent to \
                 it{until} (its log may show it). Waiting for that; Ctrl-C ends the waiting only."
            );
        }
        Ok(waits)
    }

    /// When the validation URL expires, if the server tells.
    async fn validation_end(&self, resource: &Value) -> Option<String> {
        let name = resource["name"].as_str()?;
        let path = format!(
            "/postrider/v1/handshakes?state=awaiting&subscription={}",
            encoded(name)
        );
        let answer = self.send(Method::GET, &path, None).await.ok()?;
        let found: Value = json_of(&answer).ok()?;
        let [only] = found["value"].as_array()?.as_slice() else {
            return None;
        };
        only["until"].as_str().map(str::to_owned)
    }

    /// The server's default profile; empty if the server does not tell.
    pub async fn profile(&self) -> Result<String> {
        let answer = self
            .client
            .send(Method::GET, "/healthz", false, &[], Bytes::new())
            .await?;
        let health: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        Ok(health["profile"].as_str().unwrap_or_default().to_owned())
    }

    /// The server's default batch limits; the usual ones if the server does not tell.
    pub async fn batch_defaults(&self) -> Result<ServerBatchDefaults> {
        let usual = ServerBatchDefaults::USUAL;
        let Ok(answer) = self.send(Method::GET, "/postrider/v1/server", None).await else {
            return Ok(usual);
        };
        let server: Value = json_of(&answer)?;
        let limit = |name: &str| server["batchDefaults"][name].as_u64();
        Ok(ServerBatchDefaults {
            events: limit("maxEventsPerBatch").unwrap_or(usual.events),
            kilobytes: limit("preferredBatchSizeInKilobytes").unwrap_or(usual.kilobytes),
        })
    }

    /// Group for a resource to create: as named, that of an existing resource, or the default.
    pub async fn group_for(&self, kind: ResourceKind, name: &str) -> Result<String> {
        if let Some(group) = &self.group {
            return Ok(group.clone());
        }
        if kind != ResourceKind::SystemTopic
            && let [place] = self.places(kind, name).await?.as_slice()
        {
            return Ok(place.clone());
        }
        self.default_group().await
    }

    /// Group of a command that names none.
    pub async fn default_group(&self) -> Result<String> {
        if let Some(group) = self.group.as_ref().or(self.client.group.as_ref()) {
            return Ok(group.clone());
        }
        let groups = self.groups().await?;
        let names: Vec<_> = groups.iter().filter_map(|group| group["name"].as_str()).collect();
        match names.as_slice() {
            [only] => Ok((*only).to_owned()),
            [] => bail!("the server has no resource group: name one with --group"),
            several => bail!("which resource group? Give --group: {}", several.join(", ")),
        }
    }

    async fn groups(&self) -> Result<Vec<Value>> {
        let path = format!(
            "{}/resourcegroups?api-version={ACCOUNTS_VERSION}",
            self.ids.account()
        );
        self.pages(path).await
    }

    /// Location of a group; a new group gets that of the others.
    pub async fn location_of(&self, group: &str) -> Result<String> {
        let groups = self.groups().await?;
        let named = |one: &&Value| {
            one["name"]
                .as_str()
                .is_some_and(|name| name.eq_ignore_ascii_case(group))
        };
        let found = groups.iter().find(named).or_else(|| groups.first());
        let location = found.and_then(|group| group["location"].as_str());
        Ok(location.unwrap_or("westus2").to_owned())
    }

    /// Groups that have a resource of this name.
    async fn places(&self, kind: ResourceKind, name: &str) -> Result<Vec<String>> {
        let list = self.ids.all(kind);
        let filter = format!("name eq '{}'", name.replace('\'', "''"));
        let found = self
            .pages(format!("{}&$filter={}", target(&list), encoded(&filter)))
            .await?;
        let ours = |one: &&Value| {
            one["name"]
                .as_str()
                .is_some_and(|found| found.eq_ignore_ascii_case(name))
        };
        let group = |one: &Value| Some(super::ids::group_of(one["id"].as_str()?)?.to_owned());
        Ok(found.iter().filter(ours).filter_map(group).collect())
    }

    /// Id of an existing resource.
    pub async fn locate(&self, kind: ResourceKind, name: &str) -> Result<String> {
        if let Some(group) = &self.group {
            return Ok(self.ids.resource(group, kind, name));
        }
        let places = self.places(kind, name).await?;
        let usual = self.client.group.as_ref();
        let group = match places.as_slice() {
            [] => {
                return Err(ServerRefusal {
                    status: 404,
                    code: "ResourceNotFound".into(),
                    message: format!("{} {name:?} does not exist", kind.noun()),
                }
                .into());
            }
            [only] => only,
            several => match several
                .iter()
                .find(|group| usual.is_some_and(|usual| usual.eq_ignore_ascii_case(group)))
            {
                Some(group) => group,
                None => bail!(
                    "there is a {} {name:?} in each of the groups {}: give --group",
                    kind.noun(),
                    several.join(", ")
                ),
            },
        };
        Ok(self.ids.resource(group, kind, name))
    }

    pub fn client(&self) -> &ApiClient {
        &self.client
    }

    /// Group named on the command line for this command.
    pub fn explicit_group(&self) -> Option<&str> {
        self.group.as_deref()
    }
}

/// Path and API version for an id.
pub fn target(id: &str) -> String {
    let segments: Vec<_> = id.split('/').map(encoded).collect();
    format!("{}?api-version={VERSION}", segments.join("/"))
}

/// Path and query of an absolute URL. The host is dropped: the server may be known by another name
/// than the one we use.
pub fn path_and_query(url: &str) -> Result<String> {
    let uri: http::Uri = url
        .parse()
        .with_context(|| format!("the server links to {url:?}"))?;
    let path = uri.path_and_query().map(ToString::to_string);
    path.with_context(|| format!("the server links to {url:?}"))
}

fn good(answer: ApiAnswer) -> Result<ApiAnswer> {
    match answer.status {
        200..300 => Ok(answer),
        _ => Err(ServerRefusal::of(&answer).into()),
    }
}

fn json_of<T: DeserializeOwned>(answer: &ApiAnswer) -> Result<T> {
    serde_json::from_slice(&answer.body)
        .context("the server's answer is not understood: is it of another version?")
}

/// Result of an operation; `None` while it is running.
fn outcome_of(state: &Value) -> Option<Result<(), ServerRefusal>> {
    let error = |name: &str| state["error"][name].as_str().map(str::to_owned);
    let refused = |code: &str, message: &str| ServerRefusal {
        status: 0,
        code: error("code").unwrap_or_else(|| code.to_owned()),
        message: error("message").unwrap_or_else(|| message.to_owned()),
    };
    match state["status"].as_str() {
        Some("Succeeded") => Some(Ok(())),
        Some("Failed") => Some(Err(refused("Failed", "the operation failed"))),
        Some("Canceled") => Some(Err(refused(
            "Canceled",
            "a later change has taken the place of this one",
        ))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderMap;

    fn refused(status: u16, body: &'static str) -> String {
        let answer = ApiAnswer {
            status,
            headers: HeaderMap::new(),
            body: Bytes::from_static(body.as_bytes()),
        };
        ServerRefusal::of(&answer).to_string()
    }

    #[test]
    fn refusals_are_told_in_the_servers_words() {
        assert_eq!(
            refused(
                400,
                r#"{"error":{"code":"InvalidRequest","message":"location is required"}}"#
            ),
            "(InvalidRequest) location is required"
        );
        assert_eq!(refused(400, r#"{"detail":"rate: no"}"#), "rate: no");
        assert_eq!(refused(502, "<html>"), "the server answers 502");
    }

    #[test]
    fn operations_end_well_badly_or_not_yet() {
        assert_eq!(outcome_of(&json!({"status": "InProgress"})), None);
        assert_eq!(outcome_of(&json!({"status": "Succeeded"})), Some(Ok(())));
        let failed =
            json!({"status": "Failed", "error": {"code": "Url validation", "message": "it answers 500"}});
        let text = outcome_of(&failed).unwrap().unwrap_err().to_string();
        assert_eq!(text, "(Url validation) it answers 500");
        let canceled = outcome_of(&json!({"status": "Canceled"})).unwrap().unwrap_err();
        assert!(canceled.to_string().starts_with("(Canceled)"));
    }

    #[test]
    fn ids_are_asked_for_without_characters_that_mean_something() {
        assert_eq!(
            target("/subscriptions/0/x y"),
            "/subscriptions/0/x%20y?api-version=2025-02-15"
        );
        assert_eq!(
            path_and_query("https://elsewhere:1/a/b?c=d&$skiptoken=x").unwrap(),
            "/a/b?c=d&$skiptoken=x"
        );
    }
}
