//! One thread for each core, where the system can be told so.
//!
//! On a machine that others use too, the scheduler likes to wake a worker on the core of whoever
//! woke it, and the two then share what one core does. What is timed on several threads is
//! therefore done by pinned ones: the pool's for good, the caller while it is held. Linux alone is
//! told; elsewhere threads stand where the system puts them, and figures are noisier.

use paged_kv::batch::ThreadPool;

/// A pool of `threads` threads. Worker `i` stands on the `i`-th core that this program may use; the
/// caller's is the first, while it is [`held`].
pub(crate) fn pool(threads: usize) -> ThreadPool {
    let cores = system::allowed();
    ThreadPool::with_start_hook(threads, move |worker| system::pin(&cores, worker))
}

/// Keeps the calling thread on its core until this is dropped.
#[derive(Debug)]
pub(crate) struct Held(system::Cores);

/// Holds the calling thread.
pub(crate) fn held() -> Held {
    let cores = system::allowed();
    system::pin(&cores, 0);
    Held(cores)
}

impl Drop for Held {
    fn drop(&mut self) {
        system::allow(&self.0);
    }
}

#[cfg(target_os = "linux")]
mod system {
    #![expect(unsafe_code, reason = "the standard library has no words for cores")]

    /// A bit for each core. As many as the C library's own type has.
    pub(super) type Cores = [u64; 16];

    unsafe extern "C" {
        fn sched_getaffinity(thread: i32, bytes: usize, cores: *mut u64) -> i32;
        fn sched_setaffinity(thread: i32, bytes: usize, cores: *const u64) -> i32;
    }

    /// The cores that the calling thread may use. None if the system does not say.
    pub(super) fn allowed() -> Cores {
        let mut cores = [0; 16];
        // SAFETY: the mask is as long as it says, and zero is the calling thread.
        let failed = unsafe { sched_getaffinity(0, size_of::<Cores>(), cores.as_mut_ptr()) };
        if failed < 0 { [0; 16] } else { cores }
    }

    /// Lets the calling thread use these cores.
    pub(super) fn allow(cores: &Cores) {
        // SAFETY: the mask is as long as it says, and zero is the calling thread. That it may fail is
        // ignored: where it does, a measurement is noisier.
        unsafe { sched_setaffinity(0, size_of::<Cores>(), cores.as_ptr()) };
    }

    /// Lets the calling thread use the core with this place among `cores`, counted round and round.
    pub(super) fn pin(cores: &Cores, place: usize) {
        let bits = 0..64 * cores.len();
        let each: Vec<usize> = bits.filter(|bit| cores[bit / 64] >> (bit % 64) & 1 == 1).collect();
        if let Some(place) = place.checked_rem(each.len()) {
            let mut one = [0; 16];
            one[each[place] / 64] = 1 << (each[place] % 64);
            allow(&one);
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub(super) type Cores = ();

    pub(super) fn allowed() -> Cores {}

    pub(super) fn allow(_: &Cores) {}

    pub(super) fn pin(_: &Cores, _: usize) {}
}
