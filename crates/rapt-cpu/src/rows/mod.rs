//! What runs along rows: norms, softmax and sums over the last dimension, and rows read by index.
//!
//! ```text
//! layer norm   y = (x − mean) / √(var + eps) · weight + bias      mean, then Σ (x − mean)²
//! RMS norm     y = x / √(mean(x²) + eps) · weight
//! softmax      y = e^(x − max) / Σ e^(x − max)                     log_softmax: x − max − ln Σ e^(x − max)
//! ```
//! x and y are of one dtype: float32, float64, float16 or bfloat16. Sums are float32, of float64 float64; the result is rounded once.
//! Rows lie any stride apart; the elements of a row follow one another. Deliberately absent: allocation while running, threads.
//!
//! ```
//! use rapt_core::DType;
//! use rapt_cpu::rows::{RowFunction, RowKernel, RowOperands};
//!
//! let kernel = RowKernel::new(rapt_cpu::available()[0], RowFunction::Softmax, DType::F32, 4, [None, None])?;
//! let (x, mut y) = ([[0f32; 4]; 3], [[0f32; 4]; 3]);
//! let operands = RowOperands { rows: 3, x: x.as_ptr().cast(), x_stride: 4, out_stride: 4, ..RowOperands::new(y.as_mut_ptr().cast()) };
//! let mut scratch = vec![0u64; kernel.scratch_bytes() / 8];
//! let items = kernel.items(operands.rows, 1);
//! for item in 0..items {
//!     // SAFETY: the operands have three rows of four elements, and the scratch memory its length.
//!     unsafe { kernel.run_item(item, items, &operands, scratch.as_mut_ptr().cast()) };
//! }
//! assert_eq!(y, [[0.25; 4]; 3]);
//! # Ok::<(), rapt_cpu::rows::RowError>(())
//! ```

mod gather;
mod kernels;

use std::fmt;

use rapt_core::{Arch, DType};

pub use gather::{IndexOutOfRange, Rows, gather_rows};

use crate::available;
use crate::pointwise::share;

/// A function of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RowFunction {
    /// Layer norm: a row of results, and on request `mean` and `rstd`.
    LayerNorm {
        /// What is added to the variance.
        eps: f64,
    },
    /// RMS norm: a row of results, and on request `rstd`.
    RmsNorm {
        /// What is added to the mean square.
        eps: f64,
    },
    /// A row of results; a row of −∞ alone is NaN.
    Softmax,
    /// A row of results.
    LogSoftmax,
    /// One result.
    Sum,
    /// One result; NaN of no elements.
    Mean,
    /// One result: NaN where there is one. A row has at least one element.
    Max,
}

impl RowFunction {
    /// Whether a row of elements becomes a row of results, not one.
    #[must_use]
    pub fn keeps_rows(self) -> bool {
        !matches!(self, RowFunction::Sum | RowFunction::Mean | RowFunction::Max)
    }
}

/// A function of rows of one length, on one instruction set.
#[derive(Clone, Copy, Debug)]
pub struct RowKernel {
    function: RowFunction,
    dtype: DType,
    columns: usize,
    run: kernels::Run,
    params: [Option<DType>; 2],
}

/// Where rows, parameters and results lie.
#[derive(Clone, Copy, Debug)]
pub struct RowOperands {
    /// How many rows.
    pub rows: usize,
    /// The first element.
    pub x: *const u8,
    /// Elements from one row to the next.
    pub x_stride: isize,
    /// The first result.
    pub out: *mut u8,
    /// Elements from one row of results (or one result) to the next.
    pub out_stride: isize,
    /// The factors of a norm, which follow one another, where the kernel has them.
    pub weight: *const u8,
    /// What a layer norm adds, which follows one another, where the kernel has it.
    pub bias: *const u8,
    /// Where a layer norm writes each row's mean, in the dtype of x and one after another; null: nowhere.
    pub mean: *mut u8,
    /// Where a norm writes each row's `1 / √(var + eps)`; null: nowhere.
    pub rstd: *mut u8,
}

impl RowOperands {
    /// No rows, whose results begin here: for struct update syntax.
    #[must_use]
    pub fn new(out: *mut u8) -> RowOperands {
        RowOperands {
            rows: 0,
            x: std::ptr::null(),
            x_stride: 0,
            out,
            out_stride: 0,
            weight: std::ptr::null(),
            bias: std::ptr::null(),
            mean: std::ptr::null_mut(),
            rstd: std::ptr::null_mut(),
        }
    }
}

