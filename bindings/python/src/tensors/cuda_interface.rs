//! `__cuda_array_interface__`: what a producer says of its strides in signed bytes, for those whose DLPack export says it wrongly.
//!
//! cupy 14 divides by the size of an element as if strides had no sign: -64 elements of float32 become 2^62 - 64. No tensor
//! reaches that far, so such an export is told from a sound one by itself; only then is the interface asked, which must
//! describe the same array. Deliberately absent: arrays that have this interface and no DLPack, and the interface's stream
//! (the export has ordered the producer's work already).

use pyo3::exceptions::PyKeyError;
use pyo3::intern;
use pyo3::prelude::*;
use rapt::{DType, Error, Strides};

use super::dlpack_abi::Described;

const OTHER: &str = "exports strides beyond the address space, and its __cuda_array_interface__ is of another array";
const BROKEN: &str = "exports strides beyond the address space, and its __cuda_array_interface__ is not one";

/// Whether a stride of `seen` steps over more than the address space.
pub(super) fn is_needed(seen: &Described) -> bool {
    let size = seen.dtype.size_bytes().cast_signed();
    let reaches_beyond = |(len, stride): (&usize, &isize)| *len > 1 && stride.checked_mul(size).is_none();
    !seen.shape.contains(&0) && seen.shape.iter().zip(seen.strides.iter()).any(reaches_beyond)
}

/// The interface's letter for the kind of `dtype`; `None` for those that it has no letter for.
const fn kind_of(dtype: DType) -> Option<char> {
    match dtype {
        DType::Bool => Some('b'),
        DType::F16 | DType::F32 | DType::F64 => Some('f'),
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => Some('i'),
        DType::U8 | DType::U16 | DType::U32 | DType::U64 => Some('u'),
        DType::C64 | DType::C128 => Some('c'),
        _ => None,
    }
}

/// Whether `typestr` (`<f4`: byte order, kind, bytes) is `dtype` on this machine.
fn is_dtype(typestr: &str, dtype: DType) -> bool {
    let mut letters = typestr.chars();
    let (order, kind) = (letters.next(), letters.next());
    let is_native = order == Some('|') || order == Some(if cfg!(target_endian = "little") { '<' } else { '>' });
    let is_kind = kind_of(dtype).is_none_or(|wanted| kind == Some(wanted));
    is_native && is_kind && letters.as_str().parse() == Ok(dtype.size_bytes())
}

/// The entries that tell what lies where.
struct Interface {
    address: usize,
    typestr: String,
    shape: Vec<usize>,
    /// Bytes; `None` is row-major.
    steps: Option<Vec<isize>>,
}

impl Interface {
    fn read(interface: &Bound<'_, PyAny>) -> PyResult<Self> {
        let get = |key| interface.get_item(key);
        let (address, _read_only): (usize, bool) = get("data")?.extract()?;
        let steps = match get("strides") {
            // The one entry that may be left out.
            Err(error) if error.is_instance_of::<PyKeyError>(interface.py()) => None,
            steps => steps?.extract()?,
        };
        Ok(Interface { address, typestr: get("typestr")?.extract()?, shape: get("shape")?.extract()?, steps })
    }
}

/// The strides, in elements, that the interface of `object` gives the array `seen`; `None` where it has no interface.
///
/// # Errors
/// [`Error::Representation`] where pointer, shape or dtype are not those of `seen`, or a stride is no whole number of elements.
pub(super) fn strides(
    name: &'static str,
    object: &Bound<'_, PyAny>,
    seen: &Described,
) -> PyResult<Result<Option<Strides>, Error>> {
    let py = object.py();
    let Some(interface) = object.getattr_opt(intern!(py, "__cuda_array_interface__"))? else { return Ok(Ok(None)) };
    let bad = |what| Error::Representation { tensor: name, what };
    let Ok(Interface { address, typestr, shape, steps }) = Interface::read(&interface) else {
        return Ok(Err(bad(BROKEN)));
    };
    if shape != *seen.shape || address != seen.ptr.addr() || !is_dtype(&typestr, seen.dtype) {
        return Ok(Err(bad(OTHER)));
    }
    let size = seen.dtype.size_bytes().cast_signed();
    let strides = match steps {
        None => seen.shape.contiguous(),
        Some(steps) if steps.len() != shape.len() || steps.iter().any(|bytes| bytes % size != 0) => None,
        Some(steps) => Strides::new(&steps.iter().map(|bytes| bytes / size).collect::<Vec<_>>()),
    };
    Ok(strides.map(Some).ok_or_else(|| bad(BROKEN)))
}
