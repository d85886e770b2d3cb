//! A Cortex-M4F: the program speaks through the debugger, which QEMU is as well.

use core::fmt;

use cortex_m::peripheral::SYST;
use cortex_m::peripheral::syst::SystClkSource;
use cortex_m_rt::entry;
use cortex_m_semihosting::{debug, hprintln};

#[entry]
fn start() -> ! {
    super::bare::open_heap();
    if let Some(core) = cortex_m::Peripherals::take() {
        let mut timer = core.SYST;
        timer.set_clock_source(SystClkSource::Core);
        timer.set_reload(TICKS - 1);
        timer.clear_current();
        timer.enable_counter();
    }
    let good = crate::run();
    say(format_args!("stack {} bytes", stack_used()));
    finish(good)
}

pub(crate) fn say(text: fmt::Arguments<'_>) {
    hprintln!("{}", text);
}

pub(crate) fn finish(good: bool) -> ! {
    debug::exit(if good { debug::EXIT_SUCCESS } else { debug::EXIT_FAILURE });
    loop {
        cortex_m::asm::wfi();
    }
}

/// The timer counts 24 bits down.
const TICKS: u32 = 1 << 24;

/// Under `qemu -icount shift=0` an instruction takes a nanosecond, and the board's clock has 25 MHz.
const INSTRUCTIONS_PER_TICK: u64 = 40;

/// Where the count begins again. Two readings are less than that apart.
pub(crate) const COUNTED_TO: u64 = TICKS as u64 * INSTRUCTIONS_PER_TICK;

/// Goes up by one for each instruction, in steps of 40.
pub(crate) fn instructions() -> Option<u64> {
    Some(u64::from(TICKS - 1 - SYST::get_current()) * INSTRUCTIONS_PER_TICK)
}

/// Bytes of the stack that were ever written: it was painted before `start`.
fn stack_used() -> usize {
    unsafe extern "C" {
        static mut _stack_end: u32;
        static mut _stack_start: u32;
    }
    let (mut at, top) = (&raw const _stack_end, &raw const _stack_start);
    // SAFETY: words between the two ends of the stack, which is all RAM.
    while at < top && unsafe { at.read_volatile() } == cortex_m_rt::STACK_PAINT_VALUE {
        at = at.wrapping_add(1);
    }
    top as usize - at as usize
}
