//! Problems of the backward pass: made, run, and judged against the definition's gradients.
//!
//! ```text
//! |got − reference|     ≤ max(1.1, 4/√N) · |torch's − reference| + floor · |reference| + |off|   over the whole gradient, L2
//! |got_r − reference_r| ≤ 4 · W · (size_r + |terms_r|) + floor · size_r + |off_r|          for each row r
//! ```
//! `floor` is that of outputs, `floor'` that of the accumulation dtype, times √n/4 where that is more and n is the larger head dim: a score's dot products
//! err like the root of their length. `off` are the terms, each times `floor'` and four of the expected roundings σ of its row's largest score. `terms` are the sums of the magnitudes of what a gradient sums: what arrives at a
//! score is a difference, dp − delta, and of a row whose keys agree it is as good as nothing. `size_r = max(|reference_r|, mean |reference|)`; W is the
//! worst of torch's rows by the same measure, from formulas with its roundings ([`emulate`]), the worse of two; N is the number of rows on which their error
//! hinges: few rows are few draws of a random number. Where `terms` is 0, nothing is attended, and the gradient is
//! exactly 0. Deliberately absent: engines.

use rapt_core::{
    BackwardSpec, BackwardTensors, DType, Error, GradientForms, Shape, Spec, Strides, TensorLayout, Tensors, ViewMut,
};
use rapt_reference::{Gradients, OutputGradients, Outputs, backward, naive};

use crate::buffer::TensorBuf;
use crate::case::{Case, Placements, Places, Values};
use crate::gather::Gathered;
use crate::gradient_terms::{Parts, emulate, terms};
use crate::memory::Guard;
use crate::rng::Rng;
use crate::scalar::round;
use crate::tolerance::floor;
use crate::zoo::{Placement, output_zoo, zoo};

/// Any engine of the backward pass: computes the gradients that are asked for.
pub type BackwardEngine<'e> = dyn FnMut(&BackwardSpec, BackwardTensors<'_>) -> Result<(), Error> + 'e;

/// The gradients, in the order of [`GradientCase::asks`].
pub const GRADIENTS: [&str; 5] = ["dq", "dk", "dv", "d_mask", "d_sinks"];

/// One problem of the backward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientCase {
    /// The forward problem.
    pub case: Case,
    /// Whether a gradient by lse arrives.
    pub d_lse: bool,
    /// Which gradients are asked for, of those that there are.
    pub asks: [bool; 5],
    /// Indices into the stride zoo: of d_o, d_lse, and of the gradients in the zoo of outputs.
    pub places: [usize; 7],
    /// Whether gradients by q, k and v are sums over batch entries and heads where those are broadcast by a stride of 0.
    pub sums: bool,
    /// Whether gradients by q, k, v and the mask are of the accumulation dtype.
    pub wide: bool,
}

impl GradientCase {
    /// All gradients of `case`, row-major.
    #[must_use]
    pub fn all(case: &Case) -> Self {
        GradientCase {
            case: Case { lse: true, ..case.clone() },
            d_lse: false,
            asks: [true; 5],
            places: [0; 7],
            sums: false,
            wide: false,
        }
    }

    /// The same with gradients that are sums where q, k and v are broadcast, or wider than those.
    #[must_use]
    pub fn summing(self, wide: bool) -> Self {
        GradientCase { sums: true, wide, ..self }
    }

    /// The random problem of this seed.
    #[must_use]
    pub fn random(seed: u64, dtypes: &[DType], max_work: usize) -> Self {
        let mut rng = Rng::new(seed ^ 0xbac);
        let case = if rng.once_in(3) { Case::random_dropout } else { Case::random };
        let case = Case { lse: true, ..case(seed, dtypes, max_work) };
        let asks = if rng.once_in(3) { std::array::from_fn(|_| !rng.once_in(3)) } else { [true; 5] };
        GradientCase { case, d_lse: rng.once_in(3), asks, places: random_places(&mut rng), sums: false, wide: false }
    }

    /// The dtype of out and of what arrives there.
    fn out_dtype(&self) -> DType {
        self.case.out_dtype.unwrap_or(self.case.dtype)
    }

