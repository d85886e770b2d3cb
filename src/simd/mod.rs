//! Stub while the room is built.
/// Stub.
#[derive(Clone, Copy, Debug)]
pub struct Level;
impl Level {
    pub(crate) fn run(self, _: ()) {}
}
