//! Offsets and indices past 2³¹ and 2³² elements: in address space that no memory lies behind, and through strides of 0.
#![cfg(unix)]

use rapt_core::{
    Arch, COMPUTED, Caps, Causal, DType, Operands, Options, SerialExecutor, Spec, Strides, Tensors, View, Window,
    Workspace,
};
use rapt_testkit::{Case, MaskCase, Sparse, check, check_lse, reference};

/// Elements apart: below and above the limits of 32-bit arithmetic, signed and not, of elements and of bytes.
const FAR: [isize; 5] = [(1 << 29) + 3, (1 << 31) - 3, (1 << 31) + 5, (1 << 32) + 9, -((1 << 32) + 9)];

fn run(arch: Arch, tensors: Tensors<'_>, options: &Options) {
    let Tensors {
        page_table: _,
        lengths: _,
        offsets: _,
        dropout: _,
        q,
        k,
        v,
        codes: _,
        mask,
        sinks,
        alibi_slopes,
        out,
        lse,
    } = &tensors;
    let mut builder = Spec::builder(q, k, v, options);
    builder.mask(mask.as_ref()).sinks(sinks.as_ref()).alibi_slopes(alibi_slopes.as_ref()).out(out);
    if let Some(lse) = lse {
        builder.lse(lse);
    }
    let spec = builder.build().unwrap();
    let plan = rapt_cpu::select(&spec, &Caps { arch, threads: 1, clock_hz: None }).unwrap();
    let mut workspace = Workspace::new();
    workspace.ensure(plan.workspace_bytes()).unwrap();
    let mut operands = Operands::check(tensors, &spec).unwrap();
    plan.certificate(&operands).unwrap();
    rapt_cpu::run(&plan, &mut operands, &mut workspace, &SerialExecutor).unwrap();
}

fn row_major(shape: [usize; 4]) -> [isize; 4] {
    let [_, b, c, d] = shape.map(|n| n as isize);
    [b * c * d, c * d, d, 1]
}

/// The bits of out and lse with dimension `dim` of tensor `which` as far apart as `far`.
fn bits(arch: Arch, case: &Case, far: Option<(usize, usize, isize)>) -> Vec<u64> {
    let strides = |which: usize, shape: [usize; 4]| {
        let mut strides = row_major(shape);
        if let Some((_, dim, far)) = far.filter(|(of, ..)| *of == which) {
            strides[dim] = far;
        }
        strides
    };
    let values = case.values();
    let mask = case.mask.expect("a mask");
    let q = Sparse::filled(case.dtype, case.q, strides(0, case.q), &values.q);
    let k = Sparse::filled(case.dtype, case.k(), strides(1, case.k()), &values.k);
    let v = Sparse::filled(case.dtype, case.v(), strides(2, case.v()), &values.v);
    let mask_shape = case.mask_shape(&mask);
    let mask = Sparse::filled(mask.dtype, mask_shape, strides(3, mask_shape), &values.mask.expect("a mask"));
    let mut out = Sparse::new(case.dtype, case.out(), strides(4, case.out()));
    let lse_shape = [1, case.q[0], case.q[1], case.q[2]];
    let mut lse = Sparse::new(case.dtype.accumulation(), lse_shape, strides(5, lse_shape));
    let tensors = Tensors {
        mask: Some(mask.view("mask")),
        lse: Some(lse.view_mut("lse", 1)),
        ..Tensors::new(q.view("q"), k.view("k"), v.view("v"), out.view_mut("out", 0))
    };
    run(arch, tensors, &case.options());
    out.values().into_iter().chain(lse.values()).map(f64::to_bits).collect()
}

