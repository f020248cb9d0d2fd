//! The suite that every engine is put through.
//!
//! ```text
//! exploits   what once broke an engine: known answers, tails of every length, poison behind a page, whole rows masked
//! zoo        one problem, every placement of every tensor, every dtype: the reference, and the bits of the row-major run
//! random     problems from a seed: the reference, memory untouched, and the same bits under other strides
//! ```
//!
//! A failure names its case; [`replay`] runs that case alone. Deliberately absent: an engine.

use std::collections::BTreeMap;
use std::fmt;

use rapt_core::{COMPUTED, Causal, DType, Qkv, Window};

use crate::case::{Case, Data, MaskCase, Places};
use crate::memory::Guard;
use crate::rng::Rng;
use crate::run::{Buffers, Engine, Ran, poison, run};
use crate::zoo::{output_zoo, zoo};

/// How much is asked.
#[derive(Clone, Debug)]
pub struct Config {
    /// The seed of the random problems.
    pub seed: u64,
    /// How many there are.
    pub problems: usize,
    /// The greatest random problem, in multiplications.
    pub max_work: usize,
    /// The dtypes that are asked.
    pub dtypes: Vec<DType>,
    /// As many random problems with dropout.
    pub dropout: usize,
    /// As many random problems with codes for some of q, k and v.
    pub quantized: usize,
    /// As many with products of int8; with `fixed`, the exploits too.
    pub int8: usize,
    /// Whether the zoo and the exploits are run as well.
    pub fixed: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            seed: 0x7a97,
            problems: 400,
            max_work: 400_000,
            dtypes: COMPUTED.to_vec(),
            dropout: 0,
            quantized: 0,
            int8: 0,
            fixed: true,
        }
    }
}

/// What was run: the number of problems of each kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// By category, such as `random`, `causal` or `float16`.
    pub counts: BTreeMap<String, usize>,
}

impl Tally {
    /// How many problems had this category.
    #[must_use]
    pub fn count(&self, category: &str) -> usize {
        self.counts.get(category).copied().unwrap_or(0)
    }

    /// Adds the counts of another run.
    pub fn merge(&mut self, other: &Tally) {
        for (category, n) in &other.counts {
            *self.counts.entry(category.clone()).or_default() += n;
        }
    }

    fn add(&mut self, category: impl Into<String>) {
        *self.counts.entry(category.into()).or_default() += 1;
    }

    fn ran(&mut self, stage: &str, case: &Case) {
        self.add("problems");
        self.add(stage);
        self.add(case.dtype.name());
        let kinds = [
            ("mask bool", case.mask.is_some_and(|mask| mask.dtype == DType::Bool)),
            ("mask additive", case.mask.is_some_and(|mask| mask.dtype != DType::Bool)),
            ("causal", case.causal.is_some()),
            ("window", case.window != Window::default()),
            ("softcap", case.softcap.is_some()),
            ("sinks", case.sinks.is_some()),
            ("alibi", case.alibi_slopes.is_some()),
            ("gqa", case.num_kv_heads != case.q[1]),
            ("decode", case.q[2] == 1),
            ("empty", case.q[2] == 0 || case.kv_len == 0),
            ("head_dim_v", case.head_dim_v != case.q[3]),
            ("poison", case.poison),
            ("guard page", !matches!(case.guard, Guard::Heap { .. })),
            ("extreme data", case.data != Data::Normal),
        ];
        kinds.iter().filter(|(_, is)| *is).for_each(|(kind, _)| self.add(*kind));
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts: Vec<String> = self.counts.iter().map(|(kind, n)| format!("{kind} {n}")).collect();
        f.write_str(&counts.join(", "))
    }
}

/// A case that broke a rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// Of the exploits, the zoo, or the random problems.
    pub stage: &'static str,
    /// Which of the engines.
    pub engine: usize,
    /// What went wrong.
    pub what: String,
    /// The case: give it to [`replay`].
    pub case: Box<Case>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = self.case.placements();
        let names = [
            ("q", places.q.name),
            ("k", places.k.name),
            ("v", places.v.name),
            ("mask", places.mask.name),
            ("out", places.out.name),
            ("lse", places.lse.name),
        ];
        let names: Vec<String> = names.iter().map(|(tensor, name)| format!("{tensor}: {name}")).collect();
        write!(f, "{}\n  stage: {}\n  strides: {}\n  case: {:?}", self.what, self.stage, names.join("; "), self.case)
    }
}

