//! What this machine and build are, and whether they compute the law.
//!
//! The self-test runs one small problem per dtype (grouped heads, more keys than queries, causal at the bottom right,
//! strided K) against the plain formula in f64. The variables are those of docs/environment.md.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use rapt::{Arch, Causal, DType, Element, Options, Shape, Strides, Tensor, Tensors, Threads, View};

use crate::engine::Home;
use crate::errors::{Failure, Telling, guard};
use crate::mend;

/// Every environment variable that rapt reads.
const VARIABLES: [&str; 5] = ["RAPT_NUM_THREADS", "RAPT_ISA", "RAPT_LOG", "RAPT_CACHE_DIR", "RAPT_NVRTC"];

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const Q_LEN: usize = 5;
const KV_LEN: usize = 7;
const HEAD_DIM: usize = 8;

/// Numbers of a fixed sequence in −1..1 whose values every dtype holds exactly (sixteenths).
fn sample(seed: usize, len: usize) -> Vec<f64> {
    (0..len).map(|n| (((n * 7 + seed * 13) * 37 % 33) as f64 - 16.0) / 16.0).collect()
}

fn formula(q: &[f64], k: &[f64], v: &[f64]) -> Vec<f64> {
    let mut out = Vec::with_capacity(HEADS * Q_LEN * HEAD_DIM);
    for head in 0..HEADS {
        let kv_head = head / (HEADS / KV_HEADS);
        for i in 0..Q_LEN {
            let row = &q[(head * Q_LEN + i) * HEAD_DIM..][..HEAD_DIM];
            let keys = 0..=(i + KV_LEN - Q_LEN);
            let at = |j: usize| (kv_head * KV_LEN + j) * HEAD_DIM;
            let p: Vec<f64> = keys
                .map(|j| {
                    let s: f64 = row.iter().zip(&k[at(j)..]).map(|(a, b)| a * b).sum();
                    (s / (HEAD_DIM as f64).sqrt()).exp()
                })
                .collect();
            let row_sum: f64 = p.iter().sum();
            out.extend(
                (0..HEAD_DIM).map(|d| p.iter().enumerate().map(|(j, p)| p * v[at(j) + d]).sum::<f64>() / row_sum),
            );
        }
    }
    out
}

/// The relative L2 error of one dtype's run.
fn run<T: Element>(home: &Home, py: Python<'_>, from: fn(f64) -> T, to: fn(T) -> f64) -> Result<f64, Failure> {
    let q = sample(1, HEADS * Q_LEN * HEAD_DIM);
    let (k, v) = (sample(2, KV_HEADS * KV_LEN * HEAD_DIM), sample(3, KV_HEADS * KV_LEN * HEAD_DIM));
    let expected = formula(&q, &k, &v);
    let typed = |x: &[f64]| x.iter().map(|&x| from(x)).collect::<Vec<T>>();
    // K lies transposed, as a permuted tensor does: [head, head_dim, key].
    let mut transposed = vec![from(0.0); k.len()];
    for (n, &x) in k.iter().enumerate() {
        let (head, j, d) = (n / (KV_LEN * HEAD_DIM), n / HEAD_DIM % KV_LEN, n % HEAD_DIM);
        transposed[(head * HEAD_DIM + d) * KV_LEN + j] = from(x);
    }
    let (q, v) = (typed(&q), typed(&v));
    let q = View::contiguous("q", &q, [HEADS, Q_LEN, HEAD_DIM].into())?;
    let strides = Strides::from([(HEAD_DIM * KV_LEN) as isize, 1, KV_LEN as isize]);
    let k = View::strided("k", &transposed, 0, [KV_HEADS, KV_LEN, HEAD_DIM].into(), strides)?;
    let v = View::contiguous("v", &v, [KV_HEADS, KV_LEN, HEAD_DIM].into())?;
    let options = Options::default().with_causal(Causal::BottomRight);
    let mut out = Tensor::zeros(T::DTYPE, Shape::from([HEADS, Q_LEN, HEAD_DIM]))?;
    let spec = rapt::Spec::builder(&q, &k, &v, &options).build()?;
    let tensors = Tensors { q, k, v, mask: None, sinks: None, alibi_slopes: None, out: out.view_mut()?, lse: None };
    home.plan(py, crate::convert::Kind::Numpy, &spec)?.run(py, tensors)?;
    let got: Vec<f64> = out.to_vec::<T>()?.into_iter().map(to).collect();
    let square = |x: f64| x * x;
    let off: f64 = got.iter().zip(&expected).map(|(a, b)| square(a - b)).sum();
    let whole: f64 = expected.iter().map(|&x| square(x)).sum();
    Ok((off / whole).sqrt())
}

