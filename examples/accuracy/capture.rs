//! What `examples/generate --capture` wrote: one request's queries, keys and values.
//!
//! All numbers are little-endian, counts are `u32`:
//!
//! ```text
//! "PKVCAP01"   layers   query heads   KV heads   width of a head
//! then, for each layer of each step, until the file ends:
//! layer   first position   rows   queries (f32)   keys (f32)   values (f32)
//! ```
//!
//! Rows are `[rows][heads][width]`; queries and keys are rotated, as attention gets them.

/// The queries, keys and values of a layer, `[positions][heads][width]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Layer {
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
}

/// A captured request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Capture {
    pub(crate) n_heads: usize,
    pub(crate) n_kv_heads: usize,
    pub(crate) width: usize,
    /// Positions, in every layer.
    pub(crate) len: usize,
    pub(crate) layers: Vec<Layer>,
}

/// The most that a count may be, so that a file of another kind is not taken for an enormous model.
const MOST: usize = 1 << 20;

impl Capture {
    /// Reads a file's bytes.
    ///
    /// # Errors
    ///
    /// In words, where they are not a whole capture.
    pub(crate) fn read(bytes: &[u8]) -> Result<Capture, String> {
        let mut rest = bytes.strip_prefix(b"PKVCAP01").ok_or("this is no capture")?;
        let [layers, n_heads, n_kv_heads, width] = counts(&mut rest)?;
        if [layers, n_heads, n_kv_heads, width].contains(&0) || n_heads % n_kv_heads != 0 {
            return Err(format!("{n_heads} heads over {n_kv_heads} of {width} make no sense"));
        }
        let mut all = vec![Layer::default(); layers];
        while !rest.is_empty() {
            let [layer, first, rows] = counts(&mut rest)?;
            let into = all.get_mut(layer).ok_or_else(|| format!("there is no layer {layer}"))?;
            if into.q.len() != first * n_heads * width {
                return Err(format!("layer {layer} does not go on at position {first}"));
            }
            into.q.extend(floats(&mut rest, rows * n_heads * width)?);
            into.k.extend(floats(&mut rest, rows * n_kv_heads * width)?);
            into.v.extend(floats(&mut rest, rows * n_kv_heads * width)?);
        }
        let len = all[0].q.len() / (n_heads * width);
        if len == 0 || all.iter().any(|layer| layer.q.len() != all[0].q.len()) {
            return Err("some layers have more positions than others, or none has any".into());
        }
        Ok(Capture { n_heads, n_kv_heads, width, len, layers: all })
    }
}

fn counts<const N: usize>(rest: &mut &[u8]) -> Result<[usize; N], String> {
    let mut counts = [0; N];
    for count in &mut counts {
        let (bytes, after) = rest.split_first_chunk().ok_or("the file is cut off")?;
        *rest = after;
        *count = u32::from_le_bytes(*bytes) as usize;
        if *count > MOST {
            return Err(format!("{count} of anything are too many"));
        }
    }
    Ok(counts)
}

fn floats(rest: &mut &[u8], n: usize) -> Result<Vec<f32>, String> {
    let (bytes, after) = rest.split_at_checked(4 * n).ok_or("the file is cut off")?;
    *rest = after;
    let (numbers, _) = bytes.as_chunks();
    Ok(numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}
