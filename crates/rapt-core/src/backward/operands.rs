//! The tensors of one backward run, checked against the spec they were planned for.
//!
//! Invariants of [`BackwardOperands`] are those of [`Operands`](crate::Operands): planned dtypes, sizes and strides; every gradient that is written names
//! every address once and shares no byte with any other operand.

use super::BackwardSpec;
use crate::operands::{check_dropout, check_offsets, compare, prove_disjoint, prove_injective};
use crate::spec::{TensorSpec, broadcast_mask, canonical};
use crate::{DropoutSeed, Error, Result, TensorForm, View, ViewMut};

/// The tensors of one backward run, as they were given.
#[derive(Debug)]
pub struct BackwardTensors<'a> {
    /// Queries.
    pub q: View<'a>,
    /// Keys.
    pub k: View<'a>,
    /// Values.
    pub v: View<'a>,
    /// Boolean or additive mask.
    pub mask: Option<View<'a>>,
    /// One more logit per head.
    pub sinks: Option<View<'a>>,
    /// ALiBi slopes.
    pub alibi_slopes: Option<View<'a>>,
    /// Where sequences begin that lie one after another: `cu_seqlens_q` and `cu_seqlens_kv`.
    pub offsets: Option<[View<'a>; 2]>,
    /// Which weights the forward call dropped, where it dropped some.
    pub dropout: Option<DropoutSeed>,
    /// What the forward call wrote.
    pub out: View<'a>,
    /// What the forward call wrote.
    pub lse: View<'a>,
    /// The gradient by out.
    pub d_o: View<'a>,
    /// The gradient by lse; none is 0.
    pub d_lse: Option<View<'a>>,
    /// Where the gradient by q goes, if it is asked for.
    pub dq: Option<ViewMut<'a>>,
    /// Where the gradient by k goes, if it is asked for.
    pub dk: Option<ViewMut<'a>>,
    /// Where the gradient by v goes, if it is asked for.
    pub dv: Option<ViewMut<'a>>,
    /// Where the gradient by the mask goes, if it is asked for.
    pub d_mask: Option<ViewMut<'a>>,
    /// Where the gradient by the sinks goes, if it is asked for.
    pub d_sinks: Option<ViewMut<'a>>,
}

impl<'a> BackwardTensors<'a> {
    /// Attention without mask, sinks and slopes, of which nothing is asked for;
    /// `BackwardTensors { dq, ..BackwardTensors::new([q, k, v], out, lse, d_o) }` asks for dq.
    #[must_use]
    pub fn new([q, k, v]: [View<'a>; 3], out: View<'a>, lse: View<'a>, d_o: View<'a>) -> Self {
        let (mask, sinks, alibi_slopes, offsets, dropout, d_lse) = (None, None, None, None, None, None);
        let (dq, dk, dv, d_mask, d_sinks) = (None, None, None, None, None);
        BackwardTensors {
            q,
            k,
            v,
            mask,
            sinks,
            alibi_slopes,
            offsets,
            dropout,
            out,
            lse,
            d_o,
            d_lse,
            dq,
            dk,
            dv,
            d_mask,
            d_sinks,
        }
    }

    /// Every tensor that is read, with its name.
    pub fn inputs(&self) -> impl Iterator<Item = (&'static str, &View<'a>)> {
        let all = [
            ("q", Some(&self.q)),
            ("k", Some(&self.k)),
            ("v", Some(&self.v)),
            ("mask", self.mask.as_ref()),
            ("sinks", self.sinks.as_ref()),
            ("alibi_slopes", self.alibi_slopes.as_ref()),
            ("cu_seqlens_q", self.offsets.as_ref().map(|offsets| &offsets[0])),
            ("cu_seqlens_kv", self.offsets.as_ref().map(|offsets| &offsets[1])),
            ("out", Some(&self.out)),
            ("lse", Some(&self.lse)),
            ("d_o", Some(&self.d_o)),
            ("d_lse", self.d_lse.as_ref()),
        ];
        all.into_iter().filter_map(|(name, view)| Some((name, view?)))
    }

    /// Every tensor that is written, with its name.
    pub fn outputs(&self) -> impl Iterator<Item = (&'static str, &ViewMut<'a>)> {
        let all = [
            ("dq", self.dq.as_ref()),
            ("dk", self.dk.as_ref()),
            ("dv", self.dv.as_ref()),
            ("d_mask", self.d_mask.as_ref()),
            ("d_sinks", self.d_sinks.as_ref()),
        ];
        all.into_iter().filter_map(|(name, view)| Some((name, view?)))
    }
}

/// [`BackwardTensors`] that were proven to be those of a [`BackwardSpec`].
#[derive(Debug)]
pub struct BackwardOperands<'a> {
    tensors: BackwardTensors<'a>,
    spec: &'a BackwardSpec,
}

