//! Who multiplies: Rapt by each instruction set that has another product, and the peers. Each owns its copies of the weights.

use half::{bf16, f16};
use rapt_core::{Arch, DType, SerialExecutor, Workspace};
use rapt_cpu::gemm::{Gemm, Output, PackedLayout, PackedMatrix, Rows, Strided};

/// What multiplies the same numbers in every call.
pub(crate) trait Engine {
    fn name(&self) -> String;
    fn call(&mut self);
    /// Row after row, in the dtype.
    fn output(&self) -> &[u8];
}

/// x (m × k) and w (n × k, as a linear layer has it), as bytes of the dtype.
pub(crate) struct Numbers {
    pub(crate) dtype: DType,
    pub(crate) sizes: [usize; 3],
    pub(crate) x: Vec<u8>,
    pub(crate) w: Vec<u8>,
}

fn write(dtype: DType, value: f64, to: &mut Vec<u8>) {
    match dtype {
        DType::F64 => to.extend(value.to_ne_bytes()),
        DType::F32 => to.extend((value as f32).to_ne_bytes()),
        DType::F16 => to.extend(f16::from_f64(value).to_ne_bytes()),
        _ => to.extend(bf16::from_f64(value).to_ne_bytes()),
    }
}

fn read(dtype: DType, bytes: &[u8], at: usize) -> f64 {
    let size = dtype.size_bytes();
    let bytes = &bytes[at * size..][..size];
    let two = || [bytes[0], bytes[1]];
    match dtype {
        DType::F64 => f64::from_ne_bytes(bytes.try_into().expect("eight bytes")),
        DType::F32 => f32::from_ne_bytes(bytes.try_into().expect("four bytes")).into(),
        DType::F16 => f16::from_ne_bytes(two()).to_f64(),
        _ => bf16::from_ne_bytes(two()).to_f64(),
    }
}

impl Numbers {
    /// Even numbers from −1 to 1 (splitmix64).
    pub(crate) fn new(dtype: DType, sizes: [usize; 3]) -> Numbers {
        let [m, n, k] = sizes;
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        };
        let (mut x, mut w) = (Vec::new(), Vec::new());
        (0..m * k).for_each(|_| write(dtype, next(), &mut x));
        (0..n * k).for_each(|_| write(dtype, next(), &mut w));
        Numbers { dtype, sizes, x, w }
    }

    /// The root mean square of errors on a sample, against the size of a sum.
    pub(crate) fn error_of(&self, output: &[u8]) -> f64 {
        let [m, n, k] = self.sizes;
        let (mut squares, mut samples) = (0.0, 0);
        // A prime step: every column and every row of tiles come up.
        for at in (0..m * n).step_by(251) {
            let (row, column) = (at / n, at % n);
            let exact: f64 = (0..k)
                .map(|t| read(self.dtype, &self.x, row * k + t) * read(self.dtype, &self.w, column * k + t))
                .sum();
            squares += (read(self.dtype, output, at) - exact).powi(2);
            samples += 1;
        }
        // The product of two even numbers from −1 to 1 has variance 1/9.
        (squares / f64::from(samples) / (k as f64 / 9.0)).sqrt()
    }

    /// Half a unit in the last place of the output, and the rounding of `k` sums one after the other.
    pub(crate) fn allowed(&self) -> f64 {
        let k = self.sizes[2] as f64;
        match self.dtype {
            DType::F64 => f64::EPSILON * (1.0 + k.sqrt()),
            DType::F32 => f64::from(f32::EPSILON) * (1.0 + k.sqrt()),
            DType::F16 => 2f64.powi(-11),
            _ => 2f64.powi(-8),
        }
    }

    fn outputs(&self) -> Vec<u8> {
        vec![0; self.sizes[0] * self.sizes[1] * self.dtype.size_bytes()]
    }
}

pub(crate) fn arch_names() -> String {
    rapt_cpu::available().iter().map(|arch| arch.name()).collect::<Vec<_>>().join(", ")
}

