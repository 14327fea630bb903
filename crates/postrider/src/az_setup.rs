//! `postrider az-setup`: prints the shell commands that make az and the SDKs work with this server,
//! or runs them.

use crate::config::{self, ClientRole, ClientSection, Config, ServeFlags};
use crate::fetch::Fetcher;
use crate::{credentials, serve};
use anyhow::{Context, Result, bail, ensure};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

const MASK: &str = "********";

#[derive(Clone, Debug, clap::Args)]
pub struct AzSetupArgs {
    /// The server's configuration file (TOML); also POSTRIDER_CONFIG
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The server's data directory [default: ./postrider-data]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Address of the server's HTTPS listener, if it was started with one [default: 127.0.0.1:4438]
    #[arg(long, value_name = "ADDR")]
    https: Option<String>,
    /// Name for this cloud in az
    #[arg(long, value_name = "CLOUD", default_value = "Postrider", value_parser = cloud_name)]
    name: String,
    /// Client to log in as [default: the first that may manage]
    #[arg(long, value_name = "ID")]
    client: Option<String>,
    /// Run the commands instead of printing them
    #[arg(long)]
    run: bool,
    /// Shell to print for
    #[arg(long, value_enum, value_name = "SHELL", default_value = "sh")]
    shell: ShellKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ShellKind {
    Sh,
    Powershell,
}

/// az keeps clouds as sections of a file, so a name must be a valid section name.
fn cloud_name(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if text.is_empty() || text.starts_with('-') || !text.chars().all(fits) {
        return Err("must be letters, digits, '-', '_' and '.'".into());
    }
    Ok(text.to_owned())
}

pub fn run(args: &AzSetupArgs) -> Result<ExitCode> {
    let flags = ServeFlags {
        config: args.config.clone(),
        data_dir: args.data_dir.clone(),
        https: args.https.clone(),
        ..ServeFlags::default()
    };
    let loaded = config::load(&flags, std::env::vars())?;
    let setup = AzCommands::of(&loaded.config, args)?;
    if !args.run {
        print!("{}", setup.script(args.shell));
        return Ok(ExitCode::SUCCESS);
    }
    setup.run()
}

/// Everything that a login needs.
#[derive(Debug)]
struct AzCommands {
    cloud: String,
    url: String,
    /// `None` with the operator's own certificate.
    ca: Option<PathBuf>,
    client: ClientSection,
    tenant: String,
    subscription: String,
}

impl AzCommands {
    fn of(config: &Config, args: &AzSetupArgs) -> Result<AzCommands> {
        let ca = match config.listen.cert_file {
            Some(_) => None,
            None => {
                let path = config.data_dir.join("tls/ca.pem");
                let missing = || {
                    let path = path.display();
                    format!(
                        "{path} is not there: start the server once, or name its data directory or configuration"
                    )
                };
                // The commands must work in whatever directory they are run.
                Some(path.canonicalize().with_context(missing)?)
            }
        };
        Ok(AzCommands {
            cloud: args.name.clone(),
            url: url(config)?,
            ca,
            client: client(config, args.client.as_deref())?,
            tenant: config.azure.tenant.clone(),
            subscription: config.azure.subscription.clone(),
        })
    }

    /// Arguments of az that register the cloud; `known` says whether az has it already.
    fn register(&self, known: bool) -> Vec<String> {
        let verb = if known { "update" } else { "register" };
        let manager = format!("--endpoint-resource-manager={}", self.url);
        words(["cloud", verb, "--name", &self.cloud, &manager])
    }

    fn show(&self) -> Vec<String> {
        words(["cloud", "show", "--name", &self.cloud])
    }

    fn set(&self) -> Vec<String> {
        words(["cloud", "set", "--name", &self.cloud])
    }

    /// az caches tokens by client and address. Those of a server that was there before, with
    /// another data directory, are signed with a key that this one does not know, and az would log
    /// in with them all the same.
    fn forget(&self) -> Vec<String> {
        words(["logout", &format!("--username={}", self.client.id)])
    }

    /// The secret is joined with "=" because it may begin with "-".
    fn login(&self, secret: &str) -> Vec<String> {
        words([
            "login",
            "--service-principal",
            &format!("--username={}", self.client.id),
            &format!("--password={secret}"),
            &format!("--tenant={}", self.tenant),
        ])
    }

    /// The variables that make clients trust the server.
    fn variables(&self) -> Vec<(&'static str, &Path)> {
        let names = ["REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"];
        let ca = self.ca.as_deref();
        ca.into_iter()
            .flat_map(|ca| names.map(|name| (name, ca)))
            .collect()
    }

