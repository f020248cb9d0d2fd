//! Gradients by the kernels' own sources on this machine's processor, held against the definition's: by the rule of rapt-testkit, at every stride,
//! with NaN wherever nothing is attended.

use rapt_core::{BackwardOperands, BackwardSpec, BackwardTensors, Causal};
use rapt_testkit::{BackwardEngine, GradientCase, MaskCase, Places, backward_spec_of, judge_gradients};

use super::dropout::{DRAW, in_memory};
use super::*;
use crate::launch::BackwardLaunch;
use crate::variant::Pass;

/// The same tensors as those of a GPU, and the draw in its memory at `place`.
fn on_gpu<'a>(tensors: &mut BackwardTensors<'a>, place: &mut [u64; 2]) -> BackwardTensors<'a> {
    let optional = |name, view: &Option<View<'a>>| view.as_ref().map(|view| moved(name, view));
    BackwardTensors {
        mask: optional("mask", &tensors.mask),
        sinks: optional("sinks", &tensors.sinks),
        alibi_slopes: optional("alibi_slopes", &tensors.alibi_slopes),
        d_lse: optional("d_lse", &tensors.d_lse),
        dropout: tensors.dropout.map(|seed| in_memory(seed, place)),
        dq: tensors.dq.as_mut().map(|view| moved_mut("dq", view)),
        dk: tensors.dk.as_mut().map(|view| moved_mut("dk", view)),
        dv: tensors.dv.as_mut().map(|view| moved_mut("dv", view)),
        d_mask: tensors.d_mask.as_mut().map(|view| moved_mut("d_mask", view)),
        d_sinks: tensors.d_sinks.as_mut().map(|view| moved_mut("d_sinks", view)),
        ..BackwardTensors::new(
            [moved("q", &tensors.q), moved("k", &tensors.k), moved("v", &tensors.v)],
            moved("out", &tensors.out),
            moved("lse", &tensors.lse),
            moved("d_o", &tensors.d_o),
        )
    }
}

/// `seen`: what was launched.
fn engine<'a>(case: &'a Case, seen: &'a Cell<Option<KernelVariant>>) -> Box<BackwardEngine<'a>> {
    Box::new(move |_: &BackwardSpec, mut tensors| {
        let mut place = [0; 2];
        let tensors = on_gpu(&mut tensors, &mut place);
        let spec = backward_spec_of(&tensors, case)?;
        let plan = backend().plan_backward(&spec)?;
        let launches = plan.launch_plan::<BackwardLaunch>()?;
        let main = launches.variants().find(|variant| variant.algorithm.pass() != Some(Pass::Rows));
        seen.set(main.copied());
        let mut operands = BackwardOperands::check(tensors, plan.spec())?;
        let mut states = vec![0u128; plan.workspace_bytes().div_ceil(16)];
        let workspace = DeviceMemory { address: states.as_mut_ptr() as usize, len_bytes: plan.workspace_bytes() };
        // SAFETY: the driver runs on this thread, and has ended when it answers.
        unsafe { backend().run_backward(&plan, &mut operands, workspace, 0) }
    })
}

fn try_judge(of: &GradientCase) -> (Option<KernelVariant>, std::result::Result<(), String>) {
    let seen = Cell::new(None);
    let judged = judge_gradients(&mut [engine(&of.case, &seen)], of);
    (seen.get(), judged)
}

fn judge(of: &GradientCase) -> Option<KernelVariant> {
    let (seen, judged) = try_judge(of);
    judged.unwrap_or_else(|what| panic!("{what}"));
    seen
}

fn is_whole() -> bool {
    std::env::var("RAPT_WHOLE").is_ok_and(|whole| whole == "1")
}

/// Places at which everything can be moved 16 bytes at a time.
fn plain(dtype: DType, q: [usize; 4], kv_len: usize) -> Case {
    Case { guard: Guard::Heap { shift: 0 }, places: Places::default(), seed: 5, ..Case::plain(dtype, q, kv_len) }
}

