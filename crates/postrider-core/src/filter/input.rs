//! An event as the input of filters: each field is looked up once for all filters, and the work is
//! counted.

use super::text;
use crate::envelope::{EnvelopeField, EventEnvelope, KeyStyle};
use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::BTreeMap;

/// Up to this many fields of an event are searched linearly: faster than a map, and without
/// allocation.
const FIELDS_SEARCHED_MAX: usize = 16;

/// The filters of a topic's subscriptions would take more work for one event than allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilterBudgetExceeded;

/// The work left for filtering one event, counted in bytes that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FilterBudget(u64);

impl FilterBudget {
    pub const UNLIMITED: FilterBudget = FilterBudget(u64::MAX);

    pub fn bytes(bytes: u64) -> FilterBudget {
        FilterBudget(bytes)
    }

    /// How much was spent since the budget was `before`.
    pub fn spent_since(self, before: FilterBudget) -> usize {
        usize::try_from(before.0.saturating_sub(self.0)).unwrap_or(usize::MAX)
    }

    pub fn spend(&mut self, bytes: usize) -> Result<(), FilterBudgetExceeded> {
        self.0 = self.0.checked_sub(bytes as u64).ok_or(FilterBudgetExceeded)?;
        Ok(())
    }
}

/// A filter's key, and how it addresses the event.
type FieldKey<'a> = (&'a str, KeyStyle);

pub struct FilterInput<'a> {
    event: &'a EventEnvelope<'a>,
    /// The topic's name as delivered events carry it.
    topic: &'a str,
    /// Fields that advanced filters have looked up. Usually few: filters use the same keys again
    /// and again.
    fields: Vec<(FieldKey<'a>, LookedUpField<'a>)>,
    /// The index of each field, once there are many.
    places: BTreeMap<FieldKey<'a>, usize>,
    event_type: OnceCell<Option<Cow<'a, str>>>,
    subject: OnceCell<Cow<'a, str>>,
    pub(super) budget: FilterBudget,
}

/// A field that was looked up, and its text in the forms that were needed so far.
pub(super) struct LookedUpField<'a> {
    pub field: Option<EnvelopeField<'a>>,
    text: OnceCell<Option<Cow<'a, str>>>,
    folded: OnceCell<String>,
}

impl<'a> LookedUpField<'a> {
    pub fn new(field: Option<EnvelopeField<'a>>) -> LookedUpField<'a> {
        LookedUpField {
            field,
            text: OnceCell::new(),
            folded: OnceCell::new(),
        }
    }

    /// The string, if the field is one or counts as one.
    pub fn text(&self, budget: &mut FilterBudget) -> Result<Option<&str>, FilterBudgetExceeded> {
        if self.text.get().is_none() {
            budget.spend(self.len())?;
        }
        let text = self
            .text
            .get_or_init(|| self.field.and_then(EnvelopeField::as_text));
        Ok(text.as_deref())
    }

    pub fn folded(&self, text: &str, budget: &mut FilterBudget) -> Result<&str, FilterBudgetExceeded> {
        if self.folded.get().is_none() {
            budget.spend(text.len())?;
        }
        Ok(self.folded.get_or_init(|| text::folded(text)))
    }

    fn len(&self) -> usize {
        let raw = self.field.and_then(EnvelopeField::raw);
        raw.map_or(0, |raw| raw.text().len())
    }
}

impl<'a> FilterInput<'a> {
    pub fn new(event: &'a EventEnvelope<'a>, topic: &'a str, budget: FilterBudget) -> FilterInput<'a> {
        FilterInput {
            event,
            topic,
            fields: Vec::new(),
            places: BTreeMap::new(),
            event_type: OnceCell::new(),
            subject: OnceCell::new(),
            budget,
        }
    }

    /// The remaining budget.
    pub fn budget_left(&self) -> FilterBudget {
        self.budget
    }

    /// The event's type, and the budget.
    pub(super) fn event_type(&mut self) -> (Option<&str>, &mut FilterBudget) {
        let text = || self.event.event_type_field().and_then(EnvelopeField::as_text);
        let event_type = self.event_type.get_or_init(text).as_deref();
        (event_type, &mut self.budget)
    }

    /// The event's subject, and the budget.
    pub(super) fn subject(&mut self) -> (&str, &mut FilterBudget) {
        let text = || self.event.subject_field().and_then(EnvelopeField::as_text);
        let subject = self.subject.get_or_init(|| text().unwrap_or_default());
        (subject, &mut self.budget)
    }

    /// The value that a filter's key addresses, and the budget.
    pub(super) fn field(
        &mut self,
        key: &'a str,
        keys: KeyStyle,
    ) -> Result<(&LookedUpField<'a>, &mut FilterBudget), FilterBudgetExceeded> {
        // The charge for searching the known fields.
        self.budget.spend(1 + key.len())?;
        let at = match self.place_of((key, keys)) {
            Some(at) => at,
            None => {
                self.budget.spend(self.event.object.text().len())?;
                let field = self.event.lookup(key, keys, self.topic);
                self.note((key, keys), LookedUpField::new(field));
                self.fields.len() - 1
            }
        };
        Ok((&self.fields[at].1, &mut self.budget))
    }

    fn place_of(&self, key: FieldKey<'_>) -> Option<usize> {
        if self.places.is_empty() {
            return self.fields.iter().position(|(other, _)| *other == key);
        }
        self.places.get(&key).copied()
    }

    fn note(&mut self, key: FieldKey<'a>, field: LookedUpField<'a>) {
        self.fields.push((key, field));
        let count = self.fields.len();
        if count <= FIELDS_SEARCHED_MAX {
            return;
        }
        // All fields when the limit is passed, later only the new one.
        let unplaced = self.places.len();
        let places = (unplaced..count).map(|at| (self.fields[at].0, at));
        self.places.extend(places);
    }

    /// The number of known fields, and of those in the map.
    #[cfg(test)]
    pub(super) fn known_fields(&self) -> (usize, usize) {
        (self.fields.len(), self.places.len())
    }
}