    fn script(&self, shell: ShellKind) -> String {
        let AzCommands {
            url,
            tenant,
            subscription,
            ..
        } = self;
        let id = &self.client.id;
        let mut text = format!("# Postrider at {url}\n");
        if self.ca.is_some() {
            text += "# REQUESTS_CA_BUNDLE is for az and the Python SDKs. While it is set they trust this server only;\n\
                     # to use other servers too, put the file's text behind a copy of your system's bundle.\n";
        }
        for (name, path) in self.variables() {
            let path = shell.quoted(&path.to_string_lossy());
            text += &match shell {
                ShellKind::Sh => format!("export {name}={path}\n"),
                ShellKind::Powershell => format!("$env:{name} = {path}\n"),
            };
        }
        let az = |words: Vec<String>| shell.command(&words);
        let (show, update, register) = (az(self.show()), az(self.register(true)), az(self.register(false)));
        text += &match shell {
            ShellKind::Sh => {
                format!("if {show} >/dev/null 2>&1; then\n  {update}\nelse\n  {register}\nfi &&\n")
            }
            ShellKind::Powershell => format!(
                "{show} 2>$null | Out-Null\n\
                 if ($LASTEXITCODE -eq 0) {{ {update} }} else {{ {register} }}\n"
            ),
        };
        let (set, forget) = (az(self.set()), az(self.forget()));
        let login = az(self.login(self.client.secret.expose()));
        text += &match shell {
            ShellKind::Sh => format!("{set} &&\n{{ {forget} >/dev/null 2>&1 || true; }} &&\n{login}\n"),
            ShellKind::Powershell => format!("{set}\n{forget} 2>$null | Out-Null\n{login}\n"),
        };
        text += &format!(
            "\n# Python: azure-identity and azure-mgmt-eventgrid\n\
             #   credential = ClientSecretCredential(\"{tenant}\", \"{id}\", secret,\n\
             #       authority=\"{url}\", disable_instance_discovery=True)\n\
             #   client = EventGridManagementClient(credential, \"{subscription}\",\n\
             #       base_url=\"{url}\", credential_scopes=[\"{url}/.default\"])\n\
             # JavaScript: @azure/identity and @azure/arm-eventgrid\n\
             #   const credential = new ClientSecretCredential(\"{tenant}\", \"{id}\", secret,\n\
             #       {{ authorityHost: \"{url}\", disableInstanceDiscovery: true }});\n\
             #   const client = new EventGridManagementClient(credential, \"{subscription}\", {{ endpoint: \"{url}\" }});\n"
        );
        text
    }

    /// Runs the script's commands and ends with the code of the first that fails.
    fn run(&self) -> Result<ExitCode> {
        let path = std::env::vars_os().find(|(name, _)| name == "PATH");
        let az = find_az(path.map(|(_, value)| value).unwrap_or_default());
        let az = az.context("az is not on the PATH: install the Azure CLI, or \"pip install azure-cli\"")?;
        self.check_server()?;
        let known = self.az(&az, &self.show(), &self.show(), AzOutput::Discarded)? == 0;
        let masked = self.login(MASK);
        let login = self.login(self.client.secret.expose());
        for words in [self.register(known), self.set()] {
            let code = self.az(&az, &words, &words, AzOutput::Shown)?;
            if code != 0 {
                return Ok(ExitCode::from(code));
            }
        }
        // A failure to log out is ignored: there may have been no login.
        self.az(&az, &self.forget(), &self.forget(), AzOutput::Discarded)?;
        let code = self.az(&az, &login, &masked, AzOutput::Shown)?;
        if code != 0 {
            return Ok(ExitCode::from(code));
        }
        for (name, path) in self.variables() {
            println!("export {name}={}", ShellKind::Sh.quoted(&path.to_string_lossy()));
        }
        if self.ca.is_some() {
            eprintln!("az is logged in. Every shell that uses it needs the variables above.");
        }
        Ok(ExitCode::SUCCESS)
    }

    fn check_server(&self) -> Result<()> {
        let mut roots = Vec::new();
        if let Some(path) = &self.ca {
            let reading = || format!("reading {}", path.display());
            for root in CertificateDer::pem_file_iter(path).with_context(reading)? {
                roots.push(root.with_context(reading)?);
            }
        }
        let fetcher = Fetcher::new(postrider_transport::Config {
            extra_roots: roots,
            ..postrider_transport::Config::default()
        })?;
        let document = format!("{}/metadata/endpoints?api-version=2022-09-01", self.url);
        let asking = || format!("asking {}; is the server running?", self.url);
        let runtime = serve::runtime(Some(1))?;
        runtime.block_on(fetcher.fetch(&document)).with_context(asking)?;
        Ok(())
    }

