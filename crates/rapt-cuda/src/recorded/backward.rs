//! Gradients: which launches, in which order, with which parameters and how much of a workspace.

use rapt_core::{BackwardOperands, BackwardPlan, BackwardSpec, BackwardTensors, GradientForms, TensorForm};

use super::*;
use crate::backward::{BackwardHopperParams, BackwardParams};
use crate::launch::BackwardLaunch;
use crate::variant::{Loads, Pass};

/// q, out, d_o and dq are `[2, 6, q_len, head_dim]`, k, v and their gradients `[2, 2, 90, head_dim]`, the mask and its gradient `[1, 6, 1, 90]`.
struct Asked {
    dtype: DType,
    arriving: DType,
    head_dim: usize,
    q_len: usize,
    /// dq, dk, dv, d_mask, d_sinks.
    asks: [bool; 5],
    mask: Option<DType>,
}

const ALL: Asked = Asked {
    dtype: DType::BF16,
    arriving: DType::BF16,
    head_dim: 64,
    q_len: 70,
    asks: [true, true, true, false, false],
    mask: Some(DType::F32),
};

/// A tensor that nobody reads: number `n`.
fn lies<'a>(name: &'static str, n: usize, dtype: DType, shape: &[usize]) -> ViewMut<'a> {
    let shape = Shape::new(shape).unwrap();
    let (strides, device) = (shape.contiguous().unwrap(), Device::Cuda(0));
    // SAFETY: the recorded driver reads and writes nothing.
    unsafe { ViewMut::from_raw_parts(name, at(n + 1, 0), dtype, shape, strides, device, Extent::Declared) }.unwrap()
}

fn read<'a>(name: &'static str, n: usize, dtype: DType, shape: &[usize]) -> View<'a> {
    let of = lies(name, n, dtype, shape);
    let (strides, device) = (*of.strides(), Device::Cuda(0));
    // SAFETY: as above.
    unsafe { View::from_raw_parts(name, at(n + 1, 0), dtype, *of.shape(), strides, device, Extent::Declared) }.unwrap()
}

impl Asked {
    fn tensors(&self) -> BackwardTensors<'static> {
        let Asked { dtype, arriving, head_dim, q_len, asks, mask } = *self;
        let (queries, keys, masks) = ([2, 6, q_len, head_dim], [2, 2, 90, head_dim], [1, 6, 1, 90]);
        let written = |n: usize, name, dtype, shape: &[usize]| asks[n].then(|| lies(name, 20 + n, dtype, shape));
        BackwardTensors {
            mask: mask.map(|dtype| read("mask", 3, dtype, &masks)),
            sinks: Some(read("sinks", 4, DType::F32, &[6])),
            dq: written(0, "dq", dtype, &queries),
            dk: written(1, "dk", dtype, &keys),
            dv: written(2, "dv", dtype, &keys),
            d_mask: written(3, "d_mask", DType::F32, &masks),
            d_sinks: written(4, "d_sinks", DType::F32, &[6]),
            ..BackwardTensors::new(
                [read("q", 0, dtype, &queries), read("k", 1, dtype, &keys), read("v", 2, dtype, &keys)],
                read("out", 5, arriving, &queries),
                read("lse", 6, DType::F32, &[2, 6, q_len]),
                read("d_o", 7, arriving, &queries),
            )
        }
    }

    fn spec(&self) -> BackwardSpec {
        let tensors = self.tensors();
        let options = Options { out_dtype: Some(self.arriving), ..Options::default() };
        let mut builder = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &options);
        builder.mask(tensors.mask.as_ref()).sinks(tensors.sinks.as_ref()).out(&tensors.out).lse(&tensors.lse);
        let form = |view: &Option<ViewMut<'_>>| view.as_ref().map(TensorForm::from);
        let forms = GradientForms {
            dq: form(&tensors.dq),
            dk: form(&tensors.dk),
            dv: form(&tensors.dv),
            d_mask: form(&tensors.d_mask),
            d_sinks: form(&tensors.d_sinks),
            ..GradientForms::new(&tensors.d_o)
        };
        BackwardSpec::new(builder.build().unwrap(), &forms).unwrap()
    }

    /// What a run with so much of a workspace asks of the driver.
    fn run(&self, of: &Recorded, workspace: usize) -> (BackwardPlan, rapt_core::Result<Vec<Call>>) {
        let plan = of.backend.plan_backward(&self.spec()).unwrap();
        of.log.take();
        let mut operands = BackwardOperands::check(self.tensors(), plan.spec()).unwrap();
        let memory = DeviceMemory { address: at(9, 0).addr(), len_bytes: workspace };
        // SAFETY: the recorded driver touches no memory.
        let ran = of.log.during_run(|| unsafe { of.backend.run_backward(&plan, &mut operands, memory, 77) });
        let calls = of.log.take();
        (plan, ran.map(|()| calls))
    }
}

