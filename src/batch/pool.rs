//! Threads of one's own, which wait by spinning for a while and then sleep.
//!
//! Attention over a thousand positions takes tens of microseconds. Waking a sleeping thread takes
//! about as long, so workers that have just worked spin for a while before they park, and find the
//! next layer's run while they do. On a machine with more threads than cores a worker may get
//! no core for milliseconds; so nothing here waits for a worker that has not begun.
//!
//! # The protocol
//!
//! Two counters. A run is there to be worked on when and only when `unclaimed` is not 0.
//!
//! ```text
//! caller   job = &run;  unfinished = n;  unclaimed = n;  wake sleepers;  work;  wait: unfinished == 0
//! anyone   work:  while unclaimed -= 1 succeeds { do chunk n - what it was }  unfinished -= done
//! ```
//!
//! - *A claim comes first, the job is looked at afterwards.* Who holds a claim has not lowered
//!   `unfinished` by it yet, so the caller is still waiting, its frame is there and the job is the
//!   one whose chunk was claimed. That is the whole argument for the `unsafe` below. In particular
//!   it does not matter how old a worker's idea of the world is: if its step from 5 to 4 succeeds,
//!   it holds a chunk of the run that is there *now*, if it saw 5 in the run before.
//! - *A worker that comes late finds 0* and touches nothing. The caller does not know of it.
//! - The claim is a compare-and-swap and not a `fetch_sub`, because 0 has to stay 0: a late worker's
//!   step below it would be a claim that nobody can tell from a true one.
//! - `unclaimed` counts down and so needs no second word for how many there are, nor an age.
//!   Chunks are begun in ascending order.
//! - *A panic* takes all that is unclaimed for itself, does none of it, and counts it as done.
//!
//! Tried and left: a count of the workers inside a run, with a gate that the caller closes. It
//! makes the caller wait for a worker that entered, claimed nothing and lost its core.
//!
//! Checked by a model of every order of steps (`pool/loom_tests.rs`), which notices each ordering
//! of the run's words that is weakened to relaxed, and under ThreadSanitizer (`pool/tests.rs` has
//! the command).
//!
//! The sleepers' flags decide who is woken. If one were missed, a run would be slower and nothing
//! else; they are sequentially consistent so that none is.

#![expect(unsafe_code, reason = "threads that outlive a run work on what it borrows")]

use alloc::boxed::Box;
use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::any::Any;
use core::fmt;
use core::panic::AssertUnwindSafe;
use core::ptr;
use core::slice;
use std::panic::{catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};

use self::below::{mpsc, spin_loop, thread};
use super::executor::{Executor, Inline, count_chunks};
use crate::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// What the pool stands on, and what the model checker puts in its place.
mod below {
    #[cfg(not(all(test, loom)))]
    pub(super) use core::hint::spin_loop;
    #[cfg(not(all(test, loom)))]
    pub(super) use std::{sync::mpsc, thread};

    #[cfg(all(test, loom))]
    pub(super) use loom::{hint::spin_loop, sync::mpsc, thread};
}

/// How often a worker looks for work before it sleeps: 1024 pauses, which last 25 to 50 ns each on
/// processors of today, and 8 yields of half a microsecond make 30 to 55 us (29 us where the figures
/// of this room were taken). The next layer of a small model begins within that; a step of
/// something else between two layers takes longer than it is polite to hold a core for.
const LOOKS: u32 = if cfg!(all(test, loom)) { 2 } else { 1024 };

/// After how many looks a thread that waits offers its core to others, one of which may be what it
/// waits for.
const LOOKS_PER_YIELD: u32 = if cfg!(all(test, loom)) { 1 } else { 128 };

/// What a panic leaves behind.
type Payload = Box<dyn Any + Send>;

