//! DLPack's `DLTensor` and what it says, without any Python: the one parser of what a producer filled in.
//!
//! A producer is foreign code: a rank below zero or beyond what is read, a null array, a size or an offset that no address
//! space holds are refused before anything is followed. The fuzz targets read this very file. Deliberately absent: capsules,
//! ownership and devices other than by name.

use std::ffi::{c_int, c_void};

use rapt::{DType, Device, Error, MAX_RANK, Result, Shape, Strides};

#[repr(C)]
pub(crate) struct DlDevice {
    pub(crate) device_type: c_int,
    pub(crate) device_id: i32,
}

#[repr(C)]
pub(crate) struct DlDataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

#[repr(C)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: DlDevice,
    pub(crate) ndim: i32,
    pub(crate) dtype: DlDataType,
    pub(crate) shape: *mut i64,
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

/// DLPack's code of host memory.
pub(crate) const CPU: i32 = 1;
/// DLPack's code of the memory of an NVIDIA GPU.
pub(crate) const CUDA: i32 = 2;

/// DLPack's name for a device type.
pub(crate) fn device_of(code: i32, index: i32) -> Device {
    match code {
        CPU => Device::Cpu,
        CUDA => Device::Cuda(u32::try_from(index).unwrap_or(0)),
        _ => Device::Other { dlpack_code: code, index },
    }
}

fn dtype_of(name: &'static str, dtype: &DlDataType) -> Result<DType> {
    Ok(match (dtype.code, dtype.bits, dtype.lanes) {
        (0, 8, 1) => DType::I8,
        (0, 16, 1) => DType::I16,
        (0, 32, 1) => DType::I32,
        (0, 64, 1) => DType::I64,
        (1, 8, 1) => DType::U8,
        (1, 16, 1) => DType::U16,
        (1, 32, 1) => DType::U32,
        (1, 64, 1) => DType::U64,
        (2, 16, 1) => DType::F16,
        (2, 32, 1) => DType::F32,
        (2, 64, 1) => DType::F64,
        (4, 16, 1) => DType::BF16,
        (5, 32, 1) => DType::C32,
        (5, 64, 1) => DType::C64,
        (5, 128, 1) => DType::C128,
        (6, 8, 1) => DType::Bool,
        (10, 8, 1) => DType::F8E4M3FN,
        (11, 8, 1) => DType::F8E4M3FNUZ,
        (12, 8, 1) => DType::F8E5M2,
        (13, 8, 1) => DType::F8E5M2FNUZ,
        (14, 8, 1) => DType::F8E8M0FNU,
        (code, bits, lanes) => {
            let got = format!("DLPack code {code}, {bits} bits, {lanes} lanes");
            return Err(Error::UnknownDtype { tensor: name, got });
        }
    })
}

/// DLPack's name for a dtype that attention computes, or bool.
pub(crate) const fn dtype_to(dtype: DType) -> DlDataType {
    let code = match dtype {
        DType::BF16 => 4,
        DType::Bool => 6,
        _ => 2,
    };
    DlDataType { code, bits: dtype.bits() as u8, lanes: 1 }
}

/// What a `DLTensor` says.
pub(crate) struct Described {
    pub(crate) ptr: *mut u8,
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) strides: Strides,
    pub(crate) device: Device,
}

/// Reads `tensor`; `name` names it in errors.
///
/// # Errors
/// [`Error::Rank`] beyond [`MAX_RANK`]; [`Error::UnknownDtype`]; [`Error::Representation`] and [`Error::Overflow`] for what
/// no tensor has.
///
/// # Safety
/// Where `ndim` is in `1..=MAX_RANK`, each of `shape` and `strides` is null or has `ndim` entries.
pub(crate) unsafe fn describe(name: &'static str, tensor: &DlTensor) -> Result<Described> {
    let bad = |what| Error::Representation { tensor: name, what };
    let rank = usize::try_from(tensor.ndim).map_err(|_| bad("exports a negative number of dimensions"))?;
    if rank > MAX_RANK {
        let allowed = "at most 8 are read";
        return Err(Error::Rank { tensor: name, got: rank, shape: Shape::from([]), allowed });
    }
    if rank > 0 && tensor.shape.is_null() {
        return Err(bad("exports no sizes"));
    }
    let (mut sizes, mut steps) = ([0usize; MAX_RANK], [0isize; MAX_RANK]);
    for (d, size) in sizes[..rank].iter_mut().enumerate() {
        // SAFETY: not null, and so `ndim` entries long.
        let given = unsafe { tensor.shape.add(d).read() };
        *size = usize::try_from(given).map_err(|_| bad("exports a negative size"))?;
    }
    let shape = Shape::new(&sizes[..rank]).ok_or_else(|| bad("has too many dimensions"))?;
    let dtype = dtype_of(name, &tensor.dtype)?;
    let strides = if tensor.strides.is_null() {
        shape.contiguous().ok_or(Error::Overflow { tensor: name, shape, strides: Strides::from([]) })?
    } else {
        for (d, step) in steps[..rank].iter_mut().enumerate() {
            // SAFETY: not null, and so `ndim` entries long.
            let given = unsafe { tensor.strides.add(d).read() };
            *step = isize::try_from(given).map_err(|_| bad("exports a stride beyond the address space"))?;
        }
        Strides::new(&steps[..rank]).ok_or_else(|| bad("has too many dimensions"))?
    };
    let beyond = || bad("exports an offset beyond the address space");
    let offset = usize::try_from(tensor.byte_offset).map_err(|_| beyond())?;
    // Null stays null, whatever the offset: a view of it is refused unless it is empty.
    let ptr = if tensor.data.is_null() { tensor.data } else { tensor.data.wrapping_byte_add(offset) };
    if !tensor.data.is_null() && ptr.addr() < tensor.data.addr() {
        return Err(beyond());
    }
    let DlDevice { device_type, device_id } = tensor.device;
    Ok(Described { ptr: ptr.cast(), dtype, shape, strides, device: device_of(device_type, device_id) })
}
