//! A spec: everything about a request but its pointers, checked once.
//!
//! All tensors are brought to one canonical order here: `q`, `out` as `[batch, num_q_heads, q_len, head_dim(_v)]`,
//! `k`, `v` as `[batch, num_kv_heads, kv_len, head_dim(_v)]`, `mask` as `[batch, num_q_heads, q_len, kv_len]` with zero
//! strides where it broadcasts, `lse` as `[batch, num_q_heads, q_len]`. No element moves: only sizes and strides are
//! permuted. Deliberately absent: pointers (but for their alignment), devices' capabilities, and any choice of a kernel.

use crate::{
    Alignment, BlockRange, COMPUTED, Causal, DType, Device, Error, Finite, Layout, Options, Result, Shape, Strides,
    TensorForm, Window,
};

/// A tensor without its pointer: `N` sizes and strides in canonical order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorSpec<const N: usize> {
    /// The dtype of the elements.
    pub dtype: DType,
    /// Sizes.
    pub shape: [usize; N],
    /// Strides in elements.
    pub strides: [isize; N],
    /// What its address is a multiple of, as far as a kernel may depend on it.
    pub alignment: Alignment,
}

impl<const N: usize> TensorSpec<N> {
    /// A tensor whose dimensions are the last ones of `N`, the others 1; `None` if it has more.
    pub(crate) fn of(form: &TensorForm) -> Option<Self> {
        let missing = N.checked_sub(form.shape.len())?;
        let (mut shape, mut strides) = ([1; N], [0; N]);
        shape[missing..].copy_from_slice(&form.shape);
        strides[missing..].copy_from_slice(&form.strides);
        Some(TensorSpec { dtype: form.dtype, shape, strides, alignment: form.alignment })
    }
}

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Direction {
    /// `out` and `lse` from `q`, `k`, `v`.
    Forward,
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kv {
    /// One strided tensor each.
    Dense,
}

/// The dtypes that numbers pass through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Numerics {
    /// The dtype of q, k and v.
    pub storage: DType,
    /// The dtype of products, sums, maxima and exponentials.
    pub accumulation: DType,
}

/// The mask of a spec.
pub type MaskSpec = TensorSpec<4>;

/// A checked request. Built by [`Spec::builder`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Spec {
    /// What is computed.
    pub direction: Direction,
    /// How keys and values are stored.
    pub kv: Kv,
    /// The dtypes that numbers pass through.
    pub numerics: Numerics,
    /// Where every tensor lies.
    pub device: Device,
    /// `[batch, num_q_heads, q_len, head_dim]`.
    pub q: TensorSpec<4>,
    /// `[batch, num_kv_heads, kv_len, head_dim]`.
    pub k: TensorSpec<4>,
    /// `[batch, num_kv_heads, kv_len, head_dim_v]`.
    pub v: TensorSpec<4>,
    /// `[batch, num_q_heads, q_len, head_dim_v]`.
    pub out: TensorSpec<4>,
    /// `[batch, num_q_heads, q_len]`.
    pub lse: Option<TensorSpec<3>>,
    /// `[batch, num_q_heads, q_len, kv_len]`, strides 0 where it broadcasts.
    pub mask: Option<MaskSpec>,
    /// `[num_q_heads]`: one more logit per head, unscaled.
    pub sinks: Option<TensorSpec<1>>,
    /// `[num_q_heads]`: ALiBi slopes.
    pub alibi_slopes: Option<TensorSpec<1>>,
    /// The factor of `q·k`.
    pub softmax_scale: Finite,
    /// `c·tanh(x/c)` on the scaled scores.
    pub softcap: Option<Finite>,
    /// Causal masking.
    pub causal: Option<Causal>,
    /// The sliding window.
    pub window: Window,
    /// The order of dimensions in which `q`, `k`, `v`, `out` and `lse` were given.
    pub layout: Layout,
}

/// Gathers a [`Spec`].
#[derive(Clone, Debug)]
pub struct SpecBuilder {
    q: TensorForm,
    k: TensorForm,
    v: TensorForm,
    mask: Option<TensorForm>,
    sinks: Option<TensorForm>,
    alibi_slopes: Option<TensorForm>,
    out: Option<TensorForm>,
    lse: Lse,
    options: Options,
}

#[derive(Clone, Copy, Debug)]
enum Lse {
    None,
    Contiguous,
    Given(TensorForm),
}

