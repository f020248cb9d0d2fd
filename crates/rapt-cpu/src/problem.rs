//! A request as the kernels see it: pointers, strides and sizes, its partition into items, and its scratch memory.

use std::ptr::NonNull;

use rapt_core::{
    BlockRange, Codes, CodesSpec, Compute, DType, Format, Granularity, MaskClass, Operands, Qkv, ScaleLayout, Spec,
    TensorSpec, View, swizzle,
};

use crate::dropping::Dropping;
use crate::partition::Partition;
use crate::scratch::Scratch;
pub(crate) use crate::task_rows::Row;
use crate::task_rows::TaskRows;

/// A tensor that is read, in canonical order; strides in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input<const N: usize> {
    pub(crate) ptr: *const u8,
    pub(crate) dtype: DType,
    /// Bytes of an element.
    pub(crate) size: isize,
    pub(crate) strides: [isize; N],
    /// Of K, V and what scales them: the pages that they lie in.
    pub(crate) pages: Option<PageTable>,
}

/// The pages of a cache that hold the keys of a sequence; the first stride of a tensor is that from page to page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageTable {
    /// Of each run of `page_size` keys its page.
    entries: NonNull<i32>,
    page_size: usize,
}

/// A tensor that is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output<const N: usize> {
    pub(crate) ptr: *mut u8,
    pub(crate) dtype: DType,
    /// Bytes of an element.
    pub(crate) size: isize,
    pub(crate) strides: [isize; N],
}

impl<const N: usize> Input<N> {
    pub(crate) fn new(ptr: *const u8, spec: &TensorSpec<N>) -> Self {
        Input { ptr, dtype: spec.dtype, size: spec.dtype.size_bytes() as isize, strides: spec.strides, pages: None }
    }

    fn in_pages(self, pages: Option<PageTable>) -> Self {
        Input { pages, ..self }
    }

    /// The address of an element. Never formed by an offset out of bounds: the index lies inside the tensor.
    #[inline(always)]
    pub(crate) fn at(&self, index: [usize; N]) -> *const u8 {
        self.ptr.wrapping_offset(offset(&self.strides, index) * self.size)
    }
}

impl Input<4> {
    /// The address of an element of K or V, or of what scales them, wherever its key lies.
    #[inline(always)]
    pub(crate) fn at_key(&self, [batch, head, j, d]: [usize; 4]) -> *const u8 {
        match self.pages {
            None => self.at([batch, head, j, d]),
            Some(PageTable { entries, page_size }) => {
                // SAFETY: the table has an entry for each page of keys, which is a page of the cache.
                let page = unsafe { *entries.as_ptr().add(j / page_size) } as usize;
                self.at([page, head, j % page_size, d])
            }
        }
    }

    /// How many of the `n` keys from `j` on lie a stride apart, each from the one before.
    #[inline(always)]
    pub(crate) fn run(&self, j: usize, n: usize) -> usize {
        self.pages.map_or(n, |pages| n.min(pages.page_size - j % pages.page_size))
    }

    /// The runs of keys `j0..j0 + n` that lie a stride apart: how far each is from `j0`, and its length.
    #[inline(always)]
    pub(crate) fn runs(&self, j0: usize, n: usize) -> impl Iterator<Item = (usize, usize)> {
        let (input, mut at) = (*self, 0);
        std::iter::from_fn(move || {
            let len = input.run(j0 + at, n - at);
            let run = (at, len);
            at += len;
            (len > 0).then_some(run)
        })
    }
}

impl<const N: usize> Output<N> {
    pub(crate) fn new(ptr: *mut u8, spec: &TensorSpec<N>) -> Self {
        Output { ptr, dtype: spec.dtype, size: spec.dtype.size_bytes() as isize, strides: spec.strides }
    }

    /// The address of an element.
    #[inline(always)]
    pub(crate) fn at(&self, index: [usize; N]) -> *mut u8 {
        self.ptr.wrapping_offset(offset(&self.strides, index) * self.size)
    }
}

