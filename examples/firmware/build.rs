//! Tells the linker where the board's memory is.

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("none") {
        return;
    }
    // What a middling Cortex-M4F has, so that linking shows that the program fits one. The emulated
    // boards have more, which the grid needs.
    let (flash, ram) =
        if env::var_os("CARGO_FEATURE_GRID").is_some() { (4096, 4096) } else { (512, 256) };
    let processor = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    let arm = processor == "arm";
    let layout = match &*processor {
        "arm" => format!(
            "MEMORY\n{{\n    FLASH : ORIGIN = 0x00000000, LENGTH = {flash}K\n    \
             RAM : ORIGIN = 0x20000000, LENGTH = {ram}K\n}}\n"
        ),
        // QEMU's `virt` has RAM alone; the program stands in the first part of it.
        "riscv32" => format!(
            "MEMORY\n{{\n    FLASH : ORIGIN = 0x80000000, LENGTH = {flash}K\n    \
             RAM : ORIGIN = 0x80400000, LENGTH = {ram}K\n}}\n\
             REGION_ALIAS(\"REGION_TEXT\", FLASH);\nREGION_ALIAS(\"REGION_RODATA\", FLASH);\n\
             REGION_ALIAS(\"REGION_DATA\", RAM);\nREGION_ALIAS(\"REGION_BSS\", RAM);\n\
             REGION_ALIAS(\"REGION_HEAP\", RAM);\nREGION_ALIAS(\"REGION_STACK\", RAM);\n"
        ),
        other => panic!("there is no board for {other} in src/board"),
    };
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    fs::write(out.join("memory.x"), layout).expect("OUT_DIR can be written");
    println!("cargo::rustc-link-search={}", out.display());
    if !arm {
        // Arm's link script asks for it by itself.
        println!("cargo::rustc-link-arg-bins=-Tmemory.x");
    }
    println!("cargo::rustc-link-arg-bins=-Tlink.x");
    println!("cargo::rustc-link-arg-bins=--nmagic");
}
