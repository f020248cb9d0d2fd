//! Products tile by tile: the processor's unit against its model, and the model where there is no unit.
//!
//! One test: which of the two multiplies is a setting of the process. Deliberately absent: what conformance.rs and proof.rs ask of every
//! instruction set that the machine has.
#![cfg(all(unix, target_arch = "x86_64"))]

use half::bf16;
use rapt_core::{
    Arch, BackwardOperands, BackwardSpec, BackwardTensors, Caps, DType, Operands, Result, SerialExecutor, Spec,
    Tensors, View, ViewMut, Workspace,
};
use rapt_cpu::gemm::{Gemm, Output, PackedLayout, PackedMatrix, Rows, Strided};
use rapt_testkit::{
    BackwardEngine, Case, Config, Engine, GradientCase, Rng, backward_spec_of, conformance, encode, judge_gradients,
};

/// bf16 of every kind: ordinary ones, tiny ones whose products are no normal numbers, and now and then one that is not finite.
fn numbers(rng: &mut Rng, n: usize) -> Vec<u8> {
    let mut bytes = vec![0; 2 * n];
    for to in bytes.chunks_exact_mut(2) {
        let x = rng.normal();
        let x = match rng.below(400) {
            0 => f64::NAN,
            1 => f64::INFINITY,
            2..40 => x * 1e-20,
            40..60 => x * 1e-39,
            _ => x,
        };
        encode(DType::BF16, x, to);
    }
    bytes
}

fn product(sizes: [usize; 3], x: &[u8], w: &[u8]) -> Vec<u16> {
    let [m, n, k] = sizes;
    let layout = PackedLayout::new(Arch::Amx, DType::BF16, k, n).unwrap();
    let strided = Strided { ptr: w.as_ptr(), k_stride: 1, n_stride: k as isize };
    // SAFETY: w has n rows of k elements.
    let packed = unsafe { PackedMatrix::pack(layout, strided, &SerialExecutor).unwrap() };
    let gemm = Gemm::new(Arch::Amx, DType::BF16, sizes, 1).unwrap();
    let (mut scratch, mut y) = (Workspace::new(), vec![0u16; m * n]);
    scratch.ensure(gemm.scratch_bytes()).unwrap();
    let rows = Rows { ptr: x.as_ptr(), row_stride: k as isize };
    let out = Output::Rows { ptr: y.as_mut_ptr().cast(), row_stride: n as isize };
    for item in 0..gemm.items() {
        // SAFETY: x has m rows of k elements, y has m of n, and w was packed for these sizes.
        unsafe { gemm.run_item(item, rows, packed.view(), out, scratch.as_mut_ptr()) };
    }
    y
}

/// The bits of a NaN are nobody's promise.
fn is_same(a: u16, b: u16) -> bool {
    let is_nan = |x: u16| x & 0x7FFF > 0x7F80;
    a == b || (is_nan(a) && is_nan(b))
}

fn engine() -> Box<Engine<'static>> {
    let mut workspace = Workspace::new();
    Box::new(move |spec: &Spec, tensors: Tensors<'_>| -> Result<()> {
        let plan = rapt_cpu::select(spec, &Caps { arch: Arch::Amx, threads: 1, clock_hz: None })?;
        workspace.ensure(plan.workspace_bytes())?;
        rapt_cpu::run(&plan, &mut Operands::check(tensors, spec)?, &mut workspace, &SerialExecutor)
    })
}

fn run_backward(spec: &BackwardSpec, tensors: BackwardTensors<'_>, workspace: &mut Workspace) -> Result<()> {
    let plan = rapt_cpu::select_backward(spec, &Caps { arch: Arch::Amx, threads: 1, clock_hz: None })?;
    let storage = spec.forward().numerics.storage;
    if storage == DType::BF16 && spec.d_o().dtype == storage {
        assert_eq!(plan.plan().key().arch, Arch::Amx);
    }
    workspace.ensure(plan.workspace_bytes())?;
    rapt_cpu::run_backward(&plan, &mut BackwardOperands::check(tensors, spec)?, workspace, &SerialExecutor)
}

