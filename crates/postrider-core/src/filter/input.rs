//! One event as filters see it: fields are looked up once for all filters, and the work is counted.

use super::text;
use crate::envelope::{Envelope, Field, KeyStyle};
use std::borrow::Cow;
use std::cell::OnceCell;

/// The filters of a topic's subscriptions would take more work for one event than is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilterBudgetExceeded;

/// Work that is left for filtering one event, counted in bytes that are looked at.
#[derive(Clone, Copy, Debug)]
pub struct FilterBudget(u64);

impl FilterBudget {
    pub const UNLIMITED: FilterBudget = FilterBudget(u64::MAX);

    pub fn bytes(bytes: u64) -> FilterBudget {
        FilterBudget(bytes)
    }

    pub fn spend(&mut self, bytes: usize) -> Result<(), FilterBudgetExceeded> {
        self.0 = self.0.checked_sub(bytes as u64).ok_or(FilterBudgetExceeded)?;
        Ok(())
    }
}

pub struct FilterInput<'a> {
    event: &'a Envelope<'a>,
    /// The topic's name as delivered events carry it.
    topic: &'a str,
    /// Fields that advanced filters have asked for. Few: the same keys come again and again.
    fields: Vec<(&'a str, KeyStyle, KnownField<'a>)>,
    event_type: OnceCell<Option<Cow<'a, str>>>,
    subject: OnceCell<Cow<'a, str>>,
    pub(super) budget: FilterBudget,
}

/// A field that was looked up, and its text, in the forms that were asked for.
pub(super) struct KnownField<'a> {
    pub field: Option<Field<'a>>,
    text: OnceCell<Option<Cow<'a, str>>>,
    folded: OnceCell<String>,
}

impl<'a> KnownField<'a> {
    pub fn new(field: Option<Field<'a>>) -> KnownField<'a> {
        KnownField {
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
        let text = self.text.get_or_init(|| self.field.and_then(Field::as_text));
        Ok(text.as_deref())
    }

    pub fn folded(&self, text: &str, budget: &mut FilterBudget) -> Result<&str, FilterBudgetExceeded> {
        if self.folded.get().is_none() {
            budget.spend(text.len())?;
        }
        Ok(self.folded.get_or_init(|| text::folded(text)))
    }

    fn len(&self) -> usize {
        let raw = self.field.and_then(Field::raw);
        raw.map_or(0, |raw| raw.text().len())
    }
}

impl<'a> FilterInput<'a> {
    pub fn new(event: &'a Envelope<'a>, topic: &'a str, budget: FilterBudget) -> FilterInput<'a> {
        FilterInput {
            event,
            topic,
            fields: Vec::new(),
            event_type: OnceCell::new(),
            subject: OnceCell::new(),
            budget,
        }
    }

    pub(super) fn event_type(&self) -> Option<&str> {
        let text = || self.event.event_type_field().and_then(Field::as_text);
        self.event_type.get_or_init(text).as_deref()
    }

    pub(super) fn subject(&self) -> &str {
        let text = || self.event.subject_field().and_then(Field::as_text);
        self.subject.get_or_init(|| text().unwrap_or_default())
    }

    /// What a filter's key addresses, and the budget.
    pub(super) fn field(
        &mut self,
        key: &'a str,
        keys: KeyStyle,
    ) -> Result<(&KnownField<'a>, &mut FilterBudget), FilterBudgetExceeded> {
        let known = |(other, style, _): &(&str, KeyStyle, KnownField<'_>)| *other == key && *style == keys;
        let at = match self.fields.iter().position(known) {
            Some(at) => at,
            None => {
                self.budget.spend(self.event.object.text().len())?;
                let field = self.event.lookup(key, keys, self.topic);
                self.fields.push((key, keys, KnownField::new(field)));
                self.fields.len() - 1
            }
        };
        Ok((&self.fields[at].2, &mut self.budget))
    }
}
