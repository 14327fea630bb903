//! Parsing of the command line.

use super::*;
use clap::Parser;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: DeadLettersArgs,
}

fn parse(line: &str) -> Result<Command, String> {
    let words = ["deadletters"].into_iter().chain(line.split_whitespace());
    let cli = Cli::try_parse_from(words).map_err(|e| e.to_string())?;
    Ok(cli.args.command)
}

#[test]
fn a_replay_is_asked_for_as_it_was_typed() {
    let check = |line: &str, expected: Value| match parse(line).unwrap() {
        Command::Replay(args) => assert_eq!(Value::Object(args.body()), expected, "{line}"),
        other => panic!("{other:?}"),
    };
    check("replay 12-0", json!({"id": "12-0"}));
    check("replay --id 12-0", json!({"id": "12-0"}));
    check("replay --all", json!({"all": true}));
    check(
        "replay --subscription orders/audit --reason TimeToLiveExceeded --since 2h --to mail --rate 50/s",
        json!({
            "subscription": "orders/audit", "reason": "TimeToLiveExceeded", "since": "2h", "to": "mail", "rate": 50,
        }),
    );
    check("replay --all --rate 7 --detach", json!({"all": true, "rate": 7}));
}

#[test]
fn what_is_to_be_written_now_is_asked_for_as_it_was_typed() {
    let check = |line: &str, expected: Value| match parse(line).unwrap() {
        Command::WriteNow(args) => {
            let body = body(args.one.id(), &args.filter, args.all);
            assert_eq!(Value::Object(body), expected, "{line}");
        }
        other => panic!("{other:?}"),
    };
    check("write-now", json!({}));
    check("write-now --all", json!({"all": true}));
    check("write-now pending-1-2-3", json!({"id": "pending-1-2-3"}));
    check(
        "write-now --subscription orders/audit --reason TimeToLiveExceeded --since 2h",
        json!({"subscription": "orders/audit", "reason": "TimeToLiveExceeded", "since": "2h"}),
    );
}

#[test]
fn letters_that_are_not_written_are_said_with_the_command_that_writes_them() {
    let Command::Replay(args) = parse("replay --subscription a/b --since 2h --dry-run").unwrap() else {
        panic!("a replay");
    };
    let counted: DeadLetterCount =
        read(br#"{"count": 0, "pending": 10, "due": "2030-01-01T00:05:00.0000000Z"}"#).unwrap();
    let note = counted.pending.note("replayed", &args.filter.flags()).unwrap();
    assert_eq!(
        note,
        "10 more wait to be written to a blob, from 2030-01-01T00:05:00Z on, and are not replayed before that; \
         write them now with: postrider deadletters write-now --subscription a/b --since 2h"
    );
    assert_eq!(
        read::<DeadLetterCount>(br#"{"count": 3}"#)
            .unwrap()
            .pending
            .note("replayed", ""),
        None
    );
}

#[test]
fn a_replay_says_what_became_of_its_events() {
    let job = |more: &str| -> ReplayStatus {
        let text = format!(
            r#"{{"id": 1, "state": "done", "created": "T", "replayed": 5, "failed": 0, "total": 5, "request": {{}}{more}}}"#
        );
        read(text.as_bytes()).unwrap()
    };
    let check = |more: &str, expected: &str, went_well: bool| {
        let job = job(more);
        assert_eq!(
            job.status(),
            format!("replayed 5 of 5 dead letters, 0 failed; {expected}")
        );
        assert_eq!(job.has_succeeded(), went_well, "{more}");
    };
    check("", "what became of these events is not known", true);
    check(
        r#", "outcome": {"delivered": 5, "failed": 0, "waiting": 0}"#,
        "of these events 5 were delivered, 0 failed again, 0 still wait",
        true,
    );
    check(
        r#", "outcome": {"delivered": 2, "failed": 1, "waiting": 2}"#,
        "of these events 2 were delivered, 1 failed again, 2 still wait",
        false,
    );
    check(
        r#", "outcome": {"delivered": 0, "failed": 0, "waiting": 5}"#,
        "of these events 0 were delivered, 0 failed again, 5 still wait",
        false,
    );
    check(
        r#", "outcome": {"delivered": 0, "failed": 0, "waiting": 2, "unknown": 3}"#,
        "of these events 0 were delivered, 0 failed again, 2 still wait, of 3 it is not known",
        true,
    );
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let check = |line: &str, expected: &str| {
        let refused = parse(line).err().unwrap_or_else(|| panic!("{line}"));
        assert!(refused.contains(expected), "{line}: {refused}");
    };
    check("replay", "required");
    check("replay --rate 5 --to mail", "required");
    check("purge --yes", "required");
    check("replay --all --rate 0", "such as 50/s");
    check("replay --all --rate 5/m", "such as 50/s");
    check("replay --resume 1 --rate 5", "cannot be used with");
    check("replay --cancel 1 --resume 1", "cannot be used with");
    check("list --limit 0", "0 is not in 1..");
    check("list --colour red", "--colour");
    check("show", "<ID>");
}

#[test]
fn pages_are_asked_for_within_the_limit() {
    let Command::List(args) = parse("list --subscription a/b --since 2030-01-01T00:00:00+02:00").unwrap()
    else {
        panic!("a list");
    };
    let filter = "&subscription=a%2Fb&since=2030%2D01%2D01T00%3A00%3A00%2B02%3A00";
    assert_eq!(page_path(&args, 100, None), format!("{ROOT}?limit=100{filter}"));
    assert_eq!(
        page_path(&args, 5000, Some("written.1.2")),
        format!("{ROOT}?limit=1000{filter}&continuation=written%2E1%2E2")
    );
}

#[test]
fn flags_go_before_or_after_the_command() {
    let line = [
        "deadletters",
        "list",
        "--server",
        "http://h:1",
        "--secret",
        "s",
        "--json",
    ];
    let cli = Cli::try_parse_from(line).unwrap();
    assert_eq!(cli.args.client.server.as_deref(), Some("http://h:1"));
    assert!(cli.args.output.is_json());
    assert_eq!(format!("{:?}", cli.args.client.secret), "Some(Secret)");
}
