//! Every level against the reference, operation by operation, on awkward numbers.

use super::*;
use alloc::vec::Vec;

/// Zeros of both signs, denormals, infinities, halves between whole numbers, large and small.
fn awkward() -> Vec<f32> {
    let mut numbers = Vec::from([
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        1.5,
        2.5,
        -0.5,
        -1.5,
        -2.5,
        1e-40,
        -1e-40,
        f32::MIN_POSITIVE,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        125.5,
        -125.5,
        -126.0,
    ]);
    let mut state = 1u32;
    while numbers.len() < 320 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        numbers.push((state >> 8) as f32 / (1 << 20) as f32 - 8.0);
    }
    numbers
}

/// All operations on three vectors, as bits.
struct AllOps<'a>(&'a [f32; 16], &'a [f32; 16], &'a [f32; 16]);

impl Kernel for AllOps<'_> {
    type Output = Vec<u32>;

    #[inline(always)]
    fn call<S: Simd>(self, s: S) -> Vec<u32> {
        let (a, b, c) = (s.load(self.0), s.load(self.1), s.load(self.2));
        let near = s.load(&self.0.map(|x| if x.abs() <= 126.0 { x } else { 1.0 }));
        let (whole, power) = s.whole_and_power(near);
        let vectors = [
            s.add(a, b),
            s.sub(a, b),
            s.mul(a, b),
            s.div(a, b),
            s.max(a, b),
            s.mul_add(a, b, c),
            s.select_less(a, b, c, a),
            s.zero_below(a, b, c),
            s.evens(a),
            whole,
            power,
            s.splat(self.0[3]),
        ];
        let mut bits = Vec::new();
        let mut out = [0.0; 16];
        for vector in vectors {
            s.store(vector, &mut out);
            bits.extend(out.map(same_nan));
        }
        let words = self.0.map(f32::to_bits);
        let bytes = words.map(|word| word as u8);
        let halves = words.map(|word| (word >> 13) as u16);
        let raw = s.load_bits(&words);
        let more = [
            s.as_f32(raw),
            s.as_f32(s.shift_left::<16>(raw)),
            s.as_f32(s.mask(raw, 0xffff_0000)),
            s.whole_to_f32(s.shift_right::<24>(raw)),
            s.whole_to_f32(s.shift_right::<28>(s.shift_left::<4>(raw))),
            s.whole_to_f32(s.widen_i8(&bytes)),
            s.widen_f16(&halves),
        ];
        for vector in more {
            s.store(vector, &mut out);
            bits.extend(out.map(same_nan));
        }
        bits.push(same_nan(s.reduce_sum(c)));
        bits.push(s.reduce_max(c).to_bits());
        bits
    }
}

/// Bits, with one pattern for every NaN: payloads are nobody's promise.
fn same_nan(number: f32) -> u32 {
    if number.is_nan() { 0x7fc0_0000 } else { number.to_bits() }
}

#[test]
fn every_operation_agrees_with_the_reference() {
    let numbers = awkward();
    for level in Level::available() {
        for start in 0..numbers.len() - 64 {
            let part = |at: usize| <&[f32; 16]>::try_from(&numbers[at..at + 16]).unwrap();
            let (a, b, c) = (part(start), part(start + 17), part(start + 40));
            let mut want = Level::SCALAR.run(AllOps(a, b, c));
            if level.is_fused() {
                // The one operation in which the classes differ, by std's definition of it.
                for lane in 0..16 {
                    want[5 * 16 + lane] = same_nan(a[lane].mul_add(b[lane], c[lane]));
                }
            }
            assert_eq!(level.run(AllOps(a, b, c)), want, "{level}, from number {start}");
        }
    }
}

#[test]
fn reductions_follow_the_written_tree() {
    // Sums of these depend on the order: 2^24 swallows a 1 but not two of them.
    let mut lanes = [1.0f32; 16];
    lanes[0] = 16_777_216.0;
    let by_tree = {
        let mut left = lanes;
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                left[lane] += left[lane + half];
            }
        }
        left[0]
    };
    struct Sum<'a>(&'a [f32; 16]);
    impl Kernel for Sum<'_> {
        type Output = f32;
        #[inline(always)]
        fn call<S: Simd>(self, s: S) -> f32 {
            s.reduce_sum(s.load(self.0))
        }
    }
    assert_ne!(by_tree, lanes.iter().sum::<f32>());
    for level in Level::available() {
        assert_eq!(level.run(Sum(&lanes)), by_tree, "{level}");
    }
}

/// `MR` rows folded together: lanes `2 row` and `2 row + 1` as bits, of sums and of maxima, and what each
/// row gives by itself.
struct Folded<'a, const MR: usize>(&'a [[f32; 16]; MOST_ROWS]);

impl<const MR: usize> Kernel for Folded<'_, MR> {
    type Output = [Vec<u32>; 2];

    #[inline(always)]
    fn call<S: Simd>(self, s: S) -> [Vec<u32>; 2] {
        let mut rows = [s.splat(0.0); MR];
        for (row, numbers) in rows.iter_mut().zip(self.0) {
            *row = s.load(numbers);
        }
        let (mut together, mut alone) = (Vec::new(), Vec::new());
        let mut out = [0.0; 16];
        s.store(s.sums_of_rows(rows), &mut out);
        together.extend(out[..2 * MR].iter().copied().map(same_nan));
        s.store(s.max_of_rows(rows), &mut out);
        together.extend(out[..2 * MR].iter().map(|lane| lane.to_bits()));
        alone.extend(rows.iter().flat_map(|row| [same_nan(s.reduce_sum(*row)); 2]));
        alone.extend(rows.iter().flat_map(|row| [s.reduce_max(*row).to_bits(); 2]));
        [together, alone]
    }
}

#[test]
fn rows_are_folded_together_as_each_alone() {
    fn check<const MR: usize>(level: Level, rows: &[[f32; 16]; MOST_ROWS]) {
        let [together, alone] = level.run(Folded::<MR>(rows));
        assert_eq!(together, alone, "{level}, {MR} rows");
    }
    let numbers = awkward();
    for level in Level::available() {
        for start in 0..numbers.len() - 16 * MOST_ROWS {
            let mut rows = [[0.0; 16]; MOST_ROWS];
            rows.as_flattened_mut().copy_from_slice(&numbers[start..start + 16 * MOST_ROWS]);
            check::<1>(level, &rows);
            check::<2>(level, &rows);
            check::<3>(level, &rows);
            check::<4>(level, &rows);
            check::<5>(level, &rows);
            check::<6>(level, &rows);
            check::<7>(level, &rows);
            check::<8>(level, &rows);
        }
    }
}

#[test]
fn portable_knows_whether_it_fuses() {
    struct Fuses;
    impl Kernel for Fuses {
        type Output = bool;
        #[inline(always)]
        fn call<S: Simd>(self, s: S) -> bool {
            // (1 + e)(1 - e) - 1 is -e^2, unless the product is rounded to 1 on its way.
            let e = f32::EPSILON;
            let rest = s.mul_add(s.splat(1.0 + e), s.splat(1.0 - e), s.splat(-1.0));
            let mut out = [0.0; 16];
            s.store(rest, &mut out);
            out[0] != 0.0
        }
    }
    for level in Level::available() {
        assert_eq!(level.run(Fuses), level.is_fused(), "{level}");
    }
}

#[test]
fn names_lead_back_to_levels() {
    for level in Level::available() {
        assert_eq!(Level::from_name(level.name()), Some(level));
    }
    assert_eq!(Level::from_name("sse9"), None);
    assert_eq!(Level::available().last(), Some(Level::detect()));
}
