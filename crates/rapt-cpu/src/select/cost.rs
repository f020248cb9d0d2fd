//! What a run costs at least on a machine's units, and what it keeps packed.

use rapt_core::{Arch, CodesSpec, Cost, DType, Kernel, KernelKey, PRounding, Spec, TensorSpec};

use crate::arch;
use crate::partition::Partition;

/// What one core does per cycle.
struct Rates {
    /// Multiplications and additions.
    flops: f64,
    /// Exponentials.
    exponentials: f64,
}

fn rates(arch: Arch, kernel: Kernel, storage: DType) -> Rates {
    let in_blocks = matches!(kernel, Kernel::Forward | Kernel::Backward);
    let (flops, exponentials) = match arch {
        Arch::Avx512Bf16 if in_blocks && arch::is_paired(arch, storage) => (128.0, 3.4),
        // Of float16 and float32 so many products of bf16 are one.
        Arch::Amx if in_blocks && storage == DType::F16 => (1024.0 / 3.5, 3.4),
        Arch::Amx if in_blocks && storage == DType::F32 => (1024.0 / 6.0, 3.4),
        Arch::Amx if in_blocks && arch::is_paired(arch, storage) => (1024.0, 3.4),
        Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx if kernel == Kernel::ForwardInt8 => (256.0, 3.4),
        Arch::Avx512 | Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx => (64.0, 3.4),
        Arch::Avx2 => (32.0, 1.7),
        Arch::NeonBf16 if in_blocks && arch::is_paired(arch, storage) => (32.0, 0.9),
        Arch::NeonBf16 if kernel == Kernel::ForwardInt8 => (64.0, 0.9),
        Arch::Neon | Arch::NeonBf16 => (16.0, 0.9),
        _ => (8.0, 0.5),
    };
    let width = if storage == DType::F64 { 2.0 } else { 1.0 };
    Rates { flops: flops / width, exponentials: exponentials / (2.0 * width - 1.0) }
}

/// Most bytes that lie packed at one time: a block of K and V per thread in forward; in decode the few keys that are
/// gathered, in the dtype that the kernel reads, where their elements lie apart or are codes.
pub(super) fn bytes_packed(
    spec: &Spec,
    key: &KernelKey,
    partition: &Partition,
    read_as: DType,
    threads: usize,
) -> usize {
    let k = if partition.k_in_place { 0 } else { spec.head_dim() };
    let v = if partition.v_in_place { 0 } else { spec.head_dim_v() };
    let per_thread = if key.kernel == Kernel::Decode {
        partition.pv_keys * k.max(v) * read_as.size_bytes()
    } else {
        let of_tiles = arch::tiled(key.arch, key.storage).map(|parts| parts * DType::BF16.size_bytes());
        let size = match key.p_rounding {
            PRounding::Storage => spec.numerics.storage.size_bytes(),
            PRounding::Block => DType::I8.size_bytes(),
            _ => of_tiles.unwrap_or(spec.numerics.accumulation.size_bytes()),
        };
        partition.block_n * (k + v) * size
    };
    per_thread.saturating_mul(threads)
}

/// The cost of `spec` by the kernel of `key`, with nothing packed.
pub(crate) fn cost(spec: &Spec, key: &KernelKey, threads: usize, clock_hz: Option<f64>) -> Cost {
    let pairs = spec.pairs() as f64;
    let flops = pairs * 2.0 * (spec.head_dim() + spec.head_dim_v()) as f64;
    let bytes =
        |shape: &[usize], dtype: DType| shape.iter().map(|&n| n as f64).product::<f64>() * dtype.size_bytes() as f64;
    let mask = spec.mask.map_or(0.0, |mask| {
        let distinct = |(&n, &stride): (&usize, &isize)| if stride == 0 { 1.0 } else { n as f64 };
        mask.shape.iter().zip(&mask.strides).map(distinct).product::<f64>() * mask.dtype.size_bytes() as f64
    });
    let of_operand = |tensor: &TensorSpec<4>, codes: &Option<Box<CodesSpec>>| match codes {
        Some(codes) => (codes.code_bytes(tensor).saturating_add(codes.scale_bytes())) as f64,
        None => bytes(&tensor.shape, tensor.dtype),
    };
    let operands = [(&spec.q, &spec.codes.q), (&spec.k, &spec.codes.k), (&spec.v, &spec.codes.v)];
    let read = operands.map(|(tensor, codes)| of_operand(tensor, codes)).iter().sum::<f64>() + mask;
    let written = bytes(&spec.out.shape, spec.out.dtype) + spec.lse.map_or(0.0, |lse| bytes(&lse.shape, lse.dtype));
    let rates = rates(key.arch, key.kernel, key.storage);
    let floor_cycles = flops / rates.flops + pairs / rates.exponentials;
    Cost {
        flops,
        exponentials: pairs,
        bytes_read: read,
        bytes_written: written,
        floor_cycles,
        // A system that tells a clock of 0 tells none.
        floor_seconds: clock_hz.filter(|&hz| hz > 0.0).map(|hz| floor_cycles / (hz * threads as f64)),
        bytes_copied: 0,
        bytes_packed: 0,
    }
}
