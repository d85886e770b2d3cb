//! Room for a request, made from what is only cached where the pool is short.

use alloc::vec::Vec;
use core::ops::Deref;

use super::cache::PrefixCache;
use crate::error::{PagedKvError, PagedStoreExhausted};
use crate::id::PageGroup;
use crate::share::sequence::PagedSequence;
use crate::share::shared::SharedPagedKv;
use crate::share::spec::LayerElement;

impl<P, E> PrefixCache<P>
where
    P: Deref<Target = SharedPagedKv<E>> + Clone,
    E: LayerElement,
{
    /// [`PagedSequence::reserve`]; where the pool is short, evicts as many blocks as are lacking and
    /// tries again.
    ///
    /// What goes is what [`evict`](Self::evict) takes: nothing that a lease or a sequence uses, or
    /// that is pinned. Where not enough may go, nothing goes.
    ///
    /// # Errors
    ///
    /// As `PagedSequence::reserve`: [`PagedKvError::Exhausted`] where nothing that may go would be
    /// enough, and a request has to give way or to wait. [`PagedKvError::WrongStore`] for a sequence
    /// of another pool. The sequence is as it was then, and so is the cache, but where layers differ in
    /// their blocks or windows: one that is not short gets blocks that another one lacked.
    ///
    /// # Deadlock
    ///
    /// As `PagedSequence::reserve`: with no guard of these layers in hand. A lock that the cache is
    /// kept behind is held meanwhile; so reserve without the cache first where that one is wanted by
    /// many, and come here with the refusal.
    ///
    /// # Cost
    ///
    /// That of `reserve`, and where the pool is short, of `evict`; a list of what goes.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::PagedKvError;
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    /// use paged_kv::prefix::{HashKey, PrefixCache, Priority};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 4); // 2 layers of 4 blocks of 16 positions
    /// let mut prefixes = PrefixCache::new(&shared, 16, HashKey::new([7; 16]));
    /// let tokens: Vec<u32> = (0..48).collect();
    /// let groups = prefixes.acquire_groups(3)?;
    /// prefixes.insert(b"", &tokens, &groups, Priority::NORMAL)?;
    /// groups.into_iter().for_each(|group| assert!(!shared.release_group(group)));
    ///
    /// // One block is free, three are cached; two are wanted, and one goes.
    /// let mut sequence = PagedSequence::new(&shared);
    /// assert!(sequence.reserve(32).is_err());
    /// prefixes.reserve(&mut sequence, 32)?;
    /// assert_eq!(prefixes.stats().cached, 2);
    ///
    /// // Five are never there, and nothing goes for them.
    /// let refused = prefixes.reserve(&mut sequence, 80).unwrap_err();
    /// assert!(matches!(refused, PagedKvError::Exhausted(_)));
    /// assert_eq!(prefixes.stats().cached, 2);
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn reserve<S>(
        &mut self,
        sequence: &mut PagedSequence<S, E>,
        n: usize,
    ) -> Result<(), PagedKvError>
    where
        S: Deref<Target = SharedPagedKv<E>>,
    {
        let stores = (sequence.shared().first_store(), self.holders.first_store());
        if let (Some(need), Some(have)) = stores
            && need != have
        {
            return Err(PagedKvError::WrongStore { need, have });
        }
        loop {
            match sequence.reserve(n) {
                Err(PagedKvError::Exhausted(lack)) if self.make_room(lack) => {}
                other => return other,
            }
        }
    }

    /// [`SharedPagedKv::acquire_groups`]; where there are not enough, evicts as many as are lacking
    /// and tries again.
    ///
    /// For a prompt that is to be cached: its sequence [adopts](PagedSequence::adopt_groups) these
    /// behind those of its lease, grows into them, and its full blocks are
    /// [inserted](Self::insert). What a lease holds does not go.
    ///
    /// # Examples
    ///
    /// ```
    /// # use paged_kv::cache::SharedPagedKv;
    /// # use paged_kv::prefix::{HashKey, PrefixCache, Priority};
    /// # let shared = SharedPagedKv::new(1, 4, 8, 1, 1);
    /// # let mut prefixes = PrefixCache::new(&shared, 4, HashKey::new([7; 16]));
    /// # let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
    /// # let groups = prefixes.acquire_groups(2)?;
    /// # prefixes.insert(b"tenant", &prompt, &groups, Priority::NORMAL)?;
    /// # groups.into_iter().for_each(|group| assert!(!shared.release_group(group)));
    /// // Cached are the two blocks of `prompt`, 1 to 8, in a pool of 8 blocks of 4 positions.
    /// let groups = prefixes.acquire_groups(7)?; // six are free, and one of the cached blocks goes
    /// assert_eq!(prefixes.stats().cached, 1);
    /// assert!(prefixes.acquire_groups(2).is_err()); // one could go, which is not enough
    /// assert_eq!(prefixes.stats().cached, 1);
    /// # groups.into_iter().for_each(|group| assert!(shared.release_group(group)));
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedStoreExhausted`] where what may go would not be enough; nothing has changed then.
    ///
    /// # Deadlock
    ///
    /// As [`reserve`](Self::reserve).
    ///
    /// # Cost
    ///
    /// That of `SharedPagedKv::acquire_groups`, and where groups are lacking, of
    /// [`evict`](Self::evict); a list of what goes.
    #[must_use = "dropping the handles does not release the groups"]
    #[track_caller]
    pub fn acquire_groups(&mut self, n: usize) -> Result<Vec<PageGroup>, PagedStoreExhausted> {
        loop {
            match self.holders.acquire_groups(n) {
                Err(lack) if self.make_room(lack) => {}
                other => return other,
            }
        }
    }

    /// Evicts what is lacking, or nothing.
    fn make_room(&mut self, lack: PagedStoreExhausted) -> bool {
        // Somebody may have given back since it was asked for; to ask again is enough then.
        lack.need <= lack.free || self.try_evict(lack.need - lack.free)
    }
}
