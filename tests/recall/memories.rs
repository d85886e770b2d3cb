//! Three memories for one decoder: rows attended in `f64`, contiguous caches, paged ones.
//!
//! What holds no row holds NaN here, scratch too: whoever reads what nobody wrote is found out.

use core::convert::Infallible;

use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_into,
    causal_gqa_attention_paged_into,
};
use paged_kv::cache::{KvCache, PagedKvCache, PagedKvStore};
use paged_kv::{GqaShape, KvShape, Level, PagedKvError};

use crate::decoder::{Config, Memory};

/// Rows as they came, attention in `f64`.
pub(crate) struct Oracle {
    config: Config,
    keys: [Vec<f32>; Config::N_LAYERS],
    pub(crate) values: [Vec<f32>; Config::N_LAYERS],
    len: usize,
}

impl Oracle {
    pub(crate) fn new(config: &Config) -> Oracle {
        Oracle { config: *config, keys: Default::default(), values: Default::default(), len: 0 }
    }

    /// One query row of one head over the first `len` positions of KV head `kv_head`.
    fn attend_row(&self, layer: usize, kv_head: usize, len: usize, q: &[f32], out: &mut [f32]) {
        let width = self.config.head_dim;
        let row = |position: usize| {
            let begin = (position * self.config.n_kv_heads + kv_head) * width;
            begin..begin + width
        };
        let (keys, values) = (&self.keys[layer], &self.values[layer]);
        let mut scores: Vec<f64> = (0..len)
            .map(|position| {
                let key = &keys[row(position)];
                let product: f64 =
                    q.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                product / (width as f64).sqrt()
            })
            .collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut denominator = 0.0;
        for score in &mut scores {
            *score = (*score - most).exp();
            denominator += *score;
        }
        let mut sums = vec![0.0f64; width];
        for (position, weight) in scores.iter().enumerate() {
            let value = &values[row(position)];
            for (sum, &number) in sums.iter_mut().zip(value) {
                *sum += weight * f64::from(number);
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = (sum / denominator) as f32;
        }
    }
}

impl Memory for Oracle {
    type Error = Infallible;

    fn len(&self) -> usize {
        self.len
    }

    fn append(&mut self, layer: usize, k: &[f32], v: &[f32], _: usize) -> Result<(), Infallible> {
        self.keys[layer].extend_from_slice(k);
        self.values[layer].extend_from_slice(v);
        self.len = self.keys[Config::N_LAYERS - 1].len() / self.config.code_width();
        Ok(())
    }

    fn attend(&mut self, layer: usize, q: &[f32], out: &mut [f32]) -> Result<(), Infallible> {
        let Config { n_heads, n_kv_heads, head_dim, .. } = self.config;
        let row_len = n_heads * head_dim;
        let n_q = q.len() / row_len;
        let held = self.keys[layer].len() / self.config.code_width();
        for i in 0..n_q {
            for head in 0..n_heads {
                let at = i * row_len + head * head_dim;
                let kv_head = head / (n_heads / n_kv_heads);
                let len = held - n_q + i + 1;
                let q = &q[at..at + head_dim];
                self.attend_row(layer, kv_head, len, q, &mut out[at..at + head_dim]);
            }
        }
        Ok(())
    }

    fn truncate(&mut self, len: usize) -> Result<(), Infallible> {
        for rows in self.keys.iter_mut().chain(&mut self.values) {
            rows.truncate(len * self.config.code_width());
        }
        self.len = len;
        Ok(())
    }
}

/// A [`KvCache`] for each layer.
pub(crate) struct Contiguous {
    caches: [KvCache; Config::N_LAYERS],
    n_heads: usize,
    level: Level,
    scratch: Vec<f32>,
}

impl Contiguous {
    pub(crate) fn new(config: &Config, rows: usize, level: Level) -> Contiguous {
        Contiguous {
            caches: core::array::from_fn(|_| {
                let mut cache = KvCache::new(config.n_kv_heads, config.head_dim);
                cache.poison_free();
                cache
            }),
            n_heads: config.n_heads,
            level,
            scratch: scratch(config, 64, rows),
        }
    }
}

impl Memory for Contiguous {
    type Error = Infallible;

    fn len(&self) -> usize {
        self.caches[Config::N_LAYERS - 1].seq_len()
    }

    fn append(&mut self, layer: usize, k: &[f32], v: &[f32], n: usize) -> Result<(), Infallible> {
        self.caches[layer].append(k, v, n).expect("a cache without a pool grows");
        Ok(())
    }

    fn attend(&mut self, layer: usize, q: &[f32], out: &mut [f32]) -> Result<(), Infallible> {
        let options = AttentionOptions::new().level(self.level);
        let cache = &self.caches[layer];
        causal_gqa_attention_into(q, cache, self.n_heads, &options, out, &mut self.scratch)
            .expect("the shapes are the decoder's");
        Ok(())
    }

    fn truncate(&mut self, len: usize) -> Result<(), Infallible> {
        for cache in self.caches.iter_mut().filter(|cache| cache.seq_len() > len) {
            cache.truncate(len).expect("it is longer than that");
        }
        Ok(())
    }
}

/// A [`PagedKvStore`] for each layer, with a sequence in it.
pub(crate) struct Paged {
    pub(crate) stores: [PagedKvStore; Config::N_LAYERS],
    caches: [PagedKvCache; Config::N_LAYERS],
    n_heads: usize,
    level: Level,
    scratch: Vec<f32>,
}

impl Paged {
    /// `blocks` for each of the layers.
    pub(crate) fn new(
        config: &Config,
        rows: usize,
        level: Level,
        block_size: usize,
        blocks: [usize; Config::N_LAYERS],
    ) -> Paged {
        let store = |blocks| {
            let (heads, width) = (config.n_kv_heads, config.head_dim);
            let mut store = PagedKvStore::new(block_size, blocks, heads, width);
            store.poison_free();
            store
        };
        Paged {
            stores: blocks.map(store),
            caches: Default::default(),
            n_heads: config.n_heads,
            level,
            scratch: scratch(config, block_size, rows),
        }
    }
}

impl Memory for Paged {
    type Error = PagedKvError;

    fn len(&self) -> usize {
        self.caches[Config::N_LAYERS - 1].seq_len()
    }

    fn append(&mut self, layer: usize, k: &[f32], v: &[f32], n: usize) -> Result<(), PagedKvError> {
        self.caches[layer].append(&mut self.stores[layer], k, v, n)
    }

    fn attend(&mut self, layer: usize, q: &[f32], out: &mut [f32]) -> Result<(), PagedKvError> {
        let options = AttentionOptions::new().level(self.level);
        let (store, cache) = (&self.stores[layer], &self.caches[layer]);
        let scratch = &mut self.scratch;
        causal_gqa_attention_paged_into(q, store, cache, self.n_heads, &options, out, scratch)
            .expect("the shapes are the decoder's");
        Ok(())
    }

    fn truncate(&mut self, len: usize) -> Result<(), PagedKvError> {
        for (cache, store) in self.caches.iter_mut().zip(&mut self.stores) {
            if cache.seq_len() > len {
                cache.truncate(store, len)?;
            }
        }
        Ok(())
    }
}

fn scratch(config: &Config, block_size: usize, rows: usize) -> Vec<f32> {
    let shape = KvShape::square(block_size, config.n_kv_heads, config.head_dim).unwrap();
    let gqa = GqaShape::new(shape, config.n_heads).unwrap();
    vec![f32::NAN; attention_scratch_len(&gqa, rows)]
}
