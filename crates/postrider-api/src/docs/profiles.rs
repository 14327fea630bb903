//! `/docs/profiles`: how the documented Event Grid profiles differ.

use super::html::HtmlBuffer;
use super::{DocPage, SectionLink};
use postrider_core::duration::print;
use postrider_core::profile::{Profile, Profiles, StatusRule, TimeToLiveRule};
use std::time::Duration;

pub fn page() -> DocPage {
    let mut body = HtmlBuffer::default();
    let mut links = Vec::new();
    let profiles = Profiles::default();
    for profile in profiles.iter() {
        show(&mut body, profile);
        links.push(SectionLink::here(profile.name, profile.name));
    }
    DocPage {
        title: "Profiles",
        lead: "A profile is everything in which the documents of Event Grid differ. `profile` in the configuration chooses one for all, \
               a topic or a subscription may name another, and `[profile_custom]` makes one of your own. These are as documented; \
               `postrider profiles show NAME` prints one as the configuration has it.",
        searchable: false,
        body,
        menu: vec![("Profiles".to_owned(), links)],
    }
}

fn show(out: &mut HtmlBuffer, profile: &Profile) {
    out.tag("<section class=\"panel\">\n")
        .heading(2, profile.name, profile.name);
    out.tag("<p>")
        .text(profile.about)
        .tag("</p>\n<dl class=\"facts\">\n");
    let waits: Vec<_> = profile.schedule.iter().copied().map(print).collect();
    let success: Vec<_> = profile.success.iter().map(u16::to_string).collect();
    let late = profile.late_window.map_or("do not count".to_owned(), |window| {
        format!("count until {} after sending", print(window))
    });
    let life = match profile.time_to_live_rule {
        TimeToLiveRule::WhenDue => "looked at when an attempt comes due",
        TimeToLiveRule::BeforeWaiting => "looked at also before waiting",
    };
    let probation = profile
        .probation
        .as_ref()
        .map_or("not known".to_owned(), |rules| {
            format!(
                "after {} failures in a row, for at most {}",
                rules.failures,
                print(rules.max)
            )
        });
    let split: Vec<_> = profile.split_batches_on.iter().map(u16::to_string).collect();
    let facts = [
        (
            "Waits between attempts",
            format!("{}; the last repeats", waits.join(", ")),
        ),
        (
            "Longer by chance",
            format!("by up to {} %", profile.jitter_percent),
        ),
        ("Response timeout", print(profile.response_timeout)),
        (
            "Response timeout for batches",
            print(profile.batch_response_timeout),
        ),
        ("Late answers", late),
        ("Success", success.join(", ")),
        ("Batches are halved after", split.join(", ")),
        (
            "Attempts",
            format!("at most {} unless a subscription says less", profile.attempts_max),
        ),
        (
            "Time to live",
            format!(
                "{} unless a subscription says less, {life}",
                print(profile.time_to_live)
            ),
        ),
        ("Delayed delivery", probation),
        (
            "Dead letters",
            format!(
                "written {}, dropped if that is impossible for {}",
                match profile.dead_letter.delay {
                    Duration::ZERO => "at once after the last attempt".to_owned(),
                    delay => format!("{} after the last attempt", print(delay)),
                },
                print(profile.dead_letter.give_up_after)
            ),
        ),
        (
            "Validation URL",
            format!("may be visited for {}", print(profile.validation_window)),
        ),
    ];
    for (name, value) in facts {
        out.tag("<div><dt>")
            .text(name)
            .tag("</dt><dd>")
            .text(&value)
            .tag("</dd></div>\n");
    }
    out.tag("</dl>\n<table class=\"members\"><thead><tr><th scope=\"col\">After status</th><th scope=\"col\">Webhooks</th>");
    out.tag("<th scope=\"col\">Azure resources</th></tr></thead>\n<tbody>\n");
    for line in profile.statuses {
        out.tag("<tr><th scope=\"row\">")
            .code(&line.status.to_string())
            .tag("</th><td>");
        out.text(&rule(line.web_hook)).tag("</td><td>");
        out.text(&rule(line.azure_resource)).tag("</td></tr>\n");
    }
    out.tag("<tr><th scope=\"row\">any other failure</th><td>");
    let other = rule(StatusRule::RetryAfter(profile.other_floor));
    out.text(&other).tag("</td><td>").text(&other);
    out.tag("</td></tr>\n</tbody></table>\n</section>\n");
}

fn rule(rule: StatusRule) -> String {
    match rule {
        StatusRule::RetryAfter(Duration::ZERO) => "retried by the schedule".to_owned(),
        StatusRule::RetryAfter(least) => format!("retried after at least {}", print(least)),
        StatusRule::Final => "never retried".to_owned(),
        StatusRule::FinalIfDeadLettered(least) => format!(
            "never retried if dead letters are kept; otherwise after at least {}",
            print(least)
        ),
    }
}