/// Everyone who multiplies this dtype.
pub(crate) fn all(numbers: &Numbers, copies: usize) -> Result<Vec<Box<dyn Engine>>, String> {
    let mut all: Vec<Box<dyn Engine>> = Vec::new();
    for &arch in rapt_cpu::available() {
        let is_another = !matches!(arch, Arch::Avx512Bf16 | Arch::Amx) || numbers.dtype == DType::BF16;
        if is_another && arch != Arch::Scalar {
            all.push(Box::new(Rapt::new(arch, numbers, copies).map_err(|error| error.to_string())?));
        }
    }
    match numbers.dtype {
        DType::F32 => {
            all.push(Box::new(Peer::<f32>::new("gemm", numbers, copies)));
            all.push(Box::new(Peer::<f32>::new("matrixmultiply", numbers, copies)));
        }
        DType::F64 => {
            all.push(Box::new(Peer::<f64>::new("gemm", numbers, copies)));
            all.push(Box::new(Peer::<f64>::new("matrixmultiply", numbers, copies)));
        }
        DType::F16 => all.push(Box::new(Peer::<f16>::new("gemm", numbers, copies))),
        _ => {}
    }
    Ok(all)
}

/// Packs weights on one thread: the bytes of one time, and how.
pub(crate) fn packing(
    arch: Arch,
    dtype: DType,
    [k, n]: [usize; 2],
    linear: bool,
) -> Result<(f64, impl FnMut()), String> {
    let numbers = Numbers::new(dtype, [0, n, k]);
    let layout = PackedLayout::new(arch, dtype, k, n).map_err(|error| error.to_string())?;
    let mut to = Workspace::new();
    to.ensure(layout.len_bytes()).map_err(|error| error.to_string())?;
    let [k_stride, n_stride] = if linear { [1, k as isize] } else { [n as isize, 1] };
    let pack = move || {
        let w = Strided { ptr: numbers.w.as_ptr(), k_stride, n_stride };
        // SAFETY: w has k · n elements, and `to` has the layout's bytes.
        unsafe { layout.pack_panels(0..layout.panels(), w, to.as_mut_ptr()) };
    };
    Ok(((k * n * dtype.size_bytes()) as f64, pack))
}

struct Rapt {
    arch: Arch,
    gemm: Gemm,
    x: Vec<u8>,
    row_stride: isize,
    packed: Vec<PackedMatrix>,
    turn: usize,
    scratch: Workspace,
    out: Vec<u8>,
    out_stride: isize,
}

impl Rapt {
    fn new(arch: Arch, numbers: &Numbers, copies: usize) -> rapt_core::Result<Rapt> {
        let [_, n, k] = numbers.sizes;
        let gemm = Gemm::new(arch, numbers.dtype, numbers.sizes, 1)?;
        let layout = PackedLayout::new(arch, numbers.dtype, k, n)?;
        let w = Strided { ptr: numbers.w.as_ptr(), k_stride: 1, n_stride: k as isize };
        let mut packed = Vec::new();
        for _ in 0..copies {
            // SAFETY: w has n rows of k elements.
            packed.push(unsafe { PackedMatrix::pack(layout, w, &SerialExecutor)? });
        }
        let mut scratch = Workspace::new();
        scratch.ensure(gemm.scratch_bytes())?;
        let (x, out) = (numbers.x.clone(), numbers.outputs());
        Ok(Rapt { arch, gemm, x, row_stride: k as isize, packed, turn: 0, scratch, out, out_stride: n as isize })
    }
}

impl Engine for Rapt {
    fn name(&self) -> String {
        format!("rapt {}", self.arch.name())
    }
    fn call(&mut self) {
        let w = self.packed[self.turn % self.packed.len()].view();
        self.turn += 1;
        let x = Rows { ptr: self.x.as_ptr(), row_stride: self.row_stride };
        let out = Output::Rows { ptr: self.out.as_mut_ptr(), row_stride: self.out_stride };
        for item in 0..self.gemm.items() {
            // SAFETY: `new` made all of these of the same sizes.
            unsafe { self.gemm.run_item(item, x, w, out, self.scratch.as_mut_ptr()) };
        }
    }
    fn output(&self) -> &[u8] {
        &self.out
    }
}

