//! Products with packed weights: every instruction set of this machine and every dtype against sums in f64.
//!
//! The yardstick of the tolerance rule is a plain loop over the same numbers, rounded after every step. Memory lies against
//! pages that may not be touched. Deliberately absent: speed (benches/gemm).
#![cfg(any(unix, windows))]

use std::ops::Range;
use std::sync::Mutex;

use rapt_core::{Arch, DType, Error, Executor, SerialExecutor, Workspace};
use rapt_cpu::gemm::{Epilogue, Gemm, Output, PackedLayout, PackedMatrix, Rows, SUM_ROW_STRIDE, Strided};
use rapt_testkit::{Guard, Memory, PATTERN, Rng, check_within, decode, encode, figures, round};

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

/// How one product lies in memory.
#[derive(Clone, Copy, Debug)]
struct Case {
    arch: Arch,
    dtype: DType,
    /// m, n, k.
    sizes: [usize; 3],
    /// Whether the weight lies as a linear layer has it, k along its rows.
    linear: bool,
    /// Elements between the end of a row and the next one: of x, w and out.
    gaps: [usize; 3],
    threads: usize,
    guard: Guard,
}

impl Case {
    fn plain(arch: Arch, dtype: DType, sizes: [usize; 3]) -> Case {
        Case { arch, dtype, sizes, linear: true, gaps: [0; 3], threads: 1, guard: Guard::BackPage }
    }
}

/// Rows of `columns` numbers in guarded memory, `gap` elements apart.
struct Matrix {
    dtype: DType,
    rows: usize,
    columns: usize,
    stride: usize,
    memory: Memory,
}

impl Matrix {
    fn new(dtype: DType, [rows, columns]: [usize; 2], gap: usize, guard: Guard, values: Option<&[f64]>) -> Matrix {
        let (stride, size) = (columns + gap, dtype.size_bytes());
        let len = if rows * columns == 0 { 0 } else { ((rows - 1) * stride + columns) * size };
        let mut matrix = Matrix { dtype, rows, columns, stride, memory: Memory::new(len, guard) };
        for (n, &value) in values.iter().flat_map(|values| values.iter().enumerate()) {
            let at = matrix.at(n);
            encode(dtype, value, &mut matrix.memory.bytes_mut()[at..at + size]);
        }
        matrix
    }

    /// Where element `n` of all lies.
    fn at(&self, n: usize) -> usize {
        (n / self.columns * self.stride + n % self.columns) * self.dtype.size_bytes()
    }

    fn values(&self) -> Vec<f64> {
        let size = self.dtype.size_bytes();
        let one = |n| decode(self.dtype, &self.memory.bytes()[self.at(n)..self.at(n) + size]);
        (0..self.rows * self.columns).map(one).collect()
    }

    /// Whether nothing was written but elements.
    fn is_whole_between(&self) -> bool {
        let row = self.stride * self.dtype.size_bytes();
        let of_elements = self.columns * self.dtype.size_bytes();
        let gaps = |bytes: &[u8]| bytes.iter().skip(of_elements).all(|&byte| byte == PATTERN);
        self.memory.broken_guard().is_none() && self.memory.bytes().chunks(row.max(1)).all(gaps)
    }
}

/// Numbers that `dtype` holds.
fn draw(dtype: DType, n: usize, rng: &mut Rng) -> Vec<f64> {
    (0..n).map(|_| round(dtype, rng.normal())).collect()
}

/// The sums in f64, and those of a plain loop that rounds to the accumulation dtype after every step.
fn reference(dtype: DType, [m, n, k]: [usize; 3], x: &[f64], w: &[f64]) -> [Vec<f64>; 2] {
    let (mut exact, mut plain) = (Vec::with_capacity(m * n), Vec::with_capacity(m * n));
    for x in x.chunks(k.max(1)).take(if k == 0 { 0 } else { m }) {
        for w in w.chunks(k.max(1)) {
            // A sum of products in f64, with what each step loses beside it (Neumaier), for f64's own sake.
            let (mut sum, mut lost, mut rounded) = (0.0f64, 0.0f64, 0.0f64);
            for (&x, &w) in x.iter().zip(w) {
                let product = x * w;
                let next = sum + product;
                lost += x.mul_add(w, -product);
                lost += if sum.abs() >= product.abs() { (sum - next) + product } else { (product - next) + sum };
                sum = next;
                rounded = round(dtype.accumulation(), rounded + round(dtype.accumulation(), product));
            }
            exact.push(if sum.is_finite() { sum + lost } else { sum });
            plain.push(round(dtype, rounded));
        }
    }
    exact.resize(m * n, 0.0);
    plain.resize(m * n, 0.0);
    [exact, plain]
}

