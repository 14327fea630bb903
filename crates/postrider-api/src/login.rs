//! Login services: the discovery documents of Azure's clients, and the tokens that they request.
//!
//! az and the SDKs know two kinds of login service, and both are implemented: AD FS (`/adfs/…`),
//! which needs no further setting in az, and Entra (`/{tenant}/…`), which the SDKs' credentials
//! use.

use crate::Server;
use crate::access::{ConfiguredClient, same};
use crate::http::{Answer, ApiCall, decoded, json as json_answer, status};
use crate::logins::{IssuedCredential, LoginKind};
use crate::own_address::answer_base;
use crate::route::{LoginRoute, LoginService};
use crate::sessions::fresh_id;
use crate::throttle::{CredentialKind, LockedOut};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hyper::Method;
use hyper::header::{ALLOW, CACHE_CONTROL, HeaderValue, PRAGMA, WWW_AUTHENTICATE};
use percent_encoding::percent_decode_str;
use postrider_core::time::Timestamp;
use postrider_wire::arm::stable_guid;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

const BODY_MAX: usize = 64 << 10;
/// How long a token is valid, in seconds.
pub(crate) const TOKEN_LIFETIME: i64 = 3600;
/// Tenant names with which clients say that any tenant will do.
const ANY_TENANT: [&str; 4] = ["adfs", "common", "organizations", "consumers"];

impl<'a> LoginService<'a> {
    fn tenant(self) -> &'a str {
        match self {
            LoginService::Adfs => "adfs",
            LoginService::V1(tenant) | LoginService::V2(tenant) => tenant,
        }
    }

    fn version(self) -> &'static str {
        match self {
            LoginService::Adfs | LoginService::V1(_) => "1.0",
            LoginService::V2(_) => "2.0",
        }
    }

    /// Issuer that the tokens of this service name. A tenant that was requested by another name is
    /// named by its id, because az resolves tenant names in this way.
    fn issuer(self, base: &str, tenant: &str) -> String {
        match self {
            LoginService::Adfs => format!("{base}/adfs"),
            LoginService::V1(_) => format!("{base}/{tenant}/"),
            LoginService::V2(_) => format!("{base}/{tenant}/v2.0"),
        }
    }
}

/// Why a token is refused, in the error format of OAuth and Entra.
#[derive(Debug)]
struct TokenRefusal {
    status: u16,
    error: &'static str,
    /// Entra's error number, which people search for.
    code: u32,
    message: String,
}

impl TokenRefusal {
    fn new(status: u16, error: &'static str, code: u32, message: impl Into<String>) -> TokenRefusal {
        TokenRefusal {
            status,
            error,
            code,
            message: message.into(),
        }
    }

    fn missing(parameter: &str) -> TokenRefusal {
        let message = format!("The request body must contain the following parameter: '{parameter}'.");
        TokenRefusal::new(400, "invalid_request", 900_144, message)
    }

    fn malformed(message: impl Into<String>) -> TokenRefusal {
        TokenRefusal::new(400, "invalid_request", 9_000_411, message)
    }
}

impl From<LockedOut> for TokenRefusal {
    fn from(locked: LockedOut) -> TokenRefusal {
        TokenRefusal::new(429, "temporarily_unavailable", 0, locked.reason())
    }
}

pub(crate) async fn answer(server: &Server, call: &mut ApiCall, route: LoginRoute<'_>) -> Answer {
    if route == LoginRoute::Identity && server.config.managed_identity.is_none() {
        return crate::publish::no_such_path(call);
    }
    let wanted = route.method();
    let outcome = match call.method == wanted {
        true => serve(server, call, route).await,
        false => Err(TokenRefusal::new(
            405,
            "invalid_request",
            900_561,
            format!("The endpoint only accepts {wanted} requests."),
        )),
    };
    let mut answer = outcome.unwrap_or_else(|refusal| refuse(server, call, &refusal));
    let headers = answer.headers_mut();
    if route.gives_tokens() {
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(PRAGMA, HeaderValue::from_static("no-cache"));
    }
    match status_of(&answer) {
        405 => {
            let allow = match wanted {
                Method::POST => "POST",
                _ => "GET",
            };
            answer
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static(allow));
        }
        401 => {
            let challenge = HeaderValue::from_static("Basic realm=\"postrider\"");
            answer.headers_mut().insert(WWW_AUTHENTICATE, challenge);
        }
        _ => {}
    }
    answer
}

