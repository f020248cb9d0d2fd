//! `tcgen05`: tensor memory, the accumulator and A operand in it, and its loads and stores.
//!
//! ```text
//! C, m128 (Layout D):   lane = row,                          column = column
//! C, m64  (Layout F):   lane = 32·(row / 16) + row % 16,     column = column             half of each warp's lanes
//! C, m64ws (Layout E):  lane = row + 64·(column / (n/2)),    column = column % (n/2)
//! C, m32ws (Layout G):  lane = row + 32·(column / (n/4)),    column = column % (n/4)
//! A, 16 bits:           lane as C's,  column = k / 2, half k % 2;      8 bits: column = k / 4, byte k % 4
//! ld, st:               32x32b: lane = thread, column = register;      the others below, with 16 lanes
//! ```
//! A warp reaches lanes 32·(warp % 4) to + 31; shapes of 16 lanes reach the lower or the upper half of them. With
//! `.pack16` and `.unpack16` a register holds the low halves of two neighbouring columns.

use super::{Atom, Map, Role, dtype_of, number_after, thread_value};
use crate::dtype::Dtype;
use crate::layout::Layout;
use crate::unit::Unit;

const DATA_PATH: &str =
    "PTX ISA, \"Data Path Layout Organization\" of tcgen05 (Layouts D, E, F, G) and \"Tensor Memory Addressing\"";
const MOVES: &str =
    "PTX ISA, \"Matrix fragments for shape .32x32b, .16x64b, .16x128b, .16x256b\" and tcgen05.ld, tcgen05.st";

/// Cells from one lane to the next.
const LANE: i64 = 1 << 16;

fn storage(about: String, rows: i64, cols: i64, bits: u32, unit: Unit, layout: Layout) -> Atom {
    let role = if unit == Unit::TmemCells { Role::Accumulator } else { Role::Operand };
    let map = Map::Storage { unit, layout: layout.into() };
    Atom { name: String::new(), about, source: DATA_PATH, role, rows, cols, bits, map }
}

/// Lanes of the rows: whole, or scattered 16 to a warp; `lane` from one lane to the next.
fn lanes(m: &str, lane: i64) -> Option<Layout> {
    match m {
        "m128" => Layout::new(128, lane).ok(),
        "m64" => Layout::new([16, 4], [lane, 32 * lane]).ok(),
        _ => None,
    }
}

pub(super) fn accumulator(m: &str, n: &str) -> Option<Atom> {
    let n = number_after(n, "n").filter(|n| n % 8 == 0 && (8..=256).contains(n))?;
    let (rows, layout) = match m {
        "m64ws" => {
            (64, Layout::from_modes([Layout::new(64, LANE).ok()?, Layout::new([n / 2, 2], [1, 64 * LANE]).ok()?]))
        }
        "m32ws" => {
            (32, Layout::from_modes([Layout::new(32, LANE).ok()?, Layout::new([n / 4, 4], [1, 32 * LANE]).ok()?]))
        }
        _ => {
            let rows = lanes(m, LANE)?;
            (rows.size(), Layout::from_modes([rows, Layout::new(n, 1).ok()?]))
        }
    };
    let about = format!("D (and C) of tcgen05.mma in tensor memory, {m}, {n} columns of 32 bits");
    Some(storage(about, rows, n, 32, Unit::TmemCells, layout.ok()?))
}

pub(super) fn operand(m: &str, k: &str, dtype: &str) -> Option<Atom> {
    use Dtype::{Bf16, E4m3, E5m2, F16, S8, Tf32, U8};
    let dtype = dtype_of(dtype, &[F16, Bf16, E4m3, E5m2, S8, U8, Tf32])?;
    let per_cell = i64::from(32 / dtype.bits());
    // One instruction takes 256 bits along k, and tensor memory has 512 columns.
    let k = number_after(k, "k").filter(|k| *k > 0 && k % (8 * per_cell) == 0 && k / per_cell <= 512)?;
    let rows = lanes(m, LANE * per_cell)?;
    let count = rows.size();
    let layout = Layout::from_modes([rows, Layout::new(k, 1).ok()?]).ok()?;
    let about = format!("A of tcgen05.mma in tensor memory, {m}, {dtype}, {count} × {k}, {per_cell} to a cell");
    Some(storage(about, count, k, dtype.bits(), Unit::TmemElements(dtype.bits()), layout))
}

