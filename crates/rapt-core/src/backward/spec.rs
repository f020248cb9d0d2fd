//! From a forward spec and the forms of gradients to a [`BackwardSpec`].

use crate::spec::{MaskSpec, Spec, TensorSpec, canonical};
use crate::{Compute, DType, Error, Kv, Result, Shape, TensorForm, View};

/// The forms of what arrives and of what leaves, each in the order of dimensions of its tensor.
///
/// A gradient by q, k, v or a mask has its input's dtype, or that of accumulation: a sum that goes on elsewhere is not rounded before. It has its input's
/// sizes, or 1 where that is broadcast by a stride of 0 (of q, k and v: over batch entries and heads) and the gradient is the sum there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientForms {
    /// The gradient by out: its sizes and dtype.
    pub d_o: TensorForm,
    /// The gradient by lse: its sizes and dtype.
    pub d_lse: Option<TensorForm>,
    /// The gradient by q, if it is asked for.
    pub dq: Option<TensorForm>,
    /// The gradient by k, if it is asked for.
    pub dk: Option<TensorForm>,
    /// The gradient by v, if it is asked for.
    pub dv: Option<TensorForm>,
    /// The gradient by an additive mask, if it is asked for.
    pub d_mask: Option<TensorForm>,
    /// The gradient by the sinks, if it is asked for.
    pub d_sinks: Option<TensorForm>,
}

impl GradientForms {
    /// `d_o` arrives and nothing is asked for; `GradientForms { dq, ..GradientForms::new(d_o) }` asks for dq.
    #[must_use]
    pub fn new(d_o: impl Into<TensorForm>) -> Self {
        let (d_lse, dq, dk, dv, d_mask, d_sinks) = (None, None, None, None, None, None);
        GradientForms { d_o: d_o.into(), d_lse, dq, dk, dv, d_mask, d_sinks }
    }
}

impl From<&View<'_>> for GradientForms {
    fn from(d_o: &View<'_>) -> Self {
        GradientForms::new(d_o)
    }
}

/// A checked request for gradients: everything but pointers, in canonical order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BackwardSpec {
    forward: Spec,
    d_o: TensorSpec<4>,
    d_lse: Option<TensorSpec<3>>,
    dq: Option<TensorSpec<4>>,
    dk: Option<TensorSpec<4>>,
    dv: Option<TensorSpec<4>>,
    d_mask: Option<TensorSpec<4>>,
    d_sinks: Option<TensorSpec<1>>,
}