    /// Sizes and dtype of each gradient; `None` where there is none.
    fn outputs(&self) -> [Option<([usize; 4], DType)>; 5] {
        let case = &self.case;
        let mask = case.mask.as_ref().filter(|mask| mask.dtype != DType::Bool);
        let places = case.placements();
        let dtype = |of: DType| if self.wide { of.accumulation() } else { of };
        let own = |shape: [usize; 4], place: &Placement, heads: bool| {
            let is_sum = |d: usize| self.sums && place.strides[d] == 0 && (d == 0 || d == 1 && heads);
            Some((std::array::from_fn(|d| if is_sum(d) { 1 } else { shape[d] }), dtype(case.dtype)))
        };
        let all = [
            own(case.q, &places.q, case.q[1] == case.num_kv_heads),
            own(case.k(), &places.k, true),
            own(case.v(), &places.v, true),
            mask.map(|mask| (case.mask_shape(mask), dtype(mask.dtype))),
            case.sinks.map(|dtype| ([1, 1, 1, case.q[1]], dtype)),
        ];
        std::array::from_fn(|n| all[n].filter(|_| self.asks[n]))
    }

    fn placement(&self, n: usize, shape: [usize; 4], is_output: bool) -> Placement {
        let mut all = if is_output { output_zoo(shape) } else { zoo(shape) };
        let at = self.places[n] % all.len();
        all.swap_remove(at)
    }
}

fn random_places(rng: &mut Rng) -> [usize; 7] {
    std::array::from_fn(|_| if rng.once_in(2) { 0 } else { rng.below(1 << 16) })
}

/// What arrives, row-major.
#[derive(Clone, Debug)]
struct Arriving {
    d_o: Vec<f64>,
    d_lse: Option<Vec<f64>>,
}

/// The tensors of a problem.
struct Buffers {
    q: TensorBuf,
    k: TensorBuf,
    v: TensorBuf,
    mask: Option<TensorBuf>,
    sinks: Option<TensorBuf>,
    alibi_slopes: Option<TensorBuf>,
    out: TensorBuf,
    lse: TensorBuf,
    d_o: TensorBuf,
    d_lse: Option<TensorBuf>,
    gradients: [Option<TensorBuf>; 5],
}

impl Buffers {
    fn new(of: &GradientCase, places: &Placements, values: &Values, outputs: &Outputs, arriving: &Arriving) -> Self {
        let (case, accumulation) = (&of.case, of.case.dtype.accumulation());
        let input = |dtype, shape, place: &Placement, values: &[f64]| {
            TensorBuf::new(dtype, shape, place, case.guard, Some(values))
        };
        let vector = |dtype: Option<DType>, values: &Option<Vec<f64>>| {
            let of = dtype.zip(values.as_deref());
            of.map(|(dtype, values)| input(dtype, [1, 1, 1, case.q[1]], &places.vectors, values))
        };
        let mask = case.mask.as_ref().zip(values.mask.as_deref());
        let rows = [1, case.q[0], case.q[1], case.q[2]];
        let d_lse = arriving.d_lse.as_ref();
        Buffers {
            q: input(case.dtype, case.q, &places.q, &values.q),
            k: input(case.dtype, case.k(), &places.k, &values.k),
            v: input(case.dtype, case.v(), &places.v, &values.v),
            mask: mask.map(|(mask, values)| input(mask.dtype, case.mask_shape(mask), &places.mask, values)),
            sinks: vector(case.sinks, &values.sinks),
            alibi_slopes: vector(case.alibi_slopes, &values.alibi_slopes),
            out: input(of.out_dtype(), case.out(), &places.out, &outputs.out),
            lse: input(accumulation, rows, &places.lse, &outputs.lse),
            d_o: input(of.out_dtype(), case.out(), &of.placement(0, case.out(), false), &arriving.d_o),
            d_lse: d_lse.map(|values| input(accumulation, rows, &of.placement(1, rows, false), values)),
            gradients: {
                let outputs = of.outputs();
                std::array::from_fn(|n| {
                    let (shape, dtype) = outputs[n]?;
                    Some(TensorBuf::new(dtype, shape, &of.placement(2 + n, shape, true), case.guard, None))
                })
            },
        }
    }