#[test]
fn gradients_are_those_of_the_definition() {
    let mask = |dtype, full| Some(MaskCase { dtype, full, rank: 4, lowest: false });
    // A group, values wider than keys, a window before a causal diagonal, and a bias of which heads and batch entries are summed.
    let whole = Case {
        num_kv_heads: 1,
        head_dim_v: 9,
        mask: mask(DType::F32, [false, false, true, true]),
        causal: Some(Causal::BottomRight),
        window: Window { left: Some(60), right: None },
        softcap: Some(3.0),
        sinks: Some(DType::F32),
        alibi_slopes: Some(DType::F32),
        poison: true,
        ..plain(DType::F64, [1, 2, 70, 12], 90)
    };
    let of = judge(&GradientCase { d_lse: true, ..GradientCase::all(&whole) });
    assert!(matches!(of.unwrap().algorithm, Algorithm::Backward(Pass::Keys)));
}

#[test]
fn gradients_on_the_tensor_cores_are_those_of_the_definition() {
    // Tiles by 16 bytes and, under other strides, element by element; keys that nobody sees hold NaN, and what arrives has one.
    let causal = Some(Causal::BottomRight);
    for dtype in [DType::F16, DType::F32] {
        let of = Case { num_kv_heads: 1, head_dim_v: 64, causal, poison: true, ..plain(dtype, [1, 2, 70, 40], 100) };
        let seen = judge(&GradientCase::all(&of)).unwrap();
        assert!(matches!(seen.algorithm, Algorithm::BackwardMma(Pass::Keys)), "{seen}");
    }
}

#[test]
fn gradients_of_masks_on_the_tensor_cores_are_those_of_the_definition() {
    // Sums over the queries of a tile that is not whole and of a second one, over keys, over batch entries and heads; each number a sum of its own; and behind
    // softcap.
    for (dtype, of_mask, full, q_len, softcap) in [
        (DType::F16, DType::F16, [true, false, false, true], 15, None),
        (DType::BF16, DType::F32, [false, true, false, false], 70, None),
        (DType::F16, DType::F16, [false, true, true, true], 70, Some(3.0)),
        (DType::F32, DType::F32, [true, false, false, false], 15, None),
        (DType::BF16, DType::BF16, [true; 4], 70, None),
    ] {
        let mask = Some(MaskCase { dtype: of_mask, full, rank: 4, lowest: false });
        let case = Case { mask, num_kv_heads: 1, head_dim_v: 24, softcap, ..plain(dtype, [2, 2, q_len, 40], 128) };
        let seen = judge(&GradientCase::all(&case)).unwrap();
        assert!(matches!(seen.algorithm, Algorithm::BackwardMma(Pass::Keys)), "{seen}");
    }
}

#[test]
fn gradients_are_of_the_weights_that_forward_dropped() {
    let (causal, dropout) = (Some(Causal::BottomRight), (0.4, DRAW));
    let mask = Some(MaskCase { dtype: DType::F64, full: [true; 4], rank: 4, lowest: false });
    let any = Case { mask, num_kv_heads: 1, dropout, poison: true, ..plain(DType::F64, [1, 2, 70, 12], 90) };
    let of = judge(&GradientCase { d_lse: true, ..GradientCase::all(&any) });
    assert!(of.is_some_and(|of| of.dropout && matches!(of.algorithm, Algorithm::Backward(Pass::Keys))));
    // Tiles of 32 keys by 128 queries and of 64 keys by 32 queries, as their lanes find words otherwise; and nothing left.
    let half = Case { num_kv_heads: 1, causal, dropout, poison: true, ..plain(DType::F16, [2, 2, 150, 32], 100) };
    let none = Case { dropout: (1.0, DRAW), q: [1, 1, 5, 32], num_kv_heads: 1, ..half.clone() };
    for case in [half, none] {
        let of = judge(&GradientCase::all(&case));
        assert!(of.is_some_and(|of| of.dropout && matches!(of.algorithm, Algorithm::BackwardMma(Pass::Keys))));
    }
}

/// Every kernel in more forms than each change has time for: random problems, and lengths beyond tiles.
#[test]
fn many_gradients_are_those_of_the_definition() {
    if !is_whole() {
        return;
    }
    let (mut count, mut failed) = (std::collections::BTreeMap::<String, usize>::new(), Vec::new());
    for seed in 0..120 {
        let of = GradientCase::random(seed, &rapt_core::COMPUTED, 30_000);
        let (seen, judged) = try_judge(&of);
        let seen = seen.map_or("nothing".to_owned(), |variant| variant.to_string());
        if let Err(what) = judged {
            println!("{seed}: {seen}: {what}");
            failed.push(seed);
        }
        *count.entry(seen.split(' ').next().unwrap().to_owned()).or_default() += 1;
    }
    println!("{count:?}");
    assert!(failed.is_empty(), "{failed:?}");
}