struct Peer<T> {
    name: &'static str,
    sizes: [usize; 3],
    x: Vec<T>,
    w: Vec<Vec<T>>,
    turn: usize,
    out: Vec<T>,
}

/// A dtype that peers multiply.
trait Multiplied: Copy + 'static {
    const ZERO: Self;
    /// `out = x · wᵀ` by `peer`.
    fn multiply(peer: &str, sizes: [usize; 3], x: &[Self], w: &[Self], out: &mut [Self]);
}

macro_rules! by_gemm {
    ($one:expr, $zero:expr, $m:expr, $n:expr, $k:expr, $x:expr, $w:expr, $out:expr) => {{
        let (none, (n, k)) = (gemm::Parallelism::None, ($n as isize, $k as isize));
        let (to, x, w) = ($out.as_mut_ptr(), $x.as_ptr(), $w.as_ptr());
        // SAFETY: x is m × k, w n × k and out m × n, row after row. Column stride, then row stride of each.
        unsafe {
            let conjugate = false;
            gemm::gemm(
                $m, $n, $k, to, 1, n, false, x, 1, k, w, k, 1, $zero, $one, conjugate, conjugate, conjugate, none,
            );
        }
    }};
}

macro_rules! multiplied {
    ($real:ty, $matrixmultiply:path) => {
        impl Multiplied for $real {
            const ZERO: Self = 0.0;
            fn multiply(peer: &str, [m, n, k]: [usize; 3], x: &[Self], w: &[Self], out: &mut [Self]) {
                if peer == "gemm" {
                    by_gemm!(1.0, 0.0, m, n, k, x, w, out);
                    return;
                }
                let (along_n, along_k) = (n as isize, k as isize);
                let (x, w, to) = (x.as_ptr(), w.as_ptr(), out.as_mut_ptr());
                // SAFETY: as above.
                unsafe { $matrixmultiply(m, k, n, 1.0, x, along_k, 1, w, 1, along_k, 0.0, to, along_n, 1) };
            }
        }
    };
}

multiplied!(f32, matrixmultiply::sgemm);
multiplied!(f64, matrixmultiply::dgemm);

impl Multiplied for f16 {
    const ZERO: Self = f16::ZERO;
    fn multiply(_: &str, [m, n, k]: [usize; 3], x: &[Self], w: &[Self], out: &mut [Self]) {
        by_gemm!(f16::ONE, f16::ZERO, m, n, k, x, w, out);
    }
}

/// The elements of bytes that hold nothing else.
fn elements<T: Copy>(bytes: &[u8]) -> Vec<T> {
    // SAFETY: T is f64, f32 or f16, all of whose bits are numbers; reads need no alignment.
    let at = |n: usize| unsafe { bytes.as_ptr().cast::<T>().add(n).read_unaligned() };
    (0..bytes.len() / size_of::<T>()).map(at).collect()
}

impl<T: Multiplied> Peer<T> {
    fn new(name: &'static str, numbers: &Numbers, copies: usize) -> Peer<T> {
        let [m, n, _] = numbers.sizes;
        let w = vec![elements(&numbers.w); copies];
        Peer { name, sizes: numbers.sizes, x: elements(&numbers.x), w, turn: 0, out: vec![T::ZERO; m * n] }
    }
}

impl<T: Multiplied> Engine for Peer<T> {
    fn name(&self) -> String {
        self.name.to_owned()
    }
    fn call(&mut self) {
        let w = &self.w[self.turn % self.w.len()];
        self.turn += 1;
        T::multiply(self.name, self.sizes, &self.x, w, &mut self.out);
    }
    fn output(&self) -> &[u8] {
        let bytes = size_of_val(&self.out[..]);
        // SAFETY: the bytes of numbers.
        unsafe { std::slice::from_raw_parts(self.out.as_ptr().cast(), bytes) }
    }
}