fn status_of(answer: &Answer) -> u16 {
    answer.status().as_u16()
}

async fn serve(server: &Server, call: &mut ApiCall, asked: LoginRoute<'_>) -> Result<Answer, TokenRefusal> {
    let base = answer_base(server, call);
    let tenant = &server.config.tenant;
    let body = match asked {
        LoginRoute::Metadata => metadata(&base, call.query("api-version").unwrap_or_default()),
        LoginRoute::Instance => instance(&base, tenant),
        LoginRoute::Discovery(service) => {
            check_tenant(service, tenant)?;
            discovery(service, &base, tenant)
        }
        LoginRoute::Keys(service) => {
            check_tenant(service, tenant)?;
            server.access.key_set(server.wall.now())
        }
        LoginRoute::Token(service) => {
            check_tenant(service, tenant)?;
            token(server, call, service, &base).await?
        }
        LoginRoute::Identity => identity(server, call, &base)?,
    };
    Ok(json_answer(status(200), body.to_string(), &call.id))
}

fn check_tenant(service: LoginService<'_>, known: &str) -> Result<(), TokenRefusal> {
    let tenant = decoded(service.tenant());
    let named = |name: &str| name.eq_ignore_ascii_case(&tenant);
    if named(known) || ANY_TENANT.into_iter().any(named) {
        return Ok(());
    }
    let message = format!(
        "Tenant '{}' not found. This server has one tenant: '{known}'.",
        shortened(&tenant)
    );
    Err(TokenRefusal::new(400, "invalid_request", 90_002, message))
}

/// The metadata document of a cloud, in the form of the API version: one cloud for the newest and
/// the oldest versions, a list for those between.
fn metadata(base: &str, api_version: &str) -> Value {
    let with_slash = format!("{base}/");
    let authentication = json!({
        "loginEndpoint": format!("{base}/adfs"),
        "audiences": [with_slash],
        "tenant": "adfs",
        "identityProvider": "ADFS",
    });
    if ("2015".."2019").contains(&api_version) {
        return json!({
            "galleryEndpoint": with_slash,
            "graphEndpoint": with_slash,
            "portalEndpoint": with_slash,
            "authentication": authentication,
        });
    }
    let cloud = json!({
        "name": "Postrider",
        "portal": base,
        "authentication": authentication,
        "resourceManager": base,
        "gallery": with_slash,
        "graph": with_slash,
        "graphAudience": with_slash,
        "microsoftGraphResourceId": with_slash,
        "batch": with_slash,
        "media": with_slash,
        "sqlManagement": with_slash,
        "activeDirectoryDataLake": with_slash,
        "suffixes": {"storage": "local", "keyVaultDns": "vault.local", "sqlServerHostname": "db.local"},
    });
    match ("2019".."2022").contains(&api_version) {
        true => json!([cloud]),
        false => cloud,
    }
}