#[inline(always)]
fn offset<const N: usize>(strides: &[isize; N], index: [usize; N]) -> isize {
    // Wrapping: a reachable offset fits isize (checked when the view was built), and indices stay in range.
    strides.iter().zip(index).fold(0isize, |sum, (stride, i)| sum.wrapping_add(stride.wrapping_mul(i as isize)))
}

/// What rows are made of that are no numbers of the kernel's own: they are read into a panel of f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowKind {
    Int8,
    Uint8,
    Int4,
    E4m3fn,
    E5m2,
    E2m1,
    F16,
    Bf16,
}

impl RowKind {
    /// The codes of a format.
    pub(crate) const fn of_format(format: Format) -> Self {
        match format {
            Format::Int8 => RowKind::Int8,
            Format::Uint8 => RowKind::Uint8,
            Format::Int4 => RowKind::Int4,
            Format::E4m3fn | Format::Mxfp8 => RowKind::E4m3fn,
            Format::E5m2 => RowKind::E5m2,
            Format::Mxfp4 | Format::Nvfp4 => RowKind::E2m1,
        }
    }

    /// How many share a byte.
    pub(crate) const fn shared(self) -> usize {
        match self {
            RowKind::Int4 | RowKind::E2m1 => 2,
            _ => 1,
        }
    }

    /// Numbers of a dtype beside codes, in a kernel that reads f32; `None` for f32 itself.
    pub(crate) const fn of_dtype(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F16 => Some(RowKind::F16),
            DType::BF16 => Some(RowKind::Bf16),
            _ => None,
        }
    }
}

/// Where decode applies the factors of codes that it multiplies as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fold {
    /// Each row has one: it goes into the score, or into the weight.
    Rows,
    /// Each channel has one for all keys: it goes into the queries, or into the output.
    Channels,
    /// Whole vectors of a row share one: it goes into them.
    Groups,
}

/// How rows are read that are no numbers of the kernel's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    pub(crate) kind: RowKind,
    /// `None` where they become numbers in a panel.
    pub(crate) fold: Option<Fold>,
    /// Where factors go if codes are multiplied as pairs of bf16, or as quads of bytes.
    pub(crate) pairs: Option<Fold>,
    pub(crate) quads: Option<Fold>,
}

/// Reads `n` rows of `dim` elements from row `[batch, head, j]` on, to consecutive rows of f32.
///
/// # Safety
/// The rows lie inside the tensor, the panel holds them, and the instruction set is present.
pub(crate) type ReadRows = unsafe fn(&Source, [usize; 3], usize, usize, *mut f32);

/// What reads rows of a kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowReader {
    pub(crate) read: ReadRows,
    /// Decode's products, where they take codes as they are.
    pub(crate) products: Option<CodeProducts>,
    /// What makes forward's lanes of codes, where it multiplies them as pairs.
    pub(crate) pack: Option<PackCodes>,
}

/// A block of K or V that becomes lanes of pairs.
#[derive(Clone, Copy)]
pub(crate) struct CodePanel {
    /// Batch, head and first key; keys, and elements of each.
    pub(crate) first: [usize; 3],
    pub(crate) n: usize,
    pub(crate) dim: usize,
    /// Whether a lane has two keys.
    pub(crate) of_values: bool,
    /// Whether factors go to the output: see [`Source::output_factors`].
    pub(crate) by_output: bool,
    /// Units of scores for 1 in the exponent of 2.
    pub(crate) per_log2: f32,
    pub(crate) to: *mut f32,
    /// Of each key, which its lanes are without; null where there is none. Of V: what they add to scores.
    pub(crate) factors: *mut f32,
    /// Of V: one over each factor.
    pub(crate) inverses: *mut f32,
}

/// Makes lanes of a block of codes, and finds their factors. Answers whether they do not do: numbers of f32 must then.
///
/// # Safety
/// The keys lie inside the tensor, the panel holds them, and the instruction set is present.
pub(crate) type PackCodes = unsafe fn(&Source, &CodePanel) -> bool;

