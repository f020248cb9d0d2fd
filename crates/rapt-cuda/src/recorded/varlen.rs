//! Sequences that lie one after another: what is launched for all of them together.

use rapt_core::Kernel;

use super::*;
use crate::varlen::{VarlenParams, table_bytes};

const HEADS: [usize; 2] = [8, 2];

/// What `answer` says of `total_q` queries over `total_kv` keys of `sequences` sequences.
///
/// `format`: of k and v that are codes by token.
fn with<T>(
    dtype: DType,
    format: Option<Format>,
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
    let (of_keys, width) =
        format.map_or((dtype, head_dim), |format| (format.code_dtype(), head_dim / format.codes_per_byte()));
    let [k, v] = [("k", 2), ("v", 3)].map(|(name, n)| read(name, n, of_keys, &[total_kv, HEADS[1], width]));
    let codes = |name, n| {
        let descale = |format| Codes::new(format, read(name, n, DType::F32, &[total_kv, HEADS[1]]));
        format.map(|format| Box::new(descale(format)))
    };
    let codes = Qkv { q: None, k: codes("k_descale", 7), v: codes("v_descale", 8) };
    let offsets =
        [("cu_seqlens_q", 5), ("cu_seqlens_kv", 6)].map(|(name, n)| read(name, n, DType::I32, &[sequences + 1]));
    let shape = Shape::from([total_q, HEADS[0], head_dim]);
    let (strides, ptr) = (shape.contiguous().unwrap(), at(4, 0));
    // SAFETY: the recorded driver writes nothing.
    let out = unsafe { ViewMut::from_raw_parts("out", ptr, dtype, shape, strides, device, Extent::Declared) }.unwrap();
    let options = Options { layout: rapt_core::TensorLayout::Bshd, ..Options::default() };
    let mut builder = Spec::builder(&q, &k, &v, &options);
    let spec = builder.varlen(&offsets[0], &offsets[1]).codes(codes.as_deref()).out(&out).build().unwrap();
    answer(&spec, Tensors { codes, offsets: Some(offsets), ..Tensors::new(q, k, v, out) })
}

/// What a run asks of the driver, and its plan's workspace.
fn run(
    recorded: &Recorded,
    dtype: DType,
    format: Option<Format>,
    head_dim: usize,
    totals: [usize; 3],
) -> (Vec<Call>, usize) {
    with(dtype, format, head_dim, totals, |spec, tensors| {
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

fn int(params: &[u8], at: usize) -> usize {
    i32::from_le_bytes(params[at..at + 4].try_into().unwrap()) as usize
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
        let (calls, bytes) = run(&recorded, dtype, None, head_dim, [10_000, 20_000, 7]);
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
            let [heads, rows] = [28, 32].map(|field| int(dealt, first + 56 + 64 * n + field));
            end += table_bytes(10_000 * heads / rows + 7);
            assert!(grid.blocks > 0);
        }
        assert_eq!(end - at(9, 0).addr(), bytes);
    }
}

const DEAL: u32 = 256;
const DECODE: u32 = 288;
const MMA: u32 = 128;
const HOPPER: u32 = 0;
const GENERIC: u32 = 256;

#[test]
fn few_rows_together_need_the_kernel_of_few_queries_alone() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    let (calls, _) = run(&recorded, DType::BF16, None, 128, [16, 20_000, 16]);
    let launches = launched(&calls);
    assert_eq!(launches.iter().map(|(grid, _)| grid.threads).collect::<Vec<_>>(), [DEAL, DECODE]);
    assert!(launches[1].0.overlaps);
}