fn discovery(service: LoginService<'_>, base: &str, tenant: &str) -> Value {
    let name = service.tenant();
    let (authorize, token, keys, logout) = match service {
        LoginService::Adfs => (
            "oauth2/authorize/",
            "oauth2/token/",
            "discovery/keys",
            "oauth2/logout",
        ),
        LoginService::V1(_) => (
            "oauth2/authorize",
            "oauth2/token",
            "discovery/keys",
            "oauth2/logout",
        ),
        LoginService::V2(_) => (
            "oauth2/v2.0/authorize",
            "oauth2/v2.0/token",
            "discovery/v2.0/keys",
            "oauth2/v2.0/logout",
        ),
    };
    json!({
        "issuer": service.issuer(base, tenant),
        "authorization_endpoint": format!("{base}/{name}/{authorize}"),
        "token_endpoint": format!("{base}/{name}/{token}"),
        "jwks_uri": format!("{base}/{name}/{keys}"),
        "end_session_endpoint": format!("{base}/{name}/{logout}"),
        "response_types_supported": ["token"],
        "response_modes_supported": ["form_post"],
        "subject_types_supported": ["pairwise"],
        "scopes_supported": ["openid"],
        "grant_types_supported": ["client_credentials"],
        "token_endpoint_auth_methods_supported": ["client_secret_post", "client_secret_basic"],
        "id_token_signing_alg_values_supported": ["ES256"],
    })
}

/// Names this host, and no other, as a login service.
fn instance(base: &str, tenant: &str) -> Value {
    let host = base.split_once("://").map_or(base, |(_, host)| host);
    json!({
        "tenant_discovery_endpoint": format!("{base}/{tenant}/v2.0/.well-known/openid-configuration"),
        "api-version": "1.1",
        "metadata": [{"preferred_network": host, "preferred_cache": host, "aliases": [host]}],
    })
}

/// The client-credentials grant.
async fn token(
    server: &Server,
    call: &mut ApiCall,
    service: LoginService<'_>,
    base: &str,
) -> Result<Value, TokenRefusal> {
    let bytes = match call.read_body(BODY_MAX).await {
        Ok(Some(bytes)) => bytes,
        Ok(None) => {
            let message = format!("The request body is longer than {BODY_MAX} bytes.");
            return Err(TokenRefusal::malformed(message));
        }
        Err(cut) => {
            let message = format!("The request body could not be read: {}.", cut.reason());
            return Err(TokenRefusal {
                status: cut.status(),
                ..TokenRefusal::malformed(message)
            });
        }
    };
    let text = std::str::from_utf8(&bytes);
    let form = FormFields::read(text.map_err(|_| TokenRefusal::malformed("The request body is not text."))?);
    match form.one("grant_type")?.as_deref() {
        Some("client_credentials") => {}
        Some(other) => {
            let other = shortened(other);
            let message = format!(
                "The app requested an unsupported grant type '{other}'. Only client_credentials is known here."
            );
            return Err(TokenRefusal::new(400, "unsupported_grant_type", 70_003, message));
        }
        None => return Err(TokenRefusal::missing("grant_type")),
    }
    let presented = presented(&form, call.header("authorization"))?;
    call.notes.actor(&presented.id, &[], crate::audit::NO_CREDENTIAL);
    server.check_lockout(call, CredentialKind::TokenEndpoint)?;
    let Some(client) = known(&server.config.clients, &presented) else {
        let now = server.wall.now();
        server.logins_refused.count(&presented.id, now);
        server.wrong_credential(call, CredentialKind::TokenEndpoint, &presented.id)?;
        let message = format!(
            "Invalid client secret provided for '{}', or there is no such client.",
            shortened(&presented.id)
        );
        return Err(TokenRefusal::new(401, "invalid_client", 7_000_215, message));
    };
    call.notes.actor(&client.id, &[client.role], "secret");
    let audience = audience(&form)?.unwrap_or_else(|| format!("{base}/"));
    let now = seconds(server.wall.now());
    let token = signed(server, call, client, service, base, &audience, now);
    Ok(match service {
        LoginService::V1(_) => json!({
            "token_type": "Bearer",
            "expires_in": TOKEN_LIFETIME.to_string(),
            "ext_expires_in": TOKEN_LIFETIME.to_string(),
            "expires_on": (now + TOKEN_LIFETIME).to_string(),
            "not_before": now.to_string(),
            "resource": audience,
            "access_token": token,
        }),
        LoginService::Adfs | LoginService::V2(_) => json!({
            "token_type": "Bearer",
            "expires_in": TOKEN_LIFETIME,
            "ext_expires_in": TOKEN_LIFETIME,
            "access_token": token,
        }),
    })
}

