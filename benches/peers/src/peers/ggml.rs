//! ggml, the tensor library of llama.cpp, through its C interface: the graph that llama.cpp builds
//! for attention, over one layer's cache.

use core::error::Error;
use core::ptr;

use llama_cpp_sys_2 as sys;
use paged_kv::internal::workloads::Workload;

use super::{Peer, Task};

/// The ways llama.cpp attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Graph {
    /// The flash operator over a cache in the order of positions, as llama.cpp keeps it.
    Flash,
    /// The same with each head's rows together.
    FlashHeadMajor,
    /// Two products and a softmax, values transposed: llama.cpp without its flash option.
    Products,
}

struct Ggml {
    workload: Workload,
    contexts: Vec<*mut sys::ggml_context>,
    graphs: Vec<(*mut sys::ggml_cgraph, sys::ggml_cplan)>,
    work: Vec<u8>,
    pool: *mut sys::ggml_threadpool,
    /// Of the first copy.
    out: *mut sys::ggml_tensor,
    bytes_per_number: f64,
}

// SAFETY: all pointers are to memory that this value owns, and it is used by one thread at a time.
unsafe impl Send for Ggml {}

fn element(dtype: &str) -> Result<sys::ggml_type, Box<dyn Error>> {
    match dtype {
        "f32" => Ok(sys::GGML_TYPE_F32),
        "f16" => Ok(sys::GGML_TYPE_F16),
        "bf16" => Ok(sys::GGML_TYPE_BF16),
        "q8" => Ok(sys::GGML_TYPE_Q8_0),
        other => Err(format!("nothing is stored as {other}").into()),
    }
}

pub(super) fn prepare<'a>(
    task: &Task<'a>,
    graph: Graph,
) -> Result<Box<dyn Peer + 'a>, Box<dyn Error>> {
    let kind = element(task.dtype)?;
    if graph == Graph::Products && task.dtype == "q8" {
        return Err("transposed values cannot be q8_0".into());
    }
    // SAFETY: plain questions about a type that exists; the pool is freed by `drop`.
    let (bytes_per_number, pool) = unsafe {
        let bytes = sys::ggml_type_size(kind) as f64 / sys::ggml_blck_size(kind) as f64;
        let mut params = sys::ggml_threadpool_params_default(task.threads as i32);
        params.poll = 50;
        if task.threads > 1 {
            // One core for each thread, in order.
            params.strict_cpu = true;
            params.cpumask[..task.threads].fill(true);
        }
        (bytes, sys::ggml_threadpool_new(&raw mut params))
    };
    let mut peer = Ggml {
        workload: *task.workload,
        contexts: Vec::new(),
        graphs: Vec::new(),
        work: Vec::new(),
        pool,
        out: ptr::null_mut(),
        bytes_per_number,
    };
    let rows = Rows::new(task);
    for _ in 0..task.copies {
        // SAFETY: see `Builder`; the plan keeps no pointer into `peer` but the pool's, and its work
        // buffer is set before each call.
        unsafe {
            let build = Builder { task, kind, context: peer.context(graph), rows: &rows };
            let out = build.attention(graph);
            let graph = sys::ggml_new_graph(build.context);
            sys::ggml_build_forward_expand(graph, out);
            let plan = sys::ggml_graph_plan(graph, task.threads as i32, peer.pool);
            let need = peer.work.len().max(plan.work_size);
            peer.work.resize(need, 0);
            peer.graphs.push((graph, plan));
            if peer.out.is_null() {
                peer.out = out;
            }
        }
    }
    Ok(Box::new(peer))
}

impl Ggml {
    /// Memory for one copy and its graph, freed by `drop`.
    fn context(&mut self, graph: Graph) -> *mut sys::ggml_context {
        let Workload { batch, sizes, .. } = self.workload;
        let pairs = sizes.n_q * sizes.len;
        let kv = self.kv_bytes() as usize;
        // The scores, scaled and as probabilities.
        let scores =
            if graph == Graph::Products { 3 * batch * sizes.n_heads() * pairs * 4 } else { 0 };
        // Queries and results in a few orders, the mask, and room for the graph.
        let rest = self.workload.q_numbers() * 4 * 6 + pairs * 2 + (16 << 20);
        let params = sys::ggml_init_params {
            mem_size: kv + scores + rest,
            mem_buffer: ptr::null_mut(),
            no_alloc: false,
        };
        // SAFETY: ggml allocates the memory by itself.
        let context = unsafe { sys::ggml_init(params) };
        assert!(!context.is_null(), "ggml has no memory");
        self.contexts.push(context);
        context
    }
}