fn arches() -> &'static [Arch] {
    rapt_cpu::available()
}

struct Ran {
    out: Vec<f64>,
    padding_is_whole: bool,
}

/// `x` is m × k, `w` n × k, whatever the order in memory.
fn run(case: &Case, x: &[f64], w: &[f64]) -> Ran {
    let Case { arch, dtype, sizes: [m, n, k], linear, gaps, threads, guard } = *case;
    let x = Matrix::new(dtype, [m, k], gaps[0], guard, Some(x));
    let transposed: Vec<f64> = (0..k * n).map(|at| w[at % n * k + at / n]).collect();
    let (shape, values) = if linear { ([n, k], w) } else { ([k, n], &transposed[..]) };
    let w = Matrix::new(dtype, shape, gaps[1], guard, Some(values));
    let [k_stride, n_stride] = if linear { [1, w.stride as isize] } else { [w.stride as isize, 1] };
    let mut out = Matrix::new(dtype, [m, n], gaps[2], guard, None);

    let layout = PackedLayout::new(arch, dtype, k, n).unwrap();
    let packed = Memory::new(layout.len_bytes(), guard);
    let strided = Strided { ptr: w.memory.as_ptr(), k_stride, n_stride };
    // SAFETY: w has these strides; the memory has the layout's bytes, and nobody else's.
    unsafe { layout.pack_panels(0..layout.panels(), strided, packed.as_ptr()) };
    // SAFETY: all panels are packed there.
    let view = unsafe { layout.view(packed.as_ptr()) };

    let gemm = Gemm::new(arch, dtype, [m, n, k], threads).unwrap();
    assert_eq!(gemm.scratch_bytes() % 64, 0);
    // Pages' ends are as aligned as the bytes are many: the scratch memory lies at a back page too.
    let scratch = Memory::new(gemm.scratch_bytes(), guard);
    let rows = Rows { ptr: x.memory.as_ptr(), row_stride: x.stride as isize };
    let to = Output::Rows { ptr: out.memory.as_ptr(), row_stride: out.stride as isize };
    for item in (0..gemm.items()).rev() {
        // SAFETY: every matrix has the sizes that the product was made of.
        unsafe { gemm.run_item(item, rows, view, to, scratch.as_ptr()) };
    }
    out.dtype = dtype;
    Ran { padding_is_whole: out.is_whole_between(), out: out.values() }
}

fn judge(case: &Case, seed: u64) {
    let [m, n, k] = case.sizes;
    let mut rng = Rng::new(seed);
    let (x, w) = (draw(case.dtype, m * k, &mut rng), draw(case.dtype, n * k, &mut rng));
    let ran = run(case, &x, &w);
    assert!(ran.padding_is_whole, "{case:?}: something beside the elements was written");
    let [exact, plain] = reference(case.dtype, case.sizes, &x, &w);
    let yardstick = figures(&plain, &exact, n);
    check_within(&ran.out, &exact, n, case.dtype, &yardstick, None).unwrap_or_else(|error| panic!("{case:?}: {error}"));
}

fn page(n: usize) -> Guard {
    if n.is_multiple_of(2) { Guard::FrontPage } else { Guard::BackPage }
}

fn each(mut test: impl FnMut(Arch, DType)) {
    for &arch in arches() {
        for dtype in DTYPES {
            test(arch, dtype);
        }
    }
}

/// Steps and columns with tails of lanes, of panels, of blocks and of tiles.
const TAILS: [usize; 9] = [1, 7, 16, 31, 33, 96, 255, 257, 384];

