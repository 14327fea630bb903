//! An account in Azure Blob Storage, S3 or Google Cloud Storage. object_store implements their
//! dialects and signatures; operations that it lacks, creating containers and deleting one blob in
//! Azure, are requests of our own with its signers.

use crate::http::StoreHttpClient;
use crate::name::encode;
use crate::store_errors::{StoreErrorMeaning, StoreFailure, scrub};
use crate::{AccountLocation, BlobAccountConfig, made_up_etag};
use ::http::header::CONTENT_LENGTH;
use ::http::{HeaderName, HeaderValue, Method, Request, Uri};
use bytes::Bytes;
use object_store::aws::{AmazonS3Builder, AwsAuthorizer, AwsCredential};
use object_store::azure::{AzureAccessKey, AzureAuthorizer, AzureCredential, MicrosoftAzureBuilder};
use object_store::client::{HttpRequest, HttpRequestBody};
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, BackoffConfig, ClientOptions, ObjectStore, ObjectStoreExt, PutOptions, RetryConfig,
};
use postrider_core::time::Clock;
use postrider_engine::blobs::{BlobError, WrittenBlobVersion};
use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use url::Url;

/// The most clients for containers that are cached. Creating another one takes no request.
const CONTAINERS_MAX: usize = 256;

const CONTENT_TYPE: &str = "application/json";
const GOOGLE: &str = "https://storage.googleapis.com";

pub(crate) struct CloudAccount {
    account: String,
    create_containers: bool,
    dialect: StoreDialect,
    /// The base of request URLs, without a trailing slash: `<base>/<bucket>/<key>`.
    base: String,
    /// The bucket of all containers, if they share one.
    bucket: Option<String>,
    /// Secrets that must not be shown.
    secrets: Vec<String>,
    http: StoreHttpClient,
    wall: Arc<dyn Clock>,
    ready: Mutex<BTreeMap<String, Arc<dyn BucketClient>>>,
}

enum StoreDialect {
    Azure {
        account: String,
        key: String,
        credential: AzureCredential,
    },
    S3 {
        region: String,
        credential: AwsCredential,
    },
    Gcs {
        service_account: String,
    },
}

/// An Azure container or a bucket, as an object_store client.
trait BucketClient: ObjectStore + PaginatedListStore {}
impl<T: ObjectStore + PaginatedListStore> BucketClient for T {}

impl CloudAccount {
    /// The error is a reason without the account's name and its secrets.
    pub fn new(
        account: BlobAccountConfig,
        http: StoreHttpClient,
        wall: Arc<dyn Clock>,
    ) -> Result<CloudAccount, String> {
        let (dialect, endpoint, bucket, secrets) = match account.place {
            AccountLocation::Azure {
                account,
                endpoint,
                key,
            } => {
                let key = key.expose().to_owned();
                // object_store's reason would quote a character of the key.
                let credential = AzureAccessKey::try_new(&key).map_err(|_| "the key is not base64")?;
                let secrets = vec![key.clone()];
                let dialect = StoreDialect::Azure {
                    account: word("account", account)?,
                    key: filled("key", key)?,
                    credential: AzureCredential::AccessKey(credential),
                };
                (dialect, endpoint, None, secrets)
            }
            AccountLocation::S3 {
                endpoint,
                region,
                bucket,
                access_key_id,
                secret_access_key,
            } => {
                let region = word("region", region)?;
                let credential = AwsCredential {
                    key_id: word("access_key_id", access_key_id)?,
                    secret_key: filled("secret_access_key", secret_access_key.expose().to_owned())?,
                    token: None,
                };
                let secrets = vec![credential.secret_key.clone()];
                let endpoint = endpoint.unwrap_or_else(|| format!("https://s3.{region}.amazonaws.com"));
                (StoreDialect::S3 { region, credential }, endpoint, bucket, secrets)
            }
            AccountLocation::Gcs {
                endpoint,
                bucket,
                service_account,
            } => {
                let service_account = service_account.expose().to_owned();
                let secrets = secrets_of_service_account(&service_account)?;
                let endpoint = endpoint.unwrap_or_else(|| GOOGLE.to_owned());
                (StoreDialect::Gcs { service_account }, endpoint, bucket, secrets)
            }
            AccountLocation::Directory { .. } => unreachable!("directories are kept elsewhere"),
        };
        let remote = CloudAccount {
            account: account.name,
            create_containers: account.create_containers,
            dialect,
            base: check_endpoint(&endpoint)?,
            bucket: bucket.map(|b| word("bucket", b)).transpose()?,
            secrets,
            http,
            wall,
            ready: Mutex::default(),
        };
        // Building a client checks the account without contacting the store.
        if let Err(e) = remote.build(remote.bucket("any-container")) {
            let reason = remote.scrubbed(&e.to_string());
            return Err(match remote.dialect {
                StoreDialect::Gcs { .. } => format!("private_key of service_account: {reason}"),
                _ => reason,
            });
        }
        Ok(remote)
    }

