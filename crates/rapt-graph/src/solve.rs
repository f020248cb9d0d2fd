//! The symbols from the inputs' sizes, and every check of the inputs, before anything runs.
//!
//! A size that is a bare symbol determines it. A size that is linear in one symbol that is still unknown, such as `2*s0`,
//! determines it too. What remains must agree: every stated size is evaluated and compared.

use rapt_pt2::{Argument, Expr, InputValue, SymInt, Symbols};

use crate::bind::stated;
use crate::verify::at_export;
use crate::{Binding, Error, Fact, Graph, Input, Meta, Source, Type};

impl Graph {
    /// The inputs that the caller gives, in order; those fixed at export have a place among them.
    pub fn user_inputs(&self) -> impl Iterator<Item = &Input> {
        self.inputs.iter().filter(|input| matches!(input.source, Source::User | Source::Fixed(_)))
    }

    /// The symbols' values for these inputs, in the order of [`Graph::user_inputs`]. Dtypes, ranks, sizes, the symbols'
    /// ranges and the guards are checked. Strides are not ([`Graph::check_strides`]): guards see those that the program states,
    /// which every input has when the graph runs.
    ///
    /// # Errors
    /// [`Error::InputCount`], [`Error::InputKind`], [`Error::InputDtype`], [`Error::InputRank`], [`Error::InputSize`],
    /// [`Error::Unsolved`], [`Error::SymbolRange`], [`Error::Guard`], [`Error::Expr`].
    pub fn solve(&self, given: &[Fact]) -> Result<Symbols, Error> {
        let expected = self.user_inputs().count();
        if given.len() != expected {
            return Err(Error::InputCount { expected, got: given.len() });
        }
        let mut equations = Vec::new();
        for (input, fact) in self.user_inputs().zip(given) {
            self.check_kind(input, fact, &mut equations)?;
        }
        let mut symbols = Symbols::new();
        for Equation { expr, value, .. } in &equations {
            if let Expr::Symbol(name) = expr {
                symbols.entry(name.clone()).or_insert(*value);
            }
        }
        // Each pass solves at least one symbol, or is the last.
        while let Some((name, value)) = equations.iter().find_map(|equation| linear(equation, &symbols)) {
            symbols.insert(name, value);
        }
        for equation in &equations {
            equation.check(&symbols)?;
        }
        let sizes = symbols.clone();
        self.solve_strides(given, &mut symbols);
        self.check_ranges(&symbols)?;
        let fits = self.check_guards(&self.stated_inputs(&symbols)?);
        if fits.is_ok() || symbols.len() == sizes.len() {
            return fits.map(|()| symbols);
        }
        // Guards tell such a form from others, from a row-major one for instance: one that is like the export's.
        for more in 0..3 {
            let of_strides = self.symbols.iter().filter(|symbol| !sizes.contains_key(&symbol.name));
            let like = of_strides.map(|symbol| (symbol.name.clone(), at_export(symbol).saturating_add(more)));
            symbols.extend(like);
            let is_so =
                self.check_ranges(&symbols).is_ok() && self.check_guards(&self.stated_inputs(&symbols)?).is_ok();
            if is_so {
                return Ok(symbols);
            }
        }
        fits.map(|()| symbols)
    }