/// Threads that wait for work: `n` in all, of which the caller of a run is one.
///
/// Workers spin for some tens of microseconds after each run and sleep afterwards. Runs do not
/// depend on them: the caller works too, and returns as soon as every chunk that was begun is
/// done, whoever woke up.
///
/// ```
/// use paged_kv::batch::{Executor, ThreadPool};
///
/// let pool = ThreadPool::new(2);
/// let mut data = [0.0; 5];
/// pool.for_each_chunk(&mut data, 2, &|index, chunk| chunk.fill(index as f32));
/// assert_eq!(data, [0.0, 0.0, 1.0, 1.0, 2.0]);
/// ```
///
/// # One run at a time
///
/// A run that is started while another has the workers, by another thread or from inside its own
/// work, is done by its caller alone. So it never waits, and cannot wait for itself.
///
/// # Panics in work
///
/// Are caught, on whichever thread, and go on at the caller when all have stopped; chunks that had
/// not begun are left out. Of several panics the first goes on. The pool can be used again.
///
/// # Cost
///
/// A run allocates nothing. Each chunk is claimed by one atomic step; at the end its caller takes a
/// lock that is held only by a thread that puts a panic there. Waking a worker that sleeps is a call of the operating system, some
/// microseconds of the caller's time. Dropping the pool waits for its workers to end.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<thread::JoinHandle<()>>,
    /// Whether a run has the workers.
    taken: AtomicBool,
}

impl ThreadPool {
    /// A pool of `threads` threads, of which the caller of a run is one: `threads - 1` are started.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::batch::{Executor, ThreadPool};
    ///
    /// let pool = ThreadPool::new(3); // starts two
    /// assert_eq!(pool.threads(), 3);
    /// let mut squares = [0.0; 100];
    /// pool.for_each_chunk(&mut squares, 1, &|index, chunk| chunk[0] = (index * index) as f32);
    /// assert_eq!(squares[99], 9801.0);
    /// ```
    ///
    /// # Panics
    ///
    /// If `threads` is 0, or if the operating system will not start so many.
    #[track_caller]
    pub fn new(threads: usize) -> Self {
        Self::with_start_hook(threads, |_| {})
    }

    /// As [`new`](Self::new), where each worker first calls `hook` with its number, from 1 on; 0
    /// would be the caller, which is left alone. When this returns, all have done so.
    ///
    /// This is the place to pin workers to cores or to name a priority, for which the standard
    /// library has no words.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use paged_kv::batch::ThreadPool;
    ///
    /// let pinned = Arc::new(Mutex::new(Vec::new()));
    /// let list = Arc::clone(&pinned);
    /// // In earnest: pin the thread that calls to the core of this number.
    /// let pool = ThreadPool::with_start_hook(3, move |core| list.lock().unwrap().push(core));
    /// let mut cores = pinned.lock().unwrap();
    /// cores.sort();
    /// assert_eq!(*cores, [1, 2]);
    /// # drop(pool);
    /// ```
    ///
    /// # Panics
    ///
    /// As [`new`](Self::new), and if the hook panics, with its panic.
    #[track_caller]
    pub fn with_start_hook<H>(threads: usize, hook: H) -> Self
    where
        H: Fn(usize) + Send + Sync + 'static,
    {
        if threads == 0 {
            no_threads();
        }
        let mut asleep = Vec::new();
        if let Err(error) = asleep.try_reserve_exact(threads - 1) {
            not_started(&error);
        }
        asleep.extend((1..threads).map(|_| Line(AtomicBool::new(false))));
        let shared = Arc::new(Shared {
            unclaimed: Line(AtomicUsize::new(0)),
            unfinished: Line(AtomicUsize::new(0)),
            job: AtomicPtr::new(ptr::null_mut()),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            asleep: asleep.into(),
        });
        // From here on a panic drops the pool, which stops what has been started.
        let mut pool = ThreadPool { shared, workers: Vec::new(), taken: AtomicBool::new(false) };
        let hook = Arc::new(hook);
        let (started, starts) = mpsc::channel();
        for index in 1..threads {
            let (shared, hook, started) = (pool.shared.clone(), hook.clone(), started.clone());
            let worker = move || {
                let result = catch_unwind(AssertUnwindSafe(move || hook(index)));
                let _ = started.send(result);
                shared.serve(index - 1);
            };
            match thread::Builder::new().name(format!("paged-kv {index}")).spawn(worker) {
                Ok(worker) => pool.workers.push(worker),
                Err(error) => not_started(&error),
            }
        }
        for _ in 1..threads {
            if let Err(payload) = starts.recv().expect("every worker sends once") {
                drop(pool);
                resume_unwind(payload);
            }
        }
        pool
    }
}

