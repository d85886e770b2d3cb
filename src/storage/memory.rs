//! Page memory: lines of 64 bytes, zeroed and had lazily, or brought by the caller.
//!
//! ```text
//! allocated or brought   | skipped | line 0 | line 1 | ... | last line | spare | left over |
//!                                  ^ a line's address; a huge page's where the system has them
//! ```
//!
//! Opening a large pool must cost nothing until its pages are written, and memory that nobody
//! has written must never be undefined. The allocator's zeroed pages give both, but only for the
//! alignment it hands out by itself: asked for more, std allocates and then clears by hand, which
//! touches every page. So the memory is asked for as bytes, with room to move, and the first
//! aligned address in it is where the pages begin. What a caller brings is a run of bytes too, and
//! is treated the same: it has one owner here, [`Memory`].
//!
//! # The spare line
//!
//! Behind the last line that was asked for there is always one more, which belongs to nobody and
//! may be read ([`Memory::with_slack`]). A kernel that reads a whole vector where a tile has a few
//! numbers left then needs no second path for the last tile of the last block.
//!
//! # Huge pages
//!
//! Attention reads a pool from end to end, and with pages of 4 KiB it misses the translation
//! buffer once in 64 lines. Under std on Linux, memory of 2 MiB and more begins on 2 MiB, is
//! rounded up to 2 MiB, so that its first and last huge page are whole, and is advised to the
//! system as such. That is address space, not memory: nothing is touched. Advice is advice; where
//! it is refused, pages are small, and nothing else changes. Memory that the caller brings is the
//! caller's to advise.
//!
//! # What is unsafe here
//!
//! A pointer into a buffer that this file owns, and the two slices that are made of it. A slice
//! kept beside its vector would be a borrow of itself, a `Box` may not be pointed into while it
//! moves, and finding the aligned part again at each use costs the hot path three checks a tile.

#![expect(
    unsafe_code,
    reason = "lines that stand at a computed place in a buffer, reached without a check"
)]

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ptr::NonNull;
use core::slice;

use bytemuck::allocation::try_zeroed_slice_box;
use bytemuck::{Pod, Zeroable};

use crate::element::tile::LINE;
use crate::error::ShapeError;

/// One cache line of page memory.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line([u64; 8]);

const _: () = assert!(size_of::<Line>() == LINE && align_of::<Line>() == LINE);

// SAFETY: eight words of which each may be zero.
unsafe impl Zeroable for Line {}
// SAFETY: eight words that may be anything; as large as its alignment, so nothing is padded.
unsafe impl Pod for Line {}

/// Bytes in which `lines` lines and the spare one find a place, at whatever address they begin;
/// `None` where no allocation could be that large.
pub(crate) const fn bytes_for(lines: usize) -> Option<usize> {
    let Some(with_spare) = lines.checked_add(1) else { return None };
    let Some(bytes) = with_spare.checked_mul(LINE) else { return None };
    match bytes.checked_add(LINE - 1) {
        Some(bytes) if bytes <= isize::MAX as usize => Some(bytes),
        _ => None,
    }
}

/// An owned, line-aligned run of lines with a spare one behind it.
pub(crate) struct Memory {
    /// The first of `lines + 1` lines that nobody else can reach while this value lives.
    first: NonNull<Line>,
    lines: usize,
    /// The vector around the lines; there is none where the memory is `'static`.
    vec: Option<RawVec>,
}

/// A vector taken apart, so that nothing but its pointer claims the bytes.
struct RawVec {
    start: *mut u8,
    capacity: usize,
}

// SAFETY: `Memory` owns its bytes alone and gives them out under `&self` and `&mut self` as a
// `Vec<Line>` would; bytes are at home on any thread.
unsafe impl Send for Memory {}
// SAFETY: as above; `&Memory` only reads.
unsafe impl Sync for Memory {}

impl Memory {
    /// `lines` lines of zero bytes, which the system need not back before they are written.
    pub(crate) fn zeroed(lines: usize) -> Result<Self, ShapeError> {
        let (align, bytes) = placement(lines).ok_or(ShapeError::Overflow)?;
        let zeroes: Box<[u8]> =
            try_zeroed_slice_box(bytes).map_err(|()| ShapeError::OutOfMemory { bytes })?;
        let memory = Memory::place(Bytes::Owned(zeroes.into_vec()), align, lines);
        #[cfg(all(feature = "std", target_os = "linux"))]
        if align == huge::PAGE {
            huge::advise(&memory);
        }
        Ok(memory)
    }

