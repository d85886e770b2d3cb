//! candle: its flash attention for CPUs, and the plain way of two products and a softmax.

use core::error::Error;

use candle_core::{DType, Device, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use half::{bf16, f16};

use super::{Peer, Task};

struct Candle<'a> {
    task: Task<'a>,
    flash: bool,
    dtype: DType,
    q: Tensor,
    /// Keys and values of each copy.
    copies: Vec<(Tensor, Tensor)>,
    mask: Option<Tensor>,
    /// `[batch, heads, n_q, width]`.
    out: Option<Tensor>,
}

pub(super) fn prepare<'a>(
    task: &Task<'a>,
    flash: bool,
) -> Result<Box<dyn Peer + 'a>, Box<dyn Error>> {
    let dtype = match task.dtype {
        "f32" => DType::F32,
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        other => return Err(format!("nothing is stored as {other}").into()),
    };
    let (batch, sizes) = (task.workload.batch, task.workload.sizes);
    if flash && batch > 1 && dtype == DType::BF16 {
        return Err("several sequences are f32 or f16".into());
    }
    let q = Tensor::from_slice(
        &task.inputs.q,
        (batch, sizes.n_q, sizes.n_heads(), sizes.k_width),
        &Device::Cpu,
    )?;
    let side = |numbers: &[f32]| -> candle_core::Result<Tensor> {
        let shape = (batch, sizes.len, sizes.n_kv_heads, sizes.k_width);
        let rows = Tensor::from_slice(numbers, shape, &Device::Cpu)?.to_dtype(dtype)?;
        if flash { Ok(rows) } else { rows.transpose(1, 2)?.contiguous() }
    };
    let copies: Result<_, candle_core::Error> =
        (0..task.copies).map(|_| Ok((side(&task.inputs.k)?, side(&task.inputs.v)?))).collect();
    let mask = if !flash && sizes.n_q > 1 { Some(mask(task)?.to_dtype(dtype)?) } else { None };
    let (q, copies) = (q.to_dtype(dtype)?, copies?);
    Ok(Box::new(Candle { task: *task, flash, dtype, q, copies, mask, out: None }))
}

/// Zero where a query row sees a position and -inf where not.
fn mask(task: &Task<'_>) -> candle_core::Result<Tensor> {
    let sizes = task.workload.sizes;
    let mut cells = vec![0.0f32; sizes.n_q * sizes.len];
    for (row, cells) in cells.chunks_mut(sizes.len).enumerate() {
        cells[sizes.len - sizes.n_q + row + 1..].fill(f32::NEG_INFINITY);
    }
    Tensor::from_vec(cells, (1, 1, 1, sizes.n_q, sizes.len), &Device::Cpu)
}

impl Candle<'_> {
    fn attend(&self, copy: usize) -> candle_core::Result<Tensor> {
        let (batch, sizes) = (self.task.workload.batch, self.task.workload.sizes);
        let (k, v) = &self.copies[copy];
        let q = &self.q;
        let scale = 1.0 / (sizes.k_width as f32).sqrt();
        if self.flash {
            let mask = AttnMask::Causal { kv_offset: sizes.len - sizes.n_q };
            return match self.dtype {
                DType::F32 => flash_attn::<f32>(q, k, v, scale, mask, None, None),
                DType::F16 => flash_attn::<f16>(q, k, v, scale, mask, None, None),
                _ => flash_attn::<bf16>(q, k, v, scale, mask, None, None),
            };
        }
        // A group becomes rows of its KV head, so that keys and values are never repeated.
        let rows = sizes.group * sizes.n_q;
        let shape = (batch, sizes.n_kv_heads, rows, sizes.k_width);
        let q = q.transpose(1, 2)?.contiguous()?.reshape(shape)?;
        let mut scores = (q.matmul(&k.transpose(2, 3)?)? * f64::from(scale))?;
        if let Some(mask) = &self.mask {
            let groups = (batch, sizes.n_kv_heads, sizes.group, sizes.n_q, sizes.len);
            let flat = (batch, sizes.n_kv_heads, rows, sizes.len);
            scores = scores.reshape(groups)?.broadcast_add(mask)?.reshape(flat)?;
        }
        let weights = candle_nn::ops::softmax_last_dim(&scores)?;
        weights.matmul(v)?.reshape((batch, sizes.n_heads(), sizes.n_q, sizes.v_width))
    }
}

impl Peer for Candle<'_> {
    fn call(&mut self, copy: usize) {
        self.out = Some(self.attend(copy).expect("candle failed"));
    }

    fn answer(&mut self) -> Vec<f32> {
        let out = self.out.as_ref().expect("it was called");
        let flat = |out: &Tensor| -> candle_core::Result<Vec<f32>> {
            out.transpose(1, 2)?.contiguous()?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
        };
        flat(out).expect("candle failed")
    }

    fn kv_bytes(&self) -> f64 {
        (self.task.workload.kv_numbers() * self.dtype.size_in_bytes()) as f64
    }
}