fn passes(plan: &BackwardPlan) -> Vec<Algorithm> {
    plan.launch_plan::<BackwardLaunch>().unwrap().variants().map(|variant| variant.algorithm).collect()
}

#[test]
fn rows_then_each_gradient_are_launched_on_the_given_stream() {
    let of = Recorded::new(Parts::default(), |_| {});
    let states = 2 * 6 * 70 * 16;
    let (plan, ran) = ALL.run(&of, states);
    assert_eq!(plan.workspace_bytes(), states);
    let mma = Algorithm::BackwardMma;
    assert_eq!(passes(&plan), [Algorithm::Backward(Pass::Rows), mma(Pass::Keys), mma(Pass::Queries)]);
    let launches: Vec<_> = ran
        .unwrap()
        .into_iter()
        .map(|call| match call {
            Call::Launch { grid, stream: 77, params, .. } => (grid.blocks, params.len()),
            other => panic!("{other:?}"),
        })
        .collect();
    let bytes = size_of::<BackwardParams>();
    // Twelve heads, 70 rows of 64 a block; two entries and heads of keys, 90 keys of 64 a block; twelve heads, 70 queries of 128 a block.
    assert_eq!(launches, [(24, bytes), (2 * 2 * 2, bytes), (12, bytes)]);
    let text = plan.explain().to_string();
    assert!(text.contains("backward_mma keys bfloat16 64/64") && text.contains("dk and dv"), "{text}");
}

#[test]
fn what_is_not_asked_for_is_not_launched_and_what_the_tensor_cores_do_not_take_is_said() {
    let of = Recorded::new(Parts::default(), |_| {});
    let generic = Algorithm::Backward;
    let states = 2 * 6 * 70 * 16;
    let all = Asked { asks: [true; 5], arriving: DType::F32, ..ALL };
    // 12 tiles, six of heads by two of 90 keys, each of two batch entries and two tiles of 70 queries: in four parts of 64 by 64 numbers.
    let with_parts = states + 12 * 4 * 64 * 64 * 4;
    let (plan, ran) = all.run(&of, with_parts);
    let expected = [Pass::Rows, Pass::Keys, Pass::Queries, Pass::Mask, Pass::MaskParts, Pass::Sinks];
    assert_eq!((passes(&plan), ran.unwrap().len()), (expected.map(generic).to_vec(), 6));
    assert!(plan.explain().to_string().contains("what arrives in the dtype of q"));
    // The gradient of a mask is a pass of the tensor cores where the others are.
    let (plan, ran) = Asked { asks: [true; 5], ..ALL }.run(&of, with_parts);
    let mma = Algorithm::BackwardMma;
    let on_tensor_cores = [
        generic(Pass::Rows),
        mma(Pass::Keys),
        mma(Pass::Queries),
        mma(Pass::Mask),
        generic(Pass::MaskParts),
        generic(Pass::Sinks),
    ];
    assert_eq!((passes(&plan), plan.workspace_bytes()), (on_tensor_cores.to_vec(), with_parts));
    let blocks = ran.unwrap().into_iter().map(|call| match call {
        Call::Launch { grid, .. } => grid.blocks,
        other => panic!("{other:?}"),
    });
    // Of a tile as many blocks as parts, and then as many as 64 * 64 numbers are of 256 threads.
    assert_eq!(blocks.skip(3).take(2).collect::<Vec<_>>(), [12 * 4, 12 * 16]);
    assert!(plan.explain().to_string().contains("backward_mma mask bfloat16 64/64"), "{}", plan.explain());
    let wide = Asked { head_dim: 300, asks: [false, false, true, false, false], ..ALL };
    let (plan, ran) = wide.run(&of, states);
    assert_eq!((passes(&plan), ran.unwrap().len()), (vec![generic(Pass::Rows), generic(Pass::Keys)], 2));
    assert!(plan.explain().to_string().contains("up to 256"));
    let (plan, ran) = Asked { asks: [false; 5], ..ALL }.run(&of, 0);
    assert_eq!((passes(&plan), ran), (vec![], Ok(vec![])));
    // Rows have states, and no gradient is launched without them.
    let (_, ran) = ALL.run(&of, states - 1);
    assert_eq!(ran, Err(Error::OutOfMemory { bytes: states }));
    let none = Asked { q_len: 0, ..ALL };
    let (plan, ran) = none.run(&of, 0);
    assert_eq!((passes(&plan), ran.unwrap().len()), (vec![Algorithm::BackwardMma(Pass::Keys)], 1));
}