fn self_test<'py>(py: Python<'py>, home: &Home) -> Result<Bound<'py, PyList>, Failure> {
    let list = PyList::empty(py);
    // Two roundings of the result's own precision; sums of this size add less than one.
    let cases: [(DType, f64, Result<f64, Failure>); 4] = [
        (DType::F64, 1e-14, run::<f64>(home, py, |x| x, |x| x)),
        (DType::F32, 1e-6, run::<f32>(home, py, |x| x as f32, f64::from)),
        (DType::F16, 1e-3, run::<half::f16>(home, py, half::f16::from_f64, f64::from)),
        (DType::BF16, 8e-3, run::<half::bf16>(home, py, half::bf16::from_f64, f64::from)),
    ];
    for (dtype, limit, error) in cases {
        let entry = PyDict::new(py);
        entry.set_item("dtype", dtype.name())?;
        entry.set_item("limit", limit)?;
        match error {
            Ok(error) => {
                entry.set_item("error", error)?;
                entry.set_item("passed", error <= limit)?;
            }
            Err(Failure::Rapt(error)) => {
                entry.set_item("error", error.to_string())?;
                entry.set_item("passed", false)?;
            }
            Err(other) => return Err(other),
        }
        list.append(entry)?;
    }
    Ok(list)
}

#[cfg(target_os = "linux")]
fn cpu_name() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

#[cfg(not(target_os = "linux"))]
fn cpu_name() -> Option<String> {
    None
}

fn available_isas() -> Vec<&'static str> {
    let mut isas = vec![Arch::Scalar.name()];
    #[cfg(target_arch = "x86_64")]
    {
        let has_avx2 =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        let has_avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if has_avx2 {
            isas.push(Arch::Avx2.name());
        }
        if has_avx2 && has_avx512 {
            isas.push(Arch::Avx512.name());
        }
    }
    if cfg!(target_arch = "aarch64") {
        isas.push(Arch::Neon.name());
    }
    isas
}

/// The facts that Rust knows; `rapt.doctor` adds Python's.
#[pyfunction]
pub(crate) fn doctor(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let telling = std::cell::Cell::new(Telling { names: &mend::ATTENTION, kind: crate::convert::Kind::Numpy });
    guard(py, &telling, || {
        let home = Home::Default;
        crate::engine::tell_folders(py)?;
        let facts = PyDict::new(py);
        facts.set_item("cpu", cpu_name().unwrap_or_else(|| std::env::consts::ARCH.to_owned()))?;
        facts.set_item("platform", format!("{}-{}", std::env::consts::OS, std::env::consts::ARCH))?;
        facts.set_item("isa", home.isa()?)?;
        facts.set_item("isa_available", available_isas())?;
        let threads = home.threads()?;
        facts.set_item("threads", threads.get())?;
        facts.set_item(
            "threads_from",
            match threads {
                Threads::Asked(_) => "Context(threads)",
                Threads::Environment(_) => "RAPT_NUM_THREADS",
                Threads::Available(_) => "available_parallelism",
            },
        )?;
        facts.set_item("cuda", py.detach(rapt::cuda::report))?;
        let variables = PyDict::new(py);
        for name in VARIABLES {
            variables.set_item(name, std::env::var(name).ok())?;
        }
        facts.set_item("environment", variables)?;
        facts.set_item("self_test", self_test(py, &home)?)?;
        Ok(facts)
    })
}
