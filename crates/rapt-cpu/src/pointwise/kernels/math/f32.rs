//! Functions of float32.

use super::f64 as wide;
use crate::kernels::simd::Simd;

/// `a · b + c`, rounded once.
#[inline(always)]
pub(in crate::pointwise::kernels) fn mul_add<S: Simd<Elem = f32>>(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

/// Functions by way of float64.
macro_rules! by_f64 {
    ($($name:ident = |$x:ident| $of:expr;)*) => {$(
        #[inline(always)]
        pub(in crate::pointwise::kernels) fn $name<S: Simd<Elem = f32>>(x: f32) -> f32 {
            let $x = f64::from(x);
            $of as f32
        }
    )*};
}

by_f64! {
    exp = |x| x.exp();
    exp2 = |x| x.exp2();
    expm1 = |x| x.exp_m1();
    log = |x| x.ln();
    log2 = |x| x.log2();
    log10 = |x| x.log10();
    log1p = |x| x.ln_1p();
    sin = |x| x.sin();
    cos = |x| x.cos();
    tan = |x| x.tan();
    tanh = |x| x.tanh();
    erf = |x| libm::erf(x);
    sigmoid = |x| wide::sigmoid(x);
    silu = |x| wide::silu(x);
    gelu = |x| wide::gelu(x);
    gelu_tanh = |x| wide::gelu_tanh(x);
}
