//! Examples at the end of each command's help. A test parses every one of them.

/// Examples by command. Commands without subcommands have some, and so do those that also run
/// without one.
const EXAMPLES: &[(&str, &str)] = &[
    (
        "",
        "  postrider serve                                    start the server
  postrider demo                                     watch what it does, on a fast clock
  postrider topic create orders                      make a topic
  postrider subscription create shop --topic orders --endpoint http://127.0.0.1:9000/hook
  postrider event send --topic orders --data '{\"total\": 42}'
  postrider doctor                                   find out what is wrong",
    ),
    (
        "serve",
        "  postrider serve
  postrider serve --config postrider.toml
  postrider serve --http 7000 --https off --data-dir /var/lib/postrider
  postrider serve --config postrider.toml --print-config",
    ),
    (
        "migrate",
        "  postrider migrate --to jetstream --config postrider.toml
  postrider migrate --to embedded --config postrider.toml -o json
  postrider migrate --to jetstream --config postrider.toml --undo",
    ),
    (
        "secrets rotate",
        "  postrider secrets rotate --config postrider.toml",
    ),
    ("compact", "  postrider compact --data-dir /var/lib/postrider"),
    (
        "doctor",
        "  postrider doctor --config postrider.toml
  postrider doctor --data-dir /var/lib/postrider --deep
  postrider doctor -o json",
    ),
    (
        "restore",
        "  postrider restore --data-dir /var/lib/postrider --accept-mixed-files
  postrider restore --data-dir /var/lib/postrider --accept-damage",
    ),
    ("config", "  postrider config > postrider.toml"),
    (
        "profiles",
        "  postrider profiles
  postrider profiles show cloud-2021
  postrider profiles show custom --config postrider.toml -o json",
    ),
    ("profiles show", "  postrider profiles show cloud-2021"),
    (
        "az-setup",
        "  eval \"$(postrider az-setup --run)\"
  postrider az-setup --config postrider.toml --client deployer
  postrider az-setup --shell powershell",
    ),
    (
        "deadletters list",
        "  postrider deadletters list
  postrider deadletters list --subscription orders/shop --since 2h
  postrider deadletters list --reason MaxDeliveryAttemptsExceeded --limit 1000 -o json",
    ),
    ("deadletters show", "  postrider deadletters show 17-0"),
    ("deadletters summary", "  postrider deadletters summary"),
    (
        "deadletters replay",
        "  postrider deadletters replay 17-0
  postrider deadletters replay --subscription orders/shop --rate 50/s
  postrider deadletters replay --all --to orders/repaired --detach
  postrider deadletters replay --resume 3",
    ),
    (
        "deadletters write-now",
        "  postrider deadletters write-now
  postrider deadletters write-now --subscription orders/shop",
    ),
    ("deadletters replays", "  postrider deadletters replays"),
    (
        "deadletters purge",
        "  postrider deadletters purge --subscription orders/shop --dry-run
  postrider deadletters purge --all --yes",
    ),
    (
        "topic create",
        "  postrider topic create orders
  postrider topic create clouds --input-schema cloudevents --tag team=shop
  postrider topic create closed --inbound-ip 10.0.0.0/8 --disable-local-auth",
    ),
    (
        "topic list",
        "  postrider topic list\n  postrider topic list -o json",
    ),
    ("topic show", "  postrider topic show orders"),
    (
        "topic update",
        "  postrider topic update orders --tag team=shop
  postrider topic update orders --clear inbound-ips",
    ),
    ("topic delete", "  postrider topic delete orders --yes"),
    ("domain create", "  postrider domain create tenants"),
    ("domain list", "  postrider domain list"),
    ("domain show", "  postrider domain show tenants"),
    (
        "domain update",
        "  postrider domain update tenants --auto-delete-topics false",
    ),
    ("domain delete", "  postrider domain delete tenants --yes"),
    (
        "domain topic create",
        "  postrider domain topic create acme --domain tenants",
    ),
    (
        "domain topic list",
        "  postrider domain topic list --domain tenants",
    ),
    (
        "domain topic show",
        "  postrider domain topic show acme --domain tenants",
    ),
    (
        "domain topic delete",
        "  postrider domain topic delete acme --domain tenants --yes",
    ),
    (
        "system-topic create",
        "  postrider system-topic create letters --source local",
    ),
    ("system-topic list", "  postrider system-topic list"),
    ("system-topic show", "  postrider system-topic show letters"),
    (
        "system-topic update",
        "  postrider system-topic update letters --tag team=shop",
    ),
    (
        "system-topic delete",
        "  postrider system-topic delete letters --yes",
    ),
    (
        "subscription create",
        "  postrider subscription create shop --topic orders --endpoint http://127.0.0.1:9000/hook
  postrider subscription create big --topic orders --endpoint https://shop.example/hook \\
      --type order.placed --advanced-filter data.total NumberGreaterThan 100
  postrider subscription create safe --topic orders --endpoint https://shop.example/hook \\
      --max-delivery-attempts 10 --event-ttl 2h --dead-letter local/dead
  postrider subscription create queued --topic orders --endpoint-type storagequeue --endpoint local/orders",
    ),
    (
        "subscription list",
        "  postrider subscription list
  postrider subscription list --topic orders
  postrider subscription list -o json",
    ),
    (
        "subscription show",
        "  postrider subscription show shop --topic orders",
    ),
    (
        "subscription update",
        "  postrider subscription update shop --topic orders --max-events-per-batch 100
  postrider subscription update shop --topic orders --clear advanced-filters",
    ),
    (
        "subscription pause",
        "  postrider subscription pause shop --topic orders",
    ),
    (
        "subscription resume",
        "  postrider subscription resume shop --topic orders",
    ),
    (
        "subscription probe",
        "  postrider subscription probe shop --topic orders",
    ),
    (
        "subscription delete",
        "  postrider subscription delete shop --topic orders --yes",
    ),
    ("key list", "  postrider key list --topic orders"),
    (
        "key regenerate",
        "  postrider key regenerate --topic orders --name key2",
    ),
    (
        "event send",
        "  postrider event send --topic orders --data '{\"total\": 42}'
  postrider event send --topic orders --type order.placed --subject /orders/1 --data @order.json
  postrider event send --topic orders --count 1000
  postrider event send --topic orders --body events.json",
    ),
    (
        "event trace",
        "  postrider event trace 5b3c0c7e-5f0e-4a5e-9d7e-0a1b2c3d4e5f",
    ),
    (
        "event search",
        "  postrider event search --since 1h --state retrying
  postrider event search --subscription orders/shop --outcome TimedOut
  postrider event search --type order.placed -o json",
    ),
    (
        "listen",
        "  postrider listen --topic orders
  postrider listen --topic orders --forward http://127.0.0.1:3000/hook
  postrider listen --topic orders --type order.placed --count 1 -o json",
    ),
    (
        "apply",
        "  postrider apply -f grid.yaml --dry-run
  postrider apply -f grid.yaml --yes --prune",
    ),
    (
        "import",
        "  postrider import pm7y appsettings.json -o grid.yaml
  postrider import workleap appsettings.json --apply",
    ),
    ("cluster status", "  postrider cluster status"),
    ("cluster drain", "  postrider cluster drain node-2 --wait --yes"),
    ("cluster undrain", "  postrider cluster undrain node-2"),
    (
        "audit list",
        "  postrider audit list --since 1d --actor deployer
  postrider audit list --action subscription --resource shop
  postrider audit list -o jsonl > audit.jsonl",
    ),
    (
        "audit verify",
        "  postrider audit verify
  postrider audit verify --data-dir /var/lib/postrider",
    ),
    ("session list", "  postrider session list"),
    (
        "session revoke",
        "  postrider session revoke --client deployer
  postrider session revoke --all",
    ),
    ("session rotate-key", "  postrider session rotate-key --now"),
    (
        "context add",
        "  postrider context add prod --server https://grid.example:4438 --secret-file ~/.grid-secret --ca ca.pem",
    ),
    ("context list", "  postrider context list"),
    ("context use", "  postrider context use prod"),
    ("context remove", "  postrider context remove prod"),
    ("context show", "  postrider context show prod"),
    (
        "receiver",
        "  postrider receiver
  postrider receiver --listen 127.0.0.1:9001 --status 503
  postrider receiver --fail-first 3 --delay 200ms",
    ),
    (
        "demo",
        "  postrider demo
  postrider demo --secs 60 --speed 600",
    ),
    (
        "bench",
        "  postrider bench
  postrider bench --load single,fan-out --secs 20 -o json",
    ),
    (
        "completions",
        "  postrider completions bash > /etc/bash_completion.d/postrider
  postrider completions zsh > ~/.zfunc/_postrider",
    ),
];

