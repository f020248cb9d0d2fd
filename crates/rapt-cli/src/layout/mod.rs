//! `rapt layout`: layouts as text in, layouts as text, pictures and JSON out.
//!
//! Exit codes: 0 for an answer, 1 where `compare`, `check` or `emulate` refutes, 2 for what is not the notation, a unit
//! mismatch or a file that is not understood (clap's own mistakes are 2 as well).

mod check;
mod output;

use std::io::IsTerminal;
use std::path::PathBuf;

use clap::{Args as ClapArgs, Subcommand, ValueEnum};
use rapt::layout::atlas::{self, Atom};
use rapt::layout::draw::{Grid, Window, atom_json, layout_json};
use rapt::layout::unit::{Quantity, Unit};
use rapt::layout::{Arrangement, ComposedLayout, Coord, Error, IntTuple, Layout, Result, Tiler};
use serde_json::{Value, json};

use output::{JsonArgs, print};

use crate::{Outcome, complain, exit, is_broken_pipe};

#[derive(ClapArgs, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// A layout or an atom as a grid: values, or the thread and value that hold each element.
    Show(ShowArgs),
    /// The names of all atoms.
    Atoms(JsonArgs),
    /// A∘B, the layout i ↦ A(B(i)); by mode where B is written <tiler,tiler>.
    Compose(Two),
    /// What fills the gaps of a layout up to TARGET.
    Complement {
        /// The layout.
        layout: Layout,
        /// [default: the cosize]
        target: Option<i64>,
        #[command(flatten)]
        json: JsonArgs,
    },
    /// A layout cut into tiles. (4,8) divides by mode, as <4,8>; (4,8):(1,4) the layout as a whole.
    Divide(Arranged),
    /// A layout repeated.
    Product(Arranged),
    /// The same function with as few modes as possible.
    Coalesce {
        /// The layout.
        layout: Layout,
        /// Mode by mode, such as (1,1).
        #[arg(long, value_name = "PROFILE")]
        by: Option<IntTuple>,
        #[command(flatten)]
        json: JsonArgs,
    },
    /// The right inverse, L(R(i)) = i, or with --left the left one, R(L(i)) = i.
    Inverse {
        /// The layout.
        layout: Layout,
        /// R(L(i)) = i for every i.
        #[arg(long)]
        left: bool,
        #[command(flatten)]
        json: JsonArgs,
    },
    /// The same function without nesting.
    Flatten(One),
    /// Without modes of stride 0 or extent 1.
    Filter(One),
    /// The layout of the modes that are left blank with _, and the offset of the others.
    Slice {
        /// The layout.
        layout: Layout,
        /// Such as (_,3).
        coord: Coord,
        #[command(flatten)]
        json: JsonArgs,
    },
    /// The same memory counted in elements of another width.
    Recast {
        /// The layout.
        layout: Layout,
        /// Bits of its elements.
        #[arg(long, value_name = "BITS")]
        from: i64,
        /// Bits of the elements of the result.
        #[arg(long, value_name = "BITS")]
        to: i64,
        #[command(flatten)]
        json: JsonArgs,
    },
    /// The value at a coordinate or an index.
    Eval {
        /// A layout, with or without a swizzle.
        layout: ComposedLayout,
        /// Such as 17 or (1,(2,0)).
        coord: IntTuple,
        #[command(flatten)]
        json: JsonArgs,
    },
    /// Where two layouts have the same value; with --units as places, which two units refuse.
    Compare {
        /// The one.
        left: ComposedLayout,
        /// The other.
        right: ComposedLayout,
        /// Rows of the tile that both number [default: the first mode's].
        #[arg(long)]
        rows: Option<i64>,
        /// The units of both, such as tmem-cells,tmem-elements:16. Without them, bare numbers are compared.
        #[arg(long, value_name = "UNIT,UNIT", value_parser = unit_pair)]
        units: Option<(Unit, Unit)>,
        #[command(flatten)]
        json: JsonArgs,
    },
    /// Whether what a producer writes is what a consumer reads: the checks of a TOML file.
    Check(check::CheckArgs),
    /// The checks of a TOML file run on plain memory with poison: S = Q·Kᵀ, P, P·V.
    Emulate(check::EmulateArgs),
}

#[derive(ClapArgs, Debug)]
struct One {
    /// The layout.
    layout: Layout,
    #[command(flatten)]
    json: JsonArgs,
}

#[derive(ClapArgs, Debug)]
struct Two {
    /// The outer layout, A.
    layout: ComposedLayout,
    /// The inner one, B.
    tiler: Tiler,
    #[command(flatten)]
    json: JsonArgs,
}