#[test]
fn every_dimension_of_every_tensor_may_be_far_apart() {
    let mut problems = 0;
    for (&arch, dtype) in rapt_cpu::available().iter().flat_map(|arch| COMPUTED.map(|dtype| (arch, dtype))) {
        // Ten queries per key head, and four: forward and decode.
        for (q_len, mask_dtype) in [(5, DType::Bool), (2, dtype)] {
            let mask = Some(MaskCase { dtype: mask_dtype, full: [true; 4], rank: 4, lowest: true });
            let case = Case { num_kv_heads: 2, head_dim_v: 4, mask, ..Case::plain(dtype, [2, 4, q_len, 5], 9) };
            let near = bits(arch, &case, None);
            assert!(near.iter().any(|bits| f64::from_bits(*bits) != 0.0));
            for (which, dim) in (0..6).flat_map(|which| (0..4).map(move |dim| (which, dim))) {
                for far in FAR {
                    let got = bits(arch, &case, Some((which, dim, far)));
                    assert!(got == near, "tensor {which}, dimension {dim}, {far} apart, {dtype} on {}", arch.name());
                    problems += 1;
                }
            }
        }
    }
    assert_eq!(problems, rapt_cpu::available().len() * 4 * 2 * 6 * 4 * FAR.len());
}

/// The last `n` keys of a k, v or mask whose `dim` counts keys.
fn last<'a>(view: &View<'a>, dim: usize, n: usize) -> View<'a> {
    let (mut shape, mut first) = (*view.shape(), 0isize);
    let mut sizes = [0; 4];
    sizes.copy_from_slice(&shape);
    if sizes[dim] > n {
        first = (sizes[dim] - n) as isize * view.strides()[dim] * view.dtype().size_bytes() as isize;
        sizes[dim] = n;
    }
    shape = sizes.into();
    let ptr = view.as_ptr().wrapping_offset(first);
    // SAFETY: elements of `view`, for as long as it.
    unsafe { View::from_raw_parts("tail", ptr, view.dtype(), shape, *view.strides(), view.device(), view.extent()) }
        .expect("a part of a view")
}

/// Attention over a long K that a window limits to its end, against the reference of the end alone.
fn tail_by_the_definition(
    arch: Arch,
    q: &View<'_>,
    k: &View<'_>,
    v: &View<'_>,
    mask: Option<View<'_>>,
    slopes: Option<View<'_>>,
) {
    const SEEN: usize = 200;
    let options = Options {
        causal: Some(Causal::BottomRight),
        window: Window { left: Some(SEEN), right: None },
        ..Options::default()
    };
    let dtype = q.dtype();
    let [batch, heads, q_len, head_dim] = [0, 1, 2, 3].map(|d| q.shape()[d]);
    let dim_v = v.shape()[3];
    let seen = SEEN + q_len + 5;
    let (k_end, v_end, mask_end) = (last(k, 2, seen), last(v, 2, seen), mask.as_ref().map(|mask| last(mask, 3, seen)));
    let (out_shape, lse_shape) = ([batch, heads, q_len, dim_v], [1, batch, heads, q_len]);
    let new = || {
        let lse = Sparse::new(dtype.accumulation(), lse_shape, row_major(lse_shape));
        (Sparse::new(dtype, out_shape, row_major(out_shape)), lse)
    };
    let (mut out, mut lse) = new();
    let expected = {
        let (mut spare, mut spare_lse) = new();
        let spec = Spec::builder(q, &k_end, &v_end, &options)
            .mask(mask_end.as_ref())
            .alibi_slopes(slopes.as_ref())
            .return_lse(true)
            .build()
            .unwrap();
        let tensors = Tensors {
            mask: mask_end,
            alibi_slopes: slopes,
            lse: Some(spare_lse.view_mut("lse", 1)),
            ..Tensors::new(*q, k_end, v_end, spare.view_mut("out", 0))
        };
        reference(&spec, &tensors)
    };
    let tensors = Tensors {
        mask,
        alibi_slopes: slopes,
        lse: Some(lse.view_mut("lse", 1)),
        ..Tensors::new(*q, *k, *v, out.view_mut("out", 0))
    };
    run(arch, tensors, &options);
    let rows = batch * heads * q_len;
    check(&out.values(), &expected.out, rows, dim_v, dtype, head_dim, SEEN).unwrap_or_else(|e| panic!("{dtype}: {e}"));
    check_lse(&lse.values(), &expected.lse, dtype, None).unwrap_or_else(|e| panic!("{dtype}: {e}"));
}

