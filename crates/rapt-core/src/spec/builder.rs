//! From the forms of a caller's tensors and its options to a [`Spec`].

use super::validate::{as_given, broadcast_mask, canonical, check_sizes, floats_within, is_float_within, per_head};
use super::{Direction, Kv, MaskSpec, Numerics, Spec, TensorSpec};
use crate::{COMPUTED, DType, Device, Error, Finite, Options, Result, Shape, Strides, TensorForm};

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

impl SpecBuilder {
    pub(super) fn new(q: TensorForm, k: TensorForm, v: TensorForm, options: Options) -> Self {
        SpecBuilder { q, k, v, mask: None, sinks: None, alibi_slopes: None, out: None, lse: Lse::None, options }
    }

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
        let numerics = self.numerics()?;
        let [q, k, v] = self.inputs()?;
        let [batch, num_q_heads, q_len, head_dim] = q.shape;
        let mask = self.mask_spec([batch, num_q_heads, q_len, k.shape[2]], numerics)?;
        let vector = |tensor, form: &Option<TensorForm>| {
            form.as_ref().map(|form| per_head(tensor, form, num_q_heads, numerics.accumulation)).transpose()
        };
        let (sinks, alibi_slopes) = (vector("sinks", &self.sinks)?, vector("alibi_slopes", &self.alibi_slopes)?);
        let softmax_scale = self.options.softmax_scale.unwrap_or(1.0 / (head_dim as f64).sqrt());
        let softmax_scale = Finite::new("scale", softmax_scale)?;
        let softcap = self.softcap()?;
        let device = self.device()?;
        let out = self.out_spec([batch, num_q_heads, q_len, v.shape[3]], numerics)?;
        let lse = self.lse_spec([batch, num_q_heads, q_len], numerics)?;
        Ok(Spec {
            direction: Direction::Forward,
            kv: Kv::Dense,
            numerics,
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
            causal: self.options.causal,
            window: self.options.window,
            layout: self.options.layout,
        })
    }

    /// One dtype of q, k and v, and what it is summed in.
    fn numerics(&self) -> Result<Numerics> {
        let storage = self.q.dtype;
        for (tensor, form) in [("k", &self.k), ("v", &self.v)] {
            if form.dtype != storage {
                return Err(Error::DtypeMismatch { tensor, expected: storage, got: form.dtype });
            }
        }
        if !storage.is_computed() {
            return Err(Error::UnsupportedDtype { tensor: "q", got: storage, allowed: COMPUTED.to_vec() });
        }
        Ok(Numerics { storage, accumulation: storage.accumulation() })
    }

    /// q, k and v in canonical order.
    fn inputs(&self) -> Result<[TensorSpec<4>; 3]> {
        let SpecBuilder { q, k, v, options, .. } = self;
        let to_4d = |tensor, form| canonical(tensor, form, options.layout);
        let specs = [to_4d("q", q)?, to_4d("k", k)?, to_4d("v", v)?];
        for (tensor, form) in [("k", k), ("v", v)] {
            if form.shape.len() != q.shape.len() {
                return Err(Error::Rank {
                    tensor,
                    got: form.shape.len(),
                    shape: form.shape,
                    allowed: "q, k and v have one rank",
                });
            }
        }
        check_sizes(specs.each_ref(), [q, k, v])?;
        Ok(specs)
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
        ];
        for (tensor, form) in others {
            if let Some(form) = form.filter(|form| form.device != q.device) {
                return Err(Error::DeviceMismatch { tensor, expected: q.device, got: form.device });
            }
        }
        Ok(q.device)
    }

    fn out_spec(&self, sizes: [usize; 4], numerics: Numerics) -> Result<TensorSpec<4>> {
        let layout = self.options.layout;
        let expected = as_given(sizes, self.q.shape.len(), layout);
        let dtype = self.options.out_dtype.unwrap_or(numerics.storage);
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
