//! A weight below what the accumulation dtype holds is 0, as the definition's is: in forward and decode, within a block of
//! keys, from block to block and from chunk to chunk, on every instruction set of this machine.
//!
//! Values near the largest finite number show what is left of such a weight: 2⁻¹²⁶ · 3e38 is 3.5.
#![cfg(unix)]

use rapt_core::{Arch, Caps, Causal, DType, Operands, Options, SerialExecutor, Spec, Tensors, Workspace};
use rapt_testkit::{Case, MaskCase, Rng, Sparse, Values, reference, round};

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

/// Three queries for each of two key heads of a group: decode; twenty: forward, with a rest that fills no vector.
const Q_LENS: [usize; 2] = [3, 20];

/// The largest finite numbers, a little less.
fn large(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1.6e308,
        DType::F16 => 6e4,
        _ => 3e38,
    }
}

/// Below this a weight may be 0: the smallest normal number of the accumulation dtype.
fn least(dtype: DType) -> f64 {
    if dtype == DType::F64 { f64::MIN_POSITIVE } else { f64::from(f32::MIN_POSITIVE) }
}

fn row_major(shape: [usize; 4]) -> [isize; 4] {
    let [_, b, c, d] = shape.map(|n| n as isize);
    [b * c * d, c * d, d, 1]
}

struct Ran {
    out: Vec<f64>,
    lse: Vec<f64>,
    /// Out and lse of the definition.
    expected: [Vec<f64>; 2],
}

fn run(arch: Arch, case: &Case, values: &Values) -> Ran {
    let dtype = case.dtype;
    let filled = |dtype, shape: [usize; 4], values: &[f64]| Sparse::filled(dtype, shape, row_major(shape), values);
    let q = filled(dtype, case.q, &values.q);
    let (k, v) = (filled(dtype, case.k(), &values.k), filled(dtype, case.v(), &values.v));
    let mask = case.mask.zip(values.mask.as_ref()).map(|(of, mask)| filled(of.dtype, case.mask_shape(&of), mask));
    let mut out = Sparse::new(dtype, case.out(), row_major(case.out()));
    let lse_shape = [1, case.q[0], case.q[1], case.q[2]];
    let mut lse = Sparse::new(dtype.accumulation(), lse_shape, row_major(lse_shape));
    let tensors = Tensors {
        mask: mask.as_ref().map(|mask| mask.view("mask")),
        lse: Some(lse.view_mut("lse", 1)),
        ..Tensors::new(q.view("q"), k.view("k"), v.view("v"), out.view_mut("out", 0))
    };
    let options: Options = case.options();
    let spec = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &options)
        .mask(tensors.mask.as_ref())
        .out(&tensors.out)
        .lse(tensors.lse.as_ref().expect("asked for"))
        .build()
        .unwrap();
    let expected = reference(&spec, &tensors);
    let plan = rapt_cpu::select(&spec, &Caps { arch, threads: 1, clock_hz: None }).unwrap();
    let mut workspace = Workspace::new();
    workspace.ensure(plan.workspace_bytes()).unwrap();
    let mut operands = Operands::check(tensors, &spec).unwrap();
    rapt_cpu::run(&plan, &mut operands, &mut workspace, &SerialExecutor).unwrap();
    Ran { out: out.values(), lse: lse.values(), expected: [expected.out, expected.lse] }
}

/// Every instruction set, dtype and kernel.
fn each(mut test: impl FnMut(Arch, DType, usize)) {
    rapt_cpu::tile_every_request();
    for &arch in rapt_cpu::available() {
        for dtype in DTYPES {
            for q_len in Q_LENS {
                test(arch, dtype, q_len);
            }
        }
    }
}

/// Two heads of one group, head_dim 1; every query is 100.
fn case(dtype: DType, q_len: usize, kv_len: usize) -> (Case, Values) {
    let case = Case { num_kv_heads: 1, ..Case::plain(dtype, [1, 2, q_len, 1], kv_len) };
    let (k, v) = (vec![-100.0; kv_len], vec![0.0; kv_len]);
    (
        case,
        Values {
            q: vec![100.0; 2 * q_len],
            k,
            v,
            scales: rapt_core::Qkv::default(),
            mask: None,
            sinks: None,
            alibi_slopes: None,
        },
    )
}

/// One key of value 1 towers over the rest; `far` of the others has a value near the largest number: out is 1 exactly, and
/// lse its score.
fn towers(arch: Arch, dtype: DType, q_len: usize, kv_len: usize, top: usize, far: usize) {
    let (case, mut values) = case(dtype, q_len, kv_len);
    (values.k[top], values.v[top], values.v[far]) = (100.0, 1.0, large(dtype));
    let ran = run(arch, &case, &values);
    let of = format!("{dtype} on {}, {q_len} queries, key {top} over {far} of {kv_len}", arch.name());
    assert!(ran.out.iter().all(|&out| out == 1.0), "{of}: {:?}", &ran.out[..2]);
    assert!(ran.lse.iter().all(|&lse| lse == 10_000.0), "{of}: lse {:?}", &ran.lse[..2]);
}

#[test]
fn a_key_far_below_another_weighs_nothing() {
    each(|arch, dtype, q_len| {
        // The request, both ways round, and with an even and an odd key beside the pairs of bf16.
        towers(arch, dtype, q_len, 2, 0, 1);
        towers(arch, dtype, q_len, 2, 1, 0);
        towers(arch, dtype, q_len, 9, 3, 8);
        // From block to block, the maximum rising late or standing from the first one on; decode: from chunk to chunk.
        towers(arch, dtype, q_len, 2500, 2400, 7);
        towers(arch, dtype, q_len, 2500, 7, 2400);
    });
}

