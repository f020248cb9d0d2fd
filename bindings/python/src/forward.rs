//! `attention`, `explain` and `run_into`: read the tensors, build the spec, run, hand back.

use std::cell::Cell;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rapt::{ErrorKind, Operands, Options, Spec, Tensors, View};

use crate::convert::dlpack::Export;
use crate::convert::lender::Lender;
use crate::convert::{self, Kind, Operand, torch};
use crate::engine::Home;
use crate::errors::{Failure, Telling, guard};
use crate::mend;
use crate::options;
use crate::plan::PyPlan;

type Object<'a, 'py> = &'a Bound<'py, PyAny>;

/// The arguments of `rapt.attention`, as they were given.
pub(crate) struct Request<'a, 'py> {
    pub(crate) q: Object<'a, 'py>,
    pub(crate) k: Object<'a, 'py>,
    pub(crate) v: Object<'a, 'py>,
    pub(crate) mask: Option<Object<'a, 'py>>,
    pub(crate) causal: Option<Object<'a, 'py>>,
    pub(crate) window: Option<Object<'a, 'py>>,
    pub(crate) softcap: Option<Object<'a, 'py>>,
    pub(crate) scale: Option<Object<'a, 'py>>,
    pub(crate) sinks: Option<Object<'a, 'py>>,
    pub(crate) alibi_slopes: Option<Object<'a, 'py>>,
    pub(crate) layout: Option<Object<'a, 'py>>,
    pub(crate) out: Option<Object<'a, 'py>>,
    pub(crate) out_dtype: Option<Object<'a, 'py>>,
    pub(crate) return_lse: Option<Object<'a, 'py>>,
}

impl<'a, 'py> Request<'a, 'py> {
    /// Every tensor of the caller's.
    fn tensors(&self) -> impl Iterator<Item = Object<'a, 'py>> + use<'a, 'py> {
        let optional = [self.mask, self.sinks, self.alibi_slopes, self.out];
        [self.q, self.k, self.v].into_iter().chain(optional.into_iter().flatten())
    }
}

/// The tensors that are read.
struct Inputs {
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Option<Operand>,
    sinks: Option<Operand>,
    alibi_slopes: Option<Operand>,
}

/// [`Inputs`] after rapt-core looked at each.
struct Views<'a> {
    q: View<'a>,
    k: View<'a>,
    v: View<'a>,
    mask: Option<View<'a>>,
    sinks: Option<View<'a>>,
    alibi_slopes: Option<View<'a>>,
}

impl Inputs {
    fn read(request: &Request<'_, '_>, kind: Kind) -> Result<Self, Failure> {
        let read = |name: &'static str, object: &Bound<'_, PyAny>| convert::read(name, object, kind, request.q);
        let optional = |name, object: Option<&Bound<'_, PyAny>>| object.map(|object| read(name, object)).transpose();
        Ok(Inputs {
            q: read("q", request.q)?,
            k: read("k", request.k)?,
            v: read("v", request.v)?,
            mask: optional("mask", request.mask)?,
            sinks: optional("sinks", request.sinks)?,
            alibi_slopes: optional("alibi_slopes", request.alibi_slopes)?,
        })
    }

    /// What keeps them alive beside their objects.
    fn exports(self) -> impl Iterator<Item = Export> {
        let Inputs { q, k, v, mask, sinks, alibi_slopes } = self;
        [Some(q), Some(k), Some(v), mask, sinks, alibi_slopes].into_iter().flatten().filter_map(|operand| operand._hold)
    }

    fn views(&self) -> rapt::Result<Views<'_>> {
        Ok(Views {
            q: self.q.view()?,
            k: self.k.view()?,
            v: self.v.view()?,
            mask: self.mask.as_ref().map(Operand::view).transpose()?,
            sinks: self.sinks.as_ref().map(Operand::view).transpose()?,
            alibi_slopes: self.alibi_slopes.as_ref().map(Operand::view).transpose()?,
        })
    }
}

impl Views<'_> {
    fn spec(&self, options: &Options, out: Option<&Operand>, lse: Lse<'_>) -> rapt::Result<Spec> {
        let mut builder = Spec::builder(&self.q, &self.k, &self.v, options)
            .mask(self.mask.as_ref())
            .sinks(self.sinks.as_ref())
            .alibi_slopes(self.alibi_slopes.as_ref());
        if let Some(out) = out {
            builder = builder.out(out.form());
        }
        builder = match lse {
            Lse::No => builder,
            Lse::New => builder.return_lse(true),
            Lse::Given(lse) => builder.lse(lse.form()),
        };
        builder.build()
    }
}

