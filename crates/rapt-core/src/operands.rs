//! Operands: the tensors of one run, checked against the spec they were planned for.
//!
//! Invariants of [`Operands`]: every tensor has the dtype, sizes, strides and device of the spec, and at least its alignment; every address it
//! reaches lies inside its extent (an invariant of [`View`]); each output names every address once and shares no byte
//! with any other operand.

use std::ops::Range;

use crate::overlap::{Decision, STEPS};
use crate::spec::{
    broadcast_mask, canonical, codes_of_keys, keys, lengths_spec, numbers_of, offsets_spec, page_table, part_names,
};
use crate::{
    Codes, CodesForm, CodesSpec, Device, DropoutSeed, Error, Number, Qkv, Result, Spec, TensorSpec, View, ViewMut,
};

/// The tensors of one run, as they were given.
#[derive(Debug)]
pub struct Tensors<'a> {
    /// Queries.
    pub q: View<'a>,
    /// Keys.
    pub k: View<'a>,
    /// Values.
    pub v: View<'a>,
    /// Of those of q, k and v that are codes: what makes numbers of them.
    pub codes: Qkv<Option<Box<Codes<'a>>>>,
    /// Boolean or additive mask.
    pub mask: Option<View<'a>>,
    /// One more logit per head.
    pub sinks: Option<View<'a>>,
    /// ALiBi slopes.
    pub alibi_slopes: Option<View<'a>>,
    /// Where k and v are pages of a cache: those of each sequence, in the order of its keys.
    pub page_table: Option<View<'a>>,
    /// Where sequences have lengths of their own: how many keys each has, but for those that its spec adds.
    pub lengths: Option<View<'a>>,
    /// Where sequences lie one after another: where the queries and where the keys of each begin.
    pub offsets: Option<[View<'a>; 2]>,
    /// Which weights are dropped, where the options drop some.
    pub dropout: Option<DropoutSeed>,
    /// Where the result goes.
    pub out: ViewMut<'a>,
    /// Where the log of the sum of exponentials goes.
    pub lse: Option<ViewMut<'a>>,
}

/// [`Tensors`] that were proven to be those of a [`Spec`].
#[derive(Debug)]
pub struct Operands<'a> {
    tensors: Tensors<'a>,
    /// The entries of the page table that are used, each a page of the cache. A copy: nobody can write others there later.
    pages: Vec<i32>,
    spec: &'a Spec,
}

pub(crate) fn compare<const N: usize>(
    tensor: &'static str,
    got: &TensorSpec<N>,
    planned: &TensorSpec<N>,
) -> Result<()> {
    let differs = |what| Err(Error::NotAsPlanned { tensor, what });
    if got.dtype != planned.dtype {
        return differs("dtype");
    }
    if got.shape != planned.shape {
        return differs("shape");
    }
    // Nothing lies behind the strides of an empty tensor; producers differ in what they call them.
    if got.shape.contains(&0) {
        return Ok(());
    }
    if got.strides != planned.strides {
        return differs("strides");
    }
    // More than was planned for does no harm.
    if got.alignment < planned.alignment {
        return differs("alignment");
    }
    Ok(())
}

fn compare_codes(tensor: &'static str, got: &CodesSpec, planned: &CodesSpec) -> Result<()> {
    let names = part_names(tensor);
    let of = |codes: &CodesSpec| (codes.format, codes.granularity, codes.chunk, codes.scale_layout);
    if of(got) != of(planned) {
        return Err(Error::NotAsPlanned { tensor: names.descale, what: "format or granularity" });
    }
    compare(names.descale, &got.descale, &planned.descale)?;
    // Both have one or neither: a format tells.
    got.zero_point
        .iter()
        .zip(&planned.zero_point)
        .try_for_each(|(got, planned)| compare(names.zero_point, got, planned))
}

