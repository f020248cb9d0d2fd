//! `compute="int8"`: its definition by hand where rows are small, its rules, and how far it is from attention on the same numbers.

use rapt_core::{Causal, INT8_BLOCK, Shape, View};
use rapt_quant::{Format, Granularity, ScaleLayout, Scheme, quantize};
use rapt_reference::{Descale, Inputs, Int8Inputs, Int8Outputs, Mask, Problem, int8, naive};

const ONE: Descale<'_> = Descale { factor: &[1.0], zero_point: None, shape: &[] };

fn attend(problem: &Problem, inputs: Inputs<'_>) -> Int8Outputs {
    int8(problem, &Int8Inputs { inputs, k: ONE, v: ONE })
}

/// One query of one number, which becomes the code 127, so that scores are `q · k` but for one rounding.
fn row(q: f64, k: &[f64], v: &[f64]) -> (f64, f64) {
    let problem = Problem { softmax_scale: 1.0, ..Problem::plain(1, 1, 1, k.len(), 1) };
    let found = attend(&problem, Inputs::plain(&[q], k, v));
    (found.outputs.out[0], found.outputs.lse[0])
}

#[track_caller]
fn close(got: f64, expected: f64) {
    assert!((got - expected).abs() <= 1e-6 * (1.0 + expected.abs()), "{got} is not {expected}");
}

#[test]
fn probabilities_are_rounded_against_the_maximum_of_their_block() {
    // exp(−3 / 2) · 255 = 56.9: 57 of 255.
    let (out, lse) = row(0.5, &[3.0, 0.0], &[0.0, 100.0]);
    close(out, 100.0 * 57.0 / 255.0 / (1.0 + (-1.5f64).exp()));
    close(lse, 1.5 + (1.0 + (-1.5f64).exp()).ln());
    // exp(−7) · 255 = 0.23 rounds to nothing, beside the maximum; in a block of its own it is the maximum.
    let mut k = vec![7.0, 0.0];
    let mut v = vec![0.0, 100.0];
    close(row(1.0, &k, &v).0, 0.0);
    k.splice(1..1, vec![-100.0; INT8_BLOCK - 1]);
    v.splice(1..1, vec![0.0; INT8_BLOCK - 1]);
    close(row(1.0, &k, &v).0, 100.0 * (-7f64).exp() / (1.0 + (-7f64).exp()));
    k.remove(1);
    v.remove(1);
    close(row(1.0, &k, &v).0, 0.0);
}

#[test]
fn a_query_is_rounded_against_its_own_largest_number() {
    let problem = Problem { softmax_scale: 1.0, ..Problem::plain(1, 1, 2, 1, 3) };
    // Scales 1 and 2^-126: codes 127, 3, −2 (2.5 is a tie), and what is left of a number below normal ones.
    let tiny = f64::from(f32::MIN_POSITIVE);
    let q = [127.0, 2.6, -2.5, tiny * 2.0, tiny * 0.75, 0.0];
    let found = attend(&problem, Inputs::plain(&q, &[0.0, 1.0, 1.0], &[1.0; 3]));
    close(found.outputs.lse[0], 1.0);
    close(found.outputs.lse[1] / tiny, 1.0);
}

#[test]
fn rows_without_keys_and_rows_of_nan_are_as_everywhere() {
    let problem = Problem { causal: Some(Causal::BottomRight), ..Problem::plain(1, 1, 3, 2, 1) };
    let (k, v) = ([1.0, 2.0], [3.0, 5.0]);
    let found =
        attend(&problem, Inputs { sinks: Some(&[0.0]), ..Inputs::plain(&[f64::NAN, f64::INFINITY, 1.0], &k, &v) });
    assert_eq!((found.outputs.out[0], found.outputs.lse[0]), (0.0, f64::NEG_INFINITY));
    assert!(found.outputs.out[1].is_nan() && found.outputs.lse[1].is_nan());
    assert!(found.outputs.out[2].is_finite());
}

