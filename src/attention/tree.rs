//! Drafts that branch.

use crate::error::AttentionError;

/// Which of a sequence's last positions its last query rows see, where those are a tree of drafted
/// tokens rather than a text.
///
/// Row `r` of the mask is the query row that stands for the `r`-th of the last
/// [`rows`](Self::rows) positions, and bit `c` in it says whether it sees the `c`-th of them. It
/// sees every position before those, as ever. A row sees itself, and none behind it: parents are
/// appended before their children.
///
/// ```text
/// cached    a b c | d e f g      d and f follow c, e follows d, g follows f
/// d               | 1 0 0 0
/// e               | 1 1 0 0      words: [0b0001, 0b0011, 0b0100, 0b1100]
/// f               | 0 0 1 0
/// g               | 0 0 1 1
/// ```
///
/// Rows are [`words_for_row`](Self::words_for_row) words long, bit `c` is bit `c % 64` of word
/// `c / 64`.
///
/// # Examples
///
/// ```
/// use paged_kv::attention::TreeMask;
///
/// let mut words = [0; 4];
/// let tree = TreeMask::from_parents(&[None, Some(0), None, Some(2)], &mut words)?;
/// assert!(tree.sees(3, 2) && !tree.sees(3, 1));
/// assert_eq!((tree.rows(), TreeMask::NONE.rows()), (4, 0));
/// assert_eq!(words, [0b0001, 0b0011, 0b0100, 0b1100]);
/// # Ok::<(), paged_kv::AttentionError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeMask<'a> {
    rows: usize,
    words: &'a [u64],
}

impl<'a> TreeMask<'a> {
    /// No tree: a plain text to its end.
    pub const NONE: TreeMask<'static> = TreeMask { rows: 0, words: &[] };

    /// Words in one row of a mask of so many rows.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::TreeMask;
    ///
    /// assert_eq!([1, 64, 65].map(TreeMask::words_for_row), [1, 1, 2]);
    /// ```
    pub const fn words_for_row(rows: usize) -> usize {
        rows.div_ceil(64)
    }

    /// A mask of so many rows.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::AttentionError;
    /// use paged_kv::attention::TreeMask;
    ///
    /// let line = TreeMask::new(3, &[0b001, 0b011, 0b111])?; // one draft after the other
    /// assert!(line.sees(2, 0) && !line.sees(0, 2));
    /// let refused = TreeMask::new(2, &[0b11, 0b11]); // row 0 sees what comes behind it
    /// assert_eq!(refused, Err(AttentionError::TreeBit { row: 0, column: 1 }));
    /// # Ok::<(), AttentionError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AttentionError::TreeLength`] where there are not exactly `rows` x
    /// [`words_for_row`](Self::words_for_row) words; [`AttentionError::TreeBit`] where a row does not
    /// see itself, or has a bit behind that.
    ///
    /// # Cost
    ///
    /// Reads the words once.
    pub fn new(rows: usize, words: &'a [u64]) -> Result<Self, AttentionError> {
        check_length(rows, words.len())?;
        let mask = TreeMask { rows, words };
        for row in 0..rows {
            if !mask.sees(row, row) {
                return Err(AttentionError::TreeBit { row, column: row });
            }
            for first in (row + 1) / 64..Self::words_for_row(rows) {
                let behind = u64::MAX << (row + 1).saturating_sub(first * 64);
                let wrong = mask.word(row, first) & behind;
                if wrong != 0 {
                    let column = first * 64 + wrong.trailing_zeros() as usize;
                    return Err(AttentionError::TreeBit { row, column });
                }
            }
        }
        Ok(mask)
    }

