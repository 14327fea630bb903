use super::*;
use postrider_core::outcome::Outcome;
use postrider_core::profile::{CLOUD_2018, CLOUD_2020, CLOUD_2021, StatusLine, StatusRule, TimeToLiveRule};
use serde_json::{Value, json};

fn loaded(file: &str, env: &[(&str, &str)]) -> LoadedConfig {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("postrider.toml");
    std::fs::write(&path, file).unwrap();
    let flags = ServeFlags {
        config: Some(path),
        ..ServeFlags::default()
    };
    config::load(&flags, env.iter().map(|(k, v)| ((*k).into(), (*v).into()))).unwrap()
}

fn of_file(file: &str) -> Profiles {
    of(&loaded(file, &[]))
}

fn custom(keys: &str) -> Profile {
    *of_file(&format!("[profile_custom]\n{keys}"))
        .named("custom")
        .unwrap()
}

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// Output of the command with a configuration file, or its error.
fn told(line: &str, file: &str, env: &[(&str, &str)]) -> Result<String, String> {
    use clap::{Args, FromArgMatches};
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("postrider.toml");
    std::fs::write(&path, file).unwrap();
    let command = ProfilesArgs::augment_args(clap::Command::new("profiles"));
    command.clone().debug_assert();
    let words = line.split_whitespace().map(String::from);
    let words = words.chain(["--config".into(), path.display().to_string()]);
    let matches = command.try_get_matches_from(words).unwrap();
    let args = ProfilesArgs::from_arg_matches(&matches).unwrap();
    let env = env.iter().map(|(k, v)| ((*k).into(), (*v).into()));
    answer(&args, env).map_err(|error| format!("{error:#}"))
}

#[test]
fn an_empty_configuration_changes_nothing() {
    assert_eq!(of_file(""), Profiles::default());
    assert_eq!(of_file("profile = \"cloud-2018\"").fallback(), &CLOUD_2018);
}

#[test]
fn the_modules_variables_hold_on_the_edge_profile_whatever_the_default() {
    let env = [
        ("broker__defaultMaxDeliveryAttempts", "5"),
        ("broker__defaultEventTimeToLiveInSeconds", "60"),
    ];
    for file in ["", "profile = \"edge\""] {
        let profiles = of(&loaded(file, &env));
        let expected = Profile {
            attempts_max: 5,
            time_to_live: secs(60),
            ..EDGE
        };
        assert_eq!(profiles.named("edge"), Some(&expected));
        assert_eq!(profiles.named("cloud-2021"), Some(&CLOUD_2021));
    }
    let strict = of_file("[edge]\nstrict_success = true\n[profile_custom]\nbase = \"edge\"");
    for name in ["edge", "custom"] {
        assert_eq!(strict.named(name).unwrap().success, [200]);
    }
    assert_eq!(strict.named("cloud-2021"), Some(&CLOUD_2021));
}

#[test]
fn jitter_is_replaced_where_there_is_some() {
    let file = "[retry]\njitter_percent = 20\n[profile_custom]\njitter_percent = 5";
    let percent = |profiles: &Profiles, name| profiles.named(name).unwrap().jitter_percent;
    let profiles = of_file(file);
    assert_eq!(percent(&profiles, "cloud-2018"), 20);
    assert_eq!(percent(&profiles, "custom"), 20);
    assert_eq!(percent(&profiles, "edge"), 0);
    let exact = of_file(&file.replace("20", "0"));
    assert!(exact.iter().all(|profile| profile.jitter_percent == 0));
    assert_eq!(custom("jitter_percent = 5").jitter_percent, 5);
    assert_eq!(custom("jitter_percent = 0").jitter_percent, 0);
}

