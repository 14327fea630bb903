//! Many seeds, each a whole life of the engine with faults and crashes.
//! `POSTRIDER_SEED=n` runs one seed, `POSTRIDER_SEEDS=n` that many.

use postrider_sim::world::run;

#[expect(
    clippy::disallowed_methods,
    reason = "which seeds to run is asked for from outside"
)]
fn asked(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn every_accepted_event_ends_well_whatever_happens() {
    let seeds = match asked("POSTRIDER_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..asked("POSTRIDER_SEEDS").unwrap_or(400),
    };
    let (mut events, mut crashes, mut attempts) = (0, 0, 0);
    for seed in seeds {
        let report = run(seed);
        assert!(
            report.wrong.is_empty(),
            "POSTRIDER_SEED={seed}: {:#?}",
            report.wrong
        );
        events += report.events;
        crashes += report.crashes;
        attempts += report.attempts;
    }
    println!("{events} events, {crashes} crashes, {attempts} attempts");
    assert!(events > 0 && attempts > 0);
}

/// The same seed gives the same trace.
#[test]
fn a_seed_decides_everything() {
    for seed in [3, 17] {
        let (a, b) = (run(seed), run(seed));
        assert_eq!(
            (a.events, a.crashes, a.attempts),
            (b.events, b.crashes, b.attempts),
            "seed {seed}"
        );
    }
}
