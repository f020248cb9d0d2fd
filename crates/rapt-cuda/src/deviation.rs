//! How far heads on codes may be off: what deviation.cu and deviation_end.cu are given.
//!
//! Deliberately absent: what the figures mean, which rapt-reference says, and who stands by them.

use rapt_core::{DType, Error, Operands, Qkv, Result as CoreResult, Spec, View};

use crate::params::LaunchParams;

/// Numbers of a head, or of a row: `Deviation` of kernels/deviation/row.cuh.
pub(crate) const FIGURES: usize = 5;
/// Bytes of them.
pub(crate) const FIGURES_BYTES: usize = FIGURES * 8;
/// Bytes of `PartialRow` of kernels/deviation/row.cuh, less its columns.
const PARTIAL_BYTES: usize = 9 * 8 + 4 * 4;

/// Bytes of what a chunk of keys leaves of a row.
pub(crate) const fn partial_bytes(head_dim_v: usize) -> usize {
    PARTIAL_BYTES + 2 * 4 * head_dim_v
}

/// What was measured of K or V: `Errors` of kernels/deviation/row.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct ErrorsParams {
    /// 0 where it has numbers.
    numbers: usize,
    matrices: i64,
    rows: i32,
    columns: i32,
}

impl ErrorsParams {
    fn new(spec: &Spec, columns: usize) -> Self {
        ErrorsParams {
            numbers: 0,
            matrices: (spec.batch() * spec.num_kv_heads()) as i64,
            rows: i32::try_from(spec.kv_len()).unwrap_or(i32::MAX),
            columns: i32::try_from(columns).unwrap_or(i32::MAX),
        }
    }

    /// How many numbers there are.
    fn len(&self) -> usize {
        self.matrices as usize * 2 * (self.rows as usize + self.columns as usize + 1)
    }

    /// Those that lie in `view`, which has to be there where there are codes.
    fn at(self, tensor: &'static str, view: Option<&View<'_>>, is_coded: bool, spec: &Spec) -> CoreResult<Self> {
        let is_of = |view: &View<'_>| {
            view.dtype() == DType::F32
                && view.device() == spec.device
                && view.shape()[..] == [self.len()]
                && (view.strides()[..] == [1] || self.len() < 2)
        };
        if view.is_some() != is_coded || !view.is_none_or(is_of) {
            return Err(Error::NotAsPlanned { tensor, what: "measured errors" });
        }
        Ok(ErrorsParams { numbers: view.map_or(0, View::address), ..self })
    }
}

/// The one parameter of both kernels: byte for byte their `DeviationParams`, but for lengths of sequences at the end, which they do not take.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DeviationParams {
    k: ErrorsParams,
    v: ErrorsParams,
    rows: usize,
    partials: usize,
    heads: usize,
    weight_rounding: f64,
    partial_bytes: i64,
    all: LaunchParams,
}

impl DeviationParams {
    /// Without addresses. `weight_rounding`: of the kernel that is judged.
    pub(crate) fn new(spec: &Spec, all: &LaunchParams, weight_rounding: f64) -> Self {
        DeviationParams {
            k: ErrorsParams::new(spec, spec.head_dim()),
            v: ErrorsParams::new(spec, spec.head_dim_v()),
            rows: 0,
            partials: 0,
            heads: 0,
            weight_rounding,
            partial_bytes: partial_bytes(spec.head_dim_v()) as i64,
            all: *all,
        }
    }

    /// Of tensors that lie where `operands` say, with figures of heads at the begin of the workspace and those of rows behind them.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`] for errors that are not there, or of other sizes, another dtype or another device.
    pub(crate) fn at(
        &self,
        operands: &mut Operands<'_>,
        errors: &Qkv<Option<View<'_>>>,
        params: &crate::params::Params,
        spec: &Spec,
        workspace: usize,
    ) -> CoreResult<Self> {
        let params = params.at(operands, 0);
        let rows = workspace + spec.batch() * spec.num_q_heads() * FIGURES_BYTES;
        let is_coded = spec.codes.as_deref();
        Ok(DeviationParams {
            k: self.k.at("k", errors.k.as_ref(), is_coded.k.is_some(), spec)?,
            v: self.v.at("v", errors.v.as_ref(), is_coded.v.is_some(), spec)?,
            rows,
            partials: rows,
            heads: workspace,
            all: self.all.at(&params, operands),
            ..*self
        })
    }

    /// How many of their bytes the kernels take.
    pub(crate) const fn bytes() -> usize {
        std::mem::offset_of!(DeviationParams, all) + LaunchParams::bytes_of(true, false)
    }

    /// The bytes that a launch passes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: a repr(C) struct of integers and floats, borrowed with self; the assertion on its size below proves that there
        // is no padding.
        let all =
            unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast::<u8>(), size_of::<DeviationParams>()) };
        &all[..DeviationParams::bytes()]
    }
}

const _: () = assert!(
    size_of::<DeviationParams>() == 2 * (8 + 8 + 2 * 4) + 5 * 8 + size_of::<LaunchParams>(),
    "DeviationParams has padding"
);
