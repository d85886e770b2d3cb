//! Every order of steps in which a few small runs can go, with a bound on how often a thread is
//! interrupted where it need not be.
//!
//! Run by `.ci/loom`.

use loom::cell::UnsafeCell;

use super::*;
use crate::internal::orders::every_order;

/// A number whose unordered use from two threads loom reports.
struct Cell(UnsafeCell<usize>);

// SAFETY: loom watches over it.
unsafe impl Sync for Cell {}

impl Cell {
    fn add(&self) {
        self.0.with_mut(|number| {
            // SAFETY: loom has stopped the model if anyone else may be here.
            unsafe { *number += 1 };
        });
    }
}

fn cells(count: usize) -> Vec<Cell> {
    (0..count).map(|_| Cell(UnsafeCell::new(0))).collect()
}

fn values(cells: Vec<Cell>) -> Vec<usize> {
    cells
        .into_iter()
        .map(|cell| {
            cell.0.with(|number| {
                // SAFETY: as above.
                unsafe { *number }
            })
        })
        .collect()
}

/// What a chunk did is seen by the caller, and by the next run in the same place.
#[test]
fn runs_follow_each_other() {
    every_order(2, || {
        let pool = ThreadPool::new(2);
        let cells = cells(2);
        for _ in 0..2 {
            pool.for_each_chunk(&mut [0.0; 2], 1, &|index, _| cells[index].add());
        }
        assert_eq!(values(cells), [2, 2]);
    });
}

#[test]
fn three_threads() {
    every_order(1, || {
        let pool = ThreadPool::new(3);
        let cells = cells(3);
        pool.for_each_chunk(&mut [0.0; 3], 1, &|index, _| cells[index].add());
        assert_eq!(values(cells), [1; 3]);
    });
}

#[test]
fn two_callers() {
    every_order(2, || {
        let pool = Arc::new(ThreadPool::new(2));
        let other = pool.clone();
        let other = loom::thread::spawn(move || {
            let cells = cells(2);
            other.for_each_chunk(&mut [0.0; 2], 1, &|index, _| cells[index].add());
            assert_eq!(values(cells), [1; 2]);
        });
        let cells = cells(2);
        pool.for_each_chunk(&mut [0.0; 2], 1, &|index, _| cells[index].add());
        assert_eq!(values(cells), [1; 2]);
        other.join().unwrap();
    });
}

#[test]
fn a_panic_leaves_nobody_at_work() {
    every_order(2, || {
        let pool = ThreadPool::new(2);
        let cells = cells(3);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.for_each_chunk(&mut [0.0; 3], 1, &|index, _| {
                cells[index].add();
                if index == 1 {
                    // Not `panic!`, which would print in every order.
                    resume_unwind(Box::new(7_u8));
                }
            });
        }));
        assert_eq!(result.unwrap_err().downcast_ref(), Some(&7_u8));
        let values = values(cells);
        assert_eq!(values[..2], [1, 1]);
        assert!(values[2] <= 1);
    });
}