#[test]
fn three_gradients_of_plain_scores_are_one_launch_of_as_many_blocks_as_there_are_items_and_heads_may_be_computed_again()
{
    let of = Recorded::new(Parts::default(), |_| {});
    let plain = Asked { mask: None, ..ALL };
    // States of 840 rows; two numbers and 64 of dq of each of 12 * 128 rows; 2 words, 4 heads of keys, and two turns of each of 12 tiles.
    let bytes = 840 * 16 + 12 * 128 * (8 + 4 * 64) + 4 * (2 + 4 + 2 * 12);
    let (plan, ran) = plain.run(&of, bytes);
    assert_eq!(plan.workspace_bytes(), bytes);
    let (generic, mma) = (Algorithm::Backward, Algorithm::BackwardMma);
    let expected = [
        generic(Pass::Rows),
        Algorithm::BackwardHopper,
        generic(Pass::Parts),
        mma(Pass::KeysAgain),
        mma(Pass::QueriesAgain),
    ];
    assert_eq!(passes(&plan), expected);
    let (mut encoded, mut launches) = (Vec::new(), Vec::new());
    for call in ran.unwrap() {
        match call {
            Call::Encode { tensor, address } => encoded.push((address, tensor.box_rows, tensor.sizes)),
            Call::Launch { grid, stream: 77, params, .. } => launches.push((grid.blocks, params.len(), grid.overlaps)),
            other => panic!("{other:?}"),
        }
    }
    let (queries, keys) = ([64, 70, 6, 2], [64, 90, 2, 2]);
    let lies = |n: usize| at(n, 0).addr();
    assert_eq!(encoded, [(1, queries), (2, keys), (3, keys), (8, queries)].map(|(n, sizes)| (lies(n), 128, sizes)));
    let (params, hopper) = (size_of::<BackwardParams>(), size_of::<BackwardHopperParams>());
    // Rows and parts by 64 a block, of tiles of 128 queries; the last two by 128 own rows. All but the first wait of themselves for what was launched before.
    let expected_launches =
        [(24, params, false), (4, hopper, true), (24, params, true), (4, params, true), (12, params, true)];
    assert_eq!(launches, expected_launches);
    let text = plan.explain().to_string();
    assert!(text.contains("backward_hopper together bfloat16 64/64") && text.contains("in one order"), "{text}");
    let (_, ran) = plain.run(&of, bytes - 1);
    assert_eq!(ran, Err(Error::OutOfMemory { bytes }));
    // Wide heads: items of 64 keys.
    let (plan, ran) = Asked { head_dim: 136, ..plain }.run(&of, 1 << 22);
    assert_eq!(passes(&plan), expected);
    assert!(plan.explain().to_string().contains("backward_hopper_wide together bfloat16 144/"), "{}", plan.explain());
    let calls = ran.unwrap();
    let rows = calls
        .iter()
        .filter_map(|call| if let Call::Encode { tensor, .. } = call { Some(tensor.box_rows) } else { None });
    assert!(rows.eq([64; 4]));
    // A gradient that is not asked for is left to the passes.
    let (plan, _) = Asked { asks: [true, true, false, false, false], ..plain }.run(&of, 1 << 20);
    assert_eq!(passes(&plan), [generic(Pass::Rows), mma(Pass::Keys), mma(Pass::Queries)]);
}

