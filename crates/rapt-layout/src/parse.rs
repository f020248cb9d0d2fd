//! The usual notation, read.
//!
//! ```text
//! tuple    = integer | "(" [tuple {"," tuple}] [","] ")"            integer: 12, -3, or CuTe's static _12
//! layout   = tuple [":" tuple]                                      without strides: compact, first mode fastest
//! swizzle  = ("Sw" | "Swizzle") "<" integer "," integer "," integer ">"
//! composed = [swizzle ("o" | "∘") [integer ("o" | "∘")]] layout      offset 0 if left out
//! tiler    = "<" tiler {"," tiler} ">" | "_" | layout               "<4:1,_,8>": by mode; "_" leaves a mode whole
//! coord    = integer | "_" | "(" coord {"," coord} ")"
//! ```
//! Blanks may stand between words. A mistake is an [`Error::Notation`] with its position; nothing here panics.

use std::str::FromStr;

use crate::composed::ComposedLayout;
use crate::error::{Error, Result};
use crate::int_tuple::{IntTuple, MAX_DEPTH};
use crate::layout::Layout;
use crate::slice::Coord;
use crate::swizzle::Swizzle;
use crate::tiler::Tiler;

struct Reader<'a> {
    text: &'a str,
    chars: Vec<char>,
    at: usize,
    depth: usize,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Self {
        Reader { text, chars: text.chars().collect(), at: 0, depth: 0 }
    }

    fn peek(&mut self) -> Option<char> {
        while self.chars.get(self.at).is_some_and(|c| c.is_whitespace()) {
            self.at += 1;
        }
        self.chars.get(self.at).copied()
    }

    fn takes(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        self.at += usize::from(found);
        found
    }

    fn takes_compose(&mut self) -> bool {
        self.takes('∘') || self.takes('o')
    }

    fn wants(&mut self, wanted: char, expected: &'static str) -> Result<()> {
        if self.takes(wanted) { Ok(()) } else { Err(self.refuse(expected)) }
    }

    fn refuse(&mut self, expected: &'static str) -> Error {
        let found = self.peek().map_or("the end".to_owned(), |c| format!("{c:?}"));
        Error::Notation { text: shortened(self.text), position: self.at, expected, found }
    }

    fn end<T>(mut self, value: T) -> Result<T> {
        if self.peek().is_none() { Ok(value) } else { Err(self.refuse("the end")) }
    }

    /// One level deeper, back up after `read`.
    fn nested<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth == MAX_DEPTH {
            return Err(self.refuse("at most 32 levels of nesting"));
        }
        self.depth += 1;
        let value = read(self)?;
        self.depth -= 1;
        Ok(value)
    }

    /// Items up to `close`; the bracket before them is read. Whether a comma ended them comes second.
    fn items<T>(
        &mut self,
        close: char,
        expected: &'static str,
        mut item: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<(Vec<T>, bool)> {
        let mut items = Vec::new();
        loop {
            if self.takes(close) {
                return Ok((items, true));
            }
            items.push(item(self)?);
            if self.takes(close) {
                return Ok((items, false));
            }
            self.wants(',', expected)?;
        }
    }

    fn integer(&mut self) -> Result<i64> {
        let is_negative = self.takes('-');
        if !is_negative && self.peek() == Some('_') && self.chars.get(self.at + 1).is_some_and(char::is_ascii_digit) {
            self.at += 1;
        }
        self.peek();
        let start = self.at;
        while self.chars.get(self.at).is_some_and(char::is_ascii_digit) {
            self.at += 1;
        }
        let digits: String = self.chars[start..self.at].iter().collect();
        if digits.is_empty() {
            return Err(self.refuse("an integer or \"(\""));
        }
        let number: Result<i64, _> = digits.parse();
        let Ok(number) = number else {
            self.at = start;
            return Err(self.refuse("a number below 2^62"));
        };
        Ok(if is_negative { -number } else { number })
    }

    fn tuple(&mut self) -> Result<IntTuple> {
        if !self.takes('(') {
            return self.integer().map(IntTuple::Int);
        }
        let (mut items, has_comma) = self.nested(|reader| reader.items(')', "\",\" or \")\"", Reader::tuple))?;
        match items.len() {
            0 => {
                self.at -= 1;
                Err(self.refuse("at least one mode"))
            }
            // "(4)" is the number in brackets, "(4,)" the tuple.
            1 if !has_comma => Ok(items.remove(0)),
            _ => Ok(IntTuple::Tuple(items)),
        }
    }

    fn layout(&mut self) -> Result<Layout> {
        let shape = self.tuple()?;
        if self.takes(':') { Layout::new(shape, self.tuple()?) } else { Layout::column_major(shape) }
    }

    fn swizzle(&mut self) -> Result<Swizzle> {
        self.peek();
        let rest: String = self.chars[self.at..].iter().take(7).collect();
        let word = ["Swizzle", "Sw"].into_iter().find(|word| rest.starts_with(word));
        let Some(word) = word else { return Err(self.refuse("\"Sw<bits,base,shift>\"")) };
        self.at += word.len();
        self.wants('<', "\"<\"")?;
        let bits = self.integer()?;
        self.wants(',', "\",\"")?;
        let base = self.integer()?;
        self.wants(',', "\",\"")?;
        let shift = self.integer()?;
        self.wants('>', "\">\"")?;
        Swizzle::new(bits, base, shift)
    }

    fn composed(&mut self) -> Result<ComposedLayout> {
        if self.peek() != Some('S') {
            return Ok(self.layout()?.into());
        }
        let swizzle = self.swizzle()?;
        if !self.takes_compose() {
            return Err(self.refuse("\"o\" and a layout"));
        }
        let start = self.at;
        // An integer is an offset only if a layout follows it: "Sw<3,4,3> o 64" swizzles the layout 64:1.
        if let Ok(offset) = self.integer()
            && self.takes_compose()
        {
            return ComposedLayout::new(swizzle, offset, self.layout()?);
        }
        self.at = start;
        ComposedLayout::new(swizzle, 0, self.layout()?)
    }

    fn tiler(&mut self) -> Result<Tiler> {
        if self.takes('<') {
            let (items, _) = self.nested(|reader| reader.items('>', "\",\" or \">\"", Reader::tiler))?;
            return Ok(Tiler::ByMode(items));
        }
        if self.peek() == Some('_') && !self.chars.get(self.at + 1).is_some_and(char::is_ascii_digit) {
            self.at += 1;
            return Ok(Tiler::Whole);
        }
        self.layout().map(Tiler::Layout)
    }

    fn coord(&mut self) -> Result<Coord> {
        if self.takes('(') {
            let (items, _) = self.nested(|reader| reader.items(')', "\",\" or \")\"", Reader::coord))?;
            return Ok(Coord::Tuple(items));
        }
        if self.peek() == Some('_') && !self.chars.get(self.at + 1).is_some_and(char::is_ascii_digit) {
            self.at += 1;
            return Ok(Coord::All);
        }
        self.integer().map(Coord::At)
    }
}

