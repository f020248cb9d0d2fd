//! What this machine and build are, and whether they compute what the reference does: the facts behind every binding's `doctor`.
//!
//! The self-test runs one problem per dtype and kernel: grouped heads, causal at the bottom right, a head_dim that fills
//! no vector, K transposed in memory, more keys than one block or chunk holds. It is held against the reference, on numbers that every dtype holds exactly.

use half::{bf16, f16};
use rapt_core::{Causal, DType, Element, Options, Result, Strides, Tensors, View};
use rapt_reference::{Inputs, Problem, naive};

use crate::{Engine, Tensor};

/// Every environment variable that Rapt reads: the first table of docs/reference/environment.md.
pub const VARIABLES: [&str; 5] = ["RAPT_NUM_THREADS", "RAPT_ISA", "RAPT_LOG", "RAPT_CACHE_DIR", "RAPT_NVRTC"];

const PREFIX: &str = "RAPT_";

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const KV_LEN: usize = 1100;
const HEAD_DIM: usize = 37;

/// One dtype by one kernel.
#[derive(Clone, Debug)]
pub struct SelfTest {
    /// The dtype of q, k, v and out.
    pub dtype: DType,
    /// `forward` or `decode`.
    pub kernel: &'static str,
    /// Relative L2 against the reference, or why there is none.
    pub error: Result<f64>,
    /// What `error` may be: two roundings of the result's precision.
    pub limit: f64,
}

impl SelfTest {
    /// Whether the error is within the limit.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.error.as_ref().is_ok_and(|error| *error <= self.limit)
    }
}

/// The processor as Linux tells it; elsewhere the architecture.
#[must_use]
pub fn cpu_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    let name = line.and_then(|line| line.split_once(':')).map(|(_, name)| name.trim().to_owned());
    name.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Operating system and architecture, such as `linux-x86_64`.
#[must_use]
pub fn platform() -> String {
    format!("{}-{}", std::env::consts::OS, std::env::consts::ARCH)
}

/// Whether Apple's GPUs are served in this process, and that they never were.
#[must_use]
pub fn metal() -> Vec<(String, String)> {
    let found = match rapt_metal::Backend::get() {
        Ok(_) => "served".to_owned(),
        Err(why) => format!("not served: {why}"),
    };
    vec![("metal".to_owned(), format!("{found}; {}", rapt_metal::NEVER_RUN))]
}

/// The adapters that Vulkan shows, a row each, with what each lacks, and where compiled kernels are kept; or why there is no adapter.
#[must_use]
pub fn vulkan() -> Vec<(String, String)> {
    let row = |name: &str, text: &str| vec![(name.to_owned(), text.to_owned())];
    #[cfg(not(feature = "vulkan"))]
    return row("vulkan", "not in this build");
    #[cfg(feature = "vulkan")]
    {
        let adapters = crate::vulkan::adapters();
        if adapters.is_empty() {
            return row("vulkan", "no adapter: no libvulkan, or no driver");
        }
        let folder =
            rapt_core::cache_folder().map_or_else(|| "nowhere".to_owned(), |folder| format!("in {}", folder.display()));
        let described = |adapter: crate::vulkan::AdapterFacts| {
            let kept = if adapter.keeps_kernels { folder.as_str() } else { "nowhere" };
            let lacks = match (adapter.missing, adapter.lacks.as_slice()) {
                (Some(missing), _) => format!("not served: it lacks {missing}"),
                (None, []) => "lacks nothing".to_owned(),
                (None, lacks) => format!("lacks {}", lacks.join(", ")),
            };
            let largest = adapter.caps.max_binding_bytes >> 20;
            let text = format!(
                "{} ({}, {}), bindings of {largest} MiB; {lacks}; compiled kernels kept {kept}",
                adapter.name, adapter.kind, adapter.driver
            );
            (format!("vulkan:{}", adapter.index), text)
        };
        adapters.into_iter().map(described).collect()
    }
}

