//! Development only: keys and values in plain vectors, attention as the formula reads.

use generate::error::Error;
use generate::model::{Memory, Rows, Sizes};

pub struct Naive {
    sizes: Sizes,
    kv: Vec<(Vec<f32>, Vec<f32>)>,
}
impl Naive {
    pub fn new(sizes: &Sizes) -> Self {
        Naive { sizes: *sizes, kv: vec![Default::default(); sizes.layers] }
    }
}
impl Memory for Naive {
    fn len(&self) -> usize {
        self.kv.last().unwrap().0.len() / self.sizes.kv_row()
    }
    fn attend(&mut self, layer: usize, rows: Rows<'_>, out: &mut [f32]) -> Result<(), Error> {
        let (ks, vs) = &mut self.kv[layer];
        ks.extend_from_slice(rows.k);
        vs.extend_from_slice(rows.v);
        let d = self.sizes.head_dim;
        let h = self.sizes.n_heads;
        let g = h / self.sizes.n_kv_heads;
        let r = self.sizes.kv_row();
        let len = ks.len() / r;
        for i in 0..rows.count {
            for head in 0..h {
                let q = &rows.q[(i * h + head) * d..][..d];
                let upto = len - rows.count + i + 1;
                let s: Vec<f32> = (0..upto)
                    .map(|j| {
                        let k = &ks[j * r + head / g * d..][..d];
                        q.iter().zip(k).map(|(a, b)| a * b).sum::<f32>() / (d as f32).sqrt()
                    })
                    .collect();
                let m = s.iter().copied().fold(f32::MIN, f32::max);
                let e: Vec<f32> = s.iter().map(|x| (x - m).exp()).collect();
                let sum: f32 = e.iter().sum();
                let o = &mut out[(i * h + head) * d..][..d];
                o.fill(0.0);
                for j in 0..upto {
                    let v = &vs[j * r + head / g * d..][..d];
                    for (o, v) in o.iter_mut().zip(v) {
                        *o += e[j] / sum * v;
                    }
                }
            }
        }
        Ok(())
    }
}