/// A text of an error message: its first characters.
fn shortened(text: &str) -> String {
    if text.chars().count() > 120 { text.chars().take(117).chain("...".chars()).collect() } else { text.to_owned() }
}

macro_rules! from_notation {
    ($($kind:ty: $read:ident),+) => { $(
        impl FromStr for $kind {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                let mut reader = Reader::new(text);
                let value = reader.$read()?;
                reader.end(value)
            }
        }
    )+ };
}

from_notation!(IntTuple: tuple, Layout: layout, Swizzle: swizzle, ComposedLayout: composed, Tiler: tiler, Coord: coord);

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expect: &str) {
        let layout: ComposedLayout = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(layout.to_string(), expect);
        assert_eq!(expect.parse::<ComposedLayout>().unwrap(), layout, "reads back");
    }

    #[test]
    fn the_notation_is_read_and_printed() {
        check("((128,128),1,1):((65536,1),0,0)", "((128,128),1,1):((65536,1),0,0)");
        check(" ( _4 , ( _2 , 3 ) ) : ( _1 , ( 8 , _4 ) ) ", "(4,(2,3)):(1,(8,4))");
        check("(4,8)", "(4,8):(1,4)");
        check("(4)", "4:1");
        check("(4,):(2,)", "(4,):(2,)");
        check("4:-1", "4:-1");
        check("Sw<3,4,3> o (8,64):(64,1)", "Sw<3,4,3> o 0 o (8,64):(64,1)");
        check("Swizzle<2,4,3> ∘ _16 ∘ 8:1", "Sw<2,4,3> o 16 o 8:1");
        check("Sw<1,4,3> o 64", "Sw<1,4,3> o 0 o 64:1");
    }

    #[test]
    fn mistakes_have_a_position() {
        let check = |text: &str, at: usize, expect: &str| {
            let error = text.parse::<ComposedLayout>().unwrap_err();
            let Error::Notation { position, expected, .. } = &error else { panic!("{text}: {error}") };
            assert_eq!((*position, *expected), (at, expect), "{text}: {error}");
        };
        check("", 0, "an integer or \"(\"");
        check("(4,x):(1,2)", 3, "an integer or \"(\"");
        check("(4,8:(1,4)", 4, "\",\" or \")\"");
        check("()", 1, "at least one mode");
        check("4:1 junk", 4, "the end");
        check("(4,8):", 6, "an integer or \"(\"");
        check("99999999999999999999:1", 0, "a number below 2^62");
        check("Sw<3,4>", 6, "\",\"");
        check("Sx<3,4,3> o 4", 0, "\"Sw<bits,base,shift>\"");
        check("Sw<3,4,3> 4", 10, "\"o\" and a layout");
        let deep = "(".repeat(100_000);
        check(&deep, 33, "at most 32 levels of nesting");
        assert!("(4,8):(1,4,2)".parse::<Layout>().is_err_and(|e| matches!(e, Error::NotCongruent { .. })));
        assert!("0:1".parse::<Layout>().is_err_and(|e| matches!(e, Error::Extent { .. })));
        assert!("Sw<3,4,2>".parse::<Swizzle>().is_err_and(|e| matches!(e, Error::Swizzle { .. })));
    }

    #[test]
    fn tilers_and_coordinates() {
        assert_eq!("<3:4, _, <2,8>>".parse::<Tiler>().unwrap().to_string(), "<3:4,_,<2:1,8:1>>");
        assert_eq!("(_,(3,_))".parse::<Coord>().unwrap().to_string(), "(_,(3,_))");
        assert_eq!("_3".parse::<Coord>().unwrap(), Coord::At(3), "a static integer, not a blank");
        assert!("<3:4".parse::<Tiler>().is_err() && "(_".parse::<Coord>().is_err());
    }
}
