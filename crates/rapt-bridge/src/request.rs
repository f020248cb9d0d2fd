//! A spec as what crosses, and back: `spec_of(request_of(spec)) == spec`.

use rapt_core::{
    Causal, Compute, DType, Device, Error, Finite, Options, Result, Shape, Spec, Strides, TensorForm, TensorLayout,
    TensorSpec, Window,
};

use crate::abi::{ABSENT, Request, Tensor};

const NONE: Tensor = Tensor { rank: ABSENT, dtype: 0, shape: [0; 4], strides: [0; 4] };

fn tensor<const N: usize>(of: &TensorSpec<N>) -> Tensor {
    let mut tensor = Tensor { rank: N as u32, dtype: u32::from(of.dtype.code()), ..NONE };
    for d in 0..N {
        (tensor.shape[d], tensor.strides[d]) = (of.shape[d] as u64, of.strides[d] as i64);
    }
    tensor
}

/// In the order of dimensions in which the caller gave it.
fn as_given(of: &TensorSpec<4>, layout: TensorLayout) -> Tensor {
    let mut tensor = tensor(of);
    if layout == TensorLayout::Bshd {
        tensor.shape.swap(1, 2);
        tensor.strides.swap(1, 2);
    }
    tensor
}

/// What crosses of `spec`.
///
/// # Errors
/// [`Error::Unsupported`] for what is not dense numbers in host memory.
pub(crate) fn request_of(spec: &Spec, device: Device) -> Result<Request> {
    spec.refuse_dropout(device)?;
    let others = [
        (spec.device != Device::Cpu, "memory of a device"),
        (spec.compute != Compute::Exact, "products of int8 (compute)"),
        (spec.is_quantized(), "q, k or v that are codes"),
        (spec.pages.is_some(), "keys in pages"),
        (spec.lengths.is_some() || spec.varlen.is_some(), "sequences with lengths of their own"),
    ];
    if let Some((_, what)) = others.into_iter().find(|(is, _)| *is) {
        let instead = "call `attention` for each sequence, on numbers in host memory";
        return Err(Error::unsupported(format!("{what} on {device}"), "no kernel there reads them", instead));
    }
    let optional = |of: Option<&TensorSpec<1>>| of.map_or(NONE, tensor);
    let sides = [spec.window.left, spec.window.right];
    Ok(Request {
        q: as_given(&spec.q, spec.layout),
        k: as_given(&spec.k, spec.layout),
        v: as_given(&spec.v, spec.layout),
        out: as_given(&spec.out, spec.layout),
        lse: spec.lse.as_ref().map_or(NONE, tensor),
        mask: spec.mask.as_ref().map_or(NONE, tensor),
        sinks: optional(spec.sinks.as_ref()),
        alibi_slopes: optional(spec.alibi_slopes.as_ref()),
        softmax_scale: spec.softmax_scale.get(),
        softcap: spec.softcap.map_or(f64::NAN, Finite::get),
        window: sides.map(|side| side.unwrap_or(0) as u64),
        is_bounded: sides.map(|side| u32::from(side.is_some())),
        causal: match spec.causal {
            None => 0,
            Some(Causal::TopLeft) => 1,
            Some(Causal::BottomRight) => 2,
        },
        layout: match spec.layout {
            TensorLayout::Bhsd => 0,
            TensorLayout::Bshd => 1,
        },
    })
}

/// A number that is none of its field's.
fn wrong(field: &'static str) -> Error {
    Error::NotAsPlanned { tensor: field, what: "what the other library wrote" }
}

impl Tensor {
    /// The tensor's form, if it is there.
    pub(crate) fn form(&self, name: &'static str) -> Result<Option<TensorForm>> {
        if self.rank == ABSENT {
            return Ok(None);
        }
        let rank = usize::try_from(self.rank).ok().filter(|rank| *rank <= 4).ok_or_else(|| wrong(name))?;
        let code = u8::try_from(self.dtype).map_err(|_| wrong(name))?;
        let (mut shape, mut strides) = ([0usize; 4], [0isize; 4]);
        for d in 0..rank {
            shape[d] = usize::try_from(self.shape[d]).map_err(|_| wrong(name))?;
            strides[d] = isize::try_from(self.strides[d]).map_err(|_| wrong(name))?;
        }
        let (shape, strides) = (Shape::new(&shape[..rank]), Strides::new(&strides[..rank]));
        let (shape, strides) = shape.zip(strides).ok_or_else(|| wrong(name))?;
        Ok(Some(TensorForm::new(DType::from_code(code)?, shape, strides, Device::Cpu)))
    }
}

/// The spec that `request` stands for, checked as any other is.
///
/// # Errors
/// [`Error::NotAsPlanned`] for a number that is none of its field's; any that building a spec has.
pub(crate) fn spec_of(request: &Request) -> Result<Spec> {
    let needed = |name, tensor: &Tensor| tensor.form(name)?.ok_or_else(|| wrong(name));
    let side = |at: usize| -> Result<Option<usize>> {
        let n = usize::try_from(request.window[at]).map_err(|_| wrong("window"))?;
        Ok((request.is_bounded[at] != 0).then_some(n))
    };
    let out = needed("out", &request.out)?;
    let options = Options {
        softmax_scale: Some(request.softmax_scale),
        softcap: (!request.softcap.is_nan()).then_some(request.softcap),
        causal: match request.causal {
            0 => None,
            1 => Some(Causal::TopLeft),
            2 => Some(Causal::BottomRight),
            _ => return Err(wrong("causal")),
        },
        window: Window { left: side(0)?, right: side(1)? },
        layout: match request.layout {
            0 => TensorLayout::Bhsd,
            1 => TensorLayout::Bshd,
            _ => return Err(wrong("layout")),
        },
        out_dtype: Some(out.dtype),
        compute: Compute::Exact,
        dropout_p: 0.0,
    };
    let (q, k, v) = (needed("q", &request.q)?, needed("k", &request.k)?, needed("v", &request.v)?);
    let mut builder = Spec::builder(q, k, v, &options);
    builder
        .mask(request.mask.form("mask")?)
        .sinks(request.sinks.form("sinks")?)
        .alibi_slopes(request.alibi_slopes.form("alibi_slopes")?)
        .out(out);
    if let Some(lse) = request.lse.form("lse")? {
        builder.lse(lse);
    }
    builder.build()
}
