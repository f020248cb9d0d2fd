//! Pictures: layouts, atoms and maps of disagreement as text and as SVG.
//!
//! A grid is rows × columns of short texts, each with a colour number: the thread of a register, the lane of a cell, the bank
//! of a byte, the value of a layout. Large grids are cut to a window, and say so. Deliberately absent: fonts, scripts, and
//! anything that would make two drawings of one grid differ.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::atlas::{Atom, Map};
use crate::check::{Report, Status};
use crate::composed::ComposedLayout;
use crate::error::Result;
use crate::int_tuple::IntTuple;
use crate::layout::Layout;
use crate::unit::{Place, Space};

/// The part of a grid that is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// At most so many rows.
    pub rows: usize,
    /// At most so many columns.
    pub cols: usize,
}

impl Default for Window {
    fn default() -> Self {
        Window { rows: 32, cols: 16 }
    }
}

#[derive(Clone, Debug)]
struct Cell {
    text: String,
    colour: usize,
}

/// A picture, ready to be drawn.
#[derive(Clone, Debug)]
pub struct Grid {
    title: String,
    about: Vec<String>,
    rows: usize,
    cols: usize,
    window: Window,
    /// The window's cells, row by row.
    cells: Vec<Cell>,
}

impl Grid {
    fn new(
        title: String,
        about: Vec<String>,
        [rows, cols]: [usize; 2],
        window: Window,
        mut cell: impl FnMut(usize, usize) -> Result<Cell>,
    ) -> Result<Self> {
        let window = Window { rows: rows.min(window.rows).max(1), cols: cols.min(window.cols).max(1) };
        let mut cells = Vec::with_capacity(window.rows.saturating_mul(window.cols).min(1 << 20));
        for row in 0..window.rows {
            for col in 0..window.cols {
                cells.push(cell(row, col)?);
            }
        }
        Ok(Grid { title, about, rows, cols, window, cells })
    }

    /// A layout: the first mode down, the others across, each cell its value.
    ///
    /// # Errors
    /// As [`Layout::at`].
    pub fn of_layout(layout: &ComposedLayout, window: Window) -> Result<Self> {
        let inner = layout.layout();
        let rows = down_mode(inner);
        let size = |n: i64| usize::try_from(n).unwrap_or(usize::MAX);
        let grid = [size(rows), size(inner.size() / rows)];
        let about = vec![summary(layout)];
        Grid::new(layout.to_string(), about, grid, window, |row, col| {
            let index = i64::try_from(row).unwrap_or(i64::MAX) + rows * i64::try_from(col).unwrap_or(i64::MAX);
            let value = layout.at(index)?;
            Ok(Cell { text: value.to_string(), colour: usize::try_from(value.rem_euclid(8)).unwrap_or_default() })
        })
    }

    /// An atom: each cell the thread and value that hold the element, or its place.
    ///
    /// # Errors
    /// As [`Layout::offsets`].
    pub fn of_atom(atom: &Atom, window: Window) -> Result<Self> {
        let size = |n: i64| usize::try_from(n).unwrap_or_default();
        let about = vec![atom.about.clone(), map_line(atom), format!("source: {}", atom.source)];
        let mut cells: Vec<Cell> = vec![Cell { text: "-".to_owned(), colour: 0 }; size(atom.size())];
        match &atom.map {
            Map::Registers { tv } => {
                let threads = tv.mode(0).map_or(1, |mode| mode.size());
                for (at, element) in (0i64..).zip(tv.offsets()?) {
                    let (thread, value) = (at % threads, at / threads);
                    if let Some(cell) = cells.get_mut(size(element)) {
                        *cell = Cell { text: format!("T{thread}V{value}"), colour: size(thread) };
                    }
                }
            }
            Map::Storage { unit, layout } => {
                for (cell, number) in cells.iter_mut().zip(layout.offsets()?) {
                    let place = Place::new(unit.space(), unit.bit_address(number)?, atom.bits);
                    let ((row, column), (from, _)) = (place.row_and_column(), place.bit_range());
                    *cell = match place.space() {
                        Space::Tmem if from == 0 => Cell { text: format!("L{row}C{column}"), colour: size(row) },
                        Space::Tmem => Cell { text: format!("L{row}C{column}.{from}"), colour: size(row) },
                        _ => Cell { text: column.to_string(), colour: size(column / 16 % 8) },
                    };
                }
            }
        }
        let rows = size(atom.rows);
        Grid::new(atom.name.clone(), about, [rows, size(atom.cols)], window, |row, col| {
            Ok(cells[row + rows * col].clone())
        })
    }

