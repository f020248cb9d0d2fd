//! From the forms of a caller's tensors and its options to a [`Spec`].

use super::compute;
use super::order::{as_given, canonical};
use super::pages::{Pages, codes_of_keys, keys, lengths_spec, offsets_spec, pages_spec};
use super::quantized::{CodesForm, CodesSpec, Qkv, numbers_of, part_names};
use super::validate::{broadcast_mask, check_sizes, floats_within, is_float_within, per_head};
use super::{Direction, Kv, LengthsSpec, MaskSpec, Numerics, Spec, TensorSpec, VarlenSpec};
use crate::dropout;
use crate::{
    COMPUTED, Causal, Compute, DType, Device, Dropout, Error, Finite, Format, Options, Result, Shape, Strides,
    TensorForm, Window,
};

/// Gathers a [`Spec`]. Its methods change it in place, as it is too large to be handed on at each.
#[derive(Clone, Debug)]
pub struct SpecBuilder {
    q: TensorForm,
    k: TensorForm,
    v: TensorForm,
    codes: Qkv<Option<Box<CodesForm>>>,
    mask: Option<TensorForm>,
    sinks: Option<TensorForm>,
    alibi_slopes: Option<TensorForm>,
    out: Option<TensorForm>,
    lse: Lse,
    /// The page table, and the keys of the longest sequence.
    pages: Option<(TensorForm, usize)>,
    /// The lengths of sequences, and the keys that each has behind them.
    lengths: Option<(Option<TensorForm>, usize)>,
    /// Where the queries and the keys of sequences begin.
    offsets: Option<[TensorForm; 2]>,
    options: Options,
}

#[derive(Clone, Copy, Debug)]
enum Lse {
    None,
    Contiguous,
    Given(TensorForm),
}

impl SpecBuilder {
    #[inline]
    pub(super) fn new(q: TensorForm, k: TensorForm, v: TensorForm, options: Options) -> Self {
        let codes = Qkv::default();
        let (mask, sinks, alibi_slopes, out, lse) = (None, None, None, None, Lse::None);
        let (pages, lengths, offsets) = (None, None, None);
        SpecBuilder { q, k, v, codes, mask, sinks, alibi_slopes, out, lse, pages, lengths, offsets, options }
    }

    /// With codes of a quantized format as those of q, k and v that have some: their numbers are formed where they are loaded.
    pub fn codes<T>(&mut self, codes: Qkv<Option<T>>) -> &mut Self
    where
        T: Into<CodesForm>,
    {
        let form = |codes: Option<T>| codes.map(|codes| Box::new(codes.into()));
        self.codes = Qkv { q: form(codes.q), k: form(codes.k), v: form(codes.v) };
        self
    }

    /// With a boolean (True = attend) or additive mask.
    pub fn mask(&mut self, mask: Option<impl Into<TensorForm>>) -> &mut Self {
        self.mask = mask.map(Into::into);
        self
    }

    /// With one more logit per head, `[num_q_heads]`.
    pub fn sinks(&mut self, sinks: Option<impl Into<TensorForm>>) -> &mut Self {
        self.sinks = sinks.map(Into::into);
        self
    }

    /// With ALiBi slopes, `[num_q_heads]`.
    pub fn alibi_slopes(&mut self, slopes: Option<impl Into<TensorForm>>) -> &mut Self {
        self.alibi_slopes = slopes.map(Into::into);
        self
    }

    /// With an output of this form, in the layout of the options. Without this call the output is row-major in that layout.
    pub fn out(&mut self, out: impl Into<TensorForm>) -> &mut Self {
        self.out = Some(out.into());
        self
    }

    /// With lse, row-major `[batch, num_q_heads, q_len]` (less the dimensions that `q` lacks).
    pub fn return_lse(&mut self, yes: bool) -> &mut Self {
        self.lse = if yes { Lse::Contiguous } else { Lse::None };
        self
    }

    /// With lse of this form, `[batch, num_q_heads, q_len]` whatever the layout.
    pub fn lse(&mut self, lse: impl Into<TensorForm>) -> &mut Self {
        self.lse = Lse::Given(lse.into());
        self
    }

