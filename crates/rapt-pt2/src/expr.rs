//! The expressions of shapes: integers, reals and conditions over symbols, parsed once, evaluated in checked arithmetic.
//!
//! Integers are exact: a value beyond 64 bits is an error. Reals are f64, rounded after each operation, as Python
//! computes them: torch uses them only for sizes such as `trunc(1.5*n)`.
//!
//! Deliberately absent: simplification. Two expressions are equal if they were written equal.

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
    /// The absolute value.
    Abs(Box<Expr>),
    /// A real, rounded to an integer.
    Round(Rounding, Box<Real>),
    /// The second where the first holds, else the third.
    Where(Box<Condition>, Box<Expr>, Box<Expr>),
    /// 1 where a tensor of these sizes and strides has no gaps and no element twice in memory, else 0: the sizes stand
    /// in the first half.
    Dense(Vec<Expr>),
}

/// How a real becomes an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// Down.
    Floor,
    /// Up.
    Ceil,
    /// Towards zero.
    Trunc,
    /// To the nearest, ties to even.
    Nearest,
}

/// A real expression over symbols.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Real {
    /// A number, by its bits.
    Number(u64),
    /// An integer, rounded to f64.
    Int(Expr),
    /// The sum, from the left.
    Add(Vec<Real>),
    /// The product, from the left.
    Mul(Vec<Real>),
    /// The quotient.
    Div(Box<Real>, Box<Real>),
}

/// A condition over symbols.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Condition {
    /// True or false.
    Known(bool),
    /// Whether two integers compare so.
    Int(Relation, Expr, Expr),
    /// Whether two reals compare so.
    Real(Relation, Real, Real),
    /// Whether all hold.
    And(Vec<Condition>),
    /// Whether any holds.
    Or(Vec<Condition>),
    /// Whether it does not hold.
    Not(Box<Condition>),
}

/// A comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Relation {
    /// `==`
    Equal,
    /// `!=`
    Unequal,
    /// `<`
    Less,
    /// `<=`
    LessEqual,
    /// `>`
    Greater,
    /// `>=`
    GreaterEqual,
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

/// Why a text is no expression.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ParseError {
    /// It is longer than any that is read.
    #[error("an expression of {bytes} bytes; at most {limit} are read")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// It is nested deeper than any that is read.
    #[error("an expression nested deeper than {limit}: {}", start(.text))]
    TooDeep {
        /// The limit.
        limit: usize,
        /// The text.
        text: String,
    },
    /// It does not follow the grammar.
    #[error("byte {at} of {:?} is not understood", start(.text))]
    Syntax {
        /// Where what is not understood ends.
        at: usize,
        /// The text.
        text: String,
    },
    /// A number that does not fit 64 bits.
    #[error("{} does not fit 64 bits", start(.text))]
    Number {
        /// The number.
        text: String,
    },
    /// A form that is not served where it stands.
    #[error("{form} is not served as {wanted}")]
    Form {
        /// The form.
        form: String,
        /// What should stand there.
        wanted: &'static str,
    },
}

/// The start of a text, for messages.
fn start(text: &str) -> String {
    let mut short: String = text.chars().take(120).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

impl Expr {
    /// The value for these symbols.
    ///
    /// # Errors
    /// [`ExprError`] for a symbol without a value, a value beyond 64 bits, a division by zero.
    pub fn eval(&self, symbols: &Symbols) -> Result<i64, ExprError> {
        let overflow = || ExprError::Overflow(self.to_string());
        let zero = || ExprError::ZeroDivision(self.to_string());
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
            Expr::Abs(a) => a.eval(symbols)?.checked_abs().ok_or_else(overflow)?,
            Expr::Round(rounding, real) => rounding.round(real.eval(symbols)?).ok_or_else(overflow)?,
            Expr::Where(condition, yes, no) => {
                if condition.eval(symbols)? {
                    yes.eval(symbols)?
                } else {
                    no.eval(symbols)?
                }
            }
            Expr::Dense(parts) => i64::from(dense(parts, symbols)?),
        })
    }

    /// The value where no symbol occurs, or `None`.
    #[must_use]
    pub fn constant(&self) -> Option<i64> {
        self.eval(&Symbols::new()).ok()
    }

    /// Calls `visit` with every symbol, as often as it occurs.
    pub fn each_symbol<'a>(&'a self, visit: &mut dyn FnMut(&'a str)) {
        match self {
            Expr::Int(_) => {}
            Expr::Symbol(name) => visit(name),
            Expr::Add(terms) | Expr::Mul(terms) | Expr::Min(terms) | Expr::Max(terms) | Expr::Dense(terms) => {
                terms.iter().for_each(|term| term.each_symbol(visit));
            }
            Expr::Pow(a, b) | Expr::FloorDiv(a, b) | Expr::Mod(a, b) => {
                a.each_symbol(visit);
                b.each_symbol(visit);
            }
            Expr::Abs(a) => a.each_symbol(visit),
            Expr::Round(_, real) => real.each_symbol(visit),
            Expr::Where(condition, yes, no) => {
                condition.each_symbol(visit);
                yes.each_symbol(visit);
                no.each_symbol(visit);
            }
        }
    }
}

fn bound(terms: &[Expr], symbols: &Symbols, pick: fn(i64, i64) -> i64) -> Result<i64, ExprError> {
    let mut values = terms.iter().map(|t| t.eval(symbols));
    let first = values.next().unwrap_or(Ok(0))?;
    values.try_fold(first, |best, value| Ok(pick(best, value?)))
}