#[derive(Clone, Copy)]
enum Lse<'a> {
    No,
    New,
    Given(&'a Operand),
}

fn parse(request: &Request<'_, '_>) -> Result<(Options, bool), Failure> {
    let options = options::parse(request.causal, request.window, request.softcap, request.scale, request.layout)?;
    let out_dtype = options::dtype("out_dtype", request.out_dtype)?;
    let return_lse = request.return_lse.map_or(Ok(false), |given| options::flag("return_lse", given))?;
    Ok((Options { out_dtype, ..options }, return_lse))
}

/// The kind of the call, remembered for how its errors are told.
fn kind_for(telling: &Cell<Telling>, q: Object<'_, '_>) -> Result<Kind, Failure> {
    let kind = convert::source_kind(q)?;
    telling.set(Telling { kind, ..telling.get() });
    Ok(kind)
}

fn refuse_gradients(py: Python<'_>, request: &Request<'_, '_>) -> Result<(), Failure> {
    torch::refuse_gradients(
        py,
        &[
            ("q", Some(request.q)),
            ("k", Some(request.k)),
            ("v", Some(request.v)),
            ("mask", request.mask),
            ("sinks", request.sinks),
            ("alibi_slopes", request.alibi_slopes),
            ("out", request.out),
        ],
    )
}

fn read_out(request: &Request<'_, '_>, kind: Kind) -> Result<Option<Operand>, Failure> {
    let read = |out| {
        let out = convert::read("out", out, kind, request.q)?;
        if out.writable { Ok(out) } else { Err(rapt::Error::ReadOnly { tensor: "out" }.into()) }
    };
    request.out.map(read).transpose()
}

/// `rapt.attention` on `home`.
pub(crate) fn attend<'py>(py: Python<'py>, home: &Home, request: &Request<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    let telling = Cell::new(Telling { names: &mend::ATTENTION, kind: Kind::Numpy });
    guard(py, &telling, || {
        let kind = kind_for(&telling, request.q)?;
        let (options, return_lse) = parse(request)?;
        let inputs = Inputs::read(request, kind)?;
        if kind == Kind::Torch {
            refuse_gradients(py, request)?;
        }
        let views = inputs.views()?;
        let given = read_out(request, kind)?;
        let spec = views.spec(&options, given.as_ref(), if return_lse { Lse::New } else { Lse::No })?;
        // What is not served is refused before memory is asked for.
        let planned = home.plan(py, kind, &spec)?;
        let rank = inputs.q.shape.len();
        let (mut out_product, mut out) = match given {
            Some(out) => (None, out),
            None => {
                let (dtype, shape) = (spec.out.dtype, spec.out_shape(rank));
                let (product, out) = convert::allocate("out", kind, request.q, spec.device, dtype, shape)?;
                (Some(product), out)
            }
        };
        let mut lse = match &spec.lse {
            Some(lse) => Some(convert::allocate("lse", kind, request.q, spec.device, lse.dtype, spec.lse_shape(rank))?),
            None => None,
        };
        let tensors = Tensors {
            q: views.q,
            k: views.k,
            v: views.v,
            mask: views.mask,
            sinks: views.sinks,
            alibi_slopes: views.alibi_slopes,
            out: out.view_mut()?,
            lse: lse.as_mut().map(|(_, lse)| lse.view_mut()).transpose()?,
        };
        let lender = Lender::of(kind, request.q)?;
        let enqueued = planned.run(py, tensors, &lender)?;
        lender.hold(py, enqueued, request.tensors(), inputs.exports().chain(out._hold))?;
        let out = match (out_product.take(), request.out) {
            (Some(product), _) => product.finish(py)?,
            (None, Some(given)) => given.clone(),
            (None, None) => {
                return Err(Failure::door(ErrorKind::Unsupported, "no output was made", ""));
            }
        };
        match lse {
            Some((product, operand)) => {
                drop(operand);
                Ok(PyTuple::new(py, [out, product.finish(py)?])?.into_any())
            }
            None => Ok(out),
        }
    })
}

