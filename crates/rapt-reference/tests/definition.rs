//! The definition, clause by clause, by both forms of the reference; then the two forms against each other.

use proptest::prelude::*;
use rapt_core::{Causal, Dropout, DropoutSeed, Window};
use rapt_reference::{Inputs, Mask, Outputs, Problem, naive, online};

const INF: f64 = f64::INFINITY;
const NAN: f64 = f64::NAN;

fn same(a: f64, b: f64, tolerance: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * (1.0 + a.abs())
}

fn assert_same(a: &Outputs, b: &Outputs, context: &str) {
    for (name, a, b) in [("out", &a.out, &b.out), ("lse", &a.lse, &b.lse)] {
        assert_eq!(a.len(), b.len(), "{context}");
        for (n, (&a, &b)) in a.iter().zip(b).enumerate() {
            assert!(same(a, b, 1e-12), "{name}[{n}]: {a} against {b}; {context}");
        }
    }
}

/// Both forms, for several block sizes, which must agree.
fn reference(problem: &Problem, inputs: &Inputs<'_>) -> Outputs {
    let outputs = naive(problem, inputs);
    for block_n in [1, 2, 3, 64] {
        assert_same(&outputs, &online(problem, inputs, block_n), &format!("block_n {block_n}, {problem:?}"));
    }
    outputs
}

/// One head, one query, head_dim 1, q = 1 and scale 1: the scores are `k`, so that rows are computed by hand.
fn row<'a>(k: &'a [f64], v: &'a [f64], change: impl Fn(&mut Inputs<'a>)) -> (f64, f64) {
    row_of(&1.0, k, v, change)
}

fn row_of<'a>(q: &'a f64, k: &'a [f64], v: &'a [f64], change: impl Fn(&mut Inputs<'a>)) -> (f64, f64) {
    let mut inputs = Inputs::plain(std::slice::from_ref(q), k, v);
    change(&mut inputs);
    let outputs = reference(&Problem::plain(1, 1, 1, k.len(), 1), &inputs);
    (outputs.out[0], outputs.lse[0])
}

#[track_caller]
fn check((out, lse): (f64, f64), expect_out: f64, expect_lse: f64) {
    assert!(same(out, expect_out, 1e-15), "out is {out}, expected {expect_out}");
    assert!(same(lse, expect_lse, 1e-15), "lse is {lse}, expected {expect_lse}");
}

#[test]
fn one_key_gives_its_value_exactly() {
    let outputs = reference(&Problem::plain(1, 1, 1, 1, 2), &Inputs::plain(&[1.0, 0.5], &[0.5, 1.0], &[0.25, 0.75]));
    assert_eq!(outputs.out, [0.25, 0.75]);
    assert!(same(outputs.lse[0], 1.0 / 2f64.sqrt(), 1e-15));
}

#[test]
fn two_keys_by_hand() {
    // Weights 1 and 3 of 4.
    check(row(&[0.0, 3f64.ln()], &[8.0, 4.0], |_| ()), 5.0, 4f64.ln());
}

#[test]
fn the_scale_is_any_finite_number_and_its_default_is_one_over_the_root_of_head_dim() {
    let (k, v) = ([0.0, 3f64.ln()], [8.0, 4.0]);
    let problem = |softmax_scale| Problem { softmax_scale, ..Problem::plain(1, 1, 1, 2, 1) };
    let out = |scale| reference(&problem(scale), &Inputs::plain(&[1.0], &k, &v)).out[0];
    assert!(same(out(0.0), 6.0, 1e-15));
    assert!(same(out(-1.0), 7.0, 1e-15));
    assert!(same(out(2.0), (8.0 + 9.0 * 4.0) / 10.0, 1e-15));
    assert_eq!(Problem::plain(1, 1, 1, 1, 16).softmax_scale, 0.25);
}

#[test]
fn softcap_comes_after_the_scale_and_before_the_bias() {
    let problem = Problem { softcap: Some(2.0), softmax_scale: 0.5, ..Problem::plain(1, 1, 1, 2, 1) };
    let inputs =
        Inputs { mask: Some(Mask::Additive(&[0.0, 7.0])), ..Inputs::plain(&[1.0], &[4.0, 600.0], &[1.0, 0.0]) };
    let (a, b) = (2.0 * 1f64.tanh(), 2.0 + 7.0);
    let outputs = reference(&problem, &inputs);
    assert!(same(outputs.out[0], 1.0 / (1.0 + (b - a).exp()), 1e-14));
    assert!(same(outputs.lse[0], b + (a - b).exp().ln_1p(), 1e-14));
}

