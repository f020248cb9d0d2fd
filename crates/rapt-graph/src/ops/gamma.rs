//! The incomplete gamma functions, regularized: `P(a, x) = γ(a, x) / Γ(a)` and `Q = 1 − P`.
//!
//! | where | how |
//! |---|---|
//! | a from 100 on, x near it | Temme's uniform expansion (DLMF 8.12) |
//! | a ≤ 1 and x ≤ 1.5 | the power series of Q (DLMF 8.7.3), so that a small Q keeps its digits |
//! | x < a + 1 | the power series of P (DLMF 8.11.4) |
//! | elsewhere | the continued fraction of Q (DLMF 8.9.2) |
//!
//! And the Hurwitz zeta function, of which the power series of log Γ is made.

use std::f64::consts::PI;
use std::sync::OnceLock;

/// `P(a, x)` and `Q(a, x)`, with PyTorch's verdicts at the ends, of which the first that applies counts: NaN below 0, 1 and 0 for a = 0,
/// 0 and 1 for x = 0 and for an infinite a, 1 and 0 for an infinite x; NaN where both are 0, or both infinite.
pub(super) fn incomplete(a: f64, x: f64) -> (f64, f64) {
    const NONE: (f64, f64) = (f64::NAN, f64::NAN);
    match (a, x) {
        (a, x) if a < 0.0 || x < 0.0 => return NONE,
        (0.0, x) => return if x > 0.0 { (1.0, 0.0) } else { NONE },
        (_, 0.0) => return (0.0, 1.0),
        (f64::INFINITY, x) => return if x == f64::INFINITY { NONE } else { (0.0, 1.0) },
        (_, f64::INFINITY) => return (1.0, 0.0),
        (a, x) if a.is_nan() || x.is_nan() => return NONE,
        _ => {}
    }
    if a >= 100.0 && half_square(a, x) < 0.5 {
        return uniform(a, x);
    }
    if a <= 1.0 && x <= 1.5 {
        return (series(a, x), series_of_rest(a, x));
    }
    if x < a + 1.0 {
        let p = series(a, x);
        return (p, 1.0 - p);
    }
    let q = fraction(a, x);
    (1.0 - q, q)
}

/// `η²/2 = u − ln(1 + u)` with `u = (x − a) / a`. Near 0 the series of the logarithm by `s = u / (2 + u)`, whose first term cancels.
fn half_square(a: f64, x: f64) -> f64 {
    let u = (x - a) / a;
    if u.abs() > 0.5 {
        return u - (x / a).ln();
    }
    let s = u / (2.0 + u);
    let square = s * s;
    // 30 terms: s² is at most 1/9.
    let rest = (1..30).rev().fold(0.0, |rest, k| (rest + 1.0 / f64::from(2 * k + 1)) * square);
    s * (u - 2.0 * rest)
}

/// `x^a e^(−x) / Γ(a + 1)`.
fn factor(a: f64, x: f64) -> f64 {
    if a < 10.0 {
        return x.powf(a) * (-x).exp() / libm::tgamma(a + 1.0);
    }
    let gamma = tables().stirling.iter().rev().fold(0.0, |sum, g| sum / a + g);
    (-a * half_square(a, x)).exp() / ((2.0 * PI * a).sqrt() * gamma)
}

// P = factor · Σ x^n / ((a + 1) … (a + n))
fn series(a: f64, x: f64) -> f64 {
    let (mut term, mut sum, mut n) = (1.0f64, 1.0f64, a);
    while term > sum * f64::EPSILON / 4.0 {
        n += 1.0;
        term *= x / n;
        sum += term;
    }
    factor(a, x) * sum
}

// Q = 1 − x^a / Γ(a + 1) · (1 + a Σ (−x)^n / ((a + n) n!))
fn series_of_rest(a: f64, x: f64) -> f64 {
    let (mut term, mut sum) = (1.0f64, 0.0f64);
    for n in 1..40 {
        term *= -x / f64::from(n);
        sum += term / (a + f64::from(n));
    }
    let log = a * x.ln() - lgamma_of_next(a);
    -log.exp_m1() - log.exp() * a * sum
}

/// The Bernoulli numbers B₂, B₄, ….
pub(super) const EVEN_BERNOULLI: [f64; 8] =
    [1.0 / 6.0, -1.0 / 30.0, 1.0 / 42.0, -1.0 / 30.0, 5.0 / 66.0, -691.0 / 2730.0, 7.0 / 6.0, -3617.0 / 510.0];

