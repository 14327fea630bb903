//! The catalogue in redb (its own file: it changes seldom and is read whole).

pub struct EmbeddedCatalog;
