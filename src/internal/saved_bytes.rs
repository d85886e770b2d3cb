//! Checksums of saved sequences, worked out from the drawing of the format alone.
//!
//! What forges a file has to make its checksums right, or nothing behind them is ever looked at.

/// CRC-32, bit by bit.
pub fn crc32(bytes: &[u8]) -> u32 {
    let step = |sum: u32, _| (sum >> 1) ^ if sum & 1 == 1 { 0xedb8_8320 } else { 0 };
    !bytes.iter().fold(!0, |sum, byte| (0..8).fold(sum ^ u32::from(*byte), step))
}

/// Makes the checksums of a file right, as far as it has the parts that its header tells of.
pub fn reseal(file: &mut [u8]) {
    let Some(header) = number(file, 16) else { return };
    let Some((head, mut pages)) = file.split_at_mut_checked(header) else { return };
    let Some((body, sum)) = head.split_last_chunk_mut::<4>() else { return };
    let seal = crc32(body);
    *sum = seal.to_le_bytes();
    let (Some(len), Some(layers)) = (number(body, 24), number(body, 48)) else { return };
    for layer in 0..layers {
        let at = |field: usize| number(body, 56 + 88 * layer + field);
        let Some(kind) = body.get(56 + 88 * layer) else { return };
        if *kind != 1 {
            continue;
        }
        let fields = [at(16), at(64), at(72), at(80)];
        let [Some(size @ 1..), Some(hole), Some(gone), Some(page)] = fields else { return };
        for index in (0..len.div_ceil(size)).filter(|index| !(hole..hole + gone).contains(index)) {
            let end = page.checked_add(4);
            let parts = end.and_then(|end| core::mem::take(&mut pages).split_at_mut_checked(end));
            let Some((now, rest)) = parts else { return };
            let (bytes, sum) = now.split_at_mut(page);
            let place = [layer as u64, index as u64].map(u64::to_le_bytes).concat();
            let of = [&seal.to_le_bytes()[..], &place, bytes].concat();
            sum.copy_from_slice(&crc32(&of).to_le_bytes());
            pages = rest;
        }
    }
}

/// The number at this place, where it is one that a small file can have.
fn number(bytes: &[u8], at: usize) -> Option<usize> {
    let number = u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?);
    usize::try_from(number).ok().filter(|number| *number < 1 << 30)
}
