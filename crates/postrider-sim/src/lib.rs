//! The real engine on simulated time, network and disk.
