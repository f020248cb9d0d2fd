//! The integer expressions of shapes: sympy's text, parsed once, evaluated in checked arithmetic.

use std::collections::BTreeMap;

/// The values of symbols.
pub type Symbols = BTreeMap<String, i64>;

/// An integer expression over symbols.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Expr {
    /// A number.
    Int(i64),
    /// A symbol, by name.
    Symbol(String),
    /// The sum.
    Add(Vec<Expr>),
    /// The product.
    Mul(Vec<Expr>),
    /// Base and exponent; the exponent is not negative.
    Pow(Box<Expr>, Box<Expr>),
    /// The least.
    Min(Vec<Expr>),
    /// The greatest.
    Max(Vec<Expr>),
    /// The quotient, rounded down.
    FloorDiv(Box<Expr>, Box<Expr>),
    /// The remainder, with the divisor's sign.
    Mod(Box<Expr>, Box<Expr>),
}

/// Why an expression has no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExprError {
    /// A symbol without a value.
    #[error("symbol {0} has no value")]
    Unbound(String),
    /// The value does not fit 64 bits.
    #[error("the value of {0} does not fit 64 bits")]
    Overflow(String),
    /// Division by zero.
    #[error("{0} divides by zero")]
    ZeroDivision(String),
}

impl Expr {
    /// The value for these symbols.
    ///
    /// # Errors
    /// [`ExprError`] for a symbol without a value, a value beyond 64 bits, a division by zero.
    pub fn eval(&self, symbols: &Symbols) -> Result<i64, ExprError> {
        let overflow = || ExprError::Overflow(format!("{self:?}"));
        let zero = || ExprError::ZeroDivision(format!("{self:?}"));
        Ok(match self {
            Expr::Int(n) => *n,
            Expr::Symbol(name) => *symbols.get(name).ok_or_else(|| ExprError::Unbound(name.clone()))?,
            Expr::Add(terms) => {
                terms.iter().try_fold(0i64, |sum, t| sum.checked_add(t.eval(symbols)?).ok_or_else(overflow))?
            }
            Expr::Mul(terms) => {
                terms.iter().try_fold(1i64, |product, t| product.checked_mul(t.eval(symbols)?).ok_or_else(overflow))?
            }
            Expr::Pow(base, exponent) => {
                let exponent = u32::try_from(exponent.eval(symbols)?).map_err(|_| overflow())?;
                base.eval(symbols)?.checked_pow(exponent).ok_or_else(overflow)?
            }
            Expr::Min(terms) => bound(terms, symbols, i64::min)?,
            Expr::Max(terms) => bound(terms, symbols, i64::max)?,
            Expr::FloorDiv(a, b) => {
                let (a, b) = (a.eval(symbols)?, b.eval(symbols)?);
                if b == 0 {
                    return Err(zero());
                }
                let quotient = a.checked_div(b).ok_or_else(overflow)?;
                if a % b != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient }
            }
            Expr::Mod(a, b) => {
                let (a, b) = (a.eval(symbols)?, b.eval(symbols)?);
                if b == 0 {
                    return Err(zero());
                }
                let rest = a.wrapping_rem(b);
                if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }
            }
        })
    }
}

fn bound(terms: &[Expr], symbols: &Symbols, pick: fn(i64, i64) -> i64) -> Result<i64, ExprError> {
    let mut values = terms.iter().map(|t| t.eval(symbols));
    let first = values.next().unwrap_or(Ok(0))?;
    values.try_fold(first, |best, value| Ok(pick(best, value?)))
}