impl BackwardSpec {
    /// The gradients of `forward`, whose `out` and `lse` are what a forward call wrote, of these forms.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for quantized operands, caches, `compute` other than exact, a spec without lse,
    /// and a gradient of what the request does not have; [`Error::UnsupportedDtype`] for the gradient of a boolean mask; any [`Error`] of kind dtype,
    /// shape or device for a gradient that is not like its input.
    pub fn new(forward: Spec, gradients: &GradientForms) -> Result<Self> {
        let GradientForms { d_o, d_lse, dq, dk, dv, d_mask, d_sinks } = gradients;
        served(&forward)?;
        let device = |tensor, form: &TensorForm| match form.device {
            got if got == forward.device => Ok(()),
            got => Err(Error::DeviceMismatch { tensor, expected: forward.device, got }),
        };
        let like = |tensor, form: &TensorForm, of: &TensorSpec<4>, least: [usize; 4]| -> Result<TensorSpec<4>> {
            device(tensor, form)?;
            let got = canonical(tensor, form, forward.layout)?;
            if (0..4).all(|d| got.shape[d] == of.shape[d] || got.shape[d] == least[d]) {
                Ok(got)
            } else {
                Err(Error::ShapeMismatch { tensor, got: form.shape, expected: Shape::from(of.shape) })
            }
        };
        let asked = |tensor, form: &Option<TensorForm>, of: &TensorSpec<4>| {
            let Some(form) = form else { return Ok(None) };
            dtype_or_accumulation(tensor, form, of.dtype)?;
            // Heads of q that share one are heads of one group: their rows are not apart.
            let sums_heads = tensor != "dq" || forward.group_size() == 1;
            let least = std::array::from_fn(|d| match d {
                0 | 1 if of.strides[d] == 0 && (d == 0 || sums_heads) => 1,
                _ => of.shape[d],
            });
            like(tensor, form, of, least).map(Some)
        };
        let d_lse = match (d_lse, &forward.lse) {
            (Some(form), Some(lse)) => {
                device("d_lse", form)?;
                Some(narrow("d_lse", form, lse)?)
            }
            _ => None,
        };
        let d_mask = match (d_mask, &forward.mask) {
            (None, _) => None,
            (Some(_), None) => return Err(absent("d_mask", "a mask")),
            (Some(form), Some(mask)) => {
                device("d_mask", form)?;
                Some(of_mask(form, mask)?)
            }
        };
        let d_sinks = match (d_sinks, &forward.sinks) {
            (None, _) => None,
            (Some(_), None) => return Err(absent("d_sinks", "sinks")),
            (Some(form), Some(sinks)) => {
                device("d_sinks", form)?;
                Some(narrow("d_sinks", form, sinks)?)
            }
        };
        Ok(BackwardSpec {
            d_o: {
                dtype("d_o", d_o, forward.out.dtype)?;
                like("d_o", d_o, &forward.out, forward.out.shape)?
            },
            d_lse,
            dq: asked("dq", dq, &forward.q)?,
            dk: asked("dk", dk, &forward.k)?,
            dv: asked("dv", dv, &forward.v)?,
            d_mask,
            d_sinks,
            forward,
        })
    }

    /// The request whose gradients these are: its `out` and `lse` are read.
    #[must_use]
    pub fn forward(&self) -> &Spec {
        &self.forward
    }

    /// lse, `[batch, num_q_heads, q_len]`.
    #[must_use]
    pub fn lse(&self) -> &TensorSpec<3> {
        self.forward.lse.as_ref().expect("`new` refuses a spec without lse")
    }

    /// The gradient by out, `[batch, num_q_heads, q_len, head_dim_v]`.
    #[must_use]
    pub fn d_o(&self) -> &TensorSpec<4> {
        &self.d_o
    }

    /// The gradient by lse, `[batch, num_q_heads, q_len]`; none is 0.
    #[must_use]
    pub fn d_lse(&self) -> Option<&TensorSpec<3>> {
        self.d_lse.as_ref()
    }

    /// `[batch, num_q_heads, q_len, head_dim]`, if it is asked for; 1 batch entry or head where q is broadcast and it is a sum.
    #[must_use]
    pub fn dq(&self) -> Option<&TensorSpec<4>> {
        self.dq.as_ref()
    }

    /// `[batch, num_kv_heads, kv_len, head_dim]`, likewise.
    #[must_use]
    pub fn dk(&self) -> Option<&TensorSpec<4>> {
        self.dk.as_ref()
    }

    /// `[batch, num_kv_heads, kv_len, head_dim_v]`, likewise.
    #[must_use]
    pub fn dv(&self) -> Option<&TensorSpec<4>> {
        self.dv.as_ref()
    }

    /// If it is asked for: a size of 1 where the mask is broadcast, whose gradient is the sum there.
    #[must_use]
    pub fn d_mask(&self) -> Option<&TensorSpec<4>> {
        self.d_mask.as_ref()
    }

    /// `[num_q_heads]`, if it is asked for.
    #[must_use]
    pub fn d_sinks(&self) -> Option<&TensorSpec<1>> {
        self.d_sinks.as_ref()
    }