impl Executor for ThreadPool {
    fn for_each_chunk(
        &self,
        data: &mut [f32],
        chunk: usize,
        work: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        let count = count_chunks(data, chunk);
        // Acquire and Release on `taken` hand the counters and the job from one run to the next.
        if count < 2
            || self.workers.is_empty()
            || self
                .taken
                .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
                .is_err()
        {
            return Inline.for_each_chunk(data, chunk, work);
        }
        let job = Job { data: data.as_mut_ptr(), len: data.len(), chunk, count, work };
        let panic = self.shared.run(&job, &self.workers);
        self.taken.store(false, Ordering::Release);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    fn threads(&self) -> usize {
        self.workers.len() + 1
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        // Runs borrow the pool, so there is none.
        self.shared.stop.store(true, Ordering::Release);
        for worker in self.workers.drain(..) {
            // Whether it sleeps or not: if it is about to, this keeps it from it.
            worker.thread().unpark();
            // Nothing that panics runs on a worker uncaught.
            let _ = worker.join();
        }
    }
}

impl fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadPool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

/// A run, in the frame of its caller.
struct Job<'a> {
    /// The first of `len` numbers that are this run's alone.
    data: *mut f32,
    len: usize,
    chunk: usize,
    count: usize,
    work: &'a (dyn Fn(usize, &mut [f32]) + Sync),
}

/// What the threads of a pool share.
struct Shared {
    /// Chunks of the present run that nobody has claimed. 0 between runs.
    unclaimed: Line<AtomicUsize>,
    /// Chunks of the present run that are not known to be done. 0 between runs.
    unfinished: Line<AtomicUsize>,
    /// The present run; between runs it dangles. Only a [`Claim`] gives the right to look at it.
    job: AtomicPtr<Job<'static>>,
    /// Whether the workers are to end.
    stop: AtomicBool,
    /// The first panic of the present run.
    panic: Mutex<Option<Payload>>,
    /// For each worker, whether it has to be woken.
    asleep: Box<[Line<AtomicBool>]>,
}

/// The right and the duty to do one chunk: how many were unclaimed before it was taken.
///
/// Each is worth one of `unfinished`, which must not be lowered by it before it is done.
struct Claim(usize);

/// What is written by one thread while others read its neighbours has its line to itself, and
/// the line beside it, which is prefetched with it.
#[repr(align(128))]
struct Line<T>(T);

