//! A request as the package's TypeScript writes it, and its tensors as views.
//!
//! ```text
//! planned: address = begin of its array or buffer in a space of addresses of this request's own + byte        nothing is read
//! run:     address = byte of this module's memory                                                              tensors were copied there
//! ```
//! So what leaves its array is refused, and what overlaps is found, by the checks of rapt-core.

use rapt_core::{
    Arch, Causal, DType, Device, Error, Extent, Options, Shape, Spec, Strides, TensorLayout, Tensors, View, ViewMut,
    Window,
};
use rapt_shader::Caps;
use serde::Deserialize;

use crate::refusal::Refusal;

/// A tensor: where element 0 lies is counted in elements from the begin of its array.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Given {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    /// Row-major where there are none.
    pub(crate) strides: Option<Vec<isize>>,
    pub(crate) offset: usize,
    /// The number of its `ArrayBuffer` or `GPUBuffer` among those of the request.
    pub(crate) buffer: usize,
    /// Where its array begins there, or in this module's memory.
    pub(crate) begin_bytes: usize,
    pub(crate) len_bytes: usize,
    /// Whether it is a `GPUBuffer` with usage `STORAGE`.
    #[serde(default)]
    pub(crate) is_storage: bool,
}

/// What a `GPUDevice` has.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct DeviceLimits {
    pub(crate) max_binding_bytes: u64,
    pub(crate) offset_alignment: u32,
    pub(crate) max_groups: usize,
    pub(crate) max_threads: usize,
    pub(crate) max_shared_bytes: usize,
}

impl DeviceLimits {
    pub(crate) fn caps(&self) -> Caps {
        Caps {
            arch: Arch::Wgsl,
            // Extensions of wgpu's that no browser has: these, and cooperative matrices.
            has_16_bit_stores: false,
            has_lanes: false,
            max_binding_bytes: self.max_binding_bytes,
            offset_alignment: self.offset_alignment,
            max_items: self.max_groups.saturating_mul(self.max_groups),
            max_threads: self.max_threads,
            max_shared_bytes: self.max_shared_bytes,
            few_blocks: Caps::WEBGPU.few_blocks,
            matrices: None,
        }
    }
}

/// The options, whose types the package has checked.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct GivenOptions {
    scale: Option<f64>,
    softcap: Option<f64>,
    causal: Option<String>,
    window: [Option<usize>; 2],
    layout: String,
    out_dtype: Option<String>,
    return_lse: bool,
}

/// A request.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Request {
    pub(crate) q: Given,
    pub(crate) k: Given,
    pub(crate) v: Given,
    pub(crate) mask: Option<Given>,
    pub(crate) sinks: Option<Given>,
    pub(crate) alibi_slopes: Option<Given>,
    pub(crate) out: Option<Given>,
    pub(crate) lse: Option<Given>,
    pub(crate) options: GivenOptions,
    /// The GPU that computes; `None` is this module.
    pub(crate) gpu: Option<DeviceLimits>,
    /// Whether the tensors lie in the GPU's buffers.
    #[serde(default)]
    pub(crate) in_buffers: bool,
    /// Whether they were copied to this module's memory.
    #[serde(default)]
    pub(crate) is_copied: bool,
}

/// The dtype of this name.
///
/// # Errors
/// A name that is none.
fn dtype(tensor: &'static str, name: &str) -> Result<DType, Refusal> {
    let unknown = || Error::UnknownDtype { tensor, got: name.to_owned() };
    DType::from_name(name).filter(|dtype| *dtype != DType::Unknown).ok_or_else(|| unknown().into())
}

/// Dtype, sizes, strides, and the address in `space`.
type Parts = (usize, DType, Shape, Strides, Extent);

impl Given {
    pub(crate) fn dtype(&self, name: &'static str) -> Result<DType, Refusal> {
        dtype(name, &self.dtype)
    }