/// That offsets of sequences are given as planned.
pub(crate) fn check_offsets(offsets: Option<&[View<'_>; 2]>, spec: &Spec) -> Result<()> {
    match (offsets, spec.varlen.as_deref()) {
        (Some([q, kv]), Some(planned)) => {
            compare("cu_seqlens_q", &offsets_spec("cu_seqlens_q", &q.into())?, &planned.cu_seqlens_q)?;
            compare("cu_seqlens_kv", &offsets_spec("cu_seqlens_kv", &kv.into())?, &planned.cu_seqlens_kv)
        }
        (None, None) => Ok(()),
        _ => Err(Error::NotAsPlanned { tensor: "cu_seqlens_q", what: "presence" }),
    }
}

/// That a run says which weights are dropped where `spec` drops some, and only there.
pub(crate) fn check_dropout(seed: Option<DropoutSeed>, spec: &Spec) -> Result<()> {
    match (seed, spec.dropout) {
        (Some(seed), Some(_)) => seed.check(spec.batch(), spec.device),
        (None, None) => Ok(()),
        (None, Some(dropout)) => {
            let allowed = format!("seed and offset of the run: dropout_p is {}", dropout.p());
            Err(Error::Option { option: "dropout", got: "None".into(), allowed })
        }
        (Some(_), None) => Err(Error::NotAsPlanned { tensor: "dropout", what: "presence" }),
    }
}

/// The entries of a page table in host memory that the keys of `spec` take.
///
/// # Errors
/// [`Error::NotAsPlanned`]; [`Error::PageIndex`] for an entry that is no page of the cache.
fn pages_used(table: Option<&View<'_>>, spec: &Spec) -> Result<Vec<i32>> {
    let (table, pages) = match (table, spec.pages.as_deref()) {
        (None, None) => return Ok(Vec::new()),
        (Some(table), Some(pages)) => (table, pages),
        _ => return Err(Error::NotAsPlanned { tensor: "page_table", what: "presence" }),
    };
    compare("page_table", &page_table(&table.into())?, &pages.table)?;
    let used = pages.used(spec.kv_len());
    // A table of a device is read there.
    if used == 0 || spec.device != Device::Cpu {
        return Ok(Vec::new());
    }
    let entries: Vec<i32> = table.lines("page_table")?.line(0).take(used).collect();
    match entries.iter().position(|&page| usize::try_from(page).map_or(true, |page| page >= pages.num_pages)) {
        Some(at) => Err(Error::PageIndex { at, page: entries[at], num_pages: pages.num_pages }),
        None => Ok(entries),
    }
}

/// Proves that `out` shares no byte with another operand. Answers the steps that it took.
///
/// # Errors
/// [`Error::OutputOverlaps`], [`Error::OverlapUndecided`].
pub fn prove_disjoint(tensor: &'static str, out: &ViewMut<'_>, other: &'static str, view: &View<'_>) -> Result<usize> {
    let Decision { holds, steps } = out.is_disjoint_from(view);
    match holds {
        Some(true) => Ok(steps),
        Some(false) => Err(Error::OutputOverlaps { tensor, other }),
        None => Err(Error::OverlapUndecided { tensor, other, steps: STEPS }),
    }
}

/// Proves that `out` names every address once. Answers the steps that it took.
///
/// # Errors
/// [`Error::OutputOverlapsItself`], [`Error::OverlapUndecided`].
pub fn prove_injective(tensor: &'static str, out: &ViewMut<'_>) -> Result<usize> {
    let Decision { holds, steps } = out.is_injective();
    match holds {
        Some(true) => Ok(steps),
        Some(false) => Err(Error::OutputOverlapsItself { tensor, shape: *out.shape(), strides: *out.strides() }),
        None => Err(Error::OverlapUndecided { tensor, other: tensor, steps: STEPS }),
    }
}

/// The parts of `out` at `ranges` of dimension `dim`, of which none begins before the one before it has ended.
///
/// # Errors
/// As [`prove_injective`]: an element of two parts would be written by two.
///
/// # Panics
/// If the ranges lie out of their order, or leave the dimension.
pub fn split<'a>(
    tensor: &'static str,
    mut out: ViewMut<'a>,
    dim: usize,
    ranges: &[Range<usize>],
) -> Result<Vec<ViewMut<'a>>> {
    prove_injective(tensor, &out)?;
    let is_in_order = ranges.windows(2).all(|pair| pair[0].end <= pair[1].start);
    assert!(is_in_order && ranges.iter().all(|range| range.start <= range.end), "parts of {tensor} that lie apart");
    // SAFETY: the whole is given up, no two ranges share an index, and no two indices have one address.
    Ok(ranges.iter().map(|range| unsafe { out.part(dim, range) }).collect())
}