    /// The first `lines` lines of `memory`.
    ///
    /// # Panics
    ///
    /// If it has fewer; [`StoreMemory::lines`] says how many it has.
    pub(crate) fn brought(memory: StoreMemory, lines: usize) -> Self {
        Memory::place(memory.bytes, LINE, lines)
    }

    /// Finds the first aligned place in these bytes, and owns them from here on.
    fn place(bytes: Bytes, align: usize, lines: usize) -> Self {
        match bytes {
            Bytes::Owned(vec) => {
                let mut vec = ManuallyDrop::new(vec);
                let raw = RawVec { start: vec.as_mut_ptr(), capacity: vec.capacity() };
                Memory { first: first_line(&mut vec, align, lines), lines, vec: Some(raw) }
            }
            Bytes::Static(bytes) => {
                Memory { first: first_line(bytes, align, lines), lines, vec: None }
            }
        }
    }

    /// The lines, to be written.
    #[inline(always)]
    pub(crate) fn lines_mut(&mut self) -> &mut [Line] {
        // SAFETY: `first_line` took `first` from a slice of `lines + 1` lines, whose bytes live
        // as long as `self` and are borrowed through `self` alone.
        unsafe { slice::from_raw_parts_mut(self.first.as_ptr(), self.lines) }
    }

    /// The words, to be written.
    #[inline(always)]
    pub(crate) fn words_mut(&mut self) -> &mut [u64] {
        bytemuck::must_cast_slice_mut(self.lines_mut())
    }

    /// The lines.
    #[inline(always)]
    pub(crate) fn lines(&self) -> &[Line] {
        // SAFETY: as in `lines_mut`, and nothing is written while `self` is shared.
        unsafe { slice::from_raw_parts(self.first.as_ptr(), self.lines) }
    }

    /// The words, and those of the spare line behind them: they may be read, they mean nothing.
    #[inline(always)]
    pub(crate) fn with_slack(&self) -> &[u64] {
        // SAFETY: as in `lines`; `first_line` cut its slice one line longer than `lines`.
        let lines = unsafe { slice::from_raw_parts(self.first.as_ptr(), self.lines + 1) };
        bytemuck::must_cast_slice(lines)
    }

    /// The words.
    #[inline(always)]
    pub(crate) fn words(&self) -> &[u64] {
        bytemuck::must_cast_slice(self.lines())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(RawVec { start, capacity }) = self.vec {
            // SAFETY: pointer and capacity are those of the `Vec<u8>` that `place` took apart,
            // which happened once; no slice of it outlives `self`. Bytes need no length to go.
            drop(unsafe { Vec::from_raw_parts(start, 0, capacity) });
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.lines * LINE)
    }
}

/// The alignment of `lines` lines and the bytes to ask for: with room to move to the first aligned
/// address, the spare line included. `None` where no allocation could be that large.
fn placement(lines: usize) -> Option<(usize, usize)> {
    #[cfg(all(feature = "std", target_os = "linux"))]
    if lines >= huge::PAGE / LINE {
        let whole = huge::round_up(lines.checked_mul(LINE)?)?;
        let bytes = whole.checked_add(LINE + huge::PAGE - 1)?;
        return (bytes <= isize::MAX as usize).then_some((huge::PAGE, bytes));
    }
    Some((LINE, bytes_for(lines)?))
}

/// The first of `lines` lines, and a spare one, from the first aligned address in `bytes`.
fn first_line(bytes: &mut [u8], align: usize, lines: usize) -> NonNull<Line> {
    let start = bytes.as_ptr().align_offset(align);
    assert!(start < align, "an address can always be rounded up");
    let bytes = &mut bytes[start..][..(lines + 1) * LINE];
    let lines: &mut [Line] = bytemuck::cast_slice_mut(bytes);
    NonNull::from(lines).cast()
}

/// Pages of 2 MiB instead of 4 KiB, where the system is willing.
#[cfg(all(feature = "std", target_os = "linux"))]
mod huge {
    use core::ffi::{c_int, c_void};

    use super::{LINE, Memory};

    /// Bytes in a huge page of x86-64, and of aarch64 with pages of 4 KiB. Where huge pages are
    /// larger the advice comes to nothing.
    pub(super) const PAGE: usize = 2 << 20;

