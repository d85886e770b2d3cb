//! The lives of requests.

use core::time::Duration;
use std::panic::resume_unwind;

use paged_kv::PagedKvError;
use paged_kv::batch::ThreadPool;
use paged_kv::cache::{Holder, PageGroup, PagedSequence, SharedPagedKv};
use paged_kv::internal::numbers::Numbers;
use paged_kv::prefix::{Lease, Priority};
use paged_kv::wire::{Label, Saved, Source, WireError};

use super::Prefixes;
use super::quiet::{Holdings, Quiet};
use super::text::{
    Alone, LAYERS, LONGEST, SIZE, Sequence, Text, WINDOWED, answer, answers, write_all,
};

const SALT: &[u8] = b"stress";

/// A panic that belongs to the test.
pub(crate) struct Injected;

/// There is no room, and somebody has to give way: this request.
struct NoRoom;

/// How often what happened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) requests: u64,
    pub(crate) panics: u64,
    pub(crate) compared: u64,
    by_plan: u64,
    gave_way: u64,
    forks: u64,
    drafts: u64,
    rollbacks: u64,
    restored: u64,
}

impl Counts {
    fn all(&mut self) -> [(&'static str, &mut u64); 9] {
        let Counts { requests, panics, compared, by_plan, gave_way, .. } = self;
        let Counts { forks, drafts, rollbacks, restored, .. } = self;
        [
            ("comparison by a plan", by_plan),
            ("request", requests),
            ("panic", panics),
            ("comparison", compared),
            ("request that gave way", gave_way),
            ("fork", forks),
            ("draft", drafts),
            ("rollback", rollbacks),
            ("request that came back", restored),
        ]
    }

    pub(crate) fn and(mut self, mut other: Counts) -> Counts {
        for ((_, count), (_, more)) in self.all().into_iter().zip(other.all()) {
            *count += *more;
        }
        self
    }

    pub(crate) fn never(mut self) -> Vec<&'static str> {
        let zero = self.all().into_iter().filter(|(_, count)| **count == 0);
        zero.map(|(name, _)| name).collect()
    }
}

/// Handles that are released with their owner, in the middle of a panic too.
struct Groups<'a> {
    pool: &'a SharedPagedKv,
    groups: Vec<PageGroup>,
}

impl Drop for Groups<'_> {
    fn drop(&mut self) {
        self.groups.drain(..).for_each(|group| _ = self.pool.release_group(group));
    }
}

/// All that a request has.
struct Live<'a> {
    text: Text,
    sequence: Sequence<'a>,
    /// Another one that went on from here, and its text.
    twin: Option<(Text, Sequence<'a>)>,
    lease: Option<Lease<&'a SharedPagedKv>>,
    groups: Groups<'a>,
}

impl Live<'_> {
    fn holdings(&self) -> Holdings {
        let mut holdings = Holdings::default();
        let twin = self.twin.iter().map(|(_, sequence)| sequence);
        for holder in core::iter::once(&self.sequence).chain(twin).flat_map(|it| it.holders()) {
            if let Holder::Table { layer, blocks, .. } = holder {
                holdings.tables.push((layer, blocks.to_vec()));
            }
        }
        let leased = self.lease.iter().flat_map(|lease| lease.groups());
        holdings.groups = leased.chain(&self.groups.groups).copied().collect();
        holdings
    }
}

/// One thread's.
pub(crate) struct Worker<'a, 'p> {
    pool: &'a SharedPagedKv,
    prefixes: &'p Prefixes<'a>,
    quiet: &'p Quiet<'p>,
    threads: &'p ThreadPool,
    chance: Numbers,
    /// Where requests are alone.
    own: &'p SharedPagedKv,
    pub(crate) counts: Counts,
}

impl<'a, 'p> Worker<'a, 'p> {
    pub(crate) fn new(
        pool: &'a SharedPagedKv,
        prefixes: &'p Prefixes<'a>,
        quiet: &'p Quiet<'p>,
        threads: &'p ThreadPool,
        own: &'p SharedPagedKv,
        seed: u64,
    ) -> Self {
        let chance = Numbers::new(seed);
        Worker { pool, prefixes, quiet, threads, chance, own, counts: Counts::default() }
    }

