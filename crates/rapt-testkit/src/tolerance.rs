//! How far a result may lie from the reference: the tolerance rule that docs publish, with torch's measured error as the yardstick.
//!
//! ```text
//! |got − reference| / |reference|                                ≤ max(1.1 · torch's, 4/√N · e) + floor   over the whole output
//! |got_r − reference_r| / max(|reference_r|, mean |reference_r|) ≤ 4 · torch's worst + floor              for each row r
//! floor: f64 16·2⁻⁵², f32 2·2⁻²³, f16 2⁻¹⁴, bf16 2⁻¹¹
//! |lse − reference|                                              ≤ max(1e-5 · (1 + |lse|), Σ p·ε)        (f64: 1e-12)
//! ```
//!
//! `e` is the error that rounding the logits is expected to make, `N` the number of rows on which it hinges and `ε` the bound for one
//! logit; [`LogitRounding`] computes them. Torch's error on some inputs is one draw of a random number, so `e` counts as torch's where it
//! is larger. One row at its limit of 4 alone makes the error of `N` like rows `4/√N` times what is expected; from 14 rows on 1.1 is more.
//! The second limit of lse is the larger one only where the products of large logits cancel, so that lse is small beside what its
//! logits were rounded at.
//!
//! Torch's figures come from `limits/limits.tsv`, written by `limits/generate.py` and never by hand. Of head_dim the
//! nearest entry in log space counts. So it does of kv_len, but the entry of one key, where torch is exact, speaks only
//! for one key. Non-finite values must match the reference's, rounded to the dtype. Deliberately absent: any other number.

use std::fmt;
use std::sync::OnceLock;

use rapt_core::DType;

use crate::figures::{Figures, figures};
use crate::rounding::LogitRounding;
use crate::scalar::round;

/// Classes of options that move torch's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// N(0, 1) data, scale `1/sqrt(head_dim)`.
    Plain,
    /// Scores eight times as wide.
    Large,
    /// An additive N(0, 1) bias.
    Bias,
    /// softcap 2.
    Softcap,
    /// A sink logit per head.
    Sinks,
}

impl Class {
    /// Every class.
    pub const ALL: [Class; 5] = [Class::Plain, Class::Large, Class::Bias, Class::Softcap, Class::Sinks];

    fn name(self) -> &'static str {
        match self {
            Class::Plain => "plain",
            Class::Large => "large",
            Class::Bias => "bias",
            Class::Softcap => "softcap",
            Class::Sinks => "sinks",
        }
    }
}

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Entry {
    dtype: DType,
    class: &'static str,
    /// The head_dim that was measured.
    pub head_dim: usize,
    /// The kv_len that was measured.
    pub kv_len: usize,
    /// The worse of torch's math and flash.
    pub torch: Figures,
    /// The torch formula with flash's roundings.
    pub formula: Figures,
}

fn table() -> &'static [Entry] {
    static TABLE: OnceLock<Vec<Entry>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let lines = include_str!("../limits/limits.tsv").lines().filter(|line| !line.starts_with('#')).skip(1);
        let entry = |line: &'static str| {
            let fields: Vec<&'static str> = line.split('\t').collect();
            let figures = |n: usize| Figures {
                relative: fields[n].parse().expect("a figure"),
                worst_row: fields[n + 1].parse().expect("a figure"),
                row: 0,
            };
            Entry {
                dtype: DType::from_name(fields[0]).expect("a dtype"),
                class: fields[1],
                head_dim: fields[2].parse().expect("a size"),
                kv_len: fields[3].parse().expect("a size"),
                torch: figures(4),
                formula: figures(6),
            }
        };
        lines.map(entry).collect()
    })
}

