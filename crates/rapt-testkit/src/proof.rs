//! The proof at the boundary: many small problems, enumerated where they can be, between pages that may not be touched.
//!
//! ```text
//! pairs    every zoo placement of one tensor with every one of another; q, k, v, mask, sinks and slopes, out, lse
//! tails    kv_len, q_len, head_dim and head_dim_v from 0 (1) to 130 × masks × causal × window
//! small    every q_len and kv_len up to 4, head_dim up to 3 × causal × every window with ends up to 2
//! random   cases of a seed, until the count is reached; so many with codes for some of q, k and v besides, and so many of int8
//! ```
//!
//! Each problem runs flush against the page before its buffers, then flush against the page after them, then under other
//! strides: the reference judges the first, the others have its bits. Inputs and padding must be unchanged every time. What is not
//! enumerated rotates with the index of the case, so that a pair meets every mask. Deliberately absent: an engine.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use rapt_core::{COMPUTED, Causal, DType, Window};

use crate::case::{Case, MaskCase, Places};
use crate::conformance::{Failure, Tally, judge};
use crate::memory::Guard;
use crate::rng::Rng;
use crate::run::Engine;
use crate::zoo::{Placement, output_zoo, zoo};

/// How much is proven.
#[derive(Clone, Debug)]
pub struct Proof {
    /// The dtypes.
    pub dtypes: Vec<DType>,
    /// The seed of the random cases.
    pub seed: u64,
    /// Random cases of each dtype.
    pub random: usize,
    /// As many more with codes for some of q, k and v.
    pub quantized: usize,
    /// As many more with products of int8, and tails of it.
    pub int8: usize,
    /// The greatest random problem, in multiplications.
    pub max_work: usize,
    /// Threads among which the problems are dealt.
    pub workers: usize,
}

impl Default for Proof {
    fn default() -> Self {
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        Proof {
            dtypes: COMPUTED.to_vec(),
            seed: 0x9007,
            random: 2_500,
            quantized: 0,
            int8: 0,
            max_work: 12_000,
            workers,
        }
    }
}

/// Proves engines; `make` gives them to each worker. A case is made, and its reference computed, once for all of them.
///
/// # Errors
/// The first case that breaks a rule, of the worker that found one.
///
/// # Panics
/// If a worker does.
pub fn proof<'e>(make: &(dyn Fn() -> Vec<Box<Engine<'e>>> + Sync), proof: &Proof) -> Result<Tally, Box<Failure>> {
    let stop = AtomicBool::new(false);
    let work = |worker: usize| {
        let (mut engines, mut tally) = (make(), Tally::default());
        let mine = cases(proof).enumerate().filter(|(n, _)| n % proof.workers == worker);
        for (_, (stage, case)) in mine {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            if let Err(failure) = judge(&mut engines, stage, &case, &mut tally) {
                stop.store(true, Ordering::Relaxed);
                return Err(Box::new(failure));
            }
        }
        Ok(tally)
    };
    let work = &work;
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..proof.workers.max(1)).map(|worker| scope.spawn(move || work(worker))).collect();
        let mut all = Tally::default();
        for worker in workers {
            all.merge(&worker.join().expect("a worker ends by itself")?);
        }
        Ok(all)
    })
}