#[test]
fn true_attends_and_a_bias_adds() {
    check(row(&[0.0, 9.0], &[8.0, 4.0], |x| x.mask = Some(Mask::Bool(&[true, false]))), 8.0, 0.0);
    check(row(&[0.0, 0.0], &[8.0, 4.0], |x| x.mask = Some(Mask::Additive(&[0.0, -INF]))), 8.0, 0.0);
    check(row(&[1.0, 2.0], &[8.0, 4.0], |x| x.mask = Some(Mask::Additive(&[1.0, 0.0]))), 6.0, 2.0 + 2f64.ln());
}

#[test]
fn a_masked_key_influences_nothing() {
    for poison in [NAN, INF, -INF, f64::MAX] {
        let (k, v) = ([0.0, poison, 0.0], [8.0, poison, 4.0]);
        check(row(&k, &v, |x| x.mask = Some(Mask::Bool(&[true, false, true]))), 6.0, 2f64.ln());
        check(row(&k, &v, |x| x.mask = Some(Mask::Additive(&[0.0, -INF, 0.0]))), 6.0, 2f64.ln());
        for (causal, window) in
            [(Some(Causal::TopLeft), Window::default()), (None, Window { left: None, right: Some(0) })]
        {
            let problem = Problem { causal, window, ..Problem::plain(1, 1, 1, 2, 1) };
            let outputs = reference(&problem, &Inputs::plain(&[1.0], &[0.0, poison], &[8.0, poison]));
            assert_eq!((outputs.out[0], outputs.lse[0]), (8.0, 0.0));
        }
        // A boolean mask and the position rule combine by AND: poison under either is unseen.
        let problem = Problem { causal: Some(Causal::TopLeft), ..Problem::plain(1, 1, 1, 3, 1) };
        let inputs = Inputs { mask: Some(Mask::Bool(&[true, true, false])), ..Inputs::plain(&[1.0], &k, &v) };
        assert_eq!(reference(&problem, &inputs).out[0], 8.0);
    }
}

#[test]
fn a_row_with_every_key_masked_is_zeros_even_with_a_sink_or_nan() {
    let masks = [Mask::Bool(&[false, false]), Mask::Additive(&[-INF, -INF])];
    for (mask, sink) in masks.iter().flat_map(|mask| [None, Some([1.0]), Some([NAN])].map(|sink| (mask, sink))) {
        let change = |x: &mut Inputs<'_>| x.mask = Some(*mask);
        for q in [1.0, NAN, INF] {
            let q = [q];
            let mut inputs = Inputs::plain(&q, &[1.0, NAN], &[1.0, NAN]);
            change(&mut inputs);
            inputs.sinks = sink.as_ref().map(<[f64; 1]>::as_slice);
            let outputs = reference(&Problem::plain(1, 1, 1, 2, 1), &inputs);
            assert_eq!((outputs.out[0], outputs.lse[0]), (0.0, -INF));
        }
    }
}

#[test]
fn no_keys_give_zeros_and_no_queries_give_nothing() {
    let problem = Problem { head_dim_v: 3, ..Problem::plain(1, 2, 2, 0, 1) };
    let inputs = Inputs { sinks: Some(&[1.0, 2.0]), ..Inputs::plain(&[1.0, NAN, 1.0, 1.0], &[], &[]) };
    assert_eq!(reference(&problem, &inputs), Outputs { out: vec![0.0; 12], lse: vec![-INF; 4] });
    let none = reference(&Problem::plain(1, 1, 0, 2, 1), &Inputs::plain(&[], &[1.0, 2.0], &[1.0, 2.0]));
    assert_eq!(none, Outputs { out: vec![], lse: vec![] });
    assert_eq!(reference(&Problem::plain(0, 1, 2, 2, 1), &Inputs::plain(&[], &[], &[])).lse.len(), 0);
}