/// Q, K or V whose rows are read into a panel of f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    /// The codes, or halves.
    pub(crate) rows: Input<4>,
    /// What makes numbers of codes.
    pub(crate) scales: Option<Scales>,
    /// How many elements of a row share an element of its tensor.
    pub(crate) shared: usize,
    pub(crate) read: ReadRows,
    pub(crate) products: Option<CodeProducts>,
    pub(crate) pack: Option<PackCodes>,
}

impl Source {
    /// Reads the `n` keys from `first` on, of `dim` elements, to consecutive rows of f32, page by page where they lie in pages.
    ///
    /// # Safety
    /// As of [`ReadRows`].
    pub(crate) unsafe fn read_keys(&self, first: [usize; 3], n: usize, dim: usize, panel: *mut f32) {
        let [batch, head, j0] = first;
        for (at, len) in self.rows.runs(j0, n) {
            // SAFETY: promised by the caller.
            unsafe { (self.read)(self, [batch, head, j0 + at], len, dim, panel.wrapping_add(at * dim)) };
        }
    }
}

/// What makes numbers of codes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scales {
    pub(crate) descale: Input<4>,
    pub(crate) zero_point: Option<Input<4>>,
    /// Where factors lie swizzled: how many a row has.
    pub(crate) swizzled: Option<usize>,
    /// Neighbours along a row that share a factor.
    pub(crate) chunk: usize,
    /// The factor of the whole tensor; 1 where the format has none.
    pub(crate) global: f32,
}

impl Scales {
    fn new(spec: &CodesSpec, codes: &Codes<'_>, pages: Option<PageTable>) -> Self {
        let zero_point = spec.zero_point.as_ref().zip(codes.zero_point);
        Scales {
            descale: Input::new(codes.descale.as_ptr(), &spec.descale).in_pages(pages),
            zero_point: zero_point.map(|(spec, view)| Input::new(view.as_ptr(), spec).in_pages(pages)),
            swizzled: (spec.scale_layout == ScaleLayout::Swizzle32x4x4).then_some(spec.descale.shape[3]),
            chunk: spec.chunk,
            global: codes.global_scale.unwrap_or(1.0),
        }
    }

    /// The address of the factor of group `group` of a key, or of a query, wherever it lies.
    #[inline(always)]
    pub(crate) fn at(&self, [batch, head, j, group]: [usize; 4]) -> *const u8 {
        match self.swizzled {
            None => self.descale.at_key([batch, head, j, group]),
            Some(groups) => self.descale.at([batch, head, 0, swizzle::swizzled(j, group, groups)]),
        }
    }
}

/// What is done to a product of q and k before the softmax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scores {
    /// `|softmax_scale|`; its sign goes into q, exactly.
    pub(crate) scale: f64,
    /// Whether q is negated when it is packed.
    pub(crate) negate_q: bool,
    /// `c` of `c·tanh(x/c)`.
    pub(crate) softcap: Option<f64>,
    /// Scores are brought to natural units before the maximum, because something is added to them there; otherwise the
    /// raw products are compared, and the scale goes into the exponential.
    pub(crate) natural: bool,
    /// Of int8: whether each key has a factor of its own.
    pub(crate) key_factors: bool,
}

impl Scores {
    pub(crate) fn new(spec: &Spec, mask: MaskClass) -> Self {
        let scale = spec.softmax_scale.get();
        let most = if spec.numerics.accumulation == DType::F64 { f64::MAX } else { f64::from(f32::MAX) };
        Scores {
            scale: scale.abs(),
            negate_q: scale < 0.0,
            // A cap beyond the accumulation dtype caps none of its numbers.
            softcap: spec.softcap.map(rapt_core::Finite::get).filter(|&cap| cap <= most),
            natural: spec.softcap.is_some() || spec.alibi_slopes.is_some() || mask == MaskClass::Additive,
            key_factors: spec.compute == Compute::Int8
                && spec.codes.k.as_deref().is_some_and(|codes| codes.granularity == Granularity::Token),
        }
    }

