//! Page memory: zeroed, aligned to a line, had lazily.
//!
//! Opening a large pool must cost nothing until its pages are written, and memory that nobody
//! has written must never be undefined. The allocator's zeroed pages give both, but only for the
//! alignment it hands out by itself: asked for more, it allocates and then clears by hand. So
//! the memory is taken in units of [`Unit`] with one line to spare, and the first aligned byte
//! in it is where the pages begin.

use alloc::boxed::Box;

use bytemuck::allocation::try_zeroed_slice_box;

use crate::cut;
use crate::element::tile::LINE;
use crate::error::ShapeError;

/// Words in a line.
const LINE_WORDS: usize = LINE / size_of::<u64>();

/// An owned, line-aligned, initially zeroed run of words, with a line to spare behind it.
pub(crate) struct Memory {
    units: Box<[u64]>,
    start: usize,
    words: usize,
}

impl Memory {
    /// Room for so many words, all zero.
    pub(crate) fn zeroed(words: usize) -> Result<Self, ShapeError> {
        let padded = words.checked_add(2 * LINE_WORDS).ok_or(ShapeError::Overflow)?;
        if padded > isize::MAX as usize / size_of::<u64>() {
            return Err(ShapeError::Overflow);
        }
        let bytes = padded * size_of::<u64>();
        let units =
            try_zeroed_slice_box::<u64>(padded).map_err(|()| ShapeError::OutOfMemory { bytes })?;
        let start = units.as_ptr().align_offset(LINE);
        assert!(start < LINE_WORDS, "an address can always be rounded up to a line");
        Ok(Memory { units, start, words })
    }

    /// The words.
    pub(crate) fn words(&self) -> &[u64] {
        cut::part(&self.units, self.start, self.words)
    }

    /// The words and the line behind them.
    #[inline]
    pub(crate) fn with_slack(&self) -> &[u64] {
        cut::part(&self.units, self.start, self.words + LINE_WORDS)
    }

    /// The words, to be written.
    pub(crate) fn words_mut(&mut self) -> &mut [u64] {
        cut::part_mut(&mut self.units, self.start, self.words)
    }
}

impl core::fmt::Debug for Memory {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} bytes", self.words * size_of::<u64>())
    }
}

