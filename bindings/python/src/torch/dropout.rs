//! Which weights a call drops: seed and offset, drawn of PyTorch's generator into a tensor, int64 `[2]`, which a graph can hold.

use pyo3::prelude::*;
use rapt::DropoutSeed;

use crate::errors::Failure;

/// How often a call drops, its draw, and the batch entries before its first one; as Python states it.
pub(crate) type Stated<'py> = Option<(f64, Bound<'py, PyAny>, u32)>;

/// One draw of PyTorch's generator, of the device where `like` lies.
pub(crate) fn draw<'py>(like: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    like.py().import("rapt.torch._dropout")?.getattr("draw")?.call1((like,))
}

/// What a draw says.
pub(crate) fn seed_of(draw: &Bound<'_, PyAny>) -> Result<DropoutSeed, Failure> {
    let numbers: PyResult<[i64; 2]> = draw.call_method0("tolist").and_then(|numbers| numbers.extract());
    let [seed, offset] =
        numbers.map_err(|_| Failure::option("dropout_draw", "another tensor", "int64 of shape [2]"))?;
    Ok(DropoutSeed::new(seed.cast_unsigned(), offset.cast_unsigned()))
}

/// The probability and the seed of what is stated; none drops nothing.
pub(crate) fn read(stated: Stated<'_>) -> Result<(f64, Option<DropoutSeed>), Failure> {
    match stated {
        Some((p, draw, first_batch)) if p != 0.0 => Ok((p, Some(DropoutSeed { first_batch, ..seed_of(&draw)? }))),
        _ => Ok((0.0, None)),
    }
}