    /// What a difference of scores is multiplied with in the exponent of 2.
    pub(crate) fn exponent(&self) -> f64 {
        std::f64::consts::LOG2_E * if self.natural { 1.0 } else { self.scale }
    }

    /// What a score is multiplied with to be in natural units.
    pub(crate) fn to_natural(self) -> f64 {
        if self.natural { 1.0 } else { self.scale }
    }
}

/// What select decides of a [`Problem`]: all of it but what the spec and the operands say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Decisions {
    pub(crate) partition: Partition,
    /// Of each thread.
    pub(crate) scratch: Scratch,
    pub(crate) scores: Scores,
    /// Of those of q, k and v that are no numbers of the kernel's own.
    pub(crate) readings: Qkv<Option<Reading>>,
}

/// A request as the kernels see it.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) q: Input<4>,
    pub(crate) k: Input<4>,
    pub(crate) v: Input<4>,
    /// Those of them that are read into a panel of f32.
    pub(crate) sources: Qkv<Option<Source>>,
    pub(crate) out: Output<4>,
    pub(crate) lse: Option<Output<3>>,
    pub(crate) mask: Option<Input<4>>,
    pub(crate) sinks: Option<Input<1>>,
    pub(crate) alibi_slopes: Option<Input<1>>,
    /// Which weights are dropped.
    pub(crate) dropping: Option<Dropping>,
    pub(crate) num_q_heads: usize,
    pub(crate) group_size: usize,
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
    pub(crate) range: BlockRange,
    pub(crate) scores: Scores,
    pub(crate) partition: Partition,
    /// Of each thread.
    pub(crate) scratch: Scratch,
    /// Decode: `[tasks][chunks][rows][head_dim_v + 2]` of the accumulation dtype: partial o, max, sum.
    pub(crate) partials: *mut u8,
}

// SAFETY: inputs are only read, and items write disjoint parts of the outputs and partials.
unsafe impl Sync for Problem {}

