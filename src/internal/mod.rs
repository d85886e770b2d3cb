//! The test kit: models that the containers are compared with, an oracle that attention is
//! compared with, a digest that levels and targets are compared by, and the workloads and limits
//! that speed is measured by. Shared by tests, fuzz targets, benches and emulators.
//!
//! Not covered by semantic versioning.

pub mod digest;
pub mod doors;
#[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
pub mod group_ops;
pub mod limits;
pub mod numbers;
pub mod oracle;
#[cfg(all(test, loom))]
pub(crate) mod orders;
#[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
pub mod prefix_ops;
pub mod real;
#[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
pub mod request_ops;
pub mod saved_bytes;
pub mod sequence_ops;
pub mod snapshot;
pub mod types;
pub mod workloads;
