//! Expressions as text, in Python's notation. Every operand that is itself an operation stands in brackets.

use std::fmt::{Display, Formatter, Result};

use crate::{Condition, Expr, Real, Rounding};

/// Writes `parts` with `sign` between them.
fn join<T>(f: &mut Formatter<'_>, parts: &[T], sign: &str, part: fn(&T, &mut Formatter<'_>) -> Result) -> Result {
    for (i, one) in parts.iter().enumerate() {
        if i > 0 {
            f.write_str(sign)?;
        }
        part(one, f)?;
    }
    Ok(())
}

/// Writes a call of `name`.
fn call<T: Display>(f: &mut Formatter<'_>, name: &str, parts: &[T]) -> Result {
    write!(f, "{name}(")?;
    join(f, parts, ", ", T::fmt)?;
    f.write_str(")")
}

impl Expr {
    /// Writes this as an operand.
    fn operand(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Expr::Int(number) if *number >= 0 => write!(f, "{number}"),
            Expr::Int(_) | Expr::Add(_) | Expr::Mul(_) | Expr::Pow(..) | Expr::FloorDiv(..) | Expr::Mod(..) => {
                write!(f, "({self})")
            }
            _ => write!(f, "{self}"),
        }
    }
}

impl Display for Expr {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let two = |f: &mut Formatter<'_>, a: &Expr, sign: &str, b: &Expr| {
            a.operand(f)?;
            f.write_str(sign)?;
            b.operand(f)
        };
        match self {
            Expr::Int(number) => write!(f, "{number}"),
            Expr::Symbol(name) => f.write_str(name),
            Expr::Add(terms) => join(f, terms, " + ", Expr::operand),
            Expr::Mul(factors) => join(f, factors, "*", Expr::operand),
            Expr::Pow(base, exponent) => two(f, base, "**", exponent),
            Expr::FloorDiv(a, b) => two(f, a, " // ", b),
            Expr::Mod(a, b) => two(f, a, " % ", b),
            Expr::Min(terms) => call(f, "min", terms),
            Expr::Max(terms) => call(f, "max", terms),
            Expr::Abs(a) => write!(f, "abs({a})"),
            Expr::Round(Rounding::Floor, real) => write!(f, "math.floor({real})"),
            Expr::Round(Rounding::Ceil, real) => write!(f, "math.ceil({real})"),
            Expr::Round(Rounding::Trunc, real) => write!(f, "math.trunc({real})"),
            Expr::Round(Rounding::Nearest, real) => write!(f, "round({real})"),
            Expr::Where(condition, yes, no) => write!(f, "Where({condition}, {yes}, {no})"),
            Expr::Dense(parts) => call(f, "IsNonOverlappingAndDenseIndicator", parts),
        }
    }
}

impl Real {
    /// Writes this as an operand.
    fn operand(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Real::Number(bits) if f64::from_bits(*bits).is_sign_positive() => write!(f, "{self}"),
            Real::Int(_) => write!(f, "{self}"),
            _ => write!(f, "({self})"),
        }
    }
}

impl Display for Real {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Real::Number(bits) => match f64::from_bits(*bits) {
                number if number == f64::INFINITY => f.write_str("math.inf"),
                number => write!(f, "{number:?}"),
            },
            Real::Int(expr) => write!(f, "torch.sym_float({expr})"),
            Real::Add(terms) => join(f, terms, " + ", Real::operand),
            Real::Mul(factors) => join(f, factors, "*", Real::operand),
            Real::Div(a, b) => {
                a.operand(f)?;
                f.write_str(" / ")?;
                b.operand(f)
            }
        }
    }
}

impl Condition {
    /// Writes this as an operand.
    fn operand(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Condition::Known(_) => write!(f, "{self}"),
            _ => write!(f, "({self})"),
        }
    }
}

impl Display for Condition {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Condition::Known(known) => f.write_str(if *known { "True" } else { "False" }),
            Condition::Int(relation, a, b) => {
                a.operand(f)?;
                write!(f, " {} ", relation.sign())?;
                b.operand(f)
            }
            Condition::Real(relation, a, b) => {
                a.operand(f)?;
                write!(f, " {} ", relation.sign())?;
                b.operand(f)
            }
            Condition::And(parts) => join(f, parts, " and ", Condition::operand),
            Condition::Or(parts) => join(f, parts, " or ", Condition::operand),
            Condition::Not(part) => {
                f.write_str("not ")?;
                part.operand(f)
            }
        }
    }
}