#[test]
fn keys_past_two_to_the_33_in_place() {
    let kv_len = (1usize << 33) + 77;
    for &arch in rapt_cpu::available() {
        for dtype in COMPUTED {
            let case = Case { head_dim_v: 2, ..Case::plain(dtype, [1, 3, 9, 3], 300) };
            let values = case.values();
            let q = Sparse::filled(dtype, case.q, row_major(case.q), &values.q);
            // [1, kv_len, heads, dim] seen as [1, heads, kv_len, dim]: only the last 300 keys are anything but zero.
            let end = |dim: usize, values: &[f64]| {
                let strides = [0, dim as isize, 3 * dim as isize, 1];
                let mut tensor = Sparse::new(dtype, [1, 3, kv_len, dim], strides);
                for (n, &value) in values.iter().enumerate() {
                    let (h, j, d) = (n / dim / 300, n / dim % 300, n % dim);
                    tensor.put([0, h, kv_len - 300 + j, d], value);
                }
                tensor
            };
            let (k, v) = (end(3, &values.k), end(2, &values.v));
            let mut mask = Sparse::new(DType::Bool, [1, 1, 9, kv_len], [0, 0, kv_len as isize, 1]);
            for (i, j) in (0..9).flat_map(|i| (0..300).map(move |j| (i, j))).filter(|(i, j)| (3 * j + i) % 4 != 0) {
                mask.put([0, 0, i, kv_len - 300 + j], 1.0);
            }
            tail_by_the_definition(arch, &q.view("q"), &k.view("k"), &v.view("v"), Some(mask.view("mask")), None);
        }
    }
}

#[test]
fn keys_past_two_to_the_33_expanded() {
    let kv_len = (1usize << 33) + 77;
    for &arch in rapt_cpu::available() {
        let slopes = [0.25f32, 0.5, 0.125];
        let (k, v, q) = ([0.5f32, -1.0, 2.0], [0.75f32, -3.0], Case::plain(DType::F32, [1, 3, 9, 3], 1).values().q);
        let q = Sparse::filled(DType::F32, [1, 3, 9, 3], row_major([1, 3, 9, 3]), &q);
        let expand = |data: &'static str, values, dim: usize| {
            let strides: Strides = [0, 0, 0, 1].into();
            View::strided(data, values, 0, [1, 3, kv_len, dim].into(), strides).unwrap()
        };
        let slopes = View::contiguous("alibi_slopes", &slopes, [3].into()).unwrap();
        tail_by_the_definition(
            arch,
            &q.view("q"),
            &expand("k", &k[..], 3),
            &expand("v", &v[..], 2),
            None,
            Some(slopes),
        );
    }
}

#[test]
fn one_query_on_keys_past_two_to_the_32() {
    // Decode keeps a partial row per 512 keys, half a GiB here: the best instruction set alone.
    let (kv_len, arch) = ((1usize << 32) + 77, *rapt_cpu::available().last().expect("plain Rust at least"));
    let (q, k, v) = ([0.5f32, 1.0, -1.0], [0.5f32, -1.0, 2.0], [0.75f32, -3.0]);
    let q = View::contiguous("q", &q, [1, 1, 1, 3].into()).unwrap();
    let k = View::strided("k", &k, 0, [1, 1, kv_len, 3].into(), [0, 0, 0, 1].into()).unwrap();
    let v = View::strided("v", &v, 0, [1, 1, kv_len, 2].into(), [0, 0, 0, 1].into()).unwrap();
    tail_by_the_definition(arch, &q, &k, &v, None, None);
}
