//! Functions of float32, each at most 2 units in the last place from the correctly rounded result (docs/reference/numerics.md).
//!
//! ```text
//! e^z = 2^n · (1 + p)          n = round(z · log2 e), r = z − n · ln 2, p = r + r² · q(r)
//! ln x = e · ln 2 + f + f² · Q(f)          x = 2^e · (1 + f), f from √½ − 1 to √2 − 1
//! gelu(x) = max(x, 0) − h(|x|)             h(t) = t · Φ(−t) = t / (t + 2) · R(t) · e^(−t²/2)
//! ```
//!
//! The `short` functions have the digits of 16 bits and four more. There h(t) = t · 2^P(t), P = log2 Φ(−t); and with a logistic
//! function for Φ, h(t) = t · y / (1 + y), y = 2^−w(t).
//!
//! Without branches, so that the loops around them become vectors; polynomials are minimax (Remez), highest power first. Where an
//! instruction set has no fused multiply-add, the functions go by way of float64 and std's functions.

use super::f64 as wide;
use crate::kernels::simd::Simd;
use rapt_core::float64;

/// Adding it rounds a number below 2²² to an integer, which is then in the low bits.
const MAGIC: f32 = 12_582_912.0;
/// ln 2 rounded, and the rest. `z − n · LN_2[0]`, rounded once, is exact where the result is below 1/2.
const LN_2: [f32; 2] = [std::f32::consts::LN_2, -1.904_654_3e-9];
/// `(e^r − 1 − r) / r²`, its error relative to e^r 2^−28.2.
const EXP: [f32; 5] = [0.001_381_417_4, 0.008_368_921, 0.041_668_41, 0.166_665_2, 0.499_999_94];
/// The same, its error relative to e^r − 1 2^−30.9.
const EXPM1: [f32; 6] = [0.000_198_092_54, 0.001_392_906_1, 0.008_333_443, 0.041_666_552, 0.166_666_66, 0.5];
/// `(2^r − 1 − r · ln 2) / r²`.
const EXP2: [f32; 5] = [0.000_153_209_91, 0.001_339_027_4, 0.009_618_528, 0.055_503_62, 0.240_226_48];
/// `(ln(1 + f) − f) / f²`, its error relative to ln(1 + f) 2^−27.9.
const LOG: [f32; 9] = [
    -0.076_229_274,
    0.129_063_2,
    -0.132_434_73,
    0.141_815_81,
    -0.166_09,
    0.200_019_84,
    -0.250_015_85,
    0.333_333_25,
    -0.499_999_88,
];
/// `(log2(1 + f) − f · log2 e) / f²`.
const LOG2: [f32; 9] = [
    -0.109_975_6,
    0.186_198_85,
    -0.191_062_93,
    0.204_596_97,
    -0.239_617_21,
    0.288_567_6,
    -0.360_696_64,
    0.480_898_23,
    -0.721_347_33,
];
/// `(log10(1 + f) − f · log10 e) / f²`.
const LOG10: [f32; 9] = [
    -0.033_105_955,
    0.056_051_437,
    -0.057_515_67,
    0.061_589_826,
    -0.072_131_97,
    0.086_867_51,
    -0.108_580_51,
    0.144_764_8,
    -0.217_147_19,
];
/// log2 e and log10 e, rounded, and the rests.
const LOG2_E: [f32; 2] = [std::f32::consts::LOG2_E, 1.925_963e-8];
const LOG10_E: [f32; 2] = [std::f32::consts::LOG10_E, -1.010_305e-8];
/// log10 2 in two parts: products of the first with exponents are exact.
const LOG10_2: [f32; 2] = [0.301_025_4, 4.605_039e-6];
/// `(tanh(x) − x) / x³` in x² for |x| < 0.6.
const TANH: [f32; 5] = [-0.005_848_76, 0.020_769_285, -0.053_781_26, 0.133_319_82, -0.333_333_05];
/// `erf(x) / x − 1` in x² for |x| < 0.92.
const ERF: [f32; 6] = [-0.000_597_689_65, 0.004_990_981, -0.026_765_568, 0.112_818_025, -0.376_124_95, 0.128_379_15];
/// `−ln(1 − erf(x))` from 0.92 to 4.
const ERFC: [f32; 9] = [
    5.223_648e-7,
    1.430_497_7e-5,
    -0.000_396_671_1,
    0.004_053_386,
    -0.024_895_089,
    0.108_011_81,
    0.633_543_55,
    1.129_434_1,
    -0.000_160_396_7,
];
/// `Φ(−t) · e^(t²/2) · (t + 2)` in `(t − 2) / (t + 2)` for t from 0 to 14.7, its relative error 2^−28.4. With 4 for 2 two
/// coefficients less would do, and near 0 the slope would cost 4 units in the last place.
const GELU: [f32; 10] = [
    -6.626_567_5e-5,
    -0.000_149_288_21,
    0.000_134_804_13,
    0.000_836_792_5,
    0.000_821_931_64,
    -0.001_951_732_6,
    -0.006_733_854,
    -0.000_469_703_78,
    0.036_719_292,
    0.028_797_368,
];
/// The last two of them.
const GELU_LAST: [f32; 2] = [-0.331_404_48, 0.672_408];
/// What float32 loses of those.
const GELU_LOST: [f32; 2] = [7.268_475_6e-9, 2.019_499_6e-8];

