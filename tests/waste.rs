//! The figure that the README gives for memory without rows, on fewer steps.
#![cfg(any(feature = "std", feature = "spin"))]

#[path = "../examples/waste.rs"]
#[expect(dead_code, reason = "the example prints, this compares")]
mod waste;

use waste::measure;

#[test]
fn blocks_of_16_and_of_32_waste_less_than_four_percent() {
    for (block_size, most) in [(16, 2.0), (32, 4.0)] {
        let held = measure(block_size, 500);
        let percent = held.percent(held.blocks);
        assert!(percent < most, "blocks of {block_size}: {percent} %");
        // About half a block for each of 64 requests; were it nothing, nothing was measured.
        let half = (64 * block_size / 2) as f64;
        assert!((0.8 * half..1.1 * half).contains(&held.blocks), "{} positions", held.blocks);
        assert!(held.percent(held.vectors) > 15.0 && held.percent(held.longest) > 60.0);
    }
}