#[test]
fn nan_and_plus_inf_reach_only_the_rows_that_attend_them() {
    check(row(&[0.0, NAN], &[1.0, 2.0], |_| ()), NAN, NAN);
    check(row(&[0.0, 0.0], &[1.0, 2.0], |x| x.mask = Some(Mask::Additive(&[0.0, NAN]))), NAN, NAN);
    check(row(&[0.0, 0.0], &[1.0, 2.0], |x| x.mask = Some(Mask::Additive(&[0.0, INF]))), NAN, NAN);
    check(row(&[0.0, 0.0], &[1.0, 2.0], |x| x.sinks = Some(&[NAN])), NAN, NAN);
    check(row_of(&NAN, &[0.0, 0.0], &[1.0, 2.0], |_| ()), NAN, NAN);
    // A NaN value makes its own column NaN, lse stays.
    let problem = Problem { head_dim_v: 2, ..Problem::plain(1, 1, 2, 2, 1) };
    let problem = Problem { causal: Some(Causal::TopLeft), ..problem };
    let outputs = reference(&problem, &Inputs::plain(&[0.0, 0.0], &[0.0, 0.0], &[1.0, 2.0, NAN, 4.0]));
    assert_eq!(outputs.out[..2], [1.0, 2.0]);
    assert!(outputs.out[2].is_nan());
    assert_eq!(outputs.out[3], 3.0);
    assert_eq!(outputs.lse, [0.0, 2f64.ln()]);
    // Causal: row 0 does not attend the NaN key, row 1 does.
    let outputs =
        reference(&Problem { head_dim_v: 1, ..problem }, &Inputs::plain(&[1.0, 1.0], &[0.0, NAN], &[5.0, 6.0]));
    assert_eq!((outputs.out[0], outputs.lse[0]), (5.0, 0.0));
    assert!(outputs.out[1].is_nan() && outputs.lse[1].is_nan());
}

#[test]
fn an_attended_score_of_minus_inf_weighs_nothing_and_a_row_of_them_is_as_one_without_keys() {
    check(row(&[-INF, 0.0, 0.0], &[9.0, 8.0, 4.0], |_| ()), 6.0, 2f64.ln());
    check(row(&[-INF, -INF], &[8.0, 4.0], |_| ()), 0.0, -INF);
    check(row(&[-INF, -INF], &[8.0, 4.0], |x| x.sinks = Some(&[1.0])), 0.0, -INF);
    check(row(&[-INF, NAN], &[8.0, 4.0], |_| ()), NAN, NAN);
    check(row(&[INF, 0.0], &[8.0, 4.0], |_| ()), NAN, NAN);
}

#[test]
fn the_lowest_finite_bias_is_a_number() {
    for lowest in [f64::MIN, f64::from(f32::MIN), -3.389_531_389_251_535_5e38] {
        let bias = [lowest; 3];
        let (out, lse) = row(&[3.0, -2.0, 1.0], &[3.0, 6.0, 9.0], |x| x.mask = Some(Mask::Additive(&bias)));
        check((out, lse), 6.0, lowest);
        let bias = [lowest, 0.0];
        check(row(&[3.0, -2.0], &[3.0, 6.0], |x| x.mask = Some(Mask::Additive(&bias))), 6.0, -2.0);
    }
    // p comes from the row's max and sum: exp(s − lse) would give the sum of v here, 18.
}

#[test]
fn sinks_join_the_denominator_unscaled_and_lse_includes_them() {
    let problem = Problem { softmax_scale: 100.0, ..Problem::plain(1, 1, 1, 2, 1) };
    let inputs = Inputs { sinks: Some(&[2f64.ln()]), ..Inputs::plain(&[0.0], &[1.0, 1.0], &[8.0, 4.0]) };
    let outputs = reference(&problem, &inputs);
    check((outputs.out[0], outputs.lse[0]), 3.0, 4f64.ln());
    check(row(&[0.0, 0.0], &[8.0, 4.0], |x| x.sinks = Some(&[-INF])), 6.0, 2f64.ln());
    check(row(&[0.0, 0.0], &[8.0, 4.0], |x| x.sinks = Some(&[1e300])), 0.0, 1e300);
}

