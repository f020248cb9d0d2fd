//! Whole numbers as tables print them.

use std::fmt::Display;

/// `n`, rounded to a whole number that is not negative, in groups of three digits: `1,234,567`.
pub(crate) fn thousands(n: impl Display) -> String {
    let digits = format!("{n:.0}");
    let mut out = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.char_indices() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped_from_the_right() {
        for (n, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(thousands(n), text);
            assert_eq!(thousands(f64::from(n)), text);
        }
        assert_eq!(thousands(u128::MAX), "340,282,366,920,938,463,463,374,607,431,768,211,455");
    }
}
