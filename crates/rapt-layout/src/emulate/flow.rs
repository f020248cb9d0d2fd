//! S = Q·Kᵀ → P → P·V, with P through the two sides of a check.
//!
//! ```text
//! Q, K, V (128 × 128)  in shared memory, 128-byte swizzle
//! S = Q·Kᵀ             tcgen05.mma into tensor memory, columns 0 … 127
//! S to registers       tcgen05.ld.32x32b.x128: thread t has row t
//! P                    S itself, or softmax(S / √128) of each row, rounded to the check's dtype
//! store                through the producer;   read through the consumer: what P·V takes as A
//! out = P·V            compared with the same in f64: cosine
//! ```

use serde::Serialize;
use serde_json::Value;

use super::machine::{Machine, Poison, product, rounded};
use crate::atlas::Atom;
use crate::check::{Check, Order, Side, Source, Stored};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::unit::{Place, Space, Unit};

/// Rows and columns of everything.
const SIZE: usize = 128;

/// What P is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Where the random numbers start.
    pub seed: u64,
    /// P = softmax(S / √128) of each row; else P = S.
    pub softmax: bool,
}

/// What came of a flow.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// The check's name.
    pub name: String,
    /// Where the random numbers started.
    pub seed: u64,
    /// Whether P was a softmax.
    pub softmax: bool,
    /// The cosine between the output and the same in f64; none where poison was read, for then the output is NaN.
    pub cosine: Option<f64>,
    /// Elements of P that were read from where nothing was written, or from outside the memory.
    pub poisoned: usize,
    /// The first of them whose cell exists, by rows.
    pub first_poison: Option<Named>,
}

/// A poisoned reading.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Named {
    /// The element's row.
    pub row: usize,
    /// The element's column.
    pub col: usize,
    /// The cell.
    pub place: Option<Place>,
}

/// Runs a check's two sides as the store and the read of P.
///
/// # Errors
/// [`Error::File`] unless both sides are in tensor memory or both in registers, of 128 rows and at most 128 columns; an
/// address outside the memory that is stored to; what is wrong with a side.
pub fn run(check: &Check, case: Case) -> Result<Outcome> {
    let (producer, consumer) = (&check.producer, &check.consumer);
    let is_whole = |side: &Side| side.rows == 128 && (1..=128).contains(&side.cols);
    if !is_whole(producer) || !is_whole(consumer) || [producer, consumer].iter().any(|side| side.space() != Space::Tmem)
    {
        let what = format!("{}: the emulator takes P of 128 rows and at most 128 columns in tensor memory", check.name);
        return Err(Error::File { what });
    }
    let dtype = producer.dtype;
    let mut machine = Machine::new();
    let mut draw = Normal::new(case.seed);
    let [q, k, v] = [2.0, 2.0, 1.0].map(|deviation| {
        let values: Result<Vec<f32>> = (0..SIZE * SIZE).map(|_| rounded(dtype, deviation * draw.next())).collect();
        values
    });
    let (q, k, v) = (q?, k?, v?);
    let operands = [&q, &transposed(&k), &v];
    let mut sides = Vec::new();
    for (at, values) in (0i64..).zip(operands) {
        let side = shared(dtype, at)?;
        machine.write(&side, values)?;
        sides.push(side);
    }
    let accumulator = Side::of_atom(&Atom::named("tcgen05.c.m128.n128")?, Dtype::F32, [128, 128], 0)?;
    machine.multiply(&sides[0], &sides[1], &accumulator, false)?;
    let rows = Layout::column_major([128, 128])?;
    let by = Atom::named("tcgen05.ld.32x32b.x128")?;
    let loaded = Side { source: Source::Moved { tv: rows.clone(), by, offset: 0, packed: 1 }, ..accumulator };
    let held = Side { source: Source::Registers { tv: rows }, ..loaded.clone() };
    machine.copy(&loaded, &held)?;
    let s = machine.read(&held)?.values;
    let p = if case.softmax { softmax(&s) } else { s };
    machine.write(producer, &p[..SIZE * usize::try_from(producer.cols).unwrap_or(SIZE)])?;
    let read = machine.read(consumer)?;
    let depth = usize::try_from(consumer.cols).unwrap_or(SIZE);
    let mut poison = read.poison;
    let mut values = machine.read(&sides[2])?;
    poison.append(&mut values.poison);
    let mut out = vec![0.0; SIZE * SIZE];
    product(&read.values, &rows_of(&values.values, depth), [SIZE, depth, SIZE], &mut out);
    let cosine =
        poison.is_empty().then(|| cosine(&out, &exact(&q, &k, &v, depth, case.softmax))).filter(|c| c.is_finite());
    let exists = |poison: &&Poison| poison.place.is_some_and(|place| place.exists());
    let first = poison.iter().find(exists).or(poison.first());
    Ok(Outcome {
        name: check.name.clone(),
        seed: case.seed,
        softmax: case.softmax,
        cosine,
        poisoned: poison.len(),
        first_poison: first.map(|poison| Named { row: poison.row, col: poison.col, place: poison.place }),
    })
}