#[test]
fn alibi_falls_with_the_distance_from_the_diagonal() {
    let slope = 2f64.ln();
    for (causal, i, expect) in [(None, 0, [0.0, 1.0, 2.0]), (Some(Causal::BottomRight), 0, [1.0, 0.0, NAN])] {
        let problem = Problem { causal, ..Problem::plain(1, 1, 2, 3, 1) };
        let inputs =
            Inputs { alibi_slopes: Some(&[slope]), ..Inputs::plain(&[0.0; 2], &[0.0; 3], &[1.0, 10.0, 100.0]) };
        let weights = expect.map(|distance: f64| if distance.is_nan() { 0.0 } else { 0.5f64.powf(distance) });
        let sum: f64 = weights.iter().sum();
        let out = (weights[0] + 10.0 * weights[1] + 100.0 * weights[2]) / sum;
        let outputs = reference(&problem, &inputs);
        check((outputs.out[i], outputs.lse[i]), out, sum.ln());
    }
}

#[test]
fn causal_and_window_count_from_their_own_corner() {
    // With all scores equal and v_j = 2^j · (number seen), the row's sum names the set of keys seen.
    let seen = |q_len, kv_len, causal, left, right| -> Vec<u32> {
        let problem = Problem { causal, window: Window { left, right }, ..Problem::plain(1, 1, q_len, kv_len, 1) };
        let v: Vec<f64> = (0..kv_len).map(|j| f64::from(1 << j)).collect();
        let outputs = reference(&problem, &Inputs::plain(&vec![0.0; q_len], &vec![0.0; kv_len], &v));
        outputs.out.iter().zip(&outputs.lse).map(|(out, lse)| (out * lse.exp()).round() as u32).collect()
    };
    assert_eq!(seen(2, 4, None, None, None), [0b1111, 0b1111]);
    assert_eq!(seen(2, 4, Some(Causal::TopLeft), None, None), [0b0001, 0b0011]);
    assert_eq!(seen(2, 4, Some(Causal::BottomRight), None, None), [0b0111, 0b1111]);
    assert_eq!(seen(4, 2, Some(Causal::BottomRight), None, None), [0, 0, 0b01, 0b11]);
    assert_eq!(seen(3, 3, None, Some(1), Some(0)), [0b001, 0b011, 0b110]);
    assert_eq!(seen(3, 3, None, Some(0), Some(1)), [0b011, 0b110, 0b100]);
    assert_eq!(seen(2, 4, Some(Causal::BottomRight), Some(1), Some(5)), [0b0110, 0b1100]);
    assert_eq!(seen(2, 4, Some(Causal::TopLeft), Some(usize::MAX), Some(usize::MAX)), [0b0001, 0b0011]);
}

#[test]
fn query_heads_share_the_key_head_of_their_group_and_values_may_be_of_another_size() {
    let problem = Problem { num_kv_heads: 2, head_dim_v: 3, ..Problem::plain(2, 4, 1, 1, 1) };
    let v: Vec<f64> = (0..12).map(f64::from).collect();
    let outputs = reference(&problem, &Inputs::plain(&[0.0; 8], &[0.0; 4], &v));
    let expect: Vec<f64> = [0, 0, 1, 1, 2, 2, 3, 3].iter().flat_map(|&h| v[h * 3..][..3].to_vec()).collect();
    assert_eq!(outputs.out, expect);
}

