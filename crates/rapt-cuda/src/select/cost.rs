//! What a run costs at least: arithmetic, exponentials and bytes, and the floor in time that follows.

use rapt_core::{Arch, Cost, DType, Kernel, Spec, TensorSpec};

use super::Caps;

/// Multiplications and additions per cycle of one multiprocessor.
fn flops_per_cycle(arch: Arch, kernel: Kernel, storage: DType) -> f64 {
    let data_centre = matches!(arch, Arch::Sm80 | Arch::Sm90a | Arch::Sm100 | Arch::Sm103);
    match (kernel, arch, storage) {
        (Kernel::Generic, _, DType::F64) => {
            if data_centre {
                128.0
            } else {
                4.0
            }
        }
        // Bytes, of any dtype of q: twice as many as numbers of 16 bits.
        (Kernel::ForwardInt8, Arch::Sm90a, _) => 8192.0,
        (Kernel::ForwardInt8, Arch::Sm100 | Arch::Sm103, _) => 16384.0,
        (Kernel::ForwardInt8, Arch::Sm80, _) => 4096.0,
        (Kernel::ForwardInt8, ..) => 2048.0,
        (Kernel::Generic, Arch::Sm80, _) => 128.0,
        (Kernel::Generic, ..) => 256.0,
        (_, Arch::Sm90a, DType::F32) => 4096.0 / 3.0,
        (_, Arch::Sm90a, _) => 4096.0,
        (_, Arch::Sm100 | Arch::Sm103, _) => 8192.0,
        (_, Arch::Sm80, _) => 2048.0,
        _ => 1024.0,
    }
}

pub(super) fn cost(spec: &Spec, caps: &Caps, kernel: Kernel) -> Cost {
    let pairs = spec.pairs() as f64;
    let flops = pairs * 2.0 * (spec.head_dim() + spec.head_dim_v()) as f64;
    let bytes = |shape: &[usize], strides: &[isize], dtype: DType| {
        let distinct = |(&n, &stride): (&usize, &isize)| if stride == 0 { 1.0 } else { n as f64 };
        shape.iter().zip(strides).map(distinct).product::<f64>() * dtype.size_bytes() as f64
    };
    let of = |tensor: &TensorSpec<4>| bytes(&tensor.shape, &tensor.strides, tensor.dtype);
    let bytes_read = of(&spec.q) + of(&spec.k) + of(&spec.v) + spec.mask.as_ref().map_or(0.0, of);
    let bytes_written = of(&spec.out) + spec.lse.map_or(0.0, |lse| bytes(&lse.shape, &lse.strides, lse.dtype));
    // 16 exponentials per cycle and multiprocessor, beside the products.
    let cycles = (flops / flops_per_cycle(caps.arch, kernel, spec.numerics.storage)).max(pairs / 16.0);
    let seconds = |hz: f64| {
        let work = cycles / (hz * f64::from(caps.multiprocessors.max(1)));
        work.max(caps.bandwidth.map_or(0.0, |bandwidth| (bytes_read + bytes_written) / bandwidth))
    };
    Cost {
        flops,
        exponentials: pairs,
        bytes_read,
        bytes_written,
        floor_cycles: cycles,
        floor_seconds: caps.clock_hz.map(seconds),
        bytes_copied: 0,
        bytes_packed: 0,
    }
}