    /// Views of everything; of the gradients those asked for.
    fn tensors(&mut self, case: &Case) -> BackwardTensors<'_> {
        let (rank, layout, plain) = (case.rank, case.layout, TensorLayout::Bhsd);
        let mask_rank = case.mask.map_or(4, |mask| mask.rank);
        let [dq, dk, dv, d_mask, d_sinks] = &mut self.gradients;
        let inputs = [("q", &self.q), ("k", &self.k), ("v", &self.v)].map(|(name, of)| of.view(name, rank, layout));
        BackwardTensors {
            mask: self.mask.as_ref().map(|mask| mask.view("mask", mask_rank, plain)),
            sinks: self.sinks.as_ref().map(|sinks| sinks.view("sinks", 1, plain)),
            alibi_slopes: self.alibi_slopes.as_ref().map(|slopes| slopes.view("alibi_slopes", 1, plain)),
            dropout: (case.dropout.0 != 0.0).then_some(case.dropout.1),
            d_lse: self.d_lse.as_ref().map(|d_lse| d_lse.view("d_lse", rank - 1, plain)),
            dq: dq.as_mut().map(|of| of.view_mut("dq", rank, layout)),
            dk: dk.as_mut().map(|of| of.view_mut("dk", rank, layout)),
            dv: dv.as_mut().map(|of| of.view_mut("dv", rank, layout)),
            d_mask: d_mask.as_mut().map(|of| of.view_mut("d_mask", mask_rank, plain)),
            d_sinks: d_sinks.as_mut().map(|of| of.view_mut("d_sinks", 1, plain)),
            ..BackwardTensors::new(
                inputs,
                self.out.view("out", rank, layout),
                self.lse.view("lse", rank - 1, plain),
                self.d_o.view("d_o", rank, layout),
            )
        }
    }

    fn check_memory(&self) -> Result<(), String> {
        let inputs = [
            ("q", Some(&self.q)),
            ("k", Some(&self.k)),
            ("v", Some(&self.v)),
            ("mask", self.mask.as_ref()),
            ("sinks", self.sinks.as_ref()),
            ("alibi_slopes", self.alibi_slopes.as_ref()),
            ("out", Some(&self.out)),
            ("lse", Some(&self.lse)),
            ("d_o", Some(&self.d_o)),
            ("d_lse", self.d_lse.as_ref()),
        ];
        for (name, buffer) in inputs {
            buffer.map_or(Ok(()), |buffer| buffer.check_unchanged(name)).map_err(|damage| damage.to_string())?;
        }
        for (name, buffer) in GRADIENTS.iter().zip(&self.gradients) {
            let Some(buffer) = buffer else { continue };
            buffer.check_padding(name).map_err(|damage| damage.to_string())?;
            if buffer.has_unwritten() {
                return Err(format!("an element of {name} was never written"));
            }
        }
        Ok(())
    }

    fn bits(&self) -> Vec<u64> {
        self.gradients.iter().flatten().flat_map(TensorBuf::bits).collect()
    }
}

/// The forward spec of these tensors, and with it the backward one.
///
/// # Errors
/// Any [`Error`].
pub fn backward_spec_of(tensors: &BackwardTensors<'_>, case: &Case) -> Result<BackwardSpec, Error> {
    let mut builder = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &case.options());
    builder.mask(tensors.mask.as_ref()).sinks(tensors.sinks.as_ref()).alibi_slopes(tensors.alibi_slopes.as_ref());
    builder.out(&tensors.out).lse(&tensors.lse);
    let form = |view: &Option<ViewMut<'_>>| view.as_ref().map(Into::into);
    let forms = GradientForms {
        d_o: (&tensors.d_o).into(),
        d_lse: tensors.d_lse.as_ref().map(Into::into),
        dq: form(&tensors.dq),
        dk: form(&tensors.dk),
        dv: form(&tensors.dv),
        d_mask: form(&tensors.d_mask),
        d_sinks: form(&tensors.d_sinks),
    };
    BackwardSpec::new(builder.build()?, &forms)
}