pub(super) fn transfer(way: &str, shape: &str, count: &str, rest: &[&str]) -> Option<Atom> {
    let (lanes, columns, most) = match shape {
        "32x32b" => (32, 1, 128),
        "16x64b" => (16, 2, 128),
        "16x128b" => (16, 4, 64),
        "16x256b" => (16, 8, 32),
        _ => return None,
    };
    let count = number_after(count, "x").filter(|n| (1..=most).contains(n) && n & (n - 1) == 0)?;
    // With packing, each register is two half columns.
    let halves = match (way, rest) {
        (_, []) => 1,
        ("ld", ["pack16"]) | ("st", ["unpack16"]) => 2,
        _ => return None,
    };
    let column = lanes * halves;
    let tv = match shape {
        "32x32b" => thread_value(&[(32, 1)], &[(halves, lanes), (count, column)]),
        "16x64b" => thread_value(&[(2, 8), (2, column), (8, 1)], &[(halves, lanes), (count, 2 * column)]),
        "16x128b" => thread_value(&[(4, column), (8, 1)], &[(halves, lanes), (2, 8), (count, 4 * column)]),
        _ => thread_value(&[(4, 2 * column), (8, 1)], &[(halves, lanes), (2, column), (2, 8), (count, 8 * column)]),
    }?;
    let cols = columns * count * halves;
    let packing = if halves == 2 { ", two low halves to a register" } else { "" };
    Some(Atom {
        name: String::new(),
        about: format!(
            "tcgen05.{way}.{shape}.x{count}: {lanes} lanes × {cols} columns of tensor memory and a warp{packing}"
        ),
        source: MOVES,
        role: Role::Transfer,
        rows: lanes,
        cols,
        bits: if halves == 2 { 16 } else { 32 },
        map: Map::Registers { tv },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(name: &str) -> String {
        match Atom::named(name).unwrap().map {
            Map::Registers { tv } => tv.to_string(),
            Map::Storage { unit, layout } => format!("{layout} {unit}"),
        }
    }

    #[test]
    fn lanes_and_columns() {
        assert_eq!(map("tcgen05.c.m128.n128"), "(128,128):(65536,1) tmem-cells");
        assert_eq!(map("tcgen05.c.m64.n64"), "((16,4),64):((65536,2097152),1) tmem-cells");
        assert_eq!(map("tcgen05.c.m64ws.n64"), "(64,(32,2)):(65536,(1,4194304)) tmem-cells");
        assert_eq!(map("tcgen05.a.m128.k128.bf16"), "(128,128):(131072,1) tmem-elements:16");
        assert_eq!(map("tcgen05.a.m128.k128.e4m3"), "(128,128):(262144,1) tmem-elements:8");
    }

    #[test]
    fn loads_and_stores_are_the_figures_of_the_ptx_isa() {
        let check = |name: &str, formula: &dyn Fn(i64, i64) -> (i64, i64)| {
            let atom = Atom::named(name).unwrap();
            let Map::Registers { tv } = &atom.map else { panic!("registers") };
            let (threads, values) = atom.threads_and_values().unwrap();
            for (thread, value) in (0..threads).flat_map(|t| (0..values).map(move |v| (t, v))) {
                let (lane, column) = formula(thread, value);
                let got = tv.at_coord(&[thread, value].into()).unwrap();
                assert_eq!(got, lane + atom.rows * column, "{name} thread {thread} value {value}");
            }
        };
        check("tcgen05.ld.32x32b.x8", &|t, r| (t, r));
        check("tcgen05.ld.16x64b.x4", &|t, r| (t / 4 + 8 * (t % 2), t / 2 % 2 + 2 * r));
        check("tcgen05.st.16x128b.x4", &|t, r| (t / 4 + 8 * (r % 2), t % 4 + 4 * (r / 2)));
        check("tcgen05.ld.16x256b.x2", &|t, r| (t / 4 + 8 * (r / 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r / 4)));
        // Two halves of 16 bits for each register, from neighbouring columns.
        check("tcgen05.ld.32x32b.x2.pack16", &|t, h| (t, h));
        check("tcgen05.st.16x256b.x1.unpack16", &|t, h| {
            let r = h / 2;
            (t / 4 + 8 * (r / 2), 2 * (2 * (t % 4) + r % 2) + h % 2)
        });
    }
}
