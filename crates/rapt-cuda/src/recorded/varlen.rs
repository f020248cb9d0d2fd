//! Sequences that lie one after another: what is launched for all of them together.

use super::*;
use crate::varlen::{VarlenParams, table_bytes};

const HEADS: [usize; 2] = [8, 2];

/// What `answer` says of `total_q` queries over `total_kv` keys of `sequences` sequences.
fn with<T>(
    dtype: DType,
    head_dim: usize,
    [total_q, total_kv, sequences]: [usize; 3],
    answer: impl FnOnce(&Spec, Tensors<'_>) -> T,
) -> T {
    let device = Device::Cuda(0);
    let read = |name, n: usize, dtype, shape: &[usize]| {
        let shape = Shape::new(shape).unwrap();
        let strides = shape.contiguous().unwrap();
        // SAFETY: the recorded driver reads nothing.
        unsafe { View::from_raw_parts(name, at(n, 0), dtype, shape, strides, device, Extent::Declared) }.unwrap()
    };
    let q = read("q", 1, dtype, &[total_q, HEADS[0], head_dim]);
    let [k, v] = [("k", 2), ("v", 3)].map(|(name, n)| read(name, n, dtype, &[total_kv, HEADS[1], head_dim]));
    let offsets =
        [("cu_seqlens_q", 5), ("cu_seqlens_kv", 6)].map(|(name, n)| read(name, n, DType::I32, &[sequences + 1]));
    let shape = Shape::from([total_q, HEADS[0], head_dim]);
    let (strides, ptr) = (shape.contiguous().unwrap(), at(4, 0));
    // SAFETY: the recorded driver writes nothing.
    let out = unsafe { ViewMut::from_raw_parts("out", ptr, dtype, shape, strides, device, Extent::Declared) }.unwrap();
    let options = Options { layout: rapt_core::TensorLayout::Bshd, ..Options::default() };
    let spec = Spec::builder(&q, &k, &v, &options).varlen(&offsets[0], &offsets[1]).out(&out).build().unwrap();
    answer(&spec, Tensors { offsets: Some(offsets), ..Tensors::new(q, k, v, out) })
}

/// What a run asks of the driver, and its plan's workspace.
fn run(recorded: &Recorded, dtype: DType, head_dim: usize, totals: [usize; 3]) -> (Vec<Call>, usize) {
    with(dtype, head_dim, totals, |spec, tensors| {
        let plan = recorded.backend.plan(spec).unwrap();
        let mut operands = Operands::check(tensors, plan.spec()).unwrap();
        recorded.log.take();
        let of = |len_bytes| DeviceMemory { address: at(9, 0).addr(), len_bytes };
        let bytes = plan.workspace_bytes();
        // SAFETY: the recorded driver touches no memory.
        let ran = recorded.log.during_run(|| unsafe { recorded.backend.run(&plan, &mut operands, of(bytes), 77) });
        ran.unwrap();
        let calls = recorded.log.take();
        // SAFETY: as above.
        let short = unsafe { recorded.backend.run(&plan, &mut operands, of(bytes - 1), 77) };
        assert_eq!(short, Err(Error::OutOfMemory { bytes }));
        assert_eq!(recorded.log.take(), []);
        (calls, bytes)
    })
}

fn launched(calls: &[Call]) -> Vec<(Grid, &[u8])> {
    calls
        .iter()
        .filter_map(|call| match call {
            Call::Launch { grid, params, stream: 77, .. } => Some((*grid, params.as_slice())),
            _ => None,
        })
        .collect()
}

fn word(params: &[u8], at: usize) -> usize {
    usize::from_le_bytes(params[at..at + 8].try_into().unwrap())
}

#[test]
fn one_launch_finds_the_sequences_and_each_kernel_behind_it_has_a_table_of_them() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    for (dtype, head_dim, kernels) in [
        (DType::BF16, 128, vec![DECODE, HOPPER]),
        // One tile for sequences of few keys, one for those of many.
        (DType::BF16, 80, vec![DECODE, HOPPER, HOPPER]),
        (DType::F32, 64, vec![GENERIC, 512]),
        (DType::F64, 64, vec![GENERIC]),
    ] {
        let (calls, bytes) = run(&recorded, dtype, head_dim, [10_000, 20_000, 7]);
        let launches = launched(&calls);
        let threads: Vec<_> = launches.iter().map(|(grid, _)| grid.threads).collect();
        assert_eq!((threads[0], threads.len()), (DEAL, kernels.len() + 1), "{dtype} {head_dim}");
        for (threads, expected) in threads[1..].iter().zip(&kernels) {
            assert!(*expected == HOPPER && [384, 512].contains(threads) || expected == threads, "{dtype} {head_dim}");
        }
        let dealt = launches[0].1;
        assert_eq!(dealt.len(), size_of::<VarlenParams>());
        let first = size_of::<Params>();
        assert_eq!([0, 8, 16, 24].map(|at| word(dealt, first + at)), [at(5, 0).addr(), at(6, 0).addr(), 1, 1]);
        // Each kernel reads the table that the first launch fills for it, in the workspace and apart from the others.
        let mut end = at(9, 0).addr();
        for (n, (grid, params)) in launches[1..].iter().enumerate() {
            let table = word(dealt, first + 56 + 64 * n);
            let own = if params.len() == size_of::<HopperParams>() { 5 * size_of::<TensorMap>() } else { 0 };
            assert_eq!(word(params, own + 64), table, "{dtype} {head_dim}");
            assert_eq!(table, end);
            let rows = i32::from_le_bytes(dealt[first + 56 + 64 * n + 28..][..4].try_into().unwrap()) as usize;
            let heads = i32::from_le_bytes(dealt[first + 56 + 64 * n + 24..][..4].try_into().unwrap()) as usize;
            end += table_bytes(10_000 * heads / rows + 7);
            assert!(grid.blocks > 0);
        }
        assert_eq!(end - at(9, 0).addr(), bytes);
    }
}

const DEAL: u32 = 256;
const DECODE: u32 = 288;
const HOPPER: u32 = 0;
const GENERIC: u32 = 256;

#[test]
fn few_rows_together_need_the_kernel_of_few_queries_alone() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    let (calls, _) = run(&recorded, DType::BF16, 128, [16, 20_000, 16]);
    let launches = launched(&calls);
    assert_eq!(launches.iter().map(|(grid, _)| grid.threads).collect::<Vec<_>>(), [DEAL, DECODE]);
    assert!(launches[1].0.overlaps);
}

#[test]
fn a_plan_names_each_kernel() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    let why =
        |dtype, totals| with(dtype, 128, totals, |spec, _| recorded.backend.plan(spec).unwrap().explain().to_string());
    let text = why(DType::BF16, [10_000, 20_000, 7]);
    assert!(
        text.contains("wgmma; K and V by TMA; sequences of other lengths by decode bfloat16 128/128 varlen"),
        "{text}"
    );
    assert!(text.contains("7, one after another; the device reads where they begin"), "{text}");
    assert!(!why(DType::BF16, [16, 20_000, 16]).contains("other lengths"));
}
