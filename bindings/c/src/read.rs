//! What a caller's structs say, as Views and Options.
//!
//! A pointer is read only after it was found to be neither NULL nor unaligned; every number is checked before it is used.

use std::ffi::c_void;
use std::mem::{offset_of, zeroed};

use engine::quant::{QuantError, Scheme};
use engine::{
    Causal, Codes, Compute, DType, Device, DeviceDraw, DropoutSeed, Error, Extent, Format, Granularity, MAX_RANK,
    Options, Qkv, ScaleLayout, Shape, Strides, TensorLayout, Tensors, View, ViewMut, Window,
};

use crate::abi::{
    RAPT_MAX_NDIM, rapt_causal, rapt_codes, rapt_compute, rapt_device, rapt_format, rapt_given, rapt_granularity,
    rapt_layout, rapt_options, rapt_scale_layout, rapt_tensor,
};
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

/// Refuses a struct of a size that it never had. A larger one comes from a newer header and may ask for what this library has
/// never heard of.
pub(crate) fn struct_size(field: &'static str, got: usize, known: &[usize]) -> Result<(), Refusal> {
    if known.contains(&got) {
        return Ok(());
    }
    let known: Vec<String> = known.iter().map(usize::to_string).collect();
    let known = known.join(" or ");
    let allowed = format!("{known}, the size of that struct up to version {}", env!("CARGO_PKG_VERSION"));
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
    pub(crate) strides: Strides,
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
pub(crate) unsafe fn view<'a>(name: &'static str, given: *const rapt_tensor) -> Result<View<'a>, Refusal> {
    // SAFETY: the caller's word.
    unsafe { Parts::read(name, given)?.view(name) }
}

/// # Safety
/// `given` leads to a tensor that is what it says and that nobody else uses for 'a, or is NULL.
pub(crate) unsafe fn view_mut<'a>(name: &'static str, given: *const rapt_tensor) -> Result<ViewMut<'a>, Refusal> {
    // SAFETY: the caller's word.
    unsafe { Parts::read(name, given)?.view_mut(name) }
}

/// # Safety
/// As [`view`].
pub(crate) unsafe fn optional<'a>(name: &'static str, given: *const rapt_tensor) -> Result<Option<View<'a>>, Refusal> {
    // SAFETY: the caller's word.
    if given.is_null() { Ok(None) } else { unsafe { view(name, given) }.map(Some) }
}

/// The options, with "absent" in the fields that a struct of an older header lacks.
///
/// # Safety
/// `given` leads to as many bytes as its size says, or is NULL.
pub(crate) unsafe fn options(given: *const rapt_options) -> Result<rapt_options, Refusal> {
    /// Before q, k and v could be codes.
    const WITHOUT_CODES: usize = offset_of!(rapt_options, q_codes);
    /// Before heads on codes could be judged.
    const WITHOUT_TOLERANCE: usize = offset_of!(rapt_options, tolerance);
    /// Before products could be of anything but numbers.
    const WITHOUT_COMPUTE: usize = offset_of!(rapt_options, compute);
    /// Before weights could be dropped.
    const WITHOUT_DROPOUT: usize = offset_of!(rapt_options, dropout_p);
    /// Before a draw could lie in a GPU's memory.
    const WITHOUT_DRAW: usize = offset_of!(rapt_options, dropout_draw);
    let given = to_read(given, "options")?;
    // SAFETY: neither NULL nor unaligned; a struct of any version begins with its size.
    let size = unsafe { (*given).size };
    let now = size_of::<rapt_options>();
    let sizes = [WITHOUT_CODES, WITHOUT_TOLERANCE, WITHOUT_COMPUTE, WITHOUT_DROPOUT, WITHOUT_DRAW, now];
    struct_size("options.size", size, &sizes)?;
    // SAFETY: zero and NULL are values of every field.
    let mut options: rapt_options = unsafe { zeroed() };
    // SAFETY: as long as its size says, which is at most that of this struct.
    unsafe { std::ptr::copy_nonoverlapping(given.cast::<u8>(), (&raw mut options).cast::<u8>(), size) };
    Ok(options)
}

/// What an operand of codes, their fields and their parts are called.
pub(crate) struct CodesNames {
    operand: &'static str,
    codes: &'static str,
    size: &'static str,
    format: &'static str,
    granularity: &'static str,
    block_size: &'static str,
    head_dim: &'static str,
    pub(crate) scale_layout: &'static str,
    pub(crate) descale: &'static str,
    pub(crate) zero_point: &'static str,
}

