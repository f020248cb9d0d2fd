//! Texts with one mistake each, as a translator, a kernel or a compiler may make it: every one must be found.

use rapt_core::{Causal, DType, Kernel, Window};
use rapt_shader::KernelVariant;
use rapt_testkit::{Case, Data, MaskCase, Places, replay};

use crate::engine::engine;
use crate::host::{self, Arithmetic};

/// A mistake: what stands in the text of `kernel`, and what stands there instead.
struct Mutant {
    what: &'static str,
    kernel: Kernel,
    from: &'static str,
    to: &'static str,
}

const fn mutant(what: &'static str, kernel: Kernel, from: &'static str, to: &'static str) -> Mutant {
    Mutant { what, kernel, from, to }
}

const MUTANTS: [Mutant; 38] = [
    mutant("rows past the last", Kernel::Generic, "exist = r < uint4(p.rows)", "exist = r <= uint4(p.rows)"),
    mutant(
        "keys past the last",
        Kernel::Generic,
        "j < min(first + 2u, p.kv_len); j++",
        "j < min(first + 2u, p.kv_len + 1u); j++",
    ),
    mutant(
        "a missing barrier",
        Kernel::Generic,
        "load_values(block, j0, tx, ty, step);\n                threadgroup_barrier(mem_flags::mem_threadgroup);",
        "load_values(block, j0, tx, ty, step);",
    ),
    mutant(
        "rows and columns exchanged",
        Kernel::Generic,
        "row * stride.z + column * stride.w",
        "row * stride.w + column * stride.z",
    ),
    mutant("the mask ignored", Kernel::Generic, "scores.attends[a] = !bias.hides;", "scores.attends[a] = true;"),
    mutant("causal by one key too many", Kernel::Generic, "int4(i) + p.hi_shift", "int4(i) + (p.hi_shift + 1)"),
    mutant("a window by one key too short", Kernel::Generic, "int4(i) + p.lo_shift", "int4(i) + (p.lo_shift + 1)"),
    mutant(
        "NaN told by x != x",
        Kernel::Generic,
        "return (bits & INFINITY_BITS) != INFINITY_BITS; }",
        "return !(as_type<float>(bits) != as_type<float>(bits)); }",
    ),
    mutant("the scale dropped", Kernel::Generic, "as_rounded(products * p.scale)", "as_rounded(products)"),
    mutant("lse to base 2", Kernel::Generic, "top + logarithm(total)", "top + logarithm(total) * LOG2_E"),
    mutant(
        "heads of a group interleaved",
        Kernel::Generic,
        "uint4(block.kv_head * p.group_size) + of_group",
        "uint4(block.kv_head) + of_group * p.kv_heads",
    ),
    mutant("the cap dropped", Kernel::Generic, "p.softcap * hyperbolic_tangent(", "hyperbolic_tangent("),
    mutant("slopes that add", Kernel::Generic, "fma(-finite(slope), distance", "fma(finite(slope), distance"),
    mutant(
        "sinks without a share",
        Kernel::Generic,
        "fma(row_sum[a], shares.x, shares.y)",
        "fma(row_sum[a], shares.x, 0.0f)",
    ),
    mutant("sums that are not rescaled", Kernel::Generic, "acc_1 *= factor;", ""),
    mutant("rows without keys", Kernel::Generic, "is_dead | is_empty);", "bool4(false));"),
    mutant("one row of workgroups", Kernel::Generic, "group.y * groups.x + group.x", "group.x"),
    mutant(
        "memory that nobody wrote",
        Kernel::Generic,
        "if (thread_index == 0u) { atomic_store_explicit(&not_finite, 0u, memory_order_relaxed); }",
        "",
    ),
    mutant("rows of tiles too long", Kernel::Forward, "uint PITCH_K = 17u;", "uint PITCH_K = 18u;"),
    mutant(
        "columns past the last",
        Kernel::Forward,
        "first_column + column >= p.head_dim_v",
        "first_column + column > p.head_dim_v",
    ),
    mutant(
        "maxima without a barrier",
        Kernel::Forward,
        "tile[tx * PITCH + ty + 1u * 8u] = top_1;\n                    threadgroup_barrier(mem_flags::mem_threadgroup);",
        "tile[tx * PITCH + ty + 1u * 8u] = top_1;",
    ),
    mutant("a maximum that follows and a sum that does not", Kernel::Forward, "row_sum_0 *= factor_0;", ""),
    mutant(
        "a barrier for some",
        Kernel::Forward,
        "live |= attends | (attends >> 8u)",
        "if (tx < 3u) { threadgroup_barrier(mem_flags::mem_threadgroup); }\n            live |= attends | (attends >> 8u)",
    ),
    mutant(
        "a matrix of columns taken by rows",
        Kernel::Matrices,
        "load_columns<simdgroup_half8x8>(&weights",
        "load_rows<simdgroup_half8x8>(&weights",
    ),
    mutant(
        "tiles of keys side by side",
        Kernel::Matrices,
        "tile[(first_n + 1u * TILE) * PITCH",
        "tile[(first_n + 0u * TILE) * PITCH",
    ),
    mutant(
        "matrices before all keys are there",
        Kernel::Matrices,
        "if (thread_index == 0u) { atomic_store_explicit(&grown, 0u, memory_order_relaxed); }\n                threadgroup_barrier(mem_flags::mem_threadgroup);",
        "if (thread_index == 0u) { atomic_store_explicit(&grown, 0u, memory_order_relaxed); }",
    ),
    mutant(
        "a product for some threads of a simdgroup",
        Kernel::Matrices,
        "s_0_0 = multiply_add(q_0_0_0, of_k_0, s_0_0);",
        "if (thread_index % 32u < 31u) { s_0_0 = multiply_add(q_0_0_0, of_k_0, s_0_0); }",
    ),
    mutant(
        "a maximum that grows and sums that do not",
        Kernel::Matrices,
        "s_tile[at * PITCH_S + four] *= factor;",
        "s_tile[at * PITCH_S + four] *= 1.0f;",
    ),
    mutant(
        "weights of the first reference",
        Kernel::Matrices,
        "sum = weigh(block, rows, n0, row_max, four, lane, has_kinds, is_simple).sum;",
        "",
    ),
    mutant("four elements where there are fewer", Kernel::Matrices, "n < min(count, 4u)", "n < 4u"),
    mutant("a first attempt that stands", Kernel::Matrices, "if (shows) {", "if (false) {"),
    mutant(
        "NaN in a tile",
        Kernel::Matrices,
        "tile[j * PITCH + c / 4u] = numbers(finite_four(words));",
        "tile[j * PITCH + c / 4u] = numbers(words);",
    ),
    mutant(
        "keys that come again",
        Kernel::Matrices,
        "key_load(k_at, n0 + BLOCK_N + k_row",
        "key_load(k_at, n0 + k_row",
    ),
    mutant(
        "a word where two elements lie",
        Kernel::Decode,
        "return uint2(uint(k[at]) | (uint(k[other]) << 16u), 0u);",
        "return uint2(*(const device uint*)(k + at), 0u);",
    ),
    mutant("values past the last", Kernel::Decode, "min(n0 + BLOCK_N, end_key);", "min(n0 + BLOCK_N, end_key + 1u);"),
    mutant("splits that overlap", Kernel::Decode, "index * p.split_keys)", "index * p.split_keys / 2u)"),
    mutant(
        "a sum that is 64 times as large",
        Kernel::Decode,
        "put_record(record, row_max, row_sum / ONE, flags);",
        "put_record(record, row_max, row_sum, flags);",
    ),
    mutant(
        "splits that weigh the same",
        Kernel::Decode,
        "as_type<float4>(of_own_1) * own_factor;",
        "as_type<float4>(of_own_1);",
    ),
];

