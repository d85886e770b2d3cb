//! No block is free: for each operation, with every number of blocks that are left, and at every
//! question whether some are. What was refused has changed nothing, to the byte.

use paged_kv::cache::{Holder, KvBlockPool, KvCache, PagedKvCache};
use paged_kv::prefix::Priority;
use paged_kv::wire::{Saved, WireError};
use paged_kv::{BlockId, Element, KvCacheError, every_type};
use std::sync::Arc;

use super::world::{BLOCKS, HadRoom, LAYERS, SALT, SIZE, World, rows, shape, tokens, write};

/// What takes blocks. What is prepared does not belong to it.
struct Operation<E: Element> {
    name: &'static str,
    prepare: fn(&mut World<E>),
    /// Whether there was room.
    run: fn(&mut World<E>) -> bool,
    /// Whether what is cached goes where the pool is short.
    evicts: bool,
}

fn nothing<E: Element>(_: &mut World<E>) {}

fn operation<E: Element>(name: &'static str, run: fn(&mut World<E>) -> bool) -> Operation<E> {
    Operation { name, prepare: nothing, run, evicts: false }
}

fn operations<E: Element>() -> Vec<Operation<E>> {
    vec![
        operation("room behind a block that is shared", |world| {
            world.requests[0].reserve(3 * SIZE).had_room()
        }),
        operation("room for a copy alone", |world| world.requests[1].reserve(2).had_room()),
        operation("room behind a window", |world| world.requests[3].reserve(3 * SIZE).had_room()),
        Operation {
            prepare: |world| world.requests[3].truncate(5 * SIZE + 3).unwrap(),
            ..operation("room after a rollback", |world| {
                world.requests[3].reserve(2 * SIZE).had_room()
            })
        },
        Operation {
            prepare: |world| {
                let groups = world.groups.clone();
                world.requests[2].adopt_groups(&groups, SIZE + 4).unwrap();
            },
            ..operation("room behind a prefix", |world| {
                world.requests[2].reserve(3 * SIZE).had_room()
            })
        },
        operation("a fork that writes", |world| {
            let mut child = world.requests[3].fork().unwrap();
            let had_room = child.reserve(1).had_room();
            if had_room {
                write(&mut child, 7, 1);
                world.requests.push(child);
            }
            had_room
        }),
        operation("a step and a path through its drafts", |world| {
            let request = &mut world.requests[0];
            let had_room = request.reserve(6).had_room();
            if had_room {
                write(request, 5, 6);
                request.compact(&[1, 3, 4]).unwrap();
            }
            had_room
        }),
        operation("a group", |world| {
            world.pool.acquire_group().map(|group| world.groups.push(group)).is_some()
        }),
        operation("groups", |world| {
            let got = world.pool.acquire_groups(4);
            got.map(|groups| world.groups.extend(groups)).had_room()
        }),
        Operation {
            evicts: true,
            ..operation("groups from the prefix cache", |world| {
                let got = world.prefixes.acquire_groups(5);
                got.map(|groups| world.groups.extend(groups)).had_room()
            })
        },
        Operation {
            evicts: true,
            ..operation("room from the prefix cache", |world| {
                world.prefixes.reserve(&mut world.requests[0], 4 * SIZE).had_room()
            })
        },
        Operation {
            // Half of what is cached is in use, and stays.
            prepare: |world| {
                let lease = world.prefixes.lookup(SALT, &[&tokens(200)[..], &[0]].concat());
                world.groups.extend(lease.into_groups());
            },
            evicts: true,
            ..operation("room from the rest of the prefix cache", |world| {
                world.prefixes.reserve(&mut world.requests[0], 3 * SIZE).had_room()
            })
        },
        Operation {
            evicts: true,
            ..operation("a prompt that is cached", |world| {
                let Ok(groups) = world.prefixes.acquire_groups(6) else { return false };
                let stored = world.prefixes.insert(SALT, &tokens(300), &groups, Priority::NORMAL);
                assert_eq!(stored.unwrap().stored, 2);
                groups.iter().for_each(|group| _ = world.pool.release_group(*group));
                world.cached.extend(groups);
                true
            })
        },
        operation("a request that comes back", |world| {
            let saved = Saved::open(&world.saved[0][..]).unwrap();
            world.requests[2].restore(saved).had_room()
        }),
        operation("a bare sequence that comes back", |world| {
            let saved = Saved::open(&world.saved[1][..]).unwrap();
            world.bare[2].restore(&mut world.pool.write(0), saved).had_room()
        }),
        operation("a push into a block that is shared", |world| {
            let (k, v) = rows(3, 0, 1);
            world.bare[0].push(&mut world.pool.write(0), &k, &v).had_room()
        }),
        operation("rows into a block that is shared, and behind it", |world| {
            let (k, v) = rows(3, 0, 3 * SIZE);
            world.bare[0].append(&mut world.pool.write(0), &k, &v, 3 * SIZE).had_room()
        }),
        operation("bare room", |world| {
            world.bare[1].reserve(&mut world.pool.write(0), 2 * SIZE).had_room()
        }),
        Operation {
            prepare: |world| world.bare[1].truncate(&mut world.pool.write(0), 2).unwrap(),
            ..operation("bare room after a rollback", |world| {
                world.bare[1].reserve(&mut world.pool.write(0), 2 * SIZE).had_room()
            })
        },
        operation("a bare fork that writes", |world| {
            let (mut store, (k, v)) = (world.pool.write(0), rows(3, 0, SIZE));
            let mut child = world.bare[0].fork(&mut store).unwrap();
            let had_room = child.append(&mut store, &k, &v, SIZE).had_room();
            drop(store);
            if had_room {
                world.bare.push(child);
            } else {
                world.pool.release(0, &mut child).unwrap();
            }
            had_room
        }),
        Operation {
            prepare: |world| {
                let groups = &world.groups[..2];
                let blocks: Vec<BlockId> =
                    groups.iter().map(|group| world.pool.group_block(*group, 0).unwrap()).collect();
                world.bare[2].adopt(&mut world.pool.write(0), &blocks, SIZE + 1).unwrap();
            },
            ..operation("rows behind blocks that were adopted", |world| {
                let (k, v) = rows(3, 0, 2 * SIZE);
                world.bare[2].append(&mut world.pool.write(0), &k, &v, 2 * SIZE).had_room()
            })
        },
    ]
}

