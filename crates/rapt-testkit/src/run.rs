//! One case through one engine: tensors made, run, judged.
//!
//! Deliberately absent: which cases; see [`conformance`](crate::conformance()).

use rapt_core::{Compute, DType, Error, Qkv, Spec, TensorLayout, Tensors};
use rapt_reference::{Int8Outputs, Outputs, naive};

use crate::buffer::TensorBuf;
use crate::case::{Case, Placements, Values};
use crate::figures::{Figures, figures};
use crate::gather::{Gathered, int8_reference};
use crate::quantized::{CodesCase, ScaleBuffers, ScaleValues};
use crate::rng::Rng;
use crate::rounding::LogitRounding;
use crate::tolerance::{Class, check_between, check_lse, check_within, entry};
use crate::torch_emulation::emulations;
use crate::zoo::Placement;

/// Any engine: computes `out` (and `lse`) of the tensors.
pub type Engine<'e> = dyn FnMut(&Spec, Tensors<'_>) -> Result<(), Error> + 'e;

/// What came of one run.
pub(crate) enum Ran {
    /// It ran, and broke no rule; the bits of out and lse.
    Bits(Vec<u64>),
    /// The engine does not serve it.
    Unsupported,
}

/// The tensors of a case.
pub(crate) struct Buffers {
    q: TensorBuf,
    k: TensorBuf,
    v: TensorBuf,
    scales: Qkv<Option<ScaleBuffers>>,
    mask: Option<TensorBuf>,
    sinks: Option<TensorBuf>,
    alibi_slopes: Option<TensorBuf>,
    out: TensorBuf,
    lse: Option<TensorBuf>,
}

impl Buffers {
    pub(crate) fn new(case: &Case, places: &Placements, values: &Values) -> Self {
        let guard = case.guard;
        let input =
            |dtype, shape, place: &Placement, values: &[f64]| TensorBuf::new(dtype, shape, place, guard, Some(values));
        let vector = |dtype: Option<DType>, values: &Option<Vec<f64>>| {
            let values = values.as_deref();
            dtype.zip(values).map(|(dtype, values)| input(dtype, [1, 1, 1, case.q[1]], &places.vectors, values))
        };
        let mask = case.mask.as_ref().zip(values.mask.as_deref());
        let ([q, k, v], dtype) =
            (case.stored(), |codes: Option<CodesCase>| codes.map_or(case.dtype, |codes| codes.format.code_dtype()));
        let scales =
            |codes: Option<CodesCase>, shape, places: &Option<[Placement; 2]>, values: &Option<ScaleValues>| {
                let (codes, [place, of_points], values) = (codes?, places.as_ref()?, values.as_ref()?);
                let (groups, points) = (codes.groups(shape), values.zero_point.as_deref());
                Some(ScaleBuffers {
                    descale: input(codes.format.scale_dtype(), groups, place, &values.descale),
                    zero_point: points.map(|points| input(DType::U8, groups, of_points, points)),
                    global: values.global,
                })
            };
        let lse = [1, case.q[0], case.q[1], case.q[2]];
        Buffers {
            q: input(dtype(case.codes.q), q, &places.q, &values.q),
            k: input(dtype(case.codes.k), k, &places.k, &values.k),
            v: input(dtype(case.codes.v), v, &places.v, &values.v),
            scales: Qkv {
                q: scales(case.codes.q, case.q, &places.scales.q, &values.scales.q),
                k: scales(case.codes.k, case.k(), &places.scales.k, &values.scales.k),
                v: scales(case.codes.v, case.v(), &places.scales.v, &values.scales.v),
            },
            mask: mask.map(|(mask, values)| input(mask.dtype, case.mask_shape(mask), &places.mask, values)),
            sinks: vector(case.sinks, &values.sinks),
            alibi_slopes: vector(case.alibi_slopes, &values.alibi_slopes),
            out: TensorBuf::new(case.out_dtype.unwrap_or(case.dtype), case.out(), &places.out, guard, None),
            lse: case.lse.then(|| TensorBuf::new(case.dtype.accumulation(), lse, &places.lse, guard, None)),
        }
    }

    /// The values as they lie, which where elements share an address are not those that were put there.
    pub(crate) fn values(&self) -> Values {
        Values {
            q: self.q.values(),
            k: self.k.values(),
            v: self.v.values(),
            scales: Qkv {
                q: self.scales.q.as_ref().map(ScaleBuffers::values),
                k: self.scales.k.as_ref().map(ScaleBuffers::values),
                v: self.scales.v.as_ref().map(ScaleBuffers::values),
            },
            mask: self.mask.as_ref().map(TensorBuf::values),
            sinks: self.sinks.as_ref().map(TensorBuf::values),
            alibi_slopes: self.alibi_slopes.as_ref().map(TensorBuf::values),
        }
    }

