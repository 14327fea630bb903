//! Profiles as configured, and `postrider profiles`, which shows them.

mod custom;
mod attempt_schedule;
mod text;
mod json;

use crate::config::{self, EDGE_SUCCESS_STRICT, LoadedConfig, ServeFlags, nearest};
use crate::output::OutputFlags;
use crate::terminal::wrapped_lines;
use anyhow::{Result, bail};
use postrider_core::probation::ProbationRules;
use postrider_core::profile::{DeadLetterTiming, EDGE, OverrulingFloor, Profile, Profiles};
use std::path::PathBuf;
use std::time::Duration;

/// Profiles as this server follows them, with the default one.
///
/// Changed profiles are leaked: call this once for each configuration.
pub fn of(loaded: &LoadedConfig) -> Profiles {
    let config = &loaded.config;
    let mut profiles = Profiles::default();
    let mut all: Vec<Profile> = profiles.iter().map(|profile| standard(profile, loaded)).collect();
    if let Some(written) = &config.profile_custom {
        let base = all.iter().find(|profile| profile.name == written.base);
        let base = base.expect("the base is a standard profile");
        let documented = with_probation(ProbationRules::DOCUMENTED, loaded);
        all.push(custom::profile(written, base, documented));
    }
    for mut profile in all {
        if profile.jitter_percent > 0 {
            profile.jitter_percent = config.retry.jitter_percent.unwrap_or(profile.jitter_percent);
        }
        if let Some(statuses) = &config.retry.split_batches_on
            && *statuses != profile.split_batches_on
        {
            profile.split_batches_on = statuses.clone().leak();
        }
        if profiles.named(profile.name) != Some(&profile) {
            profiles.put(profile);
        }
    }
    assert!(
        profiles.set_default(&config.profile),
        "loading refuses a profile that is not there"
    );
    let broker = &loaded.edge.broker;
    if broker.sets_retry_policy() {
        let default = *profiles.fallback();
        let seconds = broker.default_event_time_to_live_in_seconds;
        profiles.set_edge_default(Profile {
            attempts_max: broker
                .default_max_delivery_attempts
                .unwrap_or(default.attempts_max),
            time_to_live: seconds.map_or(default.time_to_live, |seconds| {
                Duration::from_secs(u64::from(seconds))
            }),
            ..default
        });
    }
    profiles
}

/// A standard profile with the operator's changes.
fn standard(profile: &Profile, loaded: &LoadedConfig) -> Profile {
    let config = &loaded.config;
    let profile = Profile {
        probation: profile.probation.map(|rules| with_probation(rules, loaded)),
        dead_letter: DeadLetterTiming {
            delay: config.dead_letter.delay.unwrap_or(profile.dead_letter.delay),
            give_up_after: config.dead_letter.give_up_after,
        },
        validation_window: config.validation.window.unwrap_or(profile.validation_window),
        ..*profile
    };
    if profile.name != EDGE.name {
        return profile;
    }
    let broker = &loaded.edge.broker;
    Profile {
        attempts_max: broker.attempts_max(),
        time_to_live: Duration::from_secs(broker.time_to_live_seconds()),
        success: match config.edge.strict_success {
            true => EDGE_SUCCESS_STRICT,
            false => profile.success,
        },
        ..profile
    }
}

fn with_probation(rules: ProbationRules, loaded: &LoadedConfig) -> ProbationRules {
    let given = &loaded.config.probation;
    ProbationRules {
        failures: given.failures,
        max: given.max,
        ..rules
    }
}

/// Log lines at the start about floors of the operator's profile that overrule its written
/// schedule. Documented floors that overrule documented schedules are not reported.
pub fn overruled_waits(loaded: &LoadedConfig, profiles: &Profiles) -> Vec<String> {
    let written = loaded.config.profile_custom.as_ref();
    if written.is_none_or(|custom| custom.schedule.is_none()) {
        return Vec::new();
    }
    let custom = profiles.named(custom::NAME);
    let floors = custom.map(Profile::overruling_floors).unwrap_or_default();
    let line = |floor: &OverrulingFloor| {
        let [after, waits] = text::overruling(floor);
        let after = match floor.status {
            Some(_) => format!("status {after}"),
            None => "a failure that is not listed, or no answer,".to_owned(),
        };
        format!("profile \"custom\": a retry after {after} waits for {waits}")
    };
    floors.iter().map(line).collect()
}

/// List the profiles, or show one in full, as configured
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ProfilesArgs {
    #[command(subcommand)]
    command: Option<Command>,
    /// Configuration file (TOML); also POSTRIDER_CONFIG
    #[arg(long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    /// Default profile [default: cloud-2021]
    #[arg(long, value_name = "NAME", global = true)]
    profile: Option<String>,
    #[command(flatten)]
    output: OutputFlags,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// Show one profile in full
    Show {
        /// Name of the profile
        name: String,
    },
}

pub fn run(args: &ProfilesArgs) -> Result<()> {
    print!("{}", answer(args, std::env::vars())?);
    Ok(())
}

/// Output of the command.
fn answer(args: &ProfilesArgs, env: impl IntoIterator<Item = (String, String)>) -> Result<String> {
    let flags = ServeFlags {
        config: args.config.clone(),
        profile: args.profile.clone(),
        ..ServeFlags::default()
    };
    let profiles = of(&config::load(&flags, env)?);
    Ok(match (&args.command, args.output.is_json()) {
        (None, false) => wrapped_lines(&text::list(&profiles)),
        (None, true) => json::list(&profiles),
        (Some(Command::Show { name }), false) => {
            wrapped_lines(&text::show(named(&profiles, name)?, &profiles))
        }
        (Some(Command::Show { name }), true) => json::show(named(&profiles, name)?, &profiles),
    })
}

fn named(profiles: &Profiles, name: &str) -> Result<&'static Profile> {
    if let Some(profile) = profiles.named(name) {
        return Ok(profile);
    }
    if name == custom::NAME {
        bail!("profile \"custom\" does not exist: the configuration has no [profile_custom]");
    }
    let names: Vec<_> = profiles.iter().map(|profile| profile.name).collect();
    let hint = nearest(name, names.iter().copied());
    let hint = hint
        .map(|near| format!("; did you mean \"{near}\"?"))
        .unwrap_or_default();
    bail!(
        "profile \"{name}\" does not exist, only {}{hint}",
        names.join(", ")
    )
}

#[cfg(test)]
mod tests;