/// Keys and values in the orders that ggml is handed them.
struct Rows {
    /// `[batch][n_kv_heads][len][width]`.
    k_by_head: Vec<f32>,
    /// The same of values.
    v_by_head: Vec<f32>,
    /// `[batch][n_kv_heads][width][len]`.
    v_transposed: Vec<f32>,
}

impl Rows {
    fn new(task: &Task<'_>) -> Rows {
        let Workload { batch, sizes, .. } = *task.workload;
        let (len, heads, width) = (sizes.len, sizes.n_kv_heads, sizes.k_width);
        let by_head = |rows: &[f32]| {
            let mut out = Vec::with_capacity(rows.len());
            for (sequence, head) in pairs(batch, heads) {
                for position in 0..len {
                    let row = (sequence * len + position) * heads + head;
                    out.extend_from_slice(&rows[row * width..][..width]);
                }
            }
            out
        };
        let v_by_head = by_head(&task.inputs.v);
        let mut v_transposed = Vec::with_capacity(v_by_head.len());
        for rows in v_by_head.chunks(len * width) {
            for column in 0..width {
                v_transposed.extend(rows[column..].iter().step_by(width));
            }
        }
        Rows { k_by_head: by_head(&task.inputs.k), v_by_head, v_transposed }
    }
}

fn pairs(batch: usize, heads: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..batch).flat_map(move |sequence| (0..heads).map(move |head| (sequence, head)))
}

/// Builds one copy. Its functions are unsafe because ggml's are: the context must be alive and
/// have room, and a tensor must be given as many numbers as it has.
struct Builder<'a> {
    task: &'a Task<'a>,
    kind: sys::ggml_type,
    context: *mut sys::ggml_context,
    rows: &'a Rows,
}