/// The table's entry for these sizes.
///
/// # Panics
/// If attention does not compute `dtype`.
#[must_use]
pub fn entry(dtype: DType, class: Class, head_dim: usize, kv_len: usize) -> &'static Entry {
    let distance = |a: usize, b: usize| (a.max(1) as f64 / b.max(1) as f64).log2().abs();
    table()
        .iter()
        .filter(|e| e.dtype == dtype && e.class == class.name() && (e.kv_len > 1 || kv_len <= 1))
        .min_by(|a, b| {
            let key = |e: &Entry| distance(e.head_dim, head_dim) + 100.0 * distance(e.kv_len, kv_len);
            key(a).total_cmp(&key(b))
        })
        .unwrap_or_else(|| panic!("{dtype} has no limits"))
}

/// What the rule allows of torch's error: for a row of torch's worst row, and for the whole at least.
const OF_A_ROW: f64 = 4.0;
const OF_THE_WHOLE: f64 = 1.1;

/// What is added to torch's error.
#[must_use]
pub fn floor(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 16.0 * f64::EPSILON,
        DType::F32 => 2.0 * f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-14),
        _ => 2f64.powi(-11),
    }
}

/// A result that breaks the rule.
#[derive(Clone, Debug, PartialEq)]
pub enum Mismatch {
    /// Not as many elements as the reference has.
    Length {
        /// Elements given.
        got: usize,
        /// Elements of the reference.
        reference: usize,
    },
    /// One of the two is not finite and the other is not the same.
    NonFinite {
        /// The row.
        row: usize,
        /// The column; 0 for lse.
        column: usize,
        /// What was given.
        got: f64,
        /// What the reference says.
        reference: f64,
    },
    /// The whole lies too far away.
    Relative {
        /// The error.
        got: Figures,
        /// What is allowed.
        limit: f64,
    },
    /// One row lies too far away.
    Row {
        /// The error.
        got: Figures,
        /// What is allowed.
        limit: f64,
    },
    /// One lse lies too far away.
    Lse {
        /// The row.
        row: usize,
        /// What was given.
        got: f64,
        /// What the reference says.
        reference: f64,
        /// What is allowed.
        limit: f64,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::Length { got, reference } => write!(f, "{got} elements, the reference has {reference}"),
            Mismatch::NonFinite { row, column, got, reference } => {
                write!(f, "row {row}, column {column} is {got}, the reference says {reference}")
            }
            Mismatch::Relative { got, limit } => write!(
                f,
                "relative L2 error {:.3e} exceeds {limit:.3e} (worst row {}: {:.3e})",
                got.relative, got.row, got.worst_row
            ),
            Mismatch::Row { got, limit } => write!(
                f,
                "row {} has error {:.3e}, which exceeds {limit:.3e} (relative L2 of the whole {:.3e})",
                got.row, got.worst_row, got.relative
            ),
            Mismatch::Lse { row, got, reference, limit } => {
                write!(f, "lse of row {row} is {got}, the reference says {reference}, allowed are {limit:.3e}")
            }
        }
    }
}

/// Whether both are finite, both NaN, or the same infinity.
fn same_kind(a: f64, b: f64) -> bool {
    a == b || (a.is_finite() && b.is_finite()) || (a.is_nan() && b.is_nan())
}

/// Judges an output on N(0, 1) data by the table: `got` holds `rows` rows of `head_dim_v`.
///
/// # Errors
/// [`Mismatch`].
pub fn check(
    got: &[f64],
    reference: &[f64],
    rows: usize,
    head_dim_v: usize,
    dtype: DType,
    head_dim: usize,
    kv_len: usize,
) -> Result<(), Mismatch> {
    if reference.len() != rows * head_dim_v {
        return Err(Mismatch::Length { got: rows * head_dim_v, reference: reference.len() });
    }
    check_within(got, reference, head_dim_v, dtype, &entry(dtype, Class::Plain, head_dim, kv_len).torch, None)
}