#[test]
fn what_is_not_attended_has_no_influence() {
    let problem = Problem::plain(1, 1, 1, 300, 1);
    let mask: Vec<bool> = (0..300).map(|j| j % 3 != 1).collect();
    let of = |masked: f64| {
        let at = |j: usize, x: f64| if mask[j] { x } else { masked };
        let k: Vec<f64> = (0..300).map(|j| at(j, (j * 7 % 50) as f64 - 25.0)).collect();
        let v: Vec<f64> = (0..300).map(|j| at(j, (j * 11 % 90) as f64)).collect();
        attend(&problem, Inputs { mask: Some(Mask::Bool(&mask)), ..Inputs::plain(&[0.3], &k, &v) })
    };
    assert_eq!(of(127.0), of(-128.0));
}

/// Numbers of a normal distribution, near enough: the sum of twelve uniform ones.
fn normal(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..n).map(|_| ((0..12).map(|_| uniform()).sum::<f64>() - 6.0) as f32).collect()
}

/// Relative L2 of `int8` against `naive` on the same codes, and on what the codes were made of.
fn errors(of_k: Granularity, of_v: Granularity, sharp: f64) -> (f64, f64) {
    let (heads, q_len, kv_len, dim) = (2, 24, 700, 64);
    let problem =
        Problem { softmax_scale: sharp / (dim as f64).sqrt(), ..Problem::plain(1, heads, q_len, kv_len, dim) };
    let (q, k, v) = (normal(heads * q_len * dim, 1), normal(heads * kv_len * dim, 2), normal(heads * kv_len * dim, 3));
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let codes = |x: &[f32], granularity| {
        let view = View::contiguous("x", x, Shape::from([1, heads, kv_len, dim])).unwrap();
        let scheme = Scheme::new(Format::Int8, Some(granularity), ScaleLayout::Plain).unwrap();
        let quantized = quantize(&view, scheme, None).unwrap();
        let codes: Vec<f64> = quantized.codes().iter().map(|&code| f64::from(code.cast_signed())).collect();
        (codes, wide(quantized.scale_f32().unwrap()), quantized.form().scale_shape().to_vec(), quantized)
    };
    let ((kc, kf, ks, kq), (vc, vf, vs, vq)) = (codes(&k, of_k), codes(&v, of_v));
    let descale = |factor, shape| Descale { factor, zero_point: None, shape };
    let (q, k, v) = (wide(&q), wide(&k), wide(&v));
    let inputs = Int8Inputs { inputs: Inputs::plain(&q, &kc, &vc), k: descale(&kf, &ks), v: descale(&vf, &vs) };
    let found = int8(&problem, &inputs).outputs.out;
    let numbers = [kq, vq].map(|quantized| wide(&quantized.view().unwrap().to_f32().unwrap()));
    let against = |k: &[f64], v: &[f64]| {
        let exact = naive(&problem, &Inputs::plain(&q, k, v)).out;
        let (mut off, mut size) = (0.0, 0.0);
        for (got, exact) in found.iter().zip(&exact) {
            off += (got - exact) * (got - exact);
            size += exact * exact;
        }
        f64::sqrt(off / size)
    };
    (against(&numbers[0], &numbers[1]), against(&k, &v))
}

#[test]
fn it_is_about_as_far_from_its_codes_as_they_are_from_the_originals() {
    // Measured 2026-11: 0.9 % to 1.5 % from the codes, 1.3 % to 2.7 % from the originals.
    for (of_k, of_v) in [
        (Granularity::Token, Granularity::Channel),
        (Granularity::Token, Granularity::Head),
        (Granularity::Head, Granularity::Head),
        (Granularity::Tensor, Granularity::Tensor),
    ] {
        for sharp in [1.0, 3.0] {
            let (from_codes, from_originals) = errors(of_k, of_v, sharp);
            println!("{of_k} {of_v} {sharp}: {from_codes:.2e} {from_originals:.2e}");
            assert!((5e-3..2e-2).contains(&from_codes), "{of_k} {of_v} {sharp}: {from_codes:e} from the codes");
            assert!(
                (8e-3..3e-2).contains(&from_originals),
                "{of_k} {of_v} {sharp}: {from_originals:e} from the originals"
            );
        }
    }
}
