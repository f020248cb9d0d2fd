//! New keys and values of a cache: what append.cu is given.
//!
//! Deliberately absent: whether they may be written, which the caller proves.

use rapt_core::{CodesSpec, DType, Granularity, Operands, Shape, Spec, Strides, View};

use crate::params::LaunchParams;

/// New keys and values, `[batch, new, num_kv_heads, head_dim]` in the dtype of the cache, or numbers where that is codes; `v` is `None`
/// where values lie in the memory of the keys.
#[derive(Clone, Copy, Debug)]
pub struct NewKeys<'a> {
    /// Keys.
    pub k: View<'a>,
    /// Values.
    pub v: Option<View<'a>>,
}

/// Whether new keys, and new values, get factors of their own, where they become codes.
pub(crate) fn writes_factors(spec: &Spec) -> [bool; 2] {
    let codes = spec.codes.as_deref();
    let is_own = |codes: &CodesSpec| matches!(codes.granularity, Granularity::Token | Granularity::Block(_));
    [codes.k, codes.v].map(|codes| codes.is_some_and(is_own))
}

/// `Side` of kernels/append.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct AppendSide {
    from: usize,
    to: usize,
    from_stride: [i64; 4],
    to_stride: [i64; 4],
    width: i32,
    element_bytes: i32,
}

impl AppendSide {
    fn new(new: &View<'_>, cache: &View<'_>) -> Self {
        let in_bytes = |shape: &Shape, strides: &Strides, dtype: DType| {
            std::array::from_fn(|d| if shape[d] > 1 { strides[d] as i64 * dtype.size_bytes() as i64 } else { 0 })
        };
        AppendSide {
            from: new.address(),
            to: cache.address(),
            from_stride: in_bytes(new.shape(), new.strides(), new.dtype()),
            to_stride: in_bytes(cache.shape(), cache.strides(), cache.dtype()),
            width: i32::try_from(new.shape()[3]).unwrap_or(i32::MAX),
            element_bytes: new.dtype().size_bytes() as i32,
        }
    }
}

/// The one parameter of append.cu, byte for byte its `AppendParams`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AppendParams {
    all: LaunchParams,
    k: AppendSide,
    v: AppendSide,
    kv_heads: i32,
    unused: i32,
    /// Of caches that are codes: the dtype of the new numbers of keys and values, and whether their codes get factors of their own.
    dtype: [i32; 2],
    writes_factors: [i32; 2],
}

impl AppendParams {
    /// How many of their bytes a kernel takes, by whether it makes codes.
    pub(crate) const fn bytes_of(codes: bool) -> usize {
        if codes { size_of::<AppendParams>() } else { std::mem::offset_of!(AppendParams, dtype) }
    }

    /// New keys of the caches that `operands` have, which are `[pages or batch, rows, heads, head_dim]`.
    pub(crate) fn new(
        all: &LaunchParams,
        writes_factors: [bool; 2],
        new: &NewKeys<'_>,
        operands: &Operands<'_>,
    ) -> Self {
        let tensors = operands.tensors();
        let dtype = |view: &View<'_>| i32::from(view.dtype().code());
        AppendParams {
            all: *all,
            k: AppendSide::new(&new.k, &tensors.k),
            v: new.v.as_ref().map_or(AppendSide::default(), |v| AppendSide::new(v, &tensors.v)),
            kv_heads: i32::try_from(new.k.shape()[2]).unwrap_or(i32::MAX),
            unused: 0,
            dtype: [dtype(&new.k), new.v.as_ref().map_or(0, dtype)],
            writes_factors: writes_factors.map(i32::from),
        }
    }

    /// The bytes that a launch passes, by whether its kernel makes codes.
    pub(crate) fn as_bytes(&self, codes: bool) -> &[u8] {
        // SAFETY: a repr(C) struct of integers and floats, borrowed with self; the assertion on its size below proves that there
        // is no padding.
        let all =
            unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast::<u8>(), size_of::<AppendParams>()) };
        &all[..AppendParams::bytes_of(codes)]
    }
}

const _: () = assert!(
    size_of::<AppendParams>() == size_of::<LaunchParams>() + 2 * (2 * 8 + 8 * 8 + 2 * 4) + 6 * 4,
    "AppendParams has padding"
);
