//! Gradients: by hand, then by differences of the forward definition, then what must reach nothing.

use proptest::prelude::*;
use rapt_core::{Causal, Dropout, DropoutSeed, Window};
use rapt_reference::{Gradients, Inputs, Mask, OutputGradients, Outputs, Problem, backward, naive};

/// Numbers of about −1 to 1, by a fixed rule.
fn numbers(seed: u64, len: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// A problem that owns its tensors.
#[derive(Clone, Debug)]
struct Case {
    problem: Problem,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    bias: Option<Vec<f64>>,
    mask: Option<Vec<bool>>,
    sinks: Option<Vec<f64>>,
    slopes: Option<Vec<f64>>,
    d_o: Vec<f64>,
    d_lse: Option<Vec<f64>>,
}

impl Case {
    fn new(problem: Problem, seed: u64) -> Case {
        let Problem { batch, num_q_heads, num_kv_heads, q_len, kv_len, head_dim, head_dim_v, .. } = problem;
        let (rows, keys) = (batch * num_q_heads * q_len, batch * num_kv_heads * kv_len);
        Case {
            problem,
            q: numbers(seed, rows * head_dim),
            k: numbers(seed + 1, keys * head_dim),
            v: numbers(seed + 2, keys * head_dim_v),
            bias: None,
            mask: None,
            sinks: None,
            slopes: None,
            d_o: numbers(seed + 3, rows * head_dim_v),
            d_lse: None,
        }
    }

    fn pairs(&self) -> usize {
        let Problem { batch, num_q_heads, q_len, kv_len, .. } = self.problem;
        batch * num_q_heads * q_len * kv_len
    }

    fn inputs(&self) -> Inputs<'_> {
        let bias = self.bias.as_deref().map(Mask::Additive);
        Inputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            mask: bias.or(self.mask.as_deref().map(Mask::Bool)),
            sinks: self.sinks.as_deref(),
            alibi_slopes: self.slopes.as_deref(),
        }
    }

    fn gradients(&self) -> Gradients {
        let given = OutputGradients { d_o: &self.d_o, d_lse: self.d_lse.as_deref() };
        backward(&self.problem, &self.inputs(), &given)
    }

    /// The loss whose gradients by out and lse are those given. Rows without keys are constant: they count nothing.
    fn loss(&self) -> f64 {
        let Outputs { out, lse } = naive(&self.problem, &self.inputs());
        let of_out: f64 = out.iter().zip(&self.d_o).map(|(out, d)| out * d).sum();
        let of_lse = self.d_lse.as_ref().map_or(0.0, |d_lse| {
            lse.iter().zip(d_lse).filter(|(lse, _)| lse.is_finite()).map(|(lse, d)| lse * d).sum()
        });
        of_out + of_lse
    }

    /// Holds `gradient` against central differences of the loss by the numbers that `of` lends.
    fn holds(&self, name: &str, gradient: &[f64], of: fn(&mut Case) -> &mut Vec<f64>) {
        const STEP: f64 = 1e-4;
        let mut case = self.clone();
        assert_eq!(gradient.len(), of(&mut case).len(), "{name}");
        for (at, &gradient) in gradient.iter().enumerate() {
            let here = of(&mut case)[at];
            let mut difference = |step: f64| {
                of(&mut case)[at] = here + step;
                let above = case.loss();
                of(&mut case)[at] = here - step;
                let below = case.loss();
                of(&mut case)[at] = here;
                (above - below) / (2.0 * step)
            };
            // Of the fourth order: Richardson's step from two of the second.
            let found = (4.0 * difference(STEP / 2.0) - difference(STEP)) / 3.0;
            let is_close = (found - gradient).abs() <= 1e-9 * (1.0 + gradient.abs());
            assert!(
                is_close || (found.is_nan() && here.is_infinite()),
                "{name}[{at}]: {gradient}, by differences {found}; {self:?}"
            );
        }
    }

    fn check(&self) {
        let Gradients { dq, dk, dv, d_bias, d_sinks } = self.gradients();
        self.holds("dq", &dq, |case| &mut case.q);
        self.holds("dk", &dk, |case| &mut case.k);
        self.holds("dv", &dv, |case| &mut case.v);
        assert_eq!((d_bias.is_some(), d_sinks.is_some()), (self.bias.is_some(), self.sinks.is_some()));
        if let Some(d_bias) = d_bias {
            self.holds("d_bias", &d_bias, |case| case.bias.as_mut().expect("a bias"));
        }
        if let Some(d_sinks) = d_sinks {
            self.holds("d_sinks", &d_sinks, |case| case.sinks.as_mut().expect("sinks"));
        }
    }
}