/// The Hurwitz zeta function by Euler and Maclaurin's formula (DLMF 25.11.28), with PyTorch's verdicts at its poles.
pub(super) fn zeta(x: f64, q: f64) -> f64 {
    if x == 1.0 {
        return f64::INFINITY;
    }
    if x < 1.0 || x.is_nan() || q.is_nan() {
        return f64::NAN;
    }
    if q <= 0.0 {
        if q == q.floor() {
            return f64::INFINITY;
        }
        if x != x.floor() {
            return f64::NAN;
        }
    }
    // Terms one by one until the formula for the rest is exact.
    let (mut a, mut sum, mut count) = (q, 0.0, 0);
    while a < 12.0 || count < 12 {
        sum += a.powf(-x);
        a += 1.0;
        count += 1;
        if count > 100_000 {
            return f64::NAN;
        }
    }
    let last = a.powf(-x);
    sum += last * a / (x - 1.0) + 0.5 * last;
    let (mut factor, mut power) = (x, last / a);
    let mut factorial = 2.0;
    for (k, b) in EVEN_BERNOULLI.iter().enumerate() {
        sum += b * factor * power / factorial;
        let n = 2.0 * k as f64 + 1.0;
        factor *= (x + n) * (x + n + 1.0);
        power /= a * a;
        factorial *= (n + 2.0) * (n + 3.0);
    }
    sum
}

/// `ln Γ(1 + a)`: near 0, where 1 + a has lost digits, its power series (DLMF 5.7.3).
fn lgamma_of_next(a: f64) -> f64 {
    if a > 0.2 {
        return libm::lgamma(1.0 + a);
    }
    const EULER: f64 = 0.577_215_664_901_532_9;
    let term = |k: i32| zeta(f64::from(k), 1.0) / f64::from(k);
    -a * ((2..30).rev().fold(0.0, |rest, k| (rest + term(k)) * -a) + EULER)
}

// Q = a · factor · 1 / (x + 1 − a − 1 (1 − a) / (x + 3 − a − 2 (2 − a) / (x + 5 − a − …)))
fn fraction(a: f64, x: f64) -> f64 {
    const TINY: f64 = 1e-300;
    let not_zero = |x: f64| if x.abs() < TINY { TINY } else { x };
    let mut b = x + 1.0 - a;
    let mut above = 1.0 / TINY;
    let mut below = 1.0 / not_zero(b);
    let mut value = below;
    for i in 1..10_000 {
        let n = f64::from(i);
        let part = -n * (n - a);
        b += 2.0;
        below = 1.0 / not_zero(part * below + b);
        above = not_zero(b + part / above);
        let step = below * above;
        value *= step;
        if (step - 1.0).abs() <= f64::EPSILON {
            break;
        }
    }
    a * factor(a, x) * value
}

// Q = ½ erfc(η √(a/2)) + R,  P = ½ erfc(−η √(a/2)) − R,  R = e^(−aη²/2) / √(2πa) · Σ c_k(η) a^(−k)
fn uniform(a: f64, x: f64) -> (f64, f64) {
    let half = half_square(a, x);
    let eta = (2.0 * half).sqrt().copysign(x - a);
    let at = |c: &Vec<f64>| c.iter().rev().fold(0.0, |sum, d| sum * eta + d);
    let sum = tables().temme.iter().rev().fold(0.0, |sum, c| sum / a + at(c));
    let rest = (-a * half).exp() / (2.0 * PI * a).sqrt() * sum;
    let size = (a * half).sqrt().copysign(x - a);
    (0.5 * libm::erfc(-size) - rest, 0.5 * libm::erfc(size) + rest)
}

/// Coefficients that their recurrences give.
struct Tables {
    /// Of `Γ(a) √(a / 2π) (e/a)^a`, by powers of 1/a (DLMF 5.11.3).
    stirling: Vec<f64>,
    /// Of `c_k(η)`, by powers of η (DLMF 8.12.10 to 8.12.12).
    temme: Vec<Vec<f64>>,
}

/// How many functions c_k are summed: at a = 100 the last is below 2⁻⁵³.
const ORDERS: usize = 8;
/// How many powers of η, whose series converge below 2√π; η is at most 1.
const POWERS: usize = 36;

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(|| {
        // DLMF 5.11.5 and 5.11.6: a_0 a_k + a_1 a_(k−1) / 2 + … + a_k a_0 / (k + 1) = a_(k−1) / k.
        let mut a = vec![0.5f64.sqrt()];
        for k in 1..=2 * ORDERS + 8 {
            let known: f64 = (1..k).map(|j| a[j] * a[k - j] / (j as f64 + 1.0)).sum();
            a.push((a[k - 1] / k as f64 - known) / (a[0] * (1.0 + 1.0 / (k as f64 + 1.0))));
        }
        // g_k = √2 · ½ (½ + 1) … (½ + k − 1) · a_(2k)
        let rising = |k: usize| (0..k).map(|j| j as f64 + 0.5).product::<f64>();
        let stirling: Vec<f64> = (0..ORDERS + 4).map(|k| 2f64.sqrt() * rising(k) * a[2 * k]).collect();
        // α_1 = 1, α_n = (α_(n−1) − Σ j α_j α_(n−j+1), j from 2 to n − 1) / (n + 1)
        let most = POWERS + 2 * ORDERS + 2;
        let mut alpha = vec![0.0, 1.0];
        for n in 2..=most {
            let known: f64 = (2..n).map(|j| j as f64 * alpha[j] * alpha[n - j + 1]).sum();
            alpha.push((alpha[n - 1] - known) / (n as f64 + 1.0));
        }
        // d_(0,0) = −1/3, d_(0,n) = (n + 2) α_(n+2), d_(k,n) = (−1)^k g_k d_(0,n) + (n + 2) d_(k−1,n+2)
        let first = |n: usize| if n == 0 { -1.0 / 3.0 } else { (n as f64 + 2.0) * alpha[n + 2] };
        let mut temme: Vec<Vec<f64>> = vec![(0..POWERS + 2 * ORDERS).map(first).collect()];
        for k in 1..ORDERS {
            let sign = if k % 2 == 0 { 1.0 } else { -1.0 };
            let before = &temme[k - 1];
            let one = |n: usize| sign * stirling[k] * temme[0][n] + (n as f64 + 2.0) * before[n + 2];
            let next = (0..before.len() - 2).map(one).collect();
            temme.push(next);
        }
        Tables { stirling, temme }
    })
}