/// Judges an output by a yardstick: torch's own error `torch`, before factors and floor. Without `rounding` torch's counts alone.
///
/// # Errors
/// [`Mismatch`].
pub fn check_within(
    got: &[f64],
    reference: &[f64],
    head_dim_v: usize,
    dtype: DType,
    torch: &Figures,
    rounding: Option<&LogitRounding>,
) -> Result<(), Mismatch> {
    if got.len() != reference.len() {
        return Err(Mismatch::Length { got: got.len(), reference: reference.len() });
    }
    for (n, (&got, &reference)) in got.iter().zip(reference).enumerate() {
        let rounded = round(dtype, reference);
        if !same_kind(got, rounded) {
            let head_dim_v = head_dim_v.max(1);
            return Err(Mismatch::NonFinite { row: n / head_dim_v, column: n % head_dim_v, got, reference });
        }
    }
    let got = figures(got, reference, head_dim_v);
    let (expected, rows) = rounding.map_or((Figures::default(), f64::INFINITY), |of| (of.out, of.rows));
    let of_few_rows = OF_A_ROW / rows.sqrt() * expected.relative;
    let whole = of_few_rows.max(OF_THE_WHOLE * torch.relative.max(expected.relative)) + floor(dtype);
    let row = OF_A_ROW * torch.worst_row.max(expected.worst_row) + floor(dtype);
    if got.relative > whole {
        return Err(Mismatch::Relative { got, limit: whole });
    }
    if got.worst_row > row {
        return Err(Mismatch::Row { got, limit: row });
    }
    Ok(())
}

/// Judges each number by an error of its own: it lies between what `reference` less and more than that rounds to in `dtype`.
///
/// # Errors
/// The first that does not, in words.
pub fn check_between(what: &str, got: &[f64], reference: &[f64], errors: &[f64], dtype: DType) -> Result<(), String> {
    if got.len() != reference.len() {
        return Err(format!("{what} has {} numbers, the reference {}", got.len(), reference.len()));
    }
    for (n, ((&got, &reference), &error)) in got.iter().zip(reference).zip(errors).enumerate() {
        let (low, high) = (round(dtype, reference - error), round(dtype, reference + error));
        if !(low <= got && got <= high || got.is_nan() && reference.is_nan()) {
            return Err(format!(
                "{what}[{n}] is {got:e}, the reference {reference:e}, which float32 may be {error:e} from"
            ));
        }
    }
    Ok(())
}

