//! The test kit: models that the containers are compared with, shared by tests and fuzz targets.
//!
//! Not covered by semantic versioning.

pub mod digest;
pub mod doors;
pub mod numbers;
pub mod oracle;
pub mod real;