impl Shared {
    /// Does `job` with whoever comes to help, and gives back the first panic.
    fn run(&self, job: &Job<'_>, workers: &[thread::JoinHandle<()>]) -> Option<Payload> {
        let count = job.count;
        debug_assert_eq!(self.unclaimed.0.load(Ordering::Relaxed), 0);
        debug_assert_eq!(self.unfinished.0.load(Ordering::Relaxed), 0);
        self.job.store(ptr::from_ref(job).cast_mut().cast(), Ordering::Relaxed);
        self.unfinished.0.store(count, Ordering::Relaxed);
        // Releases all of the above to those who claim.
        self.unclaimed.0.store(count, Ordering::SeqCst);
        self.wake(count - 1, workers);
        // Catches what panics, so that the wait below is never left out.
        self.work();
        let mut looks = 0;
        // Acquires all that was done, from everyone who lowered it.
        while self.unfinished.0.load(Ordering::Acquire) != 0 {
            pause(&mut looks);
        }
        self.panic.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Wakes workers until `helpers` are awake.
    fn wake(&self, helpers: usize, workers: &[thread::JoinHandle<()>]) {
        let is_asleep = |flag: &Line<AtomicBool>| flag.0.load(Ordering::SeqCst);
        let awake = self.asleep.iter().filter(|flag| !is_asleep(flag)).count();
        let mut missing = helpers.saturating_sub(awake);
        for (flag, worker) in self.asleep.iter().zip(workers) {
            if missing == 0 {
                return;
            }
            // Taking the flag down counts it as awake for the next run, and wakes it once.
            if is_asleep(flag) && flag.0.swap(false, Ordering::SeqCst) {
                worker.thread().unpark();
                missing -= 1;
            }
        }
    }

    /// What a worker does from its start to its end.
    fn serve(&self, worker: usize) {
        while self.wait(worker) {
            self.work();
        }
    }

    /// Returns true when there is work, false when the pool ends.
    fn wait(&self, worker: usize) -> bool {
        loop {
            let mut looks = 0;
            while looks < LOOKS {
                if self.stop.load(Ordering::Acquire) {
                    return false;
                }
                // Relaxed: a claim will tell.
                if self.unclaimed.0.load(Ordering::Relaxed) != 0 {
                    return true;
                }
                pause(&mut looks);
            }
            // First the flag, then another look, while the caller first opens the run and then
            // looks at the flag: one of the two sees the other.
            let asleep = &self.asleep[worker].0;
            asleep.store(true, Ordering::SeqCst);
            if self.unclaimed.0.load(Ordering::SeqCst) == 0 && !self.stop.load(Ordering::SeqCst) {
                // Returns at once if it was woken in between, and sometimes for no reason.
                thread::park();
            }
            // Whoever wakes a worker has done this; needed where nobody did.
            asleep.store(false, Ordering::SeqCst);
        }
    }

    /// Does chunks of the present run, if there is one, until none is unclaimed.
    fn work(&self) {
        let mut done = 0;
        while let Some(claim) = self.claim() {
            done += 1;
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| self.do_chunk(claim))) {
                self.keep(payload);
                // What is unclaimed is claimed and left undone.
                done += self.unclaimed.0.swap(0, Ordering::Relaxed);
            }
        }
        // A thread that held no claim has no part in the run that may be there by now.
        if done > 0 {
            // Releases what was done. From here on the job may be gone.
            self.unfinished.0.fetch_sub(done, Ordering::Release);
        }
    }

    fn claim(&self) -> Option<Claim> {
        self.unclaimed
            .0
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |unclaimed| {
                unclaimed.checked_sub(1)
            })
            .ok()
            .map(Claim)
    }

    fn do_chunk(&self, Claim(unclaimed): Claim) {
        let job = self.job.load(Ordering::Relaxed);
        // SAFETY: `run` stored a pointer to a job that its caller lends it until it returns, and
        // which nobody changes. It returns when `unfinished` is 0, and of that this claim is still
        // a part: `work` subtracts it after this function has returned, and with it this
        // reference. It is the pointer of the run that was claimed from: its store comes before
        // that run's store to `unclaimed`, which the claim acquired (directly or through other
        // claims), and the next run's comes after `unfinished` was 0.
        let job = unsafe { &*job };
        // `unclaimed` is at least 1, so this is less than `count`, and the start less than `len`.
        let index = job.count - unclaimed;
        let start = index * job.chunk;
        let len = usize::min(job.chunk, job.len - start);
        // SAFETY: `start` is less than `len` of the slice that `data` points to.
        let data = unsafe { job.data.add(start) };
        // SAFETY: `len` numbers from `start` on are inside of the slice, which the caller of the
        // run holds exclusively and does not touch before `unfinished` is 0. `unclaimed` passes
        // through each value once in a run, so no other claim has this index, and the chunks of
        // two indices do not overlap.
        let data = unsafe { slice::from_raw_parts_mut(data, len) };
        (job.work)(index, data);
    }

    /// Keeps the first panic.
    fn keep(&self, payload: Payload) {
        let mut kept = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
        match *kept {
            None => *kept = Some(payload),
            // Dropping it could panic in its turn, with claims still held.
            Some(_) => core::mem::forget(payload),
        }
    }
}

/// A moment of waiting: a hint to the processor, now and then a chance for other threads.
fn pause(looks: &mut u32) {
    *looks = looks.wrapping_add(1);
    if looks.is_multiple_of(LOOKS_PER_YIELD) {
        thread::yield_now();
    } else {
        spin_loop();
    }
}

#[cold]
#[inline(never)]
#[track_caller]
fn no_threads() -> ! {
    panic!("a pool of 0 threads has no place for its caller");
}

#[cold]
#[inline(never)]
#[track_caller]
fn not_started(error: &dyn fmt::Display) -> ! {
    panic!("a worker of the pool could not be started: {error}");
}

#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod loom_tests;
