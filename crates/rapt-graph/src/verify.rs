//! The contract, executed: a graph bound to several values of its symbols when it is loaded.
//!
//! Forms are compared for numbers, not for expressions: what agrees for the sizes at export, the least sizes and some that are
//! odd agrees by structure and not by chance. Whoever runs the graph for other sizes binds it to those first, and the comparison
//! is made again ([`Graph::bind`]).

use rapt_pt2::{Symbol, Symbols};

use crate::{Error, Graph, OpError};

/// A way to choose a symbol's value.
type Choose = fn(&Symbol) -> i64;

const CHOICES: [Choose; 5] = [
    at_export,
    least,
    |symbol| within(symbol, at_export(symbol).saturating_add(1)),
    |symbol| within(symbol, at_export(symbol).saturating_mul(2)),
    // No multiple of what models are built of.
    |symbol| within(symbol, 37),
];

/// The sizes of the first binding: those at export.
pub(crate) fn at_export(symbol: &Symbol) -> i64 {
    symbol.hint.unwrap_or_else(|| least(symbol).saturating_add(6))
}

/// Tracing takes every size to be neither 0 nor 1, so that no program states what holds there.
fn least(symbol: &Symbol) -> i64 {
    symbol.min.max(2)
}

fn within(symbol: &Symbol, value: i64) -> i64 {
    value.max(least(symbol)).min(symbol.max.unwrap_or(i64::MAX))
}

impl Graph {
    /// Verifies the graph at several values of its symbols that satisfy the ranges and guards, and says at which. A graph without
    /// symbols is verified once.
    ///
    /// # Errors
    /// As [`Graph::bind`].
    pub fn verify(&self) -> Result<Vec<Symbols>, Error> {
        let mut verified: Vec<Symbols> = Vec::new();
        for choose in CHOICES {
            let symbols: Symbols = self.symbols.iter().map(|symbol| (symbol.name.clone(), choose(symbol))).collect();
            if verified.contains(&symbols) || !self.serves(&symbols)? {
                continue;
            }
            match self.bind(&symbols) {
                Ok(_) => verified.push(symbols),
                // The program itself asserts that it does not serve these sizes.
                Err(Error::Node { cause: OpError::Assertion { .. }, .. }) if !verified.is_empty() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(verified)
    }

    /// Whether inputs of the stated forms pass the ranges and guards.
    fn serves(&self, symbols: &Symbols) -> Result<bool, Error> {
        let given = self.stated_inputs(symbols)?;
        Ok(self.check_ranges(symbols).is_ok() && self.check_guards(&given).is_ok())
    }
}
