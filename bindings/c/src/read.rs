//! What a caller's structs say, as Views and Options.
//!
//! A pointer is read only after it was found to be neither NULL nor unaligned; every number is checked before it is used.

use std::ffi::c_void;

use engine::{
    Causal, DType, Device, Error, Extent, MAX_RANK, Options, Shape, Strides, TensorLayout, Tensors, View, ViewMut,
    Window,
};

use crate::abi::{RAPT_MAX_NDIM, rapt_causal, rapt_device, rapt_given, rapt_layout, rapt_options, rapt_tensor};
use crate::refusal::{Pointer, Refusal};

const _: () = assert!(RAPT_MAX_NDIM as usize == MAX_RANK);

/// `pointer`, if something can be read through it.
pub(crate) fn to_read<T>(pointer: *const T, name: impl Into<Pointer>) -> Result<*const T, Refusal> {
    if pointer.is_null() {
        return Err(Refusal::Null(name.into()));
    }
    if !pointer.is_aligned() {
        return Err(Refusal::Unaligned { pointer: name.into(), align_bytes: align_of::<T>() });
    }
    Ok(pointer)
}

/// `pointer`, if something can be written through it.
pub(crate) fn to_write<T>(pointer: *mut T, name: impl Into<Pointer>) -> Result<*mut T, Refusal> {
    to_read(pointer, name).map(<*const T>::cast_mut)
}

/// Refuses a struct of another size than this version knows. A larger one comes from a newer header and may ask for what
/// this library has never heard of.
pub(crate) fn struct_size(field: &'static str, got: usize, known: usize) -> Result<(), Refusal> {
    if got == known {
        return Ok(());
    }
    let allowed = format!("{known}, the size of that struct in version {}", env!("CARGO_PKG_VERSION"));
    Err(Error::Option { option: field, got: got.to_string(), allowed }.into())
}

/// The dtype with this code.
pub(crate) fn dtype_of(tensor: &'static str, code: i32) -> Result<DType, Refusal> {
    let known = u8::try_from(code).ok().and_then(|code| DType::from_code(code).ok());
    let list = || DType::ALL.iter().map(|dtype| format!("{} {}", dtype.code(), dtype.name())).collect::<Vec<_>>();
    known.ok_or_else(|| {
        let got = format!("code {code}; the known are {}", list().join(", "));
        Error::UnknownDtype { tensor, got }.into()
    })
}

/// The sizes behind `sizes`.
///
/// # Safety
/// `sizes` leads to `ndim` numbers, or is NULL.
pub(crate) unsafe fn shape(tensor: &'static str, ndim: i32, sizes: *const i64) -> Result<Shape, Refusal> {
    let rank = rank(tensor, ndim)?;
    let mut found = [0usize; MAX_RANK];
    if rank > 0 {
        let sizes = to_read(sizes, Pointer { argument: tensor, field: Some("shape") })?;
        for (dim, size) in found[..rank].iter_mut().enumerate() {
            // SAFETY: below `ndim`, the length that the caller told.
            let got = unsafe { sizes.add(dim).read() };
            if got < 0 {
                return Err(Refusal::NegativeSize { tensor, dim, got });
            }
            *size = usize::try_from(got).map_err(|_| Refusal::TooWide { tensor, what: "size", got })?;
        }
    }
    Shape::new(&found[..rank]).ok_or(Refusal::Rank { tensor, got: ndim, most: RAPT_MAX_NDIM })
}

/// The strides behind `strides`.
///
/// # Safety
/// `strides` leads to `ndim` numbers, or is NULL.
unsafe fn strides(tensor: &'static str, ndim: i32, strides: *const i64) -> Result<Strides, Refusal> {
    let rank = rank(tensor, ndim)?;
    let mut found = [0isize; MAX_RANK];
    if rank > 0 {
        let strides = to_read(strides, Pointer { argument: tensor, field: Some("strides") })?;
        for (dim, stride) in found[..rank].iter_mut().enumerate() {
            // SAFETY: below `ndim`, the length that the caller told.
            let got = unsafe { strides.add(dim).read() };
            *stride = isize::try_from(got).map_err(|_| Refusal::TooWide { tensor, what: "stride", got })?;
        }
    }
    Strides::new(&found[..rank]).ok_or(Refusal::Rank { tensor, got: ndim, most: RAPT_MAX_NDIM })
}

fn rank(tensor: &'static str, ndim: i32) -> Result<usize, Refusal> {
    let rank = usize::try_from(ndim).ok().filter(|rank| *rank <= MAX_RANK);
    rank.ok_or(Refusal::Rank { tensor, got: ndim, most: RAPT_MAX_NDIM })
}

