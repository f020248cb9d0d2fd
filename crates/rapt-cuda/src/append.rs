//! New keys and values of a cache: what append.cu is given.
//!
//! Deliberately absent: whether they may be written, which the caller proves.

use rapt_core::{Operands, Shape, Strides, View};

use crate::params::LaunchParams;

/// New keys and values, `[batch, new, num_kv_heads, head_dim]` in the dtype of the cache; `v` is `None` where values lie in the
/// memory of the keys.
#[derive(Clone, Copy, Debug)]
pub struct NewKeys<'a> {
    /// Keys.
    pub k: View<'a>,
    /// Values.
    pub v: Option<View<'a>>,
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
        let bytes = new.dtype().size_bytes();
        let in_bytes = |shape: &Shape, strides: &Strides| {
            std::array::from_fn(|d| if shape[d] > 1 { strides[d] as i64 * bytes as i64 } else { 0 })
        };
        AppendSide {
            from: new.address(),
            to: cache.address(),
            from_stride: in_bytes(new.shape(), new.strides()),
            to_stride: in_bytes(cache.shape(), cache.strides()),
            width: i32::try_from(new.shape()[3]).unwrap_or(i32::MAX),
            element_bytes: bytes as i32,
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
}

impl AppendParams {
    /// New keys of the caches that `operands` have, which are `[pages or batch, rows, heads, head_dim]`.
    pub(crate) fn new(all: &LaunchParams, new: &NewKeys<'_>, operands: &Operands<'_>) -> Self {
        let tensors = operands.tensors();
        AppendParams {
            all: *all,
            k: AppendSide::new(&new.k, &tensors.k),
            v: new.v.as_ref().map_or(AppendSide::default(), |v| AppendSide::new(v, &tensors.v)),
            kv_heads: i32::try_from(new.k.shape()[2]).unwrap_or(i32::MAX),
            unused: 0,
        }
    }

    /// The bytes that a launch passes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: a repr(C) struct of integers and floats, borrowed with self; the assertion on its size below proves that there
        // is no padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<AppendParams>()) }
    }
}

const _: () = assert!(
    size_of::<AppendParams>() == size_of::<LaunchParams>() + 2 * (2 * 8 + 8 * 8 + 2 * 4) + 2 * 4,
    "AppendParams has padding"
);