#[test]
fn two_keys_by_hand() {
    // Scores 0 and ln 3: weights 1/4 and 3/4; out = 5, so that D = 5 and ds = ±3/4.
    let k = [0.0, 3f64.ln()];
    let given = OutputGradients { d_o: &[1.0], d_lse: None };
    let found = backward(&Problem::plain(1, 1, 1, 2, 1), &Inputs::plain(&[1.0], &k, &[8.0, 4.0]), &given);
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-15 * (1.0 + b.abs()), "{a} is not {b}");
    close(found.dv[0], 0.25);
    close(found.dv[1], 0.75);
    close(found.dk[0], 0.75);
    close(found.dk[1], -0.75);
    close(found.dq[0], -0.75 * 3f64.ln());
    assert_eq!((found.d_bias, found.d_sinks), (None, None));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn gradients_are_the_differences_of_the_definition(
        (batch, heads, group) in (1usize..3, 1usize..3, 1usize..3),
        (q_len, kv_len, head_dim, head_dim_v) in (0usize..5, 0usize..6, 1usize..4, 1usize..4),
        causal in prop_oneof![Just(None), Just(Some(Causal::TopLeft)), Just(Some(Causal::BottomRight))],
        (left, right) in (prop::option::of(0usize..3), prop::option::of(0usize..3)),
        softcap in prop::option::of(0.5f64..3.0),
        (kind, has_sinks, has_slopes, has_lse) in (0..3, any::<bool>(), any::<bool>(), any::<bool>()),
        p in prop_oneof![Just(0.0), Just(0.0), Just(1.0), 0.05f64..0.95],
        seed in 0u64..1 << 32,
    ) {
        let dropout = Dropout::new(p).expect("a probability").map(|dropout| (dropout, DropoutSeed::new(seed, 1)));
        let plain = Problem { dropout, ..Problem::plain(batch, heads, q_len, kv_len, head_dim) };
        let problem = Problem {
            num_q_heads: heads * group, head_dim_v, softcap, causal, window: Window { left, right }, softmax_scale: 0.9, ..plain
        };
        let mut case = Case::new(problem, seed);
        let pairs = case.pairs();
        match kind {
            1 => case.mask = Some(numbers(seed + 4, pairs).iter().map(|x| *x > -0.4).collect()),
            2 => {
                let bias = numbers(seed + 4, pairs).into_iter();
                case.bias = Some(bias.map(|x| if x > -0.4 { 2.0 * x } else { f64::NEG_INFINITY }).collect());
            }
            _ => {}
        }
        case.sinks = has_sinks.then(|| numbers(seed + 5, heads * group));
        case.slopes = has_slopes.then(|| numbers(seed + 6, heads * group));
        case.d_lse = has_lse.then(|| numbers(seed + 7, batch * heads * group * q_len));
        case.check();
    }
}

/// Four keys, of which the last two are not attended, by each rule in turn.
fn masked() -> [Case; 4] {
    let case = |change: &dyn Fn(&mut Case)| {
        let mut case = Case::new(Problem::plain(1, 2, 1, 4, 3), 9);
        change(&mut case);
        case
    };
    [
        case(&|case| case.problem.window.right = Some(1)),
        case(&|case| case.mask = Some([true, true, false, false].repeat(2))),
        case(&|case| case.bias = Some([0.5, -0.5, f64::NEG_INFINITY, f64::NEG_INFINITY].repeat(2))),
        case(&|case| {
            case.problem.q_len = 2;
            case.problem.causal = Some(Causal::TopLeft);
            case.q = numbers(1, 12);
            case.d_o = numbers(2, 12);
        }),
    ]
}