/// `rapt.explain` on `home`.
pub(crate) fn explain(py: Python<'_>, home: &Home, request: &Request<'_, '_>) -> PyResult<PyPlan> {
    let telling = Cell::new(Telling { names: &mend::ATTENTION, kind: Kind::Numpy });
    guard(py, &telling, || {
        let kind = kind_for(&telling, request.q)?;
        let (options, return_lse) = parse(request)?;
        let inputs = Inputs::read(request, kind)?;
        let views = inputs.views()?;
        let given = read_out(request, kind)?;
        let spec = views.spec(&options, given.as_ref(), if return_lse { Lse::New } else { Lse::No })?;
        let planned = home.plan(py, kind, &spec)?;
        let rank = inputs.q.shape.len();
        // The outputs that `attention` would make, so that the certificate is about operands that exist. Where memory for
        // them cannot be had there is none.
        let (mut out_product, mut lse_product) = (None, None);
        let mut out = match given {
            Some(out) => Some(out),
            None => {
                let (dtype, shape) = (spec.out.dtype, spec.out_shape(rank));
                made(&mut out_product, convert::reserve("out", kind, request.q, spec.device, dtype, shape))
            }
        };
        let lse_spec = spec.lse.as_ref();
        let mut lse = lse_spec.and_then(|lse| {
            let shape = spec.lse_shape(rank);
            made(&mut lse_product, convert::reserve("lse", kind, request.q, spec.device, lse.dtype, shape))
        });
        let certificate = match &mut out {
            Some(out) if lse.is_some() == lse_spec.is_some() => {
                let tensors = Tensors {
                    q: views.q,
                    k: views.k,
                    v: views.v,
                    mask: views.mask,
                    sinks: views.sinks,
                    alibi_slopes: views.alibi_slopes,
                    out: out.view_mut()?,
                    lse: lse.as_mut().map(Operand::view_mut).transpose()?,
                };
                Some(planned.plan.certificate(&Operands::check(tensors, planned.plan.spec())?)?)
            }
            _ => None,
        };
        Ok(PyPlan::new(planned.plan, certificate))
    })
}

/// The operand of a tensor that was made, whose owner goes to `hold`.
fn made<'py>(
    hold: &mut Option<convert::Product<'py>>,
    made: Result<(convert::Product<'py>, Operand), Failure>,
) -> Option<Operand> {
    let (product, operand) = made.ok()?;
    *hold = Some(product);
    Some(operand)
}

/// Fills `out` (and `lse`) of any strides; the caller has seen to gradients.
pub(crate) fn fill(
    py: Python<'_>,
    home: &Home,
    request: &Request<'_, '_>,
    lse_given: Option<Object<'_, '_>>,
) -> PyResult<()> {
    let telling = Cell::new(Telling { names: &mend::ATTENTION, kind: Kind::Numpy });
    guard(py, &telling, || {
        let kind = kind_for(&telling, request.q)?;
        let options = options::parse(request.causal, request.window, request.softcap, request.scale, request.layout)?;
        let inputs = Inputs::read(request, kind)?;
        let views = inputs.views()?;
        let Some(mut out) = read_out(request, kind)? else {
            return Err(Failure::door(ErrorKind::Kind, "out is None", "a tensor to write"));
        };
        let mut lse = lse_given.map(|lse| convert::read("lse", lse, kind, request.q)).transpose()?;
        // The caller chose the dtype of out: it need not be that of q.
        let options = Options { out_dtype: Some(out.dtype), ..options };
        let spec = views.spec(&options, Some(&out), lse.as_ref().map_or(Lse::No, Lse::Given))?;
        let tensors = Tensors {
            q: views.q,
            k: views.k,
            v: views.v,
            mask: views.mask,
            sinks: views.sinks,
            alibi_slopes: views.alibi_slopes,
            out: out.view_mut()?,
            lse: lse.as_mut().map(Operand::view_mut).transpose()?,
        };
        let lender = Lender::of(kind, request.q)?;
        let enqueued = home.plan(py, kind, &spec)?.run(py, tensors, &lender)?;
        let exports = inputs.exports().chain(out._hold).chain(lse.and_then(|lse| lse._hold));
        lender.hold(py, enqueued, request.tensors().chain(lse_given), exports)
    })
}