impl Builder<'_> {
    /// # Safety
    ///
    /// The context is alive and has the room that [`Ggml::context`] counted.
    unsafe fn attention(&self, graph: Graph) -> *mut sys::ggml_tensor {
        let Task { workload, inputs, .. } = *self.task;
        let Workload { batch, sizes, .. } = *workload;
        let [len, heads, width] = [sizes.len, sizes.n_kv_heads, sizes.k_width];
        let scale = 1.0 / (width as f32).sqrt();
        // SAFETY: the caller's context; every tensor is filled with as many numbers as it has,
        // which the shapes below say.
        unsafe {
            // As llama.cpp has them: [width, heads, tokens], seen with the last two exchanged.
            let q = self.tensor(sys::GGML_TYPE_F32, [width, sizes.n_heads(), sizes.n_q, batch]);
            self.fill(q, sys::GGML_TYPE_F32, &inputs.q, width);
            let q = self.exchanged(q);
            let mask = self.mask();
            let side = |by_position: &[f32], by_head: &[f32]| {
                if graph == Graph::FlashHeadMajor {
                    let tensor = self.tensor(self.kind, [width, len, heads, batch]);
                    self.fill(tensor, self.kind, by_head, width);
                    tensor
                } else {
                    let tensor = self.tensor(self.kind, [width, heads, len, batch]);
                    self.fill(tensor, self.kind, by_position, width);
                    self.exchanged(tensor)
                }
            };
            let k = side(&inputs.k, &self.rows.k_by_head);
            if graph != Graph::Products {
                let v = side(&inputs.v, &self.rows.v_by_head);
                return sys::ggml_flash_attn_ext(self.context, q, k, v, mask, scale, 0.0, 0.0);
            }
            let v = self.tensor(self.kind, [len, width, heads, batch]);
            self.fill(v, self.kind, &self.rows.v_transposed, len);
            let scores = sys::ggml_mul_mat(self.context, k, q);
            let weights = sys::ggml_soft_max_ext(self.context, scores, mask, scale, 0.0);
            let out = sys::ggml_mul_mat(self.context, v, weights);
            sys::ggml_cont(self.context, self.exchanged(out))
        }
    }

    /// # Safety
    ///
    /// The context is alive and has room.
    unsafe fn tensor(&self, kind: sys::ggml_type, shape: [usize; 4]) -> *mut sys::ggml_tensor {
        let [a, b, c, d] = shape.map(|extent| extent as i64);
        // SAFETY: the caller's context.
        unsafe { sys::ggml_new_tensor_4d(self.context, kind, a, b, c, d) }
    }

    /// # Safety
    ///
    /// The tensor is of this context.
    unsafe fn exchanged(&self, tensor: *mut sys::ggml_tensor) -> *mut sys::ggml_tensor {
        // SAFETY: the caller's tensor.
        unsafe { sys::ggml_permute(self.context, tensor, 0, 2, 1, 3) }
    }

    /// Writes rows of `row` numbers.
    ///
    /// # Safety
    ///
    /// The tensor has as many numbers, of this kind.
    unsafe fn fill(
        &self,
        tensor: *mut sys::ggml_tensor,
        kind: sys::ggml_type,
        numbers: &[f32],
        row: usize,
    ) {
        // SAFETY: the caller's tensor has room for all numbers.
        unsafe {
            let to = (*tensor).data;
            if kind == sys::GGML_TYPE_F32 {
                ptr::copy_nonoverlapping(numbers.as_ptr(), to.cast(), numbers.len());
            } else {
                let rows = (numbers.len() / row) as i64;
                sys::ggml_quantize_chunk(
                    kind,
                    numbers.as_ptr(),
                    to,
                    0,
                    rows,
                    row as i64,
                    ptr::null(),
                );
            }
        }
    }

    /// Zero where a query row sees a position and -inf where not, in `f16`. None for decode.
    ///
    /// # Safety
    ///
    /// The context is alive and has room.
    unsafe fn mask(&self) -> *mut sys::ggml_tensor {
        const HIDDEN: u16 = 0xfc00;
        let sizes = self.task.workload.sizes;
        if sizes.n_q == 1 {
            return ptr::null_mut();
        }
        let mut cells = vec![0u16; sizes.n_q * sizes.len];
        for (row, cells) in cells.chunks_mut(sizes.len).enumerate() {
            cells[sizes.len - sizes.n_q + row + 1..].fill(HIDDEN);
        }
        // SAFETY: the caller's context; the tensor has a cell for each pair.
        unsafe {
            let mask = self.tensor(sys::GGML_TYPE_F16, [sizes.len, sizes.n_q, 1, 1]);
            ptr::copy_nonoverlapping(cells.as_ptr(), (*mask).data.cast(), cells.len());
            mask
        }
    }
}

impl Peer for Ggml {
    fn call(&mut self, copy: usize) {
        let (graph, plan) = &mut self.graphs[copy];
        plan.work_data = self.work.as_mut_ptr();
        // SAFETY: the graph and its context are alive, and `work` is as long as any plan needs.
        let status = unsafe { sys::ggml_graph_compute(*graph, plan) };
        assert_eq!(status, sys::GGML_STATUS_SUCCESS, "ggml failed");
    }

    fn answer(&mut self) -> Vec<f32> {
        let len = self.workload.q_numbers();
        // SAFETY: the result has a number for each of the query's, as keys and values are as wide.
        unsafe { core::slice::from_raw_parts((*self.out).data.cast::<f32>(), len) }.to_vec()
    }

    fn kv_bytes(&self) -> f64 {
        self.workload.kv_numbers() as f64 * self.bytes_per_number
    }

    fn wants_rayon(&self) -> bool {
        false
    }
}

impl Drop for Ggml {
    fn drop(&mut self) {
        // SAFETY: made by `prepare`, freed once.
        unsafe {
            sys::ggml_threadpool_free(self.pool);
            for context in &self.contexts {
                sys::ggml_free(*context);
            }
        }
    }
}