#[test]
fn a_mask_whose_rows_tma_does_not_take_is_a_warps_and_everything_else_comes_by_tma() {
    let of = Recorded::new(Parts::default(), |_| {});
    // Heads lie 90 keys apart: 180 bytes of bfloat16, or 90 of booleans, copied 4 at a time.
    for mask in [DType::BF16, DType::Bool] {
        let (plan, ran) = Asked { mask: Some(mask), ..ALL }.run(&of, 1 << 20);
        let launch = plan.launch_plan::<BackwardLaunch>().unwrap();
        let together = launch.variants().find(|variant| variant.algorithm == Algorithm::BackwardHopper).unwrap();
        assert_eq!((together.loads, together.mask), (Loads::TmaButMask, Some(mask)));
        let hopper = launch.hopper.as_ref().unwrap();
        assert_eq!(
            (hopper.loaded.map(|tensor| tensor.is_some()), hopper.mask_unit),
            ([true, true, true, true, false], 4)
        );
        let encoded = |call: &Call| if let Call::Encode { address, .. } = call { Some(*address) } else { None };
        let addresses: Vec<_> = ran.unwrap().iter().filter_map(encoded).collect();
        assert_eq!(addresses, [1, 2, 3, 8].map(|n| at(n, 0).addr()));
        let text = plan.explain().to_string();
        assert!(text.contains("bfloat16 64/64 mask by a warp mask"), "{text}");
    }
}

#[test]
fn float32_has_passes_by_halves_and_notes_beside_the_states_of_rows() {
    let of = Recorded::new(Parts::default(), |_| {});
    let plain = Asked { dtype: DType::F32, arriving: DType::F32, mask: None, ..ALL };
    // States of 840 rows; 2 words, and 4 heads of keys.
    let bytes = 840 * 16 + 4 * (2 + 4);
    let (plan, ran) = plain.run(&of, bytes);
    assert_eq!(plan.workspace_bytes(), bytes);
    let (generic, mma, halves) = (Algorithm::Backward, Algorithm::BackwardMma, Algorithm::BackwardHalves);
    let expected =
        [generic(Pass::Rows), halves(Pass::Keys), mma(Pass::KeysAgain), halves(Pass::Queries), mma(Pass::QueriesAgain)];
    assert_eq!(passes(&plan), expected);
    // What is computed again waits of itself for what was launched before.
    let blocks = |ran: rapt_core::Result<Vec<Call>>| {
        let of = |(n, call)| {
            let Call::Launch { grid, stream: 77, .. } = call else { panic!("{call:?}") };
            assert_eq!(grid.overlaps, n == 2 || n == 4);
            grid.blocks
        };
        ran.unwrap().into_iter().enumerate().map(of).collect::<Vec<_>>()
    };
    // 90 keys and 70 queries of 128 a block, of four and of twelve heads; what is computed again has 64 rows a block.
    assert_eq!(blocks(ran), [24, 4, 8, 12, 24]);
    let text = plan.explain().to_string();
    assert!(text.contains("backward_halves keys float32 64/64"), "{text}");
    let (_, ran) = plain.run(&of, bytes - 1);
    assert_eq!(ran, Err(Error::OutOfMemory { bytes }));
    // With every option; dk and dv of wider heads have blocks of their own, and heads beyond 128 other kernels.
    let (plan, ran) = Asked { mask: Some(DType::F32), head_dim: 128, ..plain }.run(&of, bytes);
    assert_eq!((passes(&plan), blocks(ran)), (expected.to_vec(), vec![24, 8, 16, 12, 24]));
    let (plan, _) = Asked { head_dim: 136, ..plain }.run(&of, bytes);
    assert_eq!(passes(&plan), [Pass::Rows, Pass::Keys, Pass::Queries].map(generic));
    // Of what is asked for.
    let (plan, _) = Asked { asks: [false, true, false, false, false], ..plain }.run(&of, bytes);
    assert_eq!(passes(&plan), expected[..3]);
}