/// Reads the inputs of a problem in f64.
fn gathered(case: &Case, buffers: &mut Buffers) -> Result<Gathered, String> {
    let tensors = buffers.tensors(case);
    let spec = backward_spec_of(&tensors, case).map_err(|error| format!("the spec was refused: {error}"))?;
    let mut none = [0.0f32];
    let nothing = ViewMut::strided("out", &mut none, 0, Shape::from([0, 0]), Strides::from([0, 0]));
    let (mask, sinks, alibi_slopes, dropout) = (tensors.mask, tensors.sinks, tensors.alibi_slopes, tensors.dropout);
    let forward = Tensors {
        mask,
        sinks,
        alibi_slopes,
        dropout,
        ..Tensors::new(tensors.q, tensors.k, tensors.v, nothing.map_err(|error| error.to_string())?)
    };
    Ok(Gathered::new(spec.forward(), &forward))
}

/// Puts every engine through one problem: the definition, memory untouched, and the same bits from all that `same_bits` says, against the other page and
/// under other strides.
///
/// # Errors
/// What went wrong, with the case.
pub fn judge_gradients(engines: &mut [Box<BackwardEngine<'_>>], of: &GradientCase) -> Result<(), String> {
    judge(engines, of).map_err(|what| format!("{what}\n  case: {of:?}"))
}

fn judge(engines: &mut [Box<BackwardEngine<'_>>], of: &GradientCase) -> Result<(), String> {
    let case = &of.case;
    let places = case.placements();
    let mut values = case.values();
    let nothing = Outputs { out: vec![0.0; count(case.out())], lse: vec![0.0; count(case.q) / case.q[3]] };
    let arriving = arriving(of);
    let mut first = Buffers::new(of, &places, &values, &nothing, &arriving);
    let inputs = gathered(case, &mut first)?;
    if case.poison {
        crate::run::poison(case, &places, &mut values);
        poison_bias(case, &places, &inputs, &mut values);
        first = Buffers::new(of, &places, &values, &nothing, &arriving);
    }
    let inputs = gathered(case, &mut first)?;
    let outputs = naive(&inputs.problem, &inputs.inputs());
    let arriving = as_it_lies(of, &poisoned(of, &inputs, arriving), &outputs);
    let lying = read_back(case, &first);
    let outputs = round_outputs(of, &outputs);
    let mut buffers = Buffers::new(of, &places, &lying, &outputs, &arriving);
    let inputs = gathered(case, &mut buffers)?;
    let expected = Expected::new(of, &inputs, &outputs, &arriving);
    let mut bits = Vec::new();
    for (n, engine) in engines.iter_mut().enumerate() {
        run(&mut **engine, case, &mut buffers).map_err(|what| format!("engine {n}: {what}"))?;
        expected.judge(&buffers).map_err(|what| format!("engine {n}: {what}"))?;
        bits.push(buffers.bits());
    }
    let mut rng = Rng::new(case.seed ^ 0x57);
    let guard = case.guard.other_page().unwrap_or(Guard::Heap { shift: rng.below(64) });
    let mut moved = Case { places: Case::random_places(&mut rng), guard, ..case.clone() };
    if of.sums {
        // Where there is one gradient over what is broadcast, that stays.
        let Places { q, k, v, .. } = case.places;
        moved.places = Places { q, k, v, ..moved.places };
    }
    let moved = GradientCase { case: moved, places: random_places(&mut rng), ..of.clone() };
    let mut places = moved.case.placements();
    let shapes = [(&mut places.q, case.q), (&mut places.k, case.k()), (&mut places.v, case.v())];
    let mask = case.mask.as_ref().map_or([1; 4], |mask| case.mask_shape(mask));
    let rest = [(&mut places.mask, mask), (&mut places.vectors, [1, 1, 1, case.q[1]])];
    for (place, shape) in shapes.into_iter().filter(|_| !of.sums).chain(rest) {
        // Strides that share addresses cannot hold any values.
        if !place.injective {
            *place = output_zoo(shape).swap_remove(rng.pick(&[1, 2, 4]));
        }
    }
    let mut moved = moved;
    for n in 0..2 {
        if !moved.placement(n, if n == 0 { case.out() } else { [1, case.q[0], case.q[1], case.q[2]] }, false).injective
        {
            moved.places[n] = 2;
        }
    }
    let mut buffers = Buffers::new(&moved, &places, &lying, &outputs, &arriving);
    for (n, (engine, bits)) in engines.iter_mut().zip(&bits).enumerate() {
        run(&mut **engine, case, &mut buffers).map_err(|what| format!("engine {n}, under other strides: {what}"))?;
        if buffers.bits() != *bits {
            return Err(format!("engine {n} gives other bits under other strides: {:?}", moved.places));
        }
    }
    Ok(())
}

fn count(shape: [usize; 4]) -> usize {
    shape.iter().product()
}

fn run(engine: &mut BackwardEngine<'_>, case: &Case, buffers: &mut Buffers) -> Result<(), String> {
    buffers.gradients.iter_mut().flatten().for_each(TensorBuf::clear);
    let tensors = buffers.tensors(case);
    let spec = backward_spec_of(&tensors, case).map_err(|error| format!("the spec was refused: {error}"))?;
    engine(&spec, tensors).map_err(|error| format!("the engine refused: {error}"))?;
    buffers.check_memory()
}

/// N(0, 1) at out and at lse.
fn arriving(of: &GradientCase) -> Arriving {
    let mut rng = Rng::new(of.case.seed ^ 0xd0);
    let (dtype, accumulation) = (of.out_dtype(), of.case.dtype.accumulation());
    let mut normal = |dtype, n: usize| -> Vec<f64> { (0..n).map(|_| round(dtype, rng.normal())).collect() };
    let d_o = normal(dtype, count(of.case.out()));
    let d_lse = of.d_lse.then(|| normal(accumulation, count(of.case.out()) / of.case.head_dim_v));
    Arriving { d_o, d_lse }
}

/// NaN and infinities arriving at rows that attend nothing, and NaN at one element.
fn poisoned(of: &GradientCase, inputs: &Gathered, mut arriving: Arriving) -> Arriving {
    let case = &of.case;
    if !case.poison {
        return arriving;
    }
    let mut rng = Rng::new(case.seed ^ 0xdead);
    // Through strides that share addresses what arrives there would arrive at rows that attend.
    let own = of.placement(0, case.out(), false).injective;
    for row in 0..count(case.out()) / case.head_dim_v {
        if own && inputs.attended(row).is_empty() {
            let bad = rng.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]);
            arriving.d_o[row * case.head_dim_v..][..case.head_dim_v].fill(bad);
            let of_lse = of.placement(1, [1, case.q[0], case.q[1], case.q[2]], false);
            if let Some(d_lse) = arriving.d_lse.as_mut().filter(|_| of_lse.injective) {
                d_lse[row] = bad;
            }
        }
    }
    if rng.once_in(2) && !arriving.d_o.is_empty() {
        let at = rng.below(arriving.d_o.len());
        arriving.d_o[at] = f64::NAN;
    }
    arriving
}