fn seconds(time: Timestamp) -> i64 {
    time.nanos() / 1_000_000_000
}

/// A token for a client. Its roles are listed for others to read; this server reads roles from the
/// configuration.
fn signed(
    server: &Server,
    call: &ApiCall,
    client: &ConfiguredClient,
    service: LoginService<'_>,
    base: &str,
    audience: &str,
    now: i64,
) -> String {
    let tenant = &server.config.tenant;
    let key = server.config.naming_key.expose().as_bytes();
    let object = stable_guid(key, &format!("client/{}", client.id.to_lowercase()));
    let (id, epoch) = (fresh_id(), server.access.epoch());
    let given = IssuedCredential {
        id: &id,
        issued: now,
        expires: now + TOKEN_LIFETIME,
        epoch,
    };
    server.login_succeeded(call, LoginKind::Token, &client.id, given);
    server.access.signing_key().sign(&json!({
        "jti": id,
        "epoch": epoch,
        "iss": service.issuer(base, tenant),
        "aud": audience,
        "sub": object,
        "oid": object,
        "appid": client.id,
        "azp": client.id,
        "tid": tenant,
        "idtyp": "app",
        "iat": now,
        "nbf": now,
        "exp": now + TOKEN_LIFETIME,
        "roles": [client.role.name()],
        "ver": service.version(),
    }))
}

/// The audience that a token is requested for: `scope` without its `/.default`, or `resource`. Any
/// audience is accepted.
fn audience(form: &FormFields<'_>) -> Result<Option<String>, TokenRefusal> {
    let scope = form.one("scope")?;
    let scope = scope.as_deref().and_then(|all| {
        let mut scopes = all.split_whitespace();
        scopes.find(|scope| !matches!(*scope, "openid" | "profile" | "offline_access"))
    });
    if let Some(scope) = scope {
        return Ok(Some(scope.strip_suffix("/.default").unwrap_or(scope).to_owned()));
    }
    let resource = form.one("resource")?;
    Ok(resource.map(Cow::into_owned))
}

/// A client's id and secret as the request gave them.
struct PresentedClientSecret {
    id: String,
    /// Candidates: some clients encode the values of the header, as the RFC demands, and some do
    /// not.
    secrets: Vec<String>,
}

fn presented(
    form: &FormFields<'_>,
    authorization: Option<&str>,
) -> Result<PresentedClientSecret, TokenRefusal> {
    let basic = authorization.and_then(|header| {
        let (scheme, credentials) = header.trim().split_once(' ')?;
        scheme.eq_ignore_ascii_case("Basic").then(|| credentials.trim())
    });
    let secret = form.one("client_secret")?;
    let id = form.one("client_id")?;
    let Some(basic) = basic else {
        return Ok(PresentedClientSecret {
            id: id.ok_or_else(|| TokenRefusal::missing("client_id"))?.into_owned(),
            secrets: vec![
                secret
                    .ok_or_else(|| TokenRefusal::missing("client_secret"))?
                    .into_owned(),
            ],
        });
    };
    if secret.is_some() {
        let message = "The client's secret must be in the body or in the Authorization header, not in both.";
        return Err(TokenRefusal::malformed(message));
    }
    let decoded = BASE64_STANDARD.decode(basic).ok();
    let decoded = decoded.and_then(|bytes| String::from_utf8(bytes).ok());
    let Some((name, secret)) = decoded.as_deref().and_then(|text| text.split_once(':')) else {
        return Err(TokenRefusal::malformed(
            "The Authorization header is not 'Basic' with base64 of 'client_id:client_secret'.",
        ));
    };
    Ok(PresentedClientSecret {
        id: form_decoded(name).into_owned(),
        secrets: vec![secret.to_owned(), form_decoded(secret).into_owned()],
    })
}