/// Dimensions in which q, k, v, out (rank 4) come to canonical order: where each canonical dimension is found.
fn canonical_order(rank: usize, layout: Layout) -> Option<[Option<usize>; 4]> {
    match (rank, layout) {
        (2, _) => Some([None, None, Some(0), Some(1)]),
        (3, Layout::Bhsd) => Some([None, Some(0), Some(1), Some(2)]),
        (3, Layout::Bshd) => Some([None, Some(1), Some(0), Some(2)]),
        (4, Layout::Bhsd) => Some([Some(0), Some(1), Some(2), Some(3)]),
        (4, Layout::Bshd) => Some([Some(0), Some(2), Some(1), Some(3)]),
        _ => None,
    }
}

const RANKS: &str = "2 ([len, head_dim]), 3 ([heads, len, head_dim]) and 4 ([batch, heads, len, head_dim]) are served";

pub(crate) fn canonical(tensor: &'static str, form: &TensorForm, layout: Layout) -> Result<TensorSpec<4>> {
    let TensorForm { dtype, shape, strides, alignment, .. } = form;
    let order = canonical_order(shape.len(), layout).ok_or(Error::Rank {
        tensor,
        got: shape.len(),
        shape: *shape,
        allowed: RANKS,
    })?;
    Ok(TensorSpec {
        dtype: *dtype,
        shape: order.map(|d| d.map_or(1, |d| shape[d])),
        strides: order.map(|d| d.map_or(0, |d| strides[d])),
        alignment: *alignment,
    })
}

/// The canonical `[batch, heads, len, x]` sizes as the doors order them, dropping the dimensions that `rank` lacks.
fn as_given(sizes: [usize; 4], rank: usize, layout: Layout) -> Shape {
    let mut given = [0; 4];
    for (size, d) in sizes.iter().zip(canonical_order(rank, layout).expect("the rank of q was accepted")) {
        if let Some(d) = d {
            given[d] = *size;
        }
    }
    Shape::new(&given[..rank]).expect("at most four dimensions")
}

fn expect_size(
    tensor: &'static str,
    size: &'static str,
    got: usize,
    other: &'static str,
    expected: usize,
) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::SizeMismatch { tensor, size, got, other, expected }) }
}

/// Whether a bias, a vector per head or an output may have this dtype: a float not wider than the accumulation dtype.
fn is_float_within(dtype: DType, accumulation: DType) -> bool {
    dtype.is_computed() && dtype.bits() <= accumulation.bits()
}

fn floats_within(accumulation: DType) -> Vec<DType> {
    COMPUTED.iter().copied().filter(|&dtype| is_float_within(dtype, accumulation)).collect()
}

fn per_head(tensor: &'static str, seen: &TensorForm, num_q_heads: usize, accumulation: DType) -> Result<TensorSpec<1>> {
    if !is_float_within(seen.dtype, accumulation) {
        let allowed = floats_within(accumulation);
        return Err(Error::UnsupportedDtype { tensor, got: seen.dtype, allowed });
    }
    let expected = Shape::from([num_q_heads]);
    if seen.shape != expected {
        return Err(Error::ShapeMismatch { tensor, got: seen.shape, expected });
    }
    TensorSpec::of(seen).ok_or(Error::ShapeMismatch { tensor, got: seen.shape, expected })
}

impl SpecBuilder {
    /// With a boolean (True = attend) or additive mask.
    #[must_use]
    pub fn mask(mut self, mask: Option<impl Into<TensorForm>>) -> Self {
        self.mask = mask.map(Into::into);
        self
    }

    /// With one more logit per head, `[num_q_heads]`.
    #[must_use]
    pub fn sinks(mut self, sinks: Option<impl Into<TensorForm>>) -> Self {
        self.sinks = sinks.map(Into::into);
        self
    }

    /// With ALiBi slopes, `[num_q_heads]`.
    #[must_use]
    pub fn alibi_slopes(mut self, slopes: Option<impl Into<TensorForm>>) -> Self {
        self.alibi_slopes = slopes.map(Into::into);
        self
    }

    /// With an output of this form, in the layout of the options. Without this call the output is row-major in that layout.
    #[must_use]
    pub fn out(mut self, out: impl Into<TensorForm>) -> Self {
        self.out = Some(out.into());
        self
    }

    /// With lse, row-major `[batch, num_q_heads, q_len]` (less the dimensions that `q` lacks).
    #[must_use]
    pub fn return_lse(mut self, yes: bool) -> Self {
        self.lse = if yes { Lse::Contiguous } else { Lse::None };
        self
    }

