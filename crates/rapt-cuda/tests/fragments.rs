//! The maps that hopper.cu relies on, against rapt-layout's atlas of the instructions: which thread holds which score, that
//! the scores' registers are the next product's operand, and where the copy engine and the loading threads put an element.
//!
//! The formulas here are those of the kernels' text; that they stand there is asserted too.

use rapt_layout::atlas::{Atom, Map};

const WGMMA: &str = include_str!("../kernels/wgmma.cu");
const HOPPER: &str = include_str!("../kernels/hopper.cu");
const HOPPER_STORE: &str = include_str!("../kernels/hopper_store.cu");

fn registers(name: &str) -> (rapt_layout::Layout, i64, i64, i64) {
    let atom = Atom::named(name).unwrap();
    atom.verify().unwrap();
    let (threads, values) = atom.threads_and_values().unwrap();
    let Map::Registers { tv } = atom.map else { panic!("{name} is not in registers") };
    (tv, threads, values, atom.rows)
}

/// Row and column of element `e` of fragment `nt` of a thread: wgmma.cu's head, and what `mask_scores` and `store` compute.
fn score(thread: i64, nt: i64, e: i64) -> (i64, i64) {
    (16 * (thread / 32) + thread % 32 / 4 + 8 * (e / 2), 8 * nt + 2 * (thread % 4) + e % 2)
}

/// The byte of a row and column of a box: `swizzled` of wgmma.cu.
fn swizzled(row: i64, column: i64) -> i64 {
    row * 128 + ((column * 2) ^ (row % 8 * 16))
}

#[test]
fn a_threads_scores_are_the_accumulators_of_wgmma() {
    for n in [64, 80, 96, 112, 128, 256] {
        let (tv, threads, values, rows) = registers(&format!("wgmma.m64n{n}k16.f32.d"));
        assert_eq!((threads, values), (128, n / 2));
        for thread in 0..threads {
            for (nt, e) in (0..n / 8).flat_map(|nt| (0..4).map(move |e| (nt, e))) {
                let (row, column) = score(thread, nt, e);
                assert_eq!(tv.at_coord(&[thread, nt * 4 + e].into()).unwrap(), row + rows * column);
            }
        }
    }
    assert!(WGMMA.contains("row = 16*warp + lane/4 + 8*(e/2), column = 8*nt + 2*(lane%4) + e%2"));
    assert!(HOPPER.contains("threadIdx.x % 4 * 2") && HOPPER.contains("seen & 1u << (nt * 2 + e)"));
}

/// `below` of hopper.cu: a bit for each of a thread's keys of a tile.
#[test]
fn a_bit_for_each_key_says_which_lie_before_a_position() {
    assert!(HOPPER.contains("n = max(n, 0);") && HOPPER.contains("\"r\"(n / 8 * 2 + min(n % 8, 2))"));
    for n in -20_i64..200 {
        let most = n.max(0);
        let count = most / 8 * 2 + (most % 8).min(2);
        let bits = if count >= 32 { u32::MAX } else { (1 << count) - 1 };
        for (nt, e) in (0..16).flat_map(|nt| (0..2).map(move |e| (nt, e))) {
            assert_eq!(bits >> (nt * 2 + e) & 1 == 1, nt * 8 + e < n, "{n} {nt} {e}");
        }
    }
}

#[test]
fn packed_scores_are_the_operand_of_the_next_product() {
    let (tv, threads, values, rows) = registers("wgmma.m64n8k16.bf16.a");
    assert_eq!((threads, values), (128, 8));
    // a[nt / 2][nt % 2 * 2 + r] = pack(s[nt][r * 2], s[nt][r * 2 + 1])
    assert!(HOPPER.contains("a[nt / 2][nt % 2 * 2 + r] = pack(s[nt][r * 2], s[nt][r * 2 + 1])"));
    for thread in 0..threads {
        for (nt, r, e) in (0..2).flat_map(|nt| (0..2).flat_map(move |r| (0..2).map(move |e| (nt, r, e)))) {
            let (row, key) = score(thread, nt, r * 2 + e);
            let (register, half) = (nt % 2 * 2 + r, e);
            assert_eq!(tv.at_coord(&[thread, register * 2 + half].into()).unwrap(), row + rows * key);
        }
    }
}

#[test]
fn an_element_of_a_box_lies_where_wgmma_reads_it() {
    assert!(WGMMA.contains("return r * 128 + ((c * 2) ^ (r % 8 * 16));"));
    let place = |name: &str| {
        let Map::Storage { layout, .. } = Atom::named(name).unwrap().map else { panic!("{name} is not in memory") };
        layout
    };
    // Queries and keys are rows of 64 columns, K-major; values are rows too, and so MN-major: columns are the product's.
    let (keys, values) = (place("wgmma.smem.k.128b.bf16.x64"), place("wgmma.smem.mn.128b.bf16.x64"));
    for (row, column) in (0..64).flat_map(|row| (0..64).map(move |column| (row, column))) {
        assert_eq!(keys.at_coord(&[row, column].into()).unwrap(), swizzled(row, column));
        assert_eq!(values.at_coord(&[column, row].into()).unwrap(), swizzled(row, column));
    }
    // 8 rows are 1024 bytes: the distance that the descriptor tells, and what tiles are aligned to.
    assert_eq!(swizzled(8, 0), 1024);
    assert!(WGMMA.contains("TILE_HIGH = 1024 / 16 | 1u << 30"));
}

#[test]
fn sums_leave_registers_for_the_box_that_the_copy_engine_writes() {
    let (tv, threads, values, rows) = registers("stmatrix.x4");
    assert_eq!((threads, values, rows), (32, 8, 8));
    // Where lane l says that row l % 8 of matrix l / 8 goes, and the words that it gives.
    let told = |lane: i64, nt: i64| lane % 16 * 128 + nt / 8 * (16 * 128) + ((nt % 8 + lane / 16) ^ (lane % 8)) * 16;
    for text in [
        "shared_address(tile) + lane % 16 * 128",
        "nt / 8 * (16 * 128) + ((nt % 8 + lane / 16) ^ (lane % 8)) * 16",
        "store_matrices(to, word(nt, 0), word(nt, 1), word(nt + 1, 0), word(nt + 1, 1))",
    ] {
        assert!(HOPPER_STORE.contains(text), "{text}");
    }
    for (nt, lane, value) in
        (0..8).flat_map(|n| (0..32).flat_map(move |lane| (0..8).map(move |value| (2 * n, lane, value))))
    {
        let (matrix, half) = (value / 2, value % 2);
        let place = tv.at_coord(&[lane, value].into()).unwrap();
        let (row, column) = (place % rows, place / rows - 8 * matrix);
        let address = told(8 * matrix + row, nt) + 2 * column;
        let (sum_row, sum_column) = score(lane, nt + matrix / 2, matrix % 2 * 2 + half);
        // 16 rows of a box of 64 columns, then those of the next.
        let box_at = sum_column / 64 * (16 * 128);
        assert_eq!(address, box_at + swizzled(sum_row, sum_column % 64), "{nt} {lane} {value}");
    }
}
