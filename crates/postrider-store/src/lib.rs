//! The promise: what an event log and a catalogue must hold, and the suite that checks it.