    /// With lse of this form, `[batch, num_q_heads, q_len]` whatever the layout.
    #[must_use]
    pub fn lse(mut self, lse: impl Into<TensorForm>) -> Self {
        self.lse = Lse::Given(lse.into());
        self
    }

    /// Checks everything that needs no pointer.
    ///
    /// # Errors
    /// Any [`Error`] of kind dtype, shape, option or device.
    pub fn build(self) -> Result<Spec> {
        let SpecBuilder { q: q_seen, k: k_seen, v: v_seen, options, .. } = &self;
        for (tensor, seen) in [("k", k_seen), ("v", v_seen)] {
            if seen.dtype != q_seen.dtype {
                return Err(Error::DtypeMismatch { tensor, expected: q_seen.dtype, got: seen.dtype });
            }
        }
        let storage = q_seen.dtype;
        if !storage.is_computed() {
            return Err(Error::UnsupportedDtype { tensor: "q", got: storage, allowed: COMPUTED.to_vec() });
        }
        let accumulation = storage.accumulation();
        let rank = q_seen.shape.len();
        let layout = options.layout;
        let to_4d = |tensor, seen: &TensorForm| canonical(tensor, seen, layout);
        let (q, k, v) = (to_4d("q", q_seen)?, to_4d("k", k_seen)?, to_4d("v", v_seen)?);
        for (tensor, seen) in [("k", k_seen), ("v", v_seen)] {
            if seen.shape.len() != rank {
                return Err(Error::Rank {
                    tensor,
                    got: seen.shape.len(),
                    shape: seen.shape,
                    allowed: "q, k and v have one rank",
                });
            }
        }
        let [batch, num_q_heads, q_len, head_dim] = q.shape;
        let [_, num_kv_heads, kv_len, _] = k.shape;
        let head_dim_v = v.shape[3];
        expect_size("k", "batch", k.shape[0], "q", batch)?;
        expect_size("v", "batch", v.shape[0], "q", batch)?;
        expect_size("v", "num_kv_heads", v.shape[1], "k", num_kv_heads)?;
        expect_size("v", "kv_len", v.shape[2], "k", kv_len)?;
        expect_size("k", "head_dim", k.shape[3], "q", head_dim)?;
        for (tensor, seen, dim) in [("q", q_seen, head_dim), ("v", v_seen, head_dim_v)] {
            if dim == 0 {
                return Err(Error::ZeroHeadDim { tensor, shape: seen.shape });
            }
        }
        if num_q_heads != num_kv_heads && (num_kv_heads == 0 || num_q_heads % num_kv_heads != 0) {
            return Err(Error::HeadGroups { num_q_heads, num_kv_heads });
        }
        // Lengths stay below 2^62 and head_dim below 2^32, so that positions fit i64 and the size of a tile usize.
        let limits = [
            (q_seen, "q", q_len, 62),
            (k_seen, "k", kv_len, 62),
            (q_seen, "q", head_dim, 32),
            (v_seen, "v", head_dim_v, 32),
        ];
        for (seen, tensor, size, bits) in limits {
            if size as u64 >= 1 << bits {
                return Err(Error::Overflow { tensor, shape: seen.shape, strides: seen.strides });
            }
        }

        let mask = self.mask.as_ref().map(|seen| {
            if seen.dtype != DType::Bool && !is_float_within(seen.dtype, accumulation) {
                let allowed = [vec![DType::Bool], floats_within(accumulation)].concat();
                return Err(Error::UnsupportedDtype { tensor: "mask", got: seen.dtype, allowed });
            }
            broadcast_mask(seen, [batch, num_q_heads, q_len, kv_len])
        });
        let mask = mask.transpose()?;
        let vector = |tensor, seen: &Option<TensorForm>| {
            seen.as_ref().map(|seen| per_head(tensor, seen, num_q_heads, accumulation)).transpose()
        };
        let (sinks, alibi_slopes) = (vector("sinks", &self.sinks)?, vector("alibi_slopes", &self.alibi_slopes)?);

        let softmax_scale = match options.softmax_scale {
            Some(scale) => Finite::new("scale", scale)?,
            None => Finite::new("scale", 1.0 / (head_dim as f64).sqrt())?,
        };
        let softcap = match options.softcap {
            Some(cap) if cap.is_finite() && cap > 0.0 => Some(Finite::new("softcap", cap)?),
            Some(cap) => {
                let allowed = "None, or a finite number greater than 0".into();
                return Err(Error::Option { option: "softcap", got: cap.to_string(), allowed });
            }
            None => None,
        };

        let device = q_seen.device;
        let others = [("k", Some(k_seen)), ("v", Some(v_seen)), ("mask", self.mask.as_ref())];
        let vectors = [("sinks", self.sinks.as_ref()), ("alibi_slopes", self.alibi_slopes.as_ref())];
        let outs = [
            ("out", self.out.map(|out| out.device)),
            ("lse", if let Lse::Given(lse) = self.lse { Some(lse.device) } else { None }),
        ];
        let inputs = others.iter().chain(&vectors).map(|(tensor, seen)| (*tensor, seen.map(|seen| seen.device)));
        for (tensor, got) in inputs.chain(outs) {
            if let Some(got) = got.filter(|got| *got != device) {
                return Err(Error::DeviceMismatch { tensor, expected: device, got });
            }
        }

        let out_sizes = [batch, num_q_heads, q_len, head_dim_v];
        let out_shape = as_given(out_sizes, rank, layout);
        let out_dtype = options.out_dtype.unwrap_or(storage);
        if !is_float_within(out_dtype, accumulation) {
            let allowed = floats_within(accumulation);
            return Err(Error::UnsupportedDtype { tensor: "out", got: out_dtype, allowed });
        }
        // Every output element has an address of its own, so their number bounds all arithmetic on lengths of rows.
        let bytes = out_shape.numel().and_then(|n| isize::try_from(n.checked_mul(out_dtype.size_bytes())?).ok());
        if bytes.is_none() {
            return Err(Error::Overflow { tensor: "out", shape: out_shape, strides: Strides::from([]) });
        }
        let out = match self.out {
            Some(out) => {
                if out.shape != out_shape {
                    return Err(Error::ShapeMismatch { tensor: "out", got: out.shape, expected: out_shape });
                }
                if out.dtype != out_dtype {
                    return Err(Error::OtherDtype { tensor: "out", expected: out_dtype, got: out.dtype });
                }
                canonical("out", &out, layout)?
            }
            None => {
                let strides = out_shape.contiguous().ok_or(Error::Overflow {
                    tensor: "out",
                    shape: out_shape,
                    strides: Strides::from([]),
                })?;
                canonical("out", &TensorForm::new(out_dtype, out_shape, strides, device), layout)?
            }
        };
        let lse_shape = Shape::new(&[batch, num_q_heads, q_len][4 - rank..]).expect("at most three dimensions");
        let lse = match self.lse {
            Lse::None => None,
            Lse::Contiguous => {
                let strides = lse_shape.contiguous().ok_or(Error::Overflow {
                    tensor: "lse",
                    shape: lse_shape,
                    strides: Strides::from([]),
                })?;
                TensorSpec::of(&TensorForm::new(accumulation, lse_shape, strides, device))
            }
            Lse::Given(lse) => {
                if lse.shape != lse_shape {
                    return Err(Error::ShapeMismatch { tensor: "lse", got: lse.shape, expected: lse_shape });
                }
                if lse.dtype != accumulation {
                    return Err(Error::OtherDtype { tensor: "lse", expected: accumulation, got: lse.dtype });
                }
                TensorSpec::of(&lse)
            }
        };

        Ok(Spec {
            direction: Direction::Forward,
            kv: Kv::Dense,
            numerics: Numerics { storage, accumulation },
            device,
            q,
            k,
            v,
            out,
            lse,
            mask,
            sinks,
            alibi_slopes,
            softmax_scale,
            softcap,
            causal: options.causal,
            window: options.window,
            layout,
        })
    }
}