/// Whether sizes (the first half of `parts`) and strides have neither gaps nor overlap, as
/// `torch.fx.experimental.symbolic_shapes.eval_is_non_overlapping_and_dense` defines it.
fn dense(parts: &[Expr], symbols: &Symbols) -> Result<bool, ExprError> {
    let values = parts.iter().map(|part| part.eval(symbols)).collect::<Result<Vec<i64>, _>>()?;
    let (sizes, strides) = values.split_at(values.len() / 2);
    if let ([size], [stride]) = (sizes, strides) {
        return Ok(*stride == 1 || *size < 2);
    }
    let mut dims: Vec<(i64, i64)> = strides.iter().copied().zip(sizes.iter().copied()).collect();
    dims.sort_unstable();
    let mut expected = 1i64;
    for (stride, size) in dims {
        if size == 1 {
            continue;
        }
        if stride != expected {
            return Ok(false);
        }
        expected = expected.checked_mul(size).ok_or_else(|| ExprError::Overflow("a number of elements".to_owned()))?;
    }
    Ok(true)
}

impl Rounding {
    /// `real` as an integer, if 64 bits hold it.
    fn round(self, real: f64) -> Option<i64> {
        let rounded = match self {
            Rounding::Floor => real.floor(),
            Rounding::Ceil => real.ceil(),
            Rounding::Trunc => real.trunc(),
            Rounding::Nearest => real.round_ties_even(),
        };
        // 2^63 is a float; the greatest integer of 64 bits is not.
        let limit = 9_223_372_036_854_775_808.0;
        (-limit..limit).contains(&rounded).then_some(rounded as i64)
    }
}

impl Real {
    /// The value for these symbols.
    ///
    /// # Errors
    /// As [`Expr::eval`].
    pub fn eval(&self, symbols: &Symbols) -> Result<f64, ExprError> {
        Ok(match self {
            Real::Number(bits) => f64::from_bits(*bits),
            Real::Int(expr) => expr.eval(symbols)? as f64,
            Real::Add(terms) => terms.iter().try_fold(0.0, |sum, term| Ok(sum + term.eval(symbols)?))?,
            Real::Mul(terms) => terms.iter().try_fold(1.0, |product, term| Ok(product * term.eval(symbols)?))?,
            Real::Div(a, b) => {
                let (a, b) = (a.eval(symbols)?, b.eval(symbols)?);
                if b == 0.0 {
                    return Err(ExprError::ZeroDivision(self.to_string()));
                }
                a / b
            }
        })
    }

    /// Calls `visit` with every symbol, as often as it occurs.
    pub fn each_symbol<'a>(&'a self, visit: &mut dyn FnMut(&'a str)) {
        match self {
            Real::Number(_) => {}
            Real::Int(expr) => expr.each_symbol(visit),
            Real::Add(terms) | Real::Mul(terms) => terms.iter().for_each(|term| term.each_symbol(visit)),
            Real::Div(a, b) => {
                a.each_symbol(visit);
                b.each_symbol(visit);
            }
        }
    }
}

impl Condition {
    /// Whether it holds for these symbols. `and` and `or` stop where Python's do.
    ///
    /// # Errors
    /// As [`Expr::eval`].
    pub fn eval(&self, symbols: &Symbols) -> Result<bool, ExprError> {
        Ok(match self {
            Condition::Known(known) => *known,
            Condition::Int(relation, a, b) => relation.holds(&a.eval(symbols)?, &b.eval(symbols)?),
            Condition::Real(relation, a, b) => relation.holds(&a.eval(symbols)?, &b.eval(symbols)?),
            Condition::And(parts) => {
                for part in parts {
                    if !part.eval(symbols)? {
                        return Ok(false);
                    }
                }
                true
            }
            Condition::Or(parts) => {
                for part in parts {
                    if part.eval(symbols)? {
                        return Ok(true);
                    }
                }
                false
            }
            Condition::Not(part) => !part.eval(symbols)?,
        })
    }

    /// Calls `visit` with every symbol, as often as it occurs.
    pub fn each_symbol<'a>(&'a self, visit: &mut dyn FnMut(&'a str)) {
        match self {
            Condition::Known(_) => {}
            Condition::Int(_, a, b) => {
                a.each_symbol(visit);
                b.each_symbol(visit);
            }
            Condition::Real(_, a, b) => {
                a.each_symbol(visit);
                b.each_symbol(visit);
            }
            Condition::And(parts) | Condition::Or(parts) => parts.iter().for_each(|part| part.each_symbol(visit)),
            Condition::Not(part) => part.each_symbol(visit),
        }
    }
}

impl Relation {
    fn holds<T: PartialOrd>(self, a: &T, b: &T) -> bool {
        match self {
            Relation::Equal => a == b,
            Relation::Unequal => a != b,
            Relation::Less => a < b,
            Relation::LessEqual => a <= b,
            Relation::Greater => a > b,
            Relation::GreaterEqual => a >= b,
        }
    }

    /// As Python writes it.
    #[must_use]
    pub fn sign(self) -> &'static str {
        match self {
            Relation::Equal => "==",
            Relation::Unequal => "!=",
            Relation::Less => "<",
            Relation::LessEqual => "<=",
            Relation::Greater => ">",
            Relation::GreaterEqual => ">=",
        }
    }
}
