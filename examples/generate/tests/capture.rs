//! What `--capture` writes is what attention was given, and `examples/accuracy` can read it.

mod common;
#[path = "../../accuracy/capture.rs"]
mod reader;

use std::path::PathBuf;
use std::process::Command;

use common::THREADS;
use common::tiny::Tiny;
use generate::capture::Capture;
use generate::error::Error;
use generate::gguf::Gguf;
use generate::memory::PagedMemory;
use generate::model::{Logits, Model};
use generate::pool::Pool;
use generate::step::{Kind, Member, Steps};
use paged_kv::Level;

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

fn model(name: &str) -> Model {
    Model::load(&mut Gguf::open(&Tiny::new().file(name)).unwrap(), 2).unwrap()
}

#[test]
fn rows_are_those_in_the_store() {
    let (model, path) = (model("captured.gguf"), file("rows.capture"));
    let sizes = *model.sizes();
    let pool = Pool::<f32>::new(&sizes, 16, 20).unwrap();
    let (mut watched, mut alone) = (PagedMemory::new(&pool), PagedMemory::new(&pool));
    let mut steps = Steps::new(Level::detect(), THREADS);
    // Two pieces of a prompt, then a new token.
    let tokens: Vec<u32> = (0..100).map(|i| (i * 29 + 3) % 256).collect();
    let quiet = steps.prefill(&model, &tokens, &mut alone, |_| ()).unwrap();
    steps.capture(Capture::create(&path, &sizes).unwrap());
    let logits = steps.prefill(&model, &tokens, &mut watched, |_| ()).unwrap();
    assert_eq!(logits, quiet, "being watched changes nothing");
    steps.prefill(&model, &[7], &mut watched, |_| ()).unwrap();

    let read = reader::Capture::read(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!((read.len, read.layers.len()), (101, sizes.layers));
    let heads = [read.n_heads, read.n_kv_heads, read.width];
    assert_eq!(heads, [sizes.n_heads, sizes.n_kv_heads, sizes.head_dim]);
    let mut row = vec![0.0; read.width];
    for (layer, captured) in read.layers.iter().enumerate() {
        let (store, cache) = (pool.shared().read(layer), watched.cache(layer));
        assert_eq!(captured.q.len(), 101 * read.n_heads * read.width);
        assert!(captured.q.iter().any(|number| *number != 0.0));
        for (at, (k, v)) in
            captured.k.chunks(read.width).zip(captured.v.chunks(read.width)).enumerate()
        {
            let (position, head) = (at / read.n_kv_heads, at % read.n_kv_heads);
            cache.copy_k_row(&store, position, head, &mut row).unwrap();
            assert_eq!(row, k, "key {position} of head {head} in layer {layer}");
            cache.copy_v_row(&store, position, head, &mut row).unwrap();
            assert_eq!(row, v, "value {position} of head {head} in layer {layer}");
        }
    }
}

#[test]
fn two_requests_are_not_mixed_up() {
    let (model, path) = (model("mixed.gguf"), file("mixed.capture"));
    let pool = Pool::<f32>::new(model.sizes(), 16, 20).unwrap();
    let (mut one, mut two) = (PagedMemory::new(&pool), PagedMemory::new(&pool));
    let mut steps = Steps::new(Level::detect(), THREADS);
    steps.capture(Capture::create(&path, model.sizes()).unwrap());
    let member = |memory| Member { memory, tokens: &[1], apart: true, logits: Logits::None };
    let mut members = [member(&mut one), member(&mut two)];
    let refused = steps.step(&model, Kind::Decode, &mut members);
    assert!(matches!(refused, Err(Error::Usage(_))), "{refused:?}");
}

#[test]
fn files_that_are_no_capture_are_refused() {
    let (model, path) = (Tiny::new().file("whole.gguf"), file("whole.capture"));
    let generate = |to: &PathBuf| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_generate"));
        command.args(["--prompt", "the sea", "--n", "3", "--model"]).arg(&model);
        command.arg("--capture").arg(to).output().unwrap()
    };
    assert!(generate(&path).status.success());
    let whole = std::fs::read(&path).unwrap();
    // Five tokens of the prompt, and two of three new ones are fed again.
    assert_eq!(reader::Capture::read(&whole).unwrap().len, 7);
    for cut in [0, 7, 8, 20, 24, 30, 100, whole.len() - 1] {
        reader::Capture::read(&whole[..cut]).unwrap_err();
    }
    let mut another = whole.clone();
    another[28..32].copy_from_slice(&1u32.to_le_bytes());
    let error = reader::Capture::read(&another).unwrap_err();
    assert!(error.contains("does not go on at position 1"), "{error}");

    let refused = generate(&PathBuf::from(env!("CARGO_TARGET_TMPDIR")));
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("directory"));
}