/// Whether a tensor is there exactly where it was planned, and as it was.
fn compare_optional<const N: usize>(
    tensor: &'static str,
    form: Option<TensorForm>,
    planned: Option<&TensorSpec<N>>,
) -> Result<()> {
    match (form, planned) {
        (Some(form), Some(planned)) => {
            let got = TensorSpec::of(&form).ok_or(Error::NotAsPlanned { tensor, what: "shape" })?;
            compare(tensor, &got, planned)
        }
        (None, None) => Ok(()),
        _ => Err(Error::NotAsPlanned { tensor, what: "presence" }),
    }
}

impl<'a> BackwardOperands<'a> {
    /// Proves that `tensors` are those of `spec`.
    ///
    /// # Errors
    /// As [`Operands::check`](crate::Operands::check).
    pub fn check(tensors: BackwardTensors<'a>, spec: &'a BackwardSpec) -> Result<Self> {
        let forward = spec.forward();
        if !forward.is_coherent() {
            return Err(Error::NotAsPlanned { tensor: "spec", what: "a field that was changed after it was built" });
        }
        check_dropout(tensors.dropout, forward)?;
        check_offsets(tensors.offsets.as_ref(), forward)?;
        let planned = [
            ("q", Some(TensorForm::from(&tensors.q)), Some(&forward.q)),
            ("k", Some((&tensors.k).into()), Some(&forward.k)),
            ("v", Some((&tensors.v).into()), Some(&forward.v)),
            ("out", Some((&tensors.out).into()), Some(&forward.out)),
            ("d_o", Some((&tensors.d_o).into()), Some(spec.d_o())),
            ("dq", tensors.dq.as_ref().map(Into::into), spec.dq()),
            ("dk", tensors.dk.as_ref().map(Into::into), spec.dk()),
            ("dv", tensors.dv.as_ref().map(Into::into), spec.dv()),
        ];
        for (tensor, form, planned) in planned {
            match (form, planned) {
                (Some(form), Some(planned)) => compare(tensor, &canonical(tensor, &form, forward.layout)?, planned)?,
                (None, None) => {}
                _ => return Err(Error::NotAsPlanned { tensor, what: "presence" }),
            }
        }
        match (&tensors.mask, &forward.mask) {
            (Some(mask), Some(planned)) => compare("mask", &broadcast_mask(&mask.into(), planned.shape)?, planned)?,
            (None, None) => {}
            _ => return Err(Error::NotAsPlanned { tensor: "mask", what: "presence" }),
        }
        let form = |view: &Option<View<'_>>| view.as_ref().map(TensorForm::from);
        compare_optional("sinks", form(&tensors.sinks), forward.sinks.as_ref())?;
        compare_optional("alibi_slopes", form(&tensors.alibi_slopes), forward.alibi_slopes.as_ref())?;
        compare_optional("lse", Some((&tensors.lse).into()), Some(spec.lse()))?;
        compare_optional("d_lse", form(&tensors.d_lse), spec.d_lse())?;
        compare_optional("d_mask", tensors.d_mask.as_ref().map(Into::into), spec.d_mask())?;
        compare_optional("d_sinks", tensors.d_sinks.as_ref().map(Into::into), spec.d_sinks())?;
        let devices = tensors.inputs().map(|(tensor, view)| (tensor, view.device()));
        for (tensor, device) in devices.chain(tensors.outputs().map(|(tensor, view)| (tensor, view.device()))) {
            if device != forward.device {
                return Err(Error::NotAsPlanned { tensor, what: "device" });
            }
        }
        let outputs: Vec<_> = tensors.outputs().collect();
        for (n, (tensor, out)) in outputs.iter().enumerate() {
            prove_injective(tensor, out)?;
            tensors.inputs().try_for_each(|(other, view)| prove_disjoint(tensor, out, other, view).map(drop))?;
            for (other, earlier) in &outputs[..n] {
                prove_disjoint(tensor, out, other, &earlier.as_view())?;
            }
        }
        Ok(BackwardOperands { tensors, spec })
    }