impl Outcome {
    /// As docs/reference/layout.md describes it.
    #[must_use]
    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).unwrap_or(Value::Null)
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let p = if self.softmax { "softmax" } else { "identity" };
        write!(f, "{}, P = {p}, seed {}: ", self.name, self.seed)?;
        match (self.cosine, &self.first_poison) {
            (Some(cosine), _) => write!(f, "cosine {cosine:.6}"),
            (None, Some(Named { row, col, place: Some(place) })) => write!(
                f,
                "NaN: {} readings of poison, the first of them element ({row}, {col}) from {place}",
                self.poisoned
            ),
            (None, _) => write!(f, "NaN: {} readings of poison", self.poisoned),
        }
    }
}

/// The `at`-th 128 × 128 operand: spans of 128 bytes side by side, each swizzled.
fn shared(dtype: Dtype, at: i64) -> Result<Side> {
    let bits = dtype.bits();
    let span = 1024 / i64::from(bits);
    let layout = Layout::from_modes([Layout::new(128, span)?, Layout::new([span, 128 / span], [1, 128 * span])?])?;
    let stored = Stored {
        offset: at * 128 * 128,
        span: 128,
        order: Order::ColumnMajor,
        ..Stored::new(layout, Unit::SharedElements(bits))
    };
    Ok(Side::stored("an operand in shared memory", dtype, [128, 128], stored))
}

fn transposed(a: &[f32]) -> Vec<f32> {
    (0..SIZE * SIZE).map(|at| a[at / SIZE + SIZE * (at % SIZE)]).collect()
}

/// The first `depth` rows of a 128 × 128 matrix.
fn rows_of(a: &[f32], depth: usize) -> Vec<f32> {
    (0..SIZE).flat_map(|col| a[SIZE * col..][..depth].iter().copied()).collect()
}

fn softmax(s: &[f32]) -> Vec<f32> {
    let scale = 1.0 / (SIZE as f32).sqrt();
    let mut p = s.to_vec();
    for row in 0..SIZE {
        let of_row = |col: usize| s[row + SIZE * col];
        let row_max = (0..SIZE).map(of_row).fold(f32::NEG_INFINITY, f32::max);
        let row_sum: f32 = (0..SIZE).map(|col| ((of_row(col) - row_max) * scale).exp()).sum();
        for col in 0..SIZE {
            p[row + SIZE * col] = ((of_row(col) - row_max) * scale).exp() / row_sum;
        }
    }
    p
}

/// P[:, ..depth]·V[..depth, :] in f64, from the rounded operands, P unrounded.
fn exact(q: &[f32], k: &[f32], v: &[f32], depth: usize, is_softmax: bool) -> Vec<f64> {
    let at = |a: &[f32], row: usize, col: usize| f64::from(a[row + SIZE * col]);
    let mut out = vec![0.0; SIZE * SIZE];
    for row in 0..SIZE {
        let s = |j: usize| (0..SIZE).map(|d| at(q, row, d) * at(k, j, d)).sum::<f64>();
        let mut p: Vec<f64> = (0..SIZE).map(s).collect();
        if is_softmax {
            let row_max = p.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            p.iter_mut().for_each(|s| *s = ((*s - row_max) / (SIZE as f64).sqrt()).exp());
            let row_sum: f64 = p.iter().sum();
            p.iter_mut().for_each(|p| *p /= row_sum);
        }
        for col in 0..SIZE {
            out[row + SIZE * col] = (0..depth).map(|j| p[j] * at(v, j, col)).sum();
        }
    }
    out
}

fn cosine(got: &[f32], exact: &[f64]) -> f64 {
    let (mut dot, mut got_square, mut exact_square) = (0.0, 0.0, 0.0);
    for (a, b) in got.iter().zip(exact) {
        let a = f64::from(*a);
        dot += a * b;
        got_square += a * a;
        exact_square += b * b;
    }
    dot / (got_square * exact_square).sqrt()
}

/// Normal numbers: splitmix64 and Box–Muller.
struct Normal {
    state: u64,
}

impl Normal {
    fn new(seed: u64) -> Self {
        Normal { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) }
    }

    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.state;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn next(&mut self) -> f32 {
        let (u, v) = (1.0 - self.uniform(), self.uniform());
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }
}