    /// Lists one blob, which the credentials must allow.
    pub async fn probe(&self, container: &str) -> Result<(), BlobError> {
        let store = self.ready(container)?;
        let prefix = self.bucket.as_ref().map(|_| format!("{container}/"));
        let options = PaginatedListOptions {
            max_keys: Some(1),
            ..PaginatedListOptions::default()
        };
        match store.list_paginated(prefix.as_deref(), options).await {
            Ok(_) => Ok(()),
            Err(e) => match self.judged(&e, container, None) {
                BlobError::NoContainer { .. } if self.can_create() => Ok(()),
                other => Err(other),
            },
        }
    }

    pub async fn put(
        &self,
        container: &str,
        path: &str,
        body: Bytes,
    ) -> Result<WrittenBlobVersion, BlobError> {
        match self.put_once(container, path, body.clone()).await {
            Err(BlobError::NoContainer { .. }) if self.can_create() => {
                self.create(container).await?;
                self.put_once(container, path, body).await
            }
            other => other,
        }
    }

    async fn put_once(
        &self,
        container: &str,
        path: &str,
        body: Bytes,
    ) -> Result<WrittenBlobVersion, BlobError> {
        let options = PutOptions {
            attributes: Attributes::from_iter([(Attribute::ContentType, CONTENT_TYPE)]),
            ..PutOptions::default()
        };
        let put = self
            .ready(container)?
            .put_opts(&self.key(container, path), body.into(), options)
            .await
            .map_err(|e| self.judged(&e, container, None))?;
        let etag = put.e_tag.map(|tag| tag.trim_matches('"').to_owned());
        Ok(WrittenBlobVersion {
            etag: etag.unwrap_or_else(|| made_up_etag(self.wall.now())),
            url: self.url(container, path),
        })
    }

    pub async fn get(&self, container: &str, path: &str) -> Result<Bytes, BlobError> {
        let judged = |e| self.judged(&e, container, Some(path));
        let store = self.ready(container)?;
        let got = store.get(&self.key(container, path)).await.map_err(judged)?;
        got.bytes().await.map_err(judged)
    }

    pub async fn delete(&self, container: &str, path: &str) -> Result<(), BlobError> {
        if let StoreDialect::Azure { .. } = self.dialect {
            // Sent directly: object_store deletes in batches, and reports failures of their parts
            // differently.
            let mut request = self.request(Method::DELETE, self.url(container, path), Bytes::new());
            let all = HeaderValue::from_static("include");
            request
                .headers_mut()
                .insert(HeaderName::from_static("x-ms-delete-snapshots"), all);
            let deleted = self.exchange(request).await;
            return deleted.map_err(|failure| self.meant(&failure, container, Some(path)));
        }
        let store = self.ready(container)?;
        let deleted = store.delete(&self.key(container, path)).await;
        deleted.map_err(|e| self.judged(&e, container, Some(path)))
    }

    /// Whether missing containers are created.
    fn can_create(&self) -> bool {
        self.create_containers && self.bucket.is_none() && !matches!(self.dialect, StoreDialect::Gcs { .. })
    }

    /// Creates a container, which is private by default in Azure and S3; an existing one is no
    /// error.
    async fn create(&self, container: &str) -> Result<(), BlobError> {
        let mut url = format!("{}/{container}", self.base);
        let mut body = String::new();
        match &self.dialect {
            StoreDialect::Azure { .. } => url.push_str("?restype=container"),
            // Amazon requires the region, except for us-east-1.
            StoreDialect::S3 { region, .. } if region != "us-east-1" => {
                body = format!(
                    "<CreateBucketConfiguration xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
                     <LocationConstraint>{region}</LocationConstraint></CreateBucketConfiguration>"
                );
            }
            StoreDialect::S3 { .. } | StoreDialect::Gcs { .. } => {}
        }
        let request = self.request(Method::PUT, url, body.into());
        match self.exchange(request).await {
            Err(failure) if failure.meaning() == StoreErrorMeaning::AlreadyThere => Ok(()),
            made => made.map_err(|failure| self.meant(&failure, container, None)),
        }
    }

