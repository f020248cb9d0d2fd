//! From syntax to expressions: which names and calls mean what.
//!
//! The calls are sympy's classes and those of `torch.utils._sympy.functions`, as `srepr` writes them, and the Python
//! functions that torch's guard printer writes. What torch can emit only for floats beyond sizes (roots, sines, powers of
//! reals) is refused by name.

use crate::syntax::Ast;
use crate::{Condition, Expr, ParseError, Real, Relation, Rounding};

/// What a name outside calls may be.
pub(crate) enum Names<'a> {
    /// Symbols, written `Symbol('s0')` or bare.
    Symbols,
    /// Parts of the inputs, written `L['x'].size()[0]`, each of which becomes a symbol of the name that this gives it.
    Sources(&'a mut dyn FnMut(&Ast<'_>) -> Option<String>),
}

/// The expression that `text` is.
///
/// # Errors
/// [`ParseError`] for a text that is too long, too deep, does not parse, or has a form that is not served.
pub fn parse_expr(text: &str) -> Result<Expr, ParseError> {
    int(&crate::syntax::parse(text)?, &mut Names::Symbols)
}

/// The real expression that `text` is.
///
/// # Errors
/// As [`parse_expr`].
pub fn parse_real(text: &str) -> Result<Real, ParseError> {
    real(&crate::syntax::parse(text)?, &mut Names::Symbols)
}

/// The condition that `text` is.
///
/// # Errors
/// As [`parse_expr`].
pub fn parse_condition(text: &str) -> Result<Condition, ParseError> {
    condition(&crate::syntax::parse(text)?, &mut Names::Symbols)
}

/// The refusal of `tree` as `wanted`.
fn refuse(tree: &Ast<'_>, wanted: &'static str) -> ParseError {
    ParseError::Form { form: form(tree), wanted }
}

/// What a tree is, in a few words.
fn form(tree: &Ast<'_>) -> String {
    match tree {
        Ast::Int(number) => number.to_string(),
        Ast::Float(number) => number.to_string(),
        Ast::Text(text) => format!("'{text}'"),
        Ast::Name(name) => (*name).to_owned(),
        Ast::Attribute(base, name) => match &**base {
            Ast::Name(base) => format!("{base}.{name}"),
            _ => format!("….{name}"),
        },
        Ast::Index(base, _) => format!("{}[…]", form(base)),
        Ast::Call(callee, arguments) => format!("{}(…) of {} arguments", form(callee), arguments.len()),
        Ast::Negate(_) => "a negation".to_owned(),
        Ast::Not(_) => "not …".to_owned(),
        Ast::Sum(_) => "a sum".to_owned(),
        Ast::Binary(op, _, _) => format!("… {op} …"),
        Ast::Logic(all, _) => if *all { "… and …" } else { "… or …" }.to_owned(),
    }
}

/// The name of what is called, `module.function` included.
fn callee<'a>(tree: &Ast<'a>) -> Option<(&'a str, &'a str)> {
    match tree {
        Ast::Name(name) => Some(("", name)),
        Ast::Attribute(base, name) => match **base {
            Ast::Name(module @ ("torch" | "math")) => Some((module, name)),
            _ => None,
        },
        _ => None,
    }
}

type Lowered<T> = Result<T, ParseError>;

/// `lower` of each tree, in a list of that length: a list that grows would take twice the memory.
fn each<'a, T>(trees: &[Ast<'a>], mut lower: impl FnMut(&Ast<'a>) -> Lowered<T>) -> Lowered<Vec<T>> {
    let mut lowered = Vec::with_capacity(trees.len());
    for tree in trees {
        lowered.push(lower(tree)?);
    }
    Ok(lowered)
}

