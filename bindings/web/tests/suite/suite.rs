//! The conformance suite as a WebAssembly module: the page or program that loads it computes, by the package's public functions.
//!
//! ```text
//! suite_run ─► conformance ─► engine: tensors as text and addresses ─► attend, the host's ─► package ─► out, lse back in this memory
//! ```
//! `attend` may wait for a GPU: the host wraps it so that this module waits too.

use rapt_core::{DType, Error, Extent, Shape, Spec, Strides, TensorLayout, Tensors, View};
use rapt_testkit::{Case, Config, Engine, Failure, conformance, replay, scatter};
use serde_json::{Value, json};

unsafe extern "C" {
    /// Computes the request whose text lies there: 0, or 1 where the package does not serve it. Of anything else the host makes a trap.
    fn attend(address: usize, len: usize) -> u32;
}

/// A tensor with the memory around it, whose first byte is at `address`.
fn tensor(extent: Extent, first: usize, dtype: DType, shape: &Shape, strides: &Strides) -> Value {
    let Extent::Proven { address, len_bytes } = extent else { panic!("the testkit's tensors have an extent") };
    // A tensor without elements may point anywhere.
    let offset = if shape.contains(&0) { 0 } else { (first - address) / dtype.size_bytes() };
    json!({ "dtype": dtype.name(), "shape": &**shape, "strides": &**strides, "offset": offset, "address": address, "len": len_bytes })
}

fn of_view(view: &View<'_>) -> Value {
    tensor(view.extent(), view.address(), view.dtype(), view.shape(), view.strides())
}

/// The package as an engine; with `device` as its harness calls it.
fn engine(device: &'static str) -> impl FnMut(&Spec, Tensors<'_>) -> Result<(), Error> {
    move |spec, mut tensors| {
        let lse_dtype = tensors.lse.as_ref().map(|lse| (lse.dtype(), lse.shape().numel().expect("a test's size")));
        let mut lse = vec![0u8; lse_dtype.map_or(0, |(dtype, n)| n * dtype.size_bytes())];
        let out = tensors.out.as_view();
        let optional = |view: &Option<View<'_>>| view.as_ref().map(of_view);
        let request = json!({
            "device": device,
            "q": of_view(&tensors.q), "k": of_view(&tensors.k), "v": of_view(&tensors.v),
            "mask": optional(&tensors.mask), "sinks": optional(&tensors.sinks),
            "alibi_slopes": optional(&tensors.alibi_slopes), "out": of_view(&out),
            "lse_into": lse_dtype.map(|_| lse.as_mut_ptr() as usize), "lse_bytes": lse.len(),
            "options": {
                "scale": spec.softmax_scale.get(), "softcap": spec.softcap.map(rapt_core::Finite::get),
                "causal": spec.causal.map(rapt_core::Causal::name), "window": [spec.window.left, spec.window.right],
                "layout": if spec.layout == TensorLayout::Bshd { "bshd" } else { "bhsd" },
                "out_dtype": spec.out.dtype.name(), "return_lse": lse_dtype.is_some(),
            },
        });
        let text = request.to_string();
        // SAFETY: the text and the memory that it names are there while the host computes.
        if unsafe { attend(text.as_ptr() as usize, text.len()) } == 1 {
            return Err(Error::unsupported("this request", "the package says so", "see its error"));
        }
        if let (Some(view), Some((dtype, _))) = (&mut tensors.lse, lse_dtype) {
            let values: Vec<f64> =
                lse.chunks_exact(dtype.size_bytes()).map(|bytes| rapt_testkit::decode(dtype, bytes)).collect();
            scatter(view, &values);
        }
        Ok(())
    }
}

/// Few queries of every option, on keys that end in the middle of a block, of a split, and of neither.
fn few_queries(engine: &mut Engine<'_>, dtypes: &[DType]) -> Result<(), Failure> {
    for (seed, kv_len) in (0..).zip([1, 63, 64, 65, 255, 256, 257, 300, 511, 512, 513, 600]) {
        let case = Case::random(seed, dtypes, 100_000);
        let [batch, _, _, head_dim] = case.q;
        let (heads, q_len) = ([1, 2, 3, 4, 8, 16][seed as usize % 6], 1 + seed as usize % 2);
        let (heads, q_len) = if case.rank == 2 { (1, 5) } else { (heads, q_len.min(16 / heads)) };
        replay(engine, &Case { q: [batch, heads, q_len, head_dim], num_kv_heads: 1, kv_len, ..case })?;
    }
    Ok(())
}

const DEVICES: [&str; 3] = ["wasm", "webgpu", "buffers"];

/// Puts the package through the suite: on device `device` of `DEVICES`, with so many random problems, of dtypes by their bit (float32, float16,
/// bfloat16, float64); with the exploits and the stride zoo, and with few queries on keys of many lengths, if these bits of `fixed` are set. Answers where a text lies: what was run, or what failed.
#[unsafe(no_mangle)]
pub extern "C" fn suite_run(device: usize, seed: u32, problems: usize, dtypes: u32, fixed: u32) -> u64 {
    let all = [DType::F32, DType::F16, DType::BF16, DType::F64];
    let dtypes: Vec<DType> =
        all.into_iter().enumerate().filter(|(at, _)| dtypes >> at & 1 == 1).map(|(_, d)| d).collect();
    let seed = u64::from(seed);
    let config = Config {
        seed,
        problems,
        max_work: 300_000,
        dtypes: dtypes.clone(),
        fixed: fixed & 1 != 0,
        ..Config::default()
    };
    let mut engine = engine(DEVICES[device]);
    let ran = conformance(&mut [Box::new(&mut engine)], &config);
    let ran = ran.and_then(|tally| match fixed & 2 {
        0 => Ok(tally),
        _ => few_queries(&mut engine, &dtypes).map(|()| tally),
    });
    let text = match ran {
        Ok(tally) => format!("conforms: {tally}"),
        Err(failure) => format!("FAILED: {failure}"),
    };
    let text = text.into_bytes().leak();
    (text.as_ptr() as u64) << 32 | text.len() as u64
}
