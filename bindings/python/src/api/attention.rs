//! `attention`, `explain` and `run_into`: read the tensors, build the spec, run, hand back.
//!
//! What stands in place of q, k or v as a `rapt.Quantized` is opened first; from there on its codes are the tensor.

use std::cell::Cell;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use rapt::{Codes, Device, ErrorKind, Operands, Options, Qkv, Spec, SpecBuilder, Tensors, View, ViewMut};

use crate::api::codes::{Opened, codes_of};
use crate::api::options;
use crate::api::plan::PyPlan;
use crate::api::tolerance::{self, Asked};
use crate::engine::Home;
use crate::errors::hints;
use crate::errors::{Failure, Wording, guard};
use crate::kind::Kind;
use crate::tensors::Export;
use crate::tensors::StreamContext;
use crate::tensors::{self, Operand, torch};
use crate::torch::dropout;
use crate::torch::node::node;

type Object<'a, 'py> = &'a Bound<'py, PyAny>;

/// The types that hold the arguments of `rapt.attention`, written from the table.
macro_rules! arguments {
    (
        all: [$($name:ident: $_default:literal, $_stub:literal, $_schema:literal;)*],
        tensors: [$($tensor:ident,)*],
        parts: [$($part:ident,)*],
        options: [$($option:ident: $field:ident by $parse:ident,)*]
    ) => {
        /// The arguments of `rapt.attention`, as they were given.
        #[derive(Clone, Copy)]
        pub(crate) struct Request<'a, 'py> {
            pub(crate) q: Object<'a, 'py>,
            pub(crate) k: Object<'a, 'py>,
            pub(crate) v: Object<'a, 'py>,
            $(pub(crate) $name: Option<Object<'a, 'py>>,)*
            pub(crate) out: Option<Object<'a, 'py>>,
            pub(crate) out_dtype: Option<Object<'a, 'py>>,
            pub(crate) return_lse: Option<Object<'a, 'py>>,
            pub(crate) tolerance: Option<Object<'a, 'py>>,
            pub(crate) device: Option<Object<'a, 'py>>,
        }

        impl<'a, 'py> Request<'a, 'py> {
            /// Every tensor of the caller's under its name.
            pub(super) fn named(&self) -> impl Iterator<Item = (&'static str, Object<'a, 'py>)> + use<'a, 'py> {
                let optional =
                    [$((stringify!($tensor), self.$tensor),)* $((stringify!($part), self.$part),)* ("out", self.out)];
                let optional = optional.into_iter().filter_map(|(name, tensor)| Some((name, tensor?)));
                [("q", self.q), ("k", self.k), ("v", self.v)].into_iter().chain(optional)
            }

            /// What is given beside q, k and v.
            fn keywords(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
                let keywords = PyDict::new(py);
                let given = [
                    $((stringify!($name), self.$name),)*
                    ("out", self.out),
                    ("out_dtype", self.out_dtype),
                    ("return_lse", self.return_lse),
                    ("tolerance", self.tolerance),
                    ("device", self.device),
                ];
                for (name, given) in given {
                    if let Some(given) = given {
                        keywords.set_item(name, given)?;
                    }
                }
                Ok(keywords)
            }

            /// Whether something is given that makes numbers of codes.
            pub(crate) fn has_parts(&self) -> bool {
                [$(self.$part),*].iter().any(Option::is_some)
            }

            pub(super) fn options(&self) -> Result<Options, Failure> {
                let out_dtype = options::dtype("out_dtype", self.out_dtype)?;
                Ok(Options { $($field: options::$parse(stringify!($option), self.$option)?,)* out_dtype, dropout_p: 0.0 })
            }
        }

        /// The tensors that are read.
        pub(super) struct Inputs {
            pub(super) q: Operand,
            pub(super) k: Operand,
            pub(super) v: Operand,
            $(pub(super) $tensor: Option<Operand>,)*
            parts: Option<Box<Parts>>,
        }

        /// What stands beside those of q, k and v that are codes.
        struct Parts {
            $($part: Option<Operand>,)*
        }

        /// [`Inputs`] after rapt-core looked at each.
        pub(super) struct Views<'a> {
            pub(super) q: View<'a>,
            pub(super) k: View<'a>,
            pub(super) v: View<'a>,
            codes: Qkv<Option<Box<Codes<'a>>>>,
            $(pub(super) $tensor: Option<View<'a>>,)*
        }

        impl Inputs {
            pub(super) fn read(request: &Request<'_, '_>, kind: Kind) -> Result<Self, Failure> {
                let read = |name: &'static str, object: &Bound<'_, PyAny>| tensors::read(name, object, kind, request.q);
                let maybe = |name, object: Option<Object<'_, '_>>| object.map(|object| read(name, object)).transpose();
                Ok(Inputs {
                    q: read("q", request.q)?,
                    k: read("k", request.k)?,
                    v: read("v", request.v)?,
                    $($tensor: maybe(stringify!($tensor), request.$tensor)?,)*
                    parts: if [$(request.$part),*].iter().any(Option::is_some) {
                        Some(Box::new(Parts { $($part: maybe(stringify!($part), request.$part)?,)* }))
                    } else {
                        None
                    },
                })
            }

            /// What keeps them alive beside their objects.
            pub(super) fn exports(self) -> impl Iterator<Item = Export> {
                let Inputs { q, k, v, $($tensor,)* parts } = self;
                let held = |operand: Option<Operand>| operand.and_then(|operand| operand._hold);
                let of_parts = parts.map(|parts| [$(held(parts.$part)),*]);
                let of_tensors = [q._hold, k._hold, v._hold, $(held($tensor)),*];
                of_tensors.into_iter().chain(of_parts.into_iter().flatten()).flatten()
            }

            pub(super) fn views(&self, opened: &Qkv<Option<Opened<'_>>>) -> Result<Views<'_>, Failure> {
                Ok(Views {
                    codes: self.codes(opened)?,
                    q: self.q.view()?,
                    k: self.k.view()?,
                    v: self.v.view()?,
                    $($tensor: self.$tensor.as_ref().map(Operand::view).transpose()?,)*
                })
            }
        }

        impl<'a> Views<'a> {
            fn builder(&self, options: &Options) -> SpecBuilder {
                let mut builder = Spec::builder(&self.q, &self.k, &self.v, options);
                builder.codes(self.codes.as_deref())$(.$tensor(self.$tensor.as_ref()))*;
                builder
            }

            /// With the outputs: everything that a run reads and writes.
            fn tensors(self, out: ViewMut<'a>, lse: Option<ViewMut<'a>>) -> Tensors<'a> {
                Tensors { page_table: None, lengths: None, offsets: None, dropout: None, q: self.q, k: self.k, v: self.v, codes: self.codes, $($tensor: self.$tensor,)* out, lse }
            }
        }
    };
}
attention_options!(arguments);