    /// The symbols that only strides and offsets have: the tracer makes one where an input with a dynamic size has gaps. They are
    /// those of the given strides, else what they were at export. A form that comes of it and into which no other numbers
    /// fit is row-major in the binding ([`Graph::with_inputs_laid_out`]).
    fn solve_strides(&self, given: &[Fact], symbols: &mut Symbols) {
        let (mut equations, mut names) = (Vec::new(), Vec::new());
        for (input, fact) in self.user_inputs().zip(given) {
            let (Some(id), Fact::Tensor(got)) = (input.value, fact) else { continue };
            let Type::Tensor(meta) = &self.value(id).ty else { continue };
            for (dim, (expr, &value)) in meta.strides.iter().zip(&got.strides).enumerate() {
                expr.each_symbol(&mut |symbol| names.push(symbol));
                // The stride of a dimension of size 1 leads nowhere.
                if got.shape[dim] > 1 {
                    equations.push(Equation { expr, value, name: &input.name, dim: Some(dim) });
                }
            }
            meta.storage_offset.each_symbol(&mut |symbol| names.push(symbol));
        }
        let admitted = |name: &str, value| self.symbols.iter().any(|known| known.name == name && known.admits(value));
        let next = |equation: &Equation<'_>, symbols: &Symbols| {
            linear(equation, symbols).filter(|(name, value)| admitted(name, *value))
        };
        while let Some((name, value)) = equations.iter().find_map(|equation| next(equation, symbols)) {
            symbols.insert(name, value);
        }
        for symbol in &self.symbols {
            if !symbols.contains_key(&symbol.name) && names.contains(&symbol.name.as_str()) {
                symbols.insert(symbol.name.clone(), at_export(symbol));
            }
        }
    }

    /// The inputs of the stated forms, for these symbols.
    pub(crate) fn stated_inputs(&self, symbols: &Symbols) -> Result<Vec<Fact>, Error> {
        let form = |input: &Input| {
            let failed = |cause| Error::Expr { value: input.name.clone(), cause };
            Ok(match (&input.source, input.value.map(|id| &self.value(id).ty)) {
                (Source::Fixed(argument), _) => fixed(argument).unwrap_or(Fact::None),
                (_, Some(Type::Tensor(meta))) => Fact::Tensor(stated(meta, symbols).map_err(failed)?),
                (_, Some(Type::Int(expr))) => Fact::Int(expr.eval(symbols).map_err(failed)?),
                _ => Fact::None,
            })
        };
        self.user_inputs().map(form).collect()
    }

    /// That every guard of the program holds.
    pub(crate) fn check_guards(&self, given: &[Fact]) -> Result<(), Error> {
        let values: Vec<InputValue<'_>> = given.iter().map(seen_by_guards).collect();
        for guard in &self.guards {
            guard.check(&values)?;
        }
        Ok(())
    }

    /// That tensors lie as the program states, in the order of [`Graph::user_inputs`]. Offsets are the caller's.
    ///
    /// # Errors
    /// [`Error::InputStrides`].
    pub fn check_strides(&self, binding: &Binding, given: &[Fact]) -> Result<(), Error> {
        for (input, fact) in self.user_inputs().zip(given) {
            let (Some(id), Fact::Tensor(got)) = (input.value, fact) else { continue };
            let Fact::Tensor(expected) = binding.fact(id) else { continue };
            if !expected.agrees(&Meta { offset: expected.offset, ..got.clone() }) {
                let (expected, got) = (expected.strides.clone(), got.strides.clone());
                return Err(Error::InputStrides { name: input.name.clone(), expected, got });
            }
        }
        Ok(())
    }

    fn check_kind<'a>(&'a self, input: &'a Input, fact: &Fact, equations: &mut Vec<Equation<'a>>) -> Result<(), Error> {
        let wrong =
            |expected: String| Err(Error::InputKind { name: input.name.clone(), expected, got: fact.to_string() });
        let name = input.name.as_str();
        let Some(id) = input.value else {
            let Source::Fixed(argument) = &input.source else { return Ok(()) };
            let fixed = match argument {
                // Graphs have no texts: who takes one from a caller has compared it.
                Argument::String(_) => Some(Fact::None),
                argument => fixed(argument),
            };
            return if fixed.as_ref() == Some(fact) {
                Ok(())
            } else {
                wrong(fixed.map_or("fixed".into(), |f| f.to_string()))
            };
        };
        match (&self.value(id).ty, fact) {
            (Type::Tensor(meta), Fact::Tensor(got)) => {
                if meta.dtype != got.dtype {
                    return Err(Error::InputDtype { name: name.into(), expected: meta.dtype, got: got.dtype });
                }
                if meta.sizes.len() != got.rank() {
                    let (expected, got) = (meta.sizes.len(), got.rank());
                    return Err(Error::InputRank { name: name.into(), expected, got });
                }
                let sizes = meta.sizes.iter().zip(&got.shape).enumerate();
                equations.extend(sizes.map(|(dim, (expr, &value))| Equation { expr, value, name, dim: Some(dim) }));
                Ok(())
            }
            (Type::Int(expr), Fact::Int(value)) => {
                equations.push(Equation { expr, value: *value, name, dim: None });
                Ok(())
            }
            (Type::Tensor(_), _) => wrong("a tensor".into()),
            (Type::Int(_), _) => wrong("an integer".into()),
            (Type::Bool(_) | Type::Float(_), _) => wrong("no symbolic float or boolean".into()),
        }
    }
}

