//! Both promises in memory: for tests, and for the simulation's log that crashes.
