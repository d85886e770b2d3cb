//! Appending to sequences that no cache holds: the next position, and the next 64.

use core::error::Error;
use core::hint::black_box;
use std::time::Instant;

use paged_kv::cache::{PagedKvCache, PagedKvStore};
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::oracle::Sizes;
use paged_kv::internal::workloads::Workload;
use paged_kv::{Element, Int4, Int8, KvShape, bf16, f16};

use super::case::{Case, Heads, POOL, Rows, Spec, bytes_per_position};
use super::options::Options;
use super::problem::shuffle;
use super::subject::{Ask, Subject};

/// Positions that sequences have.
const LEN: usize = 1024;

/// Positions in a chunk.
const CHUNK: usize = 64;

pub(crate) fn case(
    heads: Heads,
    block_size: usize,
    options: &Options,
) -> Result<Case<'static>, Box<dyn Error>> {
    let (n_heads, n_kv_heads, width) = heads;
    let group = n_heads / n_kv_heads;
    let sizes = Sizes { n_kv_heads, group, k_width: width, v_width: width, n_q: 0, len: LEN };
    let workload = Workload { name: "append", batch: 1, sizes };
    let spec = Spec { kind: "append", workload, heads, block_size, rows: Rows::Cold };
    let mut subjects: Vec<Box<dyn Subject>> = Vec::new();
    for n in [1, CHUNK] {
        for dtype in ["f32", "f16", "bf16", "int8", "int4"] {
            if options.wants_type(dtype) {
                subjects.push(match dtype {
                    "f16" => Box::new(Append::<f16>::new(&spec, n)?),
                    "bf16" => Box::new(Append::<bf16>::new(&spec, n)?),
                    "int8" => Box::new(Append::<Int8>::new(&spec, n)?),
                    "int4" => Box::new(Append::<Int4>::new(&spec, n)?),
                    _ => Box::new(Append::<f32>::new(&spec, n)?),
                });
            }
        }
    }
    // No level is asked: rows are written as they are on any of them.
    let best = |_: &str| vec![paged_kv::Level::detect()];
    Ok(Case::of(spec, subjects, best))
}

struct Append<E: Element> {
    store: PagedKvStore<E>,
    sequences: Vec<PagedKvCache>,
    /// Positions that are appended at once.
    n: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl<E: Element> Append<E> {
    fn new(spec: &Spec, n: usize) -> Result<Self, Box<dyn Error>> {
        let (_, n_kv_heads, width) = spec.heads;
        let shape = KvShape::square(spec.block_size, n_kv_heads, width)?;
        let count = POOL / (LEN * bytes_per_position::<E>(spec.heads)) + 1;
        let mut store = PagedKvStore::with_shape(shape, count * shape.blocks_for(LEN + CHUNK))?;
        shuffle(&mut store)?;
        let mut numbers = Numbers::new(1);
        let (k, v) = (
            numbers.normals(CHUNK * shape.k_row_len()),
            numbers.normals(CHUNK * shape.v_row_len()),
        );
        let mut sequences = Vec::new();
        for _ in 0..count {
            let mut sequence = PagedKvCache::new();
            for _ in 0..LEN / CHUNK {
                sequence.append(&mut store, &k, &v, CHUNK)?;
            }
            sequences.push(sequence);
        }
        Ok(Append { store, sequences, n, k, v })
    }
}

impl<E: Element> Subject for Append<E> {
    fn dtype(&self) -> &'static str {
        E::NAME
    }

    fn ways(&self) -> &'static [(&'static str, usize)] {
        if self.n == 1 { &[("one", 1)] } else { &[("64", 1)] }
    }

    fn positions(&self) -> usize {
        self.n
    }

    fn flops(&self) -> f64 {
        f64::NAN
    }

    fn bytes(&self) -> Option<f64> {
        None
    }

    fn copies(&self) -> usize {
        self.sequences.len()
    }

    /// Takes back what was appended in an earlier turn before that, where there is no more room; the
    /// time is that of appending.
    fn time(&mut self, _: Ask, copy: usize, _: usize) -> f64 {
        let Append { store, sequences, n, k, v } = self;
        let shape = store.shape();
        let (k, v) = (&k[..*n * shape.k_row_len()], &v[..*n * shape.v_row_len()]);
        let sequence = &mut sequences[copy];
        if sequence.seq_len() + *n > LEN + CHUNK {
            sequence.truncate(store, LEN).expect("its own store");
        }
        let begin = Instant::now();
        sequence.append(store, black_box(k), black_box(v), *n).expect("room for all");
        begin.elapsed().as_secs_f64()
    }
}