#[test]
fn batches_are_halved_after_413_and_after_400_by_choice() {
    let on = |file: &str, name: &str| of_file(file).named(name).unwrap().split_batches_on;
    for profile in of_file("").iter() {
        assert_eq!(profile.split_batches_on, [413], "{}", profile.name);
    }
    let both = "[retry]\nsplit_batches_on = [400, 413]\n[profile_custom]\nsplit_batches_on = [413]";
    for name in ["cloud-2018", "cloud-2021", "edge", "custom"] {
        assert_eq!(on(both, name), [400, 413], "{name}");
    }
    let own = "[profile_custom]\nsplit_batches_on = [400, 413]";
    assert_eq!(
        (on(own, "custom"), on(own, "cloud-2021")),
        (&[400, 413][..], &[413][..])
    );
    let never = "[profile_custom]\nsplit_batches_on = []";
    assert!(on(never, "custom").is_empty());
    let shown = |file: &str| told("profiles show custom", file, &[]).unwrap();
    assert_lines(
        &shown(own),
        &["batches sent again in halves after 400 or 413, as the same attempt, down to single events"],
    );
    assert_lines(&shown(never), &["batches never"]);
    let json: Value = serde_json::from_str(&told("profiles show custom --json", own, &[]).unwrap()).unwrap();
    assert_eq!(json["splitBatchesOn"], json!([400, 413]));
}

#[test]
fn probation_and_dead_letters_are_the_operators_unless_custom_says_otherwise() {
    let settings = "[probation]\nfailures = 3\nmax = \"1h\"\n\
                    [dead_letter]\ndelay = \"1s\"\ngive_up_after = \"never\"\n[profile_custom]\n";
    let custom_with = |keys: &str| *of_file(&format!("{settings}{keys}")).named("custom").unwrap();
    for profile in of_file(settings).iter() {
        if let Some(rules) = profile.probation {
            assert_eq!((rules.failures, rules.max), (3, secs(3600)), "{}", profile.name);
            assert_eq!(rules.causes, ProbationRules::DOCUMENTED.causes);
        }
        assert_eq!(profile.dead_letter.delay, secs(1));
        assert_eq!(profile.dead_letter.give_up_after, Duration::MAX);
    }
    assert_eq!(of_file(settings).named("cloud-2018").unwrap().probation, None);

    assert_eq!(custom_with("probation = \"off\"").probation, None);
    let own = custom_with("probation = { failures = 4 }").probation.unwrap();
    assert_eq!((own.failures, own.max), (4, secs(3600)));
    let keys = "base = \"edge\"\nprobation = { max = \"2h\", other = \"1s\", \
                causes = { Busy = \"7s\", BadRequest = \"8s\" } }";
    let own = custom_with(keys).probation.unwrap();
    assert_eq!((own.failures, own.max), (3, secs(7200)));
    let waits = [
        (Outcome::Busy, 7),
        (Outcome::BadRequest, 8),
        (Outcome::NotFound, 300),
        (Outcome::Aborted, 1),
    ];
    for (cause, wait) in waits {
        assert_eq!(own.first(cause), secs(wait), "{cause}");
    }
}

#[test]
fn a_custom_profile_is_its_base_but_for_what_it_says() {
    let named = Profile {
        name: "custom",
        about: "from the configuration, based on cloud-2021",
        ..CLOUD_2021
    };
    assert_eq!(custom(""), named);
    let about = "from the configuration, based on cloud-2018";
    assert_eq!(
        custom("base = \"cloud-2018\""),
        Profile {
            name: "custom",
            about,
            ..CLOUD_2018
        }
    );
    let keys = "schedule = [\"1s\", \"2s\"]\nresponse_timeout = \"5s\"\nlate_window = \"6s\"\nsuccess = [200, 404]\n\
                other_floor = \"3s\"\njitter_percent = 0\nattempts_max = 100\ntime_to_live = \"1h\"\n\
                time_to_live_check = \"before-waiting\"\nprobation = \"off\"";
    // The written schedule holds: inherited floors are lowered to its shortest wait.
    let second = |rule: StatusRule| rule.with_floor(|_| secs(1));
    let without_404: Vec<StatusLine> = named
        .statuses
        .iter()
        .filter(|l| l.status != 404)
        .map(|l| StatusLine {
            web_hook: second(l.web_hook),
            azure_resource: second(l.azure_resource),
            ..*l
        })
        .collect();
    let expected = Profile {
        schedule: const { &[secs(1), secs(2)] },
        response_timeout: secs(5),
        batch_response_timeout: secs(5),
        late_window: Some(secs(6)),
        success: &[200, 404],
        statuses: without_404.leak(),
        other_floor: secs(3),
        jitter_percent: 0,
        attempts_max: 100,
        time_to_live: secs(3600),
        time_to_live_rule: TimeToLiveRule::BeforeWaiting,
        probation: None,
        ..named
    };
    assert_eq!(custom(keys), expected);
    assert_eq!(custom("late_window = \"off\"").late_window, None);
    let profiles = of_file("profile = \"custom\"\n[profile_custom]");
    assert_eq!(profiles.fallback(), &named);
}

