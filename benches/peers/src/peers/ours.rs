//! This crate, as `examples/workload` asks it.

use core::error::Error;

use paged_kv::{Element, Int8, bf16, f16};

use super::{Peer, Task};
use crate::problem::{Problem, Setup};

pub(super) fn prepare<'a>(task: &Task<'a>) -> Result<Box<dyn Peer + 'a>, Box<dyn Error>> {
    match task.dtype {
        "f32" => typed::<f32>(task),
        "f16" => typed::<f16>(task),
        "bf16" => typed::<bf16>(task),
        "q8" => typed::<Int8>(task),
        other => Err(format!("nothing is stored as {other}").into()),
    }
}

fn typed<'a, E: Element>(task: &Task<'a>) -> Result<Box<dyn Peer + 'a>, Box<dyn Error>> {
    let Task { level, block_size, copies, workers, .. } = *task;
    let setup = Setup { block_size, level, copies };
    Ok(Box::new(Problem::<E>::new(task.workload, task.inputs, setup, workers)?))
}

impl<E: Element> Peer for Problem<'_, E> {
    fn call(&mut self, copy: usize) {
        Problem::call(self, copy);
    }

    fn answer(&mut self) -> Vec<f32> {
        Problem::answer(self).to_vec()
    }

    fn kv_bytes(&self) -> f64 {
        Problem::kv_bytes(self)
    }

    fn stored(&self) -> Option<(Vec<f32>, Vec<f32>)> {
        Some(Problem::stored(self))
    }

    fn wants_rayon(&self) -> bool {
        false
    }
}
