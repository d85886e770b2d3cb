//! What the compiler made of the inner loops.
//!
//! The product loop (`simd::product`) is where attention spends its time, and its promise is that
//! lengths are checked before it and nothing is called inside: no bounds check, no panic, no
//! function that failed to inline. That promise is lost silently, by an innocent change far away,
//! and costs a factor of ten; so this test disassembles its own binary and looks.
//!
//! It needs optimised code and `objdump`: `cargo test --release --test inner_loops`.

#![cfg(target_arch = "x86_64")]

use std::process::Command;

use paged_kv::attention::causal_gqa_attention;
use paged_kv::cache::KvCache;

/// One instruction: its address, its name, and where it jumps if it does.
#[derive(Debug)]
struct Instruction {
    at: u64,
    name: String,
    operands: String,
}

impl Instruction {
    fn jumps_to(&self) -> Option<u64> {
        if !self.name.starts_with('j') {
            return None;
        }
        u64::from_str_radix(self.operands.split_whitespace().next()?, 16).ok()
    }
}

struct Function {
    name: String,
    body: Vec<Instruction>,
}

/// The functions of this crate in an `objdump -d` listing.
fn functions(listing: &str) -> Vec<Function> {
    let mut all: Vec<Function> = Vec::new();
    for line in listing.lines() {
        if let Some((_, name)) = line.strip_suffix(">:").and_then(|line| line.split_once(" <")) {
            all.push(Function { name: name.into(), body: Vec::new() });
        } else if let Some((at, text)) = line.split_once(":\t")
            && let (Ok(at), Some(function)) = (u64::from_str_radix(at.trim(), 16), all.last_mut())
        {
            let (name, operands) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
            let (name, operands) = (name.to_string(), operands.trim().to_string());
            function.body.push(Instruction { at, name, operands });
        }
    }
    all.retain(|function| function.name.contains("paged_kv"));
    all
}

/// Loops that have no loop inside: from the target of a backward jump to the jump.
fn innermost_loops(function: &Function) -> Vec<&[Instruction]> {
    let first = function.body.first().map_or(0, |instruction| instruction.at);
    let mut spans: Vec<(u64, u64)> = function
        .body
        .iter()
        .filter_map(|jump| Some((jump.jumps_to()?, jump.at)))
        .filter(|(target, at)| (first..=*at).contains(target))
        .collect();
    spans.sort_unstable();
    let inside = |a: &(u64, u64), b: &(u64, u64)| a != b && b.0 <= a.0 && a.1 <= b.1;
    let innermost = spans.iter().filter(|outer| !spans.iter().any(|inner| inside(inner, outer)));
    innermost
        .map(|(from, to)| {
            let start = function.body.partition_point(|instruction| instruction.at < *from);
            let end = function.body.partition_point(|instruction| instruction.at <= *to);
            &function.body[start..end]
        })
        .collect()
}

/// Whether a loop is a product: it broadcasts a number from memory that is neither a constant nor a
/// spilled register, and multiplies and adds. (A softmax multiplies too, by constants.)
fn is_product(body: &[Instruction], fused: bool) -> bool {
    let has = |name: &str| body.iter().any(|instruction| instruction.name.starts_with(name));
    let broadcasts = body.iter().any(|Instruction { name, operands, .. }| {
        let own = !operands.contains("(%rip)") && !operands.contains("(%rsp)");
        let loads = name == "vbroadcastss" || (name == "movss" && !operands.ends_with(')'));
        own && operands.contains('(') && (loads || operands.contains("{1to16}"))
    });
    let multiplies =
        if fused { has("vfmadd231ps") || has("vfmadd213ps") } else { has("mulps") && has("addps") };
    broadcasts && multiplies
}

#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "looks at optimised code: cargo test --release --test inner_loops"
)]
fn product_loops_call_nothing() {
    // Something that needs the kernels, so that they are in this binary.
    let mut cache = KvCache::new(1, 16);
    cache.push(&[1.0; 16], &[1.0; 16]).unwrap();
    assert_eq!(causal_gqa_attention(&[1.0; 16], &cache, 1).unwrap(), [1.0; 16]);

    let binary = std::env::current_exe().expect("a test knows where it is");
    let objdump = Command::new("objdump")
        .args(["--disassemble", "--demangle", "--no-show-raw-insn", "--wide"])
        .arg(binary)
        .output()
        .expect("objdump (binutils) must be installed for this test");
    assert!(objdump.status.success(), "objdump failed");
    let listing = String::from_utf8_lossy(&objdump.stdout);

    let mut broken = Vec::new();
    // Registers that tell the levels apart, whether products are fused, and how many loops there
    // must be at least: fewer would mean that this test no longer finds what it looks for.
    for (level, register, fused, least) in
        [("avx512", "%zmm", true, 8), ("avx2", "%ymm", true, 6), ("portable", "%xmm", false, 2)]
    {
        let mut found = 0;
        let mut spills = 0;
        for function in functions(&listing) {
            for body in innermost_loops(&function) {
                let widest = ["%zmm", "%ymm", "%xmm"].into_iter().find(|register| {
                    body.iter().any(|instruction| instruction.operands.contains(register))
                });
                if widest != Some(register) || !is_product(body, fused) {
                    continue;
                }
                found += 1;
                spills += usize::from(body.iter().any(|instruction| {
                    instruction.operands.ends_with("(%rsp)") && instruction.name.contains("mov")
                }));
                for instruction in body.iter().filter(|i| i.name.starts_with("call")) {
                    broken.push(format!(
                        "{level}: {} calls {} at {:x}",
                        function.name, instruction.operands, instruction.at
                    ));
                }
            }
        }
        println!("{level}: {found} product loops, {spills} of them with a store to the stack");
        assert!(found >= least, "{level}: only {found} product loops were found");
    }
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
}