impl<'a> Operands<'a> {
    /// Proves that `tensors` are those of `spec`.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`] if a dtype, size, stride or device differs, or an address is less aligned; [`Error::OutputOverlaps`],
    /// [`Error::OutputOverlapsItself`] and [`Error::OverlapUndecided`] for outputs.
    pub fn check(tensors: Tensors<'a>, spec: &'a Spec) -> Result<Self> {
        // A spec's fields are public: what its builder proved is asked again.
        if !spec.is_coherent() {
            return Err(Error::NotAsPlanned { tensor: "spec", what: "a field that was changed after it was built" });
        }
        let layout = spec.layout;
        let (views, planned) = ([&tensors.q, &tensors.k, &tensors.v], [&spec.q, &spec.k, &spec.v]);
        for (n, (name, codes)) in tensors.codes.named().into_iter().enumerate() {
            let form = codes.as_deref().map(CodesForm::from);
            let in_pages = spec.pages.as_deref().filter(|_| n > 0);
            let (got, pages) = match in_pages {
                Some(_) => keys(name, &views[n].into(), form.as_ref(), layout, Some([spec.batch(), spec.kv_len()]))
                    .map(|(got, pages)| (got, Some(pages)))?,
                None => (numbers_of(name, &views[n].into(), form.as_ref(), layout)?, None),
            };
            compare(name, &got, planned[n])?;
            if let (Some(got), Some(planned)) = (pages, in_pages)
                && (got.num_pages, got.page_size) != (planned.num_pages, planned.page_size)
            {
                return Err(Error::NotAsPlanned { tensor: name, what: "pages" });
            }
            let (_, planned_codes) = spec.codes.named()[n];
            match (&form, planned_codes) {
                (Some(form), Some(codes)) => {
                    let got = match pages {
                        Some(pages) => codes_of_keys(name, form, planned[n], pages, layout)?,
                        None => CodesSpec::new(name, form, planned[n].shape, views[n].shape().len(), layout)?,
                    };
                    compare_codes(name, &got, codes)?;
                }
                (None, None) => {}
                _ => return Err(Error::NotAsPlanned { tensor: part_names(name).descale, what: "presence" }),
            }
        }
        let out = &tensors.out;
        compare("out", &canonical("out", &out.into(), layout)?, &spec.out)?;
        match (&tensors.mask, &spec.mask) {
            (Some(mask), Some(planned)) => compare("mask", &broadcast_mask(&mask.into(), planned.shape)?, planned)?,
            (None, None) => {}
            _ => return Err(Error::NotAsPlanned { tensor: "mask", what: "presence" }),
        }
        for (name, view, planned) in
            [("sinks", &tensors.sinks, &spec.sinks), ("alibi_slopes", &tensors.alibi_slopes, &spec.alibi_slopes)]
        {
            match (view, planned) {
                (Some(view), Some(planned)) => {
                    let got = TensorSpec::of(&view.into()).filter(|_| view.shape().len() == 1);
                    compare(name, &got.ok_or(Error::NotAsPlanned { tensor: name, what: "shape" })?, planned)?;
                }
                (None, None) => {}
                _ => return Err(Error::NotAsPlanned { tensor: name, what: "presence" }),
            }
        }
        match (&tensors.lse, &spec.lse) {
            (Some(lse), Some(planned)) => {
                let got = TensorSpec::of(&lse.into());
                compare("lse", &got.ok_or(Error::NotAsPlanned { tensor: "lse", what: "shape" })?, planned)?;
            }
            (None, None) => {}
            _ => return Err(Error::NotAsPlanned { tensor: "lse", what: "presence" }),
        }
        match (&tensors.lengths, spec.lengths.as_deref().and_then(|of| of.lengths)) {
            (Some(lengths), Some(planned)) => {
                compare("cache_seqlens", &lengths_spec(spec.batch(), &lengths.into())?, &planned)?;
            }
            (None, None) => {}
            _ => return Err(Error::NotAsPlanned { tensor: "cache_seqlens", what: "presence" }),
        }
        check_offsets(tensors.offsets.as_ref(), spec)?;
        check_dropout(tensors.dropout, spec)?;
        if let Some((tensor, _)) = tensors.inputs().find(|(_, view)| view.device() != spec.device) {
            return Err(Error::NotAsPlanned { tensor, what: "device" });
        }
        for (name, device) in [("out", Some(out.device())), ("lse", tensors.lse.as_ref().map(ViewMut::device))] {
            if device.is_some_and(|device| device != spec.device) {
                return Err(Error::NotAsPlanned { tensor: name, what: "device" });
            }
        }

        let pages = pages_used(tensors.page_table.as_ref(), spec)?;
        prove_injective("out", out)?;
        tensors.inputs().try_for_each(|(other, view)| prove_disjoint("out", out, other, view).map(drop))?;
        if let Some(lse) = &tensors.lse {
            prove_injective("lse", lse)?;
            tensors.inputs().try_for_each(|(other, view)| prove_disjoint("lse", lse, other, view).map(drop))?;
            prove_disjoint("lse", lse, "out", &out.as_view())?;
        }
        Ok(Operands { tensors, pages, spec })
    }

    /// Whether these operands were proven against `spec`: what a backend asks before it trusts them.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`] if they were proven against another spec.
    #[inline]
    pub fn expect(&self, spec: &Spec) -> Result<()> {
        let same = std::ptr::eq(self.spec, spec) || self.spec == spec;
        if same { Ok(()) } else { Err(Error::NotAsPlanned { tensor: "operands", what: "spec" }) }
    }