/// Problems in which each of them shows: every option, rows of several heads, keys of several blocks, strides, poison.
fn cases(kernel: Kernel) -> Vec<Case> {
    let (q_len, kv_len) = if kernel == Kernel::Decode { (3, 300) } else { (37, 70) };
    let mask = |full| Some(MaskCase { dtype: DType::Bool, full, rank: 4, lowest: false });
    let plain = Case {
        num_kv_heads: 2,
        head_dim_v: 21,
        mask: mask([true, false, true, true]),
        places: Places { q: 2, k: 4, v: 5, mask: 1, vectors: 0, out: 3, lse: 2 },
        ..Case::plain(DType::F16, [2, 4, q_len, 19], kv_len)
    };
    let window = Window { left: Some(9), right: None };
    let cases = vec![
        Case { poison: true, sinks: Some(DType::F32), causal: Some(Causal::TopLeft), ..plain.clone() },
        Case { softcap: Some(2.0), alibi_slopes: Some(DType::F16), causal: Some(Causal::BottomRight), ..plain.clone() },
        Case { window, seed: 3, mask: mask([false, true, true, true]), ..plain.clone() },
    ];
    // Rows that are loaded by vectors, wherever they begin.
    let aligned = Case { q: [1, 4, q_len, 24], head_dim_v: 16, places: Places::default(), ..plain };
    match kernel {
        Kernel::Matrices => {
            let aligned = Case { mask: None, ..aligned };
            let poisoned = Case { poison: true, causal: Some(Causal::TopLeft), ..aligned.clone() };
            cases.into_iter().chain([aligned, poisoned]).collect()
        }
        // Of float16 on matrices, of bfloat16 without.
        Kernel::Decode => {
            let without = cases.clone().into_iter().map(|case| Case { dtype: DType::BF16, ..case });
            without.chain(cases).chain([Case { mask: None, ..aligned }]).collect()
        }
        // Maxima that follow in the second block of keys, of one text.
        Kernel::Forward => {
            let rising = Case { data: Data::Rising, mask: None, kv_len: 140, ..aligned };
            cases.into_iter().chain([rising]).collect()
        }
        _ => cases,
    }
}

/// What finds this mutant, if anything does.
fn found(mutant: &Mutant) -> Option<String> {
    let Mutant { what, kernel, from, to } = mutant;
    let changed = std::cell::Cell::new(0);
    let mut engine = engine(Some(*kernel), |variant: &KernelVariant| {
        let text = variant.msl();
        changed.set(changed.get() + text.matches(from).count());
        host::compile(&text.replace(from, to), variant, Arithmetic::Fast).map_err(|error| panic!("{what}: {error}"))
    });
    let found = cases(*kernel).iter().find_map(|case| replay(&mut engine, case).err());
    drop(engine);
    assert!(changed.get() > 0, "{what}: the text has no `{from}`");
    found.map(|failure| failure.what)
}

#[test]
fn every_mistake_is_found() {
    if !host::has_compiler() {
        return;
    }
    for kernel in [Kernel::Generic, Kernel::Forward, Kernel::Matrices, Kernel::Decode] {
        let mut engine = engine(Some(kernel), crate::compile);
        for case in cases(kernel) {
            replay(&mut engine, &case)
                .unwrap_or_else(|failure| panic!("{}, without a mistake: {failure}", kernel.name()));
        }
    }
    let missed: Vec<&str> = MUTANTS
        .iter()
        .filter(|mutant| match found(mutant) {
            Some(what) => {
                println!("{} ({}): {}", mutant.what, mutant.kernel.name(), what.lines().next().unwrap_or_default());
                false
            }
            None => true,
        })
        .map(|mutant| mutant.what)
        .collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