    /// As if nothing had run: every element of out and lse holds the pattern.
    fn clear_outputs(&mut self) {
        self.out.clear();
        if let Some(lse) = &mut self.lse {
            lse.clear();
        }
    }

    fn tensors(&mut self, case: &Case) -> Tensors<'_> {
        let (rank, layout) = (case.rank, case.layout);
        let mask_rank = case.mask.map_or(4, |mask| mask.rank);
        let codes = |codes: Option<CodesCase>, scales, dim| {
            let scales: &Option<ScaleBuffers> = scales;
            Some(Box::new(codes?.codes(scales.as_ref()?, dim, rank, layout)))
        };
        Tensors {
            page_table: None,
            lengths: None,
            offsets: None,
            dropout: (case.dropout.0 != 0.0).then_some(case.dropout.1),
            q: self.q.view("q", rank, layout),
            k: self.k.view("k", rank, layout),
            v: self.v.view("v", rank, layout),
            codes: Qkv {
                q: codes(case.codes.q, &self.scales.q, case.q[3]),
                k: codes(case.codes.k, &self.scales.k, case.q[3]),
                v: codes(case.codes.v, &self.scales.v, case.head_dim_v),
            },
            mask: self.mask.as_ref().map(|mask| mask.view("mask", mask_rank, TensorLayout::Bhsd)),
            sinks: self.sinks.as_ref().map(|sinks| sinks.view("sinks", 1, TensorLayout::Bhsd)),
            alibi_slopes: self.alibi_slopes.as_ref().map(|slopes| slopes.view("alibi_slopes", 1, TensorLayout::Bhsd)),
            out: self.out.view_mut("out", rank, layout),
            lse: self.lse.as_mut().map(|lse| lse.view_mut("lse", rank - 1, TensorLayout::Bhsd)),
        }
    }
}

fn spec_of(case: &Case, tensors: &Tensors<'_>) -> Result<Spec, Error> {
    let out = &tensors.out;
    let mut builder = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &case.options());
    builder
        .codes(tensors.codes.as_deref())
        .mask(tensors.mask.as_ref())
        .sinks(tensors.sinks.as_ref())
        .alibi_slopes(tensors.alibi_slopes.as_ref())
        .out(out);
    if let Some(lse) = &tensors.lse {
        builder.lse(lse);
    }
    builder.build()
}

/// Puts NaN and infinities where nobody looks, and NaN into one query.
pub(crate) fn poison(case: &Case, places: &Placements, values: &mut Values) {
    let mut buffers = Buffers::new(case, places, values);
    let Ok(spec) = spec_of(case, &buffers.tensors(case)) else { return };
    let gathered = Gathered::new(&spec, &buffers.tensors(case));
    let [batch, num_q_heads, q_len, head_dim] = case.q;
    let mut attended = vec![false; batch * case.num_kv_heads * case.kv_len];
    for row in 0..batch * num_q_heads * q_len {
        gathered.attended(row).into_iter().for_each(|j| attended[gathered.kv_row(row, j)] = true);
    }
    let mut rng = Rng::new(case.seed ^ 0xbad);
    for (row, _) in attended.iter().enumerate().filter(|(_, attended)| !**attended) {
        let bad = rng.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]);
        // Through strides that share addresses the poison would reach attended keys.
        let own = |places: &Option<[Placement; 2]>| places.as_ref().is_some_and(|[place, _]| place.injective);
        if places.k.injective {
            match &case.codes.k {
                Some(codes) => {
                    let scales = values.scales.k.as_mut().filter(|_| own(&places.scales.k));
                    codes.poison(row, case.k(), &mut values.k, scales, &mut rng);
                }
                None => values.k[row * head_dim..][..head_dim].fill(bad),
            }
        }
        if places.v.injective {
            match &case.codes.v {
                Some(codes) => {
                    let scales = values.scales.v.as_mut().filter(|_| own(&places.scales.v));
                    codes.poison(row, case.v(), &mut values.v, scales, &mut rng);
                }
                None => values.v[row * case.head_dim_v..][..case.head_dim_v].fill(bad),
            }
        }
    }
    if places.q.injective && !values.q.is_empty() {
        let at = rng.below(values.q.len());
        // Of codes 127 is NaN where the format has one, and a number elsewhere.
        values.q[at] = if case.codes.q.is_some() { 127.0 } else { f64::NAN };
    }
}

