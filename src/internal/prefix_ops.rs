//! Operations on a prefix cache and those who use it, against a model.
//!
//! The model is a list of prefixes: for each cached block its salt and *all* tokens from the first
//! to its last, searched from one end to the other. It knows no tree, no hash and no order. Beside
//! it stands what was written into each group, so that a wrong hit is seen as what it is. Tokens
//! are 0 and 1, so that prompts meet; with one bit of hash, all keys do.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use crate::cache::SharedPagedKv;
use crate::error::GroupError;
use crate::id::PageGroup;
use crate::prefix::{
    HashKey, InsertError, Lease, Pin, PinError, PrefixCache, PrefixEvent, Priority, RemoveError,
};
use crate::share::lock::Mutex;

/// Requests that hold leases and groups.
pub const REQUESTS: usize = 3;
const SALTS: [&[u8]; 2] = [b"", b"tenant"];

/// How large everything is.
#[derive(Clone, Copy, Debug)]
pub struct World {
    /// Tokens of a block.
    pub block_size: usize,
    /// Groups in the pool.
    pub groups: usize,
    /// Bits of a hash that tables see.
    pub hash_bits: u32,
}

/// A prompt: token `i` is bit `i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt {
    salt: u8,
    len: u8,
    bits: u16,
}

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Look a prompt up, for a request that holds nothing else from then on.
    Lookup { request: u8, prompt: Prompt },
    /// The same, then compute the rest and insert it all.
    Serve { request: u8, prompt: Prompt, priority: u8 },
    /// Let go of the part of a block.
    ReleasePartial { request: u8 },
    /// Take the lease's groups over.
    IntoGroups { request: u8 },
    /// The request ends.
    End { request: u8 },
    /// Evict so many.
    Evict { n: u8 },
    /// Pin a prompt.
    Pin { prompt: Prompt },
    /// Give one of the pins back.
    Unpin { pin: u8 },
    /// Allow so many pinned blocks.
    Budget { blocks: u8 },
    /// Insert what must be refused.
    Misuse { prompt: Prompt, how: u8 },
    /// A salt goes.
    RemoveSalt { salt: u8 },
    /// Everything goes.
    Clear,
}

impl Op {
    /// Reads four bytes as an operation.
    pub fn decode([kind, a, b, c]: [u8; 4]) -> Op {
        let bits = u16::from_le_bytes([b, c]);
        let prompt = Prompt { salt: a / 16 % 2, len: a % 16, bits };
        let request = a / 32;
        match kind % 32 {
            0..=4 => Op::Lookup { request, prompt },
            5..=15 => Op::Serve { request, prompt, priority: kind / 32 % 4 },
            16 => Op::ReleasePartial { request },
            17 => Op::IntoGroups { request },
            18..=20 => Op::End { request },
            21..=23 => Op::Evict { n: a % 8 },
            24 | 25 => Op::Pin { prompt },
            26 => Op::Unpin { pin: a },
            27 => Op::Budget { blocks: a },
            28..=30 => Op::Misuse { prompt, how: kind / 32 },
            _ if a < 64 => Op::Clear,
            _ if a < 192 => Op::RemoveSalt { salt: a % 2 },
            _ => Op::End { request },
        }
    }

    /// Reads a program.
    pub fn decode_all(bytes: &[u8]) -> Vec<Op> {
        bytes.chunks_exact(4).map(|op| Op::decode([op[0], op[1], op[2], op[3]])).collect()
    }
}

impl Prompt {
    fn salt(self) -> &'static [u8] {
        SALTS[usize::from(self.salt)]
    }

    fn tokens(self) -> Vec<u32> {
        (0..self.len).map(|at| u32::from(self.bits >> at & 1)).collect()
    }
}

/// A salt, and all tokens from the first on.
type Prefix = (&'static [u8], Vec<u32>);

/// A cached block as the model knows it: everything up to its end.
#[derive(Clone, Debug)]
struct Entry {
    prefix: Prefix,
    group: PageGroup,
    priority: u8,
    used: u64,
    pins: u32,
}

/// What a request holds.
#[derive(Debug, Default)]
struct Request {
    lease: Option<Lease<Arc<SharedPagedKv>>>,
    own: Vec<PageGroup>,
}

impl Request {
    fn held(&self) -> impl Iterator<Item = &[PageGroup]> {
        self.lease.iter().map(Lease::groups).chain([&*self.own])
    }
}

/// The groups that events have told of.
#[derive(Clone)]
struct Told(Arc<Mutex<Vec<PageGroup>>>);

impl fmt::Debug for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.lock().fmt(f)
    }
}