/// Compares with every client, so that neither the answer nor its duration reveals which ids exist.
fn known<'a>(
    clients: &'a [ConfiguredClient],
    presented: &PresentedClientSecret,
) -> Option<&'a ConfiguredClient> {
    let mut found = None;
    for client in clients {
        let mut fits = false;
        for secret in &presented.secrets {
            fits |= same(client.secret.expose(), secret);
        }
        if fits & client.id.eq_ignore_ascii_case(&presented.id) {
            found = Some(client);
        }
    }
    found
}

/// The token of the managed identity. No secret is required, so the token is only issued on this
/// machine, to a program and not to a page in a browser.
fn identity(server: &Server, call: &ApiCall, base: &str) -> Result<Value, TokenRefusal> {
    let forbidden = |message: String| TokenRefusal::new(403, "access_denied", 0, message);
    crate::own_address::addressed_by_name(server, call).map_err(forbidden)?;
    let has = |name: &str| call.header(name).is_some_and(|value| !value.is_empty());
    let metadata = call
        .header("metadata")
        .is_some_and(|value| value.eq_ignore_ascii_case("true"));
    if !metadata && !has("x-identity-header") && !has("secret") {
        let message = "One of the headers Metadata: true and X-IDENTITY-HEADER is required.";
        return Err(TokenRefusal::malformed(message));
    }
    let wanted = server.config.managed_identity.as_deref().unwrap_or_default();
    let query = FormFields::read(call.uri.query().unwrap_or_default());
    let asked = query.one("client_id")?;
    let client = server.client(wanted);
    let client = client.filter(|client| {
        let asked = asked.as_deref().unwrap_or(wanted);
        client.id.eq_ignore_ascii_case(asked)
    });
    let Some(client) = client else {
        let message = "Identity not found.";
        return Err(TokenRefusal::malformed(message));
    };
    call.notes.actor(&client.id, &[client.role], "managed-identity");
    let resource = query.one("resource")?;
    let resource = resource.ok_or_else(|| TokenRefusal::missing("resource"))?;
    let now = seconds(server.wall.now());
    let tenant = &server.config.tenant;
    let token = signed(
        server,
        call,
        client,
        LoginService::V1(tenant),
        base,
        &resource,
        now,
    );
    Ok(json!({
        "access_token": token,
        "client_id": client.id,
        "expires_in": TOKEN_LIFETIME.to_string(),
        "expires_on": (now + TOKEN_LIFETIME).to_string(),
        "not_before": now.to_string(),
        "resource": resource,
        "token_type": "Bearer",
    }))
}

fn refuse(server: &Server, call: &ApiCall, refusal: &TokenRefusal) -> Answer {
    let mut description = refusal.message.clone();
    let mut codes = Vec::new();
    if refusal.code > 0 {
        description = format!("AADSTS{}: {description}", refusal.code);
        codes.push(refusal.code);
    }
    let body = json!({
        "error": refusal.error,
        "error_description": description,
        "error_codes": codes,
        "timestamp": server.wall.now().to_string(),
        "trace_id": call.id,
        "correlation_id": call.header("client-request-id").unwrap_or(&call.id),
    });
    json_answer(status(refusal.status), body.to_string(), &call.id)
}

/// `application/x-www-form-urlencoded`, still encoded.
struct FormFields<'a>(Vec<(Cow<'a, str>, &'a str)>);

impl<'a> FormFields<'a> {
    fn read(text: &'a str) -> FormFields<'a> {
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        FormFields(pairs.map(|(name, value)| (form_decoded(name), value)).collect())
    }

    /// The value of a parameter; none if it is empty. A parameter that is given twice is refused,
    /// because it could mean either value.
    fn one(&self, name: &str) -> Result<Option<Cow<'a, str>>, TokenRefusal> {
        let mut values = self.0.iter().filter(|(known, _)| known == name);
        let value = values.next().map(|(_, value)| form_decoded(value));
        if values.next().is_some() {
            let message = format!("The parameter '{name}' is given more than once.");
            return Err(TokenRefusal::malformed(message));
        }
        Ok(value.filter(|value| !value.is_empty()))
    }
}

