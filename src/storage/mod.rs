pub(crate) mod memory;
pub(crate) mod view;
