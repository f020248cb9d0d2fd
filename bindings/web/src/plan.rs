//! What a request takes: which bytes are copied, and on a GPU what is bound and dispatched.

use std::collections::BTreeMap;

use rapt_core::{Copied, Device, LaunchPlan, Operands, Plan, Shape, Spec, TensorForm, Tensors};
use rapt_shader::{
    BINDINGS, BoundRange, BoundWindow, KernelVariant, Place, Places, ShaderLaunch, check_places, variants,
};
use serde::Serialize;

use crate::refusal::Refusal;
use crate::request::{DeviceLimits, Given, Request};

/// Bytes of an `ArrayBuffer` that are copied.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Span {
    pub(crate) tensor: &'static str,
    /// The first, from the begin of the `ArrayBuffer`.
    pub(crate) begin_bytes: usize,
    pub(crate) len_bytes: usize,
    /// Where element 0 lies in the copy, in elements.
    pub(crate) offset: usize,
}

/// An output, in the order of q's dimensions.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Output {
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    /// As they were given; of an output that was not, row-major.
    pub(crate) strides: Vec<isize>,
    /// Of a row-major copy.
    pub(crate) len_bytes: usize,
}

/// A kernel's pipeline: its name, its entry point, and its bindings as index, tensor, whether it is written.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Pipeline {
    pub(crate) name: String,
    pub(crate) entry: &'static str,
    pub(crate) bindings: Vec<(u32, &'static str, bool)>,
}

/// A dispatch of each kernel.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Dispatches {
    /// What is bound of each tensor: offset and length in bytes.
    pub(crate) ranges: BTreeMap<&'static str, (u64, u64)>,
    pub(crate) params: Vec<u32>,
    pub(crate) groups: [(u32, u32); 2],
}

/// What a GPU does.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct OnGpu {
    pub(crate) kernels: Vec<Pipeline>,
    pub(crate) windows: Vec<Dispatches>,
    pub(crate) workspace_bytes: usize,
}

/// The answer to a request that is served.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Answer {
    /// The plan in words.
    pub(crate) rows: Vec<(&'static str, String)>,
    pub(crate) kernel: &'static str,
    pub(crate) bytes_copied: usize,
    pub(crate) flops: f64,
    /// Of inputs in host memory.
    pub(crate) copies: Vec<Span>,
    pub(crate) out: Output,
    pub(crate) lse: Option<Output>,
    pub(crate) gpu: Option<OnGpu>,
}

/// A spec of `request`; with out and lse as `tensors` have them.
pub(crate) fn spec_of(request: &Request, tensors: &Tensors<'_>) -> Result<Spec, Refusal> {
    let Tensors { q, k, v, mask, sinks, alibi_slopes, out, lse, .. } = tensors;
    let mut builder = Spec::builder(q, k, v, &request.options()?);
    builder.mask(mask.as_ref()).sinks(sinks.as_ref()).alibi_slopes(alibi_slopes.as_ref()).out(out);
    lse.as_ref().map(|lse| builder.lse(lse));
    Ok(builder.build()?)
}

/// A spec of `request` with row-major out and lse.
fn spec_of_forms(request: &Request, device: Device) -> Result<Spec, Refusal> {
    let form = |name: &'static str, given: &Given| -> Result<TensorForm, Refusal> {
        Ok(TensorForm::new(given.dtype(name)?, given.shape(name)?, given.strides(name)?, device))
    };
    let optional = |name, given: &Option<Given>| given.as_ref().map(|given| form(name, given)).transpose();
    let Request { q, k, v, mask, sinks, alibi_slopes, .. } = request;
    let mut builder = Spec::builder(form("q", q)?, form("k", k)?, form("v", v)?, &request.options()?);
    builder
        .mask(optional("mask", mask)?)
        .sinks(optional("sinks", sinks)?)
        .alibi_slopes(optional("alibi_slopes", alibi_slopes)?)
        .return_lse(request.has_lse());
    Ok(builder.build()?)
}