/// `log2 Φ(−t)` for t from 0 to 14: 2 to that has a relative error of 2^−16.4 up to 5.8, below which float16 has no numbers, and
/// of 2^−13.4 beyond.
const LOG2_PHI: [f32; 10] = [
    -1.993_564_3e-9,
    1.457_222_5e-7,
    -4.663_741e-6,
    8.657_377e-5,
    -0.001_045_299_3,
    0.008_783_123,
    -0.054_261_274,
    -0.458_396_82,
    -1.151_177_7,
    -1.000_014_7,
];
/// `2^r` for |r| up to 1/2, its relative error 2^−18.6.
const SHORT_EXP2: [f32; 5] = [0.009_570_1, 0.055_917_86, 0.240_247_45, 0.693_121_8, 0.999_999_3];

/// Sines, cosines and tangents from here on go by way of std: reducing them takes more digits of π.
pub(in crate::pointwise::kernels) const FAR: f32 = 35_184_372_088_832.0;

/// Horner's scheme, highest power first.
#[inline(always)]
fn polynomial<const N: usize>(coefficients: &[f32; N], x: f32) -> f32 {
    let mut sum = coefficients[0];
    for &c in &coefficients[1..] {
        sum = sum.mul_add(x, c);
    }
    sum
}

/// `n` with `z · log2 e` rounded to it, as a number and as an integer. Any integer may come out where that is beyond 2²².
#[inline(always)]
fn nearest(scaled: f32) -> (f32, i32) {
    let shifted = scaled + MAGIC;
    (shifted - MAGIC, (shifted.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32))
}

