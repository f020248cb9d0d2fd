//! A tensor that owns its memory: any dtype, strides and guards, filled from f64.
//!
//! Data layout: the memory is exactly what shape and strides reach, plus the placement's slack on both sides; bytes that
//! belong to no element hold [`PATTERN`] (1, true, in a boolean tensor), so reading padding shows.

use rapt_core::{DType, Device, Dims, Extent, Layout, View, ViewMut};

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
        let mut buffer = TensorBuf { dtype, shape, strides: placement.strides, origin, memory, snapshot: Vec::new() };
        if let Some(values) = values {
            let offsets = buffer.offsets();
            assert_eq!(values.len(), offsets.len(), "as many values as elements");
            let bytes = buffer.memory.bytes_mut();
            for (at, &value) in offsets.into_iter().zip(values) {
                encode(dtype, value, &mut bytes[at..at + size]);
            }
        }
        buffer.snapshot = buffer.memory.bytes().to_vec();
        buffer
    }

    /// Where each element lies in the memory, in bytes, row-major.
    fn offsets(&self) -> Vec<usize> {
        let size = self.dtype.size_bytes() as isize;
        let at = |index: [usize; 4]| {
            let elements: isize = index.iter().zip(self.strides).map(|(&i, stride)| i as isize * stride).sum();
            (self.origin as isize + elements * size) as usize
        };
        indices(self.shape).map(at).collect()
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
        self.offsets().into_iter().map(|at| decode(self.dtype, &bytes[at..at + size])).collect()
    }

    /// The bits of every element, row-major; every NaN is one and the same.
    #[must_use]
    pub fn bits(&self) -> Vec<u64> {
        self.values().into_iter().map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect()
    }

    /// The sizes and strides that a door would see, the last `rank` canonical dimensions in the order of `layout`.
    fn given(&self, rank: usize, layout: Layout) -> (Dims<usize>, Dims<isize>) {
        assert!(self.shape[..4 - rank].iter().all(|&n| n == 1), "{:?} has no rank {rank}", self.shape);
        let mut order: Vec<usize> = (4 - rank..4).collect();
        if layout == Layout::Bshd && rank >= 3 {
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
    pub fn view(&self, tensor: &'static str, rank: usize, layout: Layout) -> View<'_> {
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
    pub fn view_mut(&mut self, tensor: &'static str, rank: usize, layout: Layout) -> ViewMut<'_> {
        let (shape, strides) = self.given(rank, layout);
        let ptr = self.memory.as_ptr().wrapping_add(self.origin);
        // SAFETY: as in `view`, and the memory is borrowed mutably.
        unsafe { ViewMut::from_raw_parts(tensor, ptr, self.dtype, shape, strides, Device::Cpu, self.extent()) }
            .expect("a buffer reaches its own memory")
    }

    /// Whether every byte is as it was when the buffer was made.
    ///
    /// # Errors
    /// The first byte that is not.
    pub fn check_unchanged(&self, tensor: &'static str) -> Result<(), Damage> {
        self.check(tensor, &vec![false; self.snapshot.len()], "an input, or padding between its elements")
    }

    /// Whether every byte that belongs to no element is as it was when the buffer was made.
    ///
    /// # Errors
    /// The first byte that is not.
    pub fn check_padding(&self, tensor: &'static str) -> Result<(), Damage> {
        let mut writable = vec![false; self.snapshot.len()];
        let size = self.dtype.size_bytes();
        self.offsets().into_iter().for_each(|at| writable[at..at + size].fill(true));
        self.check(tensor, &writable, "padding between elements")
    }

    fn check(&self, tensor: &'static str, writable: &[bool], place: &'static str) -> Result<(), Damage> {
        if let Some(byte) = self.memory.broken_guard() {
            return Err(Damage { tensor, byte, place: "outside the buffer" });
        }
        let now = self.memory.bytes().iter().zip(&self.snapshot).zip(writable);
        match now.enumerate().find(|(_, ((now, then), writable))| now != then && !**writable) {
            Some((byte, _)) => Err(Damage { tensor, byte: byte as isize, place }),
            None => Ok(()),
        }
    }

    /// Whether some element still holds the pattern of a fresh buffer in all its bytes.
    #[must_use]
    pub fn has_unwritten(&self) -> bool {
        let (bytes, size) = (self.memory.bytes(), self.dtype.size_bytes());
        self.offsets().into_iter().any(|at| bytes[at..at + size].iter().all(|&byte| byte == PATTERN))
    }
}

/// Every index of `shape`, row-major.
pub(crate) fn indices(shape: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    let [a, b, c, d] = shape;
    (0..a * b * c * d).map(move |n| [n / (b * c * d), n / (c * d) % b, n / d % c, n % d])
}