/// Takes all blocks of these layers but so many.
fn hold_all_but<E: Element>(
    world: &World<E>,
    layers: &[usize],
    left: usize,
) -> Vec<(usize, PagedKvCache)> {
    let held = layers.iter().map(|&layer| {
        let mut store = world.pool.write(layer);
        let mut cache = PagedKvCache::new();
        let blocks = store.free_block_count().saturating_sub(left);
        cache.reserve(&mut store, blocks * SIZE).unwrap();
        (layer, cache)
    });
    held.collect()
}

fn what_finds_too_few_blocks_changes_nothing<E: Element>() {
    for operation in operations::<E>() {
        // What is cached goes from all layers at once, so that they are short together.
        let short: &[&[usize]] = if operation.evicts { &[&[0, 1, 2]] } else { &[&[0], &[1], &[2]] };
        let mut refusals = 0;
        for layers in short {
            for left in 0..=BLOCKS {
                let mut world = World::<E>::new();
                (operation.prepare)(&mut world);
                let mut others = hold_all_but(&world, layers, left);
                let before = world.see();
                let had_room = (operation.run)(&mut world);
                if !had_room {
                    refusals += 1;
                    world.see().must_be(&before, format_args!("{}, {left}", operation.name));
                }
                let tables =
                    others.iter().map(|(layer, it)| Holder::table(*layer, it.block_table()));
                world.check(tables);
                for (layer, cache) in &mut others {
                    world.pool.release(*layer, cache).unwrap();
                }
                assert!(had_room || (operation.run)(&mut world), "{} has room", operation.name);
                world.end();
                if had_room {
                    break;
                }
            }
        }
        assert!(refusals > 0, "{} takes nothing", operation.name);
    }
}