#[test]
fn what_custom_says_of_a_status_takes_the_place_of_what_the_base_says() {
    use StatusRule::{Final, FinalIfDeadLettered, RetryAfter};
    let check = |keys: &str, expected: &[(u16, StatusRule, StatusRule)]| {
        let profile = custom(keys);
        let lines: Vec<_> = profile
            .statuses
            .iter()
            .map(|line| (line.status, line.web_hook, line.azure_resource))
            .collect();
        assert_eq!(lines, expected, "{keys}");
    };
    let five = RetryAfter(secs(300));
    let other = RetryAfter(secs(10));
    let slow = |status, seconds| (status, RetryAfter(secs(seconds)), RetryAfter(secs(seconds)));
    // A column that was not final is unchanged.
    check(
        "final = [403, 410]",
        &[
            (400, other, other),
            (401, other, five),
            (403, Final, Final),
            (404, other, five),
            slow(408, 120),
            (410, Final, Final),
            (413, other, other),
            slow(503, 30),
        ],
    );
    check(
        "final = []\nother_floor = \"1s\"\nfloors = { 404 = \"7s\", 429 = 0, 503 = \"1m\" }",
        &[
            slow(400, 1),
            (401, RetryAfter(secs(1)), five),
            slow(403, 1),
            slow(404, 7),
            slow(408, 120),
            slow(413, 1),
            slow(429, 0),
            slow(503, 60),
        ],
    );
    let dead = |status, seconds| {
        let rule = FinalIfDeadLettered(secs(seconds));
        (status, rule, rule)
    };
    check(
        "final_if_dead_lettered = [400, 401, 408, 500]",
        &[
            dead(400, 10),
            dead(401, 300),
            (403, Final, Final),
            (404, Final, five),
            dead(408, 120),
            (413, Final, Final),
            dead(500, 10),
            slow(503, 30),
        ],
    );
    check(
        "base = \"cloud-2020\"\nfinal_if_dead_lettered = [400]",
        &[
            dead(400, 300),
            slow(401, 300),
            slow(403, 300),
            slow(404, 300),
            slow(408, 120),
            slow(413, 10),
            slow(503, 30),
        ],
    );
    // `final` does not replace statuses that are final only with a dead-letter destination.
    assert_eq!(
        custom("base = \"cloud-2020\"\nfinal = []").statuses,
        CLOUD_2020.statuses
    );
}

/// The configuration in docs/retry-profiles.md.
fn documented_example() -> &'static str {
    const PAGE: &str = include_str!("../../../../docs/retry-profiles.md");
    let begins = PAGE.find("[profile_custom]\nbase").expect("the page has it");
    let block = &PAGE[begins..];
    &block[..block.find("```").expect("the block ends")]
}

