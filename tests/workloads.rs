//! The table of workloads is the one that other languages read.

#[path = "../examples/workload/listed.rs"]
mod listed;

use paged_kv::internal::workloads::{WORKLOADS, Workload};

const LISTED: &str = include_str!("../benches/peers/workloads.json");

#[test]
fn the_table_is_the_file() {
    assert_eq!(listed::differences(LISTED), [""; 0]);
}

/// Every field of every line counts.
#[test]
fn a_difference_is_seen() {
    for (have, other) in [
        ("\"seed\": 20251129", "\"seed\": 20251130"),
        ("decode-MHA-4096", "decode-MHA-4095"),
        ("\"batch\": 8", "\"batch\": 7"),
        ("\"q_len\": 2048", "\"q_len\": 2047"),
        ("\"kv_len\": 32768", "\"kv_len\": 32767"),
        ("\"n_heads\": 9", "\"n_heads\": 6"),
        ("\"n_kv_heads\": 4", "\"n_kv_heads\": 2"),
        ("\"head_dim\": 256", "\"head_dim\": 255"),
    ] {
        assert!(LISTED.contains(have), "{have}");
        let text = LISTED.replacen(have, other, 1);
        // The shapes are named once more before the list.
        let text =
            if listed::differences(&text).is_empty() { LISTED.replace(have, other) } else { text };
        assert!(!listed::differences(&text).is_empty(), "{other}");
    }
    let (all_but_one, _) = LISTED.rsplit_once("{\"name\"").unwrap();
    assert_eq!(listed::differences(all_but_one).len(), 1);
}

/// The figures of the first workload, worked out by hand.
#[test]
fn needs_are_counted() {
    let decode = Workload::named("decode-L8B-512").unwrap();
    assert_eq!(decode.kv_numbers(), 2 * 512 * 8 * 128);
    assert_eq!(decode.flops(), (4 * 128 * 32 * 512) as f64);
    let batch = Workload::named("decode-L8B-b8-4096").unwrap();
    assert_eq!(batch.kv_numbers(), 8 * 2 * 4096 * 8 * 128);
    assert_eq!(batch.q_numbers(), 8 * 32 * 128);
    let mut names = WORKLOADS.map(|workload| workload.name);
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
}
