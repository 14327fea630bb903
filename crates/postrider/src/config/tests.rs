use super::*;
use postrider_wire::resources::PlainHttp;
use serde_json::json;
use std::path::Path;

/// Loads a configuration from a file's text, variables and flags; the file is called
/// `postrider.toml`.
fn load_with(file: &str, env: &[(&str, &str)], flags: ServeFlags) -> Result<LoadedConfig, String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("postrider.toml");
    std::fs::write(&path, file).unwrap();
    let flags = ServeFlags {
        config: Some(path),
        ..flags
    };
    let env = env
        .iter()
        .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
    let prefix = format!("{}/", directory.path().display());
    load(&flags, env).map_err(|error| error.to_string().replace(&prefix, ""))
}

fn file(text: &str) -> Result<LoadedConfig, String> {
    load_with(text, &[], ServeFlags::default())
}

fn env(variables: &[(&str, &str)]) -> Result<LoadedConfig, String> {
    load_with("", variables, ServeFlags::default())
}

fn address(text: &str) -> Option<std::net::SocketAddr> {
    Some(text.parse().unwrap())
}

#[test]
fn nothing_given_is_the_defaults() {
    let loaded = load(&ServeFlags::default(), []).unwrap();
    assert_eq!(loaded.config, Config::default());
    assert_eq!(loaded.edge, EdgeConfig::default());
    assert_eq!(loaded.warnings, Vec::<String>::new());
    assert_eq!(loaded.file, None);
    assert!(loaded.edge_is_open());
}

#[test]
fn flags_win_over_variables_over_the_file_over_defaults() {
    let text = "[listen]\nhttps = \"127.0.0.1:1\"";
    let variable = ("POSTRIDER_LISTEN__HTTPS", "127.0.0.1:2");
    let flag = || ServeFlags {
        https: Some("127.0.0.1:3".into()),
        ..ServeFlags::default()
    };
    let check = |file: &str, env: &[(&str, &str)], flags: ServeFlags, expected: &str| {
        let loaded = load_with(file, env, flags).unwrap();
        assert_eq!(loaded.config.listen.https, address(expected));
        assert_eq!(
            loaded.config.listen.http,
            address("127.0.0.1:5888"),
            "the rest stays"
        );
    };
    check("", &[], ServeFlags::default(), "127.0.0.1:4438");
    check(text, &[], ServeFlags::default(), "127.0.0.1:1");
    check(text, &[variable], ServeFlags::default(), "127.0.0.1:2");
    check(text, &[variable], flag(), "127.0.0.1:3");
    check(
        "",
        &[("postrider_Listen__Https", "127.0.0.1:4")],
        ServeFlags::default(),
        "127.0.0.1:4",
    );
}

#[test]
fn every_flag_sets_its_key() {
    let flags = ServeFlags {
        data_dir: Some("/var/lib/postrider".into()),
        https: Some("off".into()),
        http: Some("127.0.0.1:0".into()),
        profile: Some("edge".into()),
        log_format: Some("json".into()),
        ..ServeFlags::default()
    };
    let config = load_with("", &[], flags).unwrap().config;
    assert_eq!(config.data_dir, Path::new("/var/lib/postrider"));
    assert_eq!(
        (config.listen.https, config.listen.http),
        (None, address("127.0.0.1:0"))
    );
    assert_eq!(
        (config.profile.as_str(), config.log.format),
        ("edge", LogFormat::Json)
    );
}

#[test]
fn a_listener_may_be_a_port_on_this_machine() {
    let check = |file: &str, env: &[(&str, &str)], flag: Option<&str>, expected: &str| {
        let flags = ServeFlags {
            http: flag.map(str::to_owned),
            ..ServeFlags::default()
        };
        let config = load_with(file, env, flags).unwrap().config;
        assert_eq!(config.listen.http, address(expected), "{file} {env:?} {flag:?}");
    };
    check("", &[], Some("7000"), "127.0.0.1:7000");
    check("", &[], Some("localhost:7000"), "127.0.0.1:7000");
    check("", &[], Some("[::1]:7000"), "[::1]:7000");
    check("", &[("POSTRIDER_LISTEN__HTTP", "7000")], None, "127.0.0.1:7000");
    check("listen.http = 7000", &[], None, "127.0.0.1:7000");
    check("listen.http = \"LocalHost:0\"", &[], None, "127.0.0.1:0");
    for refused in [
        "listen.http = -1",
        "listen.http = \"localhost:\"",
        "listen.http = \":7000\"",
    ] {
        let told = file(refused).unwrap_err();
        assert!(told.contains("a port such as \"4438\""), "{refused}: {told}");
    }
    let told = file("listen.http = true").unwrap_err();
    assert!(
        told.starts_with("listen.http: must be an address or a port, not "),
        "{told}"
    );
}

#[test]
fn the_command_line_is_understood() {
    use clap::{Args, FromArgMatches};
    let command = ServeFlags::augment_args(clap::Command::new("serve"));
    command.clone().debug_assert();
    let line = "serve --config a.toml --data-dir d --https off --http 127.0.0.1:1 --profile edge \
                --test-clock --log-format json --print-config";
    let matches = command.try_get_matches_from(line.split_whitespace()).unwrap();
    let flags = ServeFlags::from_arg_matches(&matches).unwrap();
    assert_eq!(flags.config.as_deref(), Some(Path::new("a.toml")));
    assert_eq!(flags.https.as_deref(), Some("off"));
    assert!(flags.test_clock && flags.print_config);
}

#[test]
fn variables_have_no_types_but_keys_do() {
    let config = env(&[
        ("POSTRIDER_THREADS", "3"),
        ("POSTRIDER_AZURE__RESOURCE_GROUP", "007"),
        ("POSTRIDER_EDGE__REQUIRE_AUTH", "true"),
        ("POSTRIDER_DEAD_LETTER__DELAY", "0"),
        ("POSTRIDER_DEAD_LETTER__GIVE_UP_AFTER", "never"),
        ("POSTRIDER_LISTEN__NAMES", r#"["a.example", "10.0.0.1"]"#),
        (
            "POSTRIDER_CLIENT",
            r#"[{id = "me", secret = "s3", role = "data-sender"}]"#,
        ),
        // Variables with our prefix that are not settings.
        ("POSTRIDER_SEED", "1"),
        ("POSTRIDER_SLOW_TESTS", "1"),
        ("POSTRIDER_CONFIG", "/elsewhere, but the flag wins"),
        ("POSTRIDER_SERVICE_HOST", "10.0.0.7"),
        ("POSTRIDER_SERVICE_PORT_HTTPS", "4438"),
        ("POSTRIDER_PORT", "tcp://10.0.0.7:4438"),
        ("POSTRIDER_PORT_4438_TCP_ADDR", "10.0.0.7"),
        ("PATH", "/bin"),
    ])
    .unwrap()
    .config;
    assert_eq!(config.threads, Some(3));
    assert_eq!(config.azure.resource_group, "007");
    assert_eq!(config.edge.require_auth, Some(true));
    assert_eq!(config.dead_letter.delay, Some(std::time::Duration::ZERO));
    assert_eq!(config.dead_letter.give_up_after, std::time::Duration::MAX);
    assert_eq!(config.listen.names, ["a.example", "10.0.0.1"]);
    assert_eq!(config.clients[0].role, ClientRole::DataSender);
    assert_eq!(config.clients[0].secret.expose(), "s3");
}

#[test]
fn the_file_may_be_named_by_a_variable() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("other.toml");
    std::fs::write(&path, "profile = \"cloud-2018\"").unwrap();
    let variable = ("POSTRIDER_CONFIG".to_owned(), path.display().to_string());
    let loaded = load(&ServeFlags::default(), [variable]).unwrap();
    assert_eq!(loaded.config.profile, "cloud-2018");
    assert_eq!(loaded.file, Some(path));

    let missing = ("POSTRIDER_CONFIG".to_owned(), "/nowhere/at-all.toml".to_owned());
    let error = load(&ServeFlags::default(), [missing]).unwrap_err().to_string();
    assert!(
        error.starts_with("config: cannot read /nowhere/at-all.toml"),
        "{error}"
    );
    assert!(error.ends_with("(in the variable POSTRIDER_CONFIG)"), "{error}");
}

