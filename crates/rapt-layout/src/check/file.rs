//! Checks from TOML. The form is described in docs/reference/layout.md; unknown keys are refused.

use serde::Deserialize;

use super::Check;
use super::side::{MOST_ELEMENTS, Order, Side, Source, Stored};
use crate::atlas::{Atom, Map};
use crate::composed::ComposedLayout;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::unit::Unit;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    check: Vec<RawCheck>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCheck {
    name: String,
    rows: i64,
    cols: i64,
    dtype: String,
    producer: RawSide,
    consumer: RawSide,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSide {
    about: Option<String>,
    rows: Option<i64>,
    cols: Option<i64>,
    dtype: Option<String>,
    atom: Option<String>,
    layout: Option<String>,
    compose: Option<String>,
    tv: Option<String>,
    by: Option<String>,
    unit: Option<String>,
    offset: Option<i64>,
    offset_unit: Option<String>,
    packed: Option<i64>,
    swizzle: Option<String>,
    order: Option<String>,
}

/// The checks of a file's text, in its order.
///
/// # Errors
/// [`Error::File`] with the place in the file; what is wrong with a layout, a unit, an atom or a dtype.
pub fn parse(text: &str) -> Result<Vec<Check>> {
    let file: File =
        toml::from_str(text).map_err(|error| Error::File { what: error.to_string().trim_end().to_owned() })?;
    if file.check.is_empty() {
        return Err(Error::File { what: "the file has no [[check]]".to_owned() });
    }
    file.check.into_iter().map(read).collect()
}

fn read(raw: RawCheck) -> Result<Check> {
    let producer = side(&raw, "producer", &raw.producer)?;
    let consumer = side(&raw, "consumer", &raw.consumer)?;
    Ok(Check { name: raw.name, producer, consumer })
}

fn side(check: &RawCheck, who: &str, raw: &RawSide) -> Result<Side> {
    let refuse = |what: &str| Error::File { what: format!("check {:?}, {who}: {what}", check.name) };
    let size = [raw.rows.unwrap_or(check.rows), raw.cols.unwrap_or(check.cols)];
    if size.iter().any(|n| !(1..=MOST_ELEMENTS).contains(n)) {
        return Err(refuse(&format!("rows and cols lie in 1 … {MOST_ELEMENTS}")));
    }
    let dtype: Dtype = raw.dtype.as_ref().unwrap_or(&check.dtype).parse()?;
    let unit = raw.unit.as_ref().map(|unit| unit.parse::<Unit>()).transpose()?;
    let offset_unit = raw.offset_unit.as_ref().map(|unit| unit.parse::<Unit>()).transpose()?;
    let mut side = match (&raw.layout, &raw.tv, &raw.atom) {
        (Some(layout), None, None) => {
            let unit = unit.ok_or_else(|| refuse("a layout needs its unit"))?;
            let mut layout: ComposedLayout = layout.parse()?;
            if let Some(inner) = &raw.compose {
                layout = layout.compose(&inner.parse::<Layout>()?)?;
            }
            Side::stored("", dtype, size, Stored::new(layout, unit))
        }
        (None, Some(tv), None) => {
            let source = Source::Registers { tv: tv.parse()? };
            Side { about: String::new(), dtype, rows: size[0], cols: size[1], source, is_fixed: false }
        }
        (None, None, Some(name)) => Side::of_atom(&Atom::named(name)?, dtype, size, 0)?,
        _ => return Err(refuse("exactly one of layout, tv and atom is asked")),
    };
    let not_here = |key: &str| refuse(&format!("{key} has no meaning here"));
    if raw.compose.is_some() && raw.layout.is_none() {
        return Err(not_here("compose"));
    }
    if let Some(name) = &raw.by {
        let by = Atom::named(name)?;
        let Source::Registers { tv } = side.source else { return Err(not_here("by")) };
        let Map::Registers { .. } = by.map else { return Err(not_here("by")) };
        side.source = Source::Moved { tv, by, offset: 0, packed: i64::from(32 / dtype.bits()) };
    }
    match &mut side.source {
        Source::Stored(stored) => {
            if raw.layout.is_none() && unit.is_some_and(|unit| unit != stored.unit) {
                return Err(refuse(&format!("the atom counts in {}", stored.unit)));
            }
            stored.offset = raw.offset.unwrap_or(0);
            stored.offset_unit = offset_unit.unwrap_or(stored.unit);
            if stored.offset_unit.space() != stored.unit.space() {
                return Err(Error::UnitMismatch { left: stored.unit, right: stored.offset_unit });
            }
            stored.packed = raw.packed.unwrap_or(1);
            stored.span = match raw.swizzle.as_deref() {
                None | Some("none") => 0,
                Some("32b") => 32,
                Some("64b") => 64,
                Some("128b") => 128,
                Some(got) => return Err(word("swizzle", got, "none, 32b, 64b, 128b")),
            };
            stored.order = match raw.order.as_deref() {
                None | Some("column-major") => Order::ColumnMajor,
                Some("row-major") => Order::RowMajor,
                Some(got) => return Err(word("order", got, "column-major, row-major")),
            };
        }
        Source::Moved { offset, packed, .. } => {
            if offset_unit.is_some_and(|unit| unit != Unit::TmemCells)
                || unit.is_some_and(|unit| unit != Unit::TmemCells)
            {
                return Err(refuse("tcgen05.ld and tcgen05.st count in tmem-cells"));
            }
            *offset = raw.offset.unwrap_or(0);
            *packed = raw.packed.unwrap_or(*packed);
        }
        Source::Registers { .. } => {
            let given = [raw.offset.is_some(), raw.packed.is_some(), unit.is_some(), offset_unit.is_some()];
            if given.contains(&true) {
                return Err(refuse("offset, packed and unit have no meaning for registers"));
            }
        }
    }
    if !matches!(side.source, Source::Stored(_)) && (raw.swizzle.is_some() || raw.order.is_some()) {
        return Err(not_here("swizzle or order"));
    }
    if let Some(about) = &raw.about {
        about.clone_into(&mut side.about);
    }
    Ok(side)
}

fn word(what: &'static str, got: &str, allowed: &str) -> Error {
    Error::Word { what, got: got.to_owned(), allowed: allowed.to_owned() }
}
