//! What is under the program: how it starts, speaks, counts instructions and ends.
//!
//! Each board has `say` for a line of text, `instructions` for a count that goes up, `heap_used` for
//! the bytes that are allocated, and calls [`run`](crate::run) once. One more processor is one more
//! file here and its memory in `build.rs`.

#[cfg(all(target_os = "none", target_arch = "arm"))]
mod cortex_m;
#[cfg(not(target_os = "none"))]
mod host;
#[cfg(all(target_os = "none", target_arch = "riscv32"))]
mod riscv;

#[cfg(all(target_os = "none", target_arch = "arm"))]
pub(crate) use cortex_m::{COUNTED_TO, finish, instructions, say};
#[cfg(not(target_os = "none"))]
pub(crate) use host::{COUNTED_TO, heap_used, instructions, say, start};
#[cfg(all(target_os = "none", target_arch = "riscv32"))]
pub(crate) use riscv::{COUNTED_TO, finish, instructions, say};

/// The boards without a system: a heap in a static arena, and an end for those who panic.
#[cfg(target_os = "none")]
mod bare {
    use core::panic::PanicInfo;

    use embedded_alloc::LlffHeap as Heap;

    #[global_allocator]
    static HEAP: Heap = Heap::empty();

    /// Pages of five layers take 200 KiB in `f32`; what is beside them is tables, rows and scratch.
    const ARENA: usize = if cfg!(feature = "grid") { 3 << 20 } else { 224 << 10 };

    /// Gives the arena to the heap; before anything is allocated.
    pub(super) fn open_heap() {
        // SAFETY: a board calls it once, and nobody else names the arena.
        unsafe {
            embedded_alloc::init!(HEAP, ARENA);
        }
    }

    pub(crate) fn heap_used() -> Option<usize> {
        Some(HEAP.used())
    }

    #[panic_handler]
    fn panic(info: &PanicInfo<'_>) -> ! {
        super::say(format_args!("{info}"));
        super::finish(false)
    }
}

#[cfg(target_os = "none")]
pub(crate) use bare::heap_used;
