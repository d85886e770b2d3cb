//! QEMU's 32-bit RISC-V board `virt`: a serial line, and a register that ends the machine.

use core::fmt::{self, Write};

use riscv_rt::entry;

#[entry]
fn start() -> ! {
    super::bare::open_heap();
    finish(crate::run())
}

/// The data register of a 16550.
const SERIAL: *mut u8 = 0x1000_0000 as *mut u8;

/// Written, it ends the emulator: with 0, or with the number in its upper half.
const FINISHER: *mut u32 = 0x10_0000 as *mut u32;

struct Serial;

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: the register is there on this board, and takes any byte; QEMU's is never full.
            unsafe { SERIAL.write_volatile(byte) };
        }
        Ok(())
    }
}

pub(crate) fn say(text: fmt::Arguments<'_>) {
    // It cannot fail.
    let _ = writeln!(Serial, "{text}");
}

pub(crate) fn finish(good: bool) -> ! {
    let word = if good { 0x5555 } else { 1 << 16 | 0x3333 };
    // SAFETY: the register is there on this board.
    unsafe { FINISHER.write_volatile(word) };
    loop {
        riscv::asm::wfi();
    }
}

/// Instructions that were carried out; under QEMU with `-icount shift=0` alone.
pub(crate) fn instructions() -> Option<u64> {
    Some(riscv::register::minstret::read64())
}

/// Where the count begins again.
pub(crate) const COUNTED_TO: u64 = u64::MAX;