/// Every case, with its stage: the same sequence for every worker.
fn cases(proof: &Proof) -> impl Iterator<Item = (&'static str, Case)> + '_ {
    let fixed = proof.dtypes.iter().flat_map(|&dtype| {
        let pairs = pairs(dtype).map(|case| ("pairs", case));
        let tails = tails(dtype).map(|case| ("tails", case));
        pairs.chain(tails).chain(small(dtype).map(|case| ("small", case)))
    });
    let mut seeds = Rng::new(proof.seed);
    let random = (0..proof.random * proof.dtypes.len()).map(move |n| {
        let guard = if n % 2 == 0 { Guard::FrontPage } else { Guard::BackPage };
        ("random", Case { guard, ..Case::random(seeds.bits(), &proof.dtypes, proof.max_work) })
    });
    let mut seeds = Rng::new(proof.seed ^ 1);
    let quantized = (0..proof.quantized * proof.dtypes.len()).map(move |n| {
        ("quantized", Case { guard: page(n), ..Case::random_quantized(seeds.bits(), &proof.dtypes, proof.max_work) })
    });
    let mut seeds = Rng::new(proof.seed ^ 2);
    let int8 = (0..proof.int8 * proof.dtypes.len()).map(move |n| {
        ("int8", Case { guard: page(n), ..Case::random_int8(seeds.bits(), &proof.dtypes, proof.max_work) })
    });
    // Every fourth: each meets q of another dtype.
    let tails_of_int8 = COMPUTED.iter().enumerate().filter(|_| proof.int8 > 0).flat_map(|(at, &dtype)| {
        tails(dtype).skip(at).step_by(4 * COMPUTED.len() - 1).map(|case| ("int8", case.with_int8()))
    });
    fixed.chain(random).chain(quantized).chain(int8).chain(tails_of_int8)
}

const CAUSAL: [Option<Causal>; 3] = [None, Some(Causal::TopLeft), Some(Causal::BottomRight)];

fn page(n: usize) -> Guard {
    if n.is_multiple_of(2) { Guard::FrontPage } else { Guard::BackPage }
}

fn mask(dtype: DType, n: usize) -> Option<MaskCase> {
    let full = [[true; 4], [false, true, false, true], [true, false, true, true]][n % 3];
    Some(MaskCase { dtype, full, rank: 4, lowest: n.is_multiple_of(5) })
}

/// The placements that differ for this shape: a stride that is never stepped along makes no other placement.
fn distinct(shape: [usize; 4], all: &[Placement]) -> Vec<usize> {
    let mut seen = BTreeSet::new();
    let is_new = |at: &usize| {
        let Placement { strides, slack, .. } = &all[*at];
        let steps: Vec<isize> = shape.iter().zip(strides).filter(|(n, _)| **n > 1).map(|(_, stride)| *stride).collect();
        seen.insert((steps, *slack))
    };
    (0..all.len()).filter(is_new).collect()
}

/// Sets the placement of one tensor.
type Set = fn(&mut Places, usize);

fn pairs(dtype: DType) -> impl Iterator<Item = Case> {
    // Ten queries share a key head, which the forward kernel takes; four, which decode takes.
    [5usize, 2].into_iter().flat_map(move |q_len| {
        let q = [2, 4, q_len, 7];
        let base = Case { num_kv_heads: 2, head_dim_v: 6, mask: mask(DType::Bool, 0), ..Case::plain(dtype, q, 9) };
        let base = Case { sinks: Some(dtype), alibi_slopes: Some(dtype), ..base };
        let (k, v, out) = (base.k(), base.v(), base.out());
        let of = |shape| distinct(shape, &zoo(shape));
        let of_output = |shape| distinct(shape, &output_zoo(shape));
        let tensors: [(Set, Vec<usize>); 7] = [
            (|p, at| p.q = at, of(q)),
            (|p, at| p.k = at, of(k)),
            (|p, at| p.v = at, of(v)),
            (|p, at| p.mask = at, of([2, 4, q_len, 9])),
            (|p, at| p.vectors = at, of([1, 1, 1, 4])),
            (|p, at| p.out = at, of_output(out)),
            (|p, at| p.lse = at, of_output([1, 2, 4, q_len])),
        ];
        let mut cases = Vec::new();
        for (n, (set_a, all_a)) in tensors.iter().enumerate() {
            for (set_b, all_b) in &tensors[n + 1..] {
                for (&a, &b) in all_a.iter().flat_map(|a| all_b.iter().map(move |b| (a, b))) {
                    let mut places = Places::default();
                    set_a(&mut places, a);
                    set_b(&mut places, b);
                    let at = cases.len();
                    let mask = mask(if (a + b) % 2 == 0 { DType::Bool } else { dtype }, 0);
                    let window = Window { left: (at % 5 == 0).then_some(3), right: (at % 7 == 0).then_some(2) };
                    let causal = CAUSAL[at % 3];
                    cases.push(Case { places, mask, causal, window, guard: page(at), seed: at as u64, ..base.clone() });
                }
            }
        }
        cases
    })
}

fn tails(dtype: DType) -> impl Iterator<Item = Case> {
    (0..=130usize).flat_map(move |n| {
        let plain = |q, kv_len| Case::plain(dtype, q, kv_len);
        let mut sizes = vec![plain([1, 2, 9, 5], n), plain([1, 2, 1, 6], n), plain([1, 2, n, 4], 6)];
        if n > 0 {
            sizes.push(plain([1, 2, 9, n], 5));
            sizes.push(Case { num_kv_heads: 1, ..plain([1, 2, 2, n], 5) });
            sizes.push(Case { head_dim_v: n, ..plain([1, 2, 9, 3], 5) });
            sizes.push(Case { head_dim_v: n, num_kv_heads: 1, ..plain([1, 2, 2, 3], 5) });
        }
        let windows = [Window::default(), Window { left: Some(3), right: Some(2) }];
        let masks = [None, mask(DType::Bool, n), mask(dtype, n)];
        let mut cases = Vec::new();
        for (at, size) in sizes.into_iter().enumerate() {
            for (causal, mask) in CAUSAL.iter().flat_map(|causal| masks.iter().map(move |mask| (*causal, *mask))) {
                for window in windows {
                    let seed = (n * 1_000 + at * 100 + cases.len()) as u64;
                    let places = Case::random_places(&mut Rng::new(seed));
                    let (guard, poison) = (page(n + cases.len()), cases.len() % 4 == 0);
                    cases.push(Case { causal, mask, window, places, guard, poison, seed, ..size.clone() });
                }
            }
        }
        cases
    })
}

fn small(dtype: DType) -> impl Iterator<Item = Case> {
    const ENDS: [Option<usize>; 4] = [None, Some(0), Some(1), Some(2)];
    (0..5usize).flat_map(|q_len| (0..5usize).map(move |kv_len| (q_len, kv_len))).flat_map(move |(q_len, kv_len)| {
        let mut cases = Vec::new();
        // Two query heads on one key head turn the fifth query into a ninth row: the other kernel.
        for (heads, head_dim) in [(1, 1), (1, 2), (1, 3), (3, 1), (3, 2), (3, 3)] {
            for causal in CAUSAL {
                for (left, right) in ENDS.iter().flat_map(|left| ENDS.iter().map(move |right| (*left, *right))) {
                    let (window, at) = (Window { left, right }, cases.len());
                    let case = Case { num_kv_heads: 1, ..Case::plain(dtype, [1, heads, q_len, head_dim], kv_len) };
                    cases.push(Case { causal, window, guard: page(at), poison: true, seed: at as u64, ..case });
                }
            }
        }
        cases
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gather::{reference, store};
    use std::collections::BTreeMap;

    #[test]
    fn the_stages_hold_what_they_say() {
        let proof = Proof { dtypes: vec![DType::F32], random: 10, ..Proof::default() };
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        let (mut kv_lens, mut dims, mut zoo_of_k) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for (stage, case) in cases(&proof) {
            *counts.entry(stage).or_default() += 1;
            assert!(!matches!(case.guard, Guard::Heap { .. }), "every problem lies against a page");
            match stage {
                "tails" => drop((kv_lens.insert(case.kv_len), dims.insert(case.q[3]))),
                "pairs" => drop(zoo_of_k.insert(case.placements().k.name)),
                _ => {}
            }
        }
        assert_eq!(counts["random"], 10);
        assert_eq!(counts["small"], 5 * 5 * 6 * 3 * 16);
        assert_eq!(counts["tails"], (131 * 3 + 130 * 4) * 18);
        assert!(counts["pairs"] > 10_000, "{counts:?}");
        assert!((0..=130).all(|n| kv_lens.contains(&n)) && (1..=130).all(|n| dims.contains(&n)));
        assert_eq!(zoo_of_k.len(), zoo([2, 2, 9, 7]).len());
    }

    #[test]
    fn a_broken_engine_is_caught_by_one_of_two_workers() {
        let engines = || -> Vec<Box<Engine<'static>>> {
            vec![Box::new(|spec, mut tensors| {
                let mut outputs = reference(spec, &tensors);
                if spec.kv_len() == 4 {
                    outputs.out.iter_mut().for_each(|out| *out += 1.0);
                }
                store(spec, &mut tensors, &outputs);
                Ok(())
            })]
        };
        let config = Proof { dtypes: vec![DType::F32], random: 0, workers: 2, ..Proof::default() };
        let failure = proof(&engines, &config).expect_err("an output that is off by one");
        assert_eq!(failure.case.kv_len, 4);
    }
}