impl Problem {
    /// A request whose rows `reader` finds the readers of.
    pub(crate) fn new(
        spec: &Spec,
        decisions: &Decisions,
        operands: &mut Operands<'_>,
        partials: *mut u8,
        reader: impl Fn(Reading) -> RowReader,
    ) -> Self {
        let (out, lse) = (operands.out_ptr(), operands.lse_ptr());
        let tensors = operands.tensors();
        let pages = spec.pages.as_deref().and_then(|pages| {
            let entries = NonNull::from(operands.pages().first()?);
            Some(PageTable { entries, page_size: pages.page_size })
        });
        let Decisions { partition, scratch, scores, readings } = *decisions;
        let source = |reading: Option<Reading>, rows: Input<4>, scales: Option<Scales>| {
            reading.map(|reading| {
                let RowReader { read, products, pack } = reader(reading);
                Source { rows, scales, shared: reading.kind.shared(), read, products, pack }
            })
        };
        let scales = |spec: &Option<Box<CodesSpec>>, codes: &Option<Box<Codes<'_>>>, pages: Option<PageTable>| {
            spec.as_deref().zip(codes.as_deref()).map(|(spec, codes)| Scales::new(spec, codes, pages))
        };
        let q = Input::new(tensors.q.as_ptr(), &spec.q);
        let k = Input::new(tensors.k.as_ptr(), &spec.k).in_pages(pages);
        let v = Input::new(tensors.v.as_ptr(), &spec.v).in_pages(pages);
        let (of_spec, of_tensors) = (&spec.codes, &tensors.codes);
        let sources = Qkv {
            q: source(readings.q, q, scales(&of_spec.q, &of_tensors.q, None)),
            k: source(readings.k, k, scales(&of_spec.k, &of_tensors.k, pages)),
            v: source(readings.v, v, scales(&of_spec.v, &of_tensors.v, pages)),
        };
        let vector = |of: Option<TensorSpec<1>>, view: Option<View<'_>>| Some(Input::new(view?.as_ptr(), &of?));
        Problem {
            q,
            k,
            v,
            sources,
            out: Output::new(out, &spec.out),
            lse: spec.lse.as_ref().zip(lse).map(|(lse, ptr)| Output::new(ptr, lse)),
            mask: spec.mask.as_ref().zip(tensors.mask).map(|(mask, view)| Input::new(view.as_ptr(), mask)),
            sinks: vector(spec.sinks, tensors.sinks),
            alibi_slopes: vector(spec.alibi_slopes, tensors.alibi_slopes),
            dropping: Dropping::new(spec, tensors.dropout),
            num_q_heads: spec.num_q_heads(),
            group_size: spec.group_size(),
            q_len: spec.q_len(),
            kv_len: spec.kv_len(),
            head_dim: spec.head_dim(),
            head_dim_v: spec.head_dim_v(),
            range: spec.block_range(),
            scores,
            partition,
            scratch,
            partials,
        }
    }

    /// The batch index and first head of a task.
    #[inline(always)]
    pub(crate) fn task_origin(&self, task: usize) -> (usize, usize) {
        let per_batch = self.num_q_heads / self.partition.heads;
        (task / per_batch, task % per_batch * self.partition.heads)
    }

    /// The rows of a task.
    #[inline(always)]
    fn rows(&self) -> TaskRows {
        TaskRows { q_len: self.q_len, range: self.range }
    }

    /// The query behind row `r` of a task.
    #[inline(always)]
    pub(crate) fn row(&self, origin: (usize, usize), r: usize) -> Row {
        self.rows().row(origin, r)
    }

    /// The runs of consecutive queries of one head among rows `r0..r1` of a task: the first of each, and how many there are.
    pub(crate) fn runs_of(
        &self,
        origin: (usize, usize),
        rows: (usize, usize),
    ) -> impl Iterator<Item = (Row, usize)> + use<> {
        self.rows().runs_of(origin, rows)
    }

    /// The smallest run of keys that holds every key seen by rows `r0..r1`.
    pub(crate) fn keys_of_rows(&self, r0: usize, r1: usize) -> (usize, usize) {
        self.rows().keys_of_rows(r0, r1)
    }

    /// Whether rows `r0..r1` see every key of `j0..j1` as far as positions go.
    pub(crate) fn sees_all(&self, r0: usize, r1: usize, j0: usize, j1: usize) -> bool {
        self.rows().sees_all(r0, r1, j0, j1)
    }
}

/// Consecutive keys as codes, and what makes numbers of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CodeRows {
    pub(crate) first: *const u8,
    /// Bytes from row to row.
    pub(crate) stride: isize,
    /// Of each group of each row, or of each channel.
    pub(crate) factors: *const f32,
    pub(crate) points: *const f32,
    /// Groups of a row; 0 where rows share their factors.
    pub(crate) per_row: usize,
    /// Vector `n` of a row is of group `n >> vectors_log2`.
    pub(crate) vectors_log2: u32,
}

impl CodeRows {
    /// No keys.
    pub(crate) const NONE: CodeRows = CodeRows {
        first: std::ptr::null(),
        stride: 0,
        factors: std::ptr::null(),
        points: std::ptr::null(),
        per_row: 0,
        vectors_log2: 0,
    };
}

/// Matrices of rows of f32, with the distance of their rows.
pub(crate) type In = (*const f32, usize);
pub(crate) type Out = (*mut f32, usize);

/// How many keys, elements of each, and queries.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) n: usize,
    pub(crate) dim: usize,
    pub(crate) rows: usize,
}

