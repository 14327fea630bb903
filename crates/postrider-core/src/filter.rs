//! Filters (being written).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Filter {}