    fn request(&self, method: Method, url: String, body: Bytes) -> HttpRequest {
        Request::builder()
            .method(method)
            .uri(url)
            .header(CONTENT_LENGTH, body.len())
            .body(HttpRequestBody::from(body))
            .expect("the endpoint was checked and names are encoded")
    }

    /// Signs a request of our own and sends it.
    async fn exchange(&self, mut request: HttpRequest) -> Result<(), StoreFailure> {
        let signed = match &self.dialect {
            StoreDialect::Azure {
                account, credential, ..
            } => AzureAuthorizer::new(credential, account).try_authorize(&mut request),
            StoreDialect::S3 { region, credential } => {
                AwsAuthorizer::new(credential, "s3", region).try_authorize(&mut request, None)
            }
            StoreDialect::Gcs { .. } => unreachable!("object_store makes all requests to Google"),
        };
        signed.expect("ring can sign");
        self.http.exchange(request).await.map(|_| ())
    }

    /// The Azure container or bucket that contains the container.
    fn bucket<'a>(&'a self, container: &'a str) -> &'a str {
        self.bucket.as_deref().unwrap_or(container)
    }

    fn key_text(&self, container: &str, path: &str) -> String {
        match self.bucket {
            Some(_) => format!("{container}/{path}"),
            None => path.to_owned(),
        }
    }

    fn key(&self, container: &str, path: &str) -> Path {
        let mut key = self.key_text(container, path);
        // For Google alone, object_store sends a key without encoding it.
        if let StoreDialect::Gcs { .. } = self.dialect {
            key = encode(&key);
        }
        Path::parse(key).expect("our rules for paths are stricter")
    }

    fn url(&self, container: &str, path: &str) -> String {
        let key = encode(&self.key_text(container, path));
        format!("{}/{}/{key}", self.base, self.bucket(container))
    }

    fn ready(&self, container: &str) -> Result<Arc<dyn BucketClient>, BlobError> {
        let bucket = self.bucket(container);
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(store) = ready.get(bucket) {
            return Ok(store.clone());
        }
        let store = self.build(bucket).map_err(|e| self.judged(&e, container, None))?;
        if ready.len() >= CONTAINERS_MAX {
            ready.pop_first();
        }
        ready.insert(bucket.to_owned(), store.clone());
        Ok(store)
    }

    fn build(&self, bucket: &str) -> object_store::Result<Arc<dyn BucketClient>> {
        // The caller retries by its own clock.
        let retry = RetryConfig {
            backoff: BackoffConfig::default(),
            max_retries: 0,
            retry_timeout: Duration::ZERO,
        };
        let options = ClientOptions::new().with_allow_http(true);
        Ok(match &self.dialect {
            StoreDialect::Azure { account, key, .. } => Arc::new(
                MicrosoftAzureBuilder::new()
                    .with_account(account)
                    .with_access_key(key)
                    .with_endpoint(self.base.clone())
                    .with_container_name(bucket)
                    .with_retry(retry)
                    .with_client_options(options)
                    .with_http_connector(self.http.clone())
                    .build()?,
            ),
            StoreDialect::S3 { region, credential } => Arc::new(
                AmazonS3Builder::new()
                    .with_region(region)
                    .with_access_key_id(&credential.key_id)
                    .with_secret_access_key(&credential.secret_key)
                    .with_endpoint(&self.base)
                    .with_bucket_name(bucket)
                    // Compatible services know the plain request, and its failures are clear.
                    .with_disable_bulk_delete(true)
                    .with_retry(retry)
                    .with_client_options(options)
                    .with_http_connector(self.http.clone())
                    .build()?,
            ),
            StoreDialect::Gcs { service_account } => Arc::new(
                GoogleCloudStorageBuilder::new()
                    .with_service_account_key(service_account)
                    .with_base_url(&self.base)
                    .with_bucket_name(bucket)
                    .with_retry(retry)
                    .with_client_options(options)
                    .with_http_connector(self.http.clone())
                    .build()?,
            ),
        })
    }