/// The bytes of each input that are copied.
fn spans(request: &Request, tensors: &Tensors<'_>) -> Vec<Span> {
    let given = |tensor| request.given().find(|(name, _)| *name == tensor).map(|(_, given)| given);
    let span = |(tensor, view): (&'static str, &rapt_core::View<'_>)| {
        let (given, (lo, hi)) = (given(tensor)?, view.reach_bytes());
        let size = view.dtype().size_bytes();
        let first = given.begin_bytes + given.offset * size;
        // An empty tensor may be said to lie anywhere.
        let begin_bytes = if lo == hi { given.begin_bytes } else { first.wrapping_add_signed(lo) };
        Some(Span { tensor, begin_bytes, len_bytes: hi.abs_diff(lo), offset: lo.unsigned_abs() / size })
    };
    tensors.inputs().filter_map(span).collect()
}

fn output(given: &Given, shape: &Shape, dtype: rapt_core::DType) -> Output {
    let len_bytes = shape.numel().unwrap_or(0) * dtype.size_bytes();
    let row_major = || shape.contiguous().map(|strides| strides.to_vec()).unwrap_or_default();
    let strides = given.strides.clone().unwrap_or_else(row_major);
    Output { dtype: dtype.name(), shape: shape.to_vec(), strides, len_bytes }
}

/// Where tensors lie on a GPU: in the caller's buffers.
fn given_places(whole: &Request) -> Result<Places, Refusal> {
    let mut places = [None; 8];
    for (name, given) in whole.given() {
        let size = given.dtype(name)?.size_bytes();
        places[place_of(name)] = Some(Place {
            buffer: given.buffer,
            buffer_bytes: (given.begin_bytes + given.len_bytes) as u64,
            offset_bytes: (given.begin_bytes + given.offset * size) as u64,
            is_storage: given.is_storage,
        });
    }
    Ok(places)
}

/// Where tensors lie on a GPU: each copied to a buffer of its own, of whole words.
fn copied_places(spec: &Spec, spans: &[Span], outputs: [Option<&Output>; 2]) -> Places {
    let place = |buffer: usize, len_bytes: usize, offset_bytes: usize| Place {
        buffer,
        buffer_bytes: len_bytes.next_multiple_of(4).max(4) as u64,
        offset_bytes: offset_bytes as u64,
        is_storage: true,
    };
    let mut places = [None; 8];
    for Span { tensor, len_bytes, offset, .. } in spans {
        let at = place_of(tensor);
        let size = match *tensor {
            "mask" => spec.mask.map_or(1, |mask| mask.dtype.size_bytes()),
            "sinks" => spec.sinks.map_or(4, |sinks| sinks.dtype.size_bytes()),
            "alibi_slopes" => spec.alibi_slopes.map_or(4, |slopes| slopes.dtype.size_bytes()),
            _ => spec.q.dtype.size_bytes(),
        };
        places[at] = Some(place(at, *len_bytes, offset * size));
    }
    for (name, output) in ["out", "lse"].into_iter().zip(outputs) {
        let at = place_of(name);
        places[at] = output.map(|output| place(at, output.len_bytes, 0));
    }
    places
}

/// The place of a tensor among [`BINDINGS`], where slopes go by a shorter name.
fn place_of(tensor: &str) -> usize {
    let name = if tensor == "alibi_slopes" { "alibi" } else { tensor };
    BINDINGS.iter().position(|binding| binding.tensor == name).unwrap_or_default()
}