fn form_decoded(text: &str) -> Cow<'_, str> {
    if !text.contains(['+', '%']) {
        return Cow::Borrowed(text);
    }
    let spaced = text.replace('+', " ");
    Cow::Owned(percent_decode_str(&spaced).decode_utf8_lossy().into_owned())
}

/// Input of an unauthenticated client, cut to a length that is safe to repeat.
pub(crate) fn shortened(text: &str) -> String {
    const CHARACTERS_MAX: usize = 100;
    text.chars()
        .filter(|c| !c.is_control())
        .take(CHARACTERS_MAX)
        .collect()
}

/// Failed logins. The log reports them in groups, so that a client which tries many secrets cannot
/// fill it.
#[derive(Default)]
pub struct RefusedLoginCounter {
    all: AtomicU64,
    told: AtomicU64,
    told_at: AtomicI64,
}

impl RefusedLoginCounter {
    pub(crate) fn count(&self, client: &str, now: Timestamp) {
        let all = self.all.fetch_add(1, Relaxed) + 1;
        let (second, last) = (seconds(now), self.told_at.load(Relaxed));
        let mine = self.told_at.compare_exchange(last, second, Relaxed, Relaxed);
        if second == last || mine.is_err() {
            return;
        }
        let count = all.saturating_sub(self.told.swap(all, Relaxed));
        tracing::warn!(client = %shortened(client), count, "logins were refused");
    }

    /// Failed logins since the start.
    pub fn total(&self) -> u64 {
        self.all.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Role;
    use crate::azure::subscriptions::tests::test_server::{ApiTestServer, LabClock};
    use crate::route::Route;
    use postrider_core::ids::Secret;
    use std::sync::Arc;

    const TENANT: &str = "00000000-0000-0000-0000-000000000002";
    const BASE: &str = "https://127.0.0.1:8443";

    #[tokio::test]
    async fn an_address_that_guesses_at_the_token_endpoint_has_to_wait() {
        let lab = ApiTestServer::with(false, |server| server.wall = Arc::new(LabClock)).await;
        let log_in = async |secret: &str| {
            let form = format!(
                "grant_type=client_credentials&client_id=owner&client_secret={secret}&resource=https%3A%2F%2Feventgrid.azure.net"
            );
            let kind = ("content-type", "application/x-www-form-urlencoded");
            lab.exchange_text("POST", "/adfs/oauth2/token", form, &[("host", "localhost"), kind])
                .await
        };
        log_in("owner+secret").await.expect(200);
        for _ in 0..10 {
            log_in("wrong").await.expect(401);
        }
        for secret in ["wrong", "owner+secret"] {
            let refused = log_in(secret).await.expect(429);
            assert_eq!(refused.body["error"], "temporarily_unavailable");
            assert!(refused.headers.contains_key("retry-after"));
        }
        // Other kinds of credentials are counted separately.
        lab.send("GET", "/postrider/v1/endpoints", None, &[])
            .await
            .expect(200);
    }

    fn login_route(path: &str) -> Option<LoginRoute<'_>> {
        match Route::parse(&Method::GET, path) {
            Route::Login(route) => Some(route),
            _ => None,
        }
    }