    /// With `kv_len` keys in pages of a cache, which k and v are then, and their page table (int32, `[entries]`, or `[batch, entries]`
    /// where sequences have [`lengths`](SpecBuilder::lengths)).
    ///
    /// In [`TensorLayout::Bshd`](crate::TensorLayout::Bshd) pages are `[num_pages, page_size, num_kv_heads, head_dim]`, else
    /// `[num_pages, num_kv_heads, page_size, head_dim]`; key `j` is row `j % page_size` of page `page_table[j / page_size]`.
    pub fn pages(&mut self, page_table: impl Into<TensorForm>, kv_len: usize) -> &mut Self {
        self.pages = Some((page_table.into(), kv_len));
        self
    }

    /// With sequences of lengths of their own, of which `kv_len` is the most: int32 `[batch]` where q lies, and `added` keys behind those.
    /// The last query is at the last key of its sequence. Host memory serves no such request: there each sequence has a spec of its own.
    pub fn lengths(&mut self, lengths: Option<impl Into<TensorForm>>, added: usize) -> &mut Self {
        self.lengths = Some((lengths.map(Into::into), added));
        self
    }

    /// With sequences that lie one after another, `[total, heads, head_dim]` in [`TensorLayout::Bshd`](crate::TensorLayout::Bshd), and where
    /// their queries and keys begin: int32 `[sequences + 1]` where q lies. Host memory serves no such request: there each sequence has a
    /// spec of its own.
    pub fn varlen(&mut self, cu_seqlens_q: impl Into<TensorForm>, cu_seqlens_kv: impl Into<TensorForm>) -> &mut Self {
        self.offsets = Some([cu_seqlens_q.into(), cu_seqlens_kv.into()]);
        self
    }

    /// Checks everything that needs no pointer.
    ///
    /// # Errors
    /// Any [`Error`] of kind dtype, shape, option or device.
    pub fn build(&self) -> Result<Spec> {
        let numerics = self.numerics()?;
        let ([q, k, v], of_keys) = self.inputs()?;
        let codes = self.codes_specs([&q, &k, &v], of_keys)?;
        let [batch, num_q_heads, q_len, head_dim] = q.shape;
        let device = self.device()?;
        compute::check(self.options.compute, device, head_dim, codes.as_deref())?;
        let of_pages =
            |(table, kv_len): &(TensorForm, usize)| pages_spec([batch, *kv_len], of_keys, table).map(Box::new);
        let pages = self.pages.as_ref().map(of_pages).transpose()?;
        let of_lengths = |(lengths, added): &(Option<TensorForm>, usize)| -> Result<_> {
            let lengths = lengths.as_ref().map(|lengths| lengths_spec(batch, lengths)).transpose()?;
            Ok(Box::new(LengthsSpec { lengths, added: *added }))
        };
        let lengths = self.lengths.as_ref().map(of_lengths).transpose()?;
        if lengths.is_some() {
            self.check_positions()?;
        }
        let varlen = self.varlen_spec()?;
        let mask = self.mask_spec([batch, num_q_heads, q_len, k.shape[2]], numerics)?;
        let vector = |tensor, form: &Option<TensorForm>| {
            form.as_ref().map(|form| per_head(tensor, form, num_q_heads, numerics.accumulation)).transpose()
        };
        let (sinks, alibi_slopes) = (vector("sinks", &self.sinks)?, vector("alibi_slopes", &self.alibi_slopes)?);
        let softmax_scale = self.options.softmax_scale.unwrap_or(1.0 / (head_dim as f64).sqrt());
        let softmax_scale = Finite::new("scale", softmax_scale)?;
        let softcap = self.softcap()?;
        let dropout = self.dropout(&q, &k)?;
        let out = self.out_spec([batch, num_q_heads, q_len, v.shape[3]], numerics)?;
        let lse = self.lse_spec([batch, num_q_heads, q_len], numerics)?;
        Ok(Spec {
            direction: Direction::Forward,
            kv: match (&pages, &varlen) {
                (Some(_), _) => Kv::Paged,
                (None, Some(_)) => Kv::Varlen,
                (None, None) => Kv::Dense,
            },
            pages,
            lengths,
            varlen,
            numerics,
            device,
            q,
            k,
            v,
            codes,
            out,
            lse,
            mask,
            sinks,
            alibi_slopes,
            softmax_scale,
            softcap,
            causal: self.options.causal,
            window: self.options.window,
            layout: self.options.layout,
            compute: self.options.compute,
            dropout,
        })
    }

