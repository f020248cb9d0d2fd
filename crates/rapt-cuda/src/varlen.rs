//! Sequences that lie one after another: what varlen.cu is given, which finds them and deals them to the launches behind it.
//!
//! Deliberately absent: which launches there are (`select`).

use rapt_core::{Causal, Operands, Spec, View};

use crate::access::strides;
use crate::params::{MOST_LEN, Params};
use crate::partition::ChunkRule;

/// Launches over sequences that lie one after another, at most: few queries, and many with few keys and with many; or, over codes, few of
/// few rows and of more, and many.
pub(crate) const MOST_LAUNCHES: usize = 3;
/// Bytes of an entry of a table, and of what lies before the first: `VarlenEntry` and `VarlenTable` of kernels/common/params.cuh.
const ENTRY_BYTES: usize = 64;

/// Bytes of the table of a launch that has at most so many units of a head.
pub(crate) const fn table_bytes(units: usize) -> usize {
    ENTRY_BYTES.saturating_mul(units.saturating_add(2))
}

/// A launch as varlen.cu deals to it: `VarlenLaunch` of kernels/varlen.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct DealtLaunch {
    table: usize,
    many: i32,
    least_rows: i32,
    most_rows: i32,
    least_keys: i32,
    most_keys: i32,
    task_heads: i32,
    /// 0 where there is no such launch.
    item_rows: i32,
    paired: i32,
    log2_chunk: [i32; 3],
    long_from: [i32; 2],
    unused: i32,
}

/// Which sequences a launch takes, and in which pieces.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Takes {
    /// Whether those with many queries.
    pub(crate) many: bool,
    /// Those with few queries: how many rows a head of keys has, from the first to below the second. Empty: none of them.
    pub(crate) few: std::ops::Range<usize>,
    /// How many keys they have: from the first to below the second, or any other number where that is less.
    pub(crate) keys: std::ops::Range<usize>,
    pub(crate) task_heads: usize,
    pub(crate) item_rows: usize,
    pub(crate) paired: bool,
    /// Of few queries.
    pub(crate) chunks: ChunkRule,
    /// Where its table begins in the workspace.
    pub(crate) table: usize,
}

impl DealtLaunch {
    fn new(takes: &Takes) -> Self {
        let int = |n: usize| n.min(MOST_LEN) as i32;
        DealtLaunch {
            table: takes.table,
            many: i32::from(takes.many),
            least_rows: int(takes.few.start),
            most_rows: int(takes.few.end),
            least_keys: int(takes.keys.start),
            most_keys: int(takes.keys.end),
            task_heads: int(takes.task_heads),
            item_rows: int(takes.item_rows),
            paired: i32::from(takes.paired),
            log2_chunk: takes.chunks.keys.map(|keys| keys.ilog2() as i32),
            long_from: takes.chunks.long_from.map(int),
            unused: 0,
        }
    }
}

/// The one parameter of varlen.cu, byte for byte its `VarlenParams`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct VarlenParams {
    params: Params,
    q: usize,
    kv: usize,
    q_step: i64,
    kv_step: i64,
    sequences: i32,
    total_q: i32,
    total_kv: i32,
    bottom_right: i32,
    few_queries: i32,
    few_rows: i32,
    launches: [DealtLaunch; MOST_LAUNCHES],
}

impl VarlenParams {
    /// Without addresses. `few`: most queries of a sequence, and most rows of a head of keys, that are few. At most [`MOST_LAUNCHES`].
    pub(crate) fn new<'a>(
        spec: &Spec,
        params: &Params,
        few: [usize; 2],
        launches: impl IntoIterator<Item = &'a Takes>,
    ) -> Self {
        let int = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let step = |of: fn(&rapt_core::VarlenSpec) -> &rapt_core::TensorSpec<1>| {
            spec.varlen.as_deref().map_or(0, |varlen| strides(of(varlen))[0])
        };
        let mut all = [DealtLaunch::default(); MOST_LAUNCHES];
        for (place, takes) in all.iter_mut().zip(launches) {
            *place = DealtLaunch::new(takes);
        }
        VarlenParams {
            params: *params,
            q: 0,
            kv: 0,
            q_step: step(|varlen| &varlen.cu_seqlens_q),
            kv_step: step(|varlen| &varlen.cu_seqlens_kv),
            sequences: int(spec.varlen.as_deref().map_or(0, rapt_core::VarlenSpec::sequences)),
            total_q: int(spec.q_len()),
            total_kv: int(spec.kv_len()),
            bottom_right: i32::from(spec.causal == Some(Causal::BottomRight)),
            few_queries: int(few[0]),
            few_rows: int(few[1]),
            launches: all,
        }
    }

    /// Most queries of a sequence, and most rows of a head of keys, that are few.
    pub(crate) fn few(&self) -> [usize; 2] {
        [self.few_queries, self.few_rows].map(|few| few.unsigned_abs() as usize)
    }

    /// These parameters of tensors that lie where `operands` say, with tables in a workspace.
    pub(crate) fn at(&self, operands: &mut Operands<'_>, workspace: usize) -> Self {
        let params = self.params.at(operands, workspace);
        let [q, kv] =
            operands.tensors().offsets.as_ref().map_or([0; 2], |offsets| offsets.each_ref().map(View::address));
        let launches = self.launches.map(|launch| DealtLaunch { table: workspace + launch.table, ..launch });
        VarlenParams { params, q, kv, launches, ..*self }
    }

    /// The bytes that a launch passes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: a repr(C) struct of integers and floats, borrowed with self; the assertion on its size below proves that there
        // is no padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<VarlenParams>()) }
    }
}

const _: () = assert!(
    size_of::<VarlenParams>() == size_of::<Params>() + 4 * 8 + 6 * 4 + MOST_LAUNCHES * (8 + 14 * 4),
    "VarlenParams has padding"
);