    /// Writes the mask of a tree, given each row's parent: another row before it, or `None` where it
    /// follows the text.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::TreeMask;
    ///
    /// // Two guesses at the next token, and two at what follows the second of them.
    /// let parents = [None, None, Some(1), Some(1)];
    /// let mut words = vec![0; parents.len() * TreeMask::words_for_row(parents.len())];
    /// let tree = TreeMask::from_parents(&parents, &mut words)?;
    /// assert!(tree.sees(3, 1) && !tree.sees(3, 0) && !tree.sees(3, 2));
    /// # Ok::<(), paged_kv::AttentionError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AttentionError::TreeLength`] where there are not exactly as many words as it takes,
    /// [`AttentionError::TreeBit`] where a parent does not come before its child. Then no word is
    /// written.
    ///
    /// # Cost
    ///
    /// Writes the words once; allocates nothing.
    pub fn from_parents(
        parents: &[Option<usize>],
        words: &'a mut [u64],
    ) -> Result<Self, AttentionError> {
        let rows = parents.len();
        check_length(rows, words.len())?;
        for (row, parent) in parents.iter().enumerate() {
            if let Some(column) = *parent
                && column >= row
            {
                return Err(AttentionError::TreeBit { row, column });
            }
        }
        let width = Self::words_for_row(rows);
        for (row, parent) in parents.iter().enumerate() {
            let (before, own) = words.split_at_mut(row * width);
            let own = &mut own[..width];
            match *parent {
                Some(parent) => own.copy_from_slice(&before[parent * width..][..width]),
                None => own.fill(0),
            }
            own[row / 64] |= 1 << (row % 64);
        }
        Ok(TreeMask { rows, words })
    }

    /// Query rows, and positions, that it is about.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Whether a row sees the position of another one.
    ///
    /// # Panics
    ///
    /// If there are not as many rows.
    #[track_caller]
    pub fn sees(&self, row: usize, other: usize) -> bool {
        assert!(row < self.rows && other < self.rows, "the tree has {} rows", self.rows);
        self.word(row, other / 64) >> (other % 64) & 1 == 1
    }

    fn word(&self, row: usize, index: usize) -> u64 {
        let width = Self::words_for_row(self.rows);
        let word = (index < width).then(|| self.words.get(row * width + index)).flatten();
        word.copied().unwrap_or(0)
    }

    /// What a row sees of the 64 positions that begin `before` positions before the tree, or `-before`
    /// behind its beginning: everything before the tree, and what the mask says in it.
    pub(super) fn bits(&self, row: usize, before: isize) -> u64 {
        if before >= 64 {
            return u64::MAX;
        }
        if before > 0 {
            return self.word(row, 0) << before | !(u64::MAX << before);
        }
        let first = before.unsigned_abs();
        let (index, shift) = (first / 64, first % 64);
        let low = self.word(row, index) >> shift;
        if shift == 0 { low } else { low | self.word(row, index + 1) << (64 - shift) }
    }
}

fn check_length(rows: usize, have: usize) -> Result<(), AttentionError> {
    let need = rows.saturating_mul(TreeMask::words_for_row(rows));
    if have == need { Ok(()) } else { Err(AttentionError::TreeLength { need, have }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    #[test]
    fn the_bits_of_a_tile_are_those_of_its_positions() {
        let parents: Vec<Option<usize>> =
            (0..150usize).map(|row| (row % 7 != 0).then(|| row * 5 / 6)).collect();
        let mut words = vec![0; 150 * 3];
        let tree = TreeMask::from_parents(&parents, &mut words).unwrap();
        for row in [0, 1, 63, 64, 65, 127, 128, 149] {
            for before in -160..80 {
                let bits = tree.bits(row, before);
                for lane in 0..64 {
                    let column = lane - before;
                    let want = match usize::try_from(column) {
                        Ok(column) => column < 150 && tree.sees(row, column),
                        Err(_) => true,
                    };
                    assert_eq!(bits >> lane & 1 == 1, want, "row {row}, {before}, lane {lane}");
                }
            }
        }
        assert_eq!(TreeMask::new(150, tree.words), Ok(tree));
    }
}
