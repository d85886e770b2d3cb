//! Page memory: zeroed, aligned to a line, had lazily.
//!
//! Opening a large pool must cost nothing until its pages are written, and memory that nobody
//! has written must never be undefined. The allocator's zeroed pages give both, but only for the
//! alignment it hands out by itself: asked for more, it allocates and then clears by hand. So
//! the memory is taken in units of [`Unit`] with one line to spare, and the first aligned byte
//! in it is where the pages begin.

use alloc::boxed::Box;

use bytemuck::Pod;
use bytemuck::allocation::try_zeroed_slice_box;

use crate::cut;
use crate::element::tile::LINE;
use crate::error::ShapeError;

/// A plain number whose alignment every allocator gives by itself: asked for more (`u128` on a
/// 32-bit x86), std allocates and then clears by hand, which touches every page.
type Unit = u64;

/// An owned, line-aligned, initially zeroed run of bytes.
pub(crate) struct Memory {
    units: Box<[Unit]>,
    start: usize,
    bytes: usize,
}

impl Memory {
    /// Room for `count` numbers of type `T`, all zero bytes.
    pub(crate) fn zeroed<T: Pod>(count: usize) -> Result<Self, ShapeError> {
        const { assert!(LINE.is_multiple_of(size_of::<T>()) && align_of::<T>() <= LINE) };
        let bytes = count.checked_mul(size_of::<T>()).ok_or(ShapeError::Overflow)?;
        let padded = bytes.checked_add(LINE).ok_or(ShapeError::Overflow)?;
        if padded > isize::MAX as usize - size_of::<Unit>() {
            return Err(ShapeError::Overflow);
        }
        let units = try_zeroed_slice_box::<Unit>(padded.div_ceil(size_of::<Unit>()))
            .map_err(|()| ShapeError::OutOfMemory { bytes: padded })?;
        let start = units.as_ptr().cast::<u8>().align_offset(LINE);
        assert!(start < LINE, "an address can always be rounded up to a line");
        Ok(Memory { units, start, bytes })
    }

    /// The numbers.
    #[inline]
    pub(crate) fn numbers<T: Pod>(&self) -> &[T] {
        let bytes: &[u8] = bytemuck::must_cast_slice(&self.units);
        match bytemuck::try_cast_slice(cut::part(bytes, self.start, self.bytes)) {
            Ok(numbers) => numbers,
            // `zeroed` has made the start a line's and the length a whole number of numbers.
            Err(_) => cut::out_of_bounds(),
        }
    }

    /// The numbers, to be written.
    pub(crate) fn numbers_mut<T: Pod>(&mut self) -> &mut [T] {
        let bytes = bytemuck::cast_slice_mut::<Unit, u8>(&mut self.units);
        bytemuck::cast_slice_mut(&mut bytes[self.start..][..self.bytes])
    }
}

impl core::fmt::Debug for Memory {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} bytes", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_zero() {
        for count in [0, 1, 15, 16, 1000] {
            let mut memory = Memory::zeroed::<f32>(count).unwrap();
            assert_eq!(memory.numbers::<f32>().len(), count);
            assert!(memory.numbers::<f32>().iter().all(|number| number.to_bits() == 0));
            assert!(memory.numbers_mut::<f32>().as_ptr().addr().is_multiple_of(LINE) || count == 0);
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert_eq!(Memory::zeroed::<f32>(usize::MAX).err(), Some(ShapeError::Overflow));
        assert_eq!(Memory::zeroed::<f32>(usize::MAX / 4).err(), Some(ShapeError::Overflow));
        let bytes = isize::MAX as usize / 2;
        // The compiler may drop an allocation that nobody looks at, so that it cannot fail.
        let refused = core::hint::black_box(Memory::zeroed::<u8>(bytes)).err();
        assert!(matches!(refused, Some(ShapeError::OutOfMemory { .. })), "{refused:?}");
    }
}