fn ints(trees: &[Ast<'_>], names: &mut Names<'_>) -> Lowered<Vec<Expr>> {
    each(trees, |tree| int(tree, names))
}

fn reals(trees: &[Ast<'_>], names: &mut Names<'_>) -> Lowered<Vec<Real>> {
    each(trees, |tree| real(tree, names))
}

/// `-expr`.
fn negated(expr: Expr) -> Expr {
    match expr {
        Expr::Int(number) if number != i64::MIN => Expr::Int(-number),
        expr => Expr::Mul(vec![Expr::Int(-1), expr]),
    }
}

/// The product, with products on its left taken in: `a*b*c` is one of three.
fn product(left: Expr, right: Expr) -> Expr {
    match left {
        Expr::Mul(mut factors) => {
            factors.push(right);
            Expr::Mul(factors)
        }
        left => Expr::Mul(vec![left, right]),
    }
}

/// The name that stands for `tree` in an expression, if it is a symbol or a source.
fn symbol(tree: &Ast<'_>, names: &mut Names<'_>) -> Option<Expr> {
    match (names, tree) {
        // Constants of sympy that are no integers, and truth values.
        (Names::Symbols, Ast::Name("oo" | "int_oo" | "zoo" | "nan" | "true" | "false" | "True" | "False")) => None,
        (Names::Symbols, Ast::Name(name)) => Some(Expr::Symbol((*name).to_owned())),
        (Names::Symbols, _) => None,
        (Names::Sources(find), tree) => find(tree).map(Expr::Symbol),
    }
}

/// `tree` as an integer.
pub(crate) fn int(tree: &Ast<'_>, names: &mut Names<'_>) -> Lowered<Expr> {
    if let Some(symbol) = symbol(tree, names) {
        return Ok(symbol);
    }
    match tree {
        Ast::Int(number) => Ok(Expr::Int(*number)),
        Ast::Negate(operand) => Ok(negated(int(operand, names)?)),
        Ast::Sum(terms) => Ok(Expr::Add(ints(terms, names)?)),
        Ast::Binary(op @ ("*" | "//" | "%" | "**"), left, right) => {
            let (left, right) = (int(left, names)?, int(right, names)?);
            Ok(match *op {
                "*" => product(left, right),
                "//" => Expr::FloorDiv(Box::new(left), Box::new(right)),
                "%" => Expr::Mod(Box::new(left), Box::new(right)),
                _ => Expr::Pow(Box::new(left), Box::new(right)),
            })
        }
        Ast::Call(function, arguments) => {
            let refusal = || refuse(tree, "an integer");
            int_call(callee(function).ok_or_else(refusal)?, arguments, names)?.ok_or_else(refusal)
        }
        _ => Err(refuse(tree, "an integer")),
    }
}

/// Whether `name` can stand in a text as a symbol.
fn is_identifier(name: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.chars().all(word) && name.starts_with(|c: char| !c.is_ascii_digit())
}

/// The call of `function` as an integer; `None` if it is not known with so many arguments.
fn int_call(function: (&str, &str), arguments: &[Ast<'_>], names: &mut Names<'_>) -> Lowered<Option<Expr>> {
    let two = |make: fn(Box<Expr>, Box<Expr>) -> Expr, names: &mut Names<'_>| {
        Ok(Some(make(Box::new(int(&arguments[0], names)?), Box::new(int(&arguments[1], names)?))))
    };
    let rounded =
        |rounding, names: &mut Names<'_>| Ok(Some(Expr::Round(rounding, Box::new(real(&arguments[0], names)?))));
    match (function, arguments) {
        (("", "Symbol"), [Ast::Text(name)]) if matches!(names, Names::Symbols) && is_identifier(name) => {
            Ok(Some(Expr::Symbol((*name).to_owned())))
        }
        (("", "Integer" | "Identity" | "int"), [argument]) => int(argument, names).map(Some),
        (("", "Add"), [_, _, ..]) => Ok(Some(Expr::Add(ints(arguments, names)?))),
        (("", "Mul"), [_, _, ..]) => Ok(Some(Expr::Mul(ints(arguments, names)?))),
        (("", "Min" | "min") | ("torch", "sym_min"), [_, _, ..]) => Ok(Some(Expr::Min(ints(arguments, names)?))),
        (("", "Max" | "max") | ("torch", "sym_max"), [_, _, ..]) => Ok(Some(Expr::Max(ints(arguments, names)?))),
        (("", "Pow" | "PowByNatural"), [_, _]) => two(Expr::Pow, names),
        (("", "FloorDiv" | "CleanDiv"), [_, _]) => two(Expr::FloorDiv, names),
        (("", "Mod" | "PythonMod"), [_, _]) => two(Expr::Mod, names),
        // ⌈a / b⌉ = -⌊-a / b⌋
        (("", "CeilDiv"), [_, _]) => two(|a, b| negated(Expr::FloorDiv(Box::new(negated(*a)), b)), names),
        (("", "LShift"), [_, _]) => two(|a, b| Expr::Mul(vec![*a, Expr::Pow(Box::new(Expr::Int(2)), b)]), names),
        (("", "RShift"), [_, _]) => {
            two(|a, b| Expr::FloorDiv(a, Box::new(Expr::Pow(Box::new(Expr::Int(2)), b))), names)
        }
        (("", "ModularIndexing"), [base, divisor, modulus]) => {
            let quotient = Expr::FloorDiv(Box::new(int(base, names)?), Box::new(int(divisor, names)?));
            Ok(Some(Expr::Mod(Box::new(quotient), Box::new(int(modulus, names)?))))
        }
        (("", "Abs" | "abs"), [argument]) => Ok(Some(Expr::Abs(Box::new(int(argument, names)?)))),
        (("", "Where"), [test, yes, no]) => {
            let test = Box::new(condition(test, names)?);
            Ok(Some(Expr::Where(test, Box::new(int(yes, names)?), Box::new(int(no, names)?))))
        }
        (("", "IsNonOverlappingAndDenseIndicator"), parts) if !parts.is_empty() && parts.len().is_multiple_of(2) => {
            Ok(Some(Expr::Dense(ints(parts, names)?)))
        }
        (("", "FloorToInt" | "floor") | ("math", "floor"), [_]) => rounded(Rounding::Floor, names),
        (("", "CeilToInt" | "ceiling") | ("math", "ceil"), [_]) => rounded(Rounding::Ceil, names),
        (("", "TruncToInt") | ("math", "trunc"), [_]) => rounded(Rounding::Trunc, names),
        (("", "RoundToInt" | "round"), [_]) => rounded(Rounding::Nearest, names),
        _ => Ok(None),
    }
}

/// `tree` as a real.
fn real(tree: &Ast<'_>, names: &mut Names<'_>) -> Lowered<Real> {
    let number = |number: f64| Ok(Real::Number(number.to_bits()));
    match tree {
        Ast::Float(value) => number(*value),
        Ast::Negate(operand) => Ok(Real::Mul(vec![Real::Number((-1f64).to_bits()), real(operand, names)?])),
        Ast::Sum(terms) => Ok(Real::Add(reals(terms, names)?)),
        Ast::Binary("*", left, right) => Ok(Real::Mul(vec![real(left, names)?, real(right, names)?])),
        Ast::Binary("/", left, right) => Ok(Real::Div(Box::new(real(left, names)?), Box::new(real(right, names)?))),
        Ast::Attribute(base, "inf") if **base == Ast::Name("math") => number(f64::INFINITY),
        Ast::Call(function, arguments) => match (callee(function), &arguments[..]) {
            (Some(("", "Float")), [Ast::Text(text)]) => match text.parse::<f64>() {
                Ok(value) if value.is_finite() => number(value),
                _ => Err(ParseError::Number { text: (*text).to_owned() }),
            },
            (Some(("", "ToFloat") | ("torch", "sym_float")), [argument]) => Ok(Real::Int(int(argument, names)?)),
            (Some(("", "Add")), [_, _, ..]) => Ok(Real::Add(reals(arguments, names)?)),
            (Some(("", "Mul")), [_, _, ..]) => Ok(Real::Mul(reals(arguments, names)?)),
            // Python divides two integers as if they were exact and rounds once; for integers below 2^53, which
            // sizes are, dividing their f64 values is the same.
            (Some(("", "IntTrueDiv" | "FloatTrueDiv")), [left, right]) => {
                Ok(Real::Div(Box::new(real(left, names)?), Box::new(real(right, names)?)))
            }
            _ => Ok(Real::Int(int(tree, names)?)),
        },
        _ => Ok(Real::Int(int(tree, names)?)),
    }
}

/// Whether arithmetic over `tree` is that of reals.
fn is_real(tree: &Ast<'_>) -> bool {
    match tree {
        Ast::Float(_) | Ast::Binary("/", _, _) => true,
        Ast::Attribute(base, "inf") => **base == Ast::Name("math"),
        Ast::Negate(operand) => is_real(operand),
        Ast::Sum(terms) => terms.iter().any(is_real),
        Ast::Binary("*", left, right) => is_real(left) || is_real(right),
        Ast::Call(function, arguments) => match callee(function) {
            Some(("", "Float" | "ToFloat" | "IntTrueDiv" | "FloatTrueDiv") | ("torch", "sym_float")) => true,
            Some(("", "Add" | "Mul")) => arguments.iter().any(is_real),
            _ => false,
        },
        _ => false,
    }
}

fn conditions(trees: &[Ast<'_>], names: &mut Names<'_>) -> Lowered<Vec<Condition>> {
    each(trees, |tree| condition(tree, names))
}

/// `tree` as a condition.
pub(crate) fn condition(tree: &Ast<'_>, names: &mut Names<'_>) -> Lowered<Condition> {
    match tree {
        Ast::Name("true" | "True") => Ok(Condition::Known(true)),
        Ast::Name("false" | "False") => Ok(Condition::Known(false)),
        Ast::Not(operand) => Ok(Condition::Not(Box::new(condition(operand, names)?))),
        Ast::Logic(true, parts) => Ok(Condition::And(conditions(parts, names)?)),
        Ast::Logic(false, parts) => Ok(Condition::Or(conditions(parts, names)?)),
        Ast::Binary(op, left, right) => match relation(op) {
            Some(relation) => compare(relation, left, right, names),
            None => Err(refuse(tree, "a condition")),
        },
        Ast::Call(function, arguments) => match (callee(function), &arguments[..]) {
            (Some(("", "And")), parts) => Ok(Condition::And(conditions(parts, names)?)),
            (Some(("", "Or")), parts) => Ok(Condition::Or(conditions(parts, names)?)),
            (Some(("", "Not")), [operand]) => Ok(Condition::Not(Box::new(condition(operand, names)?))),
            (Some(("", name)), [left, right]) => match relation(name) {
                Some(relation) => compare(relation, left, right, names),
                None => Err(refuse(tree, "a condition")),
            },
            _ => Err(refuse(tree, "a condition")),
        },
        _ => Err(refuse(tree, "a condition")),
    }
}

/// The comparison that an operator or a class of sympy stands for.
fn relation(name: &str) -> Option<Relation> {
    Some(match name {
        "==" | "Eq" | "Equality" => Relation::Equal,
        "!=" | "Ne" | "Unequality" => Relation::Unequal,
        "<" | "Lt" | "StrictLessThan" => Relation::Less,
        "<=" | "Le" | "LessThan" => Relation::LessEqual,
        ">" | "Gt" | "StrictGreaterThan" => Relation::Greater,
        ">=" | "Ge" | "GreaterThan" => Relation::GreaterEqual,
        _ => return None,
    })
}

fn compare(relation: Relation, left: &Ast<'_>, right: &Ast<'_>, names: &mut Names<'_>) -> Lowered<Condition> {
    if is_real(left) || is_real(right) {
        return Ok(Condition::Real(relation, real(left, names)?, real(right, names)?));
    }
    Ok(Condition::Int(relation, int(left, names)?, int(right, names)?))
}
