//! Many seeds, each a whole life of the engine with faults and crashes.
//! `POSTRIDER_SEED=n` runs one seed, `POSTRIDER_SEEDS=n` that many.

use postrider_sim::world::{Planted, run, run_with};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

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
        None => 0..asked("POSTRIDER_SEEDS").unwrap_or(3000),
    };
    // Whoever asks for one seed wants to see what happens.
    let alone = seeds.end - seeds.start == 1;
    let next = AtomicU64::new(seeds.start);
    let [events, crashes, attempts] = [const { AtomicU64::new(0) }; 3];
    let work = || {
        loop {
            let seed = next.fetch_add(1, Relaxed);
            if seed >= seeds.end {
                return;
            }
            let report = run_with(seed, &Planted::default(), alone);
            report.notes.iter().for_each(|note| println!("{note}"));
            if !report.wrong.is_empty() {
                // The others need not go on.
                next.store(seeds.end, Relaxed);
                panic!("POSTRIDER_SEED={seed}: {:#?}\n{}", report.wrong, report.about);
            }
            events.fetch_add(report.events, Relaxed);
            crashes.fetch_add(u64::from(report.crashes), Relaxed);
            attempts.fetch_add(report.attempts as u64, Relaxed);
        }
    };
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(work);
        }
    });
    println!("{events:?} events, {crashes:?} crashes, {attempts:?} attempts");
    assert!(events.into_inner() > 0 && attempts.into_inner() > 0);
}

/// The same seed gives the same trace.
#[test]
fn a_seed_decides_everything() {
    for seed in [3, 17, 41, 99] {
        let (a, b) = (run(seed), run(seed));
        assert_eq!(
            (a.events, a.crashes, a.attempts, a.trace),
            (b.events, b.crashes, b.attempts, b.trace),
            "seed {seed}"
        );
    }
}