#[cfg(test)]
mod tests {
    use super::{incomplete, tables};

    /// (a, x, P, Q) as the nearest float64, by mpmath with 60 digits.
    const KNOWN: [(f64, f64, f64, f64); 20] = [
        (0.5, 0.25, 0.5204998778130465, 0.4795001221869535),
        (1e-10, 0.5, 0.9999999999440227, 5.597735948054988e-11),
        (0.001, 0.001, 0.9936876467088603, 0.00631235329113971),
        (0.1, 1.4, 0.9868889124634398, 0.013111087536560258),
        (1.0, 1.5, 0.7768698398515702, 0.22313016014842982),
        (0.9, 30.0, 0.9999999999999378, 6.21192757285483e-14),
        (3.5, 0.01, 8.530580469428509e-9, 0.9999999914694195),
        (3.5, 4.0, 0.6674060974006921, 0.3325939025993078),
        (3.5, 9.0, 0.9880299976459704, 0.011970002354029551),
        (9.9, 10.8, 0.649220459150903, 0.350779540849097),
        (12.0, 4.0, 0.000915229147270063, 0.99908477085273),
        (12.0, 40.0, 0.9999999391579728, 6.084202717664e-8),
        (99.0, 97.0, 0.4329725478511744, 0.5670274521488256),
        (100.0, 100.0, 0.5132987982791487, 0.48670120172085135),
        (100.0, 150.0, 0.9999940754596646, 5.924540335483916e-6),
        (150.0, 75.0, 1.6815084004192066e-14, 0.9999999999999831),
        (1234.5, 1300.0, 0.9672385594939216, 0.03276144050607838),
        (1000000.0, 1003000.0, 0.9986382593537824, 0.0013617406462175915),
        (10000000000.0, 9999800000.0, 0.02274959203581455, 0.9772504079641855),
        (250.0, 900.0, 1.0, 5.889958789795745e-146),
    ];

    #[test]
    fn values_that_are_known() {
        for (a, x, p, q) in KNOWN {
            let (got_p, got_q) = incomplete(a, x);
            let near = |got: f64, known: f64, what: &str| {
                let off = (got - known).abs() / known;
                assert!(off <= 1e-14 * (1.0 + known.ln().abs()), "{what}({a}, {x}) is {got}, known {known}: {off:e}");
            };
            near(got_p, p, "P");
            near(got_q, q, "Q");
        }
    }

    #[test]
    fn the_ends_are_those_of_pytorch() {
        let infinite = f64::INFINITY;
        assert_eq!(incomplete(0.0, 1.0), (1.0, 0.0));
        assert_eq!(incomplete(2.0, 0.0), (0.0, 1.0));
        assert_eq!(incomplete(infinite, 3.0), (0.0, 1.0));
        assert_eq!(incomplete(3.0, infinite), (1.0, 0.0));
        assert_eq!(incomplete(f64::NAN, 0.0), (0.0, 1.0));
        for (a, x) in [(0.0, 0.0), (-1.0, 2.0), (2.0, -1.0), (infinite, infinite), (f64::NAN, 1.0), (1.0, f64::NAN)] {
            assert!(incomplete(a, x).0.is_nan() && incomplete(a, x).1.is_nan(), "{a}, {x}");
        }
    }

    #[test]
    fn coefficients_that_the_literature_states() {
        let tables = tables();
        let near = |got: f64, known: f64| assert!((got - known).abs() <= 1e-15, "{got}, known {known}");
        near(tables.stirling[1], 1.0 / 12.0);
        near(tables.stirling[3], -139.0 / 51840.0);
        near(tables.temme[0][1], 1.0 / 12.0);
        near(tables.temme[1][0], -1.0 / 540.0);
    }
}
