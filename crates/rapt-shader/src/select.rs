//! From a spec to a plan: pure, total, without a device.
//!
//! One kernel serves all that WGSL computes. What it sums, and in which order, depends on neither batch, strides, alignment nor windows: the
//! bits of a row are its own.

use rapt_core::{
    Arch, Compute, Cost, DType, Error, Kernel, KernelKey, Launch, LaunchPlan, MaskClass, PRounding, Plan, Result, Spec,
    TensorSpec, Work,
};

use crate::caps::Caps;
use crate::params::MOST_LEN;
use crate::variant::{BLOCK_M, BLOCK_N, KernelVariant, SHARED_BYTES, Stores, THREADS};
use crate::window::{Window, windows};

/// What a run launches: one kernel, window by window.
#[derive(Clone, Debug, PartialEq)]
pub struct ShaderLaunch {
    /// The kernel; `None` where nothing is written.
    pub variant: Option<KernelVariant>,
    /// The windows, in order.
    pub windows: Vec<Window>,
    cost: Cost,
    work: Option<Work>,
    items: usize,
}

fn refuse_what_is_not_served(spec: &Spec) -> Result<()> {
    let storage = spec.numerics.storage;
    if storage == DType::F64 || spec.out.dtype == DType::F64 {
        let instead = "give q, k and v in float32, or leave them in host memory and compute on the CPU";
        return Err(Error::unsupported("float64 on this device", "WGSL has no 64-bit floats", instead));
    }
    let others = [
        (spec.compute != Compute::Exact, "products of int8 (compute)"),
        (spec.is_quantized(), "q, k or v that are codes"),
        (spec.pages.is_some(), "keys in pages"),
        (spec.lengths.is_some(), "sequences with lengths of their own"),
        (spec.varlen.is_some(), "sequences that lie one after another"),
    ];
    if let Some((_, what)) = others.into_iter().find(|(is, _)| *is) {
        let instead = "call `attention` for each sequence, on numbers";
        return Err(Error::unsupported(what, "no kernel in WGSL reads them", instead));
    }
    let rows = spec.group_size().saturating_mul(spec.q_len());
    let lengths = [
        ("kv_len", spec.kv_len()),
        ("rows of a group", rows),
        ("num_q_heads", spec.num_q_heads()),
        ("batch · num_kv_heads", spec.batch().saturating_mul(spec.num_kv_heads())),
        ("head_dim", spec.head_dim()),
        ("head_dim_v", spec.head_dim_v()),
    ];
    match lengths.into_iter().find(|(_, n)| *n >= MOST_LEN) {
        Some((what, n)) => {
            let (what, why) = (format!("{what} = {n}"), "WGSL counts in 32 bits: lengths are below 2^29");
            Err(Error::unsupported(what, why, "cut the problem along that dimension"))
        }
        None => Ok(()),
    }
}

fn cost(spec: &Spec) -> Cost {
    let pairs = spec.pairs() as f64;
    let bytes = |shape: &[usize], strides: &[isize], dtype: DType| {
        let distinct = |(&n, &stride): (&usize, &isize)| if stride == 0 { 1.0 } else { n as f64 };
        shape.iter().zip(strides).map(distinct).product::<f64>() * dtype.size_bytes() as f64
    };
    let of = |tensor: &TensorSpec<4>| bytes(&tensor.shape, &tensor.strides, tensor.dtype);
    let flops = pairs * 2.0 * (spec.head_dim() + spec.head_dim_v()) as f64;
    Cost {
        flops,
        exponentials: pairs,
        bytes_read: of(&spec.q) + of(&spec.k) + of(&spec.v) + spec.mask.as_ref().map_or(0.0, of),
        bytes_written: of(&spec.out) + spec.lse.map_or(0.0, |lse| bytes(&lse.shape, &lse.strides, lse.dtype)),
        // 128 multiply-adds a cycle; neither clock nor number of cores is told.
        floor_cycles: flops / 256.0,
        floor_seconds: None,
        bytes_copied: 0,
        bytes_packed: 0,
    }
}

