//! An ordinary computer, to compare with.

use core::fmt;
use std::process::ExitCode;

pub(crate) fn start() -> ExitCode {
    if crate::run() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

pub(crate) fn say(text: fmt::Arguments<'_>) {
    println!("{text}");
}

/// Not counted here.
pub(crate) fn instructions() -> Option<u64> {
    None
}

/// Not counted here.
pub(crate) const COUNTED_TO: u64 = u64::MAX;

/// Not counted here.
pub(crate) fn heap_used() -> Option<usize> {
    None
}
