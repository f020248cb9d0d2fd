//! What judges heads: which launches, with which parameters, and the one read that waits.

use rapt_core::{Device, HeadDeviation};

use super::*;
use crate::deviation::DeviationParams;

/// `f` gets the spec of `request`, its operands, and the errors of k and v.
fn with<T>(request: Request, f: impl FnOnce(&Spec, &mut Operands<'_>, Qkv<Option<View<'_>>>) -> T) -> T {
    request.with(|spec, tensors| {
        let matrices = spec.batch() * spec.num_kv_heads();
        let errors = |name, n: usize, columns: usize| {
            let shape = Shape::from([matrices * 2 * (spec.kv_len() + columns + 1)]);
            let (strides, device) = (shape.contiguous().unwrap(), Device::Cuda(0));
            // SAFETY: the recorded driver reads nothing.
            unsafe { View::from_raw_parts(name, at(n, 0), DType::F32, shape, strides, device, Extent::Declared) }
                .unwrap()
        };
        let k = Some(errors("k_errors", 12, spec.head_dim()));
        let v = Some(errors("v_errors", 13, spec.head_dim_v()));
        let mut operands = Operands::check(tensors, spec).unwrap();
        f(spec, &mut operands, Qkv { q: None, k, v })
    })
}

#[test]
fn rows_then_heads_are_launched_and_their_figures_read_once() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    // Few queries, whose keys are split, and many.
    for (q_len, kv_len, blocks, block_m) in [(1, 5000, 2 * 10, 16), (100, 300, 2 * 2, 64)] {
        let request = Request { is_coded: true, ..Request::new(q_len, kv_len) };
        with(request, |spec, operands, errors| {
            let plan = recorded.backend.plan_deviations(spec).unwrap();
            let [rows, heads] = plan.variants()[..] else { panic!("{plan:?}") };
            assert_eq!((rows.algorithm, rows.block_m), (Algorithm::Deviation, block_m));
            assert_eq!(heads.algorithm, Algorithm::DeviationEnd);
            recorded.log.take();
            let memory = DeviceMemory { address: at(9, 0).addr(), len_bytes: plan.workspace_bytes() };
            // SAFETY: the recorded driver touches no memory.
            let found = unsafe { recorded.backend.deviations(&plan, operands, &errors, memory, 77) }.unwrap();
            let of = |n: f64| HeadDeviation {
                epsilon: n,
                estimate: n + 1.0,
                before: n + 2.0,
                after: n + 3.0,
                norm: n + 4.0,
            };
            assert_eq!(found, [of(1.0), of(2.0)]);
            let calls = recorded.log.take();
            let [
                Call::Launch { handle: first, grid, params, stream: 77 },
                Call::Launch { handle: second, grid: end, params: same, stream: 77 },
                read,
            ] = &calls[..]
            else {
                panic!("{calls:?}")
            };
            assert_eq!(*read, Call::Read { address: at(9, 0).addr(), bytes: 2 * 40, stream: 77 });
            let functions = recorded.functions.lock().unwrap();
            assert_eq!([&functions[*first], &functions[*second]], [&machine_code(&rows), &machine_code(&heads)]);
            assert_eq!([(grid.blocks, grid.threads), (end.blocks, end.threads)], [(blocks, 256), (2, 256)]);
            assert_eq!((params.len(), params), (DeviationParams::bytes(), same));
            let word = |n: usize| usize::from_le_bytes(params[8 * n..][..8].try_into().unwrap());
            // Errors of k and v, each with matrices and sizes; rows, chunks and heads in the workspace; and the tensors.
            assert_eq!([word(0), word(1), word(2)], [at(12, 0).addr(), 2, kv_len | 64 << 32]);
            assert_eq!([word(3), word(4), word(5)], [at(13, 0).addr(), 2, kv_len | 64 << 32]);
            assert_eq!([word(6), word(7), word(8)], [at(9, 80).addr(), at(9, 80).addr(), at(9, 0).addr()]);
            assert_eq!(f64::from_bits(word(9) as u64), 1.0 / 2048.0, "weights of float16");
            assert_eq!([word(11), word(12), word(13)], [1, 2, 3].map(|n| at(n, 0).addr()));
            // Short memory: nothing is launched.
            let short = DeviceMemory { len_bytes: plan.workspace_bytes() - 1, ..memory };
            // SAFETY: as above.
            let refused = unsafe { recorded.backend.deviations(&plan, operands, &errors, short, 77) };
            assert_eq!(refused.unwrap_err(), Error::OutOfMemory { bytes: plan.workspace_bytes() });
            assert_eq!(recorded.log.take(), []);
        });
    }
}

#[test]
fn what_is_captured_and_what_is_of_other_sizes_is_refused_before_a_launch() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    let request = Request { is_coded: true, ..Request::new(1, 300) };
    with(request, |spec, operands, errors| {
        let plan = recorded.backend.plan_deviations(spec).unwrap();
        recorded.log.take();
        let memory = DeviceMemory { address: at(9, 0).addr(), len_bytes: plan.workspace_bytes() };
        let mut run = |errors: &Qkv<Option<View<'_>>>, stream| {
            // SAFETY: the recorded driver touches no memory.
            unsafe { recorded.backend.deviations(&plan, operands, errors, memory, stream) }.unwrap_err()
        };
        let captured = run(&errors, CAPTURED);
        assert!(
            matches!(&captured, Error::Unsupported { what, instead, .. } if what.contains("CUDA graph") && instead.contains("tolerance=None")),
            "{captured:?}"
        );
        let missing = run(&Qkv { v: None, ..errors }, 77);
        assert_eq!(missing, Error::NotAsPlanned { tensor: "v", what: "measured errors" });
        let short = errors.k.unwrap().narrow(0, &(0..10));
        let short = run(&Qkv { k: Some(short), ..errors }, 77);
        assert_eq!(short, Error::NotAsPlanned { tensor: "k", what: "measured errors" });
        assert_eq!(recorded.log.take(), []);
    });
    // Float64 has no estimate, nor have pages.
    let of_cache = Request { is_coded: true, is_cache: true, ..Request::new(1, 300) };
    of_cache.with(|spec, _| {
        let refused = recorded.backend.plan_deviations(spec).unwrap_err();
        assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    });
}