/// A tensor's parts, each in its domain.
pub(crate) struct Parts {
    data: *mut c_void,
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    strides: Strides,
    device: Device,
    extent: Extent,
}

impl Parts {
    /// # Safety
    /// `given` leads to a tensor whose arrays have `ndim` numbers, or is NULL.
    pub(crate) unsafe fn read(name: &'static str, given: *const rapt_tensor) -> Result<Self, Refusal> {
        let given = to_read(given, name)?;
        // SAFETY: neither NULL nor unaligned; that a tensor lies there is the caller's word.
        let given = unsafe { given.read() };
        let rapt_tensor {
            data,
            dtype,
            device,
            device_index,
            ndim,
            shape: sizes,
            strides: steps,
            storage_bytes,
            storage,
        } = given;
        let dtype = dtype_of(name, dtype)?;
        let device = match (device, u32::try_from(device_index)) {
            (code, _) if code == rapt_device::RAPT_DEVICE_CPU as i32 => {
                if device_index != 0 {
                    return Err(Refusal::DeviceIndex { tensor: name, got: device_index });
                }
                Device::Cpu
            }
            (code, Ok(index)) if code == rapt_device::RAPT_DEVICE_CUDA as i32 => Device::Cuda(index),
            (dlpack_code, _) => Device::Other { dlpack_code, index: device_index },
        };
        let extent = match storage_bytes {
            0 | -1 => Extent::Declared,
            got => {
                let len_bytes = usize::try_from(got).map_err(|_| Refusal::Storage { tensor: name, got })?;
                let start = if storage.is_null() { data.cast_const() } else { storage };
                Extent::Proven { address: start as usize, len_bytes }
            }
        };
        // SAFETY: the caller's word.
        let (shape, strides) = unsafe { (shape(name, ndim, sizes)?, strides(name, ndim, steps)?) };
        Ok(Parts { data, dtype, shape, strides, device, extent })
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// # Safety
    /// The tensor is what it says, and nobody writes it for 'a.
    pub(crate) unsafe fn view<'a>(&self, name: &'static str) -> Result<View<'a>, Refusal> {
        let Parts { data, dtype, shape, strides, device, extent } = *self;
        // SAFETY: the caller's word.
        Ok(unsafe { View::from_raw_parts(name, data.cast_const().cast(), dtype, shape, strides, device, extent) }?)
    }

    /// # Safety
    /// The tensor is what it says, and nobody else uses it for 'a.
    pub(crate) unsafe fn view_mut<'a>(&self, name: &'static str) -> Result<ViewMut<'a>, Refusal> {
        let Parts { data, dtype, shape, strides, device, extent } = *self;
        // SAFETY: the caller's word.
        Ok(unsafe { ViewMut::from_raw_parts(name, data.cast(), dtype, shape, strides, device, extent) }?)
    }
}

/// # Safety
/// `given` leads to a tensor that is what it says and that nobody writes for 'a, or is NULL.
unsafe fn view<'a>(name: &'static str, given: *const rapt_tensor) -> Result<View<'a>, Refusal> {
    // SAFETY: the caller's word.
    unsafe { Parts::read(name, given)?.view(name) }
}

/// # Safety
/// `given` leads to a tensor that is what it says and that nobody else uses for 'a, or is NULL.
unsafe fn view_mut<'a>(name: &'static str, given: *const rapt_tensor) -> Result<ViewMut<'a>, Refusal> {
    // SAFETY: the caller's word.
    unsafe { Parts::read(name, given)?.view_mut(name) }
}

/// # Safety
/// As [`view`].
unsafe fn optional<'a>(name: &'static str, given: *const rapt_tensor) -> Result<Option<View<'a>>, Refusal> {
    // SAFETY: the caller's word.
    if given.is_null() { Ok(None) } else { unsafe { view(name, given) }.map(Some) }
}

/// The arguments of rapt_attention() and rapt_explain().
pub(crate) struct Call {
    pub(crate) q: *const rapt_tensor,
    pub(crate) k: *const rapt_tensor,
    pub(crate) v: *const rapt_tensor,
    pub(crate) out: *const rapt_tensor,
    pub(crate) options: *const rapt_options,
}

