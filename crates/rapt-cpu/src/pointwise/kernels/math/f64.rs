//! Functions of float64 that std and libm lack.

use rapt_core::float64;

/// `1 / (1 + e^−x)`.
pub(in crate::pointwise::kernels) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + float64::exp(-x))
}

/// `x · sigmoid(x)`.
pub(in crate::pointwise::kernels) fn silu(x: f64) -> f64 {
    x / (1.0 + float64::exp(-x))
}

/// `x · Φ(x)`. erfc keeps its digits where 1 + erf loses them.
pub(in crate::pointwise::kernels) fn gelu(x: f64) -> f64 {
    0.5 * x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}

/// PyTorch's `gelu` with `approximate` tanh.
pub(in crate::pointwise::kernels) fn gelu_tanh(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
    0.5 * x * (1.0 + float64::tanh(inner))
}

/// Python's `//` of floats as ATen computes it: by way of the remainder, which is exact.
pub(in crate::pointwise::kernels) fn floor_quotient(a: f64, b: f64) -> f64 {
    if b == 0.0 {
        return a / b;
    }
    let rest = a % b;
    let mut quotient = (a - rest) / b;
    if rest != 0.0 && (b < 0.0) != (rest < 0.0) {
        quotient -= 1.0;
    }
    if quotient == 0.0 {
        return 0f64.copysign(a / b);
    }
    let floor = quotient.floor();
    if quotient - floor > 0.5 { floor + 1.0 } else { floor }
}
