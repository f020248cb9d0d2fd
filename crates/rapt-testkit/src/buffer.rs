//! A tensor that owns its memory: any dtype, strides and guards, filled from f64.
//!
//! Data layout: the memory is exactly what shape and strides reach, plus the placement's slack on both sides; bytes that
//! belong to no element hold [`PATTERN`] (1, true, in a boolean tensor), so reading padding shows.

use rapt_core::{DType, Device, Dims, Extent, TensorLayout, View, ViewMut};

use crate::memory::{Guard, Memory, PATTERN};
use crate::scalar::{decode, encode};
use crate::zoo::Placement;

/// A tensor of four canonical dimensions, `[batch, heads, len, dim]`, with memory of its own.
#[derive(Debug)]
pub struct TensorBuf {
    dtype: DType,
    shape: [usize; 4],
    strides: [isize; 4],
    /// Where element 0 lies in the memory, in bytes.
    origin: usize,
    /// Where each element lies in the memory, in bytes, row-major.
    offsets: Vec<usize>,
    memory: Memory,
    snapshot: Vec<u8>,
}

/// What a run did to memory that it may not write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The tensor.
    pub tensor: &'static str,
    /// The byte, relative to the tensor's first reachable byte.
    pub byte: isize,
    /// What lies there.
    pub place: &'static str,
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: byte {} was written: {}", self.tensor, self.byte, self.place)
    }
}

impl TensorBuf {
    /// `values`, in row-major order of `shape`, rounded to `dtype` and laid out by `placement`. Where elements share an
    /// address the last one stays: read [`values`](Self::values) back. No values: every element holds the pattern.
    ///
    /// # Panics
    /// If there are values, and not as many as elements.
    #[must_use]
    pub fn new(dtype: DType, shape: [usize; 4], placement: &Placement, guard: Guard, values: Option<&[f64]>) -> Self {
        let empty = shape.contains(&0);
        let spans = shape.iter().zip(placement.strides).map(|(&n, stride)| (n.max(1) as isize - 1) * stride);
        let (mut lo, mut hi) = (0, 1);
        for span in spans {
            if span < 0 { lo += span } else { hi += span }
        }
        let size = dtype.size_bytes();
        let reach = if empty { 0 } else { (hi - lo) as usize };
        let len = (reach + 2 * placement.slack) * size;
        let guard = match guard {
            Guard::Heap { shift } => Guard::Heap { shift: shift / size * size },
            pages => pages,
        };
        let mut memory = Memory::new(len, guard);
        if dtype == DType::Bool {
            memory.bytes_mut().fill(1);
        }
        let origin = (placement.slack + if empty { 0 } else { lo.unsigned_abs() }) * size;
        let in_memory = |element: isize| (origin as isize + element * size as isize) as usize;
        let offsets: Vec<usize> = element_offsets(shape, placement.strides).into_iter().map(in_memory).collect();
        if let Some(values) = values {
            assert_eq!(values.len(), offsets.len(), "as many values as elements");
            let bytes = memory.bytes_mut();
            for (&at, &value) in offsets.iter().zip(values) {
                encode(dtype, value, &mut bytes[at..at + size]);
            }
        }
        let snapshot = memory.bytes().to_vec();
        TensorBuf { dtype, shape, strides: placement.strides, origin, offsets, memory, snapshot }
    }

    /// The dtype.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The canonical sizes.
    #[must_use]
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Every element, row-major.
    #[must_use]
    pub fn values(&self) -> Vec<f64> {
        let (bytes, size) = (self.memory.bytes(), self.dtype.size_bytes());
        self.offsets.iter().map(|&at| decode(self.dtype, &bytes[at..at + size])).collect()
    }

    /// The bits of every element, row-major; every NaN is one and the same.
    #[must_use]
    pub fn bits(&self) -> Vec<u64> {
        self.values().into_iter().map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect()
    }

    /// The sizes and strides that a caller would pass, the last `rank` canonical dimensions in the order of `layout`.
    fn given(&self, rank: usize, layout: TensorLayout) -> (Dims<usize>, Dims<isize>) {
        assert!(self.shape[..4 - rank].iter().all(|&n| n == 1), "{:?} has no rank {rank}", self.shape);
        let mut order: Vec<usize> = (4 - rank..4).collect();
        if layout == TensorLayout::Bshd && rank >= 3 {
            order.swap(rank - 3, rank - 2);
        }
        let shape: Vec<usize> = order.iter().map(|&d| self.shape[d]).collect();
        let strides: Vec<isize> = order.iter().map(|&d| self.strides[d]).collect();
        (Dims::new(&shape).expect("rank 4 at most"), Dims::new(&strides).expect("rank 4 at most"))
    }