/// The names for the field of rapt_options that begins with the first word, and the operand that is the second one.
macro_rules! codes_names {
    ($field:literal, $operand:literal) => {
        CodesNames {
            operand: $operand,
            codes: concat!($field, "_codes"),
            size: concat!($field, "_codes.size"),
            format: concat!($field, "_codes.format"),
            granularity: concat!($field, "_codes.granularity"),
            block_size: concat!($field, "_codes.block_size"),
            head_dim: concat!($field, "_codes.head_dim"),
            scale_layout: concat!($field, "_codes.scale_layout"),
            descale: concat!($field, "_descale"),
            zero_point: concat!($field, "_zero_point"),
        }
    };
}

impl CodesNames {
    pub(crate) const Q: CodesNames = codes_names!("q", "q");
    pub(crate) const K: CodesNames = codes_names!("k", "k");
    pub(crate) const V: CodesNames = codes_names!("v", "v");
    pub(crate) const K_CACHE: CodesNames = codes_names!("k", "k_cache");
    pub(crate) const V_CACHE: CodesNames = codes_names!("v", "v_cache");
    /// Of codes that are an argument by themselves.
    pub(crate) const ALONE: CodesNames = CodesNames {
        operand: "tensor",
        codes: "codes",
        size: "codes.size",
        format: "codes.format",
        granularity: "codes.granularity",
        block_size: "codes.block_size",
        head_dim: "codes.head_dim",
        scale_layout: "codes.scale_layout",
        descale: "descale",
        zero_point: "zero_point",
    };
}

/// What a rapt_codes says, its numbers each in its domain.
pub(crate) struct CodesRead {
    pub(crate) format: Format,
    pub(crate) granularity: Option<Granularity>,
    pub(crate) head_dim: Option<usize>,
    pub(crate) global_scale: Option<f32>,
    pub(crate) scale_layout: ScaleLayout,
    /// Not NULL.
    pub(crate) descale: *const rapt_tensor,
    pub(crate) zero_point: *const rapt_tensor,
}

impl CodesRead {
    /// `None` for NULL: the operand has numbers.
    ///
    /// # Safety
    /// `given` leads to codes, or is NULL.
    pub(crate) unsafe fn read(names: &CodesNames, given: *const rapt_codes) -> Result<Option<Self>, Refusal> {
        // SAFETY: the caller's word.
        let Some(given) = (unsafe { codes_struct(names, given) })? else { return Ok(None) };
        let format = format_of(names, given.format)?;
        let granularity = granularity_of(names, given.granularity, given.block_size)?;
        let scale_layout = scale_layout_of(names, given.scale_layout)?;
        let head_dim = match usize::try_from(given.head_dim) {
            Ok(0) => None,
            Ok(head_dim) => Some(head_dim),
            Err(_) => {
                let allowed = "0 (as many as the tensor of codes holds), or a number from 1 up";
                return Err(refuse(names.head_dim, &given.head_dim, allowed));
            }
        };
        if given.descale.is_null() {
            let (tensor, codes, part) = (names.operand, format.name(), names.descale);
            return Err(Error::MissingPart { tensor, codes, part }.into());
        }
        // SAFETY: the caller's word.
        let global_scale = unsafe { global_scale(names, &given) }?;
        let rapt_codes { descale, zero_point, .. } = given;
        Ok(Some(CodesRead { format, granularity, head_dim, global_scale, scale_layout, descale, zero_point }))
    }
}

/// The struct behind `given`; `None` for NULL.
///
/// # Safety
/// `given` leads to as many bytes as its size says, or is NULL.
unsafe fn codes_struct(names: &CodesNames, given: *const rapt_codes) -> Result<Option<rapt_codes>, Refusal> {
    if given.is_null() {
        return Ok(None);
    }
    let given = to_read(given, names.codes)?;
    // SAFETY: neither NULL nor unaligned; a struct of any version begins with its size.
    let size = unsafe { (*given).size };
    struct_size(names.size, size, &[CODES_WITHOUT_SCALE_LAYOUT, size_of::<rapt_codes>()])?;
    // SAFETY: zero and NULL are values of every field.
    let mut codes: rapt_codes = unsafe { zeroed() };
    // SAFETY: as long as its size says, which is at most that of this struct.
    unsafe { std::ptr::copy_nonoverlapping(given.cast::<u8>(), (&raw mut codes).cast::<u8>(), size) };
    Ok(Some(codes))
}

/// The size of rapt_codes before factors could lie swizzled.
const CODES_WITHOUT_SCALE_LAYOUT: usize = offset_of!(rapt_codes, scale_layout);