fn backward_engine() -> Box<BackwardEngine<'static>> {
    let mut workspace = Workspace::new();
    Box::new(move |spec: &BackwardSpec, tensors: BackwardTensors<'_>| run_backward(spec, tensors, &mut workspace))
}

/// dq, dk and dv of one head of 70 queries and 300 keys, tails in every direction.
fn gradients(dim: usize) -> [Vec<bf16>; 3] {
    let (queries, keys) = ([1, 1, 70, dim], [1, 1, 300, dim]);
    let mut rng = Rng::new(dim as u64);
    let mut of =
        |[_, _, len, dim]: [usize; 4]| -> Vec<bf16> { (0..len * dim).map(|_| bf16::from_f64(rng.normal())).collect() };
    let (q, k, v, out, d_o) = (of(queries), of(keys), of(keys), of(queries), of(queries));
    let (mut dq, mut dk, mut dv, lse) = (q.clone(), k.clone(), v.clone(), [6.0f32; 70]);
    let view = |name, data, shape: [usize; 4]| View::contiguous::<bf16>(name, data, shape.into()).unwrap();
    let tensors = BackwardTensors {
        dq: Some(ViewMut::contiguous("dq", &mut dq, queries.into()).unwrap()),
        dk: Some(ViewMut::contiguous("dk", &mut dk, keys.into()).unwrap()),
        dv: Some(ViewMut::contiguous("dv", &mut dv, keys.into()).unwrap()),
        ..BackwardTensors::new(
            [view("q", &q, queries), view("k", &k, keys), view("v", &v, keys)],
            view("out", &out, queries),
            View::contiguous("lse", &lse, [1, 1, 70].into()).unwrap(),
            view("d_o", &d_o, queries),
        )
    };
    let case = Case { lse: true, ..Case::plain(DType::BF16, queries, 300) };
    let spec = backward_spec_of(&tensors, &case).unwrap();
    run_backward(&spec, tensors, &mut Workspace::new()).unwrap();
    [dq, dk, dv]
}

#[test]
fn the_unit_and_its_model_give_the_same_bits_and_the_model_conforms() {
    rapt_cpu::tile_every_request();
    let has_unit = rapt_cpu::model_tiles(true);
    if !rapt_cpu::available().contains(&Arch::Amx) {
        return println!("skipped: the model needs AVX-512 with bf16 around it");
    }
    if !has_unit {
        println!("no AMX: its model is tested alone");
    }
    let mut rng = Rng::new(20);
    for sizes in [[1, 1, 1], [1, 70, 65], [3, 33, 100], [17, 64, 800], [40, 31, 1600], [150, 300, 33]] {
        let [m, n, k] = sizes;
        let (x, w) = (numbers(&mut rng, m * k), numbers(&mut rng, n * k));
        let by_model = product(sizes, &x, &w);
        if has_unit {
            rapt_cpu::model_tiles(false);
            let by_unit = product(sizes, &x, &w);
            rapt_cpu::model_tiles(true);
            let differs = by_unit.iter().zip(&by_model).position(|(&a, &b)| !is_same(a, b));
            assert_eq!(differs.map(|at| (at, by_unit[at], by_model[at])), None, "{sizes:?}");
        }
    }
    for dim in [1, 40, 64, 130] {
        let by_model = gradients(dim);
        if has_unit {
            rapt_cpu::model_tiles(false);
            assert!(gradients(dim) == by_model, "gradients, head_dim {dim}");
            rapt_cpu::model_tiles(true);
        }
    }
    for n in 0..80 {
        let dtype = [DType::BF16, DType::F32, DType::F16][n % 3];
        let case = GradientCase::random(rng.bits(), &[dtype], 40_000);
        judge_gradients(&mut [backward_engine()], &case).unwrap_or_else(|what| panic!("problem {n}: {what}"));
    }
    let config = Config { seed: 5, problems: 150, quantized: 0, ..Config::default() };
    conformance(&mut [engine()], &config).unwrap_or_else(|failure| panic!("{failure}"));
}
