//! Keeping the machine still while something is timed.
//!
//! On a machine that others use too, the scheduler likes to wake a second worker on the first
//! one's core, and a barrier that spins then costs a time slice of 4 ms: numbers ten to a hundred
//! times too high. So with several threads every peer has one pinned thread for each core. With
//! `PEERS_RT=1` (root) all threads of this process are real-time while they are timed. With
//! `PEERS_RT=2` and one thread a spinner keeps the second core still as well, so that nobody there
//! takes part of the memory's bandwidth.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::thread;
use std::time::Instant;

unsafe extern "C" {
    fn sched_setaffinity(thread: i32, bytes: usize, mask: *const u64) -> i32;
    fn sched_setscheduler(thread: i32, policy: i32, priority: *const i32) -> i32;
}

/// How still.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Still {
    No,
    RealTime,
    OtherCoreToo,
}

fn wanted() -> Still {
    match std::env::var("PEERS_RT").as_deref() {
        Ok("1") => Still::RealTime,
        Ok("2") => Still::OtherCoreToo,
        _ => Still::No,
    }
}

/// Whether threads are to be pinned.
pub(crate) fn pins(threads: usize) -> bool {
    threads > 1 || wanted() == Still::OtherCoreToo
}

/// Pins the calling thread to one core.
pub(crate) fn pin(core: usize) {
    let mut mask = [0; WORDS];
    mask[core / 64] |= 1 << (core % 64);
    set_affinity(&mask);
}

const WORDS: usize = 16;

fn set_affinity(mask: &[u64; WORDS]) {
    // SAFETY: the mask is as long as it says. Zero is the calling thread. That it may fail is
    // ignored: where it does, a measurement is noisier.
    unsafe { sched_setaffinity(0, size_of_val(mask), mask.as_ptr()) };
}

/// Stillness, until it is dropped.
#[derive(Debug)]
pub(crate) struct Guard(());

static HOLD: AtomicBool = AtomicBool::new(false);

/// Pins the calling thread, and does what `PEERS_RT` says.
pub(crate) fn still(threads: usize) -> Guard {
    if pins(threads) {
        pin(0);
    }
    if wanted() == Still::OtherCoreToo && threads == 1 {
        HOLD.store(true, Ordering::SeqCst);
        thread::spawn(|| {
            pin(1);
            while HOLD.load(Ordering::Relaxed) {
                core::hint::spin_loop();
            }
        });
        // It has to be there before it is made real-time with the others.
        thread::sleep(Duration::from_millis(5));
    }
    if wanted() != Still::No {
        set_real_time(true);
    }
    Guard(())
}

impl Drop for Guard {
    fn drop(&mut self) {
        HOLD.store(false, Ordering::SeqCst);
        if wanted() != Still::No {
            set_real_time(false);
        }
        set_affinity(&[u64::MAX; WORDS]);
    }
}

/// All threads of this process.
fn set_real_time(on: bool) {
    const OTHER: i32 = 0;
    const FIFO: i32 = 1;
    let (policy, priority) = if on { (FIFO, 10) } else { (OTHER, 0) };
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return };
    let names = threads.flatten().map(|entry| entry.file_name());
    for thread in names.filter_map(|name| name.to_string_lossy().parse().ok()) {
        // SAFETY: `struct sched_param` is one int on Linux, which the kernel reads.
        unsafe { sched_setscheduler(thread, policy, &raw const priority) };
    }
}

/// Keeps the second core still for the harness in Python, which starts this program and ends it;
/// for 20 seconds at most.
pub(crate) fn hold() {
    pin(1);
    set_real_time(true);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(20) {
        (0..10_000).for_each(|_| core::hint::spin_loop());
    }
}
