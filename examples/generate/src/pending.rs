//! Development only: stands in for the attention room until it has landed.
use paged_kv::cache::{PagedKvCache, PagedKvStore};
use paged_kv::{AttentionError, GqaShape};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level;
impl Level {
    pub fn detect() -> Self {
        Level
    }
    pub fn from_name(name: &str) -> Option<Self> {
        (name == "portable").then_some(Level)
    }
    pub fn name(self) -> &'static str {
        "portable"
    }
    pub fn available() -> Vec<Level> {
        vec![Level]
    }
}
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionOptions;
impl AttentionOptions {
    pub fn new() -> Self {
        AttentionOptions
    }
    pub fn level(self, _: Level) -> Self {
        self
    }
}
pub fn attention_scratch_len(_: &GqaShape, _: usize) -> usize {
    0
}
pub fn causal_gqa_attention_paged_into(
    q: &[f32],
    store: &PagedKvStore,
    cache: &PagedKvCache,
    h: usize,
    _: &AttentionOptions,
    out: &mut [f32],
    _: &mut [f32],
) -> Result<(), AttentionError> {
    let shape = store.shape();
    let (d, g) = (shape.k_width(), h / shape.n_kv_heads());
    let len = cache.seq_len();
    let count = q.len() / h / d;
    for kv in 0..shape.n_kv_heads() {
        let mut ks = vec![0.0; len * d];
        let mut vs = vec![0.0; len * d];
        for j in 0..len {
            cache.copy_k_row(store, j, kv, &mut ks[j * d..][..d]).unwrap();
            cache.copy_v_row(store, j, kv, &mut vs[j * d..][..d]).unwrap();
        }
        for i in 0..count {
            for head in kv * g..(kv + 1) * g {
                let q = &q[(i * h + head) * d..][..d];
                let upto = len - count + i + 1;
                let s: Vec<f32> = (0..upto)
                    .map(|j| {
                        q.iter().zip(&ks[j * d..]).map(|(a, b)| a * b).sum::<f32>()
                            / (d as f32).sqrt()
                    })
                    .collect();
                let m = s.iter().copied().fold(f32::MIN, f32::max);
                let e: Vec<f32> = s.iter().map(|x| (x - m).exp()).collect();
                let sum: f32 = e.iter().sum();
                let o = &mut out[(i * h + head) * d..][..d];
                o.fill(0.0);
                for j in 0..upto {
                    for (o, v) in o.iter_mut().zip(&vs[j * d..]) {
                        *o += e[j] / sum * v;
                    }
                }
            }
        }
    }
    Ok(())
}
