//! Functions of float64, where the C library's may be less exact than docs/reference/numerics.md states.
//!
//! ```text
//! tanh         Rapt's own everywhere: glibc's is 2.0 units in the last place off at 0.2036258 (2026-11), this one below 0.9
//! the others   those of std, which are the C library's; libm's where that is MinGW's
//! ```
//! MinGW's of Debian 12 (2026-11-26): pow is 4 units in the last place off, fma rounds twice, sin of 7e12 has no right digit.

/// Functions of std's under the names of libm's.
macro_rules! functions {
    ($($(#[$text:meta])* $name:ident($($x:ident),*) = $of_std:path;)*) => {$(
        $(#[$text])*
        #[must_use]
        #[inline(always)]
        pub fn $name($($x: f64),*) -> f64 {
            #[cfg(all(windows, target_env = "gnu"))]
            return libm::$name($($x),*);
            #[cfg(not(all(windows, target_env = "gnu")))]
            $of_std($($x),*)
        }
    )*};
}

functions! {
    /// `e^x`.
    exp(x) = f64::exp;
    /// `2^x`.
    exp2(x) = f64::exp2;
    /// `e^x − 1`.
    expm1(x) = f64::exp_m1;
    /// The natural logarithm.
    log(x) = f64::ln;
    /// The logarithm to base 2.
    log2(x) = f64::log2;
    /// The logarithm to base 10.
    log10(x) = f64::log10;
    /// `log(1 + x)`.
    log1p(x) = f64::ln_1p;
    /// Of an angle in radians.
    sin(x) = f64::sin;
    /// Of an angle in radians.
    cos(x) = f64::cos;
    /// Of an angle in radians.
    tan(x) = f64::tan;
    /// `(e^x − e^−x) / 2`.
    sinh(x) = f64::sinh;
    /// `(e^x + e^−x) / 2`.
    cosh(x) = f64::cosh;
    /// The angle in radians.
    asin(x) = f64::asin;
    /// The angle in radians.
    acos(x) = f64::acos;
    /// The angle in radians.
    atan(x) = f64::atan;
    /// The angle in radians of the point (x, y).
    atan2(y, x) = f64::atan2;
    /// `√(x² + y²)`.
    hypot(x, y) = f64::hypot;
    /// `x^y`.
    pow(x, y) = f64::powf;
    /// `x · y + z`, rounded once. Where the processor's own instruction is known to be there, `f64::mul_add` is faster.
    fma(x, y, z) = f64::mul_add;
}

/// `tanh(x)` within one unit in the last place of the exact value.
///
/// Near 0 it is `x + x³·P(x²)/Q(x²)` with the polynomials of Cephes (Moshier); elsewhere `1 − 2 / (e^2x + 1)`, whose quotient and
/// difference keep what rounding leaves out, so that the error of `e^2x` is all that is left.
#[must_use]
pub fn tanh(x: f64) -> f64 {
    let size = x.abs();
    if size < 1e-9 {
        // x³/3 is less than a thousandth of a unit in the last place; and the sign of 0 stays.
        return x;
    }
    if size < 0.55 {
        let z = x * x;
        let p = (-9.643_991_794_250_522e-1 * z - 9.928_772_310_019_186e1) * z - 1.614_687_684_417_084_5e3;
        let q = ((z + 1.128_116_784_916_329_3e2) * z + 2.235_488_390_601_004_5e3) * z + 4.844_063_053_251_255e3;
        return x + x * (z * p / q);
    }
    if size >= 20.0 {
        // 1 − tanh(20) is a tenth of a unit in the last place.
        return 1f64.copysign(x);
    }
    let e = exp(2.0 * size);
    let sum = e + 1.0;
    let of_sum = 1.0 - (sum - e);
    let quotient = 2.0 / sum;
    let of_quotient = (residual(2.0, quotient, sum) - quotient * of_sum) / sum;
    let whole = 1.0 - quotient;
    let of_whole = (1.0 - whole) - quotient;
    (whole + (of_whole - of_quotient)).copysign(x)
}

/// `a − b·c`, where `b·c` is `a` but for rounding: the products of halves of 26 bits are exact (Dekker 1971).
fn residual(a: f64, b: f64, c: f64) -> f64 {
    let halves = |x: f64| {
        let scaled = 134_217_729.0 * x;
        let high = scaled - (scaled - x);
        (high, x - high)
    };
    let ((b_high, b_low), (c_high, c_low)) = (halves(b), halves(c));
    ((a - b_high * c_high) - b_high * c_low) - b_low * c_high - b_low * c_low
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Correctly rounded values, by mpmath.
    const EXACT: [(f64, f64); 12] = [
        (0.20362580184989554, 0.200857364488165),
        (0.499999, 0.46211637081191337),
        (0.5, 0.46211715726000974),
        (0.5000001, 0.4621172359047794),
        (0.55, 0.5005202111902353),
        (0.6251, 0.5546689604240068),
        (0.8813735870195429, 0.7071067811865475),
        (1.0, 0.7615941559557649),
        (1.7, 0.935409070603099),
        (3.25, 0.996997635486526),
        (9.0, 0.999999969540041),
        (19.061547, 0.9999999999999999),
    ];

    #[test]
    fn functions_are_within_a_unit_in_the_last_place() {
        // By mpmath, correctly rounded: where MinGW's are off, and one value of each other function.
        let exact: [(&str, f64, f64); 19] = [
            ("exp", exp(5.25), 190.56626845863),
            ("exp2", exp2(-3.3), 0.10153154954452945),
            ("expm1", expm1(1e-05), 1.0000050000166668e-05),
            ("log", log(0.2036258), -1.5914712832769764),
            ("log2", log2(7.3), 2.867896463992655),
            ("log10", log10(7.3), 0.8633228601204559),
            ("log1p", log1p(1e-05), 9.999950000333332e-06),
            ("sin", sin(7000000000000.0), 0.9940636748780816),
            ("sin", sin(std::f64::consts::PI), 1.2246467991473532e-16),
            ("cos", cos(1e+22), 0.523214785395139),
            ("tan", tan(7000000000000.0), -9.136626125333656),
            ("sinh", sinh(0.3), 0.3045202934471426),
            ("cosh", cosh(9.1), 4477.646407574159),
            ("asin", asin(0.7), 0.775397496610753),
            ("acos", acos(0.7), 0.7953988301841436),
            ("atan", atan(3.7), 1.3068326031691921),
            ("atan2", atan2(-1.5, -0.3), -1.7681918866447774),
            ("hypot", hypot(3.3, 4.7), 5.742821606144492),
            ("pow", pow(5.25, 5.25), 6037.2108360790135),
        ];
        for (name, got, exact) in exact {
            let away = got.to_bits().abs_diff(exact.to_bits());
            assert!(away <= 1, "{name}: {got:e}, rounded {exact:e}");
        }
        // The sum lies a hair above the middle of two numbers: rounded twice it is the lower one.
        assert_eq!(fma(f64::EPSILON / 2.0, 1.0 + f64::EPSILON, 1.0).to_bits(), (1.0 + f64::EPSILON).to_bits());
    }

    #[test]
    fn tanh_is_within_a_unit_in_the_last_place() {
        for (x, exact) in EXACT {
            for (x, exact) in [(x, exact), (-x, -exact)] {
                let got = tanh(x);
                let away = got.to_bits().abs_diff(exact.to_bits());
                assert!(away <= 1, "tanh({x:e}) = {got:e}, rounded {exact:e}");
            }
        }
        assert!(tanh(f64::NAN).is_nan());
        for (x, exact) in [(0.0f64, 0.0f64), (f64::INFINITY, 1.0), (5e-324, 5e-324), (1e-200, 1e-200), (700.0, 1.0)] {
            assert_eq!((tanh(x).to_bits(), tanh(-x).to_bits()), (exact.to_bits(), (-exact).to_bits()), "{x:e}");
        }
    }
}
