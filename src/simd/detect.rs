//! What this processor has and the operating system lets us use, with `core` alone.
//!
//! CPUID says what the processor can do. It does not say whether the operating system saves the
//! wide registers when it switches threads; using them without that loses numbers at random. So
//! XCR0 is asked too, which may only be read where OSXSAVE is set.

use core::arch::x86_64::{__cpuid_count, _xgetbv, CpuidResult};

/// The features that a level can ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Features {
    /// `avx2`, `fma`, `f16c` and ymm state.
    pub(super) avx2: bool,
    /// `avx512f`, `avx512bw`, `avx512dq`, `avx512vl`, all of the above, and zmm state.
    pub(super) avx512: bool,
    /// `avx512bf16` with all of the above.
    pub(super) bf16: bool,
    /// `avx512vnni` with all of the above but bf16.
    pub(super) vnni: bool,
}

const fn bit(register: u32, bit: u32) -> bool {
    register & (1 << bit) != 0
}

/// Asks the processor. A few hundred nanoseconds, much more under a hypervisor that traps CPUID:
/// the answer is kept by the caller.
pub(super) fn features() -> Features {
    const NONE: Features = Features { avx2: false, avx512: false, bf16: false, vnni: false };
    // An enclave must not ask; a kernel built without vector registers must not use them, whatever
    // is saved for its programs.
    if cfg!(any(target_env = "sgx", not(target_feature = "sse2"), miri)) {
        return NONE;
    }
    if cpuid(0, 0).eax < 7 {
        return NONE;
    }
    let basic = cpuid(1, 0).ecx;
    let (fma, osxsave, avx, f16c) =
        (bit(basic, 12), bit(basic, 27), bit(basic, 28), bit(basic, 29));
    if !osxsave {
        return NONE;
    }
    // SAFETY: OSXSAVE is set, so XGETBV exists and register 0 may be read.
    let saved = unsafe { xcr0() };
    let ymm_saved = saved & 0b110 == 0b110;
    let zmm_saved = saved & 0b1110_0110 == 0b1110_0110;
    let leaf = cpuid(7, 0);
    let extended = leaf.ebx;
    let avx2 = ymm_saved && avx && fma && f16c && bit(extended, 5);
    let (f, dq, bw, vl) =
        (bit(extended, 16), bit(extended, 17), bit(extended, 30), bit(extended, 31));
    let avx512 = avx2 && zmm_saved && f && dq && bw && vl;
    let vnni = avx512 && bit(leaf.ecx, 11);
    let bf16 = avx512 && leaf.eax >= 1 && bit(cpuid(7, 1).eax, 5);
    Features { avx2, avx512, bf16, vnni }
}

#[allow(unused_unsafe, reason = "the intrinsic became safe after the oldest Rust we support")]
fn cpuid(leaf: u32, part: u32) -> CpuidResult {
    // SAFETY: every x86-64 processor has CPUID, and we are in no enclave, see `features`.
    unsafe { __cpuid_count(leaf, part) }
}

/// The register sets that the operating system saves.
///
/// # Safety
///
/// CPUID must report OSXSAVE.
#[target_feature(enable = "xsave")]
unsafe fn xcr0() -> u64 {
    // SAFETY: the caller has checked OSXSAVE.
    unsafe { _xgetbv(0) }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;
    use std::is_x86_feature_detected as has;

    #[test]
    fn our_view_is_stds_view() {
        let avx2 = has!("avx2") && has!("fma") && has!("f16c");
        let avx512 =
            has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") && avx2;
        let bf16 = avx512 && has!("avx512bf16");
        let vnni = avx512 && has!("avx512vnni");
        assert_eq!(features(), Features { avx2, avx512, bf16, vnni });
    }
}