#[test]
fn what_the_file_gets_wrong_is_named() {
    let check = |text: &str, expected: &str| assert_eq!(file(text).unwrap_err(), expected, "{text}");
    check(
        "[listen]\nhtps = \"off\"",
        "listen.htps: unknown key (in postrider.toml); did you mean \"https\"?",
    );
    check(
        "[lisen]\n",
        "lisen: unknown key (in postrider.toml); did you mean \"listen\"?",
    );
    check(
        "topics = []",
        "topics: unknown key (in postrider.toml); did you mean \"topic\"?",
    );
    check("unheard_of = 1", "unheard_of: unknown key (in postrider.toml)");
    check(
        "[[topic]]\nname = \"orders\"\ninput_shema = \"EventGridSchema\"",
        "topic[0].input_shema: unknown key (in postrider.toml); did you mean \"input_schema\"?",
    );
    check(
        "[[topic]]\nname = \"orders\"\n[[topic.subscription]]\nname = \"shop\"\n\
         [topic.subscription.filter]\nsubject_starts_with = \"/\"",
        "topic[0].subscription[0].filter.subject_starts_with: unknown key (in postrider.toml); did you mean \"subject_begins_with\"?",
    );
    let system_topic = "[[system_topic]]\nname = \"a\"\nsource = \"local\"\n";
    for (key, meant) in [("sorce", "source"), ("nam", "name"), ("topic_typ", "topic_type")] {
        check(
            &format!("{system_topic}{key} = \"x\""),
            &format!("system_topic[0].{key}: unknown key (in postrider.toml); did you mean \"{meant}\"?"),
        );
    }
    check(
        "[[storage_account]]\nname = \"a\"\nkind = \"directory\"\npaht = \"/tmp\"",
        "storage_account[0].paht: unknown key (in postrider.toml); did you mean \"path\"?",
    );
    check(
        "[[subscription]]\ntopic = \"orders\"\nname = \"shop\"\n[subscription.properties.retryPolicy]\n\
         maxDeliveryAttempt = 3",
        "subscription[0].retry_policy.max_delivery_attempt: unknown key (in postrider.toml); did you mean \"max_delivery_attempts\"?",
    );
    check(
        "[[client]]\nid = \"a\"\nsecret = \"b\"\nrol = \"x\"",
        "client[0].rol: unknown key (in postrider.toml); did you mean \"role\"?",
    );
    check(
        "[[client]]\nid = \"a\"",
        "client[0].secret: is required (in postrider.toml)",
    );
    check(
        "[[client]]\nid = \"a\"\nsecret = \"b\"\nrole = \"king\"",
        "client[0].role: \"king\" is not one of \"owner\", \"contributor\", \"reader\", \"data-sender\" (in postrider.toml)",
    );
    check(
        "[[client]]\nid = \"a\"\nsecret = \"\"",
        "client[0].secret: must not be empty (in postrider.toml)",
    );
    check(
        "client = \"hunter2\"",
        "client: must be a list, not text (in postrider.toml)",
    );
    check(
        "[listen]\nhttps = \"localhost\"",
        "listen.https: \"localhost\" is not an address such as \"127.0.0.1:4438\", a port such as \"4438\", nor \"off\" (in postrider.toml)",
    );
    check(
        "[listen]\nhttps = \"off\"\nhttp = \"off\"",
        "listen: https and http are both off (in postrider.toml)",
    );
    check(
        "[listen]\nhttp = \"127.0.0.1:4438\"",
        "listen.http: is the same address as listen.https (in postrider.toml)",
    );
    check(
        "[listen]\nhttps = true",
        "listen.https: must be an address or a port, not true (in postrider.toml)",
    );
    check(
        "[listen]\ncert_file = \"a\"",
        "listen.key_file: is required with listen.cert_file (in postrider.toml)",
    );
    check(
        "[listen]\nnames = [\"ok\", \"not ok\"]",
        "listen.names[1]: \"not ok\" is not a DNS name or an address (in postrider.toml)",
    );
    check(
        "[listen]\npublic_url = \"events.example\"",
        "listen.public_url: must be a URL such as \"https://events.example:4438\" (in postrider.toml)",
    );
    check(
        "profile = \"cloud-2012\"",
        "profile: \"cloud-2012\" is not one of cloud-2018, cloud-2019, cloud-2020, cloud-2021, cloud-current, edge, custom; did you mean \"cloud-2018\"? (in postrider.toml)",
    );
    check(
        "[dead_letter]\ndelay = \"soon\"",
        "dead_letter.delay: \"soon\" is not a duration such as \"30s\", \"1h30m\" or \"never\" (in postrider.toml)",
    );
    check(
        "[dead_letter]\ndelay = 5",
        "dead_letter.delay: 5 needs a unit, such as \"5s\" (in postrider.toml)",
    );
    check(
        "[dead_letter]\ndelay = \"never\"",
        "dead_letter.delay: \"never\" would keep every dead letter from being written (in postrider.toml)",
    );
    check(
        "[egress]\npolicy = \"custom\"\nallow = [\"10.0.0.0/33\"]",
        "egress.allow: \"10.0.0.0/33\" is not a network such as \"10.0.0.0/8\" (in postrider.toml)",
    );
    check(
        "[egress]\ndeny = [\"10.0.0.0/8\"]",
        "egress.deny: has an effect only with egress.policy = \"custom\" (in postrider.toml)",
    );
    check(
        "[egress]\npolicy = \"custom\"",
        "egress.policy: \"custom\" needs egress.allow or egress.deny (in postrider.toml)",
    );
    check(
        "[egress]\nproxy = \"https://me:hush@proxy\"",
        "egress.proxy: must begin with http://: TLS to the proxy itself is not supported (in postrider.toml)",
    );
    check(
        "[egress]\nno_proxy = [\"a\"]",
        "egress.no_proxy: has an effect only with egress.proxy (in postrider.toml)",
    );
    check(
        "[egress]\nproxy = \"http://proxy\"\nno_proxy = [\"a b\"]",
        "egress.no_proxy: each entry must be a host name, an address, a network or \"*\" (in postrider.toml)",
    );
    check(
        "[egress]\npolicy = \"internet\"\n[traces]\notlp_endpoint = \"http://127.0.0.1:4318\"",
        "traces.otlp_endpoint: egress.policy forbids http: only https is allowed; it holds for every outgoing \
         request (in postrider.toml)",
    );
    check(
        "[[storage_account]]\nname = \"dead\"\nkey = \"AAAA\"\nblob_endpoint = \"http://169.254.169.254/dead\"",
        "storage_account[0].blob_endpoint: egress.policy forbids 169.254.169.254 (cloud metadata); it holds for \
         every outgoing request (in postrider.toml)",
    );
    check(
        "[store]\nkind = \"jetstream\"\n[store.jetstream]\nreplicas = 2",
        "store.jetstream.replicas: must be 1, 3 or 5 (in postrider.toml)",
    );
    check(
        "[store]\nkind = \"jetstream\"\n[store.jetstream]\nurls = [\"nats://a:b@host\"]",
        "store.jetstream.urls: must not hold a user name or password; user, password and token are keys of their own \
         (in postrider.toml)",
    );
    check(
        "[store]\nkind = \"jetstream\"\n[store.jetstream]\nurls = [\"ws://a:b@host\"]",
        "store.jetstream.urls: \"host\" is not such as \"nats://127.0.0.1:4222\" (in postrider.toml)",
    );
    check(
        "[store]\nkind = \"jetstream\"\n[store.jetstream]\nmonitor_urls = [\"http://a:b@host\"]",
        "store.jetstream.monitor_urls: \"host\" is not such as \"http://127.0.0.1:8222\" (in postrider.toml)",
    );
    check(
        "[store]\nkind = \"jetstream\"\n[store.jetstream]\nuser = \"a\"",
        "store.jetstream.password: is required with store.jetstream.user (in postrider.toml)",
    );
    check(
        "[store]\nkind = \"jetstream\"\n[store.jetstream]\ntoken = \"a\"\nnkey = \"b\"",
        "store.jetstream.nkey: cannot be given beside store.jetstream.token (in postrider.toml)",
    );
    check(
        "[store]\nkind = \"jetstream\"\n[store.jetstream]\nlease = \"100ms\"",
        "store.jetstream.lease: must be 1 second to 5 minutes (in postrider.toml)",
    );
    check(
        "[store]\nkind = \"embeded\"",
        "store.kind: \"embeded\" is not one of \"embedded\", \"jetstream\" (in postrider.toml); did you mean \"embedded\"?",
    );
    check(
        "[recorder]\nkeep = \"5m\"",
        "recorder.keep: must be at least \"10m\"; recorder.enabled = false keeps nothing (in postrider.toml)",
    );
    check(
        "[recorder]\nbytes_max = 1000",
        "recorder.bytes_max: must be at least 67108864, was 1000 (in postrider.toml)",
    );
    check(
        "[audit]\nkeep = \"5m\"",
        "audit.keep: must be at least \"1h\"; audit.enabled = false keeps nothing (in postrider.toml)",
    );
    check(
        "[audit]\nbytes_max = 1000",
        "audit.bytes_max: must be at least 1048576, was 1000 (in postrider.toml)",
    );
    check("threads = 0", "threads: must be at least 1 (in postrider.toml)");
    check(
        "threads = -1",
        "threads: -1 does not fit a whole number (in postrider.toml)",
    );
    check(
        "[limits]\nbody_stall_max = \"0s\"",
        "limits.body_stall_max: must be from 1s to 10m (in postrider.toml)",
    );
    check(
        "[limits]\npublish_body_bytes_max = 1000000",
        "limits.publish_body_bytes_max: must be at least 4 times limits.request_bytes_max: the largest request would find no room (in postrider.toml)",
    );
    check(
        "[limits]\nevent_bytes_max = \"big\"",
        "limits.event_bytes_max: must be a whole number, not text (in postrider.toml)",
    );
    check(
        "[log]\nlevel = \"a=b=c\"",
        "log.level: \"a=b=c\" is not a level such as \"info\" (in postrider.toml)",
    );
    check(
        "[[storage_account]]\nname = \"abc\"\nkey = \"…\"",
        "storage_account[0].key: is not base64 (in postrider.toml)",
    );
    check(
        "[azure]\nresource_group = \"a/b\"",
        "azure.resource_group: \"a/b\" cannot be part of a resource's path (in postrider.toml)",
    );
}