/// `z − n · ln 2` and n, for |z| below 350.
#[inline(always)]
fn reduce(z: f32) -> (f32, i32) {
    let shifted = z.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let steps = (shifted.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    (n.mul_add(-LN_2[1], n.mul_add(-LN_2[0], z)), steps)
}

/// `x · 2^n` for n from −252 to 254, rounded once: a product with each half of n.
#[inline(always)]
fn scale(x: f32, n: i32) -> f32 {
    let half = n >> 1;
    x * power_of_2(half) * power_of_2(n.wrapping_sub(half))
}

/// The same for n from −190 to 63, in fewer steps.
#[inline(always)]
fn scale_down(x: f32, n: i32) -> f32 {
    x * power_of_2(n.wrapping_add(64)) * 5.421_011e-20
}

/// `2^n` for n from −126 to 127.
#[inline(always)]
fn power_of_2(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// x between the bounds; NaN stays.
#[inline(always)]
fn between(low: f32, x: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// `e^r − 1` for |r| up to ln 2 / 2, exact enough beside 1.
#[inline(always)]
fn exp_less_1(r: f32) -> f32 {
    (r * r).mul_add(polynomial(&EXP, r), r)
}

/// `a · b + c`, rounded once.
#[inline(always)]
pub(in crate::pointwise::kernels) fn mul_add<S: Simd<Elem = f32>>(a: f32, b: f32, c: f32) -> f32 {
    if S::FUSED {
        return a.mul_add(b, c);
    }
    // The product is exact; the sum is rounded twice, which is seen where it lies a hair from halfway.
    (f64::from(a) * f64::from(b) + f64::from(c)) as f32
}

/// `e^x`, with a fused multiply-add or by way of float64.
#[inline(always)]
pub(crate) fn exp_of(x: f32, is_fused: bool) -> f32 {
    if is_fused { fused::exp(x) } else { float64::exp(f64::from(x)) as f32 }
}

/// Functions with a fused multiply-add, and without one by way of float64.
macro_rules! functions {
    ($($name:ident = $fused:path, |$x:ident| $of:expr;)*) => {$(
        #[inline(always)]
        pub(in crate::pointwise::kernels) fn $name<S: Simd<Elem = f32>>(x: f32) -> f32 {
            if S::FUSED {
                return $fused(x);
            }
            let $x = f64::from(x);
            $of as f32
        }
    )*};
}

functions! {
    exp = fused::exp, |x| float64::exp(x);
    exp2 = fused::exp2, |x| float64::exp2(x);
    expm1 = fused::expm1, |x| float64::expm1(x);
    log = fused::log, |x| float64::log(x);
    log2 = fused::log2, |x| float64::log2(x);
    log10 = fused::log10, |x| float64::log10(x);
    log1p = fused::log1p, |x| float64::log1p(x);
    sin = fused::sin, |x| float64::sin(x);
    cos = fused::cos, |x| float64::cos(x);
    tan = fused::tan, |x| float64::tan(x);
    tanh = fused::tanh, |x| float64::tanh(x);
    erf = fused::erf, |x| libm::erf(x);
    sigmoid = fused::sigmoid, |x| wide::sigmoid(x);
    silu = fused::silu, |x| wide::silu(x);
    gelu = fused::gelu, |x| wide::gelu(x);
    gelu_tanh = fused::gelu_tanh, |x| wide::gelu_tanh(x);
    short_silu = fused::short_silu, |x| wide::silu(x);
    short_gelu = fused::short_gelu, |x| wide::gelu(x);
    short_gelu_tanh = fused::short_gelu_tanh, |x| wide::gelu_tanh(x);
}

mod fused {
    use super::*;

    #[inline(always)]
    pub(super) fn exp(x: f32) -> f32 {
        let (r, n) = reduce(between(-104.0, x, 89.0));
        scale(1.0 + exp_less_1(r), n)
    }

    #[inline(always)]
    pub(super) fn exp2(x: f32) -> f32 {
        let x = between(-151.0, x, 129.0);
        let (whole, n) = nearest(x);
        let r = x - whole;
        let p = r.mul_add(LN_2[0], r * r.mul_add(polynomial(&EXP2, r), LN_2[1]));
        scale(1.0 + p, n)
    }

    #[inline(always)]
    pub(super) fn expm1(x: f32) -> f32 {
        // Half of it, so that 2^n stays finite to the end.
        let (r, n) = reduce(between(-20.0, x, 89.0));
        let p = (r * r).mul_add(polynomial(&EXPM1, r), r);
        let half = power_of_2(n.wrapping_sub(1));
        let y = 2.0 * half.mul_add(p, half - 0.5);
        if x.abs() < 1e-30 { x } else { y }
    }

    /// The exponent of a normal number above 0, and the rest less 1, from √½ − 1 to √2 − 1.
    #[inline(always)]
    fn exponent(x: f32) -> (i32, f32) {
        const HALF_ROOT: u32 = 0x3F35_04F3;
        let e = (x.to_bits().wrapping_sub(HALF_ROOT) as i32) >> 23;
        (e, f32::from_bits(x.to_bits().wrapping_sub((e as u32) << 23)) - 1.0)
    }

    /// The same, of subnormal numbers too.
    #[inline(always)]
    fn any_exponent(x: f32) -> (f32, f32) {
        let is_small = x < f32::MIN_POSITIVE;
        let (e, f) = exponent(if is_small { x * 8_388_608.0 } else { x });
        ((if is_small { e.wrapping_sub(23) } else { e }) as f32, f)
    }

    /// What a logarithm is of numbers that have no exponent.
    #[inline(always)]
    fn log_edges(x: f32, y: f32) -> f32 {
        let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
        let y = if x < 0.0 { f32::NAN } else { y };
        // ∞ and NaN.
        if x < f32::INFINITY { y } else { x }
    }

    #[inline(always)]
    pub(super) fn log(x: f32) -> f32 {
        let (e, f) = any_exponent(x);
        let small = e.mul_add(LN_2[1], f * f * polynomial(&LOG, f));
        log_edges(x, e.mul_add(LN_2[0], f + small))
    }

    #[inline(always)]
    pub(super) fn log2(x: f32) -> f32 {
        let (e, f) = any_exponent(x);
        log_edges(x, e + f.mul_add(LOG2_E[0], f * f.mul_add(polynomial(&LOG2, f), LOG2_E[1])))
    }

    #[inline(always)]
    pub(super) fn log10(x: f32) -> f32 {
        let (e, f) = any_exponent(x);
        let small = e.mul_add(LOG10_2[1], f * f.mul_add(polynomial(&LOG10, f), LOG10_E[1]));
        log_edges(x, e.mul_add(LOG10_2[0], f.mul_add(LOG10_E[0], small)))
    }

    #[inline(always)]
    pub(super) fn log1p(x: f32) -> f32 {
        let u = 1.0 + x;
        // What the sum lost.
        let lost = if x.abs() < 1.0 { x - (u - 1.0) } else { 1.0 - (u - x) };
        let (e, f) = exponent(u);
        let f = lost.mul_add(power_of_2(-e.min(127)), f);
        let e = e as f32;
        let small = e.mul_add(LN_2[1], f * f * polynomial(&LOG, f));
        let y = log_edges(u, e.mul_add(LN_2[0], f + small));
        // −0 stays.
        if x == 0.0 { x } else { y }
    }

    /// Sine and cosine of `x − n · π/2`, and n, for |x| below [`FAR`].
    #[inline(always)]
    fn quarter(x: f64) -> (f64, f64, i32) {
        const MAGIC: f64 = 6_755_399_441_055_744.0;
        const HALF_PI: [f64; 2] = [std::f64::consts::FRAC_PI_2, 6.123_233_995_736_766e-17];
        const SIN: [f64; 5] = [
            -2.475_598_873_018_152e-8,
            2.755_530_195_210_275_6e-6,
            -0.000_198_412_637_298_329_75,
            0.008_333_333_325_618_43,
            -0.166_666_666_666_386_22,
        ];
        const COS: [f64; 4] = [
            -2.723_653_041_039_99e-7,
            2.479_990_498_162_388_8e-5,
            -0.001_388_888_552_743_908,
            0.041_666_666_647_784_685,
        ];
        let shifted = x.mul_add(std::f64::consts::FRAC_2_PI, MAGIC);
        let n = shifted - MAGIC;
        let r = n.mul_add(-HALF_PI[1], n.mul_add(-HALF_PI[0], x));
        let square = r * r;
        let (mut sin, mut cos) = (SIN[0], COS[0]);
        for &c in &SIN[1..] {
            sin = sin.mul_add(square, c);
        }
        for &c in &COS[1..] {
            cos = cos.mul_add(square, c);
        }
        let sin = (r * square).mul_add(sin, r);
        let cos = (square * square).mul_add(cos, square.mul_add(-0.5, 1.0));
        (sin, cos, shifted.to_bits() as i32)
    }

    #[inline(always)]
    pub(super) fn sin(x: f32) -> f32 {
        let (sin, cos, n) = quarter(f64::from(x));
        let y = if n & 1 == 0 { sin } else { cos };
        let y = (if n & 2 == 0 { y } else { -y }) as f32;
        // The polynomial loses the sign of −0.
        if x == 0.0 { x } else { y }
    }

    #[inline(always)]
    pub(super) fn cos(x: f32) -> f32 {
        let (sin, cos, n) = quarter(f64::from(x));
        let y = if n & 1 == 0 { cos } else { sin };
        (if n.wrapping_add(1) & 2 == 0 { y } else { -y }) as f32
    }

    #[inline(always)]
    pub(super) fn tan(x: f32) -> f32 {
        let (sin, cos, n) = quarter(f64::from(x));
        let y = if n & 1 == 0 { sin / cos } else { -cos / sin } as f32;
        if x == 0.0 { x } else { y }
    }

    #[inline(always)]
    pub(super) fn tanh(x: f32) -> f32 {
        let size = x.abs();
        let square = x * x;
        let near = (x * square).mul_add(polynomial(&TANH, square), x);
        let (r, n) = reduce(if size > 10.0 { 20.0 } else { 2.0 * size });
        let power = power_of_2(n);
        let far = 1.0 - 2.0 / (power.mul_add(exp_less_1(r), power) + 1.0);
        // Of −0 the sum in `near` is 0.
        (if size < 0.6 { near } else { far }).copysign(x)
    }

    #[inline(always)]
    pub(super) fn erf(x: f32) -> f32 {
        let size = x.abs();
        let near = x.mul_add(polynomial(&ERF, x * x), x);
        let (r, n) = reduce(-polynomial(&ERFC, if size > 4.0 { 4.0 } else { size }));
        let far = 1.0 - (1.0 + exp_less_1(r)) * power_of_2(n);
        if size < 0.92 { near } else { far.copysign(x) }
    }

    /// `a / (1 + e^−|v|)`, and where `is_left` times e^−|v|: `(r, n)` is −|v| reduced, which is at least −112. What sum, product
    /// and quotient lose is put back, and the power of 2 comes last, before which nothing is subnormal.
    #[inline(always)]
    fn logistic(a: f32, is_left: bool, (r, n): (f32, i32)) -> f32 {
        let p = exp_less_1(r);
        let m = 1.0 + p;
        let m_lost = p - (m - 1.0);
        // Beside 1 it is 0 long before 2^n is subnormal.
        let power = power_of_2(if n < -64 { -64 } else { n });
        let below = m.mul_add(power, 1.0);
        let below_lost = m_lost.mul_add(power, m.mul_add(power, 1.0 - below));
        let (b, b_lost) = if is_left { (m, m_lost) } else { (1.0, 0.0) };
        let above = a * b;
        let above_lost = a.mul_add(b_lost, a.mul_add(b, -above));
        let w = 1.0 / below;
        let q = above * w;
        let rest = q.mul_add(-below, above) + q.mul_add(-below_lost, above_lost);
        let y = rest.mul_add(w, q);
        if is_left { scale_down(y, n) } else { y }
    }

    #[inline(always)]
    pub(super) fn sigmoid(x: f32) -> f32 {
        logistic(1.0, x < 0.0, reduce(-between(0.0, x.abs(), 110.0)))
    }

    /// `x / (1 + e^−v)` for a v of x's sign.
    #[inline(always)]
    fn times_sigmoid(x: f32, reduced: (f32, i32)) -> f32 {
        let y = logistic(if x < -112.0 { -112.0 } else { x }, x < 0.0, reduced);
        // Of ∞ nothing is lost, and −∞ is ∞ · 0 by definition.
        let edge = if x < 0.0 { f32::NAN } else { x };
        // Its sign is x's, that of −0 too.
        if x.abs() == f32::INFINITY { edge } else { y.copysign(x) }
    }

    #[inline(always)]
    pub(super) fn silu(x: f32) -> f32 {
        times_sigmoid(x, reduce(-between(0.0, x.abs(), 112.0)))
    }

    #[inline(always)]
    pub(super) fn gelu_tanh(x: f32) -> f32 {
        // v = 2 · √(2/π) · (x + 0.044715 · x³) to many digits: e^v has the error of v, not its relative error.
        const LINEAR: f64 = 1.595_769_121_605_731;
        const CUBIC: f64 = 0.044_715 * LINEAR;
        let wide = f64::from(x);
        let v = -(wide * (wide * wide).mul_add(CUBIC, LINEAR)).abs();
        let v = if v < -112.0 { -112.0 } else { v };
        let (n, steps) = nearest((v * std::f64::consts::LOG2_E) as f32);
        let r = f64::from(n).mul_add(-std::f64::consts::LN_2, v) as f32;
        times_sigmoid(x, (r, steps))
    }

    #[inline(always)]
    pub(super) fn gelu(x: f32) -> f32 {
        const K: f32 = 2.0;
        let size = x.abs();
        let t = if size < 14.7 { size } else { 14.7 };
        // e^(−t²/2) without what t² and the reduction lose, which comes last.
        let square = t * t;
        let (n, steps) = nearest(square * (-0.5 * std::f32::consts::LOG2_E));
        let r = n.mul_add(-LN_2[0], -0.5 * square);
        let r_lost = n.mul_add(-LN_2[1], -0.5 * t.mul_add(t, -square));
        let (square, rest) = (r * r, polynomial(&EXP, r));
        let p = square.mul_add(rest, r);
        let p_lost = square.mul_add(rest, r - p);
        // t / (t + 2), with what the sum and the quotient lose.
        let below = t + K;
        let w = 1.0 / below;
        let u = t * w;
        let lost = t - (below - K);
        let u_lost = u.mul_add(-lost, u.mul_add(-below, t)) * w;
        // R(t), and times 1 + p.
        let q = w.mul_add(-2.0 * K, 1.0);
        let rest = polynomial(&GELU, q);
        let sum = rest.mul_add(q, GELU_LAST[0]);
        let sum_lost = rest.mul_add(q, GELU_LAST[0] - sum) + GELU_LOST[0];
        let part = sum.mul_add(q, GELU_LAST[1]);
        let part_lost = sum_lost.mul_add(q, sum.mul_add(q, GELU_LAST[1] - part) + GELU_LOST[1]);
        let y = p.mul_add(part, part);
        let y_lost = p.mul_add(part, part - y) + p_lost.mul_add(part, part_lost);
        let h = u.mul_add(y, u.mul_add(r_lost.mul_add(y, y_lost), u_lost * y));
        let h = scale_down(h, steps);
        let y = if x < 0.0 { -h } else { x - h };
        // By definition ∞ · 0.
        if x == f32::NEG_INFINITY { f32::NAN } else { y }
    }

    /// `2^z` as a number near 1 and its power of 2.
    #[inline(always)]
    fn short_exp2(z: f32) -> (f32, i32) {
        let (whole, n) = nearest(z);
        (polynomial(&SHORT_EXP2, z - whole), n)
    }

    /// `max(x, 0) − h`, and NaN at −∞, which is ∞ · 0 by definition.
    #[inline(always)]
    fn less_below(x: f32, h: f32) -> f32 {
        let y = if x < 0.0 { -h } else { x - h };
        if x == f32::NEG_INFINITY { f32::NAN } else { y }
    }

    #[inline(always)]
    pub(super) fn short_gelu(x: f32) -> f32 {
        let size = x.abs();
        let t = if size < 14.0 { size } else { 14.0 };
        let (m, n) = short_exp2(polynomial(&LOG2_PHI, t));
        less_below(x, scale_down(t * m, n))
    }

    /// `x / (1 + 2^−w)` for a w of x's sign, given −|w| and |x|, the former at least −160.
    #[inline(always)]
    fn short_times_logistic(x: f32, t: f32, z: f32) -> f32 {
        let (m, n) = short_exp2(z);
        // Beside 1 it is 0 long before 2^n is subnormal.
        let below = m.mul_add(power_of_2(if n < -64 { -64 } else { n }), 1.0);
        less_below(x, scale_down(t * m / below, n))
    }

    #[inline(always)]
    pub(super) fn short_silu(x: f32) -> f32 {
        let size = x.abs();
        let t = if size < 110.0 { size } else { 110.0 };
        short_times_logistic(x, t, t * -std::f32::consts::LOG2_E)
    }

    #[inline(always)]
    pub(super) fn short_gelu_tanh(x: f32) -> f32 {
        // w = 2 · √(2/π) · log2 e · (x + 0.044715 · x³).
        const LINEAR: f32 = 2.302_208_2;
        const CUBIC: f32 = 0.102_943_24;
        let size = x.abs();
        let t = if size < 10.7 { size } else { 10.7 };
        short_times_logistic(x, t, t * (t * t).mul_add(-CUBIC, -LINEAR))
    }
}