pub(crate) fn broadcast_mask(seen: &TensorForm, target: [usize; 4]) -> Result<MaskSpec> {
    let mismatch = || Error::MaskShape { got: seen.shape, expected: Shape::from(target) };
    let missing = target.len().checked_sub(seen.shape.len()).ok_or_else(mismatch)?;
    let mut strides = [0isize; 4];
    for (d, (&n, &stride)) in seen.shape.iter().zip(seen.strides.iter()).enumerate() {
        match (n, target[missing + d]) {
            (n, wanted) if n == wanted => strides[missing + d] = if n == 1 { 0 } else { stride },
            (1, _) => {}
            _ => return Err(mismatch()),
        }
    }
    Ok(TensorSpec { dtype: seen.dtype, shape: target, strides, alignment: seen.alignment })
}

impl Spec {
    /// Whether the relations that the builder proves still hold.
    pub(crate) fn is_coherent(&self) -> bool {
        let Spec { q, k, v, out, .. } = self;
        let [batch, num_q_heads, q_len, head_dim] = q.shape;
        let [_, num_kv_heads, kv_len, _] = k.shape;
        let head_dim_v = v.shape[3];
        let Numerics { storage, accumulation, .. } = self.numerics;
        let dtypes = [q, k, v].iter().all(|tensor| tensor.dtype == storage)
            && storage.is_computed()
            && accumulation == storage.accumulation()
            && is_float_within(out.dtype, accumulation);
        let groups = num_q_heads == num_kv_heads || (num_kv_heads > 0 && num_q_heads.is_multiple_of(num_kv_heads));
        let sizes = k.shape == [batch, num_kv_heads, kv_len, head_dim]
            && v.shape == [batch, num_kv_heads, kv_len, head_dim_v]
            && out.shape == [batch, num_q_heads, q_len, head_dim_v]
            && (1..1 << 32).contains(&(head_dim as u64))
            && (1..1 << 32).contains(&(head_dim_v as u64))
            && (q_len.max(kv_len) as u64) < 1 << 62;
        let lse = self.lse.is_none_or(|lse| lse.dtype == accumulation && lse.shape == out.shape[..3]);
        let mask = self.mask.is_none_or(|mask| {
            mask.shape == [batch, num_q_heads, q_len, kv_len]
                && (mask.dtype == DType::Bool || is_float_within(mask.dtype, accumulation))
        });
        let vectors = [&self.sinks, &self.alibi_slopes]
            .into_iter()
            .flatten()
            .all(|vector| vector.shape == [num_q_heads] && is_float_within(vector.dtype, accumulation));
        dtypes && groups && sizes && lse && mask && vectors
    }

