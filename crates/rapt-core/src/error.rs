//! Every way in which a request is refused: one variant per cause, each carrying the offender.
//!
//! A variant belongs to one [`ErrorKind`], which is what a language binding maps to its exception types. Messages name
//! tensors as `q`, `k`, `v`, `k_descale` and the like, `mask`, `sinks`, `alibi_slopes`, `out` and `lse`. Deliberately absent: hints,
//! which are expressions of one language; a binding adds those.

use crate::dtype::known_codes;
use crate::{DType, Device, Shape, Strides, UnknownDtypeCode};

/// The result of every fallible function of Rapt.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The family of an [`Error`]: one exception type per family in a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A tensor has another dtype than its request or its neighbours.
    DtypeMismatch,
    /// A dtype that is recognised but not served in this place.
    UnsupportedDtype,
    /// Shapes that do not fit one another.
    Shape,
    /// Strides, extents, alignment or overlap.
    Layout,
    /// An option outside its domain.
    Option,
    /// Tensors on another device than `q`, a device that is not there, or memory that it does not have.
    Device,
    /// Tensors of different kinds (such as numpy and torch) in one call.
    Kind,
    /// A request that is valid and that this build does not serve.
    Unsupported,
    /// An input of a program has another dtype than the program declares.
    DtypeBoundary,
    /// A program or its archive is damaged, altered, or contradicts itself.
    Program,
    /// An index among the values of a program's inputs, of a page table, or of lengths and offsets, lies outside its dimension; or
    /// a sequence that a cache does not have.
    Index,
    /// The values of a program's inputs make it divide an integer by zero.
    ZeroDivision,
    /// A number among a tensor's elements that the asked format does not hold, or whose error is larger than was asked; a matrix of a
    /// program that is singular where its inverse is asked.
    Number,
}

fn names(dtypes: &[DType]) -> String {
    dtypes.iter().map(|d| d.name()).collect::<Vec<_>>().join(", ")
}