fn scale_layout_of(names: &CodesNames, code: i32) -> Result<ScaleLayout, Refusal> {
    match code {
        code if code == rapt_scale_layout::RAPT_SCALE_LAYOUT_PLAIN as i32 => Ok(ScaleLayout::Plain),
        code if code == rapt_scale_layout::RAPT_SCALE_LAYOUT_SWIZZLE_32_4_4 as i32 => Ok(ScaleLayout::Swizzle32x4x4),
        code => {
            let allowed = "RAPT_SCALE_LAYOUT_PLAIN, RAPT_SCALE_LAYOUT_SWIZZLE_32_4_4";
            Err(refuse(names.scale_layout, &code, allowed))
        }
    }
}

/// # Safety
/// `given.global_scale` leads to a number, or is NULL.
unsafe fn global_scale(names: &CodesNames, given: &rapt_codes) -> Result<Option<f32>, Refusal> {
    if given.global_scale.is_null() {
        return Ok(None);
    }
    let pointer = Pointer { argument: names.codes, field: Some("global_scale") };
    let global_scale = to_read(given.global_scale, pointer)?;
    // SAFETY: neither NULL nor unaligned; that a number lies there is the caller's word.
    Ok(Some(unsafe { global_scale.read() }))
}

/// How a cache that Rapt owns is to hold codes, and their global scale; `None` if it is to hold numbers.
///
/// # Safety
/// `given` leads to codes, or is NULL.
pub(crate) unsafe fn scheme(
    names: &CodesNames,
    given: *const rapt_codes,
) -> Result<Option<(Scheme, Option<f32>)>, Refusal> {
    // SAFETY: the caller's word.
    let Some(given) = (unsafe { codes_struct(names, given) })? else { return Ok(None) };
    let format = format_of(names, given.format)?;
    let granularity = granularity_of(names, given.granularity, given.block_size)?;
    if given.head_dim != 0 {
        return Err(refuse(names.head_dim, &given.head_dim, "0: the form of the cache says it"));
    }
    for (option, pointer) in [(names.descale, given.descale), (names.zero_point, given.zero_point)] {
        if !pointer.is_null() {
            return Err(refuse(option, &"a tensor", "NULL: the cache makes its own"));
        }
    }
    let by_token = format.own_block_size().is_none().then_some(Granularity::Token);
    let scale_layout = scale_layout_of(names, given.scale_layout)?;
    let scheme = Scheme::new(format, granularity.or(by_token), scale_layout);
    let scheme = scheme.map_err(|error| match error {
        QuantError::Core(error) => Refusal::Form(error),
        error => Refusal::Quant { tensor: names.operand, error },
    })?;
    // SAFETY: the caller's word.
    Ok(Some((scheme, unsafe { global_scale(names, &given) }?)))
}

/// The code of a format.
pub(crate) fn format_code(format: Format) -> i32 {
    FORMATS.iter().find(|(_, known)| *known == format).map_or(0, |(code, _)| *code as i32)
}

/// What makes numbers of one of q, k and v; `None` if it has numbers.
///
/// # Safety
/// `given` leads to codes whose tensors are what they say and nobody writes for 'a, or is NULL.
pub(crate) unsafe fn codes<'a>(
    names: &CodesNames,
    given: *const rapt_codes,
) -> Result<Option<Box<Codes<'a>>>, Refusal> {
    // SAFETY: the caller's word.
    let Some(read) = (unsafe { CodesRead::read(names, given) })? else { return Ok(None) };
    let CodesRead { format, granularity, head_dim, global_scale, scale_layout, .. } = read;
    // SAFETY: the caller's word.
    let (descale, zero_point) =
        unsafe { (view(names.descale, read.descale)?, optional(names.zero_point, read.zero_point)?) };
    let codes = Codes { zero_point, global_scale, granularity, scale_layout, head_dim, ..Codes::new(format, descale) };
    Ok(Some(Box::new(codes)))
}

const FORMATS: [(rapt_format, Format); Format::ALL.len()] = [
    (rapt_format::RAPT_FORMAT_INT8, Format::Int8),
    (rapt_format::RAPT_FORMAT_UINT8, Format::Uint8),
    (rapt_format::RAPT_FORMAT_INT4, Format::Int4),
    (rapt_format::RAPT_FORMAT_E4M3FN, Format::E4m3fn),
    (rapt_format::RAPT_FORMAT_E5M2, Format::E5m2),
    (rapt_format::RAPT_FORMAT_MXFP8, Format::Mxfp8),
    (rapt_format::RAPT_FORMAT_MXFP4, Format::Mxfp4),
    (rapt_format::RAPT_FORMAT_NVFP4, Format::Nvfp4),
];

fn format_of(names: &CodesNames, code: i32) -> Result<Format, Refusal> {
    let found = FORMATS.iter().find(|(known, _)| *known as i32 == code);
    let allowed = || FORMATS.map(|(known, _)| format!("{known:?}")).join(", ");
    found.map(|(_, format)| *format).ok_or_else(|| refuse(names.format, &code, &allowed()))
}