#[test]
fn a_file_that_is_not_toml_is_named_by_line_without_showing_it() {
    let error = file("profile = \"edge\"\nsecret = \"hunter2").unwrap_err();
    assert!(error.starts_with("postrider.toml: line 2: "), "{error}");
    assert!(!error.contains("hunter2"), "{error}");
}

#[test]
fn what_variables_and_flags_get_wrong_is_named() {
    let check = |env: &[(&str, &str)], flags: ServeFlags, expected: &str| {
        assert_eq!(
            load_with("[listen]\nhttp = \"off\"", env, flags).unwrap_err(),
            expected
        );
    };
    let none = ServeFlags::default;
    check(
        &[("POSTRIDER_LISTEN__HTPS", "off")],
        none(),
        "listen.htps: unknown key (in the variable POSTRIDER_LISTEN__HTPS); did you mean \"https\"?",
    );
    check(
        &[("POSTRIDER_LISTEN_HTTPS", "off")],
        none(),
        "listen_https: unknown key (in the variable POSTRIDER_LISTEN_HTTPS)",
    );
    check(
        &[("POSTRIDER___X", "1")],
        none(),
        ".x: unknown key (in the variable POSTRIDER___X)",
    );
    check(
        &[("POSTRIDER_THREADS", "many")],
        none(),
        "threads: must be a whole number, not text (in the variable POSTRIDER_THREADS)",
    );
    check(
        &[("POSTRIDER_LISTEN__NAMES", "[\"a\"")],
        none(),
        "listen.names: not a TOML list or table: unclosed array, expected `]` (in the variable POSTRIDER_LISTEN__NAMES)",
    );
    check(
        &[("Postrider_Edge__Require_Auth", "maybe")],
        none(),
        "edge.require_auth: must be true or false, not text (in the variable Postrider_Edge__Require_Auth)",
    );
    check(
        &[],
        ServeFlags {
            https: Some("44380".into()),
            http: Some("70000".into()),
            ..none()
        },
        "listen.http: \"70000\" is not an address such as \"127.0.0.1:4438\", a port such as \"4438\", nor \"off\" (in the flag --http)",
    );
    check(
        &[("POSTRIDER_LOG__FORMAT", "json")],
        ServeFlags {
            log_format: Some("xml".into()),
            ..none()
        },
        "log.format: \"xml\" is not one of \"auto\", \"text\", \"json\" (in the flag --log-format)",
    );
}

#[test]
fn all_mistakes_are_told_where_one_does_not_hide_another() {
    let refused = |variables: &[(&str, &str)]| -> Vec<String> {
        let env = variables
            .iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        let refused = load_reporting_all(&ServeFlags::default(), env).unwrap_err();
        let mut keys: Vec<String> = refused.into_iter().map(|one| one.key).collect();
        keys.sort();
        keys
    };
    let two_lists = r#"[{name = "a", nam = 1}, {name = "b", nam = 1}]"#;
    assert_eq!(
        refused(&[
            ("POSTRIDER_PROFIL", "edge"),
            ("POSTRIDER_LISTEN__HTTPS", "nowhere"),
            ("POSTRIDER_LISTEN__HTPS", "off"),
            ("POSTRIDER_STORAGE_ACCOUNT", two_lists),
        ]),
        [
            "listen.htps",
            "listen.https",
            "profil",
            "storage_account[0].nam",
            "storage_account[1].nam"
        ]
    );
    // A missing value cannot be left out to look for further mistakes, so the search ends with it.
    assert_eq!(
        refused(&[("POSTRIDER_CLIENT", "[{id = \"a\"}]")]),
        ["client[0].secret"]
    );
    // Values that are valid by themselves may be refused in combination.
    assert_eq!(
        refused(&[("POSTRIDER_LISTEN__KEY_FILE", "k"), ("POSTRIDER_THREADS", "0")]),
        ["listen.cert_file", "threads"]
    );
}