impl<'a, 'py> Request<'a, 'py> {
    /// What stands here as a `rapt.Quantized`.
    pub(super) fn opened(&self) -> Result<Qkv<Option<Opened<'py>>>, Failure> {
        Ok(Qkv {
            q: Opened::of(self.q, [("q_descale", self.q_descale), ("q_zero_point", self.q_zero_point)])?,
            k: Opened::of(self.k, [("k_descale", self.k_descale), ("k_zero_point", self.k_zero_point)])?,
            v: Opened::of(self.v, [("v_descale", self.v_descale), ("v_zero_point", self.v_zero_point)])?,
        })
    }

    /// The same request on the tensors of what was opened.
    pub(super) fn on<'b>(self, opened: &'b Qkv<Option<Opened<'py>>>) -> Request<'b, 'py>
    where
        'a: 'b,
    {
        let mut request: Request<'b, 'py> = self;
        if let Some(q) = &opened.q {
            (request.q, request.q_descale, request.q_zero_point) = (&q.codes, Some(&q.scale), q.zero_point.as_ref());
        }
        if let Some(k) = &opened.k {
            (request.k, request.k_descale, request.k_zero_point) = (&k.codes, Some(&k.scale), k.zero_point.as_ref());
        }
        if let Some(v) = &opened.v {
            (request.v, request.v_descale, request.v_zero_point) = (&v.codes, Some(&v.scale), v.zero_point.as_ref());
        }
        request
    }
}

impl Inputs {
    /// What makes numbers of those of q, k and v that are codes.
    fn codes(&self, opened: &Qkv<Option<Opened<'_>>>) -> Result<Qkv<Option<Box<Codes<'_>>>>, Failure> {
        let Some(parts) = &self.parts else { return Ok(Qkv::default()) };
        Ok(Qkv {
            q: codes_of(&self.q, parts.q_descale.as_ref(), parts.q_zero_point.as_ref(), opened.q.as_ref())?,
            k: codes_of(&self.k, parts.k_descale.as_ref(), parts.k_zero_point.as_ref(), opened.k.as_ref())?,
            v: codes_of(&self.v, parts.v_descale.as_ref(), parts.v_zero_point.as_ref(), opened.v.as_ref())?,
        })
    }
}

impl Views<'_> {
    pub(super) fn spec(&self, options: &Options, out: Option<&Operand>, lse: Lse<'_>) -> rapt::Result<Spec> {
        let mut builder = self.builder(options);
        if let Some(out) = out {
            builder.out(out.form());
        }
        match lse {
            Lse::No => &mut builder,
            Lse::New => builder.return_lse(true),
            Lse::Given(lse) => builder.lse(lse.form()),
        }
        .build()
    }
}