/// Judges lse. `dtype` is the storage dtype. Without `rounding` the first of the two limits counts alone.
///
/// # Errors
/// [`Mismatch`].
pub fn check_lse(
    got: &[f64],
    reference: &[f64],
    dtype: DType,
    rounding: Option<&LogitRounding>,
) -> Result<(), Mismatch> {
    if got.len() != reference.len() {
        return Err(Mismatch::Length { got: got.len(), reference: reference.len() });
    }
    let unit = if dtype == DType::F64 { 1e-12 } else { 1e-5 };
    for (row, (&got, &reference)) in got.iter().zip(reference).enumerate() {
        let reference = round(dtype.accumulation(), reference);
        if !same_kind(got, reference) {
            return Err(Mismatch::NonFinite { row, column: 0, got, reference });
        }
        if !reference.is_finite() {
            continue;
        }
        let limit = (unit * (1.0 + reference.abs())).max(rounding.map_or(0.0, |rounding| rounding.lse[row]));
        if (got - reference).abs() > limit {
            return Err(Mismatch::Lse { row, got, reference, limit });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_and_class_was_measured() {
        assert_eq!(table().len(), 4 * Class::ALL.len() * 7 * 4);
        for (dtype, class) in rapt_core::COMPUTED.iter().flat_map(|d| Class::ALL.map(|class| (*d, class))) {
            let near = entry(dtype, class, 70, 100);
            assert_eq!((near.head_dim, near.kv_len), (64, 128));
            assert_eq!(entry(dtype, class, 5000, 2).kv_len, 16);
            assert_eq!(entry(dtype, class, 1, 1).kv_len, 1);
            // A table that measured nothing, or something absurd, would judge nothing.
            let unit = floor(dtype);
            assert!(near.torch.relative > unit / 100.0 && near.torch.relative < 100.0 * unit, "{near:?}");
        }
    }

    #[test]
    fn the_rule_judges_the_whole_each_row_and_what_is_not_finite() {
        let reference = [1.0, 2.0, 3.0, 4.0, 0.0, 1e-3];
        let torch = Figures { relative: 1e-6, worst_row: 1e-6, row: 0 };
        let check = |got: &[f64]| check_within(got, &reference, 2, DType::F32, &torch, None);
        assert_eq!(check(&reference), Ok(()));
        let mut got = reference;
        got[0] += 1e-5;
        assert!(matches!(check(&got), Err(Mismatch::Relative { .. })));
        // The last row is small: its error counts against the mean row's norm, which is 2.4.
        let mut got = reference;
        got[5] += 5e-6;
        assert_eq!(check(&got), Ok(()));
        let lax = Figures { relative: 1.0, ..torch };
        let mut got = reference;
        got[3] += 1e-3;
        let error = check_within(&got, &reference, 2, DType::F32, &lax, None).unwrap_err();
        assert!(error.to_string().starts_with("row 1 has error 2.000e-4"), "{error}");
        got[4] = f64::NAN;
        assert!(matches!(check(&got), Err(Mismatch::NonFinite { row: 2, column: 0, .. })));
        assert!(matches!(check(&reference[..4]), Err(Mismatch::Length { got: 4, reference: 6 })));
    }

    #[test]
    fn an_error_of_few_rows_may_be_what_one_row_may_be() {
        let reference = [1.0, 2.0, 3.0, 4.0];
        let torch = Figures { relative: 1e-6, worst_row: 1e-4, row: 0 };
        let judge = |times: f64, rows: f64| {
            let out = Figures { relative: 1e-5, ..torch };
            let got = reference.map(|x| x * (1.0 + times * 1e-5));
            check_within(&got, &reference, 2, DType::F32, &torch, Some(&LogitRounding { lse: Vec::new(), out, rows }))
        };
        for (rows, times) in [(1.0, 4.0), (4.0, 2.0), (16.0, 1.1), (f64::INFINITY, 1.1)] {
            assert_eq!(judge(times, rows), Ok(()), "{rows} rows");
            assert!(matches!(judge(times + 0.05, rows), Err(Mismatch::Relative { .. })), "{rows} rows");
        }
    }

    #[test]
    fn lse_is_judged_by_its_own_rule() {
        let reference = [f64::NEG_INFINITY, 10.0, f64::NAN];
        assert_eq!(check_lse(&reference, &reference, DType::F32, None), Ok(()));
        let off = |by: f64| check_lse(&[f64::NEG_INFINITY, 10.0 + by, f64::NAN], &reference, DType::F32, None);
        assert_eq!(off(1e-4), Ok(()));
        assert!(matches!(off(1.2e-4), Err(Mismatch::Lse { row: 1, .. })));
        let rounding = |bound: f64| LogitRounding { lse: vec![0.0, bound, 0.0], out: Figures::default(), rows: 1.0 };
        let off = |by: f64, bound: f64| {
            check_lse(&[f64::NEG_INFINITY, 10.0 + by, f64::NAN], &reference, DType::F32, Some(&rounding(bound)))
        };
        assert_eq!((off(9e-4, 1e-3), off(1e-4, 1e-9)), (Ok(()), Ok(())));
        assert!(matches!(off(1.1e-3, 1e-3), Err(Mismatch::Lse { row: 1, .. })));
        assert!(matches!(off(1.2e-4, 1e-9), Err(Mismatch::Lse { row: 1, .. })));
        assert!(matches!(check_lse(&[0.0; 3], &reference, DType::F32, None), Err(Mismatch::NonFinite { row: 0, .. })));
    }
}