#[test]
fn every_number_of_rows() {
    each(|arch, dtype| {
        for m in 1..=40 {
            let sizes = [m, TAILS[m % 6], TAILS[m % 7]];
            let case = Case { gaps: [m % 3, m % 4, m % 5], linear: m % 2 == 0, ..Case::plain(arch, dtype, sizes) };
            judge(&Case { guard: page(m / 2), threads: m % 4, ..case }, m as u64);
        }
    });
}

#[test]
fn tails_of_columns_and_of_steps() {
    each(|arch, dtype| {
        for (at, (n, k)) in TAILS.iter().flat_map(|&n| TAILS.map(|k| (n, k))).enumerate() {
            for m in [1, 5, 19] {
                let gaps = [at % 2 * 3, at % 3, at % 4];
                let case = Case { gaps, linear: at % 2 == 0, ..Case::plain(arch, dtype, [m, n, k]) };
                judge(&Case { guard: page(at), threads: at % 5, ..case }, at as u64);
            }
        }
    });
}

#[test]
fn many_rows_columns_and_steps() {
    each(|arch, dtype| {
        for (at, sizes) in [[128, 96, 1030], [129, 290, 64], [300, 33, 100], [17, 513, 770]].into_iter().enumerate() {
            judge(&Case { threads: 3 * at, guard: page(at), ..Case::plain(arch, dtype, sizes) }, at as u64);
        }
    });
}

#[test]
fn nothing_to_add_is_zero_and_nothing_to_write_is_nothing() {
    each(|arch, dtype| {
        for m in [1, 9, 130] {
            let ran = run(&Case::plain(arch, dtype, [m, 40, 0]), &[], &[]);
            assert!(ran.out.iter().all(|out| out.to_bits() == 0), "{dtype} on {}", arch.name());
        }
        for sizes in [[0, 5, 5], [5, 0, 5], [0, 0, 0]] {
            assert_eq!(Gemm::new(arch, dtype, sizes, 2).unwrap().items(), 0);
            let layout = PackedLayout::new(arch, dtype, sizes[2], sizes[1]).unwrap();
            assert_eq!(layout.len_bytes() > 0, sizes[1] * sizes[2] > 0);
        }
    });
}

/// A row is the same whatever rows are beside it, however many threads there are and wherever tiles end.
#[test]
fn the_bits_of_a_row_depend_on_nothing_else() {
    let (n, k) = (300, 801);
    each(|arch, dtype| {
        let mut rng = Rng::new(7);
        let (x, w) = (draw(dtype, 140 * k, &mut rng), draw(dtype, n * k, &mut rng));
        let all = run(&Case::plain(arch, dtype, [140, n, k]), &x, &w).out;
        for (m, from) in [(1, 0), (1, 139), (2, 77), (3, 5), (4, 8), (7, 100), (8, 3), (9, 60), (23, 110), (128, 9)] {
            for (threads, linear) in [(1, true), (2, false), (7, true)] {
                let case = Case { threads, linear, gaps: [1, 0, 2], ..Case::plain(arch, dtype, [m, n, k]) };
                let part = run(&case, &x[from * k..][..m * k], &w).out;
                let same = part.iter().zip(&all[from * n..]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{case:?} from row {from} on");
            }
        }
    });
}

#[test]
fn what_is_not_finite_spreads_where_it_belongs() {
    let (n, k) = (70, 37);
    each(|arch, dtype| {
        for m in [1, 8, 20] {
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                for (in_x, last) in [(true, false), (true, true), (false, false), (false, true)] {
                    let mut rng = Rng::new(3);
                    let (mut x, mut w) = (draw(dtype, m * k, &mut rng), draw(dtype, n * k, &mut rng));
                    // The last step stands alone in its pair; the last row and column border on what is padding.
                    let step = if last { k - 1 } else { 4 };
                    let of = if in_x { &mut x[(m - 1) * k + step] } else { &mut w[(n - 1) * k + step] };
                    *of = bad;
                    let [exact, _] = reference(dtype, [m, n, k], &x, &w);
                    let case = Case::plain(arch, dtype, [m, n, k]);
                    for (at, (got, exact)) in run(&case, &x, &w).out.iter().zip(&exact).enumerate() {
                        let same = (got.is_finite() && exact.is_finite()) || got == exact;
                        assert!(same || (got.is_nan() && exact.is_nan()), "{case:?}: {at} is {got}, not {exact}");
                        let of_bad = if in_x { at / n == m - 1 } else { at % n == n - 1 };
                        assert_eq!(of_bad, !got.is_finite(), "{case:?}: {at}");
                    }
                }
            }
        }
    });
}