/// Why a request was refused. Nothing was read, written or kept.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `tensor` has another dtype than `q`.
    #[error("{tensor} has dtype {got}, q has {expected}: q, k and v share one dtype")]
    DtypeMismatch {
        /// The offending tensor.
        tensor: &'static str,
        /// The dtype of `q`.
        expected: DType,
        /// The dtype of `tensor`.
        got: DType,
    },
    /// `tensor` has another dtype than was asked for.
    #[error("{tensor} has dtype {got}, asked for is {expected}")]
    OtherDtype {
        /// The offending tensor.
        tensor: &'static str,
        /// What was asked for.
        expected: DType,
        /// The dtype of `tensor`.
        got: DType,
    },
    /// A tensor has a dtype that is not served in its place.
    #[error("{tensor} has dtype {got}, which is not served there: allowed are {}", names(allowed))]
    UnsupportedDtype {
        /// The offending tensor.
        tensor: &'static str,
        /// Its dtype.
        got: DType,
        /// What is served in its place.
        allowed: Vec<DType>,
    },
    /// An operand of codes without a part that makes numbers of them.
    #[error("{tensor} is {codes} codes, which are no numbers without {part}: nothing is assumed in its place")]
    MissingPart {
        /// The operand.
        tensor: &'static str,
        /// The format of its codes, or its dtype.
        codes: &'static str,
        /// What is missing, such as `k_descale`.
        part: &'static str,
    },
    /// A part that the format of an operand's codes does not have.
    #[error("{part} was given, and {codes} codes have none: {tensor} is such")]
    UnexpectedPart {
        /// The operand.
        tensor: &'static str,
        /// The format of its codes.
        codes: &'static str,
        /// What was given, such as `k_zero_point`.
        part: &'static str,
    },
    /// A dtype code that the export schema does not name.
    #[error(transparent)]
    UnknownDtypeCode(#[from] UnknownDtypeCode),
    /// A dtype of another library that Rapt has no name for.
    #[error("{tensor} has a dtype that is not known: {got}; the known codes are {}", known_codes())]
    UnknownDtype {
        /// The offending tensor.
        tensor: &'static str,
        /// What the producer calls it.
        got: String,
    },

    /// A tensor has the wrong number of dimensions.
    #[error("{tensor} has {got} dimensions ({shape}); {allowed}")]
    Rank {
        /// The offending tensor.
        tensor: &'static str,
        /// Its rank.
        got: usize,
        /// Its shape.
        shape: Shape,
        /// What is allowed.
        allowed: &'static str,
    },
    /// A size of one tensor differs from the size it must equal.
    #[error("{tensor} has {size} {got}, {other} has {expected}: they must be equal")]
    SizeMismatch {
        /// The offending tensor.
        tensor: &'static str,
        /// Which size, such as `kv_len`.
        size: &'static str,
        /// Its value in `tensor`.
        got: usize,
        /// The tensor it is compared with.
        other: &'static str,
        /// Its value there.
        expected: usize,
    },
    /// `num_q_heads` is no multiple of `num_kv_heads`.
    #[error("q has {num_q_heads} heads, k and v have {num_kv_heads}: num_q_heads must be a multiple of num_kv_heads")]
    HeadGroups {
        /// Heads of `q`.
        num_q_heads: usize,
        /// Heads of `k` and `v`.
        num_kv_heads: usize,
    },
    /// head_dim is zero.
    #[error("{tensor} has head_dim 0 ({shape}): head_dim is at least 1")]
    ZeroHeadDim {
        /// The offending tensor.
        tensor: &'static str,
        /// Its shape.
        shape: Shape,
    },
    /// The mask does not broadcast.
    #[error("mask of shape {got} does not broadcast to {expected} ([batch, num_q_heads, q_len, kv_len])")]
    MaskShape {
        /// The shape of the mask.
        got: Shape,
        /// The shape that it must broadcast to.
        expected: Shape,
    },
    /// An output or a per-head vector has the wrong shape.
    #[error("{tensor} has shape {got}, expected {expected}")]
    ShapeMismatch {
        /// The offending tensor.
        tensor: &'static str,
        /// Its shape.
        got: Shape,
        /// The shape that is asked.
        expected: Shape,
    },
    /// A descale whose shape is that of no granularity.
    #[error("{tensor} has shape {got}, which scales of numbers of shape {of} do not have: allowed are {allowed}")]
    DescaleShape {
        /// The descale.
        tensor: &'static str,
        /// Its shape.
        got: Shape,
        /// The shape of the operand, as it was given.
        of: Shape,
        /// The shapes that it may have, in words.
        allowed: String,
    },
    /// A page table with fewer entries than the keys of a sequence take.
    #[error("page_table has {entries} entries, too few for {kv_len} keys in pages of {page_size}")]
    PageTableShort {
        /// Its entries.
        entries: usize,
        /// Keys of the sequence.
        kv_len: usize,
        /// Keys of a page.
        page_size: usize,
    },
    /// A page table that names a page which the cache does not have.
    #[error("page_table[{at}] is {page}, the cache has {num_pages} pages")]
    PageIndex {
        /// Which entry.
        at: usize,
        /// What it holds.
        page: i32,
        /// Pages of the cache.
        num_pages: usize,
    },
    /// A page into which keys of one sequence are written, and which another sequence has too, or the same one twice.
    #[error(
        "page {page} takes new keys of sequence {writer} and belongs to sequence {other}: it would hold keys of both"
    )]
    PageShared {
        /// The page.
        page: i32,
        /// The sequence whose keys would be written there.
        writer: usize,
        /// The other sequence; the same one where it has the page twice.
        other: usize,
    },
    /// An id of a sequence that the cache does not have: it was freed, or given by another cache, or by none.
    #[error("the cache has no sequence {sequence}: it was freed, or is not of this cache")]
    UnknownSequence {
        /// The number of the id.
        sequence: u64,
    },
    /// New keys for which a cache has too few pages.
    #[error("{needed} more pages are needed, the cache has {free} free: free or truncate a sequence first")]
    OutOfPages {
        /// Pages that the new keys take, with copies of pages that other sequences have too.
        needed: usize,
        /// Pages that no sequence has.
        free: usize,
    },
    /// A length or an offset of a ragged batch that cannot be.
    #[error("{tensor}[{at}] is {got}; allowed: {allowed}")]
    Length {
        /// The tensor of lengths or offsets.
        tensor: &'static str,
        /// Which of them.
        at: usize,
        /// What it holds.
        got: i32,
        /// What it may hold.
        allowed: String,
    },
    /// A shape, or an offset reached by shape and strides, overflows 64-bit signed arithmetic.
    #[error("{tensor} of shape {shape} and strides {strides} overflows 64-bit address arithmetic")]
    Overflow {
        /// The offending tensor.
        tensor: &'static str,
        /// Its shape.
        shape: Shape,
        /// Its strides in elements.
        strides: Strides,
    },

    /// Shape and strides reach outside the storage.
    #[error(
        "{tensor} of shape {shape} and strides {strides} reaches bytes {lo}..{hi} from its first element, its storage \
         holds {storage_lo}..{storage_hi}"
    )]
    OutOfExtent {
        /// The offending tensor.
        tensor: &'static str,
        /// Its shape.
        shape: Shape,
        /// Its strides in elements.
        strides: Strides,
        /// First byte reached, relative to the data pointer.
        lo: isize,
        /// One past the last byte reached.
        hi: isize,
        /// First byte of the storage, relative to the data pointer.
        storage_lo: isize,
        /// One past the last byte of the storage.
        storage_hi: isize,
    },
    /// The data pointer is no multiple of the element size.
    #[error("{tensor} starts at an address that is no multiple of {align_bytes} bytes, the size of {dtype}")]
    Unaligned {
        /// The offending tensor.
        tensor: &'static str,
        /// Its dtype.
        dtype: DType,
        /// The alignment that the dtype asks.
        align_bytes: usize,
    },
    /// A null data pointer with elements behind it.
    #[error("{tensor} has a null data pointer and shape {shape}")]
    NullData {
        /// The offending tensor.
        tensor: &'static str,
        /// Its shape.
        shape: Shape,
    },
    /// Two elements of an output share an address.
    #[error("{tensor} of shape {shape} and strides {strides} writes one address from two places")]
    OutputOverlapsItself {
        /// The offending output.
        tensor: &'static str,
        /// Its shape.
        shape: Shape,
        /// Its strides in elements.
        strides: Strides,
    },
    /// An output shares memory with another operand.
    #[error("{tensor} shares memory with {other}: an output is disjoint from every other operand")]
    OutputOverlaps {
        /// The offending output.
        tensor: &'static str,
        /// The operand that it shares memory with.
        other: &'static str,
    },
    /// The overlap of an output was not decided within the bound of the search.
    #[error("{tensor} and {other}: strides too entangled to prove within {steps} steps that no address is shared")]
    OverlapUndecided {
        /// The output.
        tensor: &'static str,
        /// The other operand, or the output itself.
        other: &'static str,
        /// Steps tried.
        steps: usize,
    },
    /// An output that may not be written.
    #[error("{tensor} is read-only")]
    ReadOnly {
        /// The offending output.
        tensor: &'static str,
    },
    /// A tensor whose bits do not mean what its dtype says (byte order, conjugate or negative bit).
    #[error("{tensor} {what}")]
    Representation {
        /// The offending tensor.
        tensor: &'static str,
        /// What is unusual about it.
        what: &'static str,
    },
    /// Operands that are not those of the spec they are run with.
    #[error("{tensor} is not what the plan was made for: {what} differs")]
    NotAsPlanned {
        /// The offending tensor.
        tensor: &'static str,
        /// What differs.
        what: &'static str,
    },

    /// An option outside its domain.
    #[error("{option} = {got}; allowed: {allowed}")]
    Option {
        /// The name of the option.
        option: &'static str,
        /// Its value.
        got: String,
        /// Its domain.
        allowed: String,
    },

    /// A tensor lies on another device than `q`.
    #[error("{tensor} is on {got}, q is on {expected}")]
    DeviceMismatch {
        /// The offending tensor.
        tensor: &'static str,
        /// The device of `q`.
        expected: Device,
        /// The device of `tensor`.
        got: Device,
    },
    /// A device that this build or machine does not have.
    #[error("{device} is not available: {why}")]
    DeviceUnavailable {
        /// The device.
        device: Device,
        /// Why.
        why: String,
    },

    /// A device, or its compiler, refused a call. Whether outputs were written is not known.
    #[error("{device} failed: {why}")]
    DeviceFailed {
        /// The device.
        device: Device,
        /// Which call, and what it answered.
        why: String,
    },

    /// Tensors of different kinds in one call.
    #[error("{tensor} is a {got}, q is a {expected}: all tensors of one call are of one kind")]
    KindMismatch {
        /// The offending tensor.
        tensor: &'static str,
        /// The kind of `q`.
        expected: String,
        /// The kind of `tensor`.
        got: String,
    },

    /// A valid request that is not served.
    #[error("{what} is not served: {why}; {instead}")]
    Unsupported {
        /// What was asked.
        what: String,
        /// Why not.
        why: String,
        /// What to do instead.
        instead: String,
    },
    /// A head whose estimated error is beyond the tolerance, of operands whose originals are not at hand.
    #[error(
        "head {head} of batch {batch} may be off by {estimate:.3e} (relative L2, scores by {epsilon:.3e}): tolerance is {tolerance:e}, and \
         without the originals of k and v nothing else can be computed"
    )]
    ToleranceExceeded {
        /// Which batch entry.
        batch: usize,
        /// Which query head.
        head: usize,
        /// The estimate of its error, in relative L2.
        estimate: f64,
        /// By how much one of its scores may be off; 1 or more is beyond any tolerance.
        epsilon: f64,
        /// What was asked.
        tolerance: f64,
    },
    /// A worker panicked: a defect of Rapt. The contents of the outputs are unspecified, the engine is usable.
    #[error("a worker panicked ({message}); this is a defect of Rapt, please report it")]
    WorkerPanicked {
        /// The panic's message.
        message: String,
    },
    /// An executor came back before all work was done. The contents of the outputs are unspecified.
    #[error("the executor ran {done} of {items} pieces of work and says that it is done")]
    WorkLeftUndone {
        /// Pieces of work that were taken.
        done: usize,
        /// Pieces of work that there are.
        items: usize,
    },
    /// Memory for the workspace could not be had.
    #[error("{bytes} bytes of workspace could not be allocated")]
    OutOfMemory {
        /// The size that was asked.
        bytes: usize,
    },
}