    /// Prints the command line and runs az. Exit codes above 255 are reduced to one byte.
    fn az(&self, az: &Path, words: &[String], shown: &[String], output: AzOutput) -> Result<u8> {
        eprintln!("+ {}", ShellKind::Sh.command(shown));
        let mut command = Command::new(az);
        command.args(words).envs(self.variables()).stdin(Stdio::null());
        match output {
            // stdout is reserved for the variables.
            AzOutput::Shown => command.stdout(std::io::stderr()),
            AzOutput::Discarded => command.stdout(Stdio::null()).stderr(Stdio::null()),
        };
        let status = command.status();
        let status = status.with_context(|| format!("running {}", az.display()))?;
        let code = status.code().map_or(1, |code| u8::try_from(code).unwrap_or(1));
        Ok(code)
    }
}

enum AzOutput {
    Shown,
    Discarded,
}

fn words<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).into()
}

/// Where clients reach the server over https.
fn url(config: &Config) -> Result<String> {
    let listen = &config.listen;
    if let Some(url) = &listen.public_url {
        ensure!(
            url.starts_with("https://"),
            "listen.public_url: az needs https, and {url} is not"
        );
        return Ok(url.clone());
    }
    let Some(address) = listen.https else {
        bail!("listen.https: is off, and az needs https");
    };
    ensure!(
        address.port() != 0,
        "listen.https: port 0 is a different one at every start; say which it is with --https"
    );
    // A wildcard address is reachable on loopback.
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::from([127, 0, 0, 1]),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::from([127, 0, 0, 1]),
        ip => ip,
    };
    Ok(format!(
        "https://{}",
        std::net::SocketAddr::new(ip, address.port())
    ))
}

fn client(config: &Config, wanted: Option<&str>) -> Result<ClientSection> {
    let clients = match credentials::credentials_path(config) {
        Some(path) => vec![credentials::read_generated_client(&path)?],
        None => config.clients.clone(),
    };
    let found = match wanted {
        Some(id) => clients.iter().find(|client| client.id.eq_ignore_ascii_case(id)),
        None => {
            let manages =
                |client: &&ClientSection| matches!(client.role, ClientRole::Owner | ClientRole::Contributor);
            clients.iter().find(manages).or(clients.first())
        }
    };
    let missing = || format!("no client has the id {:?}", wanted.unwrap_or_default());
    found.cloned().with_context(missing)
}

fn find_az(path: OsString) -> Option<PathBuf> {
    let mut places = std::env::split_paths(&path).map(|directory| directory.join("az"));
    places.find(|file| file.is_file())
}

impl ShellKind {
    fn command(self, words: &[String]) -> String {
        let words: Vec<_> = words.iter().map(|word| self.quoted(word)).collect();
        format!("az {}", words.join(" "))
    }