    /// Dropout, of numbers alone: no training is on codes.
    fn dropout(&self, q: &TensorSpec<4>, k: &TensorSpec<4>) -> Result<Option<Dropout>> {
        let Some(dropout) = Dropout::new(self.options.dropout_p)? else { return Ok(None) };
        let what = format!("dropout_p={}", dropout.p());
        if self.options.compute != Compute::Exact || !self.codes.is_empty() {
            let what = format!("{what} with operands that are codes");
            return Err(Error::unsupported(what, "codes are not trained on", "dropout_p=0.0"));
        }
        if !dropout::is_placed(q.shape, k.shape[2]) {
            let what = format!("{what} with q {:?} and {} keys", q.shape, k.shape[2]);
            let why = "the place of a weight is numbered with 32 bits for batch, head and row and 34 for the column";
            return Err(Error::unsupported(what, why, "dropout_p=0.0"));
        }
        Ok(Some(dropout))
    }

    /// That the last query is at the last key of its sequence, where positions matter.
    fn check_positions(&self) -> Result<()> {
        let Options { causal, window, .. } = self.options;
        let is_open = causal.is_none() && window == Window::default() && self.alibi_slopes.is_none();
        if is_open || causal == Some(Causal::BottomRight) {
            return Ok(());
        }
        let got = if causal.is_some() { "'top_left'" } else { "None" };
        let allowed = "'bottom_right': the last query of a sequence is at its last key, wherever that is".to_owned();
        Err(Error::Option { option: "causal", got: got.to_owned(), allowed })
    }

    /// Sequences that lie one after another.
    fn varlen_spec(&self) -> Result<Option<Box<VarlenSpec>>> {
        let Some([q, kv]) = &self.offsets else { return Ok(None) };
        let (cu_seqlens_q, cu_seqlens_kv) = (offsets_spec("cu_seqlens_q", q)?, offsets_spec("cu_seqlens_kv", kv)?);
        let [expected, got] = [cu_seqlens_q, cu_seqlens_kv].map(|offsets| offsets.shape[0] - 1);
        if got != expected {
            let (tensor, other) = ("cu_seqlens_kv", "cu_seqlens_q");
            return Err(Error::SizeMismatch { tensor, size: "sequences", got, other, expected });
        }
        if self.q.shape.len() != 3 {
            let allowed = "sequences that lie one after another are [total, heads, head_dim]";
            return Err(Error::Rank { tensor: "q", got: self.q.shape.len(), shape: self.q.shape, allowed });
        }
        let others = [
            ("a mask", self.mask.is_some()),
            ("pages", self.pages.is_some()),
            ("lengths of a cache", self.lengths.is_some()),
        ];
        if let Some((what, _)) = others.into_iter().find(|(_, is_given)| *is_given) {
            return Err(Error::unsupported(
                format!("{what} beside sequences that lie one after another"),
                "no kernel reads both",
                "call `attention` for each sequence",
            ));
        }
        Ok(Some(Box::new(VarlenSpec { cu_seqlens_q, cu_seqlens_kv })))
    }