/// Keeps the tiles that it is called with.
struct Tiles {
    n: usize,
    dtype: DType,
    seen: Mutex<Vec<Option<f64>>>,
    shapes: Mutex<Vec<(Range<usize>, Range<usize>)>>,
}

impl Epilogue for Tiles {
    unsafe fn tile(&self, rows: Range<usize>, columns: Range<usize>, sums: *mut u8, row_stride: usize) {
        let size = self.dtype.size_bytes();
        let mut seen = self.seen.lock().unwrap();
        assert_eq!((sums as usize % 64, row_stride), (0, SUM_ROW_STRIDE));
        for (i, row) in rows.clone().enumerate() {
            for (j, column) in columns.clone().enumerate() {
                // SAFETY: an element of the tile.
                let bytes = unsafe { std::slice::from_raw_parts_mut(sums.add((i * row_stride + j) * size), size) };
                let before = seen[row * self.n + column].replace(decode(self.dtype, bytes));
                assert_eq!(before, None, "row {row}, column {column} came twice");
                // What is written here is no other tile's.
                bytes.fill(PATTERN);
            }
        }
        self.shapes.lock().unwrap().push((rows, columns));
    }
}

struct Scoped(usize);

impl Executor for Scoped {
    fn threads(&self) -> usize {
        self.0
    }
    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> rapt_core::Result<()> {
        std::thread::scope(|scope| (0..chunks).for_each(|chunk| drop(scope.spawn(move || work(chunk)))));
        Ok(())
    }
}

/// Packed matrices that share a region keep apart, also when some of them are gone.
#[test]
fn large_matrices_in_one_region_keep_what_was_packed() {
    let (arch, k, n) = (Arch::Scalar, 300, 350);
    let layout = PackedLayout::new(arch, DType::F32, k, n).unwrap();
    let gemm = Gemm::new(arch, DType::F32, [1, n, k], 1).unwrap();
    let mut scratch = Workspace::new();
    scratch.ensure(gemm.scratch_bytes()).unwrap();
    let pack = |value: f32| {
        let w = vec![value; k * n];
        let strided = Strided { ptr: w.as_ptr().cast(), k_stride: 1, n_stride: k as isize };
        // SAFETY: w has n rows of k elements.
        unsafe { PackedMatrix::pack(layout, strided, &SerialExecutor) }.unwrap()
    };
    let mut packed: Vec<(f32, PackedMatrix)> = (0..5).map(|n| (n as f32, pack(n as f32))).collect();
    packed.retain(|(value, _)| *value != 1.0 && *value != 4.0);
    packed.extend((5..50).map(|n| (n as f32, pack(n as f32))));
    let x = vec![1.0f32; k];
    for (value, packed) in &packed {
        assert_eq!(packed.view().layout().len_bytes(), packed.len_bytes());
        let mut y = vec![0.0f32; n];
        let rows = Rows { ptr: x.as_ptr().cast(), row_stride: k as isize };
        let out = Output::Rows { ptr: y.as_mut_ptr().cast(), row_stride: n as isize };
        // SAFETY: every matrix has the sizes that the product was made of.
        unsafe { gemm.run_item(0, rows, packed.view(), out, scratch.as_mut_ptr()) };
        assert!(y.iter().all(|&y| y == value * k as f32), "{value}");
    }
}