/// Runs one case and judges it, by what was expected of it before if it was. Where its bits are those of `first`, which was judged
/// already, that is all.
pub(crate) fn run(
    engine: &mut Engine<'_>,
    case: &Case,
    buffers: &mut Buffers,
    first: Option<&[u64]>,
    expected: &mut Option<Expected>,
) -> Result<Ran, String> {
    buffers.clear_outputs();
    let tensors = buffers.tensors(case);
    let spec = spec_of(case, &tensors).map_err(|error| format!("the spec was refused: {error}"))?;
    match engine(&spec, tensors) {
        Ok(()) => {}
        Err(Error::Unsupported { .. }) => return Ok(Ran::Unsupported),
        Err(error) => return Err(format!("the engine refused: {error}")),
    }
    untouched(buffers).map_err(|damage| damage.to_string())?;

    if buffers.out.has_unwritten() || buffers.lse.as_ref().is_some_and(TensorBuf::has_unwritten) {
        return Err("an element of out or lse was never written".into());
    }
    let mut bits = buffers.out.bits();
    bits.extend(buffers.lse.iter().flat_map(TensorBuf::bits));
    if first == Some(&bits) {
        return Ok(Ran::Bits(bits));
    }
    // The inputs are what they were before the run: that was checked above.
    let expected = expected.get_or_insert_with(|| {
        let tensors = buffers.tensors(case);
        match case.compute {
            Compute::Int8 => Expected::Int8(int8_reference(&spec, &tensors), tensors.out.dtype()),
            _ => Expected::Exact(Exact::new(case, tensors.out.dtype(), &Gathered::new(&spec, &tensors))),
        }
    });
    expected.judge(buffers)?;
    Ok(Ran::Bits(bits))
}

/// What out and lse are held against: of one case, whoever computes it and wherever its tensors lie.
pub(crate) enum Expected {
    /// The definition.
    Exact(Exact),
    /// That of int8, and the dtype of out.
    Int8(Int8Outputs, DType),
}

impl Expected {
    fn judge(&self, buffers: &Buffers) -> Result<(), String> {
        match self {
            Expected::Exact(exact) => exact.judge(buffers),
            Expected::Int8(Int8Outputs { outputs, out_error, lse_error }, dtype) => {
                check_between("out", &buffers.out.values(), &outputs.out, out_error, *dtype)?;
                let lse = |lse: &TensorBuf| check_between("lse", &lse.values(), &outputs.lse, lse_error, DType::F32);
                buffers.lse.as_ref().map_or(Ok(()), lse)
            }
        }
    }
}

/// The definition, with what is tolerated.
pub(crate) struct Exact {
    reference: Outputs,
    rounding: LogitRounding,
    /// Torch's error: what the table says, or what its roundings make on these inputs if that is more.
    torch: Figures,
    head_dim_v: usize,
    storage: DType,
    judged: DType,
}

impl Exact {
    fn new(case: &Case, out_dtype: DType, gathered: &Gathered) -> Self {
        let reference = naive(&gathered.problem, &gathered.inputs());
        let storage = case.dtype;
        let judged = if out_dtype.bits() < storage.bits() || out_dtype == DType::BF16 { out_dtype } else { storage };
        let mut torch = entry(storage, Class::Plain, case.q[3], case.kv_len).torch;
        for emulation in emulations(gathered, storage, out_dtype) {
            let Figures { relative, worst_row, .. } = figures(&emulation, &reference.out, case.head_dim_v);
            torch.relative = torch.relative.max(relative);
            torch.worst_row = torch.worst_row.max(worst_row);
        }
        let rounding = LogitRounding::of(gathered, &reference, storage);
        Exact { reference, rounding, torch, head_dim_v: case.head_dim_v, storage, judged }
    }

    /// Judges out and lse by the tolerance rule.
    fn judge(&self, buffers: &Buffers) -> Result<(), String> {
        let Exact { reference, rounding, torch, head_dim_v, storage, judged } = self;
        check_within(&buffers.out.values(), &reference.out, *head_dim_v, *judged, torch, Some(rounding))
            .map_err(|mismatch| format!("out: {mismatch}"))?;
        buffers.lse.as_ref().map_or(Ok(()), |lse| {
            check_lse(&lse.values(), &reference.lse, *storage, Some(rounding))
                .map_err(|mismatch| format!("lse: {mismatch}"))
        })
    }
}

fn untouched(buffers: &Buffers) -> Result<(), crate::buffer::Damage> {
    buffers.q.check_unchanged("q")?;
    buffers.k.check_unchanged("k")?;
    buffers.v.check_unchanged("v")?;
    for (name, scales) in buffers.scales.named() {
        if let Some(ScaleBuffers { descale, zero_point, .. }) = scales {
            descale.check_unchanged(name)?;
            zero_point.as_ref().map_or(Ok(()), |points| points.check_unchanged(name))?;
        }
    }
    let optional = [("mask", &buffers.mask), ("sinks", &buffers.sinks), ("alibi_slopes", &buffers.alibi_slopes)];
    for (name, buffer) in optional {
        if let Some(buffer) = buffer {
            buffer.check_unchanged(name)?;
        }
    }
    buffers.out.check_padding("out")?;
    buffers.lse.as_ref().map_or(Ok(()), |lse| lse.check_padding("lse"))
}