/// What the model expects of the counts.
#[derive(Debug, Default)]
struct Counts {
    hits: u64,
    partial_hits: u64,
    misses: u64,
    saved: u64,
    stored: u64,
    evicted: u64,
}

/// A pool, a cache and those who use them, and what they should hold.
#[derive(Debug)]
pub struct Model {
    world: World,
    shared: Arc<SharedPagedKv>,
    cache: PrefixCache<Arc<SharedPagedKv>>,
    requests: [Request; REQUESTS],
    pins: Vec<(Pin, Prefix)>,
    entries: Vec<Entry>,
    /// What is in each group that was ever filled.
    written: Vec<(PageGroup, Prefix)>,
    /// What the events say is cached.
    told: Told,
    budget: usize,
    clock: u64,
    counts: Counts,
}

impl Model {
    /// An empty cache over a full pool.
    pub fn new(world: World) -> Self {
        let World { block_size, groups, hash_bits } = world;
        let shared = Arc::new(SharedPagedKv::new(1, block_size, groups, 1, 1));
        let key = HashKey::new(*b"any sixteen byte");
        let mut cache =
            PrefixCache::with_hash_bits(Arc::clone(&shared), block_size, key, hash_bits);
        let told = Told(Arc::new(Mutex::new(Vec::new())));
        let listener = told.clone();
        cache.set_sink(Some(alloc::boxed::Box::new(move |event| {
            let mut told = listener.0.lock();
            match event {
                PrefixEvent::Stored { group, .. } => told.push(group),
                PrefixEvent::Removed { group, .. } => told.retain(|other| *other != group),
                PrefixEvent::Cleared => told.clear(),
            }
        })));
        Model {
            world,
            shared,
            cache,
            requests: Default::default(),
            pins: Vec::new(),
            entries: Vec::new(),
            written: Vec::new(),
            told,
            budget: 0,
            clock: 0,
            counts: Counts::default(),
        }
    }

    /// Runs a program, comparing everything after each step, and then gives all back.
    pub fn run(world: World, ops: &[Op]) {
        let mut model = Self::new(world);
        for op in ops {
            model.step(*op);
            model.check();
        }
        let Model { shared, cache, requests, .. } = model;
        // In an order that no rule asks for: leases outlive their cache.
        drop(cache);
        for request in requests {
            release(&shared, &request.own);
            drop(request.lease);
        }
        assert_eq!(shared.free_groups(), world.groups);
    }

    /// Runs one operation and compares its result.
    pub fn step(&mut self, op: Op) {
        self.clock += 1;
        let at = |request: u8| usize::from(request) % REQUESTS;
        match op {
            Op::Lookup { request, prompt } => self.lookup(at(request), prompt),
            Op::Serve { request, prompt, priority } => self.serve(at(request), prompt, priority),
            Op::ReleasePartial { request } => self.release_partial(at(request)),
            Op::IntoGroups { request } => {
                let request = &mut self.requests[at(request)];
                if let Some(lease) = request.lease.take() {
                    request.own.extend(lease.into_groups());
                }
            }
            Op::End { request } => self.end(at(request)),
            Op::Evict { n } => {
                let need = self.cache.evictable();
                let most = usize::from(n).min(need);
                assert_eq!(self.cache.evict(usize::from(n)), most);
                assert_eq!(self.evict(usize::from(n)), most);
            }
            Op::Pin { prompt } => self.pin(prompt),
            Op::Unpin { pin } if !self.pins.is_empty() => {
                let (pin, prefix) = self.pins.swap_remove(usize::from(pin) % self.pins.len());
                let mut free = 0;
                for entry in self.entries.iter_mut().filter(|entry| covers(&prefix, entry)) {
                    entry.pins -= 1;
                    free += usize::from(entry.pins == 0);
                }
                assert_eq!(self.cache.unpin(pin), Ok(free));
            }
            Op::Unpin { .. } => {}
            Op::Budget { blocks } => {
                self.budget = usize::from(blocks);
                self.cache.set_pin_budget(self.budget);
            }
            Op::Misuse { prompt, how } => self.misuse(prompt, how),
            Op::RemoveSalt { salt } => self.remove_salt(SALTS[usize::from(salt)]),
            Op::Clear => {
                let gone = |entry: &&Entry| self.held(entry.group) == 0;
                let need = self.entries.iter().filter(gone).count();
                assert_eq!(self.cache.clear(), need);
                self.entries.clear();
                for (pin, _) in self.pins.drain(..) {
                    assert_eq!(self.cache.unpin(pin), Err(PinError::UnknownPin));
                }
            }
        }
    }

