//! Decode over codes that are multiplied as quads of bytes: as near to the definition as products of float32 are, where fixed point is hardest put.
//!
//! Queries of 16 bits, outputs of float32: what is rounded to 16 bits would hide what is looked for. Every instruction set of the machine is
//! held to the same; where the dot of bytes is among them, plans say that it serves.

use half::{bf16, f16};
use rapt_core::{
    Arch, Caps, Codes, DType, Element, Format, Operands, Options, PRounding, Qkv, SerialExecutor, Spec, Tensors, View,
    ViewMut, Workspace,
};
use rapt_reference::{Inputs, Problem, naive};

/// Numbers from −1 to 1 without a period.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// K or V of one head, with a factor for each key, or for each channel.
struct Operand {
    format: Format,
    dim: usize,
    codes: Vec<u8>,
    factors: Vec<f32>,
    points: Option<Vec<u8>>,
    by_channel: bool,
    /// Bytes from key to key; codes of a key lie at its end.
    stride: usize,
}

impl Operand {
    fn new(format: Format, n: usize, dim: usize, by_channel: bool, noise: &mut Noise) -> Self {
        let stride = dim / format.codes_per_byte();
        let count = if by_channel { dim } else { n };
        Operand {
            format,
            dim,
            codes: (0..n * stride).map(|_| ((noise.next() + 1.0) * 127.9) as u8).collect(),
            // Of both signs, some much larger than others.
            factors: (0..count)
                .map(|at| ((noise.next() + 1.5) * if at % 7 == 3 { -0.3 } else { 0.05 }) as f32)
                .collect(),
            points: format.has_zero_point().then(|| (0..count).map(|at| [0, 255, 128, 3][at % 4]).collect()),
            by_channel,
            stride,
        }
    }

    fn n(&self) -> usize {
        self.codes.len() / self.stride
    }

    fn code(&self, j: usize, d: usize) -> u8 {
        let shared = self.format.codes_per_byte();
        let byte = self.codes[(j + 1) * self.stride - self.dim / shared + d / shared];
        if shared == 2 { byte >> (4 * (d % 2)) & 15 } else { byte }
    }

    fn numbers(&self) -> Vec<f64> {
        let number = |j: usize, d: usize| {
            let at = if self.by_channel { d } else { j };
            let point = self.points.as_ref().map_or(0.0, |points| f64::from(points[at]));
            (f64::from(self.format.decode(self.code(j, d))) - point) * f64::from(self.factors[at])
        };
        (0..self.n()).flat_map(|j| (0..self.dim).map(move |d| number(j, d))).collect()
    }

    fn view(&self) -> View<'_> {
        let (n, width) = (self.n(), self.dim / self.format.codes_per_byte());
        let strides = [self.codes.len() as isize, self.codes.len() as isize, self.stride as isize, 1].into();
        let view = View::strided("k", &self.codes, self.stride - width, [1, 1, n, width].into(), strides).unwrap();
        view.reinterpreted("k", self.format.code_dtype()).unwrap()
    }

    fn codes(&self) -> Codes<'_> {
        let shape = if self.by_channel { vec![1, 1, 1, self.dim] } else { vec![1, 1, self.n()] };
        let shape = rapt_core::Shape::new(&shape).unwrap();
        let zero_point = self.points.as_ref().map(|points| View::contiguous("zero_point", points, shape).unwrap());
        Codes { zero_point, ..Codes::new(self.format, View::contiguous("descale", &self.factors, shape).unwrap()) }
    }

    /// The same keys with others' bytes before each of them.
    fn apart(&self, before: usize) -> Operand {
        let mut codes = Vec::new();
        for key in self.codes.chunks(self.stride) {
            codes.extend(std::iter::repeat_n(0xa5, before));
            codes.extend(key);
        }
        let (factors, points) = (self.factors.clone(), self.points.clone());
        Operand { codes, factors, points, stride: self.stride + before, ..*self }
    }
}

