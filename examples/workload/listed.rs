//! The table of workloads against its twin in JSON.
//!
//! The file is ours and is read as what it is: a list of flat objects, of which six fields count.
//! What this reader does not understand is a difference, never an agreement.

use paged_kv::internal::workloads::{SEED, WORKLOADS, Workload};

/// What the text says otherwise than the table. Empty where they agree.
pub(crate) fn differences(text: &str) -> Vec<String> {
    let mut differences = Vec::new();
    if field(text, "seed") != Some(&SEED.to_string()) {
        differences.push(format!("the seed is not {SEED}"));
    }
    let Some((_, list)) = text.split_once("\"workloads\":") else {
        differences.push("there is no list of workloads".into());
        return differences;
    };
    let objects: Vec<&str> = list.split('{').skip(1).collect();
    if objects.len() != WORKLOADS.len() {
        differences.push(format!("{} workloads, not {}", objects.len(), WORKLOADS.len()));
    }
    for (object, workload) in objects.iter().zip(&WORKLOADS) {
        differences.extend(difference(object, workload));
    }
    differences
}

fn difference(object: &str, workload: &Workload) -> Vec<String> {
    let sizes = workload.sizes;
    let name = format!("\"{}\"", workload.name);
    let mut fields = vec![("name", name)];
    let numbers = [
        ("batch", workload.batch),
        ("q_len", sizes.n_q),
        ("kv_len", sizes.len),
        ("n_heads", sizes.n_heads()),
        ("n_kv_heads", sizes.n_kv_heads),
        ("head_dim", sizes.k_width),
    ];
    fields.extend(numbers.map(|(key, number)| (key, number.to_string())));
    let differs = |(key, want): &(&str, String)| field(object, key) != Some(want);
    let differing = fields.iter().filter(|pair| differs(pair));
    differing
        .map(|(key, want)| {
            let have = field(object, key).unwrap_or("nothing");
            format!("{}: {key} is {have}, not {want}", workload.name)
        })
        .collect()
}

/// What stands behind `"key":`, up to the next comma or bracket.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("\"{key}\":"))?;
    rest.split([',', '}', ']', '\n']).next().map(str::trim)
}