    /// As text. With `colour`, ANSI colours behind the cells.
    #[must_use]
    pub fn to_text(&self, colour: bool) -> String {
        let mut text = format!("{}\n", self.title);
        for line in &self.about {
            let _ = writeln!(text, "{line}");
        }
        let width =
            self.cells.iter().map(|cell| cell.text.len()).max().unwrap_or(1).max(self.window.cols.to_string().len());
        let margin = self.window.rows.to_string().len();
        let _ = write!(text, "{:margin$} ", "");
        for col in 0..self.window.cols {
            let _ = write!(text, " {col:>width$}");
        }
        text.push('\n');
        for (row, cells) in self.cells.chunks(self.window.cols).enumerate() {
            let _ = write!(text, "{row:>margin$}|");
            for cell in cells {
                if colour {
                    // The 6 × 6 × 6 cube's light half.
                    let [r, g, b] = [cell.colour % 3, cell.colour / 3 % 3, cell.colour / 9 % 3].map(|part| part + 3);
                    let _ = write!(text, " \x1b[30;48;5;{}m{:>width$}\x1b[0m", 16 + 36 * r + 6 * g + b, cell.text);
                } else {
                    let _ = write!(text, " {:>width$}", cell.text);
                }
            }
            text.push('\n');
        }
        text.push_str(&self.cut_note());
        text
    }

    fn cut_note(&self) -> String {
        if (self.rows, self.cols) == (self.window.rows, self.window.cols) {
            return String::new();
        }
        format!("{} rows × {} columns of {} × {}\n", self.window.rows, self.window.cols, self.rows, self.cols)
    }