    /// The number that Linux gives this advice on every architecture std runs on.
    const MADV_HUGEPAGE: c_int = 14;

    #[cfg(not(miri))]
    // SAFETY: the declaration in `sys/mman.h` of the C library that std links.
    unsafe extern "C" {
        fn madvise(start: *mut c_void, bytes: usize, advice: c_int) -> c_int;
    }

    /// Stands in where there is no system.
    #[cfg(miri)]
    unsafe fn madvise(_: *mut c_void, _: usize, _: c_int) -> c_int {
        -1
    }

    pub(super) fn round_up(bytes: usize) -> Option<usize> {
        bytes.checked_next_multiple_of(PAGE)
    }

    /// Asks for huge pages behind these lines, of which `placement` made the room. To be refused
    /// is no error.
    pub(super) fn advise(memory: &Memory) {
        let Some(bytes) = round_up(memory.lines * LINE) else { return };
        // SAFETY: `placement` asked for this many bytes behind the first line, so the range is
        // inside one allocation, and this advice changes no byte and no right of it.
        unsafe { madvise(memory.first.as_ptr().cast(), bytes, MADV_HUGEPAGE) };
    }
}

/// Memory that the caller brings for the blocks of a
/// [`PagedKvStore`](crate::cache::PagedKvStore), instead of having the allocator asked for it.
///
/// It is made of a `Vec<u8>`, a `Box<[u8]>`, a `&'static mut [u8]` or a `&'static mut [u8; N]`, at
/// any address: what stands before the first multiple of 64 is skipped. Of a vector the bytes up
/// to its length count, and its capacity does not. What the bytes hold does not matter and is not
/// cleared: nothing in a block is read as a number before it has been written.
///
/// # Examples
///
/// A fixed number of blocks, whatever else the memory would hold:
///
/// ```
/// use paged_kv::KvShape;
/// use paged_kv::cache::{PagedKvStore, StoreMemory};
///
/// let shape = KvShape::square(16, 2, 64)?;
/// let memory = StoreMemory::from(vec![0; 1 << 20]).with_blocks(5);
/// assert_eq!(memory.as_bytes().len(), 1 << 20);
/// let store = PagedKvStore::<f32>::from_memory(shape, memory)?;
/// assert_eq!(store.total_blocks(), 5);
/// # Ok::<(), paged_kv::ShapeError>(())
/// ```
pub struct StoreMemory {
    bytes: Bytes,
    blocks: Option<usize>,
}

enum Bytes {
    Owned(Vec<u8>),
    Static(&'static mut [u8]),
}

impl StoreMemory {
    /// Holds exactly so many blocks: less memory than they need is refused, and what is left over
    /// is not used. Unless this is said, there will be as many blocks as fit, and one at least.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvStore, StoreMemory};
    /// use paged_kv::{KvShape, ShapeError};
    ///
    /// let memory = StoreMemory::from(vec![0; 1000]).with_blocks(5);
    /// let shape = KvShape::square(16, 1, 8)?;
    /// let refused = PagedKvStore::<f32>::from_memory(shape, memory).unwrap_err();
    /// assert!(matches!(refused.error, ShapeError::MemoryTooSmall { blocks: 5, have: 1000, .. }));
    /// # Ok::<(), ShapeError>(())
    /// ```
    #[must_use]
    pub fn with_blocks(self, total_blocks: usize) -> Self {
        StoreMemory { blocks: Some(total_blocks), ..self }
    }

    /// The bytes, all of them.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Owned(vec) => vec,
            Bytes::Static(bytes) => bytes,
        }
    }

    /// Lines that fit before the spare one; `None` where not even that one does.
    pub(crate) fn lines(&self) -> Option<usize> {
        let bytes = self.as_bytes();
        let usable = bytes.len().saturating_sub(bytes.as_ptr().align_offset(LINE));
        (usable / LINE).checked_sub(1)
    }

    /// How many blocks the caller wants.
    pub(crate) fn blocks(&self) -> Option<usize> {
        self.blocks
    }
}

impl fmt::Debug for StoreMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.bytes {
            Bytes::Owned(_) => "Owned",
            Bytes::Static(_) => "Static",
        };
        f.debug_struct("StoreMemory")
            .field("kind", &format_args!("{kind}"))
            .field("bytes", &self.as_bytes().len())
            .field("blocks", &self.blocks)
            .finish()
    }
}