    fn judged(&self, error: &object_store::Error, container: &str, blob: Option<&str>) -> BlobError {
        let mut cause: Option<&(dyn Error + 'static)> = Some(error);
        while let Some(error) = cause {
            if let Some(failure) = error.downcast_ref::<StoreFailure>() {
                return self.meant(failure, container, blob);
            }
            cause = error.source();
        }
        crate::unreachable(&self.account, self.scrubbed(&error.to_string()))
    }

    /// `blob` is set if the request was for an existing blob.
    fn meant(&self, failure: &StoreFailure, container: &str, blob: Option<&str>) -> BlobError {
        let account = self.account.clone();
        let detail = self.scrubbed(&failure.to_string());
        match (failure.meaning(), blob) {
            // Where containers share a bucket, the bucket is missing, and so it is named.
            (StoreErrorMeaning::NoContainer, _) => BlobError::NoContainer {
                account,
                container: self.bucket(container).to_owned(),
            },
            (StoreErrorMeaning::NoBlob, Some(blob)) => BlobError::NotFound(blob.to_owned()),
            (StoreErrorMeaning::Refused, _) => BlobError::Refused { account, detail },
            _ => BlobError::Unreachable { account, detail },
        }
    }

    fn scrubbed(&self, text: &str) -> String {
        scrub(text, self.secrets.iter().map(String::as_str))
    }
}

fn filled(name: &str, value: String) -> Result<String, String> {
    match value.is_empty() {
        true => Err(format!("{name} is empty")),
        false => Ok(value),
    }
}

/// A value that is used in headers and URLs unchanged.
fn word(name: &str, value: String) -> Result<String, String> {
    let value = filled(name, value)?;
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.@+=".contains(&b);
    match value.bytes().all(plain) {
        true => Ok(value),
        false => Err(format!(
            "{name} {value:?} may hold only letters, digits and -_.@+="
        )),
    }
}

/// An endpoint without a trailing slash. Must contain no credentials: URLs are shown.
fn check_endpoint(endpoint: &str) -> Result<String, String> {
    let plain = endpoint.trim_end_matches('/');
    // The client parses it as a `Uri`, the signers as a `Url`: it must be valid as both.
    let good = plain.parse::<Uri>().is_ok()
        && Url::parse(plain).is_ok_and(|url| {
            matches!(url.scheme(), "http" | "https")
                && url.has_host()
                && url.username().is_empty()
                && url.password().is_none()
                && url.query().is_none()
                && url.fragment().is_none()
        });
    match good {
        true => Ok(plain.to_owned()),
        // Not quoted: it may be a URL with a signature in it.
        false => Err("endpoint must be http(s)://host[:port][/path], without user and query".to_owned()),
    }
}

/// The lines of the private key, after the whole has been parsed. Parsers quote what they fail at,
/// so only the position is reported.
fn secrets_of_service_account(text: &str) -> Result<Vec<String>, String> {
    let json: serde_json::Value = serde_json::from_str(text).map_err(|e| {
        let (line, column) = (e.line(), e.column());
        format!("service_account is not JSON (line {line}, column {column})")
    })?;
    let field = |name: &str| {
        let value = json.get(name).and_then(serde_json::Value::as_str);
        value.ok_or_else(|| {
            format!("service_account has no {name:?}, so it is not a service account's JSON key")
        })
    };
    field("client_email")?;
    field("private_key_id")?;
    let lines = field("private_key")?.lines().map(str::trim);
    let mut secrets: Vec<String> = lines
        .filter(|line| !line.starts_with("-----"))
        .map(str::to_owned)
        .collect();
    // A key all in one line is quoted as written.
    secrets.push(field("private_key")?.to_owned());
    Ok(secrets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_plain() {
        let check = |endpoint: &str, expected: Option<&str>| {
            assert_eq!(check_endpoint(endpoint).ok().as_deref(), expected, "{endpoint}");
        };
        check(
            "https://me.blob.core.windows.net/",
            Some("https://me.blob.core.windows.net"),
        );
        check(
            "http://127.0.0.1:10000/devstoreaccount1",
            Some("http://127.0.0.1:10000/devstoreaccount1"),
        );
        for bad in [
            "",
            "me",
            "ftp://me",
            "/me",
            "https://",
            "http://a b",
            "http://a/#b",
        ] {
            check(bad, None);
        }
        for bad in ["https://me?sv=1&sig=abc", "https://user:secret@me"] {
            check(bad, None);
            let told = check_endpoint(bad).unwrap_err();
            assert!(!told.contains("abc") && !told.contains("secret"), "{told}");
        }
    }
}