/// NaN in biases of pairs that positions leave out.
fn poison_bias(case: &Case, places: &Placements, inputs: &Gathered, values: &mut Values) {
    let full = case.mask.as_ref().is_some_and(|mask| mask.dtype != DType::Bool && mask.full == [true; 4]);
    let Some(mask) = values.mask.as_mut().filter(|_| full && places.mask.injective) else { return };
    let range = rapt_core::BlockRange::new(case.q[2], case.kv_len, case.causal, case.window);
    for (row, biases) in mask.chunks_mut(inputs.problem.kv_len.max(1)).enumerate() {
        let (lo, hi) = range.keys_of(row % case.q[2]);
        biases.iter_mut().enumerate().filter(|(j, _)| !(lo..hi).contains(j)).for_each(|(_, bias)| *bias = f64::NAN);
    }
}

/// The inputs as they lie, which where elements share an address are not those that were put there.
fn read_back(case: &Case, buffers: &Buffers) -> Values {
    let of = |buffer: &Option<TensorBuf>| buffer.as_ref().map(TensorBuf::values);
    let (q, k, v) = (buffers.q.values(), buffers.k.values(), buffers.v.values());
    let scales = case.values().scales;
    Values {
        q,
        k,
        v,
        scales,
        mask: of(&buffers.mask),
        sinks: of(&buffers.sinks),
        alibi_slopes: of(&buffers.alibi_slopes),
    }
}

