//! The trait of those who run chunks, the one that has no threads, and rayon's.

#[cfg(feature = "rayon")]
use rayon::iter::{ParallelBridge, ParallelIterator};

/// Runs work on the chunks of an array.
///
/// [`Inline`] has no threads, `ThreadPool` (feature `std`) has its own, `Rayon` (feature `rayon`)
/// has rayon's. Where threads are somebody else's already, an executor of one's own is short. It
/// needs no `unsafe`, because the chunks are disjoint:
///
/// ```
/// use std::sync::Mutex;
/// use std::thread;
///
/// use paged_kv::batch::Executor;
///
/// /// Starts its threads anew each time, which costs 30 us and more: a sketch, not a proposal.
/// struct Scoped(usize);
///
/// impl Executor for Scoped {
///     fn for_each_chunk(
///         &self,
///         data: &mut [f32],
///         chunk: usize,
///         work: &(dyn Fn(usize, &mut [f32]) + Sync),
///     ) {
///         let chunks = Mutex::new(data.chunks_mut(chunk).enumerate());
///         // A function of its own: in a `while let`, the lock would be held during the work.
///         let next = || chunks.lock().unwrap().next();
///         thread::scope(|scope| {
///             for _ in 0..self.0 {
///                 scope.spawn(|| {
///                     while let Some((index, chunk)) = next() {
///                         work(index, chunk);
///                     }
///                 });
///             }
///         });
///     }
///
///     fn threads(&self) -> usize {
///         self.0
///     }
/// }
///
/// let mut data = [0.0; 10];
/// Scoped(3).for_each_chunk(&mut data, 4, &|index, chunk| chunk.fill(index as f32));
/// assert_eq!(data, [0., 0., 0., 0., 1., 1., 1., 1., 2., 2.]);
/// ```
pub trait Executor {
    /// Calls `work(i, chunk i of data)` once for each chunk of `chunk` numbers, of which the last
    /// may be shorter, on any threads, and returns when all are done. No numbers, no calls. Chunks
    /// are handed out in their place, not as copies: what work leaves there is looked for by its
    /// address, too.
    ///
    /// Chunks should be begun in ascending order, one at a time by whoever is free: the heavy ones
    /// come first. Nothing but time depends on it.
    ///
    /// # Panics
    ///
    /// If `chunk` is 0, before anything runs. If `work` panics, its panic goes on here when nothing
    /// of this run is at work any more; chunks that had not begun may then be left out.
    fn for_each_chunk(
        &self,
        data: &mut [f32],
        chunk: usize,
        work: &(dyn Fn(usize, &mut [f32]) + Sync),
    );

    /// How many threads work at once, at least 1. A hint, for deciding into how many parts work is
    /// worth being cut.
    fn threads(&self) -> usize;
}

/// Does all the work itself, one chunk after the other. Needs neither `std` nor atomics.
///
/// ```
/// use paged_kv::batch::{Executor, Inline};
///
/// let mut data = [0.0; 5];
/// Inline.for_each_chunk(&mut data, 2, &|index, chunk| chunk.fill(index as f32));
/// assert_eq!(data, [0.0, 0.0, 1.0, 1.0, 2.0]);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Inline;

impl Executor for Inline {
    fn for_each_chunk(
        &self,
        data: &mut [f32],
        chunk: usize,
        work: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        count_chunks(data, chunk);
        for (index, chunk) in data.chunks_mut(chunk).enumerate() {
            work(index, chunk);
        }
    }

    fn threads(&self) -> usize {
        1
    }
}

/// Runs on rayon's threads: those of the pool it is called in, or of a given one.
///
/// ```
/// use paged_kv::batch::{Executor, Rayon};
///
/// let mut data = [0.0; 5];
/// Rayon::current().for_each_chunk(&mut data, 2, &|index, chunk| chunk.fill(index as f32));
/// assert_eq!(data, [0.0, 0.0, 1.0, 1.0, 2.0]);
/// ```
///
/// # Cost
///
/// Some small allocations and one lock a run, which is taken for as long as it takes to step to
/// the next chunk, once for each. A caller that is not one of rayon's threads also waits until one
/// of them has woken up; call from inside the pool where that matters.
///
/// The chunks are drawn from one iterator (`par_bridge`), in ascending order. Rayon's own
/// `par_chunks_mut` halves the array instead, whatever its `with_max_len`, and a second thread
/// begins in the middle, so the heavy chunks in front would be one thread's alone. A broadcast
/// with a counter would wait for the slowest thread of the pool to wake up; here a thread that
/// comes late finds nothing, and nobody waits for it.
#[cfg(feature = "rayon")]
#[derive(Clone, Copy, Debug, Default)]
pub struct Rayon<'a> {
    /// None for the pool that the call is made in.
    pool: Option<&'a rayon::ThreadPool>,
}

#[cfg(feature = "rayon")]
impl<'a> Rayon<'a> {
    /// The pool that a call is made in; outside of any, rayon's global one.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::batch::{Executor, Rayon};
    ///
    /// let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build()?;
    /// assert_eq!(pool.install(|| Rayon::current().threads()), 3);
    /// # Ok::<(), rayon::ThreadPoolBuildError>(())
    /// ```
    pub fn current() -> Self {
        Rayon { pool: None }
    }

    /// The threads of `pool`.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::batch::{Executor, Rayon};
    ///
    /// let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build()?;
    /// let executor = Rayon::of(&pool); // also where the caller is none of its threads
    /// assert_eq!(executor.threads(), 3);
    /// # Ok::<(), rayon::ThreadPoolBuildError>(())
    /// ```
    pub fn of(pool: &'a rayon::ThreadPool) -> Self {
        Rayon { pool: Some(pool) }
    }
}

#[cfg(feature = "rayon")]
impl Executor for Rayon<'_> {
    fn for_each_chunk(
        &self,
        data: &mut [f32],
        chunk: usize,
        work: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        if count_chunks(data, chunk) == 0 {
            return;
        }
        let mut run = || {
            let chunks = data.chunks_mut(chunk).enumerate();
            chunks.par_bridge().for_each(|(index, chunk)| work(index, chunk));
        };
        match self.pool {
            Some(pool) => pool.install(run),
            None => run(),
        }
    }

    fn threads(&self) -> usize {
        match self.pool {
            Some(pool) => pool.current_num_threads(),
            None => rayon::current_num_threads(),
        }
    }
}

/// How many chunks of `chunk` numbers there are, or the panic that the trait documents.
pub(super) fn count_chunks(data: &[f32], chunk: usize) -> usize {
    if chunk == 0 {
        zero_chunk();
    }
    data.len().div_ceil(chunk)
}

#[cold]
#[inline(never)]
#[track_caller]
fn zero_chunk() -> ! {
    panic!("chunks of 0 numbers never come to an end");
}
