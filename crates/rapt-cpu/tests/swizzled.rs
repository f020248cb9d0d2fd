//! Scales that lie swizzled: the bits of the same scales in rows, whatever stands in the padding, on every instruction set.

use half::bf16;
use rapt_core::swizzle::{padded_numel, swizzled};
use rapt_core::{
    Arch, Caps, Causal, Codes, DType, Element, Format, Operands, Options, Qkv, ScaleLayout, SerialExecutor, Spec,
    Tensors, View, ViewMut, Workspace,
};

const BATCH: usize = 2;
const HEADS: usize = 2;
/// An e8m0 and an e4m3 that are NaN.
const NAN: u8 = 0xff;

/// Bytes without a period.
fn bytes(n: usize, seed: usize) -> impl Iterator<Item = u8> {
    (0..n).map(move |at| {
        let x = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (seed as u64) << 32;
        ((x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 56) as u8
    })
}

/// q, k or v as codes, with its scales in rows and swizzled.
struct Operand {
    format: Format,
    heads: usize,
    len: usize,
    dim: usize,
    codes: Vec<u8>,
    plain: Vec<u8>,
    swizzled: Vec<u8>,
    /// From one swizzled scale to the next.
    step: isize,
}

impl Operand {
    fn new(format: Format, [heads, len, dim]: [usize; 3], seed: usize, step: isize) -> Self {
        let block = format.own_block_size().unwrap();
        let (rows, blocks) = (BATCH * heads * len, dim.div_ceil(block));
        let codes = bytes(rows * dim.div_ceil(format.codes_per_byte()), seed);
        // No NaN of e4m3.
        let codes = codes.map(|byte| if format == Format::Mxfp8 && byte & 0x7f == 0x7f { 0 } else { byte });
        let scale = |byte: u8| if format == Format::Nvfp4 { 0x30 + byte % 16 } else { 122 + byte % 5 };
        let plain: Vec<u8> = bytes(rows * blocks, seed + 1).map(scale).collect();
        let matrix = padded_numel(len, blocks).unwrap();
        let (apart, total) = (step.unsigned_abs(), BATCH * heads * matrix);
        let mut scales = vec![NAN; total * apart];
        for (row, of_row) in plain.chunks(blocks).enumerate() {
            for (at, &scale) in of_row.iter().enumerate() {
                let flat = row / len * matrix + swizzled(row % len, at, blocks);
                let place = if step < 0 { total - 1 - flat } else { flat };
                scales[place * apart] = scale;
            }
        }
        Operand { format, heads, len, dim, codes: codes.collect(), plain, swizzled: scales, step }
    }

    fn view(&self) -> View<'_> {
        let shape = [BATCH, self.heads, self.len, self.dim.div_ceil(self.format.codes_per_byte())];
        let view = View::contiguous("codes", &self.codes, shape.into()).unwrap();
        view.reinterpreted("codes", self.format.code_dtype()).unwrap()
    }

    fn codes(&self, scale_layout: ScaleLayout) -> Codes<'_> {
        let blocks = self.dim.div_ceil(self.format.own_block_size().unwrap());
        let descale = match scale_layout {
            ScaleLayout::Plain => {
                View::contiguous("descale", &self.plain, [BATCH, self.heads, self.len, blocks].into()).unwrap()
            }
            ScaleLayout::Swizzle32x4x4 => {
                let matrix = padded_numel(self.len, blocks).unwrap();
                let (step, flat) = (self.step, matrix as isize);
                let first = if step < 0 { (BATCH * self.heads * matrix - 1) * step.unsigned_abs() } else { 0 };
                let strides = [self.heads as isize * flat * step, flat * step, step];
                let shape = [BATCH, self.heads, matrix];
                View::strided("descale", &self.swizzled, first, shape.into(), strides.into()).unwrap()
            }
        };
        Codes {
            global_scale: self.format.has_global_scale().then_some(0.7),
            head_dim: Some(self.dim),
            scale_layout,
            ..Codes::new(self.format, descale.reinterpreted("descale", self.format.scale_dtype()).unwrap())
        }
    }
}

