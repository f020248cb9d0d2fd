//! What a plan says of itself is what run does: the values of each plan against what an executor and a workspace see of its run.

use std::sync::atomic::{AtomicUsize, Ordering};

use half::bf16;
use rapt_core::{
    Arch, Caps, Causal, DType, Element, Error, Executor, Kernel, Operands, Options, Plan, Result, Spec, Strides,
    Tensors, View, ViewMut, Workspace,
};
use rapt_cpu::{CpuLaunch, KernelVariant, Step, run, select};

/// Runs the first `steps` steps and leaves the next one undone.
struct Stopping {
    steps: usize,
    met: AtomicUsize,
    /// Threads that the last step was dealt to.
    chunks: AtomicUsize,
}

impl Executor for Stopping {
    fn threads(&self) -> usize {
        1
    }
    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        self.chunks.store(chunks, Ordering::Relaxed);
        if self.met.fetch_add(1, Ordering::Relaxed) < self.steps {
            (0..chunks).for_each(work);
        }
        Ok(())
    }
}

/// Sizes `[heads, kv_heads, q_len, kv_len, head_dim]`.
type Sizes = [usize; 5];

/// How the rows of k and v lie: `[heads, len, dim]` as they are, with heads inside of rows, or with elements apart.
const LAYOUTS: [fn([usize; 3]) -> Strides; 3] = [
    |[_, len, dim]| [(len * dim) as isize, dim as isize, 1].into(),
    |[heads, _, dim]| [dim as isize, (heads * dim) as isize, 1].into(),
    |[_, len, dim]| [(len * dim) as isize, 1, len as isize].into(),
];

/// What a request has as its mask.
#[derive(Clone, Copy)]
enum Mask {
    None,
    Bool,
    Additive,
}