#[test]
fn an_epilogue_sees_every_sum_once_before_it_is_rounded() {
    each(|arch, dtype| {
        for sizes in [[1, 700, 65], [5, 33, 9], [40, 300, 64], [260, 40, 30], [3, 10, 0]] {
            let [m, n, k] = sizes;
            let mut rng = Rng::new(11);
            let (x, w) = (draw(dtype, m * k, &mut rng), draw(dtype, n * k, &mut rng));
            let expected = run(&Case::plain(arch, dtype, sizes), &x, &w).out;
            let guard = Guard::Heap { shift: 0 };
            let (x, w) =
                (Matrix::new(dtype, [m, k], 0, guard, Some(&x)), Matrix::new(dtype, [n, k], 0, guard, Some(&w)));
            let layout = PackedLayout::new(arch, dtype, k, n).unwrap();
            let strided = Strided { ptr: w.memory.as_ptr(), k_stride: 1, n_stride: k as isize };
            // SAFETY: w has n rows of k elements.
            let packed = unsafe { PackedMatrix::pack(layout, strided, &Scoped(3)) }.unwrap();
            assert_eq!(packed.len_bytes(), layout.len_bytes());
            let gemm = Gemm::new(arch, dtype, sizes, 3).unwrap();
            let sums = dtype.accumulation();
            let tiles = Tiles { n, dtype: sums, seen: Mutex::new(vec![None; m * n]), shapes: Mutex::new(Vec::new()) };
            let mut scratch = Workspace::new();
            scratch.ensure(gemm.scratch_bytes()).unwrap();
            let rows = Rows { ptr: x.memory.as_ptr(), row_stride: k as isize };
            for item in 0..gemm.items() {
                // SAFETY: every matrix has the sizes that the product was made of.
                unsafe { gemm.run_item(item, rows, packed.view(), Output::Epilogue(&tiles), scratch.as_mut_ptr()) };
            }
            let seen: Vec<f64> = tiles.seen.into_inner().unwrap().into_iter().map(Option::unwrap).collect();
            let rounded: Vec<f64> = seen.iter().map(|&sum| round(dtype, sum)).collect();
            assert_eq!(rounded, expected, "{dtype} on {}", arch.name());
            assert!(dtype == sums || k < 2 || seen != rounded, "{dtype}: the sums were rounded before");
            for (rows, columns) in tiles.shapes.into_inner().unwrap() {
                assert!(rows.len() >= 8.min(m) || rows.end == m, "{rows:?} of {m}");
                assert!(rows.len() <= gemm.tile()[0] && columns.len() <= gemm.tile()[1]);
            }
        }
    });
}

#[test]
fn what_cannot_be_is_an_exact_error() {
    let arch = arches()[0];
    for dtype in [DType::I64, DType::Bool] {
        let error = PackedLayout::new(arch, dtype, 3, 3).unwrap_err();
        assert!(matches!(error, Error::UnsupportedDtype { tensor: "w", got, .. } if got == dtype));
        assert_eq!(Gemm::new(arch, dtype, [3; 3], 1).unwrap_err(), error);
    }
    let too_large = Error::OutOfMemory { bytes: usize::MAX };
    assert_eq!(PackedLayout::new(arch, DType::F64, usize::MAX / 4, 1).unwrap_err(), too_large);
    assert_eq!(PackedLayout::new(arch, DType::F64, 1 << 40, 1 << 40).unwrap_err(), too_large);
    for sizes in [[2, 1, usize::MAX], [usize::MAX, usize::MAX, 1], [1, usize::MAX / 8, 0]] {
        assert_eq!(Gemm::new(arch, DType::F64, sizes, usize::MAX).unwrap_err(), too_large);
    }
    assert_eq!(Gemm::new(arch, DType::F32, [1, 64, 3], usize::MAX).unwrap().items(), 8);
    let absent = [Arch::Neon, Arch::Amx].into_iter().find(|arch| !arches().contains(arch));
    if let Some(absent) = absent {
        assert!(matches!(Gemm::new(absent, DType::F32, [3; 3], 1), Err(Error::Unsupported { .. })));
    }
    let layout = PackedLayout::new(arch, DType::F32, 1 << 30, 1 << 28).unwrap();
    let none = Strided { ptr: std::ptr::null(), k_stride: 1, n_stride: 1 };
    // SAFETY: there is no memory for so much, so nothing is read.
    let packed = unsafe { PackedMatrix::pack(layout, none, &SerialExecutor) };
    assert_eq!(packed.unwrap_err(), Error::OutOfMemory { bytes: layout.len_bytes() });
}
