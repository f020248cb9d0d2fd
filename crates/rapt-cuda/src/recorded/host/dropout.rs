//! Forward passes that drop weights, by the kernels' own sources on this machine's processor: what the definition drops, and nothing else. Those of
//! gradients are judged in backward.rs.

use rapt_core::{Causal, DeviceDraw, DropoutSeed};

use super::*;

/// Draws of 64 bits, and places behind those of others.
pub(super) const DRAW: DropoutSeed =
    DropoutSeed { first_batch: 3, ..DropoutSeed::new(0x0123_4567_89ab_cdef, (5 << 32) + 1) };

/// The same draw, which the kernels find at `place`.
pub(super) fn in_memory(seed: DropoutSeed, place: &mut [u64; 2]) -> DropoutSeed {
    *place = [seed.seed, seed.offset];
    // SAFETY: two u64, which the caller keeps until its run has ended.
    let draw = unsafe { DeviceDraw::new(GPU, place.as_ptr() as usize) }.unwrap();
    DropoutSeed { first_batch: seed.first_batch, ..DropoutSeed::in_memory(draw) }
}

#[test]
fn what_the_definition_drops_is_dropped() {
    let by_16 = Cell::new(0);
    let plain = |dtype, q, kv_len| Case {
        guard: Guard::Heap { shift: 0 },
        places: Places::default(),
        dropout: (0.4, DRAW),
        seed: 5,
        ..Case::plain(dtype, q, kv_len)
    };
    // Rows and keys with tails, groups of heads, and keys that nobody sees, which hold NaN; few queries; nothing left.
    let causal = Some(Causal::BottomRight);
    let on_tensor_cores = [
        Case { num_kv_heads: 2, head_dim_v: 24, causal, poison: true, ..plain(DType::F16, [2, 4, 70, 32], 150) },
        Case { num_kv_heads: 1, ..plain(DType::F16, [1, 4, 1, 32], 170) },
        Case { dropout: (1.0, DRAW), head_dim_v: 24, ..plain(DType::F16, [1, 1, 5, 32], 20) },
    ];
    let of_any = [Case { num_kv_heads: 1, causal, poison: true, ..plain(DType::F64, [2, 2, 70, 12], 90) }];
    for (kernel, cases) in [(Kernel::Forward, &on_tensor_cores[..]), (Kernel::Generic, &of_any)] {
        let mut engine = engine(backend(), [kernel, Kernel::Empty], &by_16);
        for (n, case) in cases.iter().enumerate() {
            replay(&mut *engine, case).unwrap_or_else(|failure| panic!("{kernel:?} {n}: {failure}"));
            let mut finding = |spec: &Spec, tensors: Tensors<'_>| {
                let mut place = [0; 2];
                let dropout = tensors.dropout.map(|seed| in_memory(seed, &mut place));
                engine(spec, Tensors { dropout, ..tensors })
            };
            replay(&mut finding, case).unwrap_or_else(|failure| panic!("{kernel:?} {n} of memory: {failure}"));
        }
    }
}
