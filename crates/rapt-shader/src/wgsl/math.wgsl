// Functions whose error WGSL leaves to the driver (that of exp(x) may be 3 + 2·|x| units in the last place), by the polynomials of Cephes: at
// most 2 units each. Four numbers at once, one of each row of a thread. Deliberately absent: arguments that are not finite (numbers.wgsl).

const LOG2_E: f32 = 1.44269504;
// ln 2 in two parts: the first has 9 bits, so that its product with an exponent is exact.
const LN_2_HIGH: f32 = 0.693359375;
const LN_2_LOW: f32 = -2.12194440e-4;

fn all_four(x: f32) -> vec4<f32> { return vec4<f32>(x); }

// e^x of x ≤ 80; 0 below −87.7, where results leave the normal numbers.
fn exponential(x: vec4<f32>) -> vec4<f32> {
    let bounded = max(x, all_four(-88.0));
    // 1.5·2^23 leaves the nearest integer in the last bits of a sum.
    let count = bitcast<vec4<i32>>(fma(bounded, all_four(LOG2_E), all_four(12582912.0))) - 0x4b400000;
    let n = vec4<f32>(count);
    let r = fma(n, all_four(-LN_2_LOW), fma(n, all_four(-LN_2_HIGH), bounded));
    var sum = all_four(1.9875691500e-4);
    sum = fma(sum, r, all_four(1.3981999507e-3));
    sum = fma(sum, r, all_four(8.3334519073e-3));
    sum = fma(sum, r, all_four(4.1665795894e-2));
    sum = fma(sum, r, all_four(1.6666665459e-1));
    sum = fma(sum, r, all_four(5.0000001201e-1));
    // 0 where n is −127.
    let power = bitcast<vec4<f32>>(vec4<u32>(count + 127) << vec4<u32>(23u));
    return (fma(sum, r * r, r) + 1.0) * power;
}

// ln x of positive normal numbers.
fn logarithm(x: vec4<f32>) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(x);
    // x = m·2^n with m from √½ to √2.
    let n = vec4<i32>((bits + (0x3f800000u - 0x3f3504f3u)) >> vec4<u32>(23u)) - 127;
    let m = bitcast<vec4<f32>>(bits - (bitcast<vec4<u32>>(n) << vec4<u32>(23u))) - 1.0;
    let exponent = vec4<f32>(n);
    var sum = all_four(7.0376836292e-2);
    sum = fma(sum, m, all_four(-1.1514610310e-1));
    sum = fma(sum, m, all_four(1.1676998740e-1));
    sum = fma(sum, m, all_four(-1.2420140846e-1));
    sum = fma(sum, m, all_four(1.4249322787e-1));
    sum = fma(sum, m, all_four(-1.6668057665e-1));
    sum = fma(sum, m, all_four(2.0000714765e-1));
    sum = fma(sum, m, all_four(-2.4999993993e-1));
    sum = fma(sum, m, all_four(3.3333331174e-1));
    let square = m * m;
    let rest = fma(exponent, all_four(LN_2_LOW), sum * m * square) - 0.5 * square;
    return fma(exponent, all_four(LN_2_HIGH), m + rest);
}

fn hyperbolic_tangent(x: vec4<f32>) -> vec4<f32> {
    let square = x * x;
    var sum = all_four(-5.70498872745e-3);
    sum = fma(sum, square, all_four(2.06390887954e-2));
    sum = fma(sum, square, all_four(-5.37397155531e-2));
    sum = fma(sum, square, all_four(1.33314422036e-1));
    sum = fma(sum, square, all_four(-3.33332819422e-1));
    let near = fma(x * square, sum, x);
    let e = exponential(-2.0 * abs(x));
    let far = (1.0 - e) / (1.0 + e);
    return select(select(far, -far, x < all_four(0.0)), near, abs(x) < all_four(0.625));
}