    /// Starts a spec from the three inputs: views, or forms of tensors that are nowhere yet.
    #[must_use]
    pub fn builder(
        q: impl Into<TensorForm>,
        k: impl Into<TensorForm>,
        v: impl Into<TensorForm>,
        options: &Options,
    ) -> SpecBuilder {
        SpecBuilder {
            q: q.into(),
            k: k.into(),
            v: v.into(),
            mask: None,
            sinks: None,
            alibi_slopes: None,
            out: None,
            lse: Lse::None,
            options: *options,
        }
    }

    /// Problems that share nothing.
    #[must_use]
    pub fn batch(&self) -> usize {
        self.q.shape[0]
    }
    /// Heads of q.
    #[must_use]
    pub fn num_q_heads(&self) -> usize {
        self.q.shape[1]
    }
    /// Heads of k and v.
    #[must_use]
    pub fn num_kv_heads(&self) -> usize {
        self.k.shape[1]
    }
    /// Query heads per head of k and v; 1 if there are none.
    #[must_use]
    pub fn group_size(&self) -> usize {
        self.num_q_heads().checked_div(self.num_kv_heads()).unwrap_or(1).max(1)
    }
    /// Queries per head.
    #[must_use]
    pub fn q_len(&self) -> usize {
        self.q.shape[2]
    }
    /// Keys per head.
    #[must_use]
    pub fn kv_len(&self) -> usize {
        self.k.shape[2]
    }
    /// The size of a query and a key.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.q.shape[3]
    }
    /// The size of a value.
    #[must_use]
    pub fn head_dim_v(&self) -> usize {
        self.v.shape[3]
    }

    /// Which keys each query may see by position.
    #[must_use]
    pub fn block_range(&self) -> BlockRange {
        BlockRange::new(self.q_len(), self.kv_len(), self.causal, self.window)
    }

    /// Query-key pairs that causal and window leave, over the whole problem.
    #[must_use]
    pub fn pairs(&self) -> u64 {
        (self.batch() as u64)
            .saturating_mul(self.num_q_heads() as u64)
            .saturating_mul(self.block_range().pairs(self.q_len()))
    }

    /// The shape of `out` as the doors order it, for inputs of `rank` dimensions.
    #[must_use]
    pub fn out_shape(&self, rank: usize) -> Shape {
        as_given(self.out.shape, rank, self.layout)
    }

    /// The shape of `lse` for inputs of `rank` dimensions.
    #[must_use]
    pub fn lse_shape(&self, rank: usize) -> Shape {
        Shape::new(&self.out.shape[4 - rank..3]).expect("at most three dimensions")
    }
}