    pub(crate) fn shape(&self, name: &'static str) -> Result<Shape, Refusal> {
        Shape::new(&self.shape).ok_or_else(|| Refusal {
            code: "ShapeError",
            message: format!("{name} has {} dimensions; at most 8 are counted", self.shape.len()),
            hint: format!("`{name}.shape` of 2 to 4 dimensions"),
            tensor: Some(name),
        })
    }

    pub(crate) fn strides(&self, name: &'static str) -> Result<Strides, Refusal> {
        let shape = self.shape(name)?;
        let overflow = || Error::Overflow { tensor: name, shape, strides: Strides::from([]) };
        match &self.strides {
            None => Ok(shape.contiguous().ok_or_else(overflow)?),
            Some(strides) => Ok(Strides::new(strides).ok_or_else(overflow)?),
        }
    }

    fn parts(&self, name: &'static str, base: usize) -> Result<Parts, Refusal> {
        let (dtype, shape, strides) = (self.dtype(name)?, self.shape(name)?, self.strides(name)?);
        let address = base.checked_add(self.begin_bytes);
        let first = self.offset.checked_mul(dtype.size_bytes()).zip(address);
        let first = first.and_then(|(offset, address)| address.checked_add(offset));
        let (Some(address), Some(first)) = (address, first) else {
            return Err(Error::Overflow { tensor: name, shape, strides }.into());
        };
        Ok((first, dtype, shape, strides, Extent::Proven { address, len_bytes: self.len_bytes }))
    }
}

/// Where the arrays of a request begin in its space of addresses: beside one another.
struct Bases(Vec<usize>);

impl Bases {
    fn new(request: &Request) -> Result<Self, Refusal> {
        if request.is_copied {
            return Ok(Bases(Vec::new()));
        }
        let mut ends: Vec<usize> = Vec::new();
        for (_, given) in request.given() {
            ends.resize(ends.len().max(given.buffer + 1), 0);
            ends[given.buffer] = ends[given.buffer].max(given.begin_bytes.saturating_add(given.len_bytes));
        }
        let (mut bases, mut next) = (Vec::with_capacity(ends.len()), 64usize);
        for end in &ends {
            bases.push(next);
            let after = next.checked_add(*end).and_then(|end| end.checked_next_multiple_of(64));
            next = after.filter(|end| isize::try_from(*end).is_ok() || cfg!(target_pointer_width = "32")).ok_or_else(
                || {
                    let bytes: u128 = ends.iter().map(|end| *end as u128).sum();
                    let why = "WebAssembly counts addresses in 32 bits";
                    Error::unsupported(
                        format!("tensors in arrays of {bytes} bytes together"),
                        why,
                        "cut the problem along batch or heads",
                    )
                },
            )?;
        }
        Ok(Bases(bases))
    }

    fn of(&self, given: &Given) -> usize {
        self.0.get(given.buffer).copied().unwrap_or(0)
    }
}

impl Request {
    /// Every tensor with its name.
    pub(crate) fn given(&self) -> impl Iterator<Item = (&'static str, &Given)> {
        let Request { q, k, v, mask, sinks, alibi_slopes, out, lse, .. } = self;
        let optional = [("mask", mask), ("sinks", sinks), ("alibi_slopes", alibi_slopes), ("out", out), ("lse", lse)];
        let required = [("q", q), ("k", k), ("v", v)];
        required.into_iter().chain(optional.into_iter().filter_map(|(name, given)| Some((name, given.as_ref()?))))
    }