/// What arrives as it lies; outputs lie under strides that share nothing.
fn as_it_lies(of: &GradientCase, arriving: &Arriving, outputs: &Outputs) -> Arriving {
    let places = of.case.placements();
    let buffers = Buffers::new(of, &places, &of.case.values(), outputs, arriving);
    Arriving { d_o: buffers.d_o.values(), d_lse: buffers.d_lse.as_ref().map(TensorBuf::values) }
}

/// What a forward pass leaves: out and lse in their dtypes.
fn round_outputs(of: &GradientCase, outputs: &Outputs) -> Outputs {
    let (dtype, accumulation) = (of.out_dtype(), of.case.dtype.accumulation());
    Outputs {
        out: outputs.out.iter().map(|&x| round(dtype, x)).collect(),
        lse: outputs.lse.iter().map(|&x| round(accumulation, x)).collect(),
    }
}

/// What the gradients are held against.
struct Expected {
    parts: [Option<Judged>; 5],
    /// What underflows.
    least: f64,
}

impl Expected {
    fn new(of: &GradientCase, inputs: &Gathered, outputs: &Outputs, arriving: &Arriving) -> Self {
        let case = &of.case;
        let given = OutputGradients { d_o: &arriving.d_o, d_lse: arriving.d_lse.as_deref() };
        let Gradients { dq, dk, dv, d_bias, d_sinks } = backward(&inputs.problem, &inputs.inputs(), &given);
        let definition = Parts { dq, dk, dv, d_bias, d_sinks };
        let torch = [1, 16].map(|lanes| emulate(inputs, &given, outputs, case.dtype, lanes));
        let of_dots = (case.q[3].max(case.head_dim_v) as f64).sqrt() / 4.0;
        let wide = floor(case.dtype.accumulation()) * of_dots.max(1.0);
        let [terms, off] = [None, Some(wide)].map(|wide| terms(inputs, &given, wide));
        let target = [case.q[0], case.q[1], case.q[2], case.kv_len];
        let summed = |parts: &Parts, n: usize, shape: [usize; 4]| match n {
            0 => sum_to(&parts.dq, case.q, shape),
            1 => sum_to(&parts.dk, case.k(), shape),
            2 => sum_to(&parts.dv, case.v(), shape),
            3 => sum_to(parts.d_bias.as_deref().unwrap_or_default(), target, shape),
            _ => parts.d_sinks.clone().unwrap_or_default(),
        };
        let outputs = of.outputs();
        let parts = std::array::from_fn(|n| {
            let (shape, dtype) = outputs[n]?;
            let [definition, terms, off] = [&definition, &terms, &off].map(|parts| summed(parts, n, shape));
            let torch = torch.each_ref().map(|parts| {
                let numbers = summed(parts, n, shape);
                numbers.into_iter().map(|x| round(dtype, x)).collect()
            });
            Some(Judged { reference: definition, torch, terms, off, len: shape[3], dtype })
        });
        // A weight below the smallest normal number counts as 0.
        let least = if case.dtype == DType::F64 { 2f64.powi(-1012) } else { 2f64.powi(-116) };
        Expected { parts, least }
    }

    fn judge(&self, buffers: &Buffers) -> Result<(), String> {
        for ((name, part), buffer) in GRADIENTS.iter().zip(&self.parts).zip(&buffers.gradients) {
            if let (Some(part), Some(buffer)) = (part, buffer) {
                part.judge(&buffer.values(), self.least).map_err(|what| format!("{name}: {what}"))?;
            }
        }
        Ok(())
    }
}