    /// The text quoted so that the shell passes it unchanged.
    fn quoted(self, text: &str) -> String {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=".contains(c);
        // PowerShell splits an unquoted word at ":" and "=".
        let plain = |c: char| plain(c) && (self == ShellKind::Sh || !":=".contains(c));
        if !text.is_empty() && text.chars().all(plain) {
            return text.to_owned();
        }
        match self {
            ShellKind::Sh => format!("'{}'", text.replace('\'', r"'\''")),
            ShellKind::Powershell => format!("'{}'", text.replace('\'', "''")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigSecret;

    fn setup() -> AzCommands {
        AzCommands {
            cloud: "Postrider".into(),
            url: "https://127.0.0.1:4438".into(),
            ca: Some("/data dir/it's/ca.pem".into()),
            client: ClientSection {
                id: "me".into(),
                secret: ConfigSecret::new("-$e'cret \"x\" `y`"),
                role: ClientRole::Owner,
            },
            tenant: "t".into(),
            subscription: "s".into(),
        }
    }

    fn args() -> AzSetupArgs {
        AzSetupArgs {
            config: None,
            data_dir: None,
            https: None,
            name: "Postrider".into(),
            client: None,
            run: false,
            shell: ShellKind::Sh,
        }
    }

    /// Runs the script in a real shell; returns the arguments az gets, and the variables.
    fn evaluated(script: &str, az: &str) -> String {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("az");
        std::fs::write(&program, format!("#!/bin/sh\n{az}\n")).unwrap();
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let output = Command::new("/bin/sh")
            .args([
                "-c",
                "eval \"$0\"; echo \"code $?\"; echo \"$NODE_EXTRA_CA_CERTS\"",
                script,
            ])
            .env_clear()
            .env("PATH", format!("{}:/usr/bin:/bin", directory.path().display()))
            .output()
            .unwrap();
        assert!(output.stderr.is_empty(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn a_shell_that_evaluates_the_script_calls_az_with_the_very_secret() {
        let script = setup().script(ShellKind::Sh);
        let told =
            r#"for word in "$@"; do printf '<%s>' "$word"; done; printf ' %s\n' "$REQUESTS_CA_BUNDLE""#;
        let login = "<login><--service-principal><--username=me><--password=-$e'cret \"x\" `y`><--tenant=t>";
        let ca = "/data dir/it's/ca.pem";
        let expected = |verb: &str| {
            format!(
                "<cloud><{verb}><--name><Postrider><--endpoint-resource-manager=https://127.0.0.1:4438> {ca}\n\
                 <cloud><set><--name><Postrider> {ca}\n{login} {ca}\ncode 0\n{ca}\n"
            )
        };
        assert_eq!(evaluated(&script, told), expected("update"));
        let unknown = format!("[ \"$2\" = show ] && exit 1\n{told}");
        assert_eq!(evaluated(&script, &unknown), expected("register"));
        // A failing command ends the script with its code.
        let failing = "[ \"$2\" = update ] && exit 7\n[ \"$1\" = login ] && echo never\nexit 0";
        assert_eq!(evaluated(&script, failing), format!("code 7\n{ca}\n"));
    }

    #[test]
    fn a_trusted_certificate_needs_no_variables() {
        let script = AzCommands { ca: None, ..setup() }.script(ShellKind::Sh);
        assert!(
            !script.contains("CA_BUNDLE") && !script.contains("export"),
            "{script}"
        );
        assert!(script.contains("az cloud set --name Postrider"), "{script}");
    }

    #[test]
    fn powershell_has_its_own_quotes() {
        let script = setup().script(ShellKind::Powershell);
        for line in [
            "$env:REQUESTS_CA_BUNDLE = '/data dir/it''s/ca.pem'",
            "az login --service-principal '--username=me' '--password=-$e''cret \"x\" `y`' '--tenant=t'",
        ] {
            assert!(script.lines().any(|found| found == line), "{line} in {script}");
        }
    }

    #[test]
    fn the_server_is_where_the_configuration_says() {
        let check = |public: Option<&str>, https: Option<&str>, expected: Result<&str, &str>| {
            let mut config = Config::default();
            config.listen.public_url = public.map(str::to_owned);
            config.listen.https = https.map(|at| at.parse().unwrap());
            let found = url(&config).map_err(|e| e.to_string());
            match expected {
                Ok(expected) => assert_eq!(found.as_deref(), Ok(expected)),
                Err(expected) => assert!(found.as_ref().unwrap_err().contains(expected), "{found:?}"),
            }
        };
        check(None, Some("127.0.0.1:4438"), Ok("https://127.0.0.1:4438"));
        check(None, Some("0.0.0.0:4438"), Ok("https://127.0.0.1:4438"));
        check(None, Some("[::1]:4438"), Ok("https://[::1]:4438"));
        check(
            Some("https://grid.example"),
            Some("127.0.0.1:1"),
            Ok("https://grid.example"),
        );
        check(
            Some("http://grid.example"),
            Some("127.0.0.1:1"),
            Err("listen.public_url"),
        );
        check(None, None, Err("listen.https: is off"));
        check(None, Some("127.0.0.1:0"), Err("--https"));
    }

    #[test]
    fn the_client_is_one_that_may_manage_unless_it_is_named() {
        let mut config = Config::default();
        let of = |id: &str, role| ClientSection {
            id: id.into(),
            secret: ConfigSecret::new("x"),
            role,
        };
        config.clients = vec![
            of("sender", ClientRole::DataSender),
            of("boss", ClientRole::Contributor),
        ];
        assert_eq!(client(&config, None).unwrap().id, "boss");
        assert_eq!(client(&config, Some("SENDER")).unwrap().id, "sender");
        let refused = client(&config, Some("nobody")).unwrap_err().to_string();
        assert_eq!(refused, "no client has the id \"nobody\"");
        config.clients.clear();
        config.data_dir = "/nonexistent".into();
        let refused = client(&config, None).unwrap_err().to_string();
        assert!(
            refused.starts_with("/nonexistent/credentials.toml is not there"),
            "{refused}"
        );
        let refused = AzCommands::of(&config, &args()).unwrap_err().to_string();
        assert!(
            refused.starts_with("/nonexistent/tls/ca.pem is not there"),
            "{refused}"
        );
    }

    #[test]
    fn a_clouds_name_is_one_that_az_can_keep() {
        assert_eq!(cloud_name("Local.Grid-1_x"), Ok("Local.Grid-1_x".into()));
        for bad in ["", "-x", "a b", "a]", "é"] {
            assert!(cloud_name(bad).is_err(), "{bad}");
        }
    }
}