    /// The options as rapt-core has them.
    pub(crate) fn options(&self) -> Result<Options, Refusal> {
        let GivenOptions { scale, softcap, causal, window, layout, out_dtype, .. } = &self.options;
        let unknown = |option: &str, got: &str| Refusal::of_protocol(&format!("{option} = {got:?}"));
        let causal = match causal.as_deref() {
            None => None,
            Some("top_left") => Some(Causal::TopLeft),
            Some("bottom_right") => Some(Causal::BottomRight),
            Some(got) => return Err(unknown("causal", got)),
        };
        let layout = match layout.as_str() {
            "bhsd" => TensorLayout::Bhsd,
            "bshd" => TensorLayout::Bshd,
            got => return Err(unknown("layout", got)),
        };
        Ok(Options {
            softmax_scale: *scale,
            softcap: *softcap,
            causal,
            window: Window { left: window[0], right: window[1] },
            layout,
            out_dtype: out_dtype.as_deref().map(|name| dtype("out", name)).transpose()?,
            ..Options::default()
        })
    }

    /// Whether lse is asked.
    pub(crate) fn has_lse(&self) -> bool {
        self.options.return_lse || self.lse.is_some()
    }

    /// This request with out and lse: where none is given, row-major in an array of its own.
    pub(crate) fn with_outputs(&self, spec: &Spec) -> Self {
        let next = self.given().map(|(_, given)| given.buffer + 1).max().unwrap_or(0);
        let own = |dtype: DType, shape: Vec<usize>, buffer| {
            let bytes = shape.iter().product::<usize>() * dtype.size_bytes();
            // A buffer has whole words.
            let len_bytes = bytes.next_multiple_of(4).max(4);
            let (dtype, is_storage) = (dtype.name().to_owned(), true);
            Given { dtype, shape, strides: None, offset: 0, buffer, begin_bytes: 0, len_bytes, is_storage }
        };
        let rank = self.q.shape.len();
        let shape = self.q.shape.iter().take(rank - 1).copied().chain([spec.head_dim_v()]).collect();
        let mut whole = self.clone();
        whole.out.get_or_insert_with(|| own(spec.out.dtype, shape, next));
        if let Some(lse) = &spec.lse {
            whole.lse.get_or_insert_with(|| own(lse.dtype, lse.shape[4 - rank..].to_vec(), next + 1));
        }
        whole
    }

    /// The tensors as views of `device`. Out and lse are given.
    ///
    /// # Errors
    /// Those of [`View::from_raw_parts`].
    ///
    /// # Safety
    /// Where the request [`is_copied`](Request::is_copied), every array is memory of this module for 'a, outputs nobody else's. Where not,
    /// no element is read or written by way of these views.
    pub(crate) unsafe fn views<'a>(&self, device: Device) -> Result<Tensors<'a>, Refusal> {
        let bases = Bases::new(self)?;
        let view = |name: &'static str, given: &Given| -> Result<View<'a>, Refusal> {
            let (address, dtype, shape, strides, extent) = given.parts(name, bases.of(given))?;
            let ptr = std::ptr::with_exposed_provenance(address);
            // SAFETY: promised by the caller.
            Ok(unsafe { View::from_raw_parts(name, ptr, dtype, shape, strides, device, extent) }?)
        };
        let view_mut = |name: &'static str, given: &Given| -> Result<ViewMut<'a>, Refusal> {
            let (address, dtype, shape, strides, extent) = given.parts(name, bases.of(given))?;
            let ptr = std::ptr::with_exposed_provenance_mut(address);
            // SAFETY: promised by the caller.
            Ok(unsafe { ViewMut::from_raw_parts(name, ptr, dtype, shape, strides, device, extent) }?)
        };
        let optional = |name, given: &Option<Given>| given.as_ref().map(|given| view(name, given)).transpose();
        let out = self.out.as_ref().ok_or_else(|| Refusal::of_protocol(&"out is missing"))?;
        Ok(Tensors {
            mask: optional("mask", &self.mask)?,
            sinks: optional("sinks", &self.sinks)?,
            alibi_slopes: optional("alibi_slopes", &self.alibi_slopes)?,
            lse: self.lse.as_ref().map(|lse| view_mut("lse", lse)).transpose()?,
            ..Tensors::new(view("q", &self.q)?, view("k", &self.k)?, view("v", &self.v)?, view_mut("out", out)?)
        })
    }
}