/// Sums of the elements that share an index once those of dimensions of 1 are dropped; the same where none is.
fn sum_to(values: &[f64], from: [usize; 4], to: [usize; 4]) -> Vec<f64> {
    let mut sums = vec![0.0; count(to)];
    for (n, &value) in values.iter().enumerate() {
        let index =
            [n / (from[1] * from[2] * from[3]), n / (from[2] * from[3]) % from[1], n / from[3] % from[2], n % from[3]];
        let at = (0..4).fold(0, |at, d| at * to[d] + if to[d] == 1 { 0 } else { index[d] });
        sums[at] += value;
    }
    sums
}

/// One gradient, and what it is judged by.
struct Judged {
    reference: Vec<f64>,
    torch: [Vec<f64>; 2],
    terms: Vec<f64>,
    /// What terms may be off by.
    off: Vec<f64>,
    len: usize,
    dtype: DType,
}

impl Judged {
    fn judge(&self, got: &[f64], least: f64) -> Result<(), String> {
        let Judged { reference, torch, terms, off, len, dtype } = self;
        let len = (*len).max(1);
        if got.len() != reference.len() {
            return Err(format!("{} elements, the reference has {}", got.len(), reference.len()));
        }
        for (at, ((&got, &reference), &terms)) in got.iter().zip(reference).zip(terms).enumerate() {
            let rounded = round(*dtype, reference);
            let same = got == rounded || got.is_finite() && rounded.is_finite() || got.is_nan() && rounded.is_nan();
            if !same || terms == 0.0 && got != 0.0 {
                return Err(format!("element {at} (row {}) is {got}, the reference says {reference}", at / len));
            }
        }
        // Where a formula leaves the finite numbers, it says nothing.
        let norms = |of: &dyn Fn(usize) -> f64| -> Vec<f64> {
            let square = |at: usize| if reference[at].is_finite() { of(at).powi(2) } else { 0.0 };
            let of_row =
                |row: usize| (row * len..(row + 1) * len).map(square).filter(|x| x.is_finite()).sum::<f64>().sqrt();
            (0..got.len() / len).map(of_row).collect()
        };
        let whole = |rows: &[f64]| rows.iter().map(|x| x * x).sum::<f64>().sqrt();
        let [is, sizes] = [norms(&|at| got[at] - reference[at]), norms(&|at| reference[at])];
        let [terms, off] = [norms(&|at| terms[at]), norms(&|at| off[at])];
        let errors = torch.each_ref().map(|torch| norms(&|at| torch[at] - reference[at]));
        let own = floor(*dtype);
        let of_torch = errors.iter().map(|rows| {
            let fourth = rows.iter().map(|x| x.powi(4)).sum::<f64>();
            let hinges = if fourth > 0.0 { whole(rows).powi(4) / fourth } else { f64::INFINITY };
            (4.0 / hinges.sqrt()).max(1.1) * whole(rows)
        });
        let limit = of_torch.fold(0.0, f64::max) + own * whole(&sizes) + whole(&off) + least;
        if whole(&is) > limit {
            return Err(format!("error {:.3e} exceeds {limit:.3e}, the norm is {:.3e}", whole(&is), whole(&sizes)));
        }
        let mean = sizes.iter().sum::<f64>() / sizes.len().max(1) as f64;
        let measure = |row: usize| sizes[row].max(mean) + terms[row];
        let ratio = |(row, error): (usize, &f64)| if *error > 0.0 { error / measure(row) } else { 0.0 };
        let worst = errors.iter().flat_map(|rows| rows.iter().enumerate().map(ratio)).fold(0.0, f64::max);
        for (row, is) in is.into_iter().enumerate() {
            let limit = 4.0 * worst * measure(row) + own * sizes[row].max(mean) + off[row] + least;
            if is > limit {
                return Err(format!("row {row} has error {is:.3e}, above {limit:.3e}; its norm is {:.3e}", sizes[row]));
            }
        }
        Ok(())
    }
}