/// Why there is no kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowError {
    /// x is not of a float dtype that is served.
    Dtype(DType),
    /// A parameter is neither of x's dtype nor float32 beside float16 or bfloat16, or the function has no such parameter.
    Param(DType),
    /// A maximum of no elements.
    Empty,
    /// The rows are longer than addresses can count.
    TooLarge,
    /// This machine or build lacks the instruction set.
    Missing(Arch),
}

impl fmt::Display for RowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RowError::Dtype(dtype) => write!(f, "rows of {dtype}"),
            RowError::Param(dtype) => write!(f, "a parameter of {dtype}"),
            RowError::Empty => f.write_str("a maximum of no elements"),
            RowError::TooLarge => f.write_str("rows longer than addresses can count"),
            RowError::Missing(arch) => write!(f, "{}: this machine or build lacks it", arch.name()),
        }
    }
}

impl std::error::Error for RowError {}

/// Elements that are worth a thread's while.
const ITEM_ELEMENTS: usize = 8 * 1024;

impl RowKernel {
    /// The kernel of a function for rows of `columns` elements; `params` are the dtypes of weight and bias, where there are.
    ///
    /// # Errors
    /// [`RowError`], one variant per cause.
    pub fn new(
        arch: Arch,
        function: RowFunction,
        dtype: DType,
        columns: usize,
        params: [Option<DType>; 2],
    ) -> Result<RowKernel, RowError> {
        if !available().contains(&arch) {
            return Err(RowError::Missing(arch));
        }
        let is_half = matches!(dtype, DType::F16 | DType::BF16);
        for (place, param) in params.into_iter().enumerate() {
            let Some(param) = param else { continue };
            let has = match function {
                RowFunction::LayerNorm { .. } => true,
                RowFunction::RmsNorm { .. } => place == 0,
                _ => false,
            };
            if !has || (param != dtype && !(is_half && param == DType::F32)) {
                return Err(RowError::Param(param));
            }
        }
        if columns == 0 && function == RowFunction::Max {
            return Err(RowError::Empty);
        }
        if columns > isize::MAX as usize / 64 {
            return Err(RowError::TooLarge);
        }
        let run = kernels::run(arch, dtype).ok_or(RowError::Dtype(dtype))?;
        Ok(RowKernel { function, dtype, columns, run, params })
    }

    /// Into how many items of equal work `rows` are best divided among `threads`; 0 where there are no rows.
    #[must_use]
    pub fn items(&self, rows: usize, threads: usize) -> usize {
        rows.saturating_mul(self.columns.max(1)).div_ceil(ITEM_ELEMENTS).min(threads).min(rows)
    }

    /// The bytes of scratch memory that [`run_item`](RowKernel::run_item) needs, one of their own for each thread; a multiple of 64.
    #[must_use]
    pub fn scratch_bytes(&self) -> usize {
        let bytes = if self.dtype == DType::F64 { 8 } else { 4 };
        // A row in the dtype of sums, and weight and bias.
        (3 * bytes * (self.columns + kernels::GAP)).next_multiple_of(64)
    }

    /// The function.
    #[must_use]
    pub fn function(&self) -> RowFunction {
        self.function
    }

    /// Runs the rows of `item`, of `items` that share them: each of `0..items` once, in any order, on any threads.
    ///
    /// # Safety
    /// `x` and `out` are aligned to the dtype and have the rows; so have `weight` and `bias` their elements where the kernel has
    /// them, and `mean` and `rstd` an element for each row where they are not null. `out` may be `x` with the same stride, and
    /// otherwise shares no memory with what is read. `scratch` is aligned to 8, has [`scratch_bytes`](RowKernel::scratch_bytes)
    /// and is nobody else's meanwhile.
    pub unsafe fn run_item(&self, item: usize, items: usize, operands: &RowOperands, scratch: *mut u8) {
        let work = kernels::Work {
            function: self.function,
            columns: self.columns,
            params: self.params,
            rows: share(operands.rows, item, items),
            operands: *operands,
            scratch,
        };
        // SAFETY: promised by the caller; the instruction set is there, as `new` has seen.
        unsafe { (self.run)(&work) };
    }
}