/// Outputs and lse of all rows, and whether quads served.
fn attend<T: Element>(arch: Arch, q: &[T], k: &Operand, v: &Operand) -> (Vec<f32>, Vec<f32>, bool) {
    let rows = q.len() / k.dim;
    let (mut out, mut lse) = (vec![f32::NAN; rows * v.dim], vec![f32::NAN; rows]);
    let q = View::contiguous("q", q, [1, rows, 1, k.dim].into()).unwrap();
    let out_view = ViewMut::contiguous("out", &mut out, [1, rows, 1, v.dim].into()).unwrap();
    let lse_view = ViewMut::contiguous("lse", &mut lse, [1, rows, 1].into()).unwrap();
    let codes = Qkv { q: None, k: Some(Box::new(k.codes())), v: Some(Box::new(v.codes())) };
    let tensors = Tensors { codes, lse: Some(lse_view), ..Tensors::new(q, k.view(), v.view(), out_view) };
    let options = Options::default().with_out_dtype(DType::F32);
    let spec = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &options)
        .codes(tensors.codes.as_deref())
        .out(&tensors.out)
        .lse(tensors.lse.as_ref().unwrap())
        .build()
        .unwrap();
    let plan = rapt_cpu::select(&spec, &Caps { arch, threads: 1, clock_hz: None }).unwrap();
    let are_quads = plan.key().arch == Arch::Avx512Vnni && plan.key().p_rounding == PRounding::Fixed;
    let says =
        |row: &str, text: &str| plan.explain().rows().iter().any(|(name, said)| *name == row && said.contains(text));
    assert_eq!(are_quads, says("why", "dot of bytes") && says("p is rounded", "to 24 bits"), "{}", plan.explain());
    let mut workspace = Workspace::new();
    workspace.ensure(plan.workspace_bytes()).unwrap();
    rapt_cpu::run(&plan, &mut Operands::check(tensors, &spec).unwrap(), &mut workspace, &SerialExecutor).unwrap();
    (out, lse, are_quads)
}

/// Of the definition: outputs, and lse.
fn exact(q: &[f64], k: &Operand, v: &Operand) -> (Vec<f64>, Vec<f64>) {
    let problem = Problem {
        batch: 1,
        num_q_heads: q.len() / k.dim,
        num_kv_heads: 1,
        q_len: 1,
        kv_len: k.n(),
        head_dim: k.dim,
        head_dim_v: v.dim,
        softmax_scale: 1.0 / (k.dim as f64).sqrt(),
        softcap: None,
        causal: None,
        window: rapt_core::Window::default(),
        dropout: None,
    };
    let (k, v) = (k.numbers(), v.numbers());
    let done = naive(&problem, &Inputs { q, k: &k, v: &v, mask: None, sinks: None, alibi_slopes: None });
    (done.out, done.lse)
}

/// Holds every instruction set to the definition: outputs to `most` of the largest value, lse to the published tolerance. Those that round p to two
/// bfloat16 are held to that by tests/quantized.rs.
fn check<T: Element>(what: &str, q: &[f64], narrow: impl Fn(f64) -> T, k: &Operand, v: &Operand, most: f64) {
    let halves: Vec<T> = q.iter().copied().map(narrow).collect();
    let (out, lse) = exact(q, k, v);
    let largest = v.numbers().iter().fold(0f64, |most, x| most.max(x.abs()));
    for &arch in rapt_cpu::available() {
        if arch == Arch::Avx512Bf16 {
            continue;
        }
        let (got, got_lse, are_quads) = attend(arch, &halves, k, v);
        assert_eq!(are_quads, matches!(arch, Arch::Avx512Vnni | Arch::Amx), "{what} on {}", arch.name());
        let off = |got: &[f32], exact: &[f64]| {
            got.iter().zip(exact).map(|(got, exact)| (f64::from(*got) - exact).abs()).fold(0.0, f64::max)
        };
        let (worst, rows) = (off(&got, &out), lse.len());
        assert!(worst <= most * largest, "{what}, {rows} rows on {}: {worst:e} of {largest:e}", arch.name());
        for (got, exact) in got_lse.iter().zip(&lse) {
            let near = (f64::from(*got) - exact).abs() <= 1e-6 * (4.0 + exact.abs());
            assert!(near, "{what}, {rows} rows on {}: lse {got} for {exact}", arch.name());
        }
    }
}

const FORMATS: [Format; 3] = [Format::Int8, Format::Uint8, Format::Int4];

/// Queries that 16 bits hold.
fn queries(rows: usize, dim: usize, noise: &mut Noise) -> Vec<f64> {
    (0..rows * dim).map(|_| bf16::from_f64(noise.next()).to_f64()).collect()
}