    fn extent(&self) -> Extent {
        Extent::Proven { address: self.memory.as_ptr() as usize, len_bytes: self.memory.len() }
    }

    /// The last `rank` dimensions, in the order of `layout`.
    ///
    /// # Panics
    /// If one of the dimensions left out is not 1.
    #[must_use]
    pub fn view(&self, tensor: &'static str, rank: usize, layout: TensorLayout) -> View<'_> {
        let (shape, strides) = self.given(rank, layout);
        let ptr = self.memory.as_ptr().wrapping_add(self.origin);
        // SAFETY: the extent is that of `self.memory`, borrowed, filled in `new` with elements of `dtype`.
        unsafe { View::from_raw_parts(tensor, ptr, self.dtype, shape, strides, Device::Cpu, self.extent()) }
            .expect("a buffer reaches its own memory")
    }

    /// As [`view`](Self::view), to be written.
    ///
    /// # Panics
    /// As [`view`](Self::view).
    #[must_use]
    pub fn view_mut(&mut self, tensor: &'static str, rank: usize, layout: TensorLayout) -> ViewMut<'_> {
        let (shape, strides) = self.given(rank, layout);
        let ptr = self.memory.as_ptr().wrapping_add(self.origin);
        // SAFETY: as in `view`, and the memory is borrowed mutably.
        unsafe { ViewMut::from_raw_parts(tensor, ptr, self.dtype, shape, strides, Device::Cpu, self.extent()) }
            .expect("a buffer reaches its own memory")
    }

    /// Puts every byte back to what it was when the buffer was made.
    pub fn clear(&mut self) {
        self.memory.bytes_mut().copy_from_slice(&self.snapshot);
    }

    /// Whether every byte is as it was when the buffer was made.
    ///
    /// # Errors
    /// The first byte that is not.
    pub fn check_unchanged(&self, tensor: &'static str) -> Result<(), Damage> {
        self.check(tensor, &self.snapshot, "an input, or padding between its elements")
    }

    /// Whether every byte that belongs to no element is as it was when the buffer was made.
    ///
    /// # Errors
    /// The first byte that is not.
    pub fn check_padding(&self, tensor: &'static str) -> Result<(), Damage> {
        let (now, size) = (self.memory.bytes(), self.dtype.size_bytes());
        let mut expected = self.snapshot.clone();
        self.offsets.iter().for_each(|&at| expected[at..at + size].copy_from_slice(&now[at..at + size]));
        self.check(tensor, &expected, "padding between elements")
    }

    fn check(&self, tensor: &'static str, expected: &[u8], place: &'static str) -> Result<(), Damage> {
        if let Some(byte) = self.memory.broken_guard() {
            return Err(Damage { tensor, byte, place: "outside the buffer" });
        }
        let now = self.memory.bytes();
        // Compared at once: what differs is looked for only if something does.
        if now == expected {
            return Ok(());
        }
        let byte = now.iter().zip(expected).position(|(now, then)| now != then).unwrap_or(now.len());
        Err(Damage { tensor, byte: byte as isize, place })
    }

    /// Whether some element still holds the pattern of a fresh buffer in all its bytes.
    #[must_use]
    pub fn has_unwritten(&self) -> bool {
        let (bytes, size) = (self.memory.bytes(), self.dtype.size_bytes());
        self.offsets.iter().any(|&at| bytes[at..at + size].iter().all(|&byte| byte == PATTERN))
    }
}

/// Where each element of `shape` lies, in elements from element 0, row-major.
pub(crate) fn element_offsets(shape: [usize; 4], strides: [isize; 4]) -> Vec<isize> {
    let [a, b, c, d] = shape;
    let [along_a, along_b, along_c, along_d] = strides;
    let mut offsets = Vec::with_capacity(a * b * c * d);
    for i in 0..a as isize {
        for j in 0..b as isize {
            for k in 0..c as isize {
                let row = i * along_a + j * along_b + k * along_c;
                offsets.extend((0..d as isize).map(|l| row + l * along_d));
            }
        }
    }
    offsets
}