    /// Compares all that can be observed.
    pub fn check(&self) {
        let others = self.requests.iter().flat_map(Request::held);
        if let Err(report) = self.cache.check_invariants(others) {
            panic!("{report}");
        }
        let mut alive = self.entries.iter().map(|entry| entry.group).collect::<Vec<_>>();
        for group in self.requests.iter().flat_map(Request::held).flatten() {
            if !alive.contains(group) {
                alive.push(*group);
            }
        }
        for &group in &alive {
            let cached = self.entries.iter().filter(|entry| entry.group == group).count();
            assert_eq!(self.shared.group_refs(group) as usize, cached + self.held(group));
        }
        assert_eq!(self.shared.free_groups(), self.world.groups - alive.len());
        assert_eq!(self.cache.evictable(), self.clone_to_evict().evict(usize::MAX));

        let (stats, counts) = (self.cache.stats(), &self.counts);
        let pinned = self.entries.iter().filter(|entry| entry.pins > 0).count();
        let salts = SALTS.iter().filter(|salt| self.entries.iter().any(|e| e.prefix.0 == **salt));
        assert_eq!((stats.cached, stats.pinned), (self.entries.len(), pinned));
        assert_eq!(stats.salts, salts.count());
        assert_eq!((stats.hits, stats.misses), (counts.hits, counts.misses));
        assert_eq!((stats.partial_hits, stats.tokens_saved), (counts.partial_hits, counts.saved));
        assert_eq!((stats.stored, stats.evicted), (counts.stored, counts.evicted));

        let told = self.told.0.lock();
        assert_eq!(told.len(), self.entries.len());
        assert!(self.entries.iter().all(|entry| told.contains(&entry.group)));
    }

    /// For the canary: releases a count that is the cache's own.
    pub fn steal(&mut self) {
        let group = self.entries[0].group;
        assert!(self.shared.release_group(group));
    }

    /// Holders of a group beside the cache.
    fn held(&self, group: PageGroup) -> usize {
        let held = self.requests.iter().flat_map(Request::held).flatten();
        held.filter(|other| **other == group).count()
    }

