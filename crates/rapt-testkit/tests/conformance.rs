//! The suite judged: honest engines pass it, and each broken one is caught.

use rapt_core::{COMPUTED, Causal, DType, Device, Dims, Error, Extent, Operands, Spec, Tensors, View, ViewMut};
use rapt_reference::{Outputs, Problem, naive, online};
use rapt_testkit::{
    Case, Class, Config, Engine, Failure, Gathered, LogitRounding, Tally, conformance, emulations, entry, figures,
    reference, replay, round, scatter, store,
};

type Ran = Result<(), Error>;

/// The reference as an engine, with what it reads changed by `spoil`.
fn spoiled(spec: &Spec, mut tensors: Tensors<'_>, spoil: impl Fn(&mut Gathered)) -> Ran {
    let mut gathered = Gathered::new(spec, &tensors);
    spoil(&mut gathered);
    let outputs = online(&gathered.problem, &gathered.inputs(), 16);
    store(spec, &mut tensors, &outputs);
    Ok(())
}

fn config() -> Config {
    Config { problems: 150, max_work: 60_000, ..Config::default() }
}

/// Runs the suite on a broken engine and says what it found.
#[track_caller]
fn caught(mut engine: impl FnMut(&Spec, Tensors<'_>) -> Ran, expect: &str) -> Failure {
    let failure = conformance(&mut [Box::new(&mut engine)], &config()).expect_err("a broken engine is caught");
    let text = failure.to_string();
    assert!(text.contains(expect) && text.contains("case: Case {"), "expected {expect:?} in: {text}");
    // The case alone reproduces it.
    if failure.stage != "known answer" {
        assert!(replay(&mut engine, &failure.case).is_err(), "not reproduced: {text}");
    }
    failure
}

#[test]
fn of_several_engines_the_broken_one_is_named() {
    let honest = |spec: &Spec, tensors: Tensors<'_>| spoiled(spec, tensors, |_| {});
    let broken = |spec: &Spec, mut tensors: Tensors<'_>| {
        let mut outputs = reference(spec, &tensors);
        outputs.out.iter_mut().for_each(|out| *out += 1.0);
        store(spec, &mut tensors, &outputs);
        Ok(())
    };
    // It computes nothing: what the engine before it wrote is not its own.
    let idle = |_: &Spec, _: Tensors<'_>| Ok(());
    for (second, expect) in [(Box::new(broken) as Box<Engine<'_>>, "out: "), (Box::new(idle), "never written")] {
        let failure = conformance(&mut [Box::new(honest), second], &config()).expect_err("a broken engine is caught");
        assert_eq!(failure.engine, 1);
        assert!(failure.what.starts_with(expect) || failure.what.contains(expect), "{failure}");
    }
}

/// Writes an output through its canonical sizes and strides, as a backend does.
fn write<const N: usize>(ptr: *mut u8, dtype: DType, shape: [usize; N], strides: [isize; N], values: &[f64]) {
    let (shape, strides) = (Dims::new(&shape).unwrap(), Dims::new(&strides).unwrap());
    // SAFETY: Operands proved that these sizes and strides are those of the output behind `ptr`.
    let view = unsafe { ViewMut::from_raw_parts("out", ptr, dtype, shape, strides, Device::Cpu, Extent::Declared) };
    scatter(&mut view.unwrap(), values);
}

#[test]
fn the_reference_conforms_and_its_operands_are_accepted() {
    let mut engine = |spec: &Spec, tensors: Tensors<'_>| {
        let mut operands = Operands::check(tensors, spec)?;
        let gathered = Gathered::new(spec, operands.tensors());
        let outputs = online(&gathered.problem, &gathered.inputs(), 16);
        write(operands.out_ptr(), spec.out.dtype, spec.out.shape, spec.out.strides, &outputs.out);
        if let (Some(ptr), Some(lse)) = (operands.lse_ptr(), spec.lse) {
            write(ptr, lse.dtype, lse.shape, lse.strides, &outputs.lse);
        }
        Ok(())
    };
    let tally = conformance(&mut [Box::new(&mut engine)], &Config { problems: 400, ..config() })
        .unwrap_or_else(|e| panic!("{e}"));
    println!("{tally}");
    let kinds = [
        "exploits",
        "zoo",
        "random",
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "mask bool",
        "mask additive",
        "causal",
        "window",
        "softcap",
        "sinks",
        "alibi",
        "gqa",
        "decode",
        "empty",
        "head_dim_v",
        "poison",
        "guard page",
        "extreme data",
    ];
    for kind in kinds {
        assert!(tally.count(kind) >= 10, "{kind}: {tally}");
    }
    assert_eq!(tally.count("unsupported"), 0);
}