#[test]
fn the_documented_example_retries_when_it_says() {
    use postrider_core::profile::EndpointKind;
    use postrider_core::retry::{MadeAttempt, NextStep, RetryPolicy};
    use postrider_core::time::Timestamp;
    let profiles = of_file(documented_example());
    let profile = profiles.named("custom").unwrap();
    let policy = RetryPolicy {
        attempts_max: profile.attempts_max,
        time_to_live: profile.time_to_live,
        dead_letter: true,
        safety_net: false,
    };
    let now = Timestamp::from_secs(1_000_000);
    let wait = |number, outcome, status| {
        let attempt = MadeAttempt {
            number,
            outcome,
            status,
            retry_after: None,
        };
        match policy.next(profile, EndpointKind::WebHook, attempt, now, now, 0.0) {
            NextStep::RetryAt(at) => at.since(now).as_secs(),
            next => panic!("{next:?}"),
        }
    };
    for (number, seconds) in [(1, 5), (2, 30), (3, 300), (9, 300)] {
        assert_eq!(wait(number, Outcome::GenericError, Some(500)), seconds);
        assert_eq!(wait(number, Outcome::TimedOut, None), seconds);
        assert_eq!(wait(number, Outcome::TimedOut, Some(408)), seconds);
        assert_eq!(wait(number, Outcome::Busy, Some(503)), seconds.max(60));
    }
    assert_eq!(
        (profile.response_wait(1), profile.response_wait(10)),
        (secs(15), secs(15))
    );
    // A floor that overrules waits of the schedule is reported.
    assert_eq!(
        overruled_waits(&loaded(documented_example(), &[]), &profiles),
        ["profile \"custom\": a retry after status 503 waits for 1m, not the schedule's 5s, 30s"]
    );
    let text = told("profiles show custom", documented_example(), &[]).unwrap();
    assert_lines(
        &text,
        &[
            "2 5s 5s",
            "floors that are longer than waits of the schedule, and hold instead",
            "503 1m, not the schedule's 5s, 30s",
        ],
    );
    let shown = told("profiles show custom --json", documented_example(), &[]).unwrap();
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(
        shown["overrulingFloors"],
        json!([{"status": 503, "kinds": ["webHook", "azureResource"], "floor": 60, "waits": [5, 30]}])
    );
}

#[test]
fn only_floors_that_are_written_beside_a_schedule_overrule_it() {
    let check = |keys: &str, other: u64, status_408: u64, status_503: u64, lines: usize| {
        let loaded = loaded(&format!("[profile_custom]\n{keys}"), &[]);
        let profiles = of(&loaded);
        let profile = profiles.named("custom").unwrap();
        let floor = |status| {
            let rule = profile.rule(status, postrider_core::profile::EndpointKind::WebHook);
            rule.floor().unwrap().as_secs()
        };
        let floors = (floor(None), floor(Some(408)), floor(Some(503)));
        assert_eq!(floors, (other, status_408, status_503), "{keys}");
        assert_eq!(overruled_waits(&loaded, &profiles).len(), lines, "{keys}");
    };
    check("schedule = [\"5s\", \"1m\"]", 5, 5, 5, 0);
    // Floors of the base are not raised.
    check("schedule = [\"1h\"]", 10, 120, 30, 0);
    check("schedule = [\"1m\", \"5s\"]\nother_floor = \"20s\"", 20, 5, 5, 1);
    check(
        "schedule = [\"5s\"]\nfloors = { 408 = \"2m\", 503 = \"1s\" }",
        5,
        120,
        1,
        1,
    );
    // Without a written schedule the base's floors hold, and nothing written is overruled.
    check("response_timeout = \"1s\"", 10, 120, 30, 0);
    check("floors = { 503 = \"2m\" }", 10, 120, 120, 0);
    check("base = \"cloud-2018\"\nschedule = [\"5s\"]", 0, 0, 0, 0);
    // A list of statuses does not change their floors.
    let keys = "schedule = [\"5s\"]\nfinal = []\nfinal_if_dead_lettered = [408]";
    check(keys, 5, 5, 5, 0);
}

#[test]
fn the_wait_for_batches_is_the_bases_unless_the_operator_says_how_long_to_wait() {
    let check = |keys: &str, single: u64, batch: u64| {
        let profile = custom(keys);
        let waits = (profile.response_wait(1), profile.response_wait(2));
        assert_eq!(waits, (secs(single), secs(batch)), "{keys}");
    };
    check("", 30, 60);
    check("response_timeout = \"5s\"", 5, 5);
    check("batch_response_timeout = \"90s\"", 30, 90);
    check("response_timeout = \"5s\"\nbatch_response_timeout = \"7s\"", 5, 7);
    check("base = \"cloud-2020\"", 30, 30);
}

