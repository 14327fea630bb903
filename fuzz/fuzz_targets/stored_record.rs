//! Stored bytes: damage is reported without a panic; readable data is the same after being written
//! and read again.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use postrider_core::probation::EndpointDelay;
use postrider_core::subscription::{DomainTopic, Subscription, Topic};
use postrider_embedded::record::{RecordHeader, SubscriptionProgress};
use postrider_store::record::batch::{VarintReader, decode_batch, encode_batch_head};
use postrider_store::record::{StoredRecord, decode_marks, encode_marks};
use postrider_store::{BlobRecord, Handshake, ReplayJob};
use std::fmt::Debug;

fuzz_target!(|bytes: &[u8]| {
    let Some((&kind, stored)) = bytes.split_first() else {
        return;
    };
    match kind % 10 {
        0 => survives::<Topic>(stored),
        1 => survives::<DomainTopic>(stored),
        2 => survives::<Subscription>(stored),
        3 => survives::<Handshake>(stored),
        4 => survives::<EndpointDelay>(stored),
        5 => survives::<BlobRecord>(stored),
        6 => survives::<ReplayJob>(stored),
        7 => batch(stored),
        8 => {
            if let Some(header) = RecordHeader::decode(stored) {
                assert_eq!(header.encode(), stored[..header.encode().len()]);
            }
            let marks = decode_marks(stored);
            assert_eq!(decode_marks(&encode_marks(&marks)), marks);
        }
        _ => progress(stored),
    }
});

fn survives<R: StoredRecord + PartialEq + Debug>(stored: &[u8]) {
    if let Ok(record) = R::decode(stored) {
        assert_eq!(R::decode(&record.encode()).as_ref(), Ok(&record));
    }
}

fn batch(stored: &[u8]) {
    let Some(batch) = decode_batch(&Bytes::copy_from_slice(stored)) else {
        return;
    };
    for (at, event) in batch.events.iter().enumerate() {
        let _ = (&batch.body[event.object.range()], batch.matched(at));
    }
    let mut payload = encode_batch_head(&batch);
    payload.extend_from_slice(&batch.body);
    assert_eq!(decode_batch(&payload.into()), Some(batch));
}

fn progress(stored: &[u8]) {
    let mut reader = VarintReader::new(stored);
    while let Some((of, progress)) = SubscriptionProgress::decode(&mut reader) {
        let mut written = Vec::new();
        progress.encode(of, &mut written);
        assert_eq!(
            SubscriptionProgress::decode(&mut VarintReader::new(&written)),
            Some((of, progress))
        );
    }
}
