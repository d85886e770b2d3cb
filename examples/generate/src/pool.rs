//! The store that all requests share, and who may start.
//!
//! A request gets every block it can ever need before it starts, as page groups: one block in each
//! layer, all layers or none. Asking for blocks while running would let two requests, each half
//! done, wait for the other's half; with everything in hand a request that has started ends.
//!
//! Whoever does not fit waits in line. The line is in order of arrival: if a small request could
//! slip past, a large one might wait for ever.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use paged_kv::cache::{PageGroup, SharedPagedKv};

use crate::error::Error;
use crate::model::Sizes;

/// The shared store with its line of waiting requests.
#[derive(Debug)]
pub struct Pool {
    shared: SharedPagedKv,
    sizes: Sizes,
    block_size: usize,
    blocks: usize,
    line: Mutex<Line>,
    moved: Condvar,
}

#[derive(Debug, Default)]
struct Line {
    next_ticket: u64,
    now_serving: u64,
    peak: usize,
    handed_out: usize,
}

/// Some page groups, one holder each, given up when dropped.
#[derive(Debug)]
pub struct Pages<'p> {
    pool: &'p Pool,
    groups: Vec<PageGroup>,
}

impl Pool {
    /// A store of `blocks` blocks in each layer of a model.
    ///
    /// # Errors
    ///
    /// [`Error::Kv`] where no memory can have that size.
    pub fn new(sizes: &Sizes, block_size: usize, blocks: usize) -> Result<Self, Error> {
        let Sizes { layers, n_kv_heads, head_dim, .. } = *sizes;
        let shared = SharedPagedKv::try_new(layers, block_size, blocks, n_kv_heads, head_dim)
            .map_err(|error| {
                Error::Kv(format!("{blocks} blocks of {block_size} positions: {error}"))
            })?;
        let line = Mutex::new(Line::default());
        Ok(Pool { shared, sizes: *sizes, block_size, blocks, line, moved: Condvar::new() })
    }

    /// Takes `count` groups, all or none, after everybody who asked before. `waiting` is called
    /// with the number of free groups, once, if there is reason to wait.
    ///
    /// # Errors
    ///
    /// [`Error::NeverFits`], at once, for more groups than the pool has. A caller that holds
    /// groups while asking for others waits for itself, if the two together do not fit.
    pub fn acquire(&self, count: usize, waiting: impl FnOnce(usize)) -> Result<Pages<'_>, Error> {
        if count > self.blocks {
            let positions = count.saturating_mul(self.block_size);
            return Err(Error::NeverFits { positions, need: count, have: self.blocks });
        }
        let mut line = self.line();
        let ticket = line.next_ticket;
        line.next_ticket += 1;
        let mut waiting = Some(waiting);
        loop {
            // Nobody else takes while the line is locked, so what is free now stays free.
            let free = self.shared.free_groups();
            if line.now_serving == ticket && free >= count {
                break;
            }
            if let Some(waiting) = waiting.take() {
                waiting(free);
            }
            line = self.moved.wait(line).unwrap_or_else(PoisonError::into_inner);
        }
        let mut pages = Pages { pool: self, groups: Vec::with_capacity(count) };
        while pages.groups.len() < count {
            let group = self.shared.acquire_group();
            pages.groups.push(group.expect("free groups were counted and nobody else takes"));
        }
        line.now_serving += 1;
        line.handed_out += count;
        line.peak = line.peak.max(self.blocks - self.shared.free_groups());
        drop(line);
        self.moved.notify_all();
        Ok(pages)
    }

    /// The store.
    pub fn shared(&self) -> &SharedPagedKv {
        &self.shared
    }

    /// The model's sizes.
    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// Positions in one block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks in each layer.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The most blocks that were held at once, in each layer.
    pub fn peak(&self) -> usize {
        self.line().peak
    }

    /// Blocks handed out since the start, in each layer.
    pub fn handed_out(&self) -> usize {
        self.line().handed_out
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        // Nothing under this lock leaves a line half changed, so a panic elsewhere is no reason
        // to stop serving.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pages<'_> {
    /// The groups, in order of positions.
    pub fn groups(&self) -> &[PageGroup] {
        &self.groups
    }

    /// A second holder of the same groups.
    pub fn share(&self) -> Self {
        let mut pages = Pages { pool: self.pool, groups: Vec::with_capacity(self.groups.len()) };
        for &group in &self.groups {
            self.pool.shared.retain_group(group);
            pages.groups.push(group);
        }
        pages
    }
}

impl Drop for Pages<'_> {
    fn drop(&mut self) {
        for group in self.groups.drain(..) {
            self.pool.shared.release_group(group);
        }
        // Under the lock: a request that has just found too little free is already listening.
        let line = self.pool.line();
        self.pool.moved.notify_all();
        drop(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    fn pool(blocks: usize) -> Pool {
        let sizes = Sizes {
            layers: 2,
            width: 8,
            inner: 8,
            n_heads: 2,
            n_kv_heads: 1,
            head_dim: 4,
            vocabulary: 10,
            context: 100,
            rope_base: 1e4,
            epsilon: 1e-5,
        };
        Pool::new(&sizes, 16, blocks).unwrap()
    }

    #[test]
    fn what_is_dropped_comes_back() {
        let pool = pool(5);
        let pages = pool.acquire(3, |_| ()).unwrap();
        let again = pages.share();
        drop(pages);
        assert_eq!(pool.shared().free_groups(), 2);
        drop(again);
        assert_eq!(pool.shared().free_groups(), 5);
        assert_eq!((pool.peak(), pool.handed_out()), (3, 3));
    }

    #[test]
    fn more_than_the_pool_is_refused_at_once() {
        let pool = pool(5);
        let error = pool.acquire(6, |_| panic!("there is nothing to wait for")).unwrap_err();
        assert!(matches!(error, Error::NeverFits { need: 6, have: 5, .. }), "{error}");
        // The line has not been left standing.
        assert_eq!(pool.acquire(5, |_| ()).unwrap().groups().len(), 5);
    }

    #[test]
    fn a_small_request_does_not_pass_a_large_one() {
        let pool = pool(4);
        let first = pool.acquire(3, |_| ()).unwrap();
        let (tell, order) = mpsc::channel();
        let (asked, queued) = mpsc::channel();
        thread::scope(|scope| {
            for count in [4, 1] {
                let (tell, asked, pool) = (tell.clone(), asked.clone(), &pool);
                scope.spawn(move || {
                    let _pages = pool.acquire(count, |_| asked.send(()).unwrap()).unwrap();
                    tell.send(count).unwrap();
                });
                queued.recv().unwrap();
            }
            drop(first);
        });
        assert_eq!(order.try_iter().collect::<Vec<_>>(), [4, 1]);
        assert_eq!(pool.shared().free_groups(), 4);
    }
}
