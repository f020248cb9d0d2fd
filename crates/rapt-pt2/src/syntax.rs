//! The syntax that shapes and guards are written in: Python's expressions, without names that bind.
//!
//! torch writes expressions of shapes as sympy's `srepr`, `Mul(Integer(4), Symbol('s27', positive=True, integer=True))`,
//! or in older files as its `str`, `4*s27`, and guards as Python, `L['x'].size()[1] % 8 == 0`. One grammar covers all:
//!
//! ```text
//! or      := and ('or' and)*            product := unary (('*' | '/' | '//' | '%') unary)*
//! and     := not ('and' not)*           unary   := '-' unary | power
//! not     := 'not' not | compare        power   := postfix ('**' unary)?
//! compare := sum (op sum)?              postfix := atom ('(' args ')' | '[' or ']' | '.' name)*
//! sum     := product (('+' | '-') product)*      atom := number | text | name | '(' or ')'
//! ```
//!
//! Nothing is evaluated here. Text and depth are bounded, so that no text makes the parser slow or deep.

use crate::ParseError;

/// The longest text that is parsed, in bytes.
pub(crate) const MAX_TEXT_BYTES: usize = 1 << 16;
/// The deepest nesting of brackets: what bounds the parser's recursion.
const MAX_DEPTH: usize = 64;
/// The highest tree: what bounds the recursion of all that walks it. A chain such as `a // b // c` is high, a sum is not.
const MAX_HEIGHT: usize = 256;

