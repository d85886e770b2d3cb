//! The same decoder for several requests at once, over the layers of one pool.

use paged_kv::Level;

use crate::decoder::Decoder;
use crate::memories::Contiguous;
use crate::pool::{Holder, Pool, PoolError, PoolPlan};
use crate::serve::{self, Counters, Service, Stage};
use crate::task::{Answer, Desk, Digest};
use crate::{SMALL, run};

fn pool(decoder: &Decoder, block_size: usize, blocks: usize) -> Result<Pool, PoolError> {
    let plan = PoolPlan { block_size, blocks, rows: serve::ROWS, level: Level::detect() };
    let prefix = &SMALL.list(decoder.config(), 0)[..SMALL.prefix_len()];
    Pool::open(decoder, plan, prefix)
}

/// More requests than fit at once: some wait, all are right, and each says to the bit what it says
/// alone in memory of its own.
#[test]
fn requests_that_share_a_pool_say_what_they_say_alone() {
    let decoder = Decoder::new(SMALL.config()).unwrap();
    let config = decoder.config();
    let requests = 5;
    let alone: Vec<Digest> = (0..requests)
        .map(|request| {
            let mut memory = Contiguous::new(config, 64, Level::detect());
            run(&decoder, &SMALL, request, 64, 1, &mut memory).digest()
        })
        .collect();
    for block_size in [16, 48] {
        let shared = SMALL.prefix_len() / block_size;
        let need = SMALL.positions().div_ceil(block_size) - shared;
        let blocks = shared + 2 * need + 1;
        let pool = pool(&decoder, block_size, blocks).unwrap();
        assert_eq!((pool.shared_blocks(), pool.need(SMALL.positions())), (shared, need));
        let counters = Counters::default();
        let service =
            Service { decoder: &decoder, task: &SMALL, pool: &pool, requests, threads: 4 };
        let mut waited = 0;
        let outcomes = serve::serve(service, &counters, |change| {
            waited += usize::from(matches!(change, Some((_, Stage::Waiting))));
        });
        println!("blocks of {block_size}: {waited} of {requests} waited");
        for (outcome, alone) in outcomes.iter().zip(&alone) {
            let outcome = outcome.as_ref().expect("everybody fits in time");
            assert_eq!((outcome.right, outcome.asked), (SMALL.keys(), SMALL.keys()));
            assert_eq!(outcome.digest, *alone);
            assert!(outcome.least_weight >= Answer::LEAST_WEIGHT && outcome.shown.len() == 3);
        }
        assert!(serve::digest(&outcomes).is_some());
        let fullest = pool.fullest();
        let count = |of: Holder| fullest.iter().filter(|&&holder| holder == of).count();
        assert_eq!((fullest.len(), count(Holder::Shared)), (blocks, shared));
        assert!(count(Holder::Free) < blocks - shared, "somebody held something");
        assert_eq!(pool.free_blocks(), blocks - shared);
        assert_eq!(pool.close(), 0, "every block came back");
    }
}

#[test]
fn a_request_that_can_never_fit_is_told_so() {
    let decoder = Decoder::new(SMALL.config()).unwrap();
    let small = pool(&decoder, 16, 7 + 30).unwrap();
    let refused = small.admit(0, SMALL.positions(), || unreachable!("waiting would not help"));
    assert!(matches!(refused, Err(PoolError::NeverFits { need: 31, have: 30 })), "{refused:?}");
    drop(refused);
    assert!(matches!(pool(&decoder, 16, 6), Err(PoolError::Prefix { need: 7, have: 6 })));
}

/// A worker that panics half-way through its list holds nothing afterwards.
#[test]
fn a_panic_gives_the_blocks_back() {
    let decoder = Decoder::new(SMALL.config()).unwrap();
    let pool = pool(&decoder, 16, 7 + 31).unwrap();
    let free = pool.free_blocks();
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let mut lease = pool.admit(0, SMALL.positions(), || ()).unwrap();
            let mut desk = Desk::new(decoder.config(), serve::ROWS);
            let list = SMALL.list(decoder.config(), 0);
            decoder.forward(&mut lease, &list[pool.prefix_len()..400], &mut desk.work).unwrap();
            assert!(pool.free_blocks() < free);
            std::panic::resume_unwind(Box::new("a worker dies"));
        });
        assert!(worker.join().is_err());
    });
    assert_eq!(pool.free_blocks(), free);
    let again = pool.admit(1, SMALL.positions(), || unreachable!("the promise came back too"));
    drop(again.unwrap());
    assert_eq!(pool.close(), 0);
}