/// Whether lse is written, and where.
#[derive(Clone, Copy)]
pub(super) enum Lse<'a> {
    No,
    New,
    Given(&'a Operand),
}

/// The options, and whether lse is asked for.
pub(crate) fn parse(request: &Request<'_, '_>) -> Result<(Options, bool), Failure> {
    let return_lse = request.return_lse.map_or(Ok(false), |given| options::flag("return_lse", given))?;
    Ok((request.options()?, return_lse))
}

/// The kind of the call, remembered for how its errors are told.
pub(super) fn kind_for(wording: &Cell<Wording>, q: Object<'_, '_>) -> Result<Kind, Failure> {
    let kind = tensors::source_kind(q)?;
    wording.set(Wording { kind, ..wording.get() });
    Ok(kind)
}

fn read_out(request: &Request<'_, '_>, kind: Kind) -> Result<Option<Operand>, Failure> {
    let read = |out| {
        let out = tensors::read("out", out, kind, request.q)?;
        if out.writable { Ok(out) } else { Err(rapt::Error::ReadOnly { tensor: "out" }.into()) }
    };
    request.out.map(read).transpose()
}

/// `rapt.attention` on `home`.
pub(crate) fn attend<'py>(py: Python<'py>, home: &Home, request: &Request<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    let wording = Cell::new(Wording { names: &hints::ATTENTION, kind: Kind::Numpy });
    guard(py, &wording, || {
        let opened = request.opened()?;
        let (whole, request) = (request, &request.on(&opened));
        let kind = kind_for(&wording, request.q)?;
        let (options, return_lse) = parse(request)?;
        let inputs = Inputs::read(request, kind)?;
        if kind == Kind::Torch
            && let Some(name) = torch::asks_gradient(py, request.named())?
        {
            return match (home, inputs.q.device) {
                (Home::Default, Device::Cpu | Device::Cuda(_)) => {
                    Ok(node(py, "attention")?.call((whole.q, whole.k, whole.v), Some(&whole.keywords(py)?))?)
                }
                _ => Err(torch::needs_gradient(name)),
            };
        }
        let views = inputs.views(&opened)?;
        let given = read_out(request, kind)?;
        let spec = views.spec(&options, given.as_ref(), if return_lse { Lse::New } else { Lse::No })?;
        let mut asked = Asked::read(request.tolerance, &opened, kind, request.q)?;
        if let Some(asked) = &asked {
            asked.serves(spec.device)?;
            if kind == Kind::Torch {
                torch::refuse_gradients(py, asked.originals())?;
            }
        }
        // What is not served is refused before memory is asked for.
        let home = &home.on(py, options::device("device", request.device)?, spec.device)?;
        let planned = home.plan(py, kind, &spec)?;
        asked.as_mut().map_or(Ok(()), |asked| asked.place(py, spec.device, kind, request.q))?;
        let rank = inputs.q.shape.len();
        let (mut out_product, mut out) = match given {
            Some(out) => (None, out),
            None => {
                let (dtype, shape) = (spec.out.dtype, spec.out_shape(rank));
                let (product, out) = tensors::allocate("out", kind, request.q, spec.device, dtype, shape)?;
                (Some(product), out)
            }
        };
        let mut lse = match &spec.lse {
            Some(lse) => Some(tensors::allocate("lse", kind, request.q, spec.device, lse.dtype, spec.lse_shape(rank))?),
            None => None,
        };
        let tensors = views.tensors(out.view_mut()?, lse.as_mut().map(|(_, lse)| lse.view_mut()).transpose()?);
        let context = StreamContext::of(kind, request.q)?;
        let enqueued = match &asked {
            None => planned.run(py, tensors, &context)?,
            Some(asked) => {
                let (done, enqueued) = planned.run_within(py, tensors, &options, &asked.tolerance()?, &context)?;
                tolerance::count(&done);
                done.map(|_| enqueued)?
            }
        };
        tolerance::count_compute(options.compute);
        let originals = asked.iter().flat_map(Asked::originals);
        let used = request.named().chain(originals).map(|(_, tensor)| tensor);
        context.hold(py, enqueued, used, inputs.exports().chain(out._hold))?;
        let out = match (out_product.take(), request.out) {
            (Some(product), _) => product.finish(py)?,
            (None, Some(given)) => given.clone(),
            (None, None) => {
                return Err(Failure::binding(ErrorKind::Unsupported, "no output was made", ""));
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
    let wording = Cell::new(Wording { names: &hints::ATTENTION, kind: Kind::Numpy });
    guard(py, &wording, || {
        let opened = request.opened()?;
        let request = &request.on(&opened);
        let kind = kind_for(&wording, request.q)?;
        let (options, return_lse) = parse(request)?;
        let inputs = Inputs::read(request, kind)?;
        let views = inputs.views(&opened)?;
        let given = read_out(request, kind)?;
        let spec = views.spec(&options, given.as_ref(), if return_lse { Lse::New } else { Lse::No })?;
        let mut asked = Asked::read(request.tolerance, &opened, kind, request.q)?;
        asked.as_ref().map_or(Ok(()), |asked| asked.serves(spec.device))?;
        let home = &home.on(py, options::device("device", request.device)?, spec.device)?;
        let planned = home.plan(py, kind, &spec)?;
        asked.as_mut().map_or(Ok(()), |asked| asked.place(py, spec.device, kind, request.q))?;
        let rank = inputs.q.shape.len();
        // The outputs that `attention` would make, so that the certificate is about operands that exist. Where memory for
        // them cannot be had there is none.
        let (mut out_product, mut lse_product) = (None, None);
        let mut out = match given {
            Some(out) => Some(out),
            None => {
                let (dtype, shape) = (spec.out.dtype, spec.out_shape(rank));
                made(&mut out_product, tensors::reserve("out", kind, request.q, spec.device, dtype, shape))
            }
        };
        let lse_spec = spec.lse.as_ref();
        let mut lse = lse_spec.and_then(|lse| {
            let shape = spec.lse_shape(rank);
            made(&mut lse_product, tensors::reserve("lse", kind, request.q, spec.device, lse.dtype, shape))
        });
        let (mut certificate, mut judgement) = (None, None);
        if let Some(out) = &mut out
            && lse.is_some() == lse_spec.is_some()
        {
            let tensors = views.tensors(out.view_mut()?, lse.as_mut().map(Operand::view_mut).transpose()?);
            let operands = Operands::check(tensors, planned.plan.spec())?;
            certificate = Some(planned.plan.certificate(&operands)?);
            if let Some(asked) = &asked {
                let context = StreamContext::of(kind, request.q)?;
                let (tensors, tolerance) = (operands.into_tensors(), asked.tolerance()?);
                judgement = Some(planned.judge(py, tensors, &options, &tolerance, &context)?);
            }
        }
        Ok(PyPlan::new(planned.plan, certificate, judgement))
    })
}

/// The operand of a tensor that was made, whose owner goes to `hold`.
fn made<'py>(
    hold: &mut Option<tensors::Product<'py>>,
    made: Result<(tensors::Product<'py>, Operand), Failure>,
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
    dropout: dropout::Stated<'_>,
) -> PyResult<()> {
    let wording = Cell::new(Wording { names: &hints::ATTENTION, kind: Kind::Numpy });
    guard(py, &wording, || {
        let opened = request.opened()?;
        let request = &request.on(&opened);
        let kind = kind_for(&wording, request.q)?;
        let options = request.options()?;
        let inputs = Inputs::read(request, kind)?;
        let views = inputs.views(&opened)?;
        let Some(mut out) = read_out(request, kind)? else {
            return Err(Failure::binding(ErrorKind::Kind, "out is None", "a tensor to write"));
        };
        let mut lse = lse_given.map(|lse| tensors::read("lse", lse, kind, request.q)).transpose()?;
        // The caller chose the dtype of out: it need not be that of q.
        let (dropout_p, dropout) = dropout::read(dropout)?;
        let options = Options { out_dtype: Some(out.dtype), dropout_p, ..options };
        let spec = views.spec(&options, Some(&out), lse.as_ref().map_or(Lse::No, Lse::Given))?;
        let tensors = views.tensors(out.view_mut()?, lse.as_mut().map(Operand::view_mut).transpose()?);
        let tensors = Tensors { dropout, ..tensors };
        let context = StreamContext::of(kind, request.q)?;
        let enqueued = home.plan(py, kind, &spec)?.run(py, tensors, &context)?;
        tolerance::count_compute(options.compute);
        let exports = inputs.exports().chain(out._hold).chain(lse.and_then(|lse| lse._hold));
        context.hold(py, enqueued, request.named().map(|(_, tensor)| tensor).chain(lse_given), exports)
    })
}