#[test]
fn secrets_that_can_be_guessed_are_warned_of_by_name_and_not_shown() {
    let config = r#"
client = [{ id = "short", secret = "fifteen-letters" }, { id = "long", secret = "sixteen-letters!" }]
topic = [{ name = "orders", key1 = "c2hvcnQ=", key2 = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=" }]
"#;
    let loaded = load_with(config, &[], ServeFlags::default()).unwrap();
    let warned: Vec<&str> = loaded
        .warnings
        .iter()
        .map(|warning| warning.split(" is shorter").next().unwrap())
        .collect();
    assert_eq!(warned, ["client \"short\": secret", "topic \"orders\": key1"]);
    let told = loaded.warnings.join("\n");
    assert!(
        !told.contains("fifteen-letters") && !told.contains("c2hvcnQ="),
        "{told}"
    );
    let edge = [
        ("inbound__clientAuth__sasKeys__key1", "k"),
        ("inbound__clientAuth__sasKeys__enabled", "true"),
    ];
    assert_eq!(env(&edge).unwrap().warnings.len(), 1);
}

#[test]
fn the_longest_wait_after_wrong_secrets_has_bounds() {
    let load = |text: &str| {
        let config = format!("[throttle]\nwait_max = \"{text}\"");
        load_with(&config, &[], ServeFlags::default())
    };
    assert!(load("1s").is_ok() && load("1d").is_ok());
    for bad in ["500ms", "2d"] {
        assert!(load(bad).unwrap_err().contains("throttle.wait_max"), "{bad}");
    }
}

#[test]
fn the_edge_modules_variables_are_read_in_both_spellings() {
    let check = |name: &str, text: &str, read: fn(&EdgeConfig) -> String, expected: &str| {
        let colons = name.replace("__", ":");
        for name in [name, &colons, &name.to_uppercase(), &colons.to_lowercase()] {
            let loaded = env(&[
                (name, text),
                ("inbound__clientAuth__sasKeys__key1", "a key of the module"),
                ("POSTRIDER_PROFILE", "edge"),
            ])
            .unwrap();
            assert_eq!(read(&loaded.edge), expected, "{name}={text}");
            assert_eq!(loaded.warnings, Vec::<String>::new(), "{name}");
        }
    };
    check(
        "inbound__serverAuth__tlsPolicy",
        "Strict",
        |e| format!("{:?}", e.tls_policy),
        "Some(Strict)",
    );
    check(
        "inbound__serverAuth__serverCert__source",
        "IoTEdge",
        |_| String::new(),
        "",
    );
    check(
        "inbound__clientAuth__sasKeys__enabled",
        "TRUE",
        |e| e.sas_keys.enabled.to_string(),
        "true",
    );
    check(
        "inbound__clientAuth__sasKeys__key2",
        "k2",
        |e| e.sas_keys.key2.as_ref().unwrap().expose().into(),
        "k2",
    );
    check(
        "inbound__clientAuth__clientCert__enabled",
        "false",
        |e| e.inbound_client_cert.enabled.to_string(),
        "false",
    );
    check(
        "inbound__clientAuth__clientCert__allowUnknownCA",
        "false",
        |e| e.inbound_client_cert.allow_unknown_ca.to_string(),
        "false",
    );
    check(
        "outbound__clientAuth__clientCert__enabled",
        "false",
        |e| e.outbound_client_cert_enabled.to_string(),
        "false",
    );
    check(
        "outbound__webhook__httpsOnly",
        "false",
        |e| e.webhook.https_only.to_string(),
        "false",
    );
    check(
        "outbound__webhook__skipServerCertValidation",
        "true",
        |e| e.webhook.skip_server_cert_validation.to_string(),
        "true",
    );
    check(
        "outbound__webhook__allowUnknownCA",
        "false",
        |e| e.webhook.allow_unknown_ca.to_string(),
        "false",
    );
    check(
        "outbound__eventgrid__httpsOnly",
        "false",
        |e| format!("{:?}", e.event_grid.https_only),
        "Some(false)",
    );
    check(
        "outbound__eventgrid__allowInvalidHostnames",
        "true",
        |e| e.event_grid.allow_invalid_hostnames.to_string(),
        "true",
    );
    check(
        "broker__defaultMaxDeliveryAttempts",
        "5",
        |e| e.broker.attempts_max().to_string(),
        "5",
    );
    check(
        "broker__defaultEventTimeToLiveInSeconds",
        "60",
        |e| e.broker.time_to_live_seconds().to_string(),
        "60",
    );
    check(
        "broker__defaultMaxBatchSizeInBytes",
        "1_058_577",
        |e| {
            e.broker
                .default_max_batch_size_in_bytes
                .unwrap_or_default()
                .to_string()
        },
        "1058577",
    );
    check(
        "broker__defaultMaxEventsPerBatch",
        "1",
        |e| {
            e.broker
                .default_max_events_per_batch
                .unwrap_or_default()
                .to_string()
        },
        "1",
    );
    check(
        "broker__logDeliverySuccess",
        "true",
        |e| e.broker.log_delivery_success.to_string(),
        "true",
    );
    check(
        "api__deliveryPolicyLimits__maxEventsPerBatch",
        "7",
        |e| e.limits.max_events_per_batch.to_string(),
        "7",
    );
    check(
        "api__deliveryPolicyLimits__maxpreferredBatchSizeInKilobytes",
        "8",
        |e| e.limits.max_preferred_batch_size_in_kilobytes.to_string(),
        "8",
    );
    check(
        "api__deliveryPolicyLimits__maxBatchSizeInBytes",
        "9",
        |e| e.limits.max_batch_size_in_bytes.to_string(),
        "9",
    );
    check(
        "metrics__reporterType",
        "prometheus",
        |e| format!("{:?}", e.metrics_reporter),
        "Prometheus",
    );
}

#[test]
fn every_key_of_the_edge_module_prints_what_it_reads_back() {
    let printed = EdgeConfig::default().printed();
    let variables: Vec<_> = printed.iter().map(|(key, text)| (*key, text.as_str())).collect();
    // All but tlsPolicy, eventgrid__httpsOnly, the two keys and broker__default… have a default.
    assert_eq!(variables.len(), 16);
    assert_eq!(env(&variables).unwrap().edge, EdgeConfig::default());
}

#[test]
fn what_is_wrong_with_the_edge_modules_variables_is_named() {
    let refused = |name: &str, text: &str, expected: &str| {
        assert_eq!(env(&[(name, text)]).unwrap_err(), expected);
    };
    refused(
        "broker__defaultMaxDeliveryAttempts",
        "abc",
        "broker__defaultMaxDeliveryAttempts: \"abc\" is not a whole number of at least 1",
    );
    refused(
        "broker:logDeliverySuccess",
        "1",
        "broker:logDeliverySuccess: \"1\" is not one of \"true\", \"false\"",
    );
    refused(
        "metrics__reporterType",
        "statsd",
        "metrics__reporterType: \"statsd\" is not one of \"none\", \"prometheus\", \"console\"",
    );
    refused(
        "inbound__clientAuth__sasKeys__enabled",
        "true",
        "inbound__clientAuth__sasKeys__key1: is required, or key2, while inbound__clientAuth__sasKeys__enabled is true",
    );

    let warned = |name: &str, expected: &[&str]| assert_eq!(env(&[(name, "5")]).unwrap().warnings, expected);
    warned(
        "brokers__defaultMaxDeliveryAttempts",
        &[
            "brokers__defaultMaxDeliveryAttempts is not a key of the module; did you mean broker__defaultMaxDeliveryAttempts?",
        ],
    );
    warned(
        "broker:defaultMaxDeliveryAttempt",
        &[
            "broker:defaultMaxDeliveryAttempt is not a key of the module; did you mean broker__defaultMaxDeliveryAttempts?",
        ],
    );
    warned("api__x", &["api__x is not a key of the module"]);
    warned(
        "broker:DefaultMaxDeliveryAttempts",
        &[
            "broker:DefaultMaxDeliveryAttempts holds for subscriptions that were made through the edge API or are on the edge profile, not for others: profile is \"cloud-2021\"",
        ],
    );
    warned(
        "broker__defaultEventTimeToLiveInSeconds",
        &[
            "broker__defaultEventTimeToLiveInSeconds holds for subscriptions that were made through the edge API or are on the edge profile, not for others: profile is \"cloud-2021\"",
        ],
    );
    warned("broker__defaultMaxEventsPerBatch", &[]);
    warned("BROKER_URL", &[]);
    warned("other__x", &[]);
}

#[test]
fn hosts_of_event_grid_destinations_are_checked_and_follow_the_egress_policy() {
    let refused = file("[edge]\nevent_grid_hosts = [\"grid.example\", \"https://dc.example\"]").unwrap_err();
    assert!(
        refused.contains("edge.event_grid_hosts[1]: must be a host such as")
            && refused.contains("was \"https://dc.example\""),
        "{refused}"
    );
    let check = |text: &str, variables: &[(&str, &str)], private: bool, http: PlainHttp| {
        let loaded = load_with(text, variables, ServeFlags::default()).unwrap();
        let hosts = event_grid_hosts(&loaded.config, &loaded.edge).unwrap();
        assert_eq!(
            (hosts.private, hosts.http),
            (private, http),
            "{text} {variables:?}"
        );
    };
    let custom = "egress = { policy = \"custom\", allow = [\"10.0.0.0/8\"] }";
    let https_only = "outbound__eventgrid__httpsOnly";
    check("", &[], true, PlainHttp::OwnHosts);
    check("", &[(https_only, "true")], true, PlainHttp::Never);
    check("", &[(https_only, "false")], true, PlainHttp::AnyHost);
    check("egress.policy = \"internet\"", &[], false, PlainHttp::Never);
    check(custom, &[], false, PlainHttp::OwnHosts);
}

#[test]
fn the_edge_modules_tls_policy_speaks_only_where_nothing_else_does() {
    let check = |policy: &str, file: &str, https: bool, http: bool| {
        let env = [("inbound__serverAuth__tlsPolicy", policy)];
        let listen = load_with(file, &env, ServeFlags::default())
            .unwrap()
            .config
            .listen;
        assert_eq!(
            (listen.https.is_some(), listen.http.is_some()),
            (https, http),
            "{policy} {file}"
        );
    };
    check("strict", "", true, false);
    check("disabled", "", false, true);
    check("enabled", "", true, true);
    check("strict", "[listen]\nhttp = \"127.0.0.1:5888\"", true, true);
    check("enabled", "[listen]\nhttp = \"off\"", true, false);
    check("disabled", "[listen]\nhttps = \"127.0.0.1:1\"", true, true);
}

#[test]
fn an_open_edge_api_is_not_shown_to_the_world_by_accident() {
    let check = |file: &str, env: &[(&str, &str)], refused: bool| {
        let result = load_with(file, env, ServeFlags::default());
        assert_eq!(result.is_err(), refused, "{file} {env:?}");
        if let Err(error) = result {
            assert!(error.contains("edge.require_auth = true"), "{error}");
            assert!(error.contains("edge.allow_open = true"), "{error}");
            assert!(
                error.contains("0.0.0.0:5888") || error.contains("[::]:4438"),
                "{error}"
            );
        }
    };
    let wide = "[listen]\nhttp = \"0.0.0.0:5888\"\n";
    check(wide, &[], true);
    check("[listen]\nhttps = \"[::]:4438\"", &[], true);
    check(
        "[listen]\nhttps = \"[::1]:4438\"\nhttp = \"127.9.9.9:1\"",
        &[],
        false,
    );
    check(&format!("{wide}[edge]\nrequire_auth = false"), &[], true);
    check(&format!("{wide}[edge]\nrequire_auth = true"), &[], false);
    check(&format!("{wide}[edge]\nallow_open = true"), &[], false);
    let keys = [
        ("inbound__clientAuth__sasKeys__enabled", "true"),
        ("inbound__clientAuth__sasKeys__key1", "k"),
    ];
    check(wide, &keys, false);
    check(wide, &keys[1..], true);
}

#[test]
fn a_managed_identity_is_not_shown_to_the_world() {
    let check = |text: &str, expected: Option<&str>| {
        let refused = file(&format!("azure.managed_identity = \"me\"\n{text}")).err();
        let expected = expected.map(|reason| format!("azure.managed_identity: {reason} (in postrider.toml)"));
        assert_eq!(refused, expected, "{text}");
    };
    let me = "[[client]]\nid = \"ME\"\nsecret = \"s\"\n";
    check(me, None);
    check("", None);
    check(
        "[[client]]\nid = \"you\"\nsecret = \"s\"\n",
        Some("no [[client]] has the id \"me\""),
    );
    check(
        &format!("edge.allow_open = true\nlisten.http = \"10.0.0.1:5888\"\n{me}"),
        Some("would give a token to anyone who can reach 10.0.0.1:5888: it needs listeners on loopback only"),
    );
}

#[test]
fn an_external_issuer_is_read_and_what_is_wrong_with_it_is_named() {
    let text = "[oidc]\nissuer = \"https://login.example/t/\"\naudience = \"api://grid\"\n";
    let oidc = file(text).unwrap().config.oidc.unwrap();
    assert_eq!(oidc.issuer, "https://login.example/t/", "to the letter");
    assert_eq!(oidc.role_claim, "roles");
    assert_eq!((&oidc.client_claim, &oidc.jwks_url), (&None, &None));
    assert!(oidc.roles.is_empty());
    let mapped = file(&format!("{text}roles = {{ \"Grid.Admin\" = \"owner\" }}")).unwrap();
    assert_eq!(mapped.config.oidc.unwrap().roles["Grid.Admin"], ClientRole::Owner);
    assert_eq!(mapped.warnings, Vec::<String>::new());
    let plain = file(&text.replace("https:", "http:")).unwrap();
    assert!(plain.warnings[0].starts_with("oidc: "), "{:?}", plain.warnings);

    let check = |text: &str, expected: &str| {
        let expected = format!("{expected} (in postrider.toml)");
        assert_eq!(file(text).err(), Some(expected), "{text}");
    };
    check(
        "[oidc]\nissuer = \"https://login.example\"",
        "oidc.audience: is required",
    );
    check("[oidc]\naudience = \"x\"", "oidc.issuer: is required");
    check(
        "[oidc]\nissuer = \"login.example\"\naudience = \"x\"",
        "oidc.issuer: \"login.example\" is not a URL such as \"https://login.example/tenant/v2.0\"",
    );
    check(
        &format!("{text}jwks_url = \"https://u:p@h/\""),
        "oidc.jwks_url: \"https://u:p@h/\" is not a URL such as \"https://login.example/tenant/v2.0\"",
    );
    check(
        &format!("{text}role_claim = \"\""),
        "oidc.role_claim: must not be empty",
    );
    check(
        &format!("{text}roles = {{ a = \"king\" }}"),
        "oidc.roles.a: \"king\" is not one of \"owner\", \"contributor\", \"reader\", \"data-sender\"",
    );
    assert_eq!(
        file(&format!("{text}role_clam = \"x\"")).err().unwrap(),
        "oidc.role_clam: unknown key (in postrider.toml); did you mean \"role_claim\"?"
    );
}

const DECLARED: &str = r#"
[[topic]]
name = "orders"
key1 = "hunter2"
input_schema = "EventGridSchema"
tags = { cost_center = "x" }
[[topic.subscription]]
name = "billing"
[topic.subscription.properties]
retry_policy = { max_delivery_attempts = 3 }
[topic.event_type_info.inline_event_types.order_placed]
description = "x"

[[topic]]
name = "plain"
[topic.properties]
inputSchema = "CloudEventSchemaV1_0"
[[topic.event_subscription]]
name = "s1"
expiration_time_utc = 2030-01-02T03:04:05Z

[[subscription]]
topic = "orders"
name = "audit"
filter = { advanced_filters = [{ operator_type = "NumberIn", key = "data.a_b", values = [1, 2.5] }] }
destination = { endpoint_type = "WebHook", properties = { endpoint_url = "https://f.example/?code=hunter2" } }

[[domain]]
name = "tenants"
key2 = "hunter2"
[[domain.topic]]
name = "acme"
[[domain.topic.subscription]]
name = "s"
"#;

#[test]
fn declared_resources_keep_the_apis_names() {
    let config = file(DECLARED).unwrap().config;
    let orders = &config.topics[0];
    assert_eq!(
        (orders.name.as_str(), orders.key1.as_ref().unwrap().expose()),
        ("orders", "hunter2")
    );
    assert_eq!(
        orders.properties,
        json!({"inputSchema": "EventGridSchema", "tags": {"cost_center": "x"},
               "eventTypeInfo": {"inlineEventTypes": {"order_placed": {"description": "x"}}}})
    );
    assert_eq!(
        config.topics[1].properties,
        json!({"inputSchema": "CloudEventSchemaV1_0"})
    );
    let declared: Vec<_> = config
        .declared_subscriptions()
        .map(|(topic, subscription)| (topic, subscription.name.as_str(), subscription.properties.clone()))
        .collect();
    assert_eq!(
        declared,
        [
            (
                "orders",
                "billing",
                json!({"retryPolicy": {"maxDeliveryAttempts": 3}})
            ),
            (
                "plain",
                "s1",
                json!({"expirationTimeUtc": "2030-01-02T03:04:05Z"})
            ),
            (
                "orders",
                "audit",
                json!({"filter": {"advancedFilters":
                          [{"operatorType": "NumberIn", "key": "data.a_b", "values": [1, 2.5]}]},
                       "destination": {"endpointType": "WebHook",
                          "properties": {"endpointUrl": "https://f.example/?code=hunter2"}}})
            ),
        ]
    );
    assert_eq!(config.domains[0].topics[0].subscriptions[0].name, "s");
}

#[test]
fn what_is_wrong_with_a_declared_resource_is_named() {
    let check = |text: &str, expected: &str| {
        assert_eq!(
            file(text).unwrap_err(),
            format!("{expected} (in postrider.toml)"),
            "{text}"
        );
    };
    let two = "[[topic]]\nname = \"a\"\n[[topic]]\nname = \"b\"\n";
    check(
        &format!("{two}[[topic]]\ninput_schema = \"x\""),
        "topic[2].name: is required",
    );
    check(
        &format!("{two}[[topic]]\nname = \"A\""),
        "topic[2].name: \"A\" is declared twice",
    );
    check(
        &format!("{two}[[topic.subscription]]\nfilter = {{}}"),
        "topic[1].subscription[0].name: is required",
    );
    check("[[topic]]\nname = \"\"", "topic[0]: name: must not be empty");
    check(
        "[[topic]]\nname = \"a\"\ninput_schema = 1\ninputSchema = 2",
        "topic[0]: inputSchema is given in two spellings",
    );
    check(
        "[[topic]]\nname = \"a\"\ninput_schema = 1\nproperties = { inputSchema = 2 }",
        "topic[0]: inputSchema is given both beside \"properties\" and inside it",
    );
    check(
        "[[subscription]]\nname = \"a\"",
        "subscription[0].topic: is required",
    );
    check(
        "[[subscription]]\ntopic = \"a\"",
        "subscription[0].name: is required",
    );
    check(
        "[[topic]]\nname = \"a\"\n[[topic.subscription]]\nname = \"s\"\n[[subscription]]\ntopic = \"A\"\nname = \"S\"",
        "subscription: \"S\" of topic \"A\" is declared twice",
    );
    check(
        "[[topic]]\nname = \"a\"\n[[topic.topic]]\nname = \"b\"",
        "topic[0]: a topic holds no topics; declare a domain",
    );
}

#[test]
fn printing_masks_every_secret_and_can_be_read_back() {
    let text = format!(
        "[[client]]\nid = \"me\"\nsecret = \"hunter2\"\n\
         [[storage_account]]\nname = \"abc\"\nkey = \"aHVudGVyMg==\"\n\
         [[storage_account]]\nname = \"def\"\nkind = \"s3\"\naccess_key_id = \"me\"\n\
         secret_access_key = \"hunter2\"\n\
         [[destination]]\nresource = \"/subscriptions/s/resourceGroups/g/providers/Microsoft.Web/sites/a/functions/f\"\n\
         url = \"http://f.example/?code=hunter2\"\nkey = \"hunter2\"\n\
         [[system_topic]]\nname = \"dead\"\nsource = \"abc\"\n\
         [[system_topic.subscription]]\nname = \"s\"\n\
         destination = {{ properties = {{ endpoint_url = \"https://f.example/?hunter2\" }} }}\n\
         [dead_letter]\ngive_up_after = \"never\"\n{DECLARED}"
    );
    let keys = [
        ("inbound__clientAuth__sasKeys__enabled", "true"),
        ("inbound__clientAuth__sasKeys__key1", "hunter2"),
        ("inbound__serverAuth__tlsPolicy", "strict"),
    ];
    let loaded = load_with(&text, &keys, ServeFlags::default()).unwrap();
    let printed = print_config(&loaded);
    for shown in [printed.clone(), format!("{loaded:?}")] {
        assert!(
            !shown.contains("hunter2") && !shown.contains("aHVudGVyMg=="),
            "{shown}"
        );
    }
    for line in [
        "secret = \"********\"",
        "key = \"********\"",
        "secret_access_key = \"********\"",
        "key1 = \"********\"",
        "# inbound__clientAuth__sasKeys__key1=********",
        "http = \"off\"",
        "give_up_after = \"never\"",
        "endpointUrl = \"https://f.example/?********\"",
        "url = \"http://f.example/?********\"",
    ] {
        assert!(printed.contains(line), "{line}\n{printed}");
    }
    // A masked storage key is not base64.
    let again = file(&printed.replace("\nkey = \"********\"", "\nkey = \"aHVudGVyMg==\"")).unwrap();
    assert_eq!(print_config(&again).split('#').next(), printed.split('#').next());
}

#[test]
fn what_is_wrong_with_destinations_is_named() {
    const FUNCTION: &str = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Web/sites/a/functions/f";
    const HUB: &str =
        "/subscriptions/s/resourceGroups/g/providers/Microsoft.EventHub/namespaces/n/eventhubs/h";
    let check = |id: &str, rest: &str, expected: &str| {
        let text = format!("[[destination]]\nresource = \"{id}\"\n{rest}");
        let refused = file(&text).unwrap_err();
        assert_eq!(
            refused,
            format!("destination[0].{expected} (in postrider.toml)"),
            "{text}"
        );
    };
    let url = "url = \"http://h.example\"\n";
    check("", url, "resource: is required");
    let account = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/abc";
    for id in ["orders", account] {
        let expected = format!(
            "resource: \"{id}\" is not the resource id of a function, an event hub, a queue or topic of Service Bus, \
             or a hybrid connection"
        );
        check(id, url, &expected);
    }
    check(HUB, "", "url: is required");
    check(
        HUB,
        "url = \"sb://h.example\"",
        "url: must be an absolute http or https URL",
    );
    check(
        HUB,
        "url = \"http://h.example?a=b\"",
        "url: must be that of the entity, without a query",
    );
    let with = |rest: &str| format!("{url}{rest}");
    check(HUB, &with("key = \"k\""), "key_name: is required with key");
    check(HUB, &with("key_name = \"n\""), "key: is required with key_name");
    check(
        HUB,
        &with("key_name = \"\"\nkey = \"k\""),
        "key_name: must not be empty",
    );
    check(
        HUB,
        &with("key_name = \"n\"\nkey = \"\""),
        "key: must not be empty",
    );
    check(
        FUNCTION,
        &with("key_name = \"n\"\nkey = \"k\""),
        "key_name: is not for a function, which has only a key",
    );
    check(
        FUNCTION,
        &with("key = \"a\\nb\""),
        "key: cannot be sent in a header",
    );

    let one = |id: &str| format!("[[destination]]\nresource = \"{id}\"\n");
    let upper = HUB.to_uppercase();
    let twice = file(&format!("{}{url}{}{url}", one(HUB), one(&upper))).unwrap_err();
    let expected = format!("destination[1].resource: \"{upper}\" is given twice (in postrider.toml)");
    assert_eq!(twice, expected);
    let good = "url = \"http://f.example/x?code=c\"\nkey = \"k\"";
    let loaded = file(&format!("{}{good}", one(FUNCTION))).unwrap();
    assert_eq!(loaded.config.destinations.len(), 1);
}

#[test]
fn what_is_wrong_with_storage_accounts_is_named() {
    let check = |text: &str, expected: &str| {
        let expected = format!("{expected} (in postrider.toml)");
        assert_eq!(file(text).unwrap_err(), expected, "{text}");
    };
    let account = |name: &str, rest: &str| format!("[[storage_account]]\nname = \"{name}\"\n{rest}");
    let key = "key = \"aHVudGVyMg==\"\n";
    check(
        "[[storage_account]]\nkind = \"s3\"",
        "storage_account[0].name: is required",
    );
    for wrong in ["ab", "Dev", "a-b-c"] {
        let expected = "storage_account[0].name: must have 3 to 24 lowercase letters and digits, was";
        check(&account(wrong, key), &format!("{expected} \"{wrong}\""));
    }
    check(
        &(account("abc", key) + &account("abc", key)),
        "storage_account[1].name: \"abc\" is given twice",
    );
    check(
        &account("abc", "kind = \"tape\""),
        "storage_account[0].kind: \"tape\" is not one of \"azure\", \"s3\", \"gcs\", \"directory\"",
    );
    check(
        &account("abc", &format!("{key}bucket = \"b\"")),
        "storage_account[0].bucket: is not for an account of kind \"azure\"",
    );
    check(
        &account("abc", ""),
        "storage_account[0].key: is required for an account of kind \"azure\"",
    );
    check(
        &account("abc", "key = \"\""),
        "storage_account[0].key: must not be empty",
    );
    for (kind, own, foreign, missing) in [
        (
            "s3",
            "access_key_id = \"a\"\nsecret_access_key = \"b\"\nendpoint = \"http://h\"\nregion = \"r\"\nbucket = \"b\"\n",
            "key",
            "access_key_id",
        ),
        (
            "gcs",
            "service_account_file = \"f\"\nendpoint = \"http://h\"\nbucket = \"b\"\n",
            "region",
            "service_account_file",
        ),
        ("directory", "path = \"/p\"\n", "endpoint", "path"),
    ] {
        let of_kind = |rest: &str| account("abc", &format!("kind = \"{kind}\"\n{rest}"));
        assert!(file(&of_kind(own)).is_ok(), "{kind}");
        check(
            &of_kind(&format!("{own}{foreign} = \"http://h\"")),
            &format!("storage_account[0].{foreign}: is not for an account of kind \"{kind}\""),
        );
        check(
            &of_kind(""),
            &format!("storage_account[0].{missing}: is required for an account of kind \"{kind}\""),
        );
    }
}

#[test]
fn an_account_is_there_without_being_configured() {
    let names = |config: &Config| {
        let all = config.all_storage_accounts();
        all.into_iter().map(|account| account.name).collect::<Vec<_>>()
    };
    let plain = file("data_dir = \"/d\"").unwrap().config;
    assert_eq!(names(&plain), ["local"]);
    let local = &plain.all_storage_accounts()[0];
    assert_eq!(local.path.as_deref(), Some(Path::new("/d/deadletters")));
    assert_eq!(
        (local.kind, local.creates_containers()),
        (AccountKind::Directory, true)
    );

    let text = "[[storage_account]]\nname = \"abc\"\nkey = \"aHVudGVyMg==\"\n\
                [[storage_account]]\nname = \"local\"\nkind = \"directory\"\npath = \"/p\"\ncreate_containers = false\n";
    let other = file(text).unwrap().config;
    assert_eq!(names(&other), ["abc", "local"]);
    assert_eq!(
        other
            .storage_accounts
            .iter()
            .map(|a| a.creates_containers())
            .collect::<Vec<_>>(),
        [false, false]
    );
}

#[test]
fn the_safety_net_names_an_account_and_perhaps_a_container() {
    let net = |place: &str| file(&format!("[dead_letter]\ndefault = \"{place}\""));
    let place = |text: &str| {
        let config = net(text).unwrap().config;
        config
            .default_dead_letter_container()
            .map(|(account, container)| (account.to_owned(), container.to_owned()))
    };
    assert_eq!(place("local"), Some(("local".into(), "deadletters".into())));
    assert_eq!(place("local/other"), Some(("local".into(), "other".into())));
    assert_eq!(file("").unwrap().config.default_dead_letter_container(), None);
    let check = |text: &str, expected: &str| {
        let expected = format!("dead_letter.default: {expected} (in postrider.toml)");
        assert_eq!(net(text).unwrap_err(), expected);
    };
    check(
        "lokal",
        "storage account \"lokal\" is not configured, only local; did you mean \"local\"?",
    );
    check("", "storage account \"\" is not configured, only local");
    for wrong in ["", "Dead", "a/b"] {
        check(
            &format!("local/{wrong}"),
            &format!(
                "the container must have 3 to 63 lowercase letters, digits or single hyphens between them, was \"{wrong}\""
            ),
        );
    }
}

#[test]
fn a_system_topic_tells_of_a_resource() {
    let text = "[azure]\nresource_group = \"g\"\nsubscription = \"s\"\n\
                [[system_topic]]\nname = \"a\"\nsource = \"local\"\n\
                [[system_topic.subscription]]\nname = \"x\"\n\
                [[system_topic]]\nname = \"b\"\nproperties = { source = \"/some/id\", topicType = \"T\" }\ntags = { a_b = \"c\" }\n";
    let config = file(text).unwrap().config;
    let [a, b] = &config.system_topics[..] else {
        panic!("two")
    };
    assert_eq!(
        config.source_of(a),
        "/subscriptions/s/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/local"
    );
    assert_eq!(
        (a.topic_type.as_str(), a.subscriptions.len()),
        ("Microsoft.Storage.StorageAccounts", 1)
    );
    assert_eq!(
        (config.source_of(b).as_str(), b.topic_type.as_str()),
        ("/some/id", "T")
    );
    assert_eq!(b.properties, json!({"tags": {"a_b": "c"}}));

    let check = |text: &str, expected: &str| {
        let expected = format!("{expected} (in postrider.toml)");
        assert_eq!(file(text).unwrap_err(), expected, "{text}");
    };
    let topic = |name: &str, rest: &str| format!("[[system_topic]]\nname = \"{name}\"\n{rest}\n");
    check(&topic("a", ""), "system_topic[0]: source: is required");
    check(
        &topic("a", "source = 1"),
        "system_topic[0]: source: must be text that is not empty",
    );
    check(
        &topic("a", "source = \"other\""),
        "system_topic[0].source: storage account \"other\" is not configured, only local",
    );
    let good = "source = \"local\"";
    check(
        &(topic("a", good) + &topic("A", good)),
        "system_topic[1].name: \"A\" is declared twice",
    );
    let twice = "[[system_topic.subscription]]\nname = \"x\"\n".repeat(2);
    check(
        &topic("a", &format!("{good}\n{twice}")),
        "system_topic[0].subscription[1].name: \"x\" is declared twice",
    );
}

const CUSTOM: &str = r#"
[retry]
jitter_percent = 0
jitter_seed = 7
split_batches_on = [413, 400]
[probation]
failures = 3
max = "1h"
[profile_custom]
base = "edge"
schedule = ["200ms", "1h30m"]
response_timeout = "10s"
batch_response_timeout = "20s"
late_window = "off"
success = [200]
final = []
final_if_dead_lettered = [404]
floors = { "503" = 0, 408 = "2m" }
other_floor = 0
jitter_percent = 50
split_batches_on = [400]
attempts_max = 1
time_to_live = "never"
time_to_live_check = "before-waiting"
probation = { failures = 1, max = "2h", other = "1s", causes = { Busy = "1s", genericerror = "7d" } }
"#;

#[test]
fn a_custom_profile_is_read_and_printed_as_it_was_written() {
    let seconds = std::time::Duration::from_secs;
    let loaded = file(CUSTOM).unwrap();
    let custom = loaded.config.profile_custom.clone().unwrap();
    assert_eq!(custom.base, "edge");
    assert_eq!(
        custom.schedule,
        Some(vec![std::time::Duration::from_millis(200), seconds(5400)])
    );
    assert_eq!(custom.late_window, Some(OrOff::Off));
    assert_eq!(custom.finals, Some(vec![]));
    let floors = [(503, seconds(0)), (408, seconds(120))];
    assert_eq!(custom.floors, Some(floors.into()));
    assert_eq!(custom.time_to_live_check, Some(TimeToLiveCheck::BeforeWaiting));
    let Some(OrOff::On(probation)) = custom.probation else {
        panic!("{:?}", custom.probation);
    };
    use postrider_core::outcome::Outcome;
    let causes = [
        (Outcome::Busy, seconds(1)),
        (Outcome::GenericError, seconds(7 * 86_400)),
    ];
    assert_eq!(probation.causes, Some(causes.into()));

    let printed = print_config(&loaded);
    for line in ["jitter_percent = 0", "jitter_seed = 7", "late_window = \"off\""] {
        assert!(printed.contains(line), "{line}\n{printed}");
    }
    assert_eq!(file(&printed).unwrap().config, loaded.config);

    // A single set key, whichever it is, defines the custom profile.
    let one = env(&[("POSTRIDER_PROFILE_CUSTOM__PROBATION__CAUSES__BUSY", "1m")]).unwrap();
    assert_eq!(one.config.profile_custom.clone().unwrap().base, "cloud-2021");
    let none = file("[profile_custom]").unwrap();
    assert_eq!(none.config.profile_custom, Some(ProfileCustom::default()));
    for loaded in [one, none, file("[profile_custom]\nprobation = \"off\"").unwrap()] {
        assert_eq!(file(&print_config(&loaded)).unwrap().config, loaded.config);
        assert_eq!(loaded.warnings, Vec::<String>::new());
    }
}

#[test]
fn the_largest_seed_is_printed_and_read_back() {
    let loaded = env(&[("POSTRIDER_RETRY__JITTER_SEED", "18446744073709551615")]).unwrap();
    assert_eq!(loaded.config.retry.jitter_seed, Some(u64::MAX));
    assert_eq!(file(&print_config(&loaded)).unwrap().config, loaded.config);
}

#[test]
fn what_is_wrong_with_retrying_is_named() {
    let check = |text: &str, expected: &str| {
        let expected = expected.replacen('\n', " (in postrider.toml)", 1);
        assert_eq!(file(text).unwrap_err(), expected, "{text}");
    };
    check(
        "profile = \"custom\"",
        "profile: \"custom\" needs a [profile_custom] section\n",
    );
    check(
        "[retry]\nsplit_batches_on = [503]",
        "retry.split_batches_on[0]: must be 400 or 413, was 503\n",
    );
    check(
        "[retry]\njitter_percent = 51",
        "retry.jitter_percent: must be between 0 and 50, was 51\n",
    );
    check("[retry]\njitter = 5", "retry.jitter: unknown key\n");
    check(
        "[retry]\njitter_seed = -1",
        "retry.jitter_seed: -1 does not fit a whole number\n",
    );
    check(
        "[probation]\nfailures = 0",
        "probation.failures: must be between 1 and 10000, was 0\n",
    );
    check(
        "[probation]\nfailures = 10001",
        "probation.failures: must be between 1 and 10000, was 10001\n",
    );
    check(
        "[probation]\nmax = 0",
        "probation.max: must be more than 0 and at most 7d, was 0s\n",
    );
    check(
        "[probation]\nmax = \"never\"",
        "probation.max: must be more than 0 and at most 7d, was never\n",
    );
    check(
        "[validation]\nwindow = 0",
        "validation.window: must be more than 0 and at most 7d, was 0s\n",
    );
    check(
        "[validation]\nwindow = \"8d\"",
        "validation.window: must be more than 0 and at most 7d, was 8d\n",
    );
    check(
        "[validation]\nenable = true",
        "validation.enable: unknown key\n; did you mean \"enabled\"?",
    );
    check(
        "[edge]\nstrict_sucess = true",
        "edge.strict_sucess: unknown key\n; did you mean \"strict_success\"?",
    );
}

#[test]
fn what_is_wrong_with_a_custom_profile_is_named() {
    let check = |text: &str, expected: &str| {
        assert_eq!(
            file(&format!("[profile_custom]\n{text}")).unwrap_err(),
            format!("profile_custom{expected}").replacen('\n', " (in postrider.toml)", 1),
            "{text}"
        );
    };
    check(
        "shedule = [\"1s\"]",
        ".shedule: unknown key\n; did you mean \"schedule\"?",
    );
    let standard = "cloud-2018, cloud-2019, cloud-2020, cloud-2021, cloud-current, edge";
    check(
        "base = \"custom\"",
        &format!(".base: \"custom\" is not one of {standard}\n"),
    );
    check(
        "base = \"cloud-2022\"",
        &format!(".base: \"cloud-2022\" is not one of {standard}; did you mean \"cloud-2020\"?\n"),
    );

    check("schedule = []", ".schedule: must have at least one wait\n");
    check(
        &format!("schedule = [{}]", "\"1s\", ".repeat(101)),
        ".schedule: must have at most 100 waits, has 101\n",
    );
    check(
        "schedule = [\"1s\", \"2s\", 0]",
        ".schedule[2]: must be more than 0 and at most 7d, was 0s\n",
    );
    check(
        "schedule = [\"1s\", \"7d1s\"]",
        ".schedule[1]: must be more than 0 and at most 7d, was 7d1s\n",
    );
    check(
        "schedule = [\"1s\", 5]",
        ".schedule[1]: 5 needs a unit, such as \"5s\"\n",
    );
    check("schedule = \"1s\"", ".schedule: must be a list, not text\n");

    check(
        "response_timeout = \"61m\"",
        ".response_timeout: must be more than 0 and at most 1h, was 1h1m\n",
    );
    check(
        "response_timeout = 0",
        ".response_timeout: must be more than 0 and at most 1h, was 0s\n",
    );
    check(
        "split_batches_on = [413, 500]",
        ".split_batches_on[1]: must be 400 or 413, was 500\n",
    );
    check(
        "split_batches_on = [413, 413]",
        ".split_batches_on[1]: 413 is given twice\n",
    );
    check(
        "batch_response_timeout = \"2h\"",
        ".batch_response_timeout: must be more than 0 and at most 1h, was 2h\n",
    );
    check(
        "batch_response_timeout = \"2m\"\nlate_window = \"2m\"",
        ".late_window: must be longer than batch_response_timeout, which is 2m\n",
    );
    // A late window shorter than the inherited batch timeout stays valid: it was before there was a
    // batch timeout.
    assert!(file("[profile_custom]\nlate_window = \"45s\"").is_ok());
    check(
        "late_window = \"30s\"",
        ".late_window: must be longer than response_timeout, which is 30s\n",
    );
    check(
        "late_window = \"61m\"",
        ".late_window: must be more than 0 and at most 1h, was 1h1m\n",
    );
    check(
        "late_window = \"of\"",
        ".late_window: \"of\" is not a duration such as \"30s\", \"1h30m\" or \"never\", nor \"off\"\n",
    );
    check(
        "response_timeout = \"3m\"",
        ".late_window: 3m, as in \"cloud-2021\", is not longer than response_timeout, which is 3m: set it longer, or \"off\"\n",
    );

    check("success = []", ".success: must have at least one status\n");
    check(
        "success = [200, 99]",
        ".success[1]: must be between 100 and 599, was 99\n",
    );
    check("success = [200, 200]", ".success[1]: 200 is given twice\n");
    check(
        "success = [70000]",
        ".success[0]: 70000 does not fit a whole number\n",
    );
    check(
        "final = [400, 600]",
        ".final[1]: must be between 100 and 599, was 600\n",
    );
    check(
        "success = [200]\nfinal = [400, 200]",
        ".final[1]: 200 is also in profile_custom.success\n",
    );
    check(
        "final = [400]\nfinal_if_dead_lettered = [400]",
        ".final_if_dead_lettered[0]: 400 is also in profile_custom.final\n",
    );
    check(
        "final_if_dead_lettered = [408]\nfloors = { 408 = \"1m\" }",
        ".floors.408: 408 is also in profile_custom.final_if_dead_lettered\n",
    );
    check(
        "success = [200, 503]\nfloors = { \"503\" = \"1m\" }",
        ".floors.503: 503 is also in profile_custom.success\n",
    );
    check(
        "final = [202]",
        ".final[0]: 202 is a success in \"cloud-2021\": set profile_custom.success without it\n",
    );
    assert!(file("[profile_custom]\nbase = \"edge\"\nfinal = [202]\n[edge]\nstrict_success = true").is_ok());

    check(
        "floors = { busy = \"1s\" }",
        ".floors.busy: \"busy\" is not a status such as \"503\"\n",
    );
    check(
        "floors = { 099 = \"1s\" }",
        ".floors.099: \"099\" is not a status such as \"503\"\n",
    );
    check(
        "floors = { 503 = \"soon\" }",
        ".floors.503: \"soon\" is not a duration such as \"30s\", \"1h30m\" or \"never\"\n",
    );
    check(
        "floors = { 503 = \"8d\" }",
        ".floors.503: must be at most 7d, was 8d\n",
    );
    check(
        "other_floor = \"never\"",
        ".other_floor: must be at most 7d, was never\n",
    );
    check(
        "jitter_percent = 51",
        ".jitter_percent: must be between 0 and 50, was 51\n",
    );
    check("attempts_max = 0", ".attempts_max: must be at least 1\n");
    check("time_to_live = 0", ".time_to_live: must be more than 0\n");
    check(
        "time_to_live_check = \"before\"",
        ".time_to_live_check: \"before\" is not one of \"when-due\", \"before-waiting\"\n",
    );

    check(
        "probation = \"on\"",
        ".probation: \"on\" is not a table, nor \"off\"\n",
    );
    check(
        "probation = true",
        ".probation: must be a table or \"off\", not true\n",
    );
    check(
        "probation = { failure = 1 }",
        ".probation.failure: unknown key\n; did you mean \"failures\"?",
    );
    check(
        "probation = { failures = 0 }",
        ".probation.failures: must be between 1 and 10000, was 0\n",
    );
    check(
        "probation = { max = \"8d\" }",
        ".probation.max: must be more than 0 and at most 7d, was 8d\n",
    );
    check(
        "probation = { other = 0 }",
        ".probation.other: must be more than 0 and at most 7d, was 0s\n",
    );
    check(
        "probation = { causes = { Full = 0 } }",
        ".probation.causes.Full: must be more than 0 and at most 7d, was 0s\n",
    );
    for no_failure in ["Success", "Probation", "Bsuy"] {
        let text = format!("[profile_custom]\nprobation = {{ causes = {{ {no_failure} = \"1s\" }} }}");
        let error = file(&text).unwrap_err();
        let expected = format!(
            "profile_custom.probation.causes.{no_failure}: \"{no_failure}\" is not one of NotFound, "
        );
        assert!(error.starts_with(&expected), "{error}");
    }
}

/// The lines of the default file that are settings, uncommented; examples only if asked for.
fn uncommented(examples: bool) -> String {
    let is_setting = |line: &str| {
        let key = line.split(" = ").next().unwrap_or_default();
        line.starts_with('[')
            || (line.contains(" = ")
                && key
                    .chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'))
    };
    let lines = default_config_text()
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(default) if is_setting(default) => default,
            Some(example) if examples && is_setting(example.trim_start()) => example.trim_start(),
            _ => line,
        });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_default_file_shows_the_defaults() {
    assert_eq!(file(default_config_text()).unwrap().config, Config::default());
    let config = file(&uncommented(false)).unwrap().config;
    assert_eq!(config, Config::default());
}

#[test]
fn the_default_file_explains_every_key() {
    fn leaves(value: &serde_json::Value, path: &str, found: &mut Vec<String>) {
        match value {
            serde_json::Value::Object(map) => {
                map.iter()
                    .for_each(|(key, value)| leaves(value, &format!("{path}.{key}"), found));
            }
            serde_json::Value::Null => found.push(path.to_owned()),
            _ => {}
        }
    }
    // Only one of `secrets.key` and `secrets.key_file` can be set.
    let secrets_key = "\nkey = \"secret\"\n";
    let examples = uncommented(true);
    assert!(examples.contains(secrets_key));
    let config = file(&examples.replace(secrets_key, "\n")).unwrap().config;
    // Every optional key has an example, so no value is null; every other key has its default line.
    let mut unexplained = Vec::new();
    leaves(&serde_json::to_value(&config).unwrap(), "", &mut unexplained);
    assert_eq!(unexplained, [".secrets.key"]);
    for list in [
        config.clients.len(),
        config.topics.len(),
        config.domains.len(),
        config.system_topics.len(),
        config.subscriptions.len(),
        config.destinations.len(),
    ] {
        assert_eq!(list, 1);
    }
    let kinds: Vec<_> = config
        .storage_accounts
        .iter()
        .map(|account| account.kind)
        .collect();
    use AccountKind::{Azure, Directory, Gcs, S3};
    assert_eq!(kinds, [Azure, S3, Gcs, Directory], "an example of each");
    let written: toml::Table = toml::from_str(&uncommented(true)).unwrap();
    let all: toml::Table = toml::from_str(&toml::to_string(&config).unwrap()).unwrap();
    for (key, value) in &all {
        assert!(written.contains_key(key), "{key}");
        for inner in value.as_table().into_iter().flat_map(|table| table.keys()) {
            assert!(written[key].get(inner).is_some(), "{key}.{inner}");
        }
    }
}

#[test]
fn the_credentials_of_a_proxy_are_not_shown() {
    let egress: super::model::EgressConfig =
        toml::from_str("proxy = \"http://me:hush@proxy:3128\"").expect("it is well-formed");
    let shown = format!("{egress:?} {}", toml::to_string(&egress).expect("a table"));
    assert!(!shown.contains("hush") && !shown.contains("me:"), "{shown}");
    assert!(shown.contains("http://********@proxy:3128"), "{shown}");
}

#[test]
fn quotas_are_azures_in_the_cloud_profiles_and_generous_elsewhere() {
    let quotas = |text: &str| file(text).unwrap().config.quotas_in_force();
    let cloud = quotas("");
    assert_eq!(
        [cloud.topics, cloud.domains, cloud.subscriptions_per_topic],
        [100, 100, 500]
    );
    assert_eq!(
        [cloud.subscriptions_per_domain, cloud.domain_topics],
        [50, 100_000]
    );
    assert_eq!(cloud.edge_topics, 100_000);
    assert_eq!(quotas("profile = \"edge\"").topics, 100_000);
    assert_eq!(quotas("[quotas]\ntopics = 7").topics, 7);
}

#[test]
fn what_is_declared_fits_the_quotas_or_they_are_raised() {
    let topics = |count: usize, more: &str| -> String {
        let topic = |n: usize| format!("[[topic]]\nname = \"t{n}\"\n{more}\n");
        (0..count).map(topic).collect()
    };
    assert!(file(&topics(100, "")).is_ok());
    let refused = file(&topics(101, "")).unwrap_err();
    assert!(
        refused.contains("quotas.topics: is 100, but 101 topics are declared"),
        "{refused}"
    );
    assert!(file(&format!("[quotas]\ntopics = 101\n{}", topics(101, ""))).is_ok());
    // Topics of the edge API are counted separately.
    assert!(file(&topics(101, "edge = true")).is_ok());
    let refused = file(&format!(
        "[quotas]\nedge_topics = 1\n{}",
        topics(2, "edge = true")
    ))
    .unwrap_err();
    assert!(refused.contains("quotas.edge_topics: is 1, but 2"), "{refused}");
    let hook = "{ endpoint_type = \"WebHook\", properties = { endpoint_url = \"http://127.0.0.1:9/\" } }";
    let subscription = |n: usize| format!("[[topic.subscription]]\nname = \"s{n}\"\ndestination = {hook}\n");
    let subscriptions: String = (0..2).map(subscription).collect();
    let refused = file(&format!(
        "[quotas]\nsubscriptions_per_topic = 1\n{}{subscriptions}",
        topics(1, "")
    ))
    .unwrap_err();
    assert!(
        refused.contains("quotas.subscriptions_per_topic: is 1, but 2 subscriptions of topic \"t0\""),
        "{refused}"
    );
}

#[test]
fn plain_http_that_others_can_reach_is_warned_of_unless_it_is_allowed_by_name() {
    let base = "edge.require_auth = true\nedge.allow_open = true\n";
    let warnings = |text: &str| {
        let keys = [
            ("inbound__clientAuth__sasKeys__enabled", "true"),
            ("inbound__clientAuth__sasKeys__key1", "a-key-that-nobody-guesses"),
        ];
        let loaded = load_with(&format!("{base}{text}"), &keys, ServeFlags::default()).unwrap();
        loaded.warnings
    };
    let warned = warnings("listen.http = \"0.0.0.0:5888\"");
    assert!(
        warned[0].contains("listen.http is 0.0.0.0:5888") && warned[0].contains("listen.allow_plain_http"),
        "{warned:?}"
    );
    for safe in [
        "listen.http = \"127.0.0.1:5888\"",
        "listen.http = \"[::1]:5888\"",
        "listen.http = \"0.0.0.0:5888\"\nlisten.allow_plain_http = true",
        "listen.http = \"off\"\nlisten.https = \"0.0.0.0:4438\"",
    ] {
        assert_eq!(warnings(safe), Vec::<String>::new(), "{safe}");
    }
}