#[test]
fn few_rows_over_codes_have_a_launch_of_their_own_and_each_gets_what_belongs_to_codes() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    // With groups of 4 heads a query has 4 rows: those with 8 are as in a call alone, those with 12 too.
    for (format, totals, takes) in [
        (Format::Int8, [10_000, 20_000, 7], vec![(DECODE, 0, 9, 0), (DECODE, 9, 65, 0), (MMA, 0, 0, 1)]),
        (Format::Int4, [10_000, 20_000, 7], vec![(DECODE, 0, 9, 0), (DECODE, 9, 65, 0), (MMA, 0, 0, 1)]),
        (Format::E4m3fn, [2, 20_000, 2], vec![(DECODE, 0, 9, 0)]),
        (Format::E4m3fn, [16, 20_000, 16], vec![(DECODE, 0, 9, 0), (DECODE, 9, 65, 0)]),
    ] {
        let (calls, _) = run(&recorded, DType::BF16, Some(format), 128, totals);
        let launches = launched(&calls);
        assert_eq!((launches[0].0.threads, launches.len()), (DEAL, takes.len() + 1), "{format} {totals:?}");
        let (dealt, first) = (launches[0].1, size_of::<Params>());
        for (n, ((grid, params), (threads, least, most, many))) in launches[1..].iter().zip(takes).enumerate() {
            let launch = first + 56 + 64 * n;
            let says = [8, 12, 16].map(|field| int(dealt, launch + field));
            assert_eq!((grid.threads, says), (threads, [many, least, most]), "{format} {totals:?}");
            assert_eq!(params.len(), LaunchParams::bytes_of(true, false));
            assert_eq!(word(params, 64), word(dealt, launch), "the table");
            let each = (params.len() - first) / 3;
            let of = |operand: usize, field: usize| word(params, first + operand * each + field);
            assert_eq!([0, 1, 2].map(|operand| of(operand, 0)), [0, at(7, 0).addr(), at(8, 0).addr()]);
            // From row to row of a factor: the heads of a key.
            assert_eq!([1, 2].map(|operand| of(operand, 32)), [HEADS[1]; 2]);
        }
    }
}

#[test]
fn a_plan_names_each_kernel() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    let why = |dtype, totals| {
        with(dtype, None, 128, totals, |spec, _| recorded.backend.plan(spec).unwrap().explain().to_string())
    };
    let text = why(DType::BF16, [10_000, 20_000, 7]);
    assert!(
        text.contains("wgmma; K and V by TMA; sequences of other lengths by decode bfloat16 128/128 varlen"),
        "{text}"
    );
    assert!(text.contains("7, one after another; the device reads where they begin"), "{text}");
    assert!(!why(DType::BF16, [16, 20_000, 16]).contains("other lengths"));
}

/// Each launch over sequences of these totals, and what it says that it is for.
fn parts(format: Option<Format>, head_dim: usize, totals: [usize; 3]) -> Vec<(Option<Kernel>, String)> {
    let recorded = Recorded::new(Parts::default(), |_| ());
    with(DType::BF16, format, head_dim, totals, |spec, _| {
        let plan = recorded.backend.plan(spec).unwrap();
        let parts = plan.parts();
        assert_eq!(plan.explain().to_string().matches("part ").count(), parts.len());
        assert!(parts.iter().all(|part| part.launch.blocks > 0 && part.launch.compiled.is_some()));
        parts.into_iter().map(|part| (part.kernel, part.serves)).collect()
    })
}

#[test]
fn a_plan_says_what_each_launch_is_for() {
    let all = parts(None, 80, [10_000, 20_000, 7]);
    let (first, attending) = all.split_first().unwrap();
    assert!(first.0.is_none() && first.1.starts_with("finds the sequences"), "{first:?}");
    let few = (Some(Kernel::Decode), "sequences of up to 16 queries, 64 rows of a head of k".to_owned());
    assert_eq!(attending[0], few);
    let many = |keys| (Some(Kernel::Forward), format!("sequences of more queries and {keys}"));
    assert_eq!(attending[1..], [many("fewer than 2048 keys"), many("2048 keys or more")]);
    let of_codes: Vec<_> = parts(Some(Format::Int8), 128, [10_000, 20_000, 7]).into_iter().map(|part| part.1).collect();
    assert_eq!(
        of_codes[1..],
        [
            "sequences of up to 16 queries, 8 rows of a head of k",
            "sequences of up to 16 queries, 9 to 64 rows of a head of k",
            "sequences of more queries"
        ]
    );
    assert_eq!(parts(Some(Format::E5m2), 300, [10_000, 20_000, 7])[1].1, "all sequences");
}

#[test]
fn one_launch_for_all_is_no_part() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    assert!(recorded.plan(Request::new(1, 20_000)).unwrap().parts().is_empty());
    let plan = recorded.plan(Request { is_cache: true, ..Request::new(1, 20_000) }).unwrap();
    let parts: Vec<_> = plan.parts().into_iter().map(|part| (part.kernel, part.serves)).collect();
    let [attends, folds] = ["all sequences", "puts the chunks of rows together"].map(str::to_owned);
    assert_eq!(parts, [(Some(Kernel::Decode), attends), (None, folds)]);
}