    /// Each of q, k and v with what is said of its codes.
    fn operands(&self) -> [(&'static str, &TensorForm, Option<&CodesForm>); 3] {
        let SpecBuilder { q, k, v, codes, .. } = self;
        [("q", q, codes.q.as_deref()), ("k", k, codes.k.as_deref()), ("v", v, codes.v.as_deref())]
    }

    /// One dtype of those of q, k and v that are not codes, and what all are summed in.
    fn numerics(&self) -> Result<Numerics> {
        let operands = self.operands();
        for (tensor, form, _) in operands.iter().filter(|(.., codes)| codes.is_none()) {
            if Format::of_dtype(form.dtype).is_some() {
                let (codes, part) = (form.dtype.name(), part_names(tensor).descale);
                return Err(Error::MissingPart { tensor, codes, part });
            }
        }
        let mut plain = operands.iter().filter(|(.., codes)| codes.is_none());
        let (first, storage) = plain.next().map_or(("q", DType::F32), |(tensor, form, _)| (*tensor, form.dtype));
        for (tensor, form, _) in plain {
            let (expected, got) = (storage, form.dtype);
            if got != storage && first == "q" {
                return Err(Error::DtypeMismatch { tensor, expected, got });
            }
            if got != storage {
                return Err(Error::OtherDtype { tensor, expected, got });
            }
        }
        if !storage.is_computed() {
            return Err(Error::UnsupportedDtype { tensor: first, got: storage, allowed: COMPUTED.to_vec() });
        }
        if let (DType::F64, Some((tensor, .., Some(codes)))) =
            (storage, operands.iter().find(|(.., codes)| codes.is_some()))
        {
            return Err(Error::unsupported(
                format!("{first} in float64 with {tensor} of {} codes", codes.format),
                "codes are multiplied by their scales and summed in float32",
                format!("give {first} in float32, or dequantize {tensor}"),
            ));
        }
        Ok(Numerics { storage, accumulation: storage.accumulation() })
    }

    /// q, k and v in canonical order, with the sizes of their numbers; beside them the pages of k and v.
    fn inputs(&self) -> Result<([TensorSpec<4>; 3], [Pages; 2])> {
        let SpecBuilder { q, k, v, options, .. } = self;
        let [of_q, of_k, of_v] = self.operands();
        let q_spec = numbers_of(of_q.0, of_q.1, of_q.2, options.layout)?;
        let batch = if self.lengths.is_some() { q_spec.shape[0] } else { 1 };
        let in_pages = self.pages.as_ref().map(|(_, kv_len)| [batch, *kv_len]);
        let (k_spec, k_pages) = keys(of_k.0, of_k.1, of_k.2, options.layout, in_pages)?;
        let (v_spec, v_pages) = keys(of_v.0, of_v.1, of_v.2, options.layout, in_pages)?;
        let specs = [q_spec, k_spec, v_spec];
        for (tensor, form) in [("k", k), ("v", v)] {
            if in_pages.is_none() && form.shape.len() != q.shape.len() {
                return Err(Error::Rank {
                    tensor,
                    got: form.shape.len(),
                    shape: form.shape,
                    allowed: "q, k and v have one rank",
                });
            }
        }
        check_sizes(specs.each_ref(), [q, k, v])?;
        Ok((specs, [k_pages, v_pages]))
    }

    /// What makes numbers of those that are codes.
    fn codes_specs(
        &self,
        numbers: [&TensorSpec<4>; 3],
        [of_k, of_v]: [Pages; 2],
    ) -> Result<Qkv<Option<Box<CodesSpec>>>> {
        let (rank, layout) = (self.q.shape.len(), self.options.layout);
        let pages = [None, Some(of_k), Some(of_v)].map(|pages| pages.filter(|_| self.pages.is_some()));
        let mut specs = [const { None }; 3];
        for (n, (tensor, _, codes)) in self.operands().into_iter().enumerate() {
            if let Some(codes) = codes {
                specs[n] = Some(Box::new(match pages[n] {
                    Some(pages) => codes_of_keys(tensor, codes, numbers[n], pages, layout)?,
                    None => CodesSpec::new(tensor, codes, numbers[n].shape, rank, layout)?,
                }));
            }
        }
        let [q, k, v] = specs;
        Ok(Qkv { q, k, v })
    }

    fn mask_spec(&self, target: [usize; 4], numerics: Numerics) -> Result<Option<MaskSpec>> {
        let Some(form) = &self.mask else { return Ok(None) };
        if form.dtype != DType::Bool && !is_float_within(form.dtype, numerics.accumulation) {
            let allowed = [vec![DType::Bool], floats_within(numerics.accumulation)].concat();
            return Err(Error::UnsupportedDtype { tensor: "mask", got: form.dtype, allowed });
        }
        broadcast_mask(form, target).map(Some)
    }

    fn softcap(&self) -> Result<Option<Finite>> {
        match self.options.softcap {
            Some(cap) if cap.is_finite() && cap > 0.0 => Finite::new("softcap", cap).map(Some),
            Some(cap) => {
                let allowed = "None, or a finite number greater than 0".into();
                Err(Error::Option { option: "softcap", got: cap.to_string(), allowed })
            }
            None => Ok(None),
        }
    }

    /// The one device of all tensors.
    fn device(&self) -> Result<Device> {
        let SpecBuilder { q, k, v, mask, sinks, alibi_slopes, out, lse, .. } = self;
        let lse = if let Lse::Given(lse) = lse { Some(lse) } else { None };
        let others = [
            ("k", Some(k)),
            ("v", Some(v)),
            ("mask", mask.as_ref()),
            ("sinks", sinks.as_ref()),
            ("alibi_slopes", alibi_slopes.as_ref()),
            ("out", out.as_ref()),
            ("lse", lse),
            ("page_table", self.pages.as_ref().map(|(table, _)| table)),
            ("cache_seqlens", self.lengths.as_ref().and_then(|(lengths, _)| lengths.as_ref())),
            ("cu_seqlens_q", self.offsets.as_ref().map(|offsets| &offsets[0])),
            ("cu_seqlens_kv", self.offsets.as_ref().map(|offsets| &offsets[1])),
        ];
        for (tensor, form) in others {
            if let Some(form) = form.filter(|form| form.device != q.device) {
                return Err(Error::DeviceMismatch { tensor, expected: q.device, got: form.device });
            }
        }
        for (tensor, _, codes) in self.operands() {
            let (Some(codes), names) = (codes, part_names(tensor)) else { continue };
            for (tensor, form) in [(names.descale, Some(&codes.descale)), (names.zero_point, codes.zero_point.as_ref())]
            {
                if let Some(form) = form.filter(|form| form.device != q.device) {
                    return Err(Error::DeviceMismatch { tensor, expected: q.device, got: form.device });
                }
            }
        }
        Ok(q.device)
    }

    fn out_spec(&self, sizes: [usize; 4], numerics: Numerics) -> Result<TensorSpec<4>> {
        let layout = self.options.layout;
        let expected = as_given(sizes, self.q.shape.len(), layout);
        let dtype = match (self.options.out_dtype, &self.codes.q) {
            (Some(dtype), _) => dtype,
            (None, None) => numerics.storage,
            (None, Some(codes)) => {
                let floats: Vec<&str> = floats_within(numerics.accumulation).iter().map(|dtype| dtype.name()).collect();
                let allowed = format!("{}: q is {} codes, which name no dtype of out", floats.join(", "), codes.format);
                return Err(Error::Option { option: "out_dtype", got: "None".to_owned(), allowed });
            }
        };
        if !is_float_within(dtype, numerics.accumulation) {
            let allowed = floats_within(numerics.accumulation);
            return Err(Error::UnsupportedDtype { tensor: "out", got: dtype, allowed });
        }
        // Every output element has an address of its own, so their number bounds all arithmetic on lengths of rows.
        let bytes = expected.numel().and_then(|n| isize::try_from(n.checked_mul(dtype.size_bytes())?).ok());
        if bytes.is_none() {
            return Err(Error::Overflow { tensor: "out", shape: expected, strides: Strides::from([]) });
        }
        canonical("out", &output("out", self.out, dtype, expected, self.q.device)?, layout)
    }

    fn lse_spec(&self, sizes: [usize; 3], numerics: Numerics) -> Result<Option<TensorSpec<3>>> {
        let expected = Shape::new(&sizes[4 - self.q.shape.len()..]).expect("at most three dimensions");
        let given = match self.lse {
            Lse::None => return Ok(None),
            Lse::Contiguous => None,
            Lse::Given(form) => Some(form),
        };
        let form = output("lse", given, numerics.accumulation, expected, self.q.device)?;
        Ok(TensorSpec::of(&form))
    }
}

/// The form of an output: the given one, if it is what is expected, else a row-major one.
fn output(
    tensor: &'static str,
    given: Option<TensorForm>,
    dtype: DType,
    expected: Shape,
    device: Device,
) -> Result<TensorForm> {
    let Some(form) = given else {
        let strides = expected.contiguous();
        let strides = strides.ok_or(Error::Overflow { tensor, shape: expected, strides: Strides::from([]) })?;
        return Ok(TensorForm::new(dtype, expected, strides, device));
    };
    if form.shape != expected {
        return Err(Error::ShapeMismatch { tensor, got: form.shape, expected });
    }
    if form.dtype != dtype {
        return Err(Error::OtherDtype { tensor, expected: dtype, got: form.dtype });
    }
    Ok(form)
}