#[test]
fn nor_does_it_where_others_are_masked() {
    each(|arch, dtype, q_len| {
        let (base, mut values) = case(dtype, q_len, 40);
        (values.k[2], values.v[2], values.v[0]) = (100.0, 1.0, large(dtype));
        let options = [
            Case { causal: Some(Causal::BottomRight), ..base.clone() },
            Case {
                mask: Some(MaskCase { dtype: DType::Bool, full: [true; 4], rank: 4, lowest: false }),
                ..base.clone()
            },
            Case { mask: Some(MaskCase { dtype, full: [true; 4], rank: 4, lowest: false }), ..base },
        ];
        for case in options {
            values.mask = case.mask.map(|mask| {
                let (seen, hidden) = if mask.dtype == DType::Bool { (1.0, 0.0) } else { (0.0, f64::NEG_INFINITY) };
                (0..2 * q_len * 40).map(|n| if n % 40 % 7 == 6 { hidden } else { seen }).collect()
            });
            let ran = run(arch, &case, &values);
            assert!(ran.out.iter().all(|&out| out == 1.0), "{case:?} on {}: {:?}", arch.name(), &ran.out[..2]);
        }
    });
}

/// What is hidden is not there, whatever it is; what is attended and not finite stays so, though it weighs 0.
#[test]
fn a_weight_of_zero_is_no_mask() {
    each(|arch, dtype, q_len| {
        for kv_len in [40, 39, 1100] {
            let (base, mut values) = case(dtype, q_len, kv_len);
            let (seen, hidden) = (0, 6);
            (values.k[2], values.v[2]) = (100.0, 1.0);
            let mask = Some(MaskCase { dtype: DType::Bool, full: [false, false, true, true], rank: 4, lowest: false });
            let case = Case { mask, ..base };
            let is_seen = |n: usize| if n % kv_len == hidden { 0.0 } else { 1.0 };
            values.mask = Some((0..q_len * kv_len).map(is_seen).collect());
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                values.v[hidden] = bad;
                let of = format!("{dtype} on {}, {q_len} queries, {kv_len} keys, {bad}", arch.name());
                let ran = run(arch, &case, &values);
                assert!(ran.out.iter().all(|&out| out == 1.0), "{of}, hidden: {:?}", &ran.out[..2]);
                values.v[seen] = bad;
                let ran = run(arch, &case, &values);
                assert!(ran.out.iter().all(|out| !out.is_finite()), "{of}, attended: {:?}", &ran.out[..2]);
                values.v[seen] = 0.0;
            }
        }
    });
}

/// Scores from 0 to twice what an exponential reaches, in any order, values up to the largest numbers: against the
/// definition in f64, as far apart as rounding and weights below the smallest normal number allow.
#[test]
fn scores_that_spread_widely() {
    let mut rng = Rng::new(19);
    each(|arch, dtype, q_len| {
        // Several blocks of keys, and several chunks.
        let (head_dim, kv_len) = (4, 1300);
        let case = Case { num_kv_heads: 1, head_dim_v: 3, ..Case::plain(dtype, [1, 2, q_len, head_dim], kv_len) };
        let reach = -least(dtype).ln();
        let mut draw = |n: usize, most: f64| -> Vec<f64> {
            (0..n).map(|_| round(dtype, most * (2.0 * rng.unit() - 1.0))).collect()
        };
        let side = (2.0 * reach).sqrt();
        let (q, k) = (draw(2 * q_len * head_dim, side), draw(kv_len * head_dim, side));
        // One in a hundred: their sum stays finite.
        let mut v = draw(kv_len * 3, 1.0);
        v.iter_mut().step_by(301).for_each(|v| *v = round(dtype, large(dtype) / 4.0));
        let values = Values { q, k, v, scales: rapt_core::Qkv::default(), mask: None, sinks: None, alibi_slopes: None };
        let ran = run(arch, &case, &values);
        for row in 0..2 * q_len {
            let q = &values.q[row * head_dim..][..head_dim];
            let score = |k: &[f64]| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / (head_dim as f64).sqrt();
            let scores: Vec<f64> = values.k.chunks(head_dim).map(score).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            // A score of some hundreds is rounded by some units in its last place, and so its weight.
            let unit = if dtype == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
            let by_rounding = 16.0 * reach * unit + dtype_unit(dtype);
            for d in 0..3 {
                let column = values.v.chunks(3).map(|v| v[d].abs());
                let allowed: f64 = column
                    .zip(&weights)
                    .map(|(v, &p)| v * p * if p < 2.0 * least(dtype) { 1.0 } else { by_rounding })
                    .sum();
                let (got, want) = (ran.out[row * 3 + d], ran.expected[0][row * 3 + d]);
                let off = (got - want).abs();
                assert!(off <= allowed / sum, "{dtype} on {}: row {row}: {got:e}, not {want:e}", arch.name());
            }
            let (got, want) = (ran.lse[row], ran.expected[1][row]);
            assert!((got - want).abs() <= 8.0 * unit * (1.0 + want.abs()), "{dtype}: lse {got}, not {want}");
        }
    });
}

/// One unit in the last place of the storage dtype, for which P may be rounded besides the output.
fn dtype_unit(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-10),
        _ => 2f64.powi(-7),
    }
}
