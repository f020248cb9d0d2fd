//! Which weights a call drops: seed and offset, drawn of PyTorch's generator into a tensor, int64 `[2]`, which a graph can hold. Where it lies on a GPU its
//! kernels read it, and the host never does.

use pyo3::prelude::*;
use rapt::{DType, Device, DeviceDraw, DropoutSeed};

use crate::errors::Failure;
use crate::tensors::{Enqueued, torch};

/// How often a call drops, its draw, and the batch entries before its first one; as Python states it.
pub(crate) type Stated<'py> = Option<(f64, Bound<'py, PyAny>, u32)>;

/// One draw of PyTorch's generator, of the device where `like` lies.
pub(crate) fn draw<'py>(like: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    like.py().import("rapt.torch._dropout")?.getattr("draw")?.call1((like,))
}

/// What a draw says.
pub(crate) fn seed_of(draw: &Bound<'_, PyAny>) -> Result<DropoutSeed, Failure> {
    let refused =
        || Failure::option("dropout_draw", "another tensor", "int64 of shape [2], its two numbers side by side");
    if draw.getattr("is_cuda").is_ok_and(|is| is.is_truthy().unwrap_or(false)) {
        let it = torch::read("dropout_draw", draw)?;
        let (&[2], &[1], DType::I64, Device::Cuda(device)) = (&*it.shape, &*it.strides, it.dtype, it.device) else {
            return Err(refused());
        };
        it.view()?;
        // Who drew it on another stream may give it up before this one has read it.
        let (py, stream) = (draw.py(), torch::current_stream(draw.py(), device)?);
        torch::record_stream(py, Enqueued { device, stream }, std::iter::once(draw))?;
        // SAFETY: two int64 of its storage, which stays until the current stream has run what is enqueued.
        return Ok(DropoutSeed::in_memory(unsafe { DeviceDraw::new(it.device, it.ptr as usize) }?));
    }
    let numbers: PyResult<[i64; 2]> = draw.call_method0("tolist").and_then(|numbers| numbers.extract());
    let [seed, offset] = numbers.map_err(|_| refused())?;
    Ok(DropoutSeed::new(seed.cast_unsigned(), offset.cast_unsigned()))
}

/// The probability and the seed of what is stated; none drops nothing.
pub(crate) fn read(stated: Stated<'_>) -> Result<(f64, Option<DropoutSeed>), Failure> {
    match stated {
        Some((p, draw, first_batch)) if p != 0.0 => Ok((p, Some(DropoutSeed { first_batch, ..seed_of(&draw)? }))),
        _ => Ok((0.0, None)),
    }
}