    fn entry(&self, salt: &[u8], tokens: &[u32]) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.prefix.0 == salt && entry.prefix.1 == tokens)
    }

    /// How many blocks of these tokens are cached.
    fn full(&self, salt: &[u8], tokens: &[u32]) -> usize {
        let size = self.world.block_size;
        let is_cached = |blocks: &usize| self.entry(salt, &tokens[..blocks * size]).is_some();
        (1..=tokens.len() / size).take_while(is_cached).count()
    }

    /// The most positions that any cached block gives beyond full ones.
    fn partial(&self, salt: &[u8], tokens: &[u32], full: usize) -> usize {
        let start = full * self.world.block_size;
        let agree = self.entries.iter().map(|entry| {
            let (other, all) = &entry.prefix;
            if *other != salt || all.len() != start + self.world.block_size {
                return 0;
            }
            let common = all.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            common.saturating_sub(start)
        });
        agree.max().unwrap_or(0)
    }

    fn lookup(&mut self, request: usize, prompt: Prompt) {
        self.end(request);
        let (salt, tokens, size) = (prompt.salt(), prompt.tokens(), self.world.block_size);
        let most = &tokens[..tokens.len().saturating_sub(1)];
        let full = self.full(salt, most);
        let partial = self.partial(salt, most, full);
        let covered = full * size + partial;
        assert_eq!(self.cache.peek(salt, &tokens), covered);
        let lease = self.cache.lookup(salt, &tokens);
        assert_eq!((lease.covered(), lease.is_empty()), (covered, covered == 0));
        assert_eq!(lease.full_groups(), &lease.groups()[..full]);
        let part = lease.partial().map(|part| (part.positions, part.group));
        assert_eq!(part.map(|part| part.0), (partial > 0).then_some(partial));
        assert_eq!(part.map(|part| part.1), lease.groups().get(full).copied());
        // Whatever any list says: the rows in these groups are those of this prompt.
        for (index, group) in lease.groups().iter().enumerate() {
            let (start, end) = (index * size, covered.min((index + 1) * size));
            let (_, (of, all)) = self.written.iter().find(|(other, _)| other == group).unwrap();
            assert_eq!((*of, &all[..end]), (salt, &tokens[..end]));
            assert_eq!(all.len(), start + size);
            let entry = self.entries.iter_mut().find(|entry| entry.group == *group);
            entry.expect("what is found is cached").used = self.clock;
        }
        self.counts.hits += u64::from(covered > 0);
        self.counts.misses += u64::from(covered == 0);
        self.counts.partial_hits += u64::from(partial > 0);
        self.counts.saved += covered as u64;
        self.requests[request].lease = Some(lease);
    }

    fn serve(&mut self, request: usize, prompt: Prompt, priority: u8) {
        self.lookup(request, prompt);
        let (salt, tokens, size) = (prompt.salt(), prompt.tokens(), self.world.block_size);
        self.requests[request].lease.as_mut().expect("just looked up").release_partial();
        let need = tokens.len().div_ceil(size) - self.groups(request).len();
        let (free, goes) = (self.shared.free_groups(), self.cache.evictable());
        match self.cache.acquire_groups(need) {
            Ok(groups) => {
                assert!(need <= free + goes);
                let lack = need.saturating_sub(free);
                assert_eq!(self.evict(lack), lack);
                self.requests[request].own = groups;
            }
            Err(refused) => {
                assert!(need > free + goes);
                assert_eq!((refused.need, refused.free), (need, free));
                return; // what it has it keeps, and nothing has gone
            }
        }
        let groups = self.groups(request);
        let have = self.requests[request].lease.as_ref().map_or(0, |lease| lease.groups().len());
        for (index, &group) in groups.iter().enumerate().skip(have) {
            let end = tokens.len().min((index + 1) * size);
            self.written.retain(|(other, _)| *other != group);
            self.written.push((group, (salt, tokens[..end].into())));
        }
        self.clock += 1; // later than what the lookup used, a part of a block perhaps
        let known = self.full(salt, &tokens);
        let inserted = self.cache.insert(salt, &tokens, &groups, Priority::new(priority));
        let inserted = inserted.expect("groups of its own");
        let blocks = tokens.len() / size;
        assert_eq!((inserted.known, inserted.stored), (known, blocks - known));
        self.counts.stored += (blocks - known) as u64;
        for (index, &group) in groups.iter().enumerate().take(blocks) {
            let prefix = (salt, tokens[..(index + 1) * size].to_vec());
            if index >= known {
                self.entries.push(Entry { prefix, group, priority, used: self.clock, pins: 0 });
                continue;
            }
            let entry = self.entries.iter_mut().find(|entry| entry.prefix == prefix);
            let entry = entry.expect("it is known");
            (entry.used, entry.priority) = (self.clock, entry.priority.max(priority));
        }
    }

    /// Groups of a request, in the order of their positions.
    fn groups(&self, request: usize) -> Vec<PageGroup> {
        self.requests[request].held().flatten().copied().collect()
    }

    fn release_partial(&mut self, request: usize) {
        let size = self.world.block_size;
        if let Some(lease) = &mut self.requests[request].lease {
            let full = lease.covered() / size * size;
            lease.release_partial();
            assert_eq!((lease.covered(), lease.partial()), (full, None));
            assert_eq!(lease.groups(), lease.full_groups());
        }
    }

    fn end(&mut self, request: usize) {
        let request = core::mem::take(&mut self.requests[request]);
        release(&self.shared, &request.own);
        drop(request.lease);
    }

    fn remove_salt(&mut self, salt: &[u8]) {
        let of = |entry: &&Entry| entry.prefix.0 == salt;
        let pinned = self.entries.iter().filter(of).filter(|entry| entry.pins > 0).count();
        let gone = |entry: &&Entry| self.held(entry.group) == 0;
        let expected = match pinned {
            0 => Ok(self.entries.iter().filter(of).filter(gone).count()),
            blocks => Err(RemoveError::Pinned { blocks }),
        };
        assert_eq!(self.cache.remove_salt(salt), expected);
        if expected.is_ok() {
            self.entries.retain(|entry| entry.prefix.0 != salt);
        }
    }

    /// What `evict` should do, in the model alone.
    fn evict(&mut self, n: usize) -> usize {
        let mut freed = 0;
        while freed < n {
            let Some(index) = self.next_to_go() else { break };
            self.entries.swap_remove(index);
            self.counts.evicted += 1;
            freed += 1;
        }
        freed
    }

    fn next_to_go(&self) -> Option<usize> {
        let goes = |entry: &Entry| {
            let start = entry.prefix.1.len();
            let is_child = |other: &Entry| {
                let (salt, all) = &other.prefix;
                *salt == entry.prefix.0 && all.len() > start && all[..start] == *entry.prefix.1
            };
            let alone = self.held(entry.group) == 0 && entry.pins == 0;
            alone && !self.entries.iter().any(is_child)
        };
        let goes = (0..self.entries.len()).filter(|index| goes(&self.entries[*index]));
        goes.min_by_key(|index| (self.entries[*index].priority, self.entries[*index].used))
    }

    /// A model with the same entries and the same holders, to evict from.
    fn clone_to_evict(&self) -> Model {
        let world = World { groups: 0, ..self.world };
        let mut model = Model { entries: self.entries.clone(), ..Model::new(world) };
        for (copy, request) in model.requests.iter_mut().zip(&self.requests) {
            copy.own = request.held().flatten().copied().collect();
        }
        model
    }

    fn pin(&mut self, prompt: Prompt) {
        let (salt, tokens, size) = (prompt.salt(), prompt.tokens(), self.world.block_size);
        let (need, have) = (tokens.len() / size, self.full(salt, &tokens));
        let prefix = (salt, tokens[..need * size].to_vec());
        let pinned = self.entries.iter().filter(|entry| entry.pins > 0).count();
        let left = self.budget.saturating_sub(pinned);
        let path = || self.entries.iter().filter(|entry| covers(&prefix, entry));
        let fresh = path().filter(|entry| entry.pins == 0).count();
        let expected = match () {
            _ if need == 0 => Err(PinError::TooShort { need: size, have: tokens.len() }),
            _ if have < need => Err(PinError::NotCached { need, have }),
            _ if fresh > left => Err(PinError::OverBudget { need: fresh, left }),
            _ => Ok(()),
        };
        let pin = self.cache.pin(salt, &tokens);
        assert_eq!(pin.as_ref().map(drop), expected.as_ref().map(drop));
        if let Ok(pin) = pin {
            for entry in self.entries.iter_mut().filter(|entry| covers(&prefix, entry)) {
                entry.pins += 1;
            }
            self.pins.push((pin, prefix));
        }
    }

    /// Inserts more of what is cached with groups that must be refused; `check` sees that nothing
    /// has changed.
    fn misuse(&mut self, prompt: Prompt, how: u8) {
        let (salt, tokens, size) = (prompt.salt(), prompt.tokens(), self.world.block_size);
        let (need, known) = (tokens.len() / size, self.full(salt, &tokens));
        if known == need {
            return;
        }
        let mut groups: Vec<_> =
            core::iter::from_fn(|| self.shared.acquire_group()).take(need - known).collect();
        let (fresh, mut stale) = (groups.clone(), false);
        let elsewhere = SharedPagedKv::new(1, 1, 1, 1, 1);
        let expected = if groups.len() < need - known || how == 0 {
            groups.truncate(need - known - 1);
            InsertError::GroupCount { need, have: known + groups.len() }
        } else {
            let last = groups.pop().expect("one is needed at least");
            let cached = self.entries.first().map(|entry| entry.group);
            let (group, error) = match how % 4 {
                0 => match groups.first() {
                    Some(&twice) => (twice, InsertError::GroupCached { group: twice }),
                    None => return release(&self.shared, &fresh),
                },
                1 => match cached {
                    Some(group) => (group, InsertError::GroupCached { group }),
                    None => return release(&self.shared, &fresh),
                },
                2 => {
                    stale = self.shared.release_group(last);
                    (last, InsertError::Group(GroupError::Stale { group: last }))
                }
                _ => {
                    let group = elsewhere.acquire_group().expect("nobody else takes there");
                    (group, InsertError::Group(GroupError::WrongPool { group }))
                }
            };
            groups.push(group);
            error
        };
        // What is known is not looked at, so anything stands for it.
        let mut all = alloc::vec![fresh.first().copied().unwrap_or(PageGroup::new(0, 9, 0)); known];
        all.extend(groups);
        let refused = self.cache.insert(salt, &tokens, &all, Priority::HIGHEST);
        assert_eq!(refused, Err(expected));
        release(&self.shared, &fresh[..fresh.len() - usize::from(stale)]);
    }
}

fn release(shared: &SharedPagedKv, groups: &[PageGroup]) {
    for &group in groups {
        shared.release_group(group);
    }
}

/// Whether a prefix goes through the entry's block.
fn covers(prefix: &Prefix, entry: &Entry) -> bool {
    let (salt, tokens) = &entry.prefix;
    *salt == prefix.0 && prefix.1.starts_with(tokens)
}