/// The dispatches of `plan` on tensors at `places`.
fn on_gpu(plan: &Plan, places: &Places, limits: &DeviceLimits) -> Result<OnGpu, Refusal> {
    let launch = plan.launch_plan::<ShaderLaunch>()?;
    if launch.variant.is_some() {
        check_places(places)?;
    }
    let pipeline = |variant: &KernelVariant| Pipeline {
        name: variant.to_string(),
        entry: variant.entry(),
        bindings: variant.bindings().iter().map(|of| (of.index, of.tensor, of.is_output)).collect(),
    };
    let alignment = u64::from(limits.offset_alignment);
    let dispatches = |BoundWindow { ranges, params, groups, .. }: BoundWindow| {
        let named = BINDINGS.iter().zip(ranges).filter_map(|(binding, range)| Some((binding.tensor, range?)));
        let ranges =
            named.map(|(tensor, BoundRange { offset_bytes, size_bytes })| (tensor, (offset_bytes, size_bytes)));
        let words = params.bytes();
        let params = words.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
        Dispatches { ranges: ranges.collect(), params: params.collect(), groups }
    };
    let window = |window| Ok(dispatches(launch.bound(plan.spec(), window, places, alignment, limits.max_groups)?));
    Ok(OnGpu {
        kernels: launch.variant.iter().chain(&launch.combine).map(pipeline).collect(),
        windows: launch.windows.iter().map(window).collect::<Result<_, Refusal>>()?,
        workspace_bytes: launch.workspace_bytes(),
    })
}

/// Plans `request`, whose tensors are checked: nothing of them is read.
pub(crate) fn plan(request: &Request) -> Result<Answer, Refusal> {
    let device = if request.gpu.is_some() { Device::WebGpu } else { Device::Cpu };
    let packed = spec_of_forms(request, device)?;
    let whole = request.with_outputs(&packed);
    // SAFETY: no backend runs on these views, and a check of dense tensors reads no element.
    let tensors = unsafe { whole.views(device) }?;
    let given = spec_of(&whole, &tensors)?;
    let proven = Operands::check(tensors, &given)?;
    let spans = if request.in_buffers { Vec::new() } else { spans(&whole, proven.tensors()) };
    drop(proven);
    let rank = request.q.shape.len();
    let out = whole.out.as_ref().map(|out| output(out, &packed.out_shape(rank), packed.out.dtype));
    let out = out.ok_or_else(|| Refusal::of_protocol(&"out is missing"))?;
    let lse = whole.lse.as_ref().zip(packed.lse).map(|(lse, of)| output(lse, &packed.lse_shape(rank), of.dtype));
    let (plan, gpu) = match &request.gpu {
        None => (rapt_cpu::select(&packed, &rapt_cpu::detect(1)?)?, None),
        Some(limits) if request.in_buffers => {
            let plan = rapt_shader::select(&given, &limits.caps())?;
            let gpu = on_gpu(&plan, &given_places(&whole)?, limits)?;
            (plan, Some(gpu))
        }
        Some(limits) => {
            let plan = rapt_shader::select(&packed, &limits.caps())?;
            let gpu = on_gpu(&plan, &copied_places(&packed, &spans, [Some(&out), lse.as_ref()]), limits)?;
            (plan, Some(gpu))
        }
    };
    let copied: usize = spans.iter().map(|span| span.len_bytes).sum();
    let plan = match request.in_buffers {
        true => plan,
        false => {
            let bytes = copied + out.len_bytes + lse.as_ref().map_or(0, |lse| lse.len_bytes);
            let place = if gpu.is_some() { "the GPU" } else { "WebAssembly's memory" };
            Copied::plan(given, plan, place.to_owned(), bytes)
        }
    };
    Ok(Answer {
        rows: plan.explain().rows(),
        kernel: plan.key().kernel.name(),
        bytes_copied: plan.cost().bytes_copied,
        flops: plan.cost().flops,
        copies: spans,
        out,
        lse,
        gpu,
    })
}

/// The text of the kernel of this name.
pub(crate) fn source(name: &str) -> Result<String, Refusal> {
    let found = variants().into_iter().find(|variant| variant.to_string() == name);
    found.map(|variant| variant.source()).ok_or_else(|| Refusal::of_protocol(&format!("no kernel is called {name:?}")))
}