impl Error {
    /// A refusal of select.
    #[must_use]
    pub fn unsupported(what: impl Into<String>, why: impl Into<String>, instead: impl Into<String>) -> Self {
        Error::Unsupported { what: what.into(), why: why.into(), instead: instead.into() }
    }

    /// The family of this error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::DtypeMismatch { .. } | Error::OtherDtype { .. } => ErrorKind::DtypeMismatch,
            Error::UnsupportedDtype { .. }
            | Error::MissingPart { .. }
            | Error::UnknownDtypeCode { .. }
            | Error::UnknownDtype { .. } => ErrorKind::UnsupportedDtype,
            Error::Rank { .. }
            | Error::SizeMismatch { .. }
            | Error::HeadGroups { .. }
            | Error::ZeroHeadDim { .. }
            | Error::MaskShape { .. }
            | Error::ShapeMismatch { .. }
            | Error::DescaleShape { .. }
            | Error::PageTableShort { .. }
            | Error::Overflow { .. } => ErrorKind::Shape,
            Error::PageIndex { .. } | Error::Length { .. } | Error::UnknownSequence { .. } => ErrorKind::Index,
            Error::OutOfExtent { .. }
            | Error::Unaligned { .. }
            | Error::NullData { .. }
            | Error::OutputOverlapsItself { .. }
            | Error::OutputOverlaps { .. }
            | Error::OverlapUndecided { .. }
            | Error::ReadOnly { .. }
            | Error::Representation { .. }
            | Error::PageShared { .. }
            | Error::NotAsPlanned { .. } => ErrorKind::Layout,
            Error::Option { .. } | Error::UnexpectedPart { .. } => ErrorKind::Option,
            Error::DeviceMismatch { .. }
            | Error::DeviceUnavailable { .. }
            | Error::DeviceFailed { .. }
            | Error::OutOfPages { .. }
            | Error::OutOfMemory { .. } => ErrorKind::Device,
            Error::KindMismatch { .. } => ErrorKind::Kind,
            Error::ToleranceExceeded { .. } => ErrorKind::Number,
            Error::Unsupported { .. } | Error::WorkerPanicked { .. } | Error::WorkLeftUndone { .. } => {
                ErrorKind::Unsupported
            }
        }
    }

    /// The tensor that the error speaks of, where it speaks of one.
    #[must_use]
    pub fn tensor(&self) -> Option<&'static str> {
        match self {
            Error::DtypeMismatch { tensor, .. }
            | Error::OtherDtype { tensor, .. }
            | Error::UnsupportedDtype { tensor, .. }
            | Error::MissingPart { tensor, .. }
            | Error::UnexpectedPart { tensor, .. }
            | Error::DescaleShape { tensor, .. }
            | Error::UnknownDtype { tensor, .. }
            | Error::Rank { tensor, .. }
            | Error::SizeMismatch { tensor, .. }
            | Error::ZeroHeadDim { tensor, .. }
            | Error::ShapeMismatch { tensor, .. }
            | Error::Overflow { tensor, .. }
            | Error::OutOfExtent { tensor, .. }
            | Error::Unaligned { tensor, .. }
            | Error::NullData { tensor, .. }
            | Error::OutputOverlapsItself { tensor, .. }
            | Error::OutputOverlaps { tensor, .. }
            | Error::OverlapUndecided { tensor, .. }
            | Error::ReadOnly { tensor }
            | Error::Representation { tensor, .. }
            | Error::NotAsPlanned { tensor, .. }
            | Error::DeviceMismatch { tensor, .. }
            | Error::Length { tensor, .. }
            | Error::KindMismatch { tensor, .. } => Some(tensor),
            Error::MaskShape { .. } => Some("mask"),
            Error::PageTableShort { .. } | Error::PageIndex { .. } | Error::PageShared { .. } => Some("page_table"),
            _ => None,
        }
    }
}