/// The two products of decode with codes of one kind, and what is around them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CodeProducts {
    pub(crate) fold: Fold,
    /// `s[r][j] = q_r · c_j` for at least [`QK_KEYS`](crate::partition::QK_KEYS) keys, each `c` with its group's factor where groups have one.
    pub(crate) dots: unsafe fn(&CodeRows, Sizes, In, Out),
    /// `o[r] += Σ_j p[r][j] · c_j`, likewise.
    pub(crate) weighted: unsafe fn(&CodeRows, Sizes, In, Out),
    /// Every `c`, likewise, to consecutive rows; NaN too.
    pub(crate) numbers: unsafe fn(&CodeRows, Sizes, *mut f32),
    /// What each `c` is short of: `Element::SHORT`.
    pub(crate) short: f32,
    /// Whether the two products do not know a NaN among the codes.
    pub(crate) has_nan: Option<unsafe fn(&CodeRows, Sizes) -> bool>,
    /// The first product of a chunk, and the second; false, and nothing is done, where factors do not allow it.
    pub(crate) scores: unsafe fn(&CodesChunk<'_>, Out) -> bool,
    pub(crate) outputs: unsafe fn(&CodesChunk<'_>, &Weights) -> bool,
    /// What those two multiply with by the dot of pairs, if they do, or by that of quads.
    pub(crate) pairs: Option<PairProducts>,
    pub(crate) quads: Option<QuadProducts>,
}

/// See [`QuadProducts`].
pub(crate) type QuadDots = unsafe fn(&CodeRows, &QuadQueries, Out);
pub(crate) type QuadSums = unsafe fn(&CodeRows, &QuadWeights, Out);

/// The two products of decode with codes of one kind as quads of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuadProducts {
    /// `s[r][j] = q_r · c_j` but for what is the same for all elements of a key, up to a whole number of sixteen keys.
    pub(crate) dots: QuadDots,
    /// `sums[r] += Σ_j w[r][j] · c_j` in the order of value vectors.
    pub(crate) weighted: QuadSums,
    /// Where factors go.
    pub(crate) fold: Fold,
    /// Planes of a span of 64 bytes.
    pub(crate) planes: usize,
    /// What a byte is more than its code, how many times the code it is, and what an element is less than the code.
    pub(crate) bias: u8,
    pub(crate) times: f32,
    pub(crate) shift: f32,
}

/// Queries as digits, and the keys that they are multiplied with.
#[derive(Clone, Copy)]
pub(crate) struct QuadQueries {
    /// Keys, queries, bytes and elements of a key, and elements of a group.
    pub(crate) n: usize,
    pub(crate) rows: usize,
    pub(crate) row_bytes: usize,
    pub(crate) dim: usize,
    pub(crate) chunk: usize,
    /// Bytes from a key to the one that is asked for meanwhile.
    pub(crate) ahead: isize,
    /// `[rows][spans][4][planes][digits][64]` bytes, with the bytes of a row.
    pub(crate) q: (*const u8, usize),
    /// What sums begin with, integers as bytes: `[rows][digits][64]`, of groups `[rows][spans][sets][digits][64]`.
    pub(crate) start: (*const u8, usize),
    /// `[rows]`
    pub(crate) units: *const f32,
}

/// Weights as digits, and the keys that they weigh.
#[derive(Clone, Copy)]
pub(crate) struct QuadWeights {
    pub(crate) n: usize,
    pub(crate) rows: usize,
    pub(crate) row_bytes: usize,
    /// Bytes from a key to the one of the next block that is asked for meanwhile.
    pub(crate) ahead: isize,
    /// `[rows][digits][keys]` bytes, with the bytes of a row.
    pub(crate) weights: (*const u8, usize),
    /// What sums begin with, `[rows][digits]`.
    pub(crate) start: *const i32,
    /// `[rows]`
    pub(crate) units: *const f32,
}

/// See [`PairProducts`].
pub(crate) type PairDots = unsafe fn(&CodeRows, &PairQueries, Out);
pub(crate) type PairSums = unsafe fn(&CodeRows, &PairWeights, Out);