#[derive(ClapArgs, Debug)]
struct Arranged {
    /// The layout.
    layout: Layout,
    /// A layout, or a tiler for each mode.
    tiler: String,
    /// How the modes of the result are grouped.
    #[arg(long = "as", value_enum, default_value = "logical")]
    arrangement: ArrangementName,
    #[command(flatten)]
    json: JsonArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ArrangementName {
    /// Mode by mode: ((tile, rest), …).
    Logical,
    /// ((tile, …), (rest, …)).
    Zipped,
    /// ((tile, …), rest, …).
    Tiled,
    /// (tile, …, rest, …).
    Flat,
    /// product only: copies side by side.
    Blocked,
    /// product only: copies interleaved.
    Raked,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Colour {
    /// On a terminal.
    Auto,
    /// With ANSI colours.
    Always,
    /// Without.
    Never,
}

#[derive(ClapArgs, Debug)]
struct ShowArgs {
    /// A layout such as (4,8):(8,1), or an atom such as wgmma.m64n128k16.f16.a.
    what: String,
    /// Also write the grid to this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// At most so many rows.
    #[arg(long, default_value_t = 32)]
    rows: usize,
    /// At most so many columns.
    #[arg(long, default_value_t = 16)]
    cols: usize,
    /// Colours by thread, lane or value.
    #[arg(long, value_enum, default_value = "auto")]
    color: Colour,
    #[command(flatten)]
    json: JsonArgs,
}

/// The most rows or columns of a picture: larger ones are not looked at.
const MOST_SHOWN: usize = 1024;

pub(crate) fn run(args: &Args) -> Outcome {
    answer(&args.command).or_else(|error| {
        if is_broken_pipe(error.as_ref()) {
            return Err(error);
        }
        complain(&error);
        Ok(exit::USAGE)
    })
}

fn answer(command: &Command) -> Outcome {
    match command {
        Command::Show(args) => show(args),
        Command::Atoms(args) => atoms(args),
        Command::Compose(Two { layout, tiler, json }) => {
            let composed =
                ComposedLayout::new(layout.swizzle(), layout.offset(), layout.layout().compose_tiler(tiler)?)?;
            print_layout(&composed, json)
        }
        Command::Complement { layout, target, json } => {
            print_layout(&layout.complement(target.unwrap_or(layout.cosize()))?.into(), json)
        }
        Command::Divide(args) => print_layout(&divide(args)?.into(), &args.json),
        Command::Product(args) => print_layout(&product(args)?.into(), &args.json),
        Command::Coalesce { layout, by, json } => {
            let coalesced = by.as_ref().map_or_else(|| Ok(layout.coalesce()), |profile| layout.coalesce_by(profile))?;
            print_layout(&coalesced.into(), json)
        }
        Command::Inverse { layout, left, json } => {
            let inverse = if *left { layout.left_inverse()? } else { layout.right_inverse()? };
            print_layout(&inverse.into(), json)
        }
        Command::Flatten(One { layout, json }) => print_layout(&layout.flatten().into(), json),
        Command::Filter(One { layout, json }) => print_layout(&layout.filter().into(), json),
        Command::Slice { layout, coord, json } => {
            let (layout, offset) = layout.slice(coord)?;
            let mut value = layout_json(&layout.clone().into());
            value["offset"] = json!(offset);
            print(json, &value, || format!("{layout}\noffset {offset}"))
        }
        Command::Recast { layout, from, to, json } => print_layout(&layout.recast(*from, *to)?.into(), json),
        Command::Eval { layout, coord, json } => {
            let value = layout.at_coord(coord)?;
            print(json, &json!({"layout": layout.to_string(), "coord": coord.to_string(), "value": value}), || {
                value.to_string()
            })
        }
        Command::Compare { left, right, rows, units, json } => compare(left, right, *rows, *units, json),
        Command::Check(args) => check::check(args),
        Command::Emulate(args) => check::emulate(args),
    }
}

fn print_layout(layout: &ComposedLayout, args: &JsonArgs) -> Outcome {
    print(args, &layout_json(layout), || layout.to_string())
}

fn show(args: &ShowArgs) -> Outcome {
    let window = Window { rows: args.rows.min(MOST_SHOWN), cols: args.cols.min(MOST_SHOWN) };
    // Names of atoms begin with a small letter, and no layout does.
    let is_atom = args.what.starts_with(|c: char| c.is_ascii_lowercase());
    let (grid, value) = if is_atom {
        let atom = Atom::named(&args.what)?;
        (Grid::of_atom(&atom, window)?, atom_json(&atom))
    } else {
        let layout: ComposedLayout = args.what.parse()?;
        (Grid::of_layout(&layout, window)?, layout_json(&layout))
    };
    if let Some(path) = &args.svg {
        std::fs::write(path, grid.to_svg()).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let colour = match args.color {
        Colour::Auto => std::io::stdout().is_terminal(),
        Colour::Always => true,
        Colour::Never => false,
    };
    print(&args.json, &value, || grid.to_text(colour).trim_end().to_owned())
}

fn atoms(args: &JsonArgs) -> Outcome {
    let atoms: Vec<Atom> = atlas::names().iter().map(|name| Atom::named(name)).collect::<Result<_>>()?;
    let value: Value = atoms.iter().map(atom_json).collect();
    print(args, &value, || {
        let mut lines: Vec<String> = atoms.iter().map(|atom| format!("{:34} {}", atom.name, atom.about)).collect();
        lines.push(String::new());
        lines.push("Other sizes by pattern:".to_owned());
        lines.extend(atlas::PATTERNS.iter().map(|(pattern, _)| format!("  {pattern}")));
        lines.join("\n")
    })
}

/// A tiler; a bare tuple such as (4,8) is one for each mode, as in CuTe.
fn by_mode(text: &str) -> Result<Tiler> {
    if !text.contains(':')
        && let Ok(IntTuple::Tuple(_)) = text.parse()
    {
        return text.replace('(', "<").replace(')', ">").parse();
    }
    text.parse()
}

fn arrangement(name: ArrangementName) -> Option<Arrangement> {
    match name {
        ArrangementName::Logical => Some(Arrangement::Logical),
        ArrangementName::Zipped => Some(Arrangement::Zipped),
        ArrangementName::Tiled => Some(Arrangement::Tiled),
        ArrangementName::Flat => Some(Arrangement::Flat),
        ArrangementName::Blocked | ArrangementName::Raked => None,
    }
}

fn divide(args: &Arranged) -> Result<Layout> {
    let arrangement = arrangement(args.arrangement).ok_or_else(|| Error::Word {
        what: "divide --as",
        got: format!("{:?}", args.arrangement).to_lowercase(),
        allowed: "logical, zipped, tiled, flat".to_owned(),
    })?;
    args.layout.divide(&by_mode(&args.tiler)?, arrangement)
}

fn product(args: &Arranged) -> Result<Layout> {
    match (arrangement(args.arrangement), args.arrangement) {
        (Some(arrangement), _) => args.layout.product(&by_mode(&args.tiler)?, arrangement),
        (None, ArrangementName::Raked) => args.layout.raked_product(&args.tiler.parse()?),
        (None, _) => args.layout.blocked_product(&args.tiler.parse()?),
    }
}

fn unit_pair(text: &str) -> Result<(Unit, Unit), String> {
    let (left, right) = text.split_once(',').ok_or("two units are needed, such as tmem-cells,tmem-elements:16")?;
    let unit = |text: &str| text.trim().parse().map_err(|error: Error| error.to_string());
    Ok((unit(left)?, unit(right)?))
}

/// Where both have the same value at the same index of a tile.
fn compare(
    left: &ComposedLayout,
    right: &ComposedLayout,
    rows: Option<i64>,
    units: Option<(Unit, Unit)>,
    args: &JsonArgs,
) -> Outcome {
    let same = |a: i64, b: i64| match units {
        Some((left, right)) => Quantity { number: a, unit: left }.same(Quantity { number: b, unit: right }),
        None => Ok(a == b),
    };
    let (a, b) = (left.offsets()?, right.offsets()?);
    let first = left.layout().mode(0).map_or(1, |mode| mode.mode(0).map_or(mode.size(), |inner| inner.size()));
    let rows = usize::try_from(rows.unwrap_or(first)).ok().filter(|rows| *rows > 0).ok_or("--rows is at least 1")?;
    let count = a.len().min(b.len());
    let mut equal = 0;
    let mut whole_rows = vec![true; rows.min(count)];
    let mut equal_rows = vec![false; rows.min(count)];
    for index in 0..count {
        let is_same = same(a[index], b[index])?;
        equal += usize::from(is_same);
        whole_rows[index % rows] &= is_same;
        equal_rows[index % rows] |= is_same;
    }
    let listed = |rows: &[bool]| -> Vec<usize> { (0..rows.len()).filter(|row| rows[*row]).collect() };
    let (touched, whole) = (listed(&equal_rows), listed(&whole_rows));
    let value = json!({
        "left": left.to_string(),
        "right": right.to_string(),
        "compared": count,
        "equal": equal,
        "rows_with_an_equal_value": touched,
        "rows_wholly_equal": whole,
        "same": equal == count && a.len() == b.len(),
    });
    print(args, &value, || {
        let few = |rows: &[usize]| match rows {
            [] => "none".to_owned(),
            _ if rows.len() > 8 => format!("{} of them", rows.len()),
            _ => rows.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        };
        format!(
            "{equal} of {count} values are equal\nrows wholly equal: {}\nrows with an equal value: {}",
            few(&whole),
            few(&touched)
        )
    })?;
    Ok(if equal == count && a.len() == b.len() { exit::OK } else { exit::FAILED })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_tuple_tiles_each_mode() {
        assert_eq!(by_mode("(4,(2,8))").unwrap().to_string(), "<4:1,<2:1,8:1>>");
        assert_eq!(by_mode("(4,8):(1,4)").unwrap().to_string(), "(4,8):(1,4)");
        assert_eq!(by_mode("4").unwrap().to_string(), "4:1");
    }
}