#[test]
fn every_shape_of_rows_is_as_near_to_the_definition_as_float32() {
    let mut noise = Noise(1);
    for (format, by_channel) in FORMATS.into_iter().flat_map(|format| [(format, false), (format, true)]) {
        // Values of one number, keys of a few, whole spans and none; blocks of 128 keys, whole and not; chunks of keys.
        for (n, dim, dim_v) in [(1, 8, 2), (3, 128, 2), (130, 80, 128), (257, 64, 66), (601, 192, 4)] {
            for rows in [1, 2, 3, 4, 7, 8] {
                let k = Operand::new(format, n, dim, by_channel, &mut noise);
                let v = Operand::new(format, n, dim_v, by_channel, &mut noise);
                let q: Vec<f64> = queries(rows, dim, &mut noise).iter().map(|x| x / 16.0).collect();
                let what = format!("{format} {n} × {dim}, {dim_v}, by channel {by_channel}");
                check(&what, &q, bf16::from_f64, &k, &v, 1e-6);
                check(&what, &q, f16::from_f64, &k, &v, 1e-6);
            }
        }
    }
}

/// A number of q towers over the others, and keys are 0 there or not.
#[test]
fn a_channel_of_q_that_towers_over_the_others_takes_nothing_from_them() {
    let mut noise = Noise(2);
    for (format, tower) in
        FORMATS.into_iter().flat_map(|format| [8.0, 700.0, 5e3, 1e6, 1e12].map(|size| (format, size)))
    {
        let (n, dim) = (150, 128);
        let [mut k, v] = [1, 2].map(|_| Operand::new(format, n, dim, false, &mut noise));
        if let Some(points) = &mut k.points {
            points.fill(128);
        }
        k.factors.fill(0.01);
        for key in k.codes.chunks_mut(k.stride) {
            // The even elements of half a byte are the lower halves.
            key[0] = if format == Format::Uint8 { 128 } else { key[0] & if format == Format::Int4 { 0xf0 } else { 0 } };
        }
        for rows in [1, 4] {
            let mut q = queries(rows, dim, &mut noise);
            q[0] = bf16::from_f64(tower).to_f64();
            check(&format!("{format} tower {tower:e}"), &q, bf16::from_f64, &k, &v, 1e-6);
        }
    }
}

/// One weight decides all but for others that are small beside it, of values that are large.
#[test]
fn small_weights_beside_a_large_one_are_counted() {
    let mut noise = Noise(3);
    for (format, n) in FORMATS.into_iter().flat_map(|format| [9, 500].map(|n| (format, n))) {
        for dim_v in [2, 64] {
            let mut k = Operand::new(format, n, 32, false, &mut noise);
            let v = Operand::new(format, n, dim_v, false, &mut noise);
            k.factors.fill(0.02);
            k.factors[n / 2] = 0.5;
            for rows in [1, 2, 5] {
                let q = queries(rows, 32, &mut noise);
                check(&format!("{format} {n} keys, {dim_v}"), &q, f16::from_f64, &k, &v, 1e-6);
            }
        }
    }
}

/// The bits of a row are its own: whatever rows are beside it, wherever keys lie.
#[test]
fn a_rows_bits_depend_neither_on_its_neighbours_nor_on_strides() {
    let mut noise = Noise(4);
    for (&arch, format) in rapt_cpu::available().iter().flat_map(|arch| FORMATS.map(|format| (arch, format))) {
        let [k, v] = [1, 2].map(|_| Operand::new(format, 300, 128, false, &mut noise));
        let mut q: Vec<bf16> = queries(8, 128, &mut noise).into_iter().map(bf16::from_f64).collect();
        // Neighbours that go through numbers, or are none.
        q[3 * 128] = bf16::from_f64(1e9);
        q[5 * 128 + 7] = bf16::NAN;
        q[6 * 128 + 1] = bf16::INFINITY;
        let together = attend(arch, &q, &k, &v);
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for r in 0..8 {
            // Twice, because chunks of keys may be others for one row.
            let alone = attend(arch, &q[r * 128..][..128].repeat(2), &k, &v);
            let is_number = !matches!(r, 5 | 6);
            assert!(alone.0.iter().all(|x| x.is_nan() != is_number), "{format} row {r} on {}", arch.name());
            if is_number {
                assert_eq!(
                    bits(&alone.0[..128]),
                    bits(&together.0[r * 128..][..128]),
                    "{format} row {r} on {}",
                    arch.name()
                );
                assert_eq!(alone.1[0].to_bits(), together.1[r].to_bits());
            }
        }
        for before in [1, 64] {
            let apart = attend(arch, &q[..512], &k.apart(before), &v.apart(before));
            assert_eq!(bits(&apart.0), bits(&together.0[..512]), "{format} on {}", arch.name());
        }
    }
}