/// An engine as a kernel would be: f32 throughout, an online softmax in base e over 12 keys, 4 partial sums. What `rounded` makes of
/// a sum of products is its score.
fn f32_engine(spec: &Spec, mut tensors: Tensors<'_>, rounded: impl Fn(f32) -> f32) -> Ran {
    if spec.numerics.storage == DType::F64 {
        return Err(Error::Unsupported { what: "float64".into(), why: "a test".into(), instead: "nothing".into() });
    }
    let gathered = Gathered::new(spec, &tensors);
    let problem = gathered.problem;
    let mut outputs = Outputs { out: Vec::new(), lse: Vec::new() };
    for row in 0..problem.batch * problem.num_q_heads * problem.q_len {
        let (h, i) = (gathered.head(row), row % problem.q_len);
        let attended = gathered.attended(row);
        let mut acc_o = vec![0f32; problem.head_dim_v];
        let (mut row_max, mut row_sum) = (f32::NEG_INFINITY, 0f32);
        if let (Some(sinks), false) = (&gathered.sinks, attended.is_empty()) {
            (row_max, row_sum) = (sinks[h] as f32, 1.0);
        }
        for block in attended.chunks(12) {
            let score = |&j: &usize| {
                let q = &gathered.q[row * problem.head_dim..][..problem.head_dim];
                let k = &gathered.k[gathered.kv_row(row, j) * problem.head_dim..][..problem.head_dim];
                let mut lanes = [0f32; 4];
                q.iter().zip(k).enumerate().for_each(|(n, (q, k))| lanes[n % 4] += *q as f32 * *k as f32);
                let sum = rounded((lanes[0] + lanes[1]) + (lanes[2] + lanes[3]));
                let mut s = sum * problem.softmax_scale as f32;
                s = problem.softcap.map_or(s, |c| c as f32 * (s / c as f32).tanh());
                s += gathered.bias.as_ref().map_or(0.0, |bias| bias[row * problem.kv_len + j] as f32);
                let distance = (i as i128 + problem.diagonal() - j as i128).unsigned_abs() as f32;
                s - gathered.alibi_slopes.as_ref().map_or(0.0, |slopes| slopes[h] as f32 * distance)
            };
            let scores: Vec<f32> = block.iter().map(score).collect();
            let block_max = scores.iter().copied().fold(row_max, f32::max);
            let rescale = (row_max - block_max).exp();
            row_sum *= rescale;
            acc_o.iter_mut().for_each(|acc| *acc *= rescale);
            for (j, s) in block.iter().zip(scores) {
                let p = (s - block_max).exp();
                row_sum += p;
                let v = &gathered.v[gathered.kv_row(row, *j) * problem.head_dim_v..];
                acc_o.iter_mut().zip(v).for_each(|(acc, v)| *acc += p * *v as f32);
            }
            row_max = block_max;
        }
        let open = !attended.is_empty();
        outputs.out.extend(acc_o.into_iter().map(|acc| f64::from(if open { acc / row_sum } else { 0.0 })));
        outputs.lse.push(f64::from(if open { row_max + row_sum.ln() } else { f32::NEG_INFINITY }));
    }
    store(spec, &mut tensors, &outputs);
    Ok(())
}

#[test]
fn an_honest_f32_kernel_conforms() {
    let config = Config { problems: 1500, seed: 11, ..config() };
    let mut engine = |spec: &Spec, tensors: Tensors<'_>| f32_engine(spec, tensors, |sum| sum);
    let tally = conformance(&mut [Box::new(&mut engine)], &config).unwrap_or_else(|e| panic!("{e}"));
    assert!(tally.count("unsupported") > 100 && tally.count("float32") > 500, "{tally}");
}

/// A handful of rows, each within 4 times torch's worst: together they are not.
#[test]
fn scores_of_a_few_bits_less_are_caught_in_a_few_rows() {
    let mut broken = |spec: &Spec, tensors: Tensors<'_>| {
        let few = (5..16).contains(&(spec.batch() * spec.num_q_heads() * spec.q_len()));
        let bits = if few { 3 } else { 0 };
        f32_engine(spec, tensors, |sum| f32::from_bits((sum.to_bits() + (1 << bits >> 1)) & !((1 << bits) - 1)))
    };
    let config = Config { problems: 1000, dtypes: vec![DType::F32], fixed: false, ..config() };
    let failure = conformance(&mut [Box::new(&mut broken)], &config).expect_err("a broken engine is caught");
    assert!(failure.what.starts_with("out: relative L2 error"), "{failure}");
}

