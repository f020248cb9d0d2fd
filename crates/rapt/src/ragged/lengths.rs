//! Lengths and offsets of sequences, as a caller gives them.

use std::ops::Range;

use rapt_core::{DType, Error, Result, View};

/// The int32 numbers of a tensor of one dimension in host memory.
fn numbers(tensor: &'static str, view: &View<'_>) -> Result<Vec<i32>> {
    if view.dtype() != DType::I32 {
        return Err(Error::UnsupportedDtype { tensor, got: view.dtype(), allowed: vec![DType::I32] });
    }
    if view.shape().len() != 1 {
        let (got, shape) = (view.shape().len(), *view.shape());
        return Err(Error::Rank { tensor, got, shape, allowed: "one number for each sequence is asked" });
    }
    Ok(view.lines::<i32>(tensor)?.elements().collect())
}

/// The rows of each sequence among `rows` rows, of offsets `[sequences + 1]`: those before the first and behind the last are of none.
pub(super) fn ranges(tensor: &'static str, offsets: &View<'_>, rows: usize) -> Result<Vec<Range<usize>>> {
    let offsets = numbers(tensor, offsets)?;
    let refuse = |at: usize, allowed: String| Err(Error::Length { tensor, at, got: offsets[at], allowed });
    let Some((first, last)) = offsets.first().zip(offsets.last()) else {
        let allowed = "where the first sequence begins, and where each ends".to_owned();
        return Err(Error::Option { option: tensor, got: "[]".to_owned(), allowed });
    };
    if *first < 0 {
        return refuse(0, format!("0 to {rows}, the number of rows"));
    }
    if let Some(at) = offsets.windows(2).position(|pair| pair[1] < pair[0]) {
        return refuse(at + 1, format!("{} or more: offsets do not fall", offsets[at]));
    }
    if usize::try_from(*last).map_or(true, |last| last > rows) {
        return refuse(offsets.len() - 1, format!("{rows} at most, the number of rows"));
    }
    // The first is not below 0, and they do not fall.
    Ok(offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect())
}

/// The length of each of `batch` sequences, at most `most`.
pub(super) fn lengths(tensor: &'static str, view: &View<'_>, batch: usize, most: usize) -> Result<Vec<usize>> {
    let numbers = numbers(tensor, view)?;
    if numbers.len() != batch {
        let (got, expected) = (numbers.len(), batch);
        return Err(Error::SizeMismatch { tensor, size: "sequences", got, other: "q", expected });
    }
    let length = |(at, &got): (usize, &i32)| match usize::try_from(got) {
        Ok(length) if length <= most => Ok(length),
        _ => Err(Error::Length { tensor, at, got, allowed: format!("0 to {most}") }),
    };
    numbers.iter().enumerate().map(length).collect()
}
