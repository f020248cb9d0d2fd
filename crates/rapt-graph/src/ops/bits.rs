//! The bits of a tensor's numbers as numbers of another dtype: `view.dtype`.
//!
//! Where sizes differ, elements of the last dimension become several, or several become one, in the order of memory.

use rapt_core::{DType, bf16_from_f64, f16_from_f64};

use super::shape::{cells, misfit, need_plain};
use crate::{Cells, Meta, OpError, Tensor, strides};

/// The form of the result: where the tensor lies, in elements of the other dtype.
pub(super) fn form(meta: &Meta, dtype: DType) -> Result<Meta, OpError> {
    need_plain("a view of bits", meta.dtype)?;
    need_plain("a view of bits", dtype)?;
    if strides::overlaps_itself(meta) {
        return Err(OpError::Refused("an expanded tensor is not seen in another dtype: clone it before"));
    }
    let [own, new] = [meta.dtype, dtype].map(|dtype| i64::try_from(dtype.size_bytes()).unwrap_or(1));
    let mut form = Meta { dtype, ..meta.clone() };
    if own == new {
        return Ok(form);
    }
    let text = || format!("shape {:?} strides {:?} as {dtype}", meta.shape, meta.strides);
    let Some(last) = meta.rank().checked_sub(1).filter(|&d| meta.strides[d] == 1) else { return misfit(text()) };
    if own > new {
        let times = own / new;
        form.shape[last] = meta.shape[last].saturating_mul(times);
        form.strides[..last].iter_mut().for_each(|stride| *stride = stride.saturating_mul(times));
        form.offset = meta.offset.saturating_mul(times);
        return Ok(form);
    }
    let parts = new / own;
    let whole = |n: &i64| n % parts == 0;
    if !whole(&meta.shape[last]) || !whole(&meta.offset) || !meta.strides[..last].iter().all(whole) {
        return misfit(text());
    }
    form.shape[last] /= parts;
    form.strides[..last].iter_mut().for_each(|stride| *stride /= parts);
    form.offset /= parts;
    Ok(form)
}

/// A tensor's bits, in row-major order, as numbers of a dtype.
pub(super) fn reinterpreted(tensor: &Tensor, dtype: DType) -> Cells {
    let size = tensor.meta.dtype.size_bytes();
    let bytes: Vec<u8> = match cells(tensor) {
        Cells::Float(x) => x.iter().flat_map(|&x| of_float(tensor.meta.dtype, x)[..size].to_vec()).collect(),
        Cells::Int(x) => x.iter().flat_map(|x| x.to_le_bytes()[..size].to_vec()).collect(),
    };
    let words = bytes.chunks_exact(dtype.size_bytes());
    if crate::number::is_float(dtype) {
        return Cells::Float(words.map(|word| to_float(dtype, word)).collect());
    }
    let int = |word: &[u8]| {
        let mut wide = [0; 8];
        wide[..word.len()].copy_from_slice(word);
        crate::number::wrap(dtype, i64::from_le_bytes(wide))
    };
    Cells::Int(words.map(int).collect())
}

fn of_float(dtype: DType, x: f64) -> [u8; 8] {
    let bits = match dtype {
        DType::F32 => u64::from((x as f32).to_bits()),
        DType::F16 => u64::from(f16_from_f64(x).to_bits()),
        DType::BF16 => u64::from(bf16_from_f64(x).to_bits()),
        _ => x.to_bits(),
    };
    bits.to_le_bytes()
}

fn to_float(dtype: DType, word: &[u8]) -> f64 {
    let mut wide = [0; 8];
    wide[..word.len()].copy_from_slice(word);
    let bits = u64::from_le_bytes(wide);
    match dtype {
        DType::F32 => f64::from(f32::from_bits(bits as u32)),
        DType::F16 => half::f16::from_bits(bits as u16).to_f64(),
        DType::BF16 => half::bf16::from_bits(bits as u16).to_f64(),
        _ => f64::from_bits(bits),
    }
}