#[track_caller]
fn assert_lines(text: &str, expected: &[&str]) {
    let squeezed: Vec<String> = text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    for line in expected {
        assert!(squeezed.iter().any(|l| l == line), "{line:?} in\n{text}");
    }
}

#[test]
fn the_list_names_every_profile_and_marks_the_default() {
    let text = told("profiles", "", &[]).unwrap();
    assert_lines(
        &text,
        &[
            "cloud-2018 1m 30 in 24h the cloud service as documented in September 2018",
            "* cloud-2021 30s 11 in 24h the cloud service as documented in July 2021",
            "edge 1m 13 in 2h the Event Grid module for IoT Edge",
        ],
    );
    assert_lines(
        &text,
        &["custom - - your own; the configuration has no [profile_custom] yet"],
    );
    let file = "[profile_custom]\nbase = \"edge\"\nattempts_max = 3";
    let text = told("profiles --profile custom", file, &[]).unwrap();
    assert_lines(
        &text,
        &["* custom 1m 3 in 2h from the configuration, based on edge"],
    );
    assert!(!text.contains("* cloud-2021"), "{text}");

    let list: Value = serde_json::from_str(&told("profiles --json", file, &[]).unwrap()).unwrap();
    let default = list.as_array().unwrap().iter().find(|one| one["default"] == true);
    assert_eq!(default.unwrap()["name"], "cloud-2021");
    assert_eq!(
        list[6],
        json!({"name": "custom", "default": false, "about": "from the configuration, based on edge",
               "responseTimeout": 60, "timeToLive": 7200, "attemptsFitting": 3})
    );
}

/// §10.2 of the reference: eleven attempts fit into a day.
const OFFSETS_2021: [(&str, u64); 11] = [
    ("0s", 0),
    ("10s", 10),
    ("40s", 40),
    ("1m40s", 100),
    ("6m40s", 400),
    ("16m40s", 1000),
    ("46m40s", 2800),
    ("1h46m40s", 6400),
    ("4h46m40s", 17_200),
    ("10h46m40s", 38_800),
    ("22h46m40s", 82_000),
];

#[test]
fn the_default_profile_in_full() {
    let text = told("profiles show cloud-2021", "", &[]).unwrap();
    assert_lines(
        &text,
        &[
            "cloud-2021 (the default): the cloud service as documented in July 2021",
            "schedule 10s, 30s, 1m, 5m, 10m, 30m, 1h, 3h, 6h, 12h; the last repeats",
            &format!(
                "jitter each wait of the schedule up to {} % longer",
                CLOUD_2021.jitter_percent
            ),
            "response timeout 30s",
            "for batches 1m, with more than one event per request allowed",
            "408 2m, not the schedule's 10s, 30s, 1m",
            "404 (Azure resources) 5m, not the schedule's 10s, 30s, 1m",
            "late responses count until 3m after sending",
            "success 200, 201, 202, 203, 204",
            "validation may be visited for 5m",
            "1 - 0s",
            "the time to live of 24h ends it, looked at at 34h46m40s",
            "400 final final",
            "401 final retry, at least 5m",
            "408 retry, at least 2m retry, at least 2m",
            "any other retry, at least 10s retry, at least 10s",
            "attempts 30 1 to 30",
            "time to live 24h 1 to 1440 minutes",
            "the time to live counts from publishing; looked at only when the next attempt comes due: an event may outlive it until then",
            "delayed delivery, once 10 different deliveries have failed with no success between",
            "InvalidAzureFunctionDestination 10m",
            "any other 10s",
            "doubled by each probe that fails, up to 4h",
            "written 5m after the last attempt",
            "dropped when the place for them could not be reached for 4h",
        ],
    );
    let waits = [
        "-", "10s", "30s", "1m", "5m", "10m", "30m", "1h", "3h", "6h", "12h",
    ];
    for (index, ((offset, _), wait)) in OFFSETS_2021.into_iter().zip(waits).enumerate() {
        assert_lines(&text, &[&format!("{} {wait} {offset}", index + 1)]);
    }
    assert!(!text.lines().any(|line| line.starts_with("  12 ")), "{text}");
    assert!(text.lines().all(|line| line == line.trim_end()), "{text}");
}