    #[test]
    fn paths_ask_for_what_the_clients_mean() {
        let check = |path: &str, expected: Option<LoginRoute<'_>>| {
            assert_eq!(login_route(path), expected, "{path}");
        };
        check("/metadata/endpoints", Some(LoginRoute::Metadata));
        check("/METADATA/Endpoints/", Some(LoginRoute::Metadata));
        check("/metadata/identity/oauth2/token", Some(LoginRoute::Identity));
        check("/msi/token", Some(LoginRoute::Identity));
        check("/common/discovery/instance", Some(LoginRoute::Instance));
        let adfs = LoginService::Adfs;
        check(
            "/adfs/.well-known/openid-configuration",
            Some(LoginRoute::Discovery(adfs)),
        );
        check("/adfs/oauth2/token/", Some(LoginRoute::Token(adfs)));
        check("/adfs/discovery/keys", Some(LoginRoute::Keys(adfs)));
        check(
            "/adfs/Named/v2.0/.well-known/openid-configuration",
            Some(LoginRoute::Discovery(LoginService::V2("Named"))),
        );
        check(
            "/T/v2.0/.well-known/openid-configuration",
            Some(LoginRoute::Discovery(LoginService::V2("T"))),
        );
        check(
            "/T/.well-known/openid-configuration",
            Some(LoginRoute::Discovery(LoginService::V1("T"))),
        );
        check(
            "/T/oauth2/v2.0/token",
            Some(LoginRoute::Token(LoginService::V2("T"))),
        );
        check("/T/oauth2/token", Some(LoginRoute::Token(LoginService::V1("T"))));
        check(
            "/T/discovery/v2.0/keys",
            Some(LoginRoute::Keys(LoginService::V2("T"))),
        );
        check("/T/discovery/keys", Some(LoginRoute::Keys(LoginService::V1("T"))));
        for other in [
            "/",
            "/adfs",
            "/metadata",
            "/oauth2/token",
            "/T/oauth2/v2.0/authorize",
            "/a/b/oauth2/token",
        ] {
            check(other, None);
        }
    }

    #[test]
    fn the_answers_that_az_was_seen_to_need_are_given() {
        for file in ["az-login.json", "az-login-variants.json"] {
            let path = format!("{}/../../tests/data/wire/{file}", env!("CARGO_MANIFEST_DIR"));
            let recorded = std::fs::read_to_string(path).unwrap();
            let recorded: Vec<Value> = serde_json::from_str(&recorded.replace("{GW_BASE}", BASE)).unwrap();
            let mut checked = 0;
            for exchange in &recorded {
                let path = exchange["request"]["path"].as_str().unwrap();
                let given = match login_route(path) {
                    Some(LoginRoute::Metadata) => metadata(BASE, "2022-09-01"),
                    Some(LoginRoute::Discovery(service)) => {
                        check_tenant(service, TENANT).unwrap();
                        discovery(service, BASE, TENANT)
                    }
                    _ => continue,
                };
                let needed = &exchange["response_needed"]["body"];
                for (name, value) in needed.as_object().unwrap() {
                    // `name` of the cloud differs by client, and a tenant's name is resolved to its
                    // id here.
                    let ours = name == "name" || path.starts_with("/adfs/adfs/");
                    assert!(ours || &given[name] == value, "{path} {name}: {given}");
                    assert_eq!(given[name].is_string(), value.is_string(), "{path} {name}");
                }
                checked += 1;
            }
            assert!(checked >= 2, "{file}");
        }
    }

    #[test]
    fn a_tenant_called_by_another_name_is_resolved_to_its_id() {
        for name in ["adfs", "common", "organizations", TENANT] {
            let document = discovery(LoginService::V2(name), BASE, TENANT);
            let issuer = document["issuer"].as_str().unwrap();
            assert_eq!(issuer.split('/').nth(3), Some(TENANT), "{name}");
            assert!(check_tenant(LoginService::V1(name), TENANT).is_ok());
        }
        let refused = check_tenant(LoginService::V2("other"), TENANT).unwrap_err();
        assert_eq!(
            (refused.status, refused.error, refused.code),
            (400, "invalid_request", 90_002)
        );
    }

    #[test]
    fn metadata_has_the_shape_of_its_version() {
        assert!(metadata(BASE, "2022-09-01").is_object() && metadata(BASE, "").is_object());
        assert!(metadata(BASE, "2025-01-01-preview").is_object());
        for version in ["2019-05-01", "2020-06-01"] {
            assert_eq!(
                metadata(BASE, version)[0],
                metadata(BASE, "2022-09-01"),
                "{version}"
            );
        }
        let old = metadata(BASE, "2015-01-01");
        assert_eq!(old["graphEndpoint"], format!("{BASE}/"));
        assert_eq!(old["authentication"]["audiences"][0], format!("{BASE}/"));
    }

    #[test]
    fn the_audience_is_what_the_client_asked_for() {
        let check = |form: &str, expected: Option<&str>| {
            assert_eq!(
                audience(&FormFields::read(form)).unwrap().as_deref(),
                expected,
                "{form}"
            );
        };
        check("scope=https%3A%2F%2Fh%3A1%2F%2F.default", Some("https://h:1/"));
        check("scope=https://h/.default", Some("https://h"));
        check("scope=openid+api://x/.default", Some("api://x"));
        check("scope=plain", Some("plain"));
        check("resource=https%3A%2F%2Fh%2F", Some("https://h/"));
        check("scope=&resource=r", Some("r"));
        check("a=b", None);
        assert!(audience(&FormFields::read("scope=a&scope=b")).is_err());
    }

    #[test]
    fn a_client_is_known_by_id_and_secret_in_the_form_or_the_header() {
        let client = |id: &str, secret: &str| ConfiguredClient {
            id: id.into(),
            secret: Secret::new(secret),
            role: Role::Owner,
        };
        let clients = [client("Me", "a+b%20c:d"), client("you", "x"), client("none", "")];
        let check = |form: &str, header: Option<&str>, expected: Option<&str>| {
            let presented = presented(&FormFields::read(form), header).unwrap();
            let found = known(&clients, &presented).map(|client| client.id.as_str());
            assert_eq!(found, expected, "{form} {header:?}");
        };
        check("client_id=me&client_secret=a%2Bb%2520c%3Ad", None, Some("Me"));
        check("client_id=me&client_secret=a+b%2520c%3Ad", None, None);
        check("client_id=you&client_secret=a%2Bb%2520c%3Ad", None, None);
        check("client_id=you&client_secret=x", None, Some("you"));
        check("client_id=nobody&client_secret=x", None, None);
        let basic = |text: &str| format!("Basic {}", BASE64_STANDARD.encode(text));
        check("", Some(&basic("Me:a+b%20c:d")), Some("Me"));
        check("", Some(&basic("me:a%2Bb%2520c%3Ad")), Some("Me"));
        check("", Some(&basic("me:nope")), None);
        check("", Some(&basic("none:")), None);

        let refused = |form: &str, header: Option<&str>| {
            let refused = presented(&FormFields::read(form), header).err().unwrap();
            assert_eq!((refused.status, refused.error), (400, "invalid_request"));
            refused.message
        };
        assert!(refused("client_secret=x", None).contains("'client_id'"));
        assert!(refused("client_id=x", None).contains("'client_secret'"));
        assert!(refused("client_id=x&client_secret=", None).contains("'client_secret'"));
        assert!(refused("client_id=x&client_id=y&client_secret=z", None).contains("'client_id'"));
        assert!(refused("client_secret=x", Some(&basic("a:b"))).contains("not in both"));
        assert!(refused("", Some("Basic !")).contains("base64"));
        assert!(refused("", Some(&basic("nocolon"))).contains("base64"));
    }

    #[test]
    fn many_refusals_are_told_of_once_a_second() {
        let refused = RefusedLoginCounter::default();
        let now = Timestamp::from_secs(1_800_000_000);
        for _ in 0..1000 {
            refused.count("x", now);
        }
        assert_eq!(refused.total(), 1000);
        assert_eq!(refused.told.load(Relaxed), 1, "the first was told of");
        refused.count("x", now + std::time::Duration::from_secs(1));
        assert_eq!(refused.told.load(Relaxed), 1001);
    }
}