#[test]
fn an_ignored_mask_is_caught() {
    caught(|spec, tensors| spoiled(spec, tensors, |g| (g.bools, g.bias) = (None, None)), "");
}

#[test]
fn an_inverted_mask_is_caught() {
    let invert = |g: &mut Gathered| g.bools.iter_mut().flatten().for_each(|bit| *bit = !*bit);
    caught(move |spec, tensors| spoiled(spec, tensors, invert), "row");
}

#[test]
fn a_dropped_tail_is_caught() {
    let drop_tail = |g: &mut Gathered| {
        let (kv_len, keep) = (g.problem.kv_len, g.problem.kv_len / 16 * 16);
        let rows = g.problem.batch * g.problem.num_q_heads * g.problem.q_len;
        if keep > 0 && g.bias.is_none() {
            let bools = g.bools.get_or_insert_with(|| vec![true; rows * kv_len]);
            bools.chunks_mut(kv_len).for_each(|row| row[keep..].fill(false));
        }
    };
    caught(move |spec, tensors| spoiled(spec, tensors, drop_tail), "out: ");
}

/// `view` read as if it were row-major from its first reachable byte, never past its last one.
fn contiguous_offsets(view: &View<'_>) -> Vec<f64> {
    let (lo, hi) = view.reach_bytes();
    let (size, len) = (view.dtype().size_bytes(), (hi - lo) as usize);
    let numel = view.shape().numel().unwrap();
    let element = |n: usize| {
        // SAFETY: the offset lies in lo..hi, which is inside the view's extent by its invariant; a TensorBuf fills all.
        let bytes = unsafe { std::slice::from_raw_parts(view.as_ptr().offset(lo + (n * size % len) as isize), size) };
        rapt_testkit::decode(view.dtype(), bytes)
    };
    (0..numel).map(element).collect()
}

#[test]
fn contiguous_offsets_on_strided_views_are_caught() {
    let engine = |spec: &Spec, tensors: Tensors<'_>| {
        let k = contiguous_offsets(&tensors.k);
        let strided = spec.layout == rapt_core::TensorLayout::Bhsd && !k.is_empty();
        spoiled(spec, tensors, |g| {
            if strided {
                g.k.clone_from(&k);
            }
        })
    };
    let failure = caught(engine, "");
    let strided = failure.case.placements().k.name != "contiguous";
    assert!(strided || failure.what.contains("under other strides"), "{failure}");
}

#[test]
fn a_write_between_rows_is_caught() {
    let engine = |spec: &Spec, mut tensors: Tensors<'_>| {
        let outputs = reference(spec, &tensors);
        store(spec, &mut tensors, &outputs);
        let [.., q_len, head_dim_v] = spec.out.shape;
        if q_len > 1
            && spec.out.strides[3] == 1
            && spec.out.strides[2] > head_dim_v as isize
            && !spec.out.shape.contains(&0)
        {
            let past = head_dim_v * spec.out.dtype.size_bytes();
            // SAFETY: a row's padding lies between two elements of one buffer.
            unsafe { tensors.out.as_mut_ptr().add(past).write(0) };
        }
        Ok(())
    };
    let failure = conformance(&mut [Box::new(engine)], &config()).unwrap_err();
    let clobbered = failure.what.contains("padding between elements") || failure.what.starts_with("out: row");
    assert!(clobbered || failure.what.starts_with("out: relative"), "{failure}");
}

#[test]
fn a_write_outside_or_to_an_input_is_caught() {
    let outside = |spec: &Spec, mut tensors: Tensors<'_>| {
        let heap = !tensors.out.address().is_multiple_of(4096) && !tensors.out.shape().contains(&0);
        let (lo, _) = tensors.out.reach_bytes();
        let ptr = tensors.out.as_mut_ptr();
        let outputs = reference(spec, &tensors);
        store(spec, &mut tensors, &outputs);
        if heap {
            // SAFETY: not at the start of a page, so the byte before is a guard band or slack of the buffer.
            unsafe { ptr.offset(lo - 1).write(7) };
        }
        Ok(())
    };
    caught(outside, "out: byte -1 was written: outside the buffer");
    let input = |spec: &Spec, mut tensors: Tensors<'_>| {
        let outputs = reference(spec, &tensors);
        store(spec, &mut tensors, &outputs);
        if !tensors.k.shape().contains(&0) {
            // SAFETY: the first byte of an element; the test's memory is writable whatever the view promises.
            unsafe { tensors.k.as_ptr().cast_mut().write(7) };
        }
        Ok(())
    };
    caught(input, "k: byte");
}