fn granularity_of(names: &CodesNames, code: i32, block_size: i64) -> Result<Option<Granularity>, Refusal> {
    let is_block = code == rapt_granularity::RAPT_GRANULARITY_BLOCK as i32;
    let size = usize::try_from(block_size).ok().filter(|size| is_block != (*size == 0));
    let size = size.ok_or_else(|| {
        let allowed = "a number from 1 up with RAPT_GRANULARITY_BLOCK, 0 without";
        refuse(names.block_size, &block_size, allowed)
    })?;
    Ok(match code {
        code if code == rapt_granularity::RAPT_GRANULARITY_OF_SHAPE as i32 => None,
        code if code == rapt_granularity::RAPT_GRANULARITY_TENSOR as i32 => Some(Granularity::Tensor),
        code if code == rapt_granularity::RAPT_GRANULARITY_HEAD as i32 => Some(Granularity::Head),
        code if code == rapt_granularity::RAPT_GRANULARITY_TOKEN as i32 => Some(Granularity::Token),
        code if code == rapt_granularity::RAPT_GRANULARITY_CHANNEL as i32 => Some(Granularity::Channel),
        _ if is_block => Some(Granularity::Block(size)),
        code => {
            let allowed = "RAPT_GRANULARITY_OF_SHAPE, RAPT_GRANULARITY_TENSOR, RAPT_GRANULARITY_HEAD, \
                           RAPT_GRANULARITY_TOKEN, RAPT_GRANULARITY_CHANNEL, RAPT_GRANULARITY_BLOCK";
            return Err(refuse(names.granularity, &code, allowed));
        }
    })
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
        // SAFETY: the caller's word.
        let given = unsafe { self::options(options) }?;
        let options = parse(&given)?;
        // SAFETY: the caller's word.
        let codes = unsafe {
            Qkv {
                q: codes(&CodesNames::Q, given.q_codes)?,
                k: codes(&CodesNames::K, given.k_codes)?,
                v: codes(&CodesNames::V, given.v_codes)?,
            }
        };
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
        // SAFETY: as above.
        let dropout = unsafe { dropout(&given, q.device()) }?;
        Ok((Tensors { codes, mask, sinks, alibi_slopes, dropout, lse, ..Tensors::new(q, k, v, out) }, options))
    }
}

fn refuse(option: &'static str, got: &dyn ToString, allowed: &str) -> Refusal {
    Error::Option { option, got: got.to_string(), allowed: allowed.to_owned() }.into()
}

/// Which weights a run on `device` drops, where it drops some.
///
/// # Safety
/// A draw in memory lies there until the run has ended.
pub(crate) unsafe fn dropout(given: &rapt_options, device: Device) -> Result<Option<DropoutSeed>, Refusal> {
    if given.dropout_p == 0.0 {
        return Ok(None);
    }
    if given.dropout_draw.is_null() {
        return Ok(Some(DropoutSeed::new(given.dropout_seed, given.dropout_offset)));
    }
    // SAFETY: the caller's word.
    Ok(Some(DropoutSeed::in_memory(unsafe { DeviceDraw::new(device, given.dropout_draw.addr()) }?)))
}

/// The options but for their tensors.
pub(crate) fn parse(given: &rapt_options) -> Result<Options, Refusal> {
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
    let compute = match given.compute {
        code if code == rapt_compute::RAPT_COMPUTE_EXACT as i32 => Compute::Exact,
        code if code == rapt_compute::RAPT_COMPUTE_INT8 as i32 => Compute::Int8,
        code if code == rapt_compute::RAPT_COMPUTE_FP8 as i32 => Compute::Fp8,
        code => return Err(refuse("compute", &code, "RAPT_COMPUTE_EXACT, RAPT_COMPUTE_INT8, RAPT_COMPUTE_FP8")),
    };
    let out_dtype = match given.out_dtype {
        0 => None,
        code => Some(dtype_of("out_dtype", code)?),
    };
    for (option, value) in [("dropout_seed", given.dropout_seed), ("dropout_offset", given.dropout_offset)] {
        if value != 0 && given.dropout_p == 0.0 {
            return Err(refuse(option, &value, "0 with a dropout_p of 0, which drops nothing"));
        }
        if value != 0 && !given.dropout_draw.is_null() {
            return Err(refuse(option, &value, "0 beside dropout_draw, which stands in its place"));
        }
    }
    if !given.dropout_draw.is_null() && given.dropout_p == 0.0 {
        return Err(refuse("dropout_draw", &"not NULL", "NULL with a dropout_p of 0, which drops nothing"));
    }
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
        compute,
        dropout_p: given.dropout_p,
    })
}