/// Between two questions somebody else may take all.
fn what_is_refused_at_any_question_changes_nothing<E: Element>() {
    for operation in operations::<E>() {
        let mut refusals = 0;
        for layer in 0..LAYERS {
            for nth in 1.. {
                let mut world = World::<E>::new();
                (operation.prepare)(&mut world);
                let before = world.see();
                world.pool.read(layer).refuse_room(nth);
                let had_room = (operation.run)(&mut world);
                let is_past = world.pool.read(layer).cancel_refusal();
                if !had_room {
                    refusals += 1;
                    world
                        .see()
                        .must_be(&before, format_args!("{}, question {nth}", operation.name));
                }
                world.end();
                if is_past {
                    assert!(had_room, "{} was refused by nobody", operation.name);
                    break;
                }
            }
        }
        assert!(refusals > 0 || operation.evicts, "{} asks nothing", operation.name);
    }
}

/// A file that ends too early, at every byte of its pages' ends and some between.
fn what_comes_back_in_part_holds_nothing<E: Element>() {
    let whole = World::<E>::new();
    let lens = whole.saved.each_ref().map(Vec::len);
    whole.end();
    for (which, len) in lens.into_iter().enumerate() {
        for cut in (0..len).rev().step_by(61) {
            let mut world = World::<E>::new();
            let before = world.see();
            let bytes = world.saved[which][..cut].to_vec();
            let read = Saved::open(&bytes[..]).and_then(|saved| match which {
                0 => world.requests[2].restore(saved),
                _ => world.bare[2].restore(&mut world.pool.write(0), saved),
            });
            assert!(matches!(read, Err(WireError::Truncated { .. })), "{read:?}");
            // Blocks were taken and came back, one by one.
            world.see().unordered().must_be(&before.unordered(), format_args!("{cut} bytes"));
            world.end();
        }
    }
}

/// Of caches that only count, every one with all lengths and numbers of blocks that are left.
fn a_pool_that_is_short_changes_no_cache<E: Element>() {
    let pool = Arc::new(KvBlockPool::new(4, 9));
    let mut refusals = 0;
    for (len, more) in [(0, 5), (3, 1), (3, 2), (4, 13), (9, 20)] {
        for left in 0..=9 {
            let mut cache = KvCache::<E>::with_shape_in_pool(shape(), &pool).unwrap();
            let (k, v) = rows(4, 0, len);
            cache.append(&k, &v, len).unwrap();
            let mut others = Vec::new();
            while pool.free_blocks() > left {
                others.push(KvCache::<E>::with_shape_in_pool(shape(), &pool).unwrap());
            }
            let see = |cache: &KvCache<E>| {
                let mut all = Vec::new();
                for (position, head) in (0..len).flat_map(|at| [(at, 0), (at, 1)]) {
                    let (mut k, mut v) = ([0.0; 3], [0.0; 2]);
                    cache.copy_k_row(position, head, &mut k).unwrap();
                    cache.copy_v_row(position, head, &mut v).unwrap();
                    all.extend(k.iter().chain(&v).map(|number| number.to_bits()));
                }
                (cache.seq_len(), cache.held_blocks(), cache.memory_bytes(), all)
            };
            let (before, free) = (see(&cache), pool.free_blocks());
            let (k, v) = rows(4, len, more);
            match cache.try_append(&k, &v, more) {
                Err(KvCacheError::Exhausted(refused)) => {
                    refusals += 1;
                    assert_eq!(refused.free, free);
                    assert_eq!((see(&cache), pool.free_blocks()), (before, free));
                }
                other => assert_eq!(other, Ok(())),
            }
            drop(others);
            drop(cache);
            assert_eq!(pool.free_blocks(), 9);
        }
    }
    assert!(refusals > 10);
}

every_type! {
    a_pool_that_is_short_changes_no_cache,
    what_finds_too_few_blocks_changes_nothing,
    what_is_refused_at_any_question_changes_nothing,
    what_comes_back_in_part_holds_nothing,
}