/// Every variable of Rapt, set or not, and others that look like one: a misspelt name does nothing.
#[must_use]
pub fn variables() -> Vec<(String, Option<String>)> {
    let text = |value: &std::ffi::OsStr| value.to_string_lossy().into_owned();
    let known = VARIABLES.map(|name| (name.to_owned(), std::env::var_os(name).map(|value| text(&value))));
    let others = std::env::vars_os().map(|(name, value)| (text(&name), Some(text(&value))));
    let others = others.filter(|(name, _)| name.starts_with(PREFIX) && !VARIABLES.contains(&name.as_str()));
    known.into_iter().chain(others).collect()
}

/// Whether `engine` computes what the reference does: each dtype by each kernel.
#[must_use]
pub fn self_test(engine: &Engine) -> Vec<SelfTest> {
    let mut cases = Vec::new();
    // 16 queries fill tiles; 1 query per head is a token to decode.
    for (kernel, q_len) in [("forward", 16), ("decode", 1)] {
        let mut case = |dtype, limit, error| cases.push(SelfTest { dtype, kernel, error, limit });
        case(DType::F64, 1e-14, error_of::<f64>(engine, q_len, |x| x, |x| x));
        case(DType::F32, 1e-6, error_of::<f32>(engine, q_len, |x| x as f32, f64::from));
        case(DType::F16, 1e-3, error_of::<f16>(engine, q_len, f16::from_f64, f64::from));
        case(DType::BF16, 8e-3, error_of::<bf16>(engine, q_len, bf16::from_f64, f64::from));
    }
    cases
}

/// Sixteenths in −1..1.
fn sample(seed: usize, len: usize) -> Vec<f64> {
    (0..len).map(|n| (((n * 7 + seed * 13) * 37 % 33) as f64 - 16.0) / 16.0).collect()
}

/// The relative L2 error of one dtype's run.
fn error_of<T: Element>(engine: &Engine, q_len: usize, narrow: fn(f64) -> T, widen: fn(T) -> f64) -> Result<f64> {
    let q = sample(1, HEADS * q_len * HEAD_DIM);
    let (k, v) = (sample(2, KV_HEADS * KV_LEN * HEAD_DIM), sample(3, KV_HEADS * KV_LEN * HEAD_DIM));
    let problem = Problem {
        num_kv_heads: KV_HEADS,
        causal: Some(Causal::BottomRight),
        ..Problem::plain(1, HEADS, q_len, KV_LEN, HEAD_DIM)
    };
    let expected = naive(&problem, &Inputs::plain(&q, &k, &v)).out;
    let typed = |x: &[f64]| x.iter().map(|&x| narrow(x)).collect::<Vec<T>>();
    // K lies as [head, head_dim, key].
    let mut turned = vec![narrow(0.0); k.len()];
    for (n, &x) in k.iter().enumerate() {
        let (head, j, d) = (n / (KV_LEN * HEAD_DIM), n / HEAD_DIM % KV_LEN, n % HEAD_DIM);
        turned[(head * HEAD_DIM + d) * KV_LEN + j] = narrow(x);
    }
    let (q, v) = (typed(&q), typed(&v));
    let strides = Strides::from([(HEAD_DIM * KV_LEN) as isize, 1, KV_LEN as isize]);
    let mut out = Tensor::zeros(T::DTYPE, [HEADS, q_len, HEAD_DIM].into())?;
    let tensors = Tensors::new(
        View::contiguous("q", &q, [HEADS, q_len, HEAD_DIM].into())?,
        View::strided("k", &turned, 0, [KV_HEADS, KV_LEN, HEAD_DIM].into(), strides)?,
        View::contiguous("v", &v, [KV_HEADS, KV_LEN, HEAD_DIM].into())?,
        out.view_mut()?,
    );
    engine.attention_into(tensors, &Options::default().with_causal(Causal::BottomRight))?;
    let got = out.to_vec::<T>()?;
    let off: f64 = got.iter().zip(&expected).map(|(&got, expected)| (widen(got) - expected).powi(2)).sum();
    let whole: f64 = expected.iter().map(|expected| expected.powi(2)).sum();
    Ok((off / whole).sqrt())
}
