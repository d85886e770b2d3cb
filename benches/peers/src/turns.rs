//! Who is measured takes turns: in each round everybody is called for a while, so that a bad
//! moment of the machine is a bad moment of all.

use std::time::Instant;

use paged_kv::Level;

use crate::machine;
use crate::peers::Peer;
use crate::report::Times;

/// Somebody, and what was measured so far.
pub(crate) struct Contender<'a> {
    pub(crate) name: &'static str,
    /// Ours alone.
    pub(crate) level: Option<Level>,
    pub(crate) peer: Box<dyn Peer + 'a>,
    /// Seconds of the calls that come before all rounds.
    pub(crate) trial: f64,
    /// Seconds of calls, by round.
    pub(crate) rounds: Vec<Vec<f64>>,
}

impl Contender<'_> {
    /// All rounds together; the trial where there was none.
    pub(crate) fn times(&self) -> Times {
        if self.rounds.is_empty() {
            return Times::new(vec![self.trial]);
        }
        Times::new(self.rounds.concat())
    }
}

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Seconds for each contender.
    pub(crate) seconds: f64,
    pub(crate) rounds: usize,
    /// Layers to go through in turn.
    pub(crate) copies: usize,
    pub(crate) threads: usize,
}

/// So many times slower than the fastest in its trial, and longer than this: that has told enough.
const HOPELESS: f64 = 10.0;
const LONG: f64 = 0.05;

/// Calls longer than this average the noise by themselves; the machine is not held for them.
const HELD: f64 = 0.8;

pub(crate) fn take(contenders: &mut [Contender<'_>], effort: Effort) {
    let fastest = contenders.iter().map(|one| one.trial).fold(f64::INFINITY, f64::min);
    let share = effort.seconds / effort.rounds as f64;
    for round in 0..effort.rounds {
        // Nobody always comes after the same one.
        let count = contenders.len();
        for index in 0..count {
            let one = &mut contenders[(index + round) % count];
            if one.trial > LONG && one.trial > HOPELESS * fastest {
                continue;
            }
            let held = (one.trial < HELD).then(|| machine::still(effort.threads));
            let times = if one.peer.wants_rayon() {
                // Called from one of the pool's own threads they need not wake one up.
                let peer = &mut *one.peer;
                rayon::scope(|_| turn(peer, effort.copies, share))
            } else {
                turn(&mut *one.peer, effort.copies, share)
            };
            drop(held);
            one.rounds.push(times);
        }
    }
}

/// Goes through all copies until the time is over, at least once.
///
/// One copy is called twice before that, so that the caches hold it; several are gone through
/// once, so that each is as long ago as all the others together.
fn turn(peer: &mut dyn Peer, copies: usize, share: f64) -> Vec<f64> {
    let begin = Instant::now();
    for index in 0..if copies == 1 { 2 } else { copies } {
        peer.call(index % copies);
        if copies == 1 && begin.elapsed().as_secs_f64() > share {
            break;
        }
    }
    let mut times = Vec::new();
    let begin = Instant::now();
    loop {
        for copy in 0..copies {
            let call = Instant::now();
            peer.call(copy);
            times.push(call.elapsed().as_secs_f64());
        }
        if begin.elapsed().as_secs_f64() >= share {
            return times;
        }
    }
}

/// How many times longer the fastest of the others took than we did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ratio {
    pub(crate) best: &'static str,
    pub(crate) ours_s: f64,
    pub(crate) best_s: f64,
    /// Of the whole.
    pub(crate) ratio: f64,
    /// Of single rounds: least, median, most.
    pub(crate) spread: [f64; 3],
}

/// Compares `us` with the fastest of those who are not we at some level; none where there is
/// nobody.
pub(crate) fn ratio(
    contenders: &[Contender<'_>],
    us: &Contender<'_>,
    copies: usize,
) -> Option<Ratio> {
    // Cold calls have lucky ones among them.
    let figure = |times: &Times| if copies > 1 { times.fast() } else { times.least() };
    let others = contenders.iter().filter(|one| one.name != us.name);
    let best = others.min_by(|a, b| figure(&a.times()).total_cmp(&figure(&b.times())))?;
    let rounds = best.rounds.iter().zip(&us.rounds);
    let round = |times: &Vec<f64>| figure(&Times::new(times.clone()));
    let mut ratios: Vec<f64> = rounds.map(|(best, us)| round(best) / round(us)).collect();
    ratios.sort_by(f64::total_cmp);
    let (ours_s, best_s) = (figure(&us.times()), figure(&best.times()));
    let ratio = best_s / ours_s;
    let spread = match ratios[..] {
        [] => [ratio; 3],
        [first, ..] => [first, ratios[ratios.len() / 2], ratios[ratios.len() - 1]],
    };
    Some(Ratio { best: best.name, ours_s, best_s, ratio, spread })
}