/// Adds the examples to the command and its subcommands.
pub fn with_examples(command: clap::Command) -> clap::Command {
    add(command, "")
}

fn add(command: clap::Command, path: &str) -> clap::Command {
    let command = command.mut_subcommands(|inner| {
        let path = format!("{path} {}", inner.get_name());
        add(inner, path.trim_start())
    });
    match of(path) {
        Some(examples) => command.after_help(format!("Examples:\n{examples}")),
        None => command,
    }
}

fn of(path: &str) -> Option<&'static str> {
    let found = EXAMPLES.iter().find(|(of, _)| *of == path);
    found.map(|(_, examples)| *examples)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cli;
    use clap::CommandFactory;

    /// Every visible command that can be run, by its path.
    fn commands(of: &clap::Command, path: &str, into: &mut Vec<String>) {
        let visible = || {
            let all = of.get_subcommands();
            all.filter(|one| !one.is_hide_set() && one.get_name() != "help")
        };
        for one in visible() {
            let path = format!("{path} {}", one.get_name());
            commands(one, path.trim_start(), into);
        }
        if visible().next().is_none() {
            into.push(path.to_owned());
        }
    }

    #[test]
    fn every_command_has_examples_and_every_example_a_command() {
        let mut all = Vec::new();
        commands(&Cli::command(), "", &mut all);
        let missing: Vec<_> = all.iter().filter(|path| of(path).is_none()).collect();
        assert!(missing.is_empty(), "without examples: {missing:?}");
        let alone = ["", "profiles"];
        let unknown: Vec<_> = EXAMPLES
            .iter()
            .filter(|(path, _)| !alone.contains(path) && !all.iter().any(|known| known == path))
            .collect();
        assert!(unknown.is_empty(), "examples of no command: {unknown:?}");
    }

    /// Splits a line as a shell does: quotes, and a comment after the command.
    fn words(line: &str) -> Vec<String> {
        let line = line
            .trim()
            .trim_start_matches("eval \"$(")
            .trim_end_matches(")\"");
        let line = line.split(" > ").next().unwrap_or_default();
        // A description may follow after several spaces.
        let line = line.split("     ").next().unwrap_or_default();
        let mut words = vec![String::new()];
        let mut quoted = false;
        for c in line.chars() {
            match c {
                '\'' => quoted = !quoted,
                ' ' if !quoted => words.push(String::new()),
                c => words.last_mut().expect("there is one").push(c),
            }
        }
        words.retain(|word| !word.is_empty());
        words
    }

    #[test]
    fn every_example_is_understood() {
        for (path, examples) in EXAMPLES {
            // A line that ends with a backslash continues in the next.
            let whole = examples.replace("\\\n      ", "");
            for line in whole.lines() {
                let line = words(line);
                let parsed = Cli::command().try_get_matches_from(&line);
                assert!(parsed.is_ok(), "{path}: {line:?}: {}", parsed.unwrap_err());
            }
        }
    }

    #[test]
    fn examples_are_short_enough_to_be_read() {
        for (path, examples) in EXAMPLES {
            let longest = examples.lines().map(str::len).max().unwrap_or(0);
            assert!(longest <= 108, "{path}: a line of {longest}");
        }
    }

    #[test]
    fn help_ends_with_the_examples() {
        let command = with_examples(Cli::command());
        let mut listen = command.find_subcommand("listen").expect("it is there").clone();
        let help = listen.render_help().to_string();
        assert!(help.trim_end().ends_with("--count 1 -o json"), "{help}");
    }
}