    /// From the prompt to the last token, or to a panic.
    pub(crate) fn request(&mut self) {
        let mut text = self.prompt();
        let goal = (text.len() + self.chance.between(1, 60)).min(LONGEST);
        let mut alone = Alone::in_pool(self.own);
        loop {
            match self.live(text, goal, &mut alone) {
                Ok(()) => return,
                Err((so_far, NoRoom)) => text = so_far,
            }
            self.counts.gave_way += 1;
            let most = Duration::from_millis(self.chance.between(1, 20) as u64);
            self.pool.wait_for_groups(self.chance.between(2, 8), most);
            self.quiet.point(Holdings::default);
        }
    }

    /// Some beginnings are common to many, and they go on in few ways.
    fn prompt(&mut self) -> Text {
        let (family, len) = (self.chance.below(3) as u32, self.chance.between(1, 90));
        let turn = self.chance.between(1, 70);
        let mut text = Text::default();
        let way = self.chance.below(3) as u32;
        (0..len as u32).for_each(|at| {
            text.push(family * 1000 + at + if at as usize > turn { way * 500 } else { 0 });
        });
        text
    }

    /// As far as there is room; gives the text that is to be gone on with.
    fn live(
        &mut self,
        text: Text,
        goal: usize,
        alone: &mut Alone<'_>,
    ) -> Result<(), (Text, NoRoom)> {
        let Ok(mut live) = self.admit(&text) else { return Err((text, NoRoom)) };
        match self.go_on(&mut live, text.clone(), goal, alone) {
            Ok(()) => Ok(()),
            // What was generated is kept, as token ids.
            Err(NoRoom) => {
                Err((if live.text.len() > text.len() { live.text } else { text }, NoRoom))
            }
        }
    }

