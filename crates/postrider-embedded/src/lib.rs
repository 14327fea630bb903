//! The promise kept on local files: a segmented log and redb.