impl Call {
    /// The tensors and options that the arguments say.
    ///
    /// # Safety
    /// As rapt_attention(), for 'a.
    pub(crate) unsafe fn read<'a>(&self) -> Result<(Tensors<'a>, Options), Refusal> {
        let Call { q, k, v, out, options } = *self;
        // SAFETY: the caller's word.
        let (q, k, v) = unsafe { (view("q", q)?, view("k", k)?, view("v", v)?) };
        // SAFETY: as above.
        let out = unsafe { view_mut("out", out) }?;
        if options.is_null() {
            return Ok((Tensors::new(q, k, v, out), Options::default()));
        }
        let options = to_read(options, "options")?;
        // SAFETY: neither NULL nor unaligned; a struct of any version begins with its size.
        struct_size("options.size", unsafe { (*options).size }, size_of::<rapt_options>())?;
        // SAFETY: as long as its size says.
        let given = unsafe { &*options };
        let options = parse(given)?;
        // SAFETY: the caller's word.
        let (mask, sinks, alibi_slopes) = unsafe {
            (
                optional("mask", given.mask)?,
                optional("sinks", given.sinks)?,
                optional("alibi_slopes", given.alibi_slopes)?,
            )
        };
        // SAFETY: as above.
        let lse = if given.lse.is_null() { None } else { Some(unsafe { view_mut("lse", given.lse) }?) };
        Ok((Tensors { mask, sinks, alibi_slopes, lse, ..Tensors::new(q, k, v, out) }, options))
    }
}

fn refuse(option: &'static str, got: &dyn ToString, allowed: &str) -> Refusal {
    Error::Option { option, got: got.to_string(), allowed: allowed.to_owned() }.into()
}

fn parse(given: &rapt_options) -> Result<Options, Refusal> {
    const SCALE: u32 = rapt_given::RAPT_GIVEN_SOFTMAX_SCALE as u32;
    const SOFTCAP: u32 = rapt_given::RAPT_GIVEN_SOFTCAP as u32;
    const LEFT: u32 = rapt_given::RAPT_GIVEN_WINDOW_LEFT as u32;
    const RIGHT: u32 = rapt_given::RAPT_GIVEN_WINDOW_RIGHT as u32;
    let bits = given.given;
    if bits & !(SCALE | SOFTCAP | LEFT | RIGHT) != 0 {
        return Err(refuse("given", &format!("{bits:#x}"), "some of the rapt_given bits, 0x0 to 0xf"));
    }
    let number = |bit, option, value: f64| match bits & bit != 0 {
        true => Ok(Some(value)),
        false if value == 0.0 => Ok(None),
        false => Err(refuse(option, &value, "0 without its bit in `given`, or with it a number that counts")),
    };
    let end = |bit, option, value: i64| match (bits & bit != 0, usize::try_from(value)) {
        (true, Ok(keys)) => Ok(Some(keys)),
        (true, Err(_)) => Err(refuse(option, &value, "a number from 0 up, or its bit not in `given` (unbounded)")),
        (false, Ok(0)) => Ok(None),
        (false, _) => Err(refuse(option, &value, "0 without its bit in `given`, or with it a number that counts")),
    };
    let causal = match given.causal {
        code if code == rapt_causal::RAPT_CAUSAL_NONE as i32 => None,
        code if code == rapt_causal::RAPT_CAUSAL_TOP_LEFT as i32 => Some(Causal::TopLeft),
        code if code == rapt_causal::RAPT_CAUSAL_BOTTOM_RIGHT as i32 => Some(Causal::BottomRight),
        code => {
            return Err(refuse("causal", &code, "RAPT_CAUSAL_NONE, RAPT_CAUSAL_TOP_LEFT, RAPT_CAUSAL_BOTTOM_RIGHT"));
        }
    };
    let layout = match given.layout {
        code if code == rapt_layout::RAPT_LAYOUT_BHSD as i32 => TensorLayout::Bhsd,
        code if code == rapt_layout::RAPT_LAYOUT_BSHD as i32 => TensorLayout::Bshd,
        code => return Err(refuse("layout", &code, "RAPT_LAYOUT_BHSD, RAPT_LAYOUT_BSHD")),
    };
    let out_dtype = match given.out_dtype {
        0 => None,
        code => Some(dtype_of("out_dtype", code)?),
    };
    Ok(Options {
        softmax_scale: number(SCALE, "softmax_scale", given.softmax_scale)?,
        softcap: number(SOFTCAP, "softcap", given.softcap)?,
        causal,
        window: Window {
            left: end(LEFT, "window_left", given.window_left)?,
            right: end(RIGHT, "window_right", given.window_right)?,
        },
        layout,
        out_dtype,
    })
}