impl From<Vec<u8>> for StoreMemory {
    fn from(bytes: Vec<u8>) -> Self {
        StoreMemory { bytes: Bytes::Owned(bytes), blocks: None }
    }
}

impl From<Box<[u8]>> for StoreMemory {
    fn from(bytes: Box<[u8]>) -> Self {
        bytes.into_vec().into()
    }
}

impl From<&'static mut [u8]> for StoreMemory {
    fn from(bytes: &'static mut [u8]) -> Self {
        StoreMemory { bytes: Bytes::Static(bytes), blocks: None }
    }
}

impl<const N: usize> From<&'static mut [u8; N]> for StoreMemory {
    fn from(bytes: &'static mut [u8; N]) -> Self {
        bytes.as_mut_slice().into()
    }
}

/// Memory that no store could be opened in, and why. The memory comes back with no byte changed.
///
/// Where only the reason matters, `?` turns it into the [`ShapeError`] that it carries.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvStore, StoreMemory};
/// use paged_kv::{KvShape, ShapeError};
///
/// let memory = StoreMemory::from(vec![0; 100]);
/// let refused = PagedKvStore::<f32>::from_memory(KvShape::square(16, 1, 8)?, memory).unwrap_err();
/// assert!(matches!(refused.error, ShapeError::MemoryTooSmall { have: 100, .. }));
/// let back = refused.memory; // to be used for something else
/// # let _ = back;
/// # Ok::<(), ShapeError>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct RefusedMemory {
    /// Why.
    pub error: ShapeError,
    /// What was handed in.
    pub memory: StoreMemory,
}

impl fmt::Display for RefusedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl core::error::Error for RefusedMemory {}