/// The two products of decode with codes of one kind as pairs of bf16.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairProducts {
    /// `s[r][j] = q_r · e_j`, with the factors and zero points of groups where there are groups.
    pub(crate) dots: PairDots,
    /// `o[r] += Σ_j p[r][j] · e_j` in the order of value vectors, likewise.
    pub(crate) weighted: PairSums,
    /// Where factors go.
    pub(crate) fold: Fold,
    /// Whether one of the codes of so many keys, in so many bytes each, is NaN or infinite.
    pub(crate) has_non_finite: unsafe fn(&CodeRows, usize, usize) -> bool,
    pub(crate) has_infinite: bool,
    /// Elements of 64 bytes.
    pub(crate) span: usize,
    /// What an element is less than its code.
    pub(crate) shift: f32,
}

/// Queries as pairs, and the keys that they are multiplied with.
#[derive(Clone, Copy)]
pub(crate) struct PairQueries {
    /// Keys, queries, bytes and elements of a key, and elements of a group.
    pub(crate) n: usize,
    pub(crate) rows: usize,
    pub(crate) row_bytes: usize,
    pub(crate) dim: usize,
    pub(crate) chunk: usize,
    /// Bytes from a key to the one that is asked for meanwhile; 0: none is.
    pub(crate) ahead: isize,
    /// `[rows][spans][vectors][planes][lanes]`.
    pub(crate) q: In,
    /// `[rows][spans][lanes]`: sums of the numbers of a lane, where groups have a shift.
    pub(crate) sums: In,
}

/// Weights as pairs, and the keys that they weigh.
#[derive(Clone, Copy)]
pub(crate) struct PairWeights {
    pub(crate) n: usize,
    pub(crate) rows: usize,
    pub(crate) row_bytes: usize,
    pub(crate) dim: usize,
    pub(crate) chunk: usize,
    pub(crate) ahead: isize,
    /// `[rows][pairs of keys]`; of groups `[pairs of keys][rows][groups]`.
    pub(crate) p: In,
    /// From a weight to what bf16 leaves of it, in words.
    pub(crate) rest: usize,
}

/// Scratch memory of a chunk of codes.
#[derive(Clone, Copy)]
pub(crate) struct CodesScratch {
    /// `[rows][head_dim_padded]`: q with the factors of its channels; or as pairs, see [`PairQueries`].
    pub(crate) q: *mut f32,
    /// Factors and zero points, as many as [`crate::scratch::Scratch::decode`] says.
    pub(crate) factors: *mut f32,
    pub(crate) points: *mut f32,
    /// `[panel_keys][dim]` of codes, where they lie apart.
    pub(crate) gathered: *mut u8,
    /// `[panel_keys][dim]` of numbers.
    pub(crate) panel: *mut f32,
    /// Of pairs: see [`crate::scratch::Scratch`].
    pub(crate) q_sums: *mut f32,
    pub(crate) natural: *mut f32,
    pub(crate) weights: *mut f32,
    pub(crate) p_sums: *mut f32,
    pub(crate) sums: *mut f32,
    pub(crate) natural_sums: *mut f32,
    /// Of quads: see [`crate::scratch::Scratch`].
    pub(crate) starts: *mut f32,
    pub(crate) units: *mut f32,
}

/// One chunk of keys that are codes.
#[derive(Clone, Copy)]
pub(crate) struct CodesChunk<'a> {
    pub(crate) problem: &'a Problem,
    pub(crate) source: &'a Source,
    pub(crate) products: &'a CodeProducts,
    /// Batch, head of K and V, first key.
    pub(crate) first: (usize, usize, usize),
    /// Keys.
    pub(crate) n: usize,
    /// Elements of a row.
    pub(crate) dim: usize,
    /// The queries, in the first product.
    pub(crate) q: In,
    pub(crate) scratch: CodesScratch,
}

/// What the second product reads and writes.
pub(crate) struct Weights {
    /// Whether some key is masked for some row.
    pub(crate) masked: bool,
    /// Multiplied with the factors of their keys meanwhile.
    pub(crate) p: Out,
    pub(crate) o: Out,
}
