//! `ldmatrix` and `stmatrix`: 8 × 8 matrices of 16-bit elements between shared memory and a warp.
//!
//! ```text
//! thread t, matrix m, value j:   row = t / 4, column = 8·m + 2·(t % 4) + j           .trans: row and column within m swapped
//! ```
//! Matrices stand side by side as columns; thread 8·m + r gives the address of row r of matrix m.

use super::{Atom, Map, Role, number_after, thread_value};

const SOURCE: &str = "PTX ISA, \"Warp-level matrix load instruction: ldmatrix\" and \"… store instruction: stmatrix\"";

pub(super) fn atom(way: &str, count: &str, rest: &[&str]) -> Option<Atom> {
    let count = number_after(count, "x").filter(|n| [1, 2, 4].contains(n))?;
    let values = |first| [(2, first), (count, 64)];
    let (tv, turned) = match rest {
        [] => (thread_value(&[(4, 16), (8, 1)], &values(8))?, ""),
        ["trans"] => (thread_value(&[(4, 2), (8, 8)], &values(1))?, ", transposed"),
        _ => return None,
    };
    Some(Atom {
        name: String::new(),
        about: format!("{way} of {count} 8 × 8 matrices of 16 bits, side by side{turned}"),
        source: SOURCE,
        role: Role::Transfer,
        rows: 8,
        cols: 8 * count,
        bits: 16,
        map: Map::Registers { tv },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_maps_are_the_figures_of_the_ptx_isa() {
        for trans in [false, true] {
            let atom = Atom::named(if trans { "ldmatrix.x4.trans" } else { "stmatrix.x4" }).unwrap();
            let Map::Registers { tv } = &atom.map else { panic!("registers") };
            for (thread, value) in (0..32).flat_map(|t| (0..8).map(move |v| (t, v))) {
                let (line, within) = (thread / 4, 2 * (thread % 4) + value % 2);
                let (row, col) = if trans { (within, line) } else { (line, within) };
                let got = tv.at_coord(&[thread, value].into()).unwrap();
                assert_eq!(got, row + 8 * (col + 8 * (value / 2)), "{thread} {value}");
            }
        }
    }
}
