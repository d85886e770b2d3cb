//! Paged decode with a shared prefix, on a processor with nothing underneath.
//!
//! Two requests begin with the same 96 positions and go separate ways from there to 128, through five
//! layers of 8 query heads over 4 KV heads of width 8. What a model would compute of a token is made up
//! from integers; everything that this crate does about it is real, and its results choose the next
//! token, so that one wrong bit anywhere changes all that follows.
//!
//! ```text
//! main.rs     the requests, and what is expected of them
//! layers.rs   five stores and their block tables, with or without compare-and-swap
//! board/      of each processor: how it starts, speaks, counts instructions and ends
//! ```
//!
//! The program ends well only if the bits are those written down in [`EXPECTED`], for each stored type at
//! each level of vector instructions there is. Built for an ordinary computer it does the same, at more
//! levels; that is where the expected digests come from.
#![cfg_attr(target_os = "none", no_std, no_main)]

extern crate alloc;

mod board;
mod layers;

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::error::Error;

use layers::{Layers, Rows, Stores};
use paged_kv::attention::{AttentionOptions, attention_scratch_len};
use paged_kv::{GqaShape, Int8, KvShape, Level};

type Result<T> = core::result::Result<T, Box<dyn Error>>;

const LAYERS: usize = 5;
const N_HEADS: usize = 8;
const N_KV_HEADS: usize = 4;
const WIDTH: usize = 8;
const BLOCK: usize = 16;
/// Positions that both requests begin with: six blocks, held once.
const PREFIX: usize = 96;
const LENGTH: usize = 128;
const REQUESTS: usize = 2;
/// Of each layer: the prefix, and two blocks for each request. Without sharing it would be sixteen.
const BLOCKS: usize = (PREFIX + REQUESTS * (LENGTH - PREFIX)) / BLOCK;

/// Numbers of a key or value row, and of a query or result row.
const KV_ROW: usize = N_KV_HEADS * WIDTH;
const Q_ROW: usize = N_HEADS * WIDTH;

/// What the requests' results add up to, by stored type: where multiply-adds are fused, and where not.
const EXPECTED: [(&str, u32, u32); 2] =
    [("f32", 0x6e58_2e82, 0xe2a6_f172), ("int8", 0xdbb5_6049, 0xb502_f127)];

/// What one way of keeping the layers gave.
struct Outcome {
    digest: u32,
    /// Instructions for the rows that are written and attended for one token, all layers.
    per_token: Option<u64>,
    /// Bytes of the heap while decoding.
    held: Option<usize>,
}

#[cfg(not(target_os = "none"))]
fn main() -> std::process::ExitCode {
    board::start()
}

/// Everything; whether all of it was as expected.
fn run() -> bool {
    let mut good = true;
    for level in Level::available() {
        good &= same_everywhere::<f32>(level);
        good &= same_everywhere::<Int8>(level);
    }
    #[cfg(feature = "grid")]
    {
        good &= grid();
    }
    good
}

/// Keeps rows as `E` in all ways that this processor has.
fn same_everywhere<E: layers::Stored>(level: Level) -> bool {
    let name = E::NAME;
    let ways: &[(&str, Way)] = &[
        ("stores", decode::<Stores<E>>),
        #[cfg(target_has_atomic = "ptr")]
        ("shared", decode::<layers::shared::Shared<E>>),
    ];
    let expected = EXPECTED.iter().find(|(expected, ..)| *expected == name);
    let want = expected.map(|(_, fused, not)| if level.is_fused() { *fused } else { *not });
    let mut good = true;
    for (way, decode) in ways {
        match decode(level) {
            Ok(Outcome { digest, per_token, held }) => {
                good &= Some(digest) == want;
                board::say(format_args!("decode {name} {way} {level} {digest:#010x}"));
                if let (Some(per_token), Some(held)) = (per_token, held) {
                    board::say(format_args!(
                        "cost {name} {way} {level} {per_token} instructions a token, {held} bytes held"
                    ));
                }
            }
            Err(error) => {
                good = false;
                board::say(format_args!("decode {name} {way} {level} {error}"));
            }
        }
    }
    good
}

type Way = fn(Level) -> Result<Outcome>;