/// What an argument that was fixed at export must be; `None` for kinds that graphs do not have.
pub(crate) fn fixed(argument: &Argument) -> Option<Fact> {
    Some(match argument {
        Argument::None => Fact::None,
        Argument::Int(n) | Argument::SymInt(SymInt::Int(n)) => Fact::Int(*n),
        Argument::Float(x) => Fact::Float(*x),
        Argument::Bool(b) => Fact::Bool(*b),
        _ => return None,
    })
}

fn seen_by_guards(fact: &Fact) -> InputValue<'_> {
    match fact {
        Fact::Tensor(Meta { shape, strides, offset, .. }) => {
            InputValue::Tensor { sizes: shape, strides, storage_offset: *offset }
        }
        Fact::Int(n) => InputValue::Int(*n),
        Fact::Float(_) | Fact::Bool(_) | Fact::None => InputValue::Other,
    }
}

/// A stated size, or integer, and what the caller gives.
struct Equation<'a> {
    expr: &'a Expr,
    value: i64,
    name: &'a str,
    /// The dimension; `None` for an integer.
    dim: Option<usize>,
}

impl Equation<'_> {
    fn check(&self, symbols: &Symbols) -> Result<(), Error> {
        let value = match self.expr.eval(symbols) {
            Ok(value) => value,
            Err(rapt_pt2::ExprError::Unbound(symbol)) => {
                return Err(match Line::of(self, symbols) {
                    Some(line) => self.wrong(format!("{} with a whole number {}", self.expr, line.symbol)),
                    None => Error::Unsolved(symbol),
                });
            }
            Err(cause) => return Err(Error::Expr { value: self.name.into(), cause }),
        };
        if value == self.value {
            return Ok(());
        }
        let expected = match self.expr {
            Expr::Int(n) => n.to_string(),
            expr => format!("{value}, which is {expr}"),
        };
        Err(self.wrong(expected))
    }

    fn wrong(&self, expected: String) -> Error {
        let name = self.name.to_owned();
        match self.dim {
            Some(dim) => Error::InputSize { name, dim, expected, got: self.value },
            None => Error::InputKind { name, expected: format!("the integer {expected}"), got: self.value.to_string() },
        }
    }
}

/// An expression that is `start + slope * symbol` of the one symbol that is unknown.
struct Line {
    symbol: String,
    start: i64,
    slope: i64,
}

impl Line {
    fn of(equation: &Equation<'_>, symbols: &Symbols) -> Option<Self> {
        let mut unknown = Vec::new();
        equation.expr.each_symbol(&mut |name| {
            if !symbols.contains_key(name) && !unknown.contains(&name) {
                unknown.push(name);
            }
        });
        let &[symbol] = unknown.as_slice() else { return None };
        let mut trial = symbols.clone();
        let mut at = |value: i64| {
            trial.insert(symbol.to_owned(), value);
            equation.expr.eval(&trial).ok()
        };
        let (start, one, two) = (at(0)?, at(1)?, at(2)?);
        let slope = one.checked_sub(start)?;
        (slope != 0 && two.checked_sub(one)? == slope).then(|| Self { symbol: symbol.to_owned(), start, slope })
    }
}

/// The one unknown symbol of an equation, and its value, where the expression is linear in it.
fn linear(equation: &Equation<'_>, symbols: &Symbols) -> Option<(String, i64)> {
    let line = Line::of(equation, symbols)?;
    let rest = equation.value.checked_sub(line.start)?;
    (rest.checked_rem(line.slope)? == 0).then(|| (line.symbol, rest / line.slope))
}