/// A syntax tree. Texts are slices of what was parsed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Ast<'a> {
    /// An integer.
    Int(i64),
    /// A number with a point or an exponent.
    Float(f64),
    /// A text in quotes, without escapes.
    Text(&'a str),
    /// A name.
    Name(&'a str),
    /// `base.name`.
    Attribute(Box<Ast<'a>>, &'a str),
    /// `base[index]`.
    Index(Box<Ast<'a>>, Box<Ast<'a>>),
    /// `callee(arguments)`. Keyword arguments are dropped: sympy's are assumptions on a symbol.
    Call(Box<Ast<'a>>, Vec<Ast<'a>>),
    /// `-operand`.
    Negate(Box<Ast<'a>>),
    /// `not operand`.
    Not(Box<Ast<'a>>),
    /// The sum of two or more.
    Sum(Vec<Ast<'a>>),
    /// `left operator right`.
    Binary(&'static str, Box<Ast<'a>>, Box<Ast<'a>>),
    /// Operands joined by `and` (true) or `or` (false).
    Logic(bool, Vec<Ast<'a>>),
}

/// The operators, longest first.
const OPERATORS: [&str; 22] = [
    "**", "//", "==", "!=", "<=", ">=", "<<", ">>", "+", "-", "*", "/", "%", "<", ">", "(", ")", "[", "]", ".", ",",
    "=",
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Token<'a> {
    Int(i64),
    Float(f64),
    Text(&'a str),
    Name(&'a str),
    Op(&'static str),
    End,
}

/// A parser of one text: what is next, and what follows it.
struct Parser<'a> {
    text: &'a str,
    /// Where what follows `next` starts.
    at: usize,
    next: Token<'a>,
    depth: usize,
    /// The height of the tree that was returned last.
    height: usize,
}

/// The syntax tree of `text`.
pub(crate) fn parse(text: &str) -> Result<Ast<'_>, ParseError> {
    if text.len() > MAX_TEXT_BYTES {
        return Err(ParseError::TooLong { bytes: text.len(), limit: MAX_TEXT_BYTES });
    }
    let mut parser = Parser { text, at: 0, next: Token::End, depth: 0, height: 0 };
    parser.advance()?;
    let tree = parser.or()?;
    match parser.next {
        Token::End => Ok(tree),
        _ => Err(parser.unexpected()),
    }
}

impl<'a> Parser<'a> {
    fn unexpected(&self) -> ParseError {
        ParseError::Syntax { at: self.at.min(self.text.len()), text: self.text.to_owned() }
    }

    /// Reads the next token.
    fn advance(&mut self) -> Result<(), ParseError> {
        let rest = self.text[self.at..].trim_start();
        self.at = self.text.len() - rest.len();
        let Some(first) = rest.chars().next() else {
            self.next = Token::End;
            return Ok(());
        };
        let (token, bytes) = if first.is_ascii_digit() {
            self.number(rest)?
        } else if first.is_ascii_alphabetic() || first == '_' {
            let bytes = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            (Token::Name(&rest[..bytes]), bytes)
        } else if first == '\'' || first == '"' {
            let bytes = rest[1..].find(first).ok_or_else(|| self.unexpected())?;
            let text = &rest[1..=bytes];
            if text.contains('\\') {
                return Err(self.unexpected());
            }
            (Token::Text(text), bytes + 2)
        } else {
            let op = OPERATORS.into_iter().find(|op| rest.starts_with(op)).ok_or_else(|| self.unexpected())?;
            (Token::Op(op), op.len())
        };
        self.next = token;
        self.at += bytes;
        Ok(())
    }

    fn number(&self, rest: &str) -> Result<(Token<'a>, usize), ParseError> {
        let digits = |from: usize| from + rest[from..].bytes().take_while(u8::is_ascii_digit).count();
        let whole = digits(0);
        let mut end = whole;
        if rest[end..].starts_with('.') {
            end = digits(end + 1);
        }
        if rest[end..].starts_with(['e', 'E']) {
            let sign = usize::from(rest[end + 1..].starts_with(['+', '-']));
            let exponent = digits(end + 1 + sign);
            if exponent > end + 1 + sign {
                end = exponent;
            }
        }
        let text = &rest[..end];
        if end == whole {
            let number = text.parse().map_err(|_| ParseError::Number { text: text.to_owned() })?;
            return Ok((Token::Int(number), end));
        }
        let number = text.parse().ok().filter(|number: &f64| number.is_finite());
        let number = number.ok_or_else(|| ParseError::Number { text: text.to_owned() })?;
        Ok((Token::Float(number), end))
    }

    /// Steps over `op` if it is next.
    fn accept(&mut self, op: &str) -> Result<bool, ParseError> {
        let found = matches!(self.next, Token::Op(next) if next == op) || self.next == Token::Name(op);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    fn expect(&mut self, op: &str) -> Result<(), ParseError> {
        if self.accept(op)? { Ok(()) } else { Err(self.unexpected()) }
    }

    /// Which of `ops` is next, stepped over.
    fn accept_any(&mut self, ops: &[&'static str]) -> Result<Option<&'static str>, ParseError> {
        for op in ops {
            if self.accept(op)? {
                return Ok(Some(op));
            }
        }
        Ok(None)
    }

    fn too_deep(&self, limit: usize) -> ParseError {
        ParseError::TooDeep { limit, text: self.text.to_owned() }
    }

    /// Runs `part` one level deeper.
    fn nested(&mut self, part: fn(&mut Self) -> Result<Ast<'a>, ParseError>) -> Result<Ast<'a>, ParseError> {
        if self.depth == MAX_DEPTH {
            return Err(self.too_deep(MAX_DEPTH));
        }
        self.depth += 1;
        let tree = part(self)?;
        self.depth -= 1;
        Ok(tree)
    }

    /// Notes that a tree was put above others, the highest of which has `height`.
    fn above(&mut self, height: usize) -> Result<(), ParseError> {
        if height == MAX_HEIGHT {
            return Err(self.too_deep(MAX_HEIGHT));
        }
        self.height = height + 1;
        Ok(())
    }

    fn or(&mut self) -> Result<Ast<'a>, ParseError> {
        self.logic("or", Self::and)
    }

    fn and(&mut self) -> Result<Ast<'a>, ParseError> {
        self.logic("and", Self::not)
    }

    fn logic(&mut self, word: &str, part: fn(&mut Self) -> Result<Ast<'a>, ParseError>) -> Result<Ast<'a>, ParseError> {
        let first = part(self)?;
        if self.next != Token::Name(word) {
            return Ok(first);
        }
        let mut height = self.height;
        let mut operands = vec![first];
        while self.accept(word)? {
            operands.push(part(self)?);
            height = height.max(self.height);
        }
        self.above(height)?;
        Ok(Ast::Logic(word == "and", operands))
    }

    fn not(&mut self) -> Result<Ast<'a>, ParseError> {
        if self.accept("not")? {
            let operand = self.nested(Self::not)?;
            self.above(self.height)?;
            return Ok(Ast::Not(Box::new(operand)));
        }
        let left = self.sum()?;
        let height = self.height;
        let Some(op) = self.accept_any(&["==", "!=", "<=", ">=", "<", ">"])? else { return Ok(left) };
        let right = self.sum()?;
        self.above(height.max(self.height))?;
        Ok(Ast::Binary(op, Box::new(left), Box::new(right)))
    }

    fn sum(&mut self) -> Result<Ast<'a>, ParseError> {
        let first = self.product()?;
        let mut height = self.height;
        let mut terms = vec![first];
        while let Some(op) = self.accept_any(&["+", "-"])? {
            let term = self.product()?;
            let negative = op == "-";
            height = height.max(self.height + usize::from(negative));
            terms.push(if negative { Ast::Negate(Box::new(term)) } else { term });
        }
        match terms.len() {
            1 => Ok(terms.remove(0)),
            _ => {
                self.above(height)?;
                Ok(Ast::Sum(terms))
            }
        }
    }

    fn product(&mut self) -> Result<Ast<'a>, ParseError> {
        let mut tree = self.unary()?;
        while let Some(op) = self.accept_any(&["*", "//", "/", "%"])? {
            let height = self.height;
            let right = self.unary()?;
            self.above(height.max(self.height))?;
            tree = Ast::Binary(op, Box::new(tree), Box::new(right));
        }
        Ok(tree)
    }

    fn unary(&mut self) -> Result<Ast<'a>, ParseError> {
        if self.accept("-")? {
            let operand = self.nested(Self::unary)?;
            self.above(self.height)?;
            return Ok(Ast::Negate(Box::new(operand)));
        }
        let base = self.postfix()?;
        let height = self.height;
        if !self.accept("**")? {
            return Ok(base);
        }
        let exponent = self.nested(Self::unary)?;
        self.above(height.max(self.height))?;
        Ok(Ast::Binary("**", Box::new(base), Box::new(exponent)))
    }

    fn postfix(&mut self) -> Result<Ast<'a>, ParseError> {
        let mut tree = self.atom()?;
        while let Some(op) = self.accept_any(&["(", "[", "."])? {
            let height = self.height;
            tree = match op {
                "(" => Ast::Call(Box::new(tree), self.arguments()?),
                "[" => {
                    let index = self.nested(Self::or)?;
                    self.expect("]")?;
                    Ast::Index(Box::new(tree), Box::new(index))
                }
                _ => {
                    let Token::Name(name) = self.next else { return Err(self.unexpected()) };
                    self.advance()?;
                    Ast::Attribute(Box::new(tree), name)
                }
            };
            self.above(height.max(self.height))?;
        }
        Ok(tree)
    }

    /// The arguments of a call, after its opening bracket.
    fn arguments(&mut self) -> Result<Vec<Ast<'a>>, ParseError> {
        let mut arguments = Vec::new();
        let mut height = 0;
        loop {
            if self.accept(")")? {
                break;
            }
            let argument = self.nested(Self::or)?;
            height = height.max(self.height);
            if self.accept("=")? {
                self.nested(Self::or)?;
            } else {
                arguments.push(argument);
            }
            if !self.accept(",")? {
                self.expect(")")?;
                break;
            }
        }
        self.height = height;
        Ok(arguments)
    }

    fn atom(&mut self) -> Result<Ast<'a>, ParseError> {
        self.height = 1;
        let tree = match self.next {
            Token::Int(number) => Ast::Int(number),
            Token::Float(number) => Ast::Float(number),
            Token::Text(text) => Ast::Text(text),
            Token::Name(name) => Ast::Name(name),
            Token::Op("(") => {
                self.advance()?;
                let tree = self.nested(Self::or)?;
                self.expect(")")?;
                return Ok(tree);
            }
            Token::Op(_) | Token::End => return Err(self.unexpected()),
        };
        self.advance()?;
        Ok(tree)
    }
}