/// Both requests, token by token, taking turns.
fn decode<L: Layers>(level: Level) -> Result<Outcome> {
    let shape = KvShape::square(BLOCK, N_KV_HEADS, WIDTH)?;
    let mut layers = L::open(shape)?;
    prefill(&mut layers)?;
    let mut requests = [layers.begin()?, layers.begin()?];

    let options = AttentionOptions::new().level(level);
    let gqa = GqaShape::new(shape, N_HEADS)?;
    let mut scratch = vec![f32::NAN; attention_scratch_len(&gqa, 1)];
    let mut out = [f32::NAN; Q_ROW];
    let mut tokens = [1, 2];
    let mut digest = OFFSET;
    let mut instructions = Some(0);
    for position in PREFIX..LENGTH {
        for (request, token) in requests.iter_mut().zip(&mut tokens) {
            for layer in 0..LAYERS {
                let (rows, q) = project(*token, position, layer);
                let before = board::instructions();
                layers.write(request, layer, &rows)?;
                layers.attend(request, layer, &q, &options, &mut out, &mut scratch)?;
                instructions = add(instructions, before, board::instructions());
                digest = fold(digest, &out);
            }
            layers.end_step(request)?;
            *token = digest % 251;
        }
    }
    let held = board::heap_used();
    for request in requests {
        layers.end(request)?;
    }
    if layers.free_blocks() != LAYERS * BLOCKS {
        return Err("a block has not come back".into());
    }
    let steps = ((LENGTH - PREFIX) * REQUESTS) as u64;
    Ok(Outcome { digest, per_token: instructions.map(|sum| sum / steps), held })
}

/// The prefix, written once, a block at a time.
fn prefill<L: Layers>(layers: &mut L) -> Result<()> {
    for start in (0..PREFIX).step_by(BLOCK) {
        for layer in 0..LAYERS {
            let mut rows = Rows { k: Vec::new(), v: Vec::new() };
            for position in start..start + BLOCK {
                let (row, _) = project(position as u32, position, layer);
                rows.k.extend(row.k);
                rows.v.extend(row.v);
            }
            layers.write_prefix(layer, &rows)?;
        }
    }
    Ok(())
}

/// What the model says to a token: its key and value rows in a layer, and its query row.
fn project(token: u32, position: usize, layer: usize) -> (Rows, [f32; Q_ROW]) {
    let seed = (token << 16) ^ ((position as u32) << 4) ^ layer as u32;
    let mut next = xorshift(seed);
    let rows = Rows {
        k: core::iter::repeat_with(&mut next).take(KV_ROW).collect(),
        v: core::iter::repeat_with(&mut next).take(KV_ROW).collect(),
    };
    let mut q = [0.0; Q_ROW];
    q.fill_with(next);
    (rows, q)
}

/// Numbers in -1 .. 1 that depend on the seed alone, by conversions that round nothing.
fn xorshift(seed: u32) -> impl FnMut() -> f32 {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// FNV-1a over the bits, 32 bits wide.
fn fold(digest: u32, numbers: &[f32]) -> u32 {
    let bytes = numbers.iter().flat_map(|number| number.to_bits().to_le_bytes());
    bytes.fold(digest, |digest, byte| (digest ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

const OFFSET: u32 = 0x811c_9dc5;

/// A sum of instructions, where they can be counted.
fn add(sum: Option<u64>, before: Option<u64>, after: Option<u64>) -> Option<u64> {
    let (before, after) = (before?, after?);
    let passed = if after < before { after + (board::COUNTED_TO - before) } else { after - before };
    Some(sum? + passed)
}

/// The grid of digests that every level and target has in common.
#[cfg(feature = "grid")]
fn grid() -> bool {
    use paged_kv::internal::digest::{digest, expected};
    use paged_kv::{Element, Int4, bf16, f16};

    fn one<E: Element>(level: Level) -> bool {
        let have = digest::<E>(level);
        board::say(format_args!("grid {} {level} {have:#018x}", E::NAME));
        have == expected::<E>(level)
    }

    let mut good = true;
    for level in Level::available() {
        let each = [one::<f32>, one::<f16>, one::<bf16>, one::<Int8>, one::<Int4>];
        for one in each {
            good &= one(level);
        }
    }
    good
}