impl From<RefusedMemory> for ShapeError {
    fn from(refused: RefusedMemory) -> Self {
        refused.error
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn address(memory: &Memory) -> usize {
        memory.with_slack().as_ptr().addr()
    }

    #[test]
    fn memory_is_aligned_and_zero_and_has_a_spare_line() {
        // Up to 3 MiB and a line, past where huge pages begin.
        for lines in [0, 1, 2, 15, 16, 1000, 32_767, 32_768, 49_153] {
            let mut memory = Memory::zeroed(lines).unwrap();
            assert!(address(&memory).is_multiple_of(LINE));
            assert_eq!(memory.with_slack().len(), (lines + 1) * (LINE / 8));
            assert!(bytemuck::cast_slice(memory.with_slack()).iter().all(|byte: &u8| *byte == 0));
            assert_eq!(memory.words().len(), lines * LINE / 8);
            assert_eq!(memory.lines_mut().as_ptr().addr(), address(&memory));

            memory.words_mut().fill(0xa5a5);
            assert!(memory.words().iter().all(|word| *word == 0xa5a5));
            let spare = &memory.with_slack()[lines * (LINE / 8)..];
            assert_eq!(spare, [0; LINE / 8], "what is written through the lines ends with them");
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        for lines in [usize::MAX, usize::MAX / LINE, isize::MAX as usize / LINE] {
            assert_eq!(Memory::zeroed(lines).err(), Some(ShapeError::Overflow), "{lines}");
        }
        // A quarter of all addresses is more than there is, or, where they have 32 bits, four times as
        // much is. The compiler may drop an allocation that nobody looks at, so that it cannot fail.
        let lines = isize::MAX as usize / 2 / LINE;
        let tries = [(); 4].map(|()| core::hint::black_box(Memory::zeroed(lines)));
        let refused = tries.into_iter().find_map(Result::err);
        assert!(matches!(refused, Some(ShapeError::OutOfMemory { .. })), "{refused:?}");
    }

    #[test]
    fn bytes_leave_room_to_align() {
        assert_eq!(bytes_for(0), Some(LINE + LINE - 1));
        assert_eq!(bytes_for(isize::MAX as usize / LINE), None);
        assert_eq!(bytes_for(isize::MAX as usize / LINE - 2), Some(isize::MAX as usize - LINE));
    }

    #[test]
    fn memory_is_printed_by_its_size_and_whose_it_is() {
        let memory = Memory::zeroed(3).unwrap();
        assert_eq!(alloc::format!("{memory:?}"), "192 bytes");
        let owned = alloc::format!("{:?}", StoreMemory::from(vec![0; 100]));
        assert_eq!(owned, "StoreMemory { kind: Owned, bytes: 100, blocks: None }");
    }

    #[cfg(all(feature = "std", target_os = "linux"))]
    #[test]
    fn large_memory_is_made_of_whole_huge_pages() {
        for (bytes, huge_pages) in [(huge::PAGE, 1), (huge::PAGE + LINE, 2), (5 << 20, 3)] {
            let memory = Memory::zeroed(bytes / LINE).unwrap();
            assert!(address(&memory).is_multiple_of(huge::PAGE), "{memory:?}");
            let raw = memory.vec.as_ref().unwrap();
            let room = raw.start.addr() + raw.capacity - address(&memory);
            assert!(room >= huge_pages * huge::PAGE + LINE, "{memory:?} has room for {room}");
        }
        // The last address before an aligned one, the spare line behind whole huge pages.
        let lines = huge::PAGE / LINE;
        assert_eq!(placement(lines), Some((huge::PAGE, 2 * huge::PAGE + LINE - 1)));
        assert_eq!(placement(lines + 1), Some((huge::PAGE, 3 * huge::PAGE + LINE - 1)));
        let (align, bytes) = placement(huge::PAGE / LINE - 1).unwrap();
        assert_eq!((align, bytes), (LINE, huge::PAGE + LINE - 1), "smaller memory asks no more");
    }

    /// The mappings that hold the first and the last line carry the flag of the advice.
    #[cfg(all(feature = "std", target_os = "linux", not(miri)))]
    #[test]
    fn the_system_is_told_of_large_memory() {
        use alloc::string::String;

        fn flags(address: usize) -> Option<String> {
            let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
            let mut inside = false;
            for line in smaps.lines() {
                let bounds = line.split(' ').next().and_then(|range| range.split_once('-'));
                if let Some((start, end)) = bounds {
                    let parse = |hex| usize::from_str_radix(hex, 16).ok();
                    inside = (parse(start)?..parse(end)?).contains(&address);
                } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| inside) {
                    return Some(flags.into());
                }
            }
            None
        }

        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            std::eprintln!("SKIPPED: this kernel has no transparent huge pages to be advised of");
            return;
        }
        let memory = Memory::zeroed((5 << 20) / LINE).unwrap();
        for address in [address(&memory), address(&memory) + 3 * huge::PAGE - 1] {
            let flags = flags(address).expect("a system with huge pages tells flags");
            assert!(flags.split(' ').any(|flag| flag == "hg"), "{flags}");
        }
    }

    /// From every offset in a line: as many lines as fit, all of them inside, the spare one too.
    #[test]
    fn brought_memory_may_begin_anywhere() {
        for offset in 0..LINE {
            for len in [0, 1, 63, 64, 126, 127, 128, 500, 64 * 7, 64 * 7 + 63] {
                let (_, bytes) = vec![0xa5_u8; LINE + len].leak().split_at_mut(offset);
                let (bytes, _) = bytes.split_at_mut(len);
                let (start, end) = (bytes.as_ptr().addr(), bytes.as_ptr().addr() + len);
                let first = start.next_multiple_of(LINE);
                let brought = StoreMemory::from(bytes);
                let Some(lines) = brought.lines() else {
                    assert!(first + LINE > end, "there was room for the spare line");
                    continue;
                };
                assert!(first + (lines + 1) * LINE <= end, "{lines} lines in {len} bytes");
                assert!(first + (lines + 2) * LINE > end, "{lines} lines in {len} bytes");
                let memory = Memory::brought(brought, lines);
                assert_eq!(address(&memory), first);
                let bytes: &[u8] = bytemuck::cast_slice(memory.with_slack());
                assert_eq!(bytes.len(), (lines + 1) * LINE);
                assert!(bytes.iter().all(|byte| *byte == 0xa5), "nothing was cleared");
            }
        }
    }

    /// The spare line is asked for, too: a byte less than it would be somebody else's.
    #[test]
    #[should_panic(expected = "out of range")]
    fn lines_without_a_spare_one_are_refused() {
        let brought = StoreMemory::from(vec![0_u8; bytes_for(3).unwrap()]);
        let lines = brought.lines().unwrap() + 1;
        Memory::brought(brought, lines);
    }
}