    fn admit(&mut self, text: &Text) -> Result<Live<'a>, NoRoom> {
        let mut groups = Groups { pool: self.pool, groups: Vec::new() };
        let mut sequence = PagedSequence::new(self.pool);
        let mut lease = None;
        if self.one_in(6) {
            // One that cares for no prefix.
            return Ok(Live { text: Text::default(), sequence, twin: None, lease, groups });
        }
        let part = self.one_in(2);
        let mut prefixes = self.prefixes.lock().unwrap();
        let mut found = prefixes.lookup(SALT, &text.tokens);
        if !part {
            found.release_partial();
        }
        let need = text.len().div_ceil(SIZE) - found.groups().len();
        let own = prefixes.acquire_groups(need);
        drop(prefixes);
        groups.groups = own.map_err(|_| NoRoom)?;
        let all = [found.groups(), &groups.groups].concat();
        sequence.adopt_groups(&all, found.covered()).unwrap();
        let mut begun = text.clone();
        begun.truncate(found.covered());
        lease.replace(found);
        Ok(Live { text: begun, sequence, twin: None, lease, groups })
    }

    fn go_on(
        &mut self,
        live: &mut Live<'a>,
        prompt: Text,
        goal: usize,
        alone: &mut Alone<'_>,
    ) -> Result<(), NoRoom> {
        // The prompt, in chunks.
        while live.text.len() < prompt.len() {
            let n = self.chance.between(1, 40).min(prompt.len() - live.text.len());
            let tokens = prompt.tokens[live.text.len()..][..n].to_vec();
            self.step(live, &tokens, alone)?;
        }
        self.insert(live);
        while live.text.len() < goal {
            match self.chance.below(16) {
                0 | 1 => self.fork(live),
                2 | 3 => self.draft(live, alone)?,
                4 => self.roll_back(live),
                5 if self.one_in(2) => self.save_and_restore(live)?,
                _ => {
                    let tokens: Vec<u32> = (0..self.chance.between(1, 3))
                        .map(|_| self.chance.below(4) as u32)
                        .collect();
                    self.step(live, &tokens, alone)?;
                }
            }
            self.compare(&live.sequence, &live.text, alone);
            self.compare_both(live, alone);
            self.quiet.point(|| live.holdings());
        }
        Ok(())
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.chance.below(n) == 0
    }

    fn maybe_panic(&mut self) {
        if self.one_in(300) {
            // Without a word.
            resume_unwind(Box::new(Injected));
        }
    }

    /// Room, at the cost of what is only cached, or after a while.
    fn room(&mut self, sequence: &mut Sequence<'a>, n: usize) -> Result<(), NoRoom> {
        if sequence.reserve(n).is_ok() || self.prefixes.lock().unwrap().reserve(sequence, n).is_ok()
        {
            return Ok(());
        }
        let most = Duration::from_millis(self.chance.below(4) as u64);
        match sequence.reserve_within(n, most) {
            Ok(()) => Ok(()),
            Err(PagedKvError::Exhausted(_)) => Err(NoRoom),
            Err(other) => panic!("{other}"),
        }
    }

    /// Writes these tokens, layer by layer, and attends each where it stands.
    fn step(
        &mut self,
        live: &mut Live<'a>,
        tokens: &[u32],
        alone: &mut Alone<'_>,
    ) -> Result<(), NoRoom> {
        self.room(&mut live.sequence, tokens.len())?;
        let (first, mut text) = (live.text.len(), live.text.clone());
        tokens.iter().for_each(|token| text.push(*token));
        let n = tokens.len();
        for layer in 0..LAYERS {
            let (k, v) = text.rows(layer, first..first + n);
            if self.one_in(2) {
                live.sequence.append(layer, &k, &v, n).unwrap();
            } else {
                let mut store = self.pool.write(layer);
                live.sequence.append_to(&mut store, layer, &k, &v, n).unwrap();
                self.maybe_panic();
            }
            if self.one_in(3) {
                let rows = self.chance.between(1, 3).min(text.len());
                let have = answer(&live.sequence, &text, layer, rows);
                assert_eq!(have, alone.answer(&text, layer, rows), "layer {layer} in a step");
                self.counts.compared += 1;
            }
            if self.one_in(40) {
                let _reading = self.pool.read(layer);
                self.maybe_panic();
            }
            self.maybe_panic();
        }
        if self.one_in(30) {
            // A step that somebody thinks better of, and makes again.
            live.sequence.abandon();
            write_all(&mut live.sequence, &text);
        }
        live.sequence.commit(n).unwrap();
        live.text = text;
        Ok(())
    }

    fn compare(&mut self, sequence: &Sequence<'_>, text: &Text, alone: &mut Alone<'_>) {
        if text.len() == 0 {
            return;
        }
        for layer in 0..LAYERS {
            // One row: after a rollback a window may have what that one sees and no more.
            assert_eq!(answer(sequence, text, layer, 1), alone.answer(text, layer, 1));
            self.counts.compared += 1;
        }
    }

    /// Many rows of both by a plan, where there is a twin: enough for several threads.
    fn compare_both(&mut self, live: &Live<'a>, alone: &mut Alone<'_>) {
        let Some((text, twin)) = &live.twin else { return };
        if !self.one_in(8) {
            return;
        }
        // The layers that keep everything.
        let layer = self.chance.pick(&[WINDOWED - 1, WINDOWED + 1]);
        let n = live.text.len().min(text.len());
        let requests = [(&live.text, &live.sequence), (text, twin)];
        let both = answers(&requests, layer, n, self.threads);
        let each = requests.map(|(text, _)| alone.answer(text, layer, n));
        assert_eq!(both, each.concat(), "layer {layer}, by a plan");
        self.counts.by_plan += 2;
    }

    /// Full blocks of the prompt, where their rows are in groups.
    fn insert(&mut self, live: &mut Live<'a>) {
        let Some(lease) = &live.lease else { return };
        if lease.partial().is_none() {
            let all = [lease.groups(), &live.groups.groups].concat();
            let priority = Priority::new(self.chance.below(3) as u8);
            let mut prefixes = self.prefixes.lock().unwrap();
            let stored = prefixes.insert(SALT, &live.text.tokens, &all, priority);
            drop(prefixes);
            stored.unwrap();
        }
        if self.one_in(2) {
            // The sequence holds its blocks by itself.
            live.groups.groups.drain(..).for_each(|group| _ = self.pool.release_group(group));
            live.lease = None;
        }
    }

    /// A twin begins, takes over, or goes.
    fn fork(&mut self, live: &mut Live<'a>) {
        match live.twin.take() {
            None => {
                live.twin = Some((live.text.clone(), live.sequence.fork().unwrap()));
                self.counts.forks += 1;
            }
            Some((text, sequence)) if self.one_in(2) => {
                let before = core::mem::replace(&mut live.sequence, sequence);
                live.twin = Some((core::mem::replace(&mut live.text, text), before));
            }
            Some(_) => {}
        }
    }

    /// Drafts that branch: a path through them is kept, or nothing.
    fn draft(&mut self, live: &mut Live<'a>, alone: &mut Alone<'_>) -> Result<(), NoRoom> {
        let n = self.chance.between(1, 6);
        self.room(&mut live.sequence, n)?;
        let path: Vec<usize> = (0..n).filter(|_| self.one_in(2)).collect();
        let first = live.text.len();
        let mut kept = live.text.clone();
        path.iter().for_each(|row| kept.push(100 + *row as u32));
        let mut others = live.text.clone();
        (0..n).for_each(|row| others.push(200 + row as u32));
        for layer in 0..LAYERS {
            for row in 0..n {
                let (k, v) = match path.iter().position(|of_path| *of_path == row) {
                    Some(depth) => kept.rows(layer, first + depth..first + depth + 1),
                    None => others.rows(layer, first + row..first + row + 1),
                };
                live.sequence.push(layer, &k, &v).unwrap();
            }
            self.maybe_panic();
        }
        if self.one_in(4) {
            live.sequence.abandon();
        } else {
            live.sequence.compact(&path).unwrap();
            live.text = kept;
        }
        self.counts.drafts += 1;
        self.compare(&live.sequence, &live.text, alone);
        Ok(())
    }

    fn roll_back(&mut self, live: &mut Live<'a>) {
        let len = live.text.len().saturating_sub(self.chance.below(25)).max(1);
        match live.sequence.truncate(len) {
            Ok(()) => {
                live.text.truncate(len);
                self.counts.rollbacks += 1;
            }
            Err(PagedKvError::PositionFreed { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }

    /// Goes out as bytes, and comes back where there is room.
    fn save_and_restore(&mut self, live: &mut Live<'a>) -> Result<(), NoRoom> {
        let mut bytes = Vec::new();
        let label = Label::new().tokens(&live.text.tokens).salt(SALT);
        live.sequence.save(&label, &mut bytes).unwrap();
        live.sequence.release();
        live.twin = None;
        for _ in 0..4 {
            let dies = self.one_in(20).then(|| self.chance.between(1, 8));
            let source = Mortal { bytes: &bytes, calls: dies };
            let saved = Saved::open(source).unwrap();
            assert_eq!(saved.tokens(), live.text.tokens);
            match live.sequence.restore(saved) {
                Ok(()) => {
                    self.counts.restored += 1;
                    return Ok(());
                }
                Err(WireError::Kv(PagedKvError::Exhausted(_))) => {}
                Err(other) => panic!("{other}"),
            }
            self.pool.wait_for_groups(4, Duration::from_millis(2));
            self.quiet.point(|| live.holdings());
        }
        Err(NoRoom)
    }
}

/// A source that may panic at one of its calls.
struct Mortal<'a> {
    bytes: &'a [u8],
    calls: Option<usize>,
}

impl Source for Mortal<'_> {
    type Error = core::convert::Infallible;

    fn fill(&mut self, into: &mut [u8]) -> Result<usize, Self::Error> {
        if let Some(left) = &mut self.calls {
            *left -= 1;
            if *left == 0 {
                resume_unwind(Box::new(Injected));
            }
        }
        self.bytes.fill(into)
    }
}
