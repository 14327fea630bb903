//! Limits of long-lived streams: live streams and listen sessions.

use crate::access::{Caller, Role};
use crate::connections::client_network;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};

/// How many streams may be open, and for whom.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamSlotLimits {
    pub total: usize,
    pub per_client: usize,
    /// Of one address, not counting streams of owners: many clients may share an address.
    pub per_address: usize,
    /// Reserved for owners.
    pub for_owners: usize,
}

/// Client that holds a stream open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StreamSlotHolder {
    pub client: String,
    pub address: IpAddr,
    pub is_owner: bool,
}

impl StreamSlotHolder {
    pub fn of(caller: &Caller, address: IpAddr) -> StreamSlotHolder {
        StreamSlotHolder {
            client: caller.id.clone(),
            address: client_network(address),
            is_owner: caller.roles.contains(&Role::Owner),
        }
    }
}

/// Why no further stream is admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoStreamSlot {
    All(usize),
    Client(usize),
    Address(usize),
}

impl NoStreamSlot {
    /// 503 if no client is admitted, 429 if other clients are.
    pub fn status(self) -> u16 {
        match self {
            NoStreamSlot::All(_) => 503,
            NoStreamSlot::Client(_) | NoStreamSlot::Address(_) => 429,
        }
    }

    /// Message for the client. `what` is a plural noun.
    pub fn reason(self, what: &str) -> String {
        match self {
            NoStreamSlot::All(max) => format!("{max} {what} are here already; end one, or try again later"),
            NoStreamSlot::Client(max) => format!("this client has {max} {what} already; end one first"),
            NoStreamSlot::Address(max) => format!("this address has {max} {what} already; end one first"),
        }
    }
}

/// Whether a stream is admitted beside the open ones.
fn judge<'a>(
    taken: impl Iterator<Item = &'a StreamSlotHolder> + Clone,
    holder: &StreamSlotHolder,
    bounds: StreamSlotLimits,
) -> Result<(), NoStreamSlot> {
    let client = taken.clone().filter(|one| one.client == holder.client);
    if client.count() >= bounds.per_client {
        return Err(NoStreamSlot::Client(bounds.per_client));
    }
    if taken.clone().count() >= bounds.total {
        return Err(NoStreamSlot::All(bounds.total));
    }
    if holder.is_owner {
        return Ok(());
    }
    let others = taken.filter(|one| !one.is_owner);
    let of_address = others.clone().filter(|one| one.address == holder.address);
    if of_address.count() >= bounds.per_address {
        return Err(NoStreamSlot::Address(bounds.per_address));
    }
    let for_others = bounds.total - bounds.for_owners;
    match others.count() >= for_others {
        true => Err(NoStreamSlot::All(for_others)),
        false => Ok(()),
    }
}

pub(crate) struct StreamSlots {
    bounds: StreamSlotLimits,
    taken: Mutex<TakenStreamSlots>,
}

#[derive(Default)]
struct TakenStreamSlots {
    last: u64,
    /// At most as many as the total limit.
    holders: Vec<(u64, StreamSlotHolder)>,
}

impl StreamSlots {
    pub fn new(bounds: StreamSlotLimits) -> Arc<StreamSlots> {
        Arc::new(StreamSlots {
            bounds,
            taken: Mutex::default(),
        })
    }

    fn taken(&self) -> MutexGuard<'_, TakenStreamSlots> {
        self.taken.lock().expect("no panic holds it")
    }

    pub fn take(self: &Arc<Self>, holder: StreamSlotHolder) -> Result<StreamSlot, NoStreamSlot> {
        let mut taken = self.taken();
        judge(
            taken.holders.iter().map(|(_, holder)| holder),
            &holder,
            self.bounds,
        )?;
        taken.last += 1;
        let id = taken.last;
        taken.holders.push((id, holder));
        Ok(StreamSlot {
            places: self.clone(),
            id,
        })
    }
}

/// Slot of an open stream, given back on drop.
pub(crate) struct StreamSlot {
    places: Arc<StreamSlots>,
    id: u64,
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.places.taken().holders.retain(|(id, _)| *id != self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: StreamSlotLimits = StreamSlotLimits {
        total: 8,
        per_client: 3,
        per_address: 5,
        for_owners: 2,
    };

    fn holder(client: &str, last: u8, is_owner: bool) -> StreamSlotHolder {
        StreamSlotHolder {
            client: client.into(),
            address: [127, 0, 0, last].into(),
            is_owner,
        }
    }

    #[test]
    fn nobody_takes_all_places() {
        let places = StreamSlots::new(BOUNDS);
        let mut taken = Vec::new();
        let mut take = |client: &str, last: u8, is_owner: bool| {
            let place = places.take(holder(client, last, is_owner));
            place.map(|place| taken.push(place))
        };
        for _ in 0..3 {
            take("a", 1, false).unwrap();
        }
        assert_eq!(take("a", 2, false), Err(NoStreamSlot::Client(3)));
        take("b", 1, false).unwrap();
        take("b", 1, false).unwrap();
        assert_eq!(take("b", 1, false), Err(NoStreamSlot::Address(5)));
        take("b", 2, false).unwrap();
        // Two slots are left for owners, from any address.
        assert_eq!(take("c", 3, false), Err(NoStreamSlot::All(6)));
        take("o", 1, true).unwrap();
        take("o", 1, true).unwrap();
        assert_eq!(take("o", 1, true), Err(NoStreamSlot::All(8)));
        taken.clear();
        assert!(places.take(holder("a", 1, false)).is_ok());
    }
}