#[test]
fn poison_that_leaks_through_a_mask_is_caught() {
    let leak = |spec: &Spec, mut tensors: Tensors<'_>| {
        let g = Gathered::new(spec, &tensors);
        let mut outputs = naive(&g.problem, &g.inputs());
        // p = 0 times a masked value, as a kernel that multiplies first and masks later.
        let per_head = g.problem.kv_len * g.problem.head_dim_v;
        if per_head > 0 && g.v.iter().take(per_head).any(|v| v.is_nan()) {
            outputs.out.iter_mut().take(g.problem.head_dim_v).for_each(|out| *out = f64::NAN);
        }
        store(spec, &mut tensors, &outputs);
        Ok(())
    };
    assert!(caught(leak, "the reference says").case.poison);
}

#[test]
fn a_wrong_corner_a_forgotten_sink_and_p_from_lse_are_caught() {
    let corner = |g: &mut Gathered| {
        if g.problem.causal == Some(Causal::BottomRight) {
            g.problem.causal = Some(Causal::TopLeft);
        }
    };
    caught(move |spec, tensors| spoiled(spec, tensors, corner), "");
    caught(|spec, tensors| spoiled(spec, tensors, |g| g.sinks = None), "");
    let from_lse = |spec: &Spec, mut tensors: Tensors<'_>| {
        let g = Gathered::new(spec, &tensors);
        let mut outputs = naive(&g.problem, &g.inputs());
        let rows = outputs.out.chunks_mut(g.problem.head_dim_v).zip(&outputs.lse);
        // At the lowest finite bias ln(row_sum) drowns in the max, and p = exp(s − lse) sums to kv_len.
        rows.filter(|(_, lse)| lse.is_finite() && **lse < -1e30)
            .for_each(|(row, _)| row.iter_mut().for_each(|out| *out *= g.problem.kv_len as f64));
        store(spec, &mut tensors, &outputs);
        Ok(())
    };
    caught(from_lse, "out: ");
}

#[test]
fn bits_that_depend_on_strides_are_caught() {
    let engine = |spec: &Spec, mut tensors: Tensors<'_>| {
        let g = Gathered::new(spec, &tensors);
        let mut outputs = naive(&g.problem, &g.inputs());
        if spec.numerics.storage == DType::F32 && spec.k.strides[3] != 1 {
            outputs.out.iter_mut().for_each(|out| *out = round(DType::F32, *out * (1.0 + 1e-7)));
        }
        store(spec, &mut tensors, &outputs);
        Ok(())
    };
    caught(engine, "other bits under other strides");
}

#[test]
fn the_emulations_err_as_torch_does() {
    for (dtype, class) in COMPUTED.iter().flat_map(|dtype| [(*dtype, Class::Plain), (*dtype, Class::Large)]) {
        for (head_dim, kv_len) in [(16, 128), (64, 16), (64, 128), (128, 128)] {
            let wide = if class == Class::Large { 8.0 } else { 1.0 };
            let softmax_scale = wide / (head_dim as f64).sqrt();
            let problem = Problem { softmax_scale, ..Problem::plain(1, 4, 64, kv_len, head_dim) };
            let values = Case::plain(dtype, [1, 4, 64, head_dim], kv_len).values();
            let (q, k, v) = (values.q, values.k, values.v);
            let gathered = Gathered { problem, q, k, v, bools: None, bias: None, sinks: None, alibi_slopes: None };
            let reference = naive(&gathered.problem, &gathered.inputs());
            let torch = entry(dtype, class, head_dim, kv_len).torch.relative;
            let expected = LogitRounding::of(&gathered, &reference, dtype).out.relative;
            let worst = emulations(&gathered, dtype, dtype)
                .iter()
                .map(|emulation| figures(emulation, &reference.out, head_dim).relative)
                .fold(0.0, f64::max);
            assert!(expected < 1.3 * worst, "{dtype} {class:?}: expected {expected:e}, torch {torch:e}");
            println!("{dtype} {class:?} D {head_dim} S {kv_len}: {:.2} of torch's", worst / torch);
            assert!(
                (0.5..1.6).contains(&(worst / torch)),
                "{dtype} {class:?} D {head_dim}: {worst:e}, torch {torch:e}"
            );
        }
    }
}

#[test]
fn counts_are_printed() {
    assert_eq!(Tally::default().to_string(), "");
}
