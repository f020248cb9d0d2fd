//! Same inputs, same bits: for any number of threads, any batch neighbours, and many callers at once.

use rapt::{Causal, Engine, Options, Tensors, View, ViewMut};

/// A problem in f32: `[batch, heads, q_len, kv_len, head_dim]`, and query heads per kv head.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    kv_heads: usize,
    group: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
}

/// Values in (−2, 2) that depend on the seed and the position alone.
fn values(seed: u64, n: usize) -> Vec<f32> {
    let mix = |at: u64| {
        let x = (at ^ seed.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (x ^ (x >> 29)).wrapping_mul(0x94D0_49BB_1331_11EB)
    };
    (0..n as u64).map(|at| (mix(at + 1) >> 40) as f32 / (1 << 22) as f32 - 2.0).collect()
}

fn attend(engine: &Engine, sizes: Sizes, causal: Option<Causal>, q: &[f32], k: &[f32], v: &[f32]) -> Vec<u32> {
    let Sizes { batch, kv_heads, group, q_len, kv_len, head_dim } = sizes;
    let q_shape = [batch, kv_heads * group, q_len, head_dim].into();
    let kv_shape = [batch, kv_heads, kv_len, head_dim].into();
    let mut out = vec![f32::NAN; q.len()];
    let tensors = Tensors::new(
        View::contiguous("q", q, q_shape).unwrap(),
        View::contiguous("k", k, kv_shape).unwrap(),
        View::contiguous("v", v, kv_shape).unwrap(),
        ViewMut::contiguous("out", &mut out, q_shape).unwrap(),
    );
    engine.attention_into(tensors, &Options { causal, ..Options::default() }).unwrap();
    assert!(out.iter().all(|x| x.is_finite()), "every element is written");
    out.into_iter().map(f32::to_bits).collect()
}

const PROBLEMS: [Sizes; 4] = [
    Sizes { batch: 2, kv_heads: 3, group: 1, q_len: 301, kv_len: 517, head_dim: 64 },
    Sizes { batch: 2, kv_heads: 2, group: 4, q_len: 19, kv_len: 1100, head_dim: 80 },
    Sizes { batch: 3, kv_heads: 2, group: 4, q_len: 1, kv_len: 5000, head_dim: 128 },
    Sizes { batch: 2, kv_heads: 2, group: 1, q_len: 5, kv_len: 3000, head_dim: 72 },
];

#[test]
fn threads_and_neighbours_do_not_change_a_bit() {
    for sizes in PROBLEMS {
        let Sizes { batch, kv_heads, group, q_len, kv_len, head_dim } = sizes;
        let q = values(1, batch * kv_heads * group * q_len * head_dim);
        let (k, v) = (values(2, batch * kv_heads * kv_len * head_dim), values(3, batch * kv_heads * kv_len * head_dim));
        for causal in [None, Some(Causal::BottomRight)] {
            let whole = attend(&Engine::new(Some(1)).unwrap(), sizes, causal, &q, &k, &v);
            for threads in [2, 3, 7] {
                let engine = Engine::new(Some(threads)).unwrap();
                assert!(attend(&engine, sizes, causal, &q, &k, &v) == whole, "{threads} threads");
                let alone = Sizes { batch: 1, ..sizes };
                let (q_part, kv_part) = (q.len() / batch, k.len() / batch);
                for b in 0..batch {
                    let (q_range, kv_range) = (b * q_part..(b + 1) * q_part, b * kv_part..(b + 1) * kv_part);
                    let got = attend(&engine, alone, causal, &q[q_range.clone()], &k[kv_range.clone()], &v[kv_range]);
                    assert!(got == whole[q_range], "batch {b} alone, {threads} threads");
                }
            }
        }
    }
}

#[test]
fn sixteen_callers_at_once_get_the_bits_of_one() {
    let engine = Engine::new(Some(2)).unwrap();
    let sizes = PROBLEMS[0];
    let q = values(1, sizes.batch * sizes.kv_heads * sizes.group * sizes.q_len * sizes.head_dim);
    let kv = sizes.batch * sizes.kv_heads * sizes.kv_len * sizes.head_dim;
    let (k, v) = (values(2, kv), values(3, kv));
    let expected = attend(&engine, sizes, None, &q, &k, &v);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                for _ in 0..3 {
                    assert!(attend(&engine, sizes, None, &q, &k, &v) == expected);
                }
            });
        }
    });
}
