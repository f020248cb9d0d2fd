//! Expressions as text, in Python's notation, such as `2*s0 + 1`. An operand stands in brackets where it binds less tightly
//! than its place needs: a product in a product does, a product in a sum does not.

use std::fmt::{Display, Formatter, Result};

use crate::{Condition, Expr, Real, Rounding};

/// How tightly an expression binds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Binds {
    Sum,
    Product,
    Negative,
    Power,
    Atom,
}

/// Text that can be an operand.
trait Operand: Display {
    fn binds(&self) -> Binds;

    /// Writes this where what binds less tightly than `place` needs brackets.
    fn write(&self, place: Binds, f: &mut Formatter<'_>) -> Result {
        if self.binds() < place { write!(f, "({self})") } else { write!(f, "{self}") }
    }
}

impl Operand for Expr {
    fn binds(&self) -> Binds {
        match self {
            Expr::Add(_) => Binds::Sum,
            Expr::Mul(_) | Expr::FloorDiv(..) | Expr::Mod(..) => Binds::Product,
            Expr::Int(number) if *number < 0 => Binds::Negative,
            Expr::Pow(..) => Binds::Power,
            _ => Binds::Atom,
        }
    }
}

impl Operand for Real {
    fn binds(&self) -> Binds {
        match self {
            Real::Add(_) => Binds::Sum,
            Real::Mul(_) | Real::Div(..) => Binds::Product,
            Real::Number(bits) if f64::from_bits(*bits).is_sign_negative() => Binds::Negative,
            _ => Binds::Atom,
        }
    }
}

/// Writes `parts`, each at `place`, with `sign` between them.
fn join<T: Operand>(f: &mut Formatter<'_>, parts: &[T], sign: &str, place: Binds) -> Result {
    for (i, part) in parts.iter().enumerate() {
        if i > 0 {
            f.write_str(sign)?;
        }
        part.write(place, f)?;
    }
    Ok(())
}

/// Writes a call of `name`.
fn call(f: &mut Formatter<'_>, name: &str, parts: &[Expr]) -> Result {
    write!(f, "{name}(")?;
    join(f, parts, ", ", Binds::Sum)?;
    f.write_str(")")
}

impl Display for Expr {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let two = |f: &mut Formatter<'_>, a: &Expr, sign: &str, b: &Expr, place: Binds| {
            a.write(place, f)?;
            f.write_str(sign)?;
            b.write(place, f)
        };
        match self {
            Expr::Int(number) => write!(f, "{number}"),
            Expr::Symbol(name) => f.write_str(name),
            Expr::Add(terms) => join(f, terms, " + ", Binds::Product),
            Expr::Mul(factors) => join(f, factors, "*", Binds::Negative),
            Expr::Pow(base, exponent) => two(f, base, "**", exponent, Binds::Atom),
            Expr::FloorDiv(a, b) => two(f, a, " // ", b, Binds::Negative),
            Expr::Mod(a, b) => two(f, a, " % ", b, Binds::Negative),
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

impl Display for Real {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Real::Number(bits) => match f64::from_bits(*bits) {
                number if number == f64::INFINITY => f.write_str("math.inf"),
                number => write!(f, "{number:?}"),
            },
            Real::Int(expr) => write!(f, "torch.sym_float({expr})"),
            Real::Add(terms) => join(f, terms, " + ", Binds::Product),
            Real::Mul(factors) => join(f, factors, "*", Binds::Negative),
            Real::Div(a, b) => {
                a.write(Binds::Negative, f)?;
                f.write_str(" / ")?;
                b.write(Binds::Negative, f)
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

/// Writes `parts` with `word` between them.
fn logic(f: &mut Formatter<'_>, parts: &[Condition], word: &str) -> Result {
    for (i, part) in parts.iter().enumerate() {
        if i > 0 {
            f.write_str(word)?;
        }
        part.operand(f)?;
    }
    Ok(())
}

impl Display for Condition {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Condition::Known(known) => f.write_str(if *known { "True" } else { "False" }),
            Condition::Int(relation, a, b) => {
                write!(f, "{a} {} {b}", relation.sign())
            }
            Condition::Real(relation, a, b) => {
                write!(f, "{a} {} {b}", relation.sign())
            }
            Condition::And(parts) => logic(f, parts, " and "),
            Condition::Or(parts) => logic(f, parts, " or "),
            Condition::Not(part) => {
                f.write_str("not ")?;
                part.operand(f)
            }
        }
    }
}