#[test]
fn the_same_facts_as_json() {
    let show = |name: &str, file: &str| -> Value {
        let text = told(&format!("profiles show {name} --json"), file, &[]).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let shown = show("cloud-2021", "");
    let offsets: Vec<_> = shown["attempts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|a| &a["offset"])
        .collect();
    assert_eq!(offsets, OFFSETS_2021.map(|(_, seconds)| seconds));
    assert_eq!(
        shown["attempts"][1],
        json!({"attempt": 2, "wait": 10, "offset": 10})
    );
    assert_eq!(shown["attemptsFitting"], 11);
    assert_eq!(shown["end"], json!({"by": "timeToLive", "offset": 125_200}));
    assert_eq!(
        (&shown["responseTimeout"], &shown["batchResponseTimeout"]),
        (&json!(30), &json!(60))
    );
    assert_eq!(
        shown["statuses"][1],
        json!({"status": 401, "webHook": {"rule": "final"}, "azureResource": {"rule": "retry", "floor": 300}})
    );
    assert_eq!(
        shown["retryPolicy"],
        json!({"attemptsMax": 30, "attemptsRange": [1, 30], "timeToLive": 86_400,
               "timeToLiveMinutesRange": [1, 1440], "timeToLiveCheck": "when-due"})
    );
    assert_eq!(
        shown["probation"]["causes"][0],
        json!({"outcome": "Busy", "wait": 10})
    );
    assert_eq!(shown["deadLetter"], json!({"delay": 300, "giveUpAfter": 14_400}));

    let of_2018 = |file| show("cloud-2018", file)["deadLetter"].clone();
    assert_eq!(of_2018(""), json!({"delay": 0, "giveUpAfter": 14_400}));
    let file = "[dead_letter]\ndelay = \"2m\"";
    assert_eq!(of_2018(file), json!({"delay": 120, "giveUpAfter": 14_400}));

    let early = "[dead_letter]\ngive_up_after = \"never\"\n[profile_custom]\nbase = \"cloud-2018\"\n\
                 schedule = [\"1500ms\"]\ntime_to_live = \"4s\"\ntime_to_live_check = \"before-waiting\"";
    let shown = show("custom", early);
    assert_eq!(shown["schedule"], json!([1.5]));
    assert_eq!(shown["end"], json!({"by": "timeToLive", "offset": 3}));
    assert_eq!(shown["attemptsFitting"], 3);
    assert_eq!(
        (&shown["lateWindow"], &shown["probation"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(shown["deadLetter"]["giveUpAfter"], Value::Null);
    assert_eq!(
        shown["statuses"][0]["webHook"],
        json!({"rule": "finalIfDeadLettered", "floor": 0})
    );
}

#[test]
fn the_edge_profile_shows_the_modules_variables() {
    let text = told("profiles show edge", "", &[]).unwrap();
    assert_lines(
        &text,
        &[
            "edge: the Event Grid module for IoT Edge",
            "schedule 1m, 10m; the last repeats",
            "jitter none",
            "late responses do not count",
            "1 - 0s",
            "2 1m 1m",
            "3 10m 11m",
            "13 10m 1h51m",
            "the time to live of 2h ends it, looked at at 2h1m",
            "any other retry retry",
            "for batches the same, with more than one event per request allowed",
            "no floor is longer than a wait of the schedule: the schedule holds",
            "time to live 2h 1 to 1440 minutes",
            "delayed delivery: none",
        ],
    );
    let few = [("broker__defaultMaxDeliveryAttempts", "3")];
    let text = told("profiles show edge", "[edge]\nstrict_success = true", &few).unwrap();
    assert_lines(
        &text,
        &[
            "success 200",
            "attempts end it, 3 of them, at 11m",
            "attempts 3 1 to 30",
        ],
    );
}

#[test]
fn a_custom_profile_in_full() {
    let file = "[retry]\njitter_percent = 0\n[dead_letter]\ngive_up_after = \"never\"\n[profile_custom]\n\
                base = \"cloud-2020\"\nschedule = [\"1s\"]\nother_floor = \"2s\"\ntime_to_live = \"1h\"\n\
                time_to_live_check = \"before-waiting\"\nattempts_max = 5000\nfinal = [410]";
    let text = told("profiles show custom", file, &[]).unwrap();
    assert_lines(
        &text,
        &[
            "custom: from the configuration, based on cloud-2020",
            "schedule 1s; each time",
            "jitter none",
            // The floor is longer than the schedule's step.
            "2 2s (floor) 2s",
            "1000 2s (floor) 33m18s",
            "any other 2s, not the schedule's 1s",
            "… and 800 more",
            "the time to live of 1h ends it, looked at before waiting, at 59m58s",
            "400 final with a dead-letter destination, else retry, at least 1s final with a dead-letter destination, else retry, at least 1s",
            "410 final final",
            "dropped never, however long the place for them cannot be reached",
        ],
    );
}

#[test]
fn a_profile_that_is_not_there_is_named() {
    let refused = |line: &str, expected: &str| assert_eq!(told(line, "", &[]).unwrap_err(), expected);
    let names = "cloud-2018, cloud-2019, cloud-2020, cloud-2021, cloud-current, edge";
    refused(
        "profiles show clod-2021",
        &format!("profile \"clod-2021\" does not exist, only {names}; did you mean \"cloud-2021\"?"),
    );
    refused(
        "profiles show --json unheard-of-anywhere",
        &format!("profile \"unheard-of-anywhere\" does not exist, only {names}"),
    );
    refused(
        "profiles show custom",
        "profile \"custom\" does not exist: the configuration has no [profile_custom]",
    );
    let error = told("profiles --profile custom", "", &[]).unwrap_err();
    assert_eq!(
        error,
        "profile: \"custom\" needs a [profile_custom] section (in the flag --profile)"
    );
}

/// The displayed ranges are those that the management API accepts.
#[test]
fn the_ranges_are_the_management_apis() {
    use postrider_core::event::EventSchema;
    use postrider_core::json::RawJson;
    use postrider_core::time::Timestamp;
    use postrider_wire::resources::{
        ResourceLimits, Road, SubscriptionContext, TopicContext, parse_subscription,
    };
    let accepted = |key: &str, number: u32| {
        let body = format!(
            r#"{{"properties":{{"destination":{{"endpointType":"WebHook","properties":{{"endpointUrl":"https://a/x"}}}},
                "retryPolicy":{{"{key}":{number}}}}}}}"#
        );
        let limits = ResourceLimits::default();
        let context = SubscriptionContext {
            road: Road::Azure,
            name: "sub",
            topic: TopicContext {
                name: "orders",
                input_schema: EventSchema::EventGrid,
                mapping: None,
                default_types: &[],
            },
            limits: &limits,
            now: Timestamp::from_secs(1_900_000_000),
            previous: None,
            api_version: "2022-06-15",
            shown: None,
        };
        parse_subscription(RawJson::parse(&body).unwrap(), &context).is_ok()
    };
    for (key, [least, most]) in [
        ("maxDeliveryAttempts", attempt_schedule::ATTEMPTS_RANGE),
        (
            "eventTimeToLiveInMinutes",
            attempt_schedule::TIME_TO_LIVE_MINUTES_RANGE,
        ),
    ] {
        assert!(accepted(key, least) && accepted(key, most), "{key}");
        assert!(!accepted(key, least - 1) && !accepted(key, most + 1), "{key}");
    }
}
