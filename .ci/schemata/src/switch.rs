//! Which mutant is switched on, in the copy of the crate that has them all: the number in the
//! environment's `MUTANT`, none without it. With `MUTANTS_REACHED` each switch that is reached is
//! written to that file, once.
//!
//! Asked by everything, from under the allocator to constants: so it allocates nothing, takes no
//! lock and, while something is compiled, says that none is on.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

unsafe extern "C" {
    fn getenv(name: *const c_char) -> *const c_char;
    fn open(path: *const c_char, flags: c_int, mode: c_int) -> c_int;
    fn write(file: c_int, bytes: *const c_void, count: usize) -> isize;
}

const UNKNOWN: u32 = u32::MAX;
const RECORDS: u32 = u32::MAX - 1;
const NONE: u32 = u32::MAX - 2;

static ON: AtomicU32 = AtomicU32::new(UNKNOWN);
static NOTES: AtomicI32 = AtomicI32::new(-1);
static NOTED: [AtomicBool; 1 << 14] = [const { AtomicBool::new(false) }; 1 << 14];

/// The mutant that is on, asked at this switch.
#[inline(always)]
pub(crate) const fn on(switch: u32) -> u32 {
    core::intrinsics::const_eval_select((switch,), on_compiling, on_running)
}

const fn on_compiling(_: u32) -> u32 {
    NONE
}

#[inline(always)]
fn on_running(switch: u32) -> u32 {
    match ON.load(Ordering::Acquire) {
        on @ ..=NONE => on,
        on => find_out(on, switch),
    }
}

#[cold]
fn find_out(mut on: u32, switch: u32) -> u32 {
    if on == UNKNOWN {
        // SAFETY: the strings end in zeros, and no test changes the environment.
        on = unsafe {
            let (number, notes) = (getenv(c"MUTANT".as_ptr()), getenv(c"MUTANTS_REACHED".as_ptr()));
            if !number.is_null() {
                let digits = CStr::from_ptr(number).to_bytes().iter();
                digits.fold(0, |number, digit| number * 10 + u32::from(digit - b'0'))
            } else if !notes.is_null() {
                // To write, made if missing, at the end.
                NOTES.store(open(notes, 0o1 | 0o100 | 0o2000, 0o644), Ordering::Relaxed);
                RECORDS
            } else {
                NONE
            }
        };
        ON.store(on, Ordering::Release);
    }
    if on != RECORDS {
        return on;
    }
    if !NOTED[switch as usize].swap(true, Ordering::Relaxed) {
        let mut line = *b"00000\n";
        let mut left = switch;
        for digit in line[..5].iter_mut().rev() {
            *digit = b'0' + (left % 10) as u8;
            left /= 10;
        }
        // SAFETY: that many bytes are there.
        unsafe { write(NOTES.load(Ordering::Relaxed), line.as_ptr().cast(), line.len()) };
    }
    NONE
}