/// Chooses what runs for `spec` on a device with `caps`. Where tensors lie is not asked: whoever binds them does.
///
/// # Errors
/// [`Error::Unsupported`] for float64, codes, pages, sequences with lengths of their own, lengths beyond 2^29, and a head of which one tensor
/// is longer than a binding may be.
pub fn select(spec: &Spec, caps: &Caps) -> Result<Plan> {
    refuse_what_is_not_served(spec)?;
    let is_empty = spec.out.shape.contains(&0);
    let windows = if is_empty { Vec::new() } else { windows(spec, caps)? };
    let items = windows.iter().map(|window| window.items(spec.head_dim_v())).sum();
    let rows = spec.group_size() * spec.q_len();
    let work = (!is_empty).then(|| Work {
        tasks: spec.batch() * spec.num_kv_heads(),
        rows,
        rows_per_item: BLOCK_M,
        keys_per_item: spec.kv_len().max(1),
    });
    let variant = (!is_empty).then(|| KernelVariant::of(spec, caps.has_16_bit_stores));
    let key = KernelKey {
        direction: spec.direction,
        kernel: if is_empty { Kernel::Empty } else { Kernel::Generic },
        storage: spec.numerics.storage,
        accumulation: spec.numerics.accumulation,
        p_rounding: PRounding::Accumulation,
        mask: match spec.mask.map(|mask| mask.dtype) {
            None => MaskClass::None,
            Some(DType::Bool) => MaskClass::Bool,
            Some(_) => MaskClass::Additive,
        },
        kv: spec.kv,
        arch: Arch::Wgsl,
    };
    Ok(Plan::new(spec.clone(), key, ShaderLaunch { variant, windows, cost: cost(spec), work, items }))
}

/// Every variant that [`select`] may choose on any device.
#[must_use]
pub fn variants() -> Vec<KernelVariant> {
    let floats = [DType::F32, DType::F16, DType::BF16];
    let masks = [None, Some(DType::Bool), Some(DType::F32), Some(DType::F16), Some(DType::BF16)];
    let stores = |out: DType| match out {
        DType::F32 => vec![Stores::Words],
        _ => vec![Stores::Halves, Stores::HalvesOfWords],
    };
    let outs = || floats.into_iter().flat_map(move |out| stores(out).into_iter().map(move |stores| (out, stores)));
    let of_storage = |storage| outs().map(move |(out, stores)| (storage, out, stores));
    let all = floats.into_iter().flat_map(of_storage);
    all.flat_map(|(storage, out, stores)| masks.map(|mask| KernelVariant { storage, mask, out, stores })).collect()
}

impl LaunchPlan for ShaderLaunch {
    fn block_m(&self) -> usize {
        BLOCK_M
    }
    fn block_n(&self) -> usize {
        BLOCK_N
    }
    fn num_splits(&self) -> usize {
        1
    }
    fn items(&self) -> usize {
        self.items
    }
    fn threads(&self) -> usize {
        THREADS
    }
    fn workspace_bytes(&self) -> usize {
        0
    }
    fn cost(&self) -> &Cost {
        &self.cost
    }
    fn kv_in_place(&self) -> bool {
        false
    }
    fn work(&self) -> Option<Work> {
        self.work
    }
    fn launch(&self) -> Option<Launch> {
        let (blocks, block_threads, shared_bytes) = (self.items, THREADS, SHARED_BYTES);
        Some(Launch { blocks, block_threads, shared_bytes, multiprocessors: 1, compiled: None })
    }
    fn why(&self, _: &Spec, key: &KernelKey) -> String {
        if key.kernel == Kernel::Empty {
            return "nothing is written".to_owned();
        }
        let cut = match self.windows.len() {
            1 => String::new(),
            n => format!("; {n} launches, each over tensors no longer than the device binds"),
        };
        format!("the one kernel in WGSL: every option, any strides, on the ordinary units{cut}")
    }
    fn why_not_faster(&self, _: &Spec, _: &KernelKey) -> String {
        String::new()
    }
}