    /// That each gradient has its input's dtype, and those by q, k and v its sizes: what a backend asks first whose kernels form no other, which
    /// `place` names.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn refuse_sums(&self, place: impl std::fmt::Display) -> Result<()> {
        let Spec { q, k, v, .. } = &self.forward;
        for (name, gradient, of) in [("dq", &self.dq, q), ("dk", &self.dk, k), ("dv", &self.dv, v)] {
            let Some(gradient) = gradient else { continue };
            if gradient.dtype != of.dtype || gradient.shape != of.shape {
                let what = format!("{name} as {} of sizes {:?} on {place}", gradient.dtype, gradient.shape);
                let why = "its kernels write gradients like their inputs; those of the CPU sum over what is broadcast";
                return Err(Error::unsupported(what, why, format!("ask for {} of {:?}", of.dtype, of.shape)));
            }
        }
        match (&self.d_mask, &self.forward.mask) {
            (Some(d_mask), Some(mask)) if d_mask.dtype != mask.dtype => {
                let what = format!("d_mask as {} on {place}", d_mask.dtype);
                Err(Error::unsupported(
                    what,
                    "its kernels write gradients like their inputs",
                    format!("ask for {}", mask.dtype),
                ))
            }
            _ => Ok(()),
        }
    }
}

/// That `forward` has gradients that somebody computes.
fn served(forward: &Spec) -> Result<()> {
    let refuse = |what: &str, why: &str, instead: &str| {
        Err(Error::unsupported(format!("the backward pass of {what}"), why, instead))
    };
    if forward.is_quantized() {
        return refuse("quantized operands", "codes have no gradient", "dequantize them");
    }
    if forward.compute != Compute::Exact {
        return refuse("an approximation", "it has no gradient", "leave compute at \"exact\"");
    }
    if forward.kv == Kv::Paged || forward.lengths.is_some() {
        return refuse("a cache", "nothing is trained on one", "call it for each sequence");
    }
    if forward.lse.is_none() {
        return refuse(
            "a call without lse",
            "probabilities are recomputed from it",
            "give the lse of the forward call: return_lse=True",
        );
    }
    Ok(())
}

fn absent(gradient: &'static str, what: &str) -> Error {
    Error::unsupported(
        format!("{gradient} of a call without {what}"),
        "there is nothing that it is the gradient of",
        format!("leave {gradient} out"),
    )
}

fn dtype(tensor: &'static str, form: &TensorForm, expected: DType) -> Result<()> {
    if form.dtype == expected { Ok(()) } else { Err(Error::OtherDtype { tensor, expected, got: form.dtype }) }
}

/// The same of a gradient that may be wider than its input.
fn dtype_or_accumulation(tensor: &'static str, form: &TensorForm, expected: DType) -> Result<()> {
    if form.dtype == expected.accumulation() { Ok(()) } else { dtype(tensor, form, expected) }
}

/// A gradient of a tensor of fewer than four dimensions, in its own order.
fn narrow<const N: usize>(tensor: &'static str, form: &TensorForm, of: &TensorSpec<N>) -> Result<TensorSpec<N>> {
    dtype(tensor, form, of.dtype)?;
    let got = TensorSpec::of(form).filter(|got| got.shape == of.shape);
    got.ok_or_else(|| Error::ShapeMismatch {
        tensor,
        got: form.shape,
        expected: Shape::new(&of.shape).unwrap_or(form.shape),
    })
}

/// The gradient of a mask: of the mask's sizes, with 1 where it broadcasts, or all of them there too.
fn of_mask(form: &TensorForm, mask: &MaskSpec) -> Result<TensorSpec<4>> {
    if mask.dtype == DType::Bool {
        let allowed = crate::COMPUTED.to_vec();
        return Err(Error::UnsupportedDtype { tensor: "mask", got: DType::Bool, allowed });
    }
    dtype_or_accumulation("d_mask", form, mask.dtype)?;
    let least: [usize; 4] = std::array::from_fn(|d| if mask.strides[d] == 0 { 1 } else { mask.shape[d] });
    let mismatch = || Error::ShapeMismatch { tensor: "d_mask", got: form.shape, expected: Shape::from(least) };
    let got = TensorSpec::<4>::of(form).ok_or_else(mismatch)?;
    let fits = |d: usize| got.shape[d] == mask.shape[d] || got.shape[d] == least[d];
    if (0..4).all(fits) { Ok(got) } else { Err(mismatch()) }
}