    /// The tensors, as they were given.
    #[must_use]
    pub fn into_tensors(self) -> Tensors<'a> {
        self.tensors
    }

    /// Writes the elements of line `at` of `out`, in host memory, as [`ViewMut::write_line`] does; `T` has the size of its elements.
    ///
    /// # Errors
    /// [`Error::OtherDtype`] if it has not; [`Error::DeviceUnavailable`] outside host memory.
    ///
    /// # Panics
    /// If there are not that many lines.
    pub fn write_out_line<T: Number>(&mut self, at: usize, values: impl IntoIterator<Item = T>) -> Result<()> {
        self.tensors.out.reinterpreted("out", T::DTYPE)?.write_line("out", at, values)
    }

    /// As [`Operands::write_out_line`], for `lse`; nothing is written where it is not asked for.
    ///
    /// # Errors
    /// As [`Operands::write_out_line`].
    ///
    /// # Panics
    /// As [`Operands::write_out_line`].
    pub fn write_lse_line<T: Number>(&mut self, at: usize, values: impl IntoIterator<Item = T>) -> Result<()> {
        let Some(lse) = &mut self.tensors.lse else { return Ok(()) };
        lse.reinterpreted("lse", T::DTYPE)?.write_line("lse", at, values)
    }

    /// The proven tensors. They cannot be exchanged for others.
    #[must_use]
    pub fn tensors(&self) -> &Tensors<'a> {
        &self.tensors
    }

    /// The page of each run of `page_size` keys, where k and v are pages of a cache in host memory.
    #[must_use]
    pub fn pages(&self) -> &[i32] {
        &self.pages
    }

    /// Where `out` is written.
    pub fn out_ptr(&mut self) -> *mut u8 {
        self.tensors.out.as_mut_ptr()
    }

    /// Where `lse` is written, if it is asked for.
    pub fn lse_ptr(&mut self) -> Option<*mut u8> {
        self.tensors.lse.as_mut().map(ViewMut::as_mut_ptr)
    }
}

impl<'a> Tensors<'a> {
    /// Numbers that attend without mask, sinks, slopes and lse; `Tensors { mask, ..Tensors::new(q, k, v, out) }` has one.
    #[inline]
    #[must_use]
    pub fn new(q: View<'a>, k: View<'a>, v: View<'a>, out: ViewMut<'a>) -> Self {
        let (mask, sinks, alibi_slopes, page_table, lengths, offsets, lse) = (None, None, None, None, None, None, None);
        let (codes, dropout) = (Qkv::default(), None);
        Tensors { q, k, v, codes, mask, sinks, alibi_slopes, page_table, lengths, offsets, dropout, out, lse }
    }

    /// Every tensor that is read, with its name.
    pub fn inputs(&self) -> impl Iterator<Item = (&'static str, &View<'a>)> {
        let required = [("q", &self.q), ("k", &self.k), ("v", &self.v)];
        let optional = [
            ("mask", self.mask.as_ref()),
            ("sinks", self.sinks.as_ref()),
            ("alibi_slopes", self.alibi_slopes.as_ref()),
            ("page_table", self.page_table.as_ref()),
            ("cache_seqlens", self.lengths.as_ref()),
            ("cu_seqlens_q", self.offsets.as_ref().map(|offsets| &offsets[0])),
            ("cu_seqlens_kv", self.offsets.as_ref().map(|offsets| &offsets[1])),
        ];
        let of_codes =
            self.codes.named().into_iter().filter_map(|(name, codes)| Some((part_names(name), codes.as_deref()?)));
        let of_codes = of_codes.flat_map(|(names, codes)| {
            [(names.descale, Some(&codes.descale)), (names.zero_point, codes.zero_point.as_ref())]
        });
        let optional = of_codes.chain(optional).filter_map(|(name, view)| Some((name, view?)));
        required.into_iter().chain(optional)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device, Extent, Options};

    #[test]
    fn an_overlap_that_the_search_does_not_decide_is_an_error() {
        const LEN: usize = 3000;
        let element = [0f32];
        let input = |name| View::strided(name, &element, 0, [LEN; 4].into(), [0; 4].into()).unwrap();
        // Four strides that have nothing in common: no prefix of the sums rules the rest out.
        let strides = [140_737_488_355_333, 131_941_395_333_119, 123_145_302_310_913, 114_349_209_288_707].into();
        let at = std::ptr::without_provenance_mut(1 << 20);
        // SAFETY: nobody writes it.
        let out = unsafe {
            ViewMut::from_raw_parts("out", at, DType::F32, [LEN; 4].into(), strides, Device::Cpu, Extent::Declared)
        };
        let (q, k, v, out) = (input("q"), input("k"), input("v"), out.unwrap());
        let spec = Spec::builder(&q, &k, &v, &Options::default()).out(&out).build().unwrap();
        let undecided = Error::OverlapUndecided { tensor: "out", other: "out", steps: STEPS };
        assert_eq!(Operands::check(Tensors::new(q, k, v, out), &spec).unwrap_err(), undecided);
    }
}