    /// Whether these operands were proven against `spec`: what a backend asks before it trusts them.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`] if they were proven against another spec.
    pub fn expect(&self, spec: &BackwardSpec) -> Result<()> {
        let same = std::ptr::eq(self.spec, spec) || self.spec == spec;
        if same { Ok(()) } else { Err(Error::NotAsPlanned { tensor: "operands", what: "spec" }) }
    }

    /// The proven tensors. They cannot be exchanged for others.
    #[must_use]
    pub fn tensors(&self) -> &BackwardTensors<'a> {
        &self.tensors
    }

    /// Where dq, dk, dv, d_mask and d_sinks are written, each if it is asked for.
    pub fn gradient_ptrs(&mut self) -> [Option<*mut u8>; 5] {
        let BackwardTensors { dq, dk, dv, d_mask, d_sinks, .. } = &mut self.tensors;
        [dq, dk, dv, d_mask, d_sinks].map(|view| view.as_mut().map(ViewMut::as_mut_ptr))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BackwardSpec, DType, Device, GradientForms, Options, Shape, Spec};

    const SHAPE: [usize; 3] = [1, 2, 2];

    fn form(dtype: DType, shape: &[usize]) -> TensorForm {
        let shape = Shape::new(shape).unwrap();
        TensorForm::new(dtype, shape, shape.contiguous().unwrap(), Device::Cpu)
    }

    fn forward(mask: Option<TensorForm>, return_lse: bool) -> Spec {
        let x = form(DType::F32, &SHAPE);
        Spec::builder(x, x, x, &Options::default()).mask(mask).return_lse(return_lse).build().unwrap()
    }

    #[test]
    fn a_gradient_that_is_not_like_its_input_is_refused_by_its_name() {
        let (x, plain) = (form(DType::F32, &SHAPE), GradientForms::new(form(DType::F32, &SHAPE)));
        let refused = |forward: Spec, forms: GradientForms| BackwardSpec::new(forward, &forms).unwrap_err();
        let other = form(DType::F16, &SHAPE);
        let of_dk = refused(forward(None, true), GradientForms { dk: Some(other), ..plain });
        assert_eq!(of_dk, Error::OtherDtype { tensor: "dk", expected: DType::F32, got: DType::F16 });
        let short = form(DType::F32, &[1, 2, 1]);
        let of_dq = refused(forward(None, true), GradientForms { dq: Some(short), ..plain });
        assert!(matches!(of_dq, Error::ShapeMismatch { tensor: "dq", .. }), "{of_dq}");
        let of_d_lse = refused(forward(None, true), GradientForms { d_lse: Some(x), ..plain });
        assert!(matches!(of_d_lse, Error::ShapeMismatch { tensor: "d_lse", .. }), "{of_d_lse}");
        assert!(matches!(refused(forward(None, false), plain), Error::Unsupported { .. }), "no lse");
        let mask = form(DType::F32, &[2, 2]);
        let asked = GradientForms { d_mask: Some(mask), ..plain };
        assert!(matches!(refused(forward(None, true), asked), Error::Unsupported { .. }), "no mask");
        let of_bool = refused(forward(Some(form(DType::Bool, &[2, 2])), true), asked);
        assert!(matches!(of_bool, Error::UnsupportedDtype { tensor: "mask", .. }), "{of_bool}");
        let of_row = GradientForms { d_mask: Some(form(DType::F32, &[1, 2])), ..plain };
        let of_row = refused(forward(Some(mask), true), of_row);
        assert!(matches!(of_row, Error::ShapeMismatch { tensor: "d_mask", .. }), "{of_row}");
        let of_sinks = refused(forward(None, true), GradientForms { d_sinks: Some(form(DType::F32, &[1])), ..plain });
        assert!(matches!(of_sinks, Error::Unsupported { .. }), "{of_sinks}");
        assert!(BackwardSpec::new(forward(Some(mask), true), &asked).is_ok());
    }

    /// A gradient may be wider than its input, and one over what a stride of 0 broadcasts: heads of q only where each is a group of its own.
    #[test]
    fn a_gradient_may_be_a_sum_over_what_is_broadcast() {
        let full = form(DType::F16, &[3, 2, 5, 4]);
        let broadcast = |d: usize| {
            let mut strides = full.strides.to_vec();
            strides[d] = 0;
            TensorForm { strides: crate::Strides::new(&strides).unwrap(), ..full }
        };
        let spec = |q, k, forms: GradientForms| {
            let mut builder = Spec::builder(q, k, k, &Options::default());
            BackwardSpec::new(builder.return_lse(true).build().unwrap(), &forms)
        };
        let of = |dtype, batch, heads| Some(form(dtype, &[batch, heads, 5, 4]));
        let plain = GradientForms::new(full);
        let of_k = |dk| spec(full, broadcast(0), GradientForms { dk, ..plain });
        assert!(of_k(of(DType::F16, 1, 2)).is_ok() && of_k(of(DType::F32, 3, 2)).is_ok());
        let apart = of_k(of(DType::F16, 3, 1)).unwrap_err();
        assert!(matches!(apart, Error::ShapeMismatch { tensor: "dk", .. }), "{apart}");
        assert!(matches!(of_k(of(DType::F64, 3, 2)), Err(Error::OtherDtype { tensor: "dk", .. })));
        let of_q = |k| spec(broadcast(1), k, GradientForms { dq: of(DType::F16, 3, 1), ..plain });
        assert!(of_q(full).is_ok());
        assert!(matches!(of_q(form(DType::F16, &[3, 1, 5, 4])), Err(Error::ShapeMismatch { tensor: "dq", .. })));
        let sums = of_k(of(DType::F16, 1, 2)).unwrap();
        assert!(matches!(sums.refuse_sums("it"), Err(Error::Unsupported { .. })));
        assert!(of_k(of(DType::F16, 3, 2)).unwrap().refuse_sums("it").is_ok());
    }

    #[test]
    fn gradients_share_no_byte_with_another_operand_nor_with_one_another() {
        let (x, lse, mut memory) = ([0f32; 4], [0f32; 2], [0f32; 8]);
        let view = |name| View::contiguous(name, &x, SHAPE.into()).unwrap();
        let address = memory.as_mut_ptr();
        // SAFETY: nobody reads or writes what they name.
        let part = |name, at: usize| unsafe {
            let (shape, extent) = (Shape::from(SHAPE), crate::Extent::Declared);
            let ptr = address.wrapping_add(at).cast();
            ViewMut::from_raw_parts(name, ptr, DType::F32, shape, shape.contiguous().unwrap(), Device::Cpu, extent)
                .unwrap()
        };
        let x = form(DType::F32, &SHAPE);
        let forms = GradientForms { dq: Some(x), dv: Some(x), ..GradientForms::new(x) };
        let spec = BackwardSpec::new(forward(None, true), &forms).unwrap();
        let tensors = |dq, dv, d_o| {
            let lse = View::contiguous("lse", &lse, [1, 2].into()).unwrap();
            let inputs = [view("q"), view("k"), view("v")];
            BackwardTensors { dq: Some(dq), dv: Some(dv), ..BackwardTensors::new(inputs, view("out"), lse, d_o) }
        };
        let check = |tensors| BackwardOperands::check(tensors, &spec).map(drop);
        assert_eq!(check(tensors(part("dq", 0), part("dv", 4), view("d_o"))), Ok(()));
        let shared = check(tensors(part("dq", 0), part("dv", 3), view("d_o")));
        assert_eq!(shared, Err(Error::OutputOverlaps { tensor: "dv", other: "dq" }));
        let read = part("d_o", 2);
        let shared = check(tensors(part("dq", 0), part("dv", 4), read.as_view()));
        assert_eq!(shared, Err(Error::OutputOverlaps { tensor: "dq", other: "d_o" }));
        let missing = BackwardTensors { dv: None, ..tensors(part("dq", 0), part("dv", 4), view("d_o")) };
        assert_eq!(check(missing), Err(Error::NotAsPlanned { tensor: "dv", what: "presence" }));
    }
}
