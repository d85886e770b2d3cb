//! Every order in which the threads of a small model can step, for the models of all rooms.

/// Runs `model` in every order of its threads' steps in which none is interrupted, where it need
/// not be, more than `preemptions` times, and with everything that a load may find there.
///
/// `LOOM_MAX_PREEMPTIONS` takes the place of the model's own bound. Few faults need more than two
/// interruptions, and each more multiplies the orders by the steps there are.
///
/// # Panics
///
/// In the order in which the model does, and where there is only one.
pub(crate) fn every_order(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    use alloc::sync::Arc;
    use core::sync::atomic::{AtomicUsize, Ordering};

    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(preemptions);
    // Three threads over two layers take more steps than loom expects.
    builder.max_branches = 10_000;
    let orders = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&orders);
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let orders = orders.load(Ordering::Relaxed);
    assert!(orders > 1, "nothing in the model can happen in another order");
}