    /// As an SVG document.
    #[must_use]
    pub fn to_svg(&self) -> String {
        const HEIGHT: usize = 20;
        let longest = self.cells.iter().map(|cell| cell.text.len()).max().unwrap_or(1);
        let width = 7 * longest + 10;
        let (left, top) = (34, 28 + 16 * self.about.len() + 18);
        let lines = self.about.iter().map(|line| line.chars().count()).chain([self.title.chars().count()]);
        let text_width = lines.max().unwrap_or(0) * 7 + 20;
        let size = ((left + width * self.window.cols + 10).max(text_width), top + HEIGHT * self.window.rows + 30);
        let mut svg = document(size, &self.title, &self.about);
        for col in 0..self.window.cols {
            let _ = writeln!(
                svg,
                r#"<text x="{}" y="{}" fill="grey">{col}</text>"#,
                left + width * col + width / 2,
                top - 6
            );
        }
        for (row, cells) in self.cells.chunks(self.window.cols).enumerate() {
            let y = top + HEIGHT * row;
            let _ = writeln!(svg, r#"<text x="{}" y="{}" fill="grey">{row}</text>"#, left / 2, y + 14);
            for (col, cell) in cells.iter().enumerate() {
                let x = left + width * col;
                let fill = colour(cell.colour);
                let _ = writeln!(
                    svg,
                    r##"<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" fill="{fill}" stroke="#fff"/><text x="{}" y="{}">{}</text>"##,
                    x + width / 2,
                    y + 14,
                    escaped(&cell.text)
                );
            }
        }
        let note = self.cut_note();
        let bottom = top + HEIGHT * self.window.rows + 20;
        let _ = writeln!(
            svg,
            r#"<text x="10" y="{bottom}" style="text-anchor:start" fill="grey">{}</text>"#,
            note.trim_end()
        );
        svg + "</svg>\n"
    }
}

/// A hue for a number; neighbours differ much, and 137.5° never closes.
fn colour(number: usize) -> String {
    format!("hsl({},65%,82%)", number * 275 / 2 % 360)
}

fn document((width, height): (usize, usize), title: &str, about: &[String]) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"monospace\" font-size=\"11\" text-anchor=\"middle\">\n<title>{0}</title>\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"10\" y=\"18\" style=\"text-anchor:start\" font-size=\"13\" font-weight=\"bold\">{0}</text>\n",
        escaped(title)
    );
    for (at, line) in about.iter().enumerate() {
        let y = 36 + 16 * at;
        let _ = writeln!(svg, r#"<text x="10" y="{y}" style="text-anchor:start">{}</text>"#, escaped(line));
    }
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The map of a report: a square for each element, green where it is read as written, red where another is read, black where
/// poison is.
#[must_use]
pub fn report_svg(report: &Report) -> String {
    const SIDE: usize = 6;
    let (rows, cols) = report.map_size();
    let mut about: Vec<String> = vec![format!(
        "{} of {} elements are read elsewhere than written, {} of them from where nothing was written",
        report.disagreements, report.elements, report.poisoned
    )];
    about.extend(report.faults.iter().map(|finding| format!("fault: {}", finding.class)));
    about.push("green: as written; red: another element; black: poison. Rows down, columns across.".to_owned());
    let text_width = about.iter().map(|line| line.chars().count()).max().unwrap_or(0) * 7 + 20;
    let top = 30 + 16 * about.len();
    let mut svg = document(((cols * SIDE + 20).max(text_width), top + rows * SIDE + 10), &report.name, &about);
    for row in 0..rows {
        // One rectangle for each run of equal elements.
        let mut from = 0;
        for col in 1..=cols {
            if col < cols && report.status(row, col) == report.status(row, from) {
                continue;
            }
            let fill = match report.status(row, from) {
                Some(Status::Right) | None => "#7bc47f",
                Some(Status::Other) => "#e0695a",
                Some(Status::Poison) => "#222",
            };
            let (x, y, width) = (10 + from * SIDE, top + row * SIDE, (col - from) * SIDE);
            let _ = writeln!(svg, r#"<rect x="{x}" y="{y}" width="{width}" height="{}" fill="{fill}"/>"#, SIDE - 1);
            from = col;
        }
    }
    svg + "</svg>\n"
}

/// Elements that go down: those of the first mode that is no single element, at the outermost level that splits. A fragment
/// as CuTe partitions it, ((m, k), tiles, tiles, …), has its m down and all the rest across.
fn down_mode(layout: &Layout) -> i64 {
    if layout.rank() > 2
        && let Some(mode) = layout.mode(0).filter(|mode| mode.depth() > 0)
    {
        return mode.mode(0).map_or(1, |mode| mode.size());
    }
    let mut modes: Vec<Layout> = layout.modes().into_iter().filter(|mode| mode.size() > 1).collect();
    while let [only] = modes.as_slice() {
        match only.shape() {
            IntTuple::Int(_) => return 1,
            IntTuple::Tuple(_) => modes = only.modes().into_iter().filter(|mode| mode.size() > 1).collect(),
        }
    }
    modes.first().map_or(1, Layout::size)
}

fn summary(layout: &ComposedLayout) -> String {
    let inner = layout.layout();
    format!("size {}, cosize {}, largest {}", inner.size(), inner.cosize(), inner.range().1)
}

fn map_line(atom: &Atom) -> String {
    match &atom.map {
        Map::Registers { tv } => format!("(thread,value) ↦ row + {}·column: {tv}", atom.rows),
        Map::Storage { unit, layout } => format!("row + {}·column ↦ {unit}: {layout}", atom.rows),
    }
}

fn tuple_json(tuple: &IntTuple) -> Value {
    match tuple {
        IntTuple::Int(n) => json!(n),
        IntTuple::Tuple(items) => items.iter().map(tuple_json).collect(),
    }
}

/// A layout for programs.
#[must_use]
pub fn layout_json(layout: &ComposedLayout) -> Value {
    let inner = layout.layout();
    let (smallest, largest) = inner.range();
    let mut value = json!({
        "layout": layout.to_string(),
        "shape": tuple_json(inner.shape()),
        "stride": tuple_json(inner.stride()),
        "size": inner.size(),
        "cosize": inner.cosize(),
        "smallest": smallest,
        "largest": largest,
        "rank": inner.rank(),
        "depth": inner.depth(),
    });
    if layout.plain().is_none() {
        value["swizzle"] = json!(layout.swizzle().to_string());
        value["offset"] = json!(layout.offset());
    }
    value
}

/// An atom for programs.
#[must_use]
pub fn atom_json(atom: &Atom) -> Value {
    let mut value = json!({
        "atom": atom.name,
        "about": atom.about,
        "source": atom.source,
        "role": atom.role,
        "rows": atom.rows,
        "cols": atom.cols,
        "bits": atom.bits,
    });
    match &atom.map {
        Map::Registers { tv } => {
            value["tv"] = json!(tv.to_string());
            if let Some((threads, values)) = atom.threads_and_values() {
                (value["threads"], value["values"]) = (json!(threads), json!(values));
            }
        }
        Map::Storage { unit, layout } => {
            (value["unit"], value["layout"]) = (json!(unit), json!(layout.to_string()));
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_as_text() {
        let layout: ComposedLayout = "(2,3):(3,1)".parse().unwrap();
        let text = Grid::of_layout(&layout, Window::default()).unwrap().to_text(false);
        assert_eq!(text, "(2,3):(3,1)\nsize 6, cosize 6, largest 5\n   0 1 2\n0| 0 1 2\n1| 3 4 5\n");
    }

    #[test]
    fn single_modes_do_not_hide_the_grid() {
        let rows = |text: &str| down_mode(&text.parse().unwrap());
        assert_eq!(rows("((128,128),1,1):((65536,1),0,0)"), 128);
        assert_eq!(rows("((128,16),1,4):((64,1),0,16)"), 128);
        assert_eq!(rows("(4,8)"), 4);
        assert_eq!(rows("12:1"), 1);
        assert_eq!(rows("((4,8),(2,2)):((32,1),(16,8))"), 32);
        assert_eq!(rows("1:0"), 1);
    }

    #[test]
    fn atoms_as_text_and_svg() {
        let atom = Atom::named("mma.m16n8k16.f32.c").unwrap();
        let grid = Grid::of_atom(&atom, Window { rows: 2, cols: 4 }).unwrap();
        let text = grid.to_text(false);
        assert!(text.contains("0| T0V0 T0V1 T1V0 T1V1\n1| T4V0 T4V1 T5V0 T5V1\n"), "{text}");
        assert!(text.ends_with("2 rows × 4 columns of 16 × 8\n"));
        assert!(grid.to_text(true).contains("\x1b[30;48;5;"));
        let svg = grid.to_svg();
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert_eq!(svg.matches("<rect ").count(), 9);
        assert!(svg.contains(">T5V1<") && svg.contains("PTX ISA"));
        let storage =
            Grid::of_atom(&Atom::named("tcgen05.a.m128.k64.bf16").unwrap(), Window { rows: 2, cols: 2 }).unwrap();
        assert!(
            storage.to_text(false).contains("0|    L0C0 L0C0.16\n1|    L1C0 L1C0.16\n"),
            "{}",
            storage.to_text(false)
        );
    }

    #[test]
    fn json_holds_the_numbers() {
        let value = layout_json(&"((128,128),1,1):((65536,1),0,0)".parse().unwrap());
        assert_eq!((&value["cosize"], &value["largest"]), (&json!(8_323_200), &json!(8_323_199)));
        assert_eq!(value["shape"], json!([[128, 128], 1, 1]));
        let swizzled = layout_json(&"Sw<3,4,3> o 16 o 8:1".parse().unwrap());
        assert_eq!((&swizzled["swizzle"], &swizzled["offset"]), (&json!("Sw<3,4,3>"), &json!(16)));
        let atom = atom_json(&Atom::named("wgmma.m64n8k16.f32.d").unwrap());
        assert_eq!((&atom["threads"], &atom["values"]), (&json!(128), &json!(4)));
    }
}