#[test]
fn what_is_not_attended_gets_exactly_nothing_and_gives_nothing() {
    for clean in masked() {
        let (mut dirty, clean) = (clean.clone(), clean.gradients());
        for tensor in [&mut dirty.k, &mut dirty.v] {
            tensor.iter_mut().enumerate().filter(|(at, _)| at / 3 % 4 >= 2).for_each(|(_, number)| *number = f64::NAN);
        }
        let found = dirty.gradients();
        assert_eq!(found, clean, "{dirty:?}");
        for head in 0..2 {
            for row in [&found.dk, &found.dv] {
                assert!(row[(head * 4 + 2) * 3..][..6].iter().all(|&x| x == 0.0), "{found:?}");
            }
            if let Some(d_bias) = &found.d_bias {
                assert_eq!(d_bias[head * 4 + 2..][..2], [0.0, 0.0]);
            }
        }
    }
}

#[test]
fn a_row_without_keys_gives_nothing_whatever_arrives() {
    // The first query attends no key, the second one.
    let mut case = Case::new(Problem::plain(1, 1, 2, 1, 2), 5);
    case.mask = Some(vec![false, true]);
    case.sinks = Some(vec![0.25]);
    case.d_lse = Some(vec![f64::NAN, 1.0]);
    case.q[..2].fill(f64::NAN);
    case.d_o[..2].fill(f64::NAN);
    let found = case.gradients();
    assert_eq!(found.dq[..2], [0.0, 0.0]);
    let all = [&found.dq, &found.dk, &found.dv, found.d_sinks.as_ref().expect("sinks")];
    assert!(all.iter().all(|gradient| gradient.iter().all(|x| x.is_finite())), "{found:?}");
    // No keys at all, and keys that all score −∞.
    for (kv_len, score) in [(0, 0.0), (2, f64::NEG_INFINITY)] {
        let mut case = Case::new(Problem::plain(1, 1, 1, kv_len, 1), 6);
        case.q.fill(1.0);
        case.k.fill(score);
        case.d_o.fill(f64::NAN);
        case.sinks = Some(vec![1.0]);
        let Gradients { dq, dk, dv, d_sinks, .. } = case.gradients();
        assert!([dq, dk, dv, d_sinks.expect("sinks")].concat().iter().all(|&x| x == 0.0));
    }
}

#[test]
fn groups_and_batches_sum_where_they_share() {
    // Two query heads on one key head: dk and dv are the sums of those of each alone.
    let problem = Problem { num_q_heads: 2, ..Problem::plain(2, 1, 3, 4, 2) };
    let mut case = Case::new(problem, 11);
    case.sinks = Some(vec![0.5, -0.25]);
    let whole = case.gradients();
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-14 * (1.0 + b.abs());
    let mut sinks = [0.0; 2];
    for batch in 0..2 {
        let (mut k, mut v) = (vec![0.0; 8], vec![0.0; 8]);
        for (head, sum_of_sinks) in sinks.iter_mut().enumerate() {
            let mut alone = Case::new(Problem::plain(1, 1, 3, 4, 2), 0);
            let row = batch * 2 + head;
            alone.q = case.q[row * 6..][..6].to_vec();
            alone.d_o = case.d_o[row * 6..][..6].to_vec();
            alone.k = case.k[batch * 8..][..8].to_vec();
            alone.v = case.v[batch * 8..][..8].to_vec();
            alone.sinks = Some(vec![case.sinks.as_ref().expect("sinks")[head]]);
            let found = alone.gradients();
            assert_eq!(found.dq, whole.dq[row * 6..][..6]);
            k.iter_mut().zip(found.dk).for_each(|(sum, x)| *sum += x);
            v.iter_mut().zip(found.dv).for_each(|(sum, x)| *sum += x);
            *sum_of_sinks += found.d_sinks.expect("sinks")[0];
        }
        assert!(k.iter().zip(&whole.dk[batch * 8..]).all(|(&a, &b)| close(a, b)));
        assert!(v.iter().zip(&whole.dv[batch * 8..]).all(|(&a, &b)| close(a, b)));
    }
    assert!(sinks.iter().zip(whole.d_sinks.expect("sinks")).all(|(&a, b)| close(a, b)));
}