enum Query<'a, T> {
    Numbers(&'a [T], usize),
    Codes(&'a Operand),
}

/// out and lse, and which kernel ran.
fn attend<T: Element>(
    arch: Arch,
    q: &Query<'_, T>,
    [k, v]: [&Operand; 2],
    layouts: [ScaleLayout; 3],
    options: &Options,
) -> (Vec<u32>, Vec<u32>, String) {
    let (tensor, of_q, [heads, q_len]) = match q {
        Query::Numbers(numbers, q_len) => {
            let shape = [BATCH, 2 * HEADS, *q_len, k.dim];
            (View::contiguous("q", numbers, shape.into()).unwrap(), None, [2 * HEADS, *q_len])
        }
        Query::Codes(q) => (q.view(), Some(Box::new(q.codes(layouts[0]))), [q.heads, q.len]),
    };
    let codes = Qkv { q: of_q, k: Some(Box::new(k.codes(layouts[1]))), v: Some(Box::new(v.codes(layouts[2]))) };
    let rows = BATCH * heads * q_len;
    let (mut out, mut lse) = (vec![f32::NAN; rows * v.dim], vec![f32::NAN; rows]);
    let tensors = Tensors {
        codes,
        lse: Some(ViewMut::contiguous("lse", &mut lse, [BATCH, heads, q_len].into()).unwrap()),
        ..Tensors::new(
            tensor,
            k.view(),
            v.view(),
            ViewMut::contiguous("out", &mut out, [BATCH, heads, q_len, v.dim].into()).unwrap(),
        )
    };
    let spec = Spec::builder(&tensors.q, &tensors.k, &tensors.v, options)
        .codes(tensors.codes.as_deref())
        .out(&tensors.out)
        .lse(tensors.lse.as_ref().unwrap())
        .build()
        .unwrap();
    let plan = rapt_cpu::select(&spec, &Caps { arch, threads: 1, clock_hz: None }).unwrap();
    let kernel = plan.key().kernel.name().to_owned();
    assert_eq!(plan.cost().bytes_copied, 0);
    let mut workspace = Workspace::new();
    workspace.ensure(plan.workspace_bytes()).unwrap();
    let mut operands = Operands::check(tensors, &spec).unwrap();
    rapt_cpu::run(&plan, &mut operands, &mut workspace, &SerialExecutor).unwrap();
    drop(operands);
    let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect();
    (bits(out), bits(lse), kernel)
}

fn check<T: Element>(what: &str, q: &Query<'_, T>, kv: [&Operand; 2]) -> Vec<String> {
    use ScaleLayout::{Plain, Swizzle32x4x4};
    let options = Options::default().with_out_dtype(DType::F32).with_causal(Causal::BottomRight);
    let mut kernels = Vec::new();
    for &arch in rapt_cpu::available() {
        let (out, lse, kernel) = attend(arch, q, kv, [Plain; 3], &options);
        assert!(out.iter().all(|&bits| f32::from_bits(bits).is_finite()), "{what}");
        assert!(out.iter().any(|&bits| f32::from_bits(bits) != 0.0), "{what}");
        for layouts in [
            [Swizzle32x4x4; 3],
            [Plain, Swizzle32x4x4, Plain],
            [Plain, Plain, Swizzle32x4x4],
            [Swizzle32x4x4, Plain, Plain],
        ] {
            let (got, got_lse, of) = attend(arch, q, kv, layouts, &options);
            assert!(got == out && got_lse == lse, "{what} on {}, {layouts:?}", arch.name());
            assert_eq!(of, kernel, "{what}");
        }
        kernels.push(kernel);
    }
    kernels
}

/// Queries of numbers that bf16 holds.
fn queries<T>(n: usize, of: fn(f32) -> T) -> Vec<T> {
    (0..n).map(|n| of(((n * 31 % 17) as f32 - 8.0) / 16.0)).collect()
}

#[test]
fn swizzled_scales_give_the_bits_of_scales_in_rows() {
    let mut kernels = Vec::new();
    for format in [Format::Mxfp8, Format::Mxfp4, Format::Nvfp4] {
        // Rows of one tile and of more, with tails; blocks of one column of tiles and of more.
        for (kv_len, dim, dim_v) in
            [(1, 16, 48), (31, 64, 64), (128, 32, 128), (129, 48, 33), (300, 160, 64), (549, 128, 128)]
        {
            for step in [1, 3, -1] {
                let k = Operand::new(format, [HEADS, kv_len, dim], 3, step);
                let v = Operand::new(format, [HEADS, kv_len, dim_v], 5, step);
                for q_len in [1, 9.min(kv_len), 40.min(kv_len)] {
                    let what = format!("{format} {q_len}x{kv_len}, {dim} and {dim_v}, step {step}");
                    let n = BATCH * 2 * HEADS * q_len * dim;
                    let (singles, halves) = (queries(n, |x| x), queries(n, bf16::from_f32));
                    kernels.extend(check(&what, &Query::Numbers(&singles, q_len), [&k, &v]));
                    kernels.extend(check(&what, &Query::Numbers(&halves, q_len), [&k, &v]));
                    let of_q = Operand::new(format, [2 * HEADS, q_len, dim], 7, step);
                    kernels.extend(check::<f32>(&what, &Query::Codes(&of_q), [&k, &v]));
                }
            }
        }
    }
    for kernel in ["decode", "forward"] {
        assert!(kernels.iter().any(|of| of == kernel), "{kernel} ran");
    }
}