/// Runs `judge` on a request of these sizes whose tensors begin `offset` elements into their memory.
fn request<T: Element + Default>(
    [heads, kv_heads, q_len, kv_len, dim]: Sizes,
    (offset, mask): (usize, Mask),
    layout: fn([usize; 3]) -> Strides,
    options: &Options,
    judge: impl Fn(&Spec, Tensors<'_>),
) {
    let zeros = |n: usize| vec![T::default(); n + offset];
    let (q, kv) = (zeros(heads * q_len * dim), zeros(kv_heads * kv_len * dim));
    let mut out = zeros(heads * q_len * dim);
    let (q_shape, kv_shape) = ([heads, q_len, dim], [kv_heads, kv_len, dim]);
    let strided =
        |name, data, shape: [usize; 3], strides| View::strided(name, data, offset, shape.into(), strides).unwrap();
    let bools: Vec<bool> = (0..q_len * kv_len).map(|n| n % 3 != 0).collect();
    let biases = zeros(q_len * kv_len);
    let mask_shape = [q_len, kv_len].into();
    let mask = match mask {
        Mask::None => None,
        Mask::Bool => Some(View::contiguous("mask", &bools, mask_shape).unwrap()),
        Mask::Additive => Some(View::contiguous("mask", &biases, mask_shape).unwrap()),
    };
    let tensors = Tensors {
        mask,
        ..Tensors::new(
            strided("q", &q, q_shape, LAYOUTS[0](q_shape)),
            strided("k", &kv, kv_shape, layout(kv_shape)),
            strided("v", &kv, kv_shape, layout(kv_shape)),
            ViewMut::strided("out", &mut out, offset, q_shape.into(), LAYOUTS[0](q_shape)).unwrap(),
        )
    };
    let spec = Spec::builder(&tensors.q, &tensors.k, &tensors.v, options)
        .mask(tensors.mask.as_ref())
        .out(&tensors.out)
        .build()
        .unwrap();
    judge(&spec, tensors);
}

fn grid(judge: impl Fn(&Spec, Tensors<'_>) + Copy) {
    let (causal, capped) = (Options::default().with_causal(Causal::BottomRight), Options::default().with_softcap(3.0));
    let windowed = Options::default().with_window(Some(9), Some(2));
    let sizes = [
        [4, 2, 1, 1, 8],
        [4, 2, 1, 1500, 16],
        [2, 2, 8, 40, 24],
        [6, 2, 70, 90, 32],
        [8, 8, 300, 20, 64],
        [2, 1, 5, 0, 8],
    ];
    for sizes in sizes {
        for layout in LAYOUTS {
            for options in [Options::default(), causal, windowed, capped] {
                for at in [(0, Mask::None), (1, Mask::Bool), (3, Mask::Additive)] {
                    request::<f32>(sizes, at, layout, &options, judge);
                    request::<bf16>(sizes, at, layout, &options, judge);
                }
            }
        }
    }
}

/// The items of the step that is left undone after `steps` of them, and the threads that it was dealt to; `None` if all were done.
fn undone(plan: &Plan, operands: &mut Operands<'_>, workspace: &mut Workspace, steps: usize) -> Option<(usize, usize)> {
    let executor = Stopping { steps, met: AtomicUsize::new(0), chunks: AtomicUsize::new(0) };
    match run(plan, operands, workspace, &executor) {
        Ok(()) => None,
        Err(Error::WorkLeftUndone { done: 0, items }) => Some((items, executor.chunks.into_inner())),
        Err(other) => panic!("{other}"),
    }
}

fn variants_of(plan: &Plan) -> Vec<KernelVariant> {
    let steps: &[Step] = match (plan.key().kernel, plan.num_splits() > 1) {
        (Kernel::Empty, _) => &[],
        (Kernel::Decode, true) => &[Step::Decode, Step::Combine],
        (Kernel::Decode, false) => &[Step::Decode],
        _ => &[Step::Forward],
    };
    steps.iter().map(|&step| KernelVariant { arch: plan.key().arch, step, storage: plan.key().storage }).collect()
}

#[test]
fn a_run_launches_the_items_threads_and_scratch_memory_that_its_plan_states() {
    for &arch in rapt_cpu::available() {
        for threads in [1, 3] {
            grid(|spec, tensors| {
                let plan = select(spec, &Caps { arch, threads, clock_hz: None }).unwrap();
                let variants = plan.launch_plan::<CpuLaunch>().unwrap().variants();
                assert_eq!(variants, variants_of(&plan), "{spec:?}");
                let mut operands = Operands::check(tensors, plan.spec()).unwrap();
                let mut short = Workspace::new();
                short.ensure(plan.workspace_bytes().saturating_sub(1)).unwrap();
                if short.len_bytes() < plan.workspace_bytes() {
                    let refused = run(&plan, &mut operands, &mut short, &rapt_core::SerialExecutor);
                    assert_eq!(refused, Err(Error::OutOfMemory { bytes: plan.workspace_bytes() }));
                }
                let mut workspace = Workspace::new();
                workspace.ensure(plan.workspace_bytes()).unwrap();
                let tasks = plan.work().map_or(0, |work| work.tasks);
                for (step, variant) in variants.iter().enumerate() {
                    let items = if variant.step == Step::Combine { tasks } else { plan.items() };
                    let launched = undone(&plan, &mut operands, &mut workspace, step);
                    assert_eq!(launched, Some((items, plan.threads().min(items))), "{variant:?} of {spec:?}");
                }
                assert_eq!(undone(&plan, &mut operands, &mut workspace, variants.len()), None, "{spec:?}");
                plan.certificate(&operands).unwrap();
            });
        }
    }
}

#[test]
fn addresses_on_the_host_change_no_plan() {
    let caps = Caps { arch: Arch::Scalar, threads: 2, clock_hz: None };
    for layout in LAYOUTS {
        let plan = |offset| {
            let plan = std::cell::OnceCell::new();
            request::<f32>([4, 2, 20, 30, 8], (offset, Mask::None), layout, &Options::default(), |spec, _| {
                plan.set(select(spec, &caps).unwrap()).unwrap();
            });
            plan.into_inner().unwrap()
        };
        assert_eq!(plan(0), plan(1));
        assert_eq!(plan(0), plan(2));
    }
}

#[test]
fn an_instruction_set_that_the_machine_lacks_is_not_entered() {
    for arch in [
        Arch::Scalar,
        Arch::Avx2,
        Arch::Avx512,
        Arch::Avx512Vnni,
        Arch::Avx512Bf16,
        Arch::Amx,
        Arch::Neon,
        Arch::NeonBf16,
    ] {
        for step in [Step::Forward, Step::Decode, Step::Combine] {
            let variant = KernelVariant { arch, step, storage: DType::BF16 };
            let refused = variant.check(&[Arch::Scalar]).err();
            assert_eq!(matches!(refused, Some(Error::Unsupported { .. })), arch != Arch::Scalar, "{variant:?}");
            assert_eq!(
                variant.check(rapt_cpu::available()).is_ok(),
                rapt_cpu::available().contains(&arch),
                "{variant:?}"
            );
        }
    }
}

#[test]
fn items_have_more_rows_where_blocks_are_packed_as_rows_lie_apart() {
    for &arch in rapt_cpu::available() {
        let rows_of = |heads: usize, layout| {
            let rows = std::cell::Cell::new((0, false));
            request::<f32>([heads, heads, 2048, 64, 32], (0, Mask::None), layout, &Options::default(), |spec, _| {
                let plan = select(spec, &Caps { arch, threads: 2, clock_hz: None }).unwrap();
                rows.set((plan.work().unwrap().rows_per_item, plan.kv_in_place()));
            });
            rows.get()
        };
        // In tiles of pairs K and V are packed however they lie.
        let [(together, in_place), (apart, packed)] = [rows_of(8, LAYOUTS[0]), rows_of(8, LAYOUTS[1])];
        assert_eq!(apart > together, in_place && !packed, "{arch:?}: {together} {apart}");
        // Never so many more that threads have few items.
        assert!(apart == together || 8 * 2048 / apart >= 24, "{arch:?}: {apart}");
        assert_eq!(rows_of(2, LAYOUTS[1]).0, rows_of(2, LAYOUTS[0]).0, "{arch:?}");
    }
}
