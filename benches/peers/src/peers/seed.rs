//! ferrox-core and frink-core: two inference engines that keep keys and values in pages, too.
//!
//! Both have the same doors, so the code is written once and expanded for each.

macro_rules! engine {
    ($core:ident, $buffer:ty, $types:expr, $fill:expr, $open:expr, $rows:expr, $wide:expr) => {
        use core::error::Error;

        use paged_kv::internal::numbers::Numbers;
        use $core::attention;
        use $core::cache::{PagedKvCache, PagedKvStore};

        use super::super::{Peer, Task};

        /// As the engine itself chooses it.
        const BLOCK_SIZE: usize = 16;

        struct Engine<'a> {
            task: Task<'a>,
            copies: Vec<Layer>,
            out: Vec<f32>,
        }

        /// Keys and values, `[batch][len][n_kv_heads][width]`, or a store with its sequences.
        enum Layer {
            Contiguous($buffer, $buffer),
            Paged(PagedKvStore, Vec<PagedKvCache>),
        }

        fn engine<'a>(
            task: &Task<'a>,
            copy: impl Fn(&Task<'a>) -> Result<Layer, Box<dyn Error>>,
        ) -> Result<Box<dyn Peer + 'a>, Box<dyn Error>> {
            if !$types.contains(&task.dtype) {
                return Err(format!("nothing is stored as {}", task.dtype).into());
            }
            let copies: Result<_, _> = (0..task.copies).map(|_| copy(task)).collect();
            let out = vec![0.0; task.workload.q_numbers()];
            Ok(Box::new(Engine { task: *task, copies: copies?, out }))
        }

        pub(in super::super) fn contiguous<'a>(
            task: &Task<'a>,
        ) -> Result<Box<dyn Peer + 'a>, Box<dyn Error>> {
            engine(task, |task| {
                let fill = |numbers: &[f32]| $fill(numbers, task.dtype);
                Ok(Layer::Contiguous(fill(&task.inputs.k), fill(&task.inputs.v)))
            })
        }

        pub(in super::super) fn paged<'a>(
            task: &Task<'a>,
        ) -> Result<Box<dyn Peer + 'a>, Box<dyn Error>> {
            engine(task, pages)
        }

        /// Blocks in random order.
        fn pages(task: &Task<'_>) -> Result<Layer, Box<dyn Error>> {
            let sizes = task.workload.sizes;
            let batch = task.workload.batch;
            let blocks = sizes.len.div_ceil(BLOCK_SIZE);
            let mut store: PagedKvStore =
                $open(BLOCK_SIZE, blocks * batch, sizes.n_kv_heads, sizes.k_width, task.dtype);
            let mut all = PagedKvCache::new();
            let full = |_| Box::<dyn Error>::from("its store is full");
            all.reserve(&mut store, blocks * batch * BLOCK_SIZE).map_err(full)?;
            let mut ids = all.block_table().to_vec();
            Numbers::new(7).shuffle(&mut ids);
            let row = sizes.n_kv_heads * sizes.k_width;
            let mut rows = task.inputs.k.chunks(row).zip(task.inputs.v.chunks(row));
            let mut sequences = Vec::new();
            for ids in ids.chunks(blocks) {
                let mut sequence = PagedKvCache::new();
                sequence.adopt_blocks(ids.to_vec(), 0, BLOCK_SIZE);
                for (k, v) in rows.by_ref().take(sizes.len) {
                    let full = |_| Box::<dyn Error>::from("its store is full");
                    sequence.push(&mut store, k, v).map_err(full)?;
                }
                sequences.push(sequence);
            }
            Ok(Layer::Paged(store, sequences))
        }

        impl Peer for Engine<'_> {
            fn call(&mut self, copy: usize) {
                let Task { workload, inputs, .. } = self.task;
                let sizes = workload.sizes;
                let (heads, kv_heads, width) = (sizes.n_heads(), sizes.n_kv_heads, sizes.k_width);
                let (n_q, len) = (sizes.n_q, sizes.len);
                let q_len = n_q * heads * width;
                let kv_len = len * kv_heads * width;
                for index in 0..workload.batch {
                    let q = &inputs.q[index * q_len..][..q_len];
                    let answer = match &self.copies[copy] {
                        Layer::Contiguous(k, v) => {
                            let k = $rows(k, index * kv_len, kv_len);
                            let v = $rows(v, index * kv_len, kv_len);
                            if n_q == 1 {
                                attention::causal_gqa_attention(
                                    q, k, v, heads, kv_heads, width, len,
                                )
                            } else {
                                let (k, v) = ($wide(k), $wide(v));
                                attention::causal_gqa_attention_prefill_shared_kv(
                                    q,
                                    &k,
                                    &v,
                                    heads,
                                    kv_heads,
                                    width,
                                    n_q,
                                    len - n_q,
                                    None,
                                )
                            }
                        }
                        Layer::Paged(store, sequences) if n_q == 1 => {
                            let table = sequences[index].block_table();
                            attention::causal_gqa_attention_paged(
                                q, store, table, heads, kv_heads, width, len,
                            )
                        }
                        // Its own way for prompts: pages are copied out first.
                        Layer::Paged(store, sequences) => {
                            let cache = sequences[index].to_contiguous(store);
                            let k = $wide($rows(&cache.k, 0, kv_len));
                            let v = $wide($rows(&cache.v, 0, kv_len));
                            attention::causal_gqa_attention_prefill_shared_kv(
                                q,
                                &k,
                                &v,
                                heads,
                                kv_heads,
                                width,
                                n_q,
                                len - n_q,
                                None,
                            )
                        }
                    };
                    self.out[index * q_len..][..q_len].copy_from_slice(&answer);
                }
            }

            fn answer(&mut self) -> Vec<f32> {
                self.out.clone()
            }

            fn kv_bytes(&self) -> f64 {
                let bytes = if self.task.dtype == "f32" { 4.0 } else { 2.0 };
                self.task.workload.kv_numbers() as f64 * bytes
            }
        }
    };
}

#[cfg(feature = "ferrox")]
pub(super) mod ferrox {
    fn rows(buffer: &[f32], start: usize, len: usize) -> &[f32] {
        &buffer[start..][..len]
    }

    engine!(
        ferrox_core,
        Vec<f32>,
        ["f32"],
        |numbers: &[f32], _| numbers.to_vec(),
        |size, blocks, heads, width, _| PagedKvStore::new(size, blocks, heads, width),
        rows,
        core::convert::identity
    );
}

#[cfg(feature = "frink")]
pub(super) mod frink {
    use frink_core::kv_store::{KvBuf, KvDtype, KvRows};

    fn rows(buffer: &KvBuf, start: usize, len: usize) -> KvRows<'_> {
        buffer.view().slice(start..start + len)
    }

    /// Prompts are attended in `f32` alone; the engine widens what it has stored, too.
    fn wide(rows: KvRows<'_>) -> std::borrow::Cow<'_, [f32]> {
        rows.to_f32_cow()
    }

    fn kind(dtype: &str) -> KvDtype {
        if dtype == "f32" { KvDtype::F32 } else { KvDtype::F16 }
    }

    engine!(
        frink_core,
        KvBuf,
        ["f32", "f16"],
        |numbers: &[f32], dtype| KvBuf::from_f32(kind(dtype), numbers),
        |size, blocks, heads, width, dtype| {
            PagedKvStore::new(size, blocks, heads, width).with_dtype(kind(dtype))
        },
        rows,
        wide
    );
}