impl std::error::Error for Failure {}

/// Puts `engines` through the suite and counts what they ran; a case is made, and its reference computed, once for all of them.
/// Requests answered with [`Error::Unsupported`](rapt_core::Error::Unsupported) count as `unsupported`.
///
/// # Errors
/// The first case that breaks a rule.
pub fn conformance(engines: &mut [Box<Engine<'_>>], config: &Config) -> Result<Tally, Failure> {
    let mut tally = Tally::default();
    if config.fixed {
        for &dtype in &config.dtypes {
            exploits(dtype).into_iter().try_for_each(|case| judge(engines, "exploits", &case, &mut tally))?;
            if config.int8 > 0 && dtype != DType::F64 {
                let cases = exploits(dtype).into_iter().map(Case::with_int8);
                cases.into_iter().try_for_each(|case| judge(engines, "int8 exploits", &case, &mut tally))?;
            }
            known_answer(engines, dtype)?;
            strides(engines, dtype, &mut tally)?;
        }
    }
    let mut seeds = Rng::new(config.seed);
    for _ in 0..config.problems {
        let case = Case::random(seeds.bits(), &config.dtypes, config.max_work);
        judge(engines, "random", &case, &mut tally)?;
    }
    for _ in 0..config.dropout {
        let case = Case::random_dropout(seeds.bits(), &config.dtypes, config.max_work);
        judge(engines, "dropout", &case, &mut tally)?;
    }
    for _ in 0..config.quantized {
        let case = Case::random_quantized(seeds.bits(), &config.dtypes, config.max_work);
        judge(engines, "quantized", &case, &mut tally)?;
    }
    for _ in 0..config.int8 {
        let case = Case::random_int8(seeds.bits(), &config.dtypes, config.max_work);
        judge(engines, "int8", &case, &mut tally)?;
    }
    Ok(tally)
}

/// Runs one case alone, under its own strides and under others.
///
/// # Errors
/// If it breaks a rule.
pub fn replay(engine: &mut Engine<'_>, case: &Case) -> Result<(), Failure> {
    judge(&mut [Box::new(engine)], "replay", case, &mut Tally::default())
}

/// One problem for every engine: where it lies, against the other page if it lies against one, and elsewhere under other strides.
pub(crate) fn judge(
    engines: &mut [Box<Engine<'_>>],
    stage: &'static str,
    case: &Case,
    tally: &mut Tally,
) -> Result<(), Failure> {
    let fail = |engine: usize, what: String| Failure { stage, engine, what, case: Box::new(case.clone()) };
    let places = case.placements();
    let mut values = case.values();
    if case.poison {
        poison(case, &places, &mut values);
    }
    let mut buffers = Buffers::new(case, &places, &values);
    let mut expected = None;
    let mut firsts = Vec::new();
    for (n, engine) in engines.iter_mut().enumerate() {
        match run(&mut **engine, case, &mut buffers, None, &mut expected).map_err(|what| fail(n, what))? {
            Ran::Bits(bits) => {
                tally.ran(stage, case);
                firsts.push(Some(bits));
            }
            Ran::Unsupported => {
                tally.add("unsupported");
                firsts.push(None);
            }
        }
    }
    // The engines that served it, with the bits of each.
    let mut served = engines.iter_mut().zip(&firsts).enumerate();
    let mut served: Vec<_> =
        served.by_ref().filter_map(|(n, (engine, first))| Some((n, engine, first.as_ref()?))).collect();
    if served.is_empty() {
        return Ok(());
    }
    if let Some(guard) = case.guard.other_page() {
        let flush = Case { guard, ..case.clone() };
        let mut buffers = Buffers::new(&flush, &places, &values);
        for (n, engine, first) in &mut served {
            match run(&mut ***engine, &flush, &mut buffers, Some(first), &mut expected) {
                Ok(Ran::Bits(bits)) if bits == **first => {}
                Ok(_) => return Err(fail(*n, format!("other bits against {guard:?}"))),
                Err(what) => return Err(fail(*n, format!("{what} (against {guard:?})"))),
            }
        }
    }
    // The same values elsewhere: strides that can hold any values, another alignment.
    let mut rng = Rng::new(case.seed ^ 0x57);
    let guard = Guard::Heap { shift: rng.below(64) };
    let moved = Case { places: Case::random_places(&mut rng), guard, ..case.clone() };
    let mut places = moved.placements();
    let [q, k, v] = case.stored();
    let shapes = [(&mut places.q, q), (&mut places.k, k), (&mut places.v, v)];
    let Qkv { q: of_q, k: of_k, v: of_v } = &mut places.scales;
    let scales = [(of_q, case.codes.q, case.q), (of_k, case.codes.k, case.k()), (of_v, case.codes.v, case.v())];
    let scales = scales.into_iter().filter_map(|(places, codes, shape)| Some((places.as_mut()?, codes?.groups(shape))));
    let scales = scales.flat_map(|(places, groups)| places.iter_mut().map(move |place| (place, groups)));
    let mask = case.mask.as_ref().map_or([1; 4], |mask| case.mask_shape(mask));
    let rest = [(&mut places.mask, mask), (&mut places.vectors, [1, 1, 1, case.q[1]])];
    for (place, shape) in shapes.into_iter().chain(scales).chain(rest) {
        if !place.injective {
            *place = output_zoo(shape).swap_remove(rng.pick(&[1, 2, 4]));
        }
    }
    let mut buffers = Buffers::new(&moved, &places, &buffers.values());
    for (n, engine, first) in &mut served {
        let what = match run(&mut ***engine, &moved, &mut buffers, Some(first), &mut expected) {
            Ok(Ran::Bits(bits)) if bits == **first => continue,
            Ok(Ran::Bits(bits)) => {
                let differ = bits.iter().zip(first.iter()).filter(|(a, b)| a != b).count();
                format!("{differ} of {} elements have other bits under other strides: {places:?}", bits.len())
            }
            Ok(Ran::Unsupported) => format!("served, but not under other strides: {places:?}"),
            Err(what) => format!("{what} (under other strides: {places:?})"),
        };
        return Err(fail(*n, what));
    }
    Ok(())
}

/// Sets the placement of one tensor.
type Set = fn(&mut Places, usize);

/// Every placement of every tensor, one at a time, on one problem with tails in every dimension.
fn strides(engines: &mut [Box<Engine<'_>>], dtype: DType, tally: &mut Tally) -> Result<(), Failure> {
    let mask = Some(MaskCase { dtype: DType::Bool, full: [true; 4], rank: 4, lowest: false });
    let base = Case { num_kv_heads: 2, head_dim_v: 20, mask, ..Case::plain(dtype, [2, 4, 13, 27], 37) };
    let (inputs, outputs) = (zoo(base.q).len(), output_zoo(base.q).len());
    let one = |set: Set, at: usize| {
        let mut places = Places::default();
        set(&mut places, at);
        places
    };
    let sweeps: [(Set, usize); 6] = [
        (|p, at| p.q = at, inputs),
        (|p, at| p.k = at, inputs),
        (|p, at| p.v = at, inputs),
        (|p, at| p.mask = at, inputs),
        (|p, at| p.out = at, outputs),
        (|p, at| p.lse = at, outputs),
    ];
    for (n, (set, count)) in sweeps.into_iter().enumerate() {
        for at in 0..count {
            let guard = [Guard::Heap { shift: 8 }, Guard::FrontPage, Guard::BackPage][(n + at) % 3];
            let causal = [None, Some(Causal::BottomRight)][at % 2];
            judge(engines, "zoo", &Case { places: one(set, at), guard, causal, ..base.clone() }, tally)?;
        }
    }
    Ok(())
}

/// What once broke an engine.
fn exploits(dtype: DType) -> Vec<Case> {
    let plain = |q, kv_len| Case::plain(dtype, q, kv_len);
    let mut cases = Vec::new();
    // A length that is no multiple of any tile, flush against a page (pytorch#169222).
    for n in 1..=70 {
        let guard = if n % 2 == 0 { Guard::FrontPage } else { Guard::BackPage };
        cases.push(Case { guard, seed: n as u64, ..plain([1, 2, 1 + n % 19, n], 71 - n) });
        cases.push(Case { guard, head_dim_v: n, ..plain([1, 1, n, 5], n) });
        cases.push(Case { guard, num_kv_heads: 1, ..plain([1, 4, 1, 16], 2 * n) });
    }
    // Lengths of zero.
    for (q_len, kv_len) in [(0, 5), (5, 0), (0, 0)] {
        for sinks in [None, Some(dtype)] {
            cases.push(Case { sinks, ..plain([2, 2, q_len, 8], kv_len) });
        }
    }
    cases.push(plain([0, 2, 3, 8], 3));
    // Permuted [b, s, h, d] views (pytorch#181133, #163597), on their own and all together.
    for at in [2, 4, 5, 12, 13, 16] {
        let places = Places { q: at, k: at, v: at, out: at, lse: at, ..Places::default() };
        cases.push(Case { places, num_kv_heads: 3, ..plain([2, 6, 33, 24], 65) });
    }
    // Poison in masked keys and in padding, with every kind of mask (pytorch#101967), and queries of NaN.
    let masks = [
        (DType::Bool, false, [true, true, true, true]),
        (DType::Bool, false, [true, false, false, true]),
        (dtype, false, [false, false, true, true]),
        (dtype, false, [true, true, false, true]),
        (dtype, true, [false, true, true, true]),
        (DType::Bool, false, [true, true, true, false]),
    ];
    for (n, (mask_dtype, lowest, full)) in masks.into_iter().enumerate() {
        for causal in [None, Some(Causal::TopLeft), Some(Causal::BottomRight)] {
            for sinks in [None, Some(dtype)] {
                let mask = Some(MaskCase { dtype: mask_dtype, full, rank: 4, lowest });
                let case = plain([2, 2, 21, 17], 40);
                cases.push(Case { mask, causal, sinks, poison: true, seed: n as u64, ..case });
            }
        }
    }
    // A window past either end of the keys, and queries that see none.
    for (left, right) in [(Some(0), Some(0)), (Some(3), None), (None, Some(3)), (Some(usize::MAX), Some(0))] {
        for (q_len, kv_len) in [(40, 9), (9, 40), (33, 33)] {
            let case = plain([1, 2, q_len, 16], kv_len);
            let causal = Some(Causal::BottomRight);
            cases.push(Case { window: Window { left, right }, poison: true, ..case.clone() });
            cases.push(Case { window: Window { left, right }, causal, poison: true, ..case });
        }
    }
    // Rows on which the recurrence must rescale, or must not.
    for data in [Data::Rising, Data::Spike, Data::Equal, Data::Huge] {
        for softmax_scale in [None, Some(0.0), Some(-1.0)] {
            cases.push(Case { data, softmax_scale, ..plain([1, 2, 17, 32], 200) });
        }
    }
    cases
}

/// `q = [1, ½]`, one key: the value itself, exactly (16-bit tensors read under a 32-bit tag give other numbers).
fn known_answer(engines: &mut [Box<Engine<'_>>], dtype: DType) -> Result<(), Failure> {
    let case = Case::plain(dtype, [1, 1, 1, 2], 1);
    let (q, k, v) = (vec![1.0, 0.5], vec![0.5, 1.0], vec![0.25, 0.75]);
    let scales = Qkv::default();
    let values = crate::case::Values { q, k, v, scales, mask: None, sinks: None, alibi_slopes: None };
    let fail =
        |engine: usize, what: String| Failure { stage: "known answer", engine, what, case: Box::new(case.clone()) };
    let mut buffers = Buffers::new(&case, &case.placements(), &values);
    for (n, engine) in engines.iter_mut().enumerate() {
        match run(&mut **engine, &case, &mut buffers, None, &mut None).map_err(|what| fail(n, what))? {
            Ran::Unsupported => {}
            Ran::Bits(bits) if bits[..2] == [0.25f64.to_bits(), 0.75f64.to_bits()] => {}
            Ran::Bits(bits) => return Err(fail(n, format!("{:?}, expected [0.25, 0.75]", &bits[..2]))),
        }
    }
    Ok(())
}