#[test]
fn a_dropped_probability_weighs_nothing_and_the_others_more_and_lse_knows_nothing_of_it() {
    let (k, v): (Vec<f64>, Vec<f64>) =
        ((0..40).map(|j| f64::from(j) / 20.0).collect(), (0..40).map(f64::from).collect());
    let seed = DropoutSeed { first_batch: 9, ..DropoutSeed::new(3, 1 << 35) };
    let plain = Problem { num_q_heads: 2, softmax_scale: 1.0, ..Problem::plain(1, 1, 3, 40, 1) };
    let inputs = Inputs::plain(&[1.0, 0.5, -1.0, 0.0, 2.0, 1.5], &k, &v);
    let without = reference(&plain, &inputs);
    for p in [0.25, 0.9] {
        let dropout = Dropout::new(p).expect("a probability").expect("not 0");
        let outputs = reference(&Problem { dropout: Some((dropout, seed)), ..plain }, &inputs);
        assert_eq!(outputs.lse, without.lse);
        for (row, (out, lse)) in outputs.out.iter().zip(&outputs.lse).enumerate() {
            let head = seed.of_head(0, row / 3);
            let kept = (0..40).filter(|&j| !head.is_dropped(dropout, row % 3, j));
            let expect: f64 = kept.map(|j| (inputs.q[row] * k[j] - lse).exp() * v[j]).sum::<f64>() / (1.0 - p);
            assert!(same(*out, expect, 1e-14), "{out} is not {expect}");
        }
    }
    let all = Dropout::new(1.0).expect("a probability").expect("not 0");
    let outputs = reference(&Problem { dropout: Some((all, seed)), ..plain }, &inputs);
    assert_eq!(outputs, Outputs { out: vec![0.0; 6], lse: without.lse });
    // A dropped key is attended: its NaN is not hidden.
    let dropped = reference(
        &Problem { dropout: Some((all, seed)), ..Problem::plain(1, 1, 1, 1, 1) },
        &Inputs::plain(&[1.0], &[1.0], &[NAN]),
    );
    assert!(dropped.out[0].is_nan() && dropped.lse == [1.0]);
}

#[test]
#[should_panic(expected = "length of k")]
fn slices_are_as_long_as_the_problem_says() {
    let _ = naive(&Problem::plain(1, 1, 1, 2, 1), &Inputs::plain(&[0.0], &[0.0], &[0.0]));
}

/// A cheap stream of numbers for the property test: splitmix64.
fn numbers(mut state: u64) -> impl FnMut() -> f64 {
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as f64 / u64::MAX as f64 * 4.0 - 2.0
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_two_forms_agree(
        (batch, num_kv_heads, group) in (1usize..3, 1usize..3, 1usize..4),
        (q_len, kv_len) in (0usize..7, 0usize..20),
        (head_dim, head_dim_v) in (1usize..6, 1usize..6),
        softmax_scale in prop_oneof![Just(0.0), Just(1.0), -2.0..2.0],
        softcap in prop::option::of(0.1f64..5.0),
        causal in prop_oneof![Just(None), Just(Some(Causal::TopLeft)), Just(Some(Causal::BottomRight))],
        (left, right) in (prop::option::of(0usize..9), prop::option::of(0usize..9)),
        (mask, sink, alibi, special) in (0u8..3, any::<bool>(), any::<bool>(), any::<bool>()),
        p in prop_oneof![Just(0.0), Just(1.0), 0.05f64..0.95],
        seed in any::<u64>(),
    ) {
        let num_q_heads = num_kv_heads * group;
        let (window, draw) = (Window { left, right }, DropoutSeed::new(seed, 5));
        let dropout = Dropout::new(p).expect("a probability").map(|dropout| (dropout, draw));
        let problem = Problem {
            batch, num_q_heads, num_kv_heads, q_len, kv_len, head_dim, head_dim_v, softmax_scale, softcap, causal, window, dropout,
        };
        let mut next = numbers(seed);
        let mut fill = |n: usize, masks: bool| -> Vec<f64> {
            (0..n)
                .map(|_| {
                    let x = next();
                    let special = if special { (x * 1e6) as i64 % 40 } else { 39 };
                    match special {
                        0 => NAN,
                        1 if masks => f64::from(f32::MIN),
                        2 if masks => INF,
                        _ if masks && x < 0.3 => -INF,
                        _ => x * 3.0,
                    }
                })
                .collect()
        };
        let q = fill(batch * num_q_heads * q_len * head_dim, false);
        let k = fill(batch * num_kv_heads * kv_len * head_dim, false);
        let v = fill(batch * num_kv_heads * kv_len * head_dim_v, false);
        let bias = fill(batch * num_q_heads * q_len * kv_len, true);
        let bools: Vec<bool> = bias.iter().map(|&x| x > 0.0).collect();
        let (sinks, slopes) = (fill(num_q_heads, false), fill(num_q_heads, false));
        let inputs = Inputs {
            mask: [None, Some(Mask::Bool(&bools)), Some(Mask::Additive(&bias))][usize::from(mask)],
            sinks: sink.then_some(&sinks[..]),
            alibi_slopes: alibi.then_some(&slopes[..]),
            ..Inputs::plain(&q, &k, &v)
        };
        reference(&problem, &inputs);
    }
}
