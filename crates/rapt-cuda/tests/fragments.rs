//! The maps that hopper.cu relies on, against rapt-layout's atlas of the instructions: which thread holds which score, that
//! the scores' registers are the next product's operand, and where the copy engine and the loading threads put an element.
//!
//! The formulas here are those of the kernels' text; that they stand there is asserted too.

use rapt_layout::Swizzle;
use rapt_layout::atlas::{Atom, Map};

const WGMMA: &str = include_str!("../kernels/hopper/wgmma.cuh");
const TMA: &str = include_str!("../kernels/hopper/tma.cuh");
const HOPPER: &str = include_str!("../kernels/hopper.cu");
const MASKS: &str = include_str!("../kernels/hopper/mask_ring.cuh");
const HOPPER_ROWS: &str = include_str!("../kernels/hopper/rows.cuh");
const HOPPER_STORE: &str = include_str!("../kernels/hopper/store.cuh");

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
    assert!(HOPPER_ROWS.contains("a[nt / 2][nt % 2 * 2 + r] = pack(s[nt][r * 2], s[nt][r * 2 + 1])"));
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
    assert!(TMA.contains("return r * 128 + ((c * 2) ^ (r % 8 * 16));"));
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
fn sums_leave_registers_for_the_boxes_that_are_written_out() {
    let (tv, threads, values, rows) = registers("stmatrix.x4");
    assert_eq!((threads, values, rows), (32, 8, 8));
    // Where lane l says that row l % 8 of matrix l / 8 goes, and the words that it gives.
    let told = |lane: i64, nt: i64| lane % 16 * 128 + nt / 8 * (16 * 128) + ((nt % 8 + lane / 16) ^ (lane % 8)) * 16;
    for text in [
        "shared_address(tile) + lane % 16 * 128",
        "shared_address(share) + lane % 16 * 128",
        "(nt / 8 - first) * (16 * 128) + ((nt % 8 + lane / 16) ^ (lane % 8)) * 16",
        "stmatrix(to, word(nt, 0), word(nt, 1), word(nt + 1, 0), word(nt + 1, 1))",
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
    // Where lanes write out themselves: 16 bytes of four rows each, and which lane's row that is.
    for text in [
        "from = lane / 8, column = lane % 8 * 8",
        "__shfl_sync(~0u, ends.to[i / 2], (i % 2 * 4 + from) * 4) + column",
        "const int r = i * 4 + from;",
        "(box - first) * (16 * 128) + swizzle_128b(r, column)",
    ] {
        assert!(HOPPER_STORE.contains(text), "{text}");
    }
    let mut written = std::collections::BTreeSet::new();
    for (lane, i) in (0..32).flat_map(|lane| (0..4).map(move |i| (lane, i))) {
        let (from, column) = (lane / 8, lane % 8 * 8);
        let (row, owner) = (i * 4 + from, (i % 2 * 4 + from) * 4);
        assert_eq!(score(owner, 0, i / 2 * 2).0, row);
        for n in 0..8 {
            assert_eq!(swizzled(row, column) + 2 * n, swizzled(row, column + n));
            assert!(written.insert((row, column + n)));
        }
    }
    assert_eq!(written.len(), 16 * 64);
}

/// The unit of 16 bytes of row r of a tile of biases that stands as the `u`th: `bias_unit` of masks.cu, with 128 rows.
fn bias_unit(row: i64, unit: i64, box_units: i64) -> i64 {
    let turned = row / (8 / box_units) % box_units;
    unit / box_units * (128 * box_units) + row * box_units + ((unit % box_units) ^ turned)
}

#[test]
fn biases_lie_as_the_copy_engine_swizzles_them_and_are_loaded_as_the_scores_lie() {
    for text in [
        "r / (8 / BOX_UNITS) % BOX_UNITS",
        "u / BOX_UNITS * (BLOCK_M * BOX_UNITS) + r * BOX_UNITS + ((u % BOX_UNITS) ^ turned)",
        "bias_unit(r, lane / 16) * 16",
        "(u64)from ^ u % BOX_UNITS * 16) + u / BOX_UNITS * (BLOCK_M * BOX_UNITS * 16)",
        "word[0][nt] = four[0], word[1][nt] = four[1], word[0][nt + 1] = four[2], word[1][nt + 1] = four[3]",
    ] {
        assert!(MASKS.contains(text), "{text}");
    }
    let (matrices, lanes, values, rows) = registers("ldmatrix.x4");
    assert_eq!((lanes, values, rows), (32, 8, 8));
    for box_units in [2, 4, 8] {
        let swizzle = Swizzle::of_span(box_units * 16).unwrap();
        for (row, unit) in (0..128).flat_map(|row| (0..2 * box_units).map(move |unit| (row, unit))) {
            let in_box = row * box_units * 16 + unit % box_units * 16;
            let box_at = unit / box_units * (128 * box_units * 16);
            assert_eq!(
                bias_unit(row, unit, box_units) * 16,
                box_at + swizzle.apply(in_box),
                "{box_units} {row} {unit}"
            );
        }
        // What a lane of warp 0 tells of matrix l / 8, row l % 8, and what it is given.
        let told = |lane: i64, nt: i64| {
            let at = bias_unit(lane % 16, lane / 16, box_units) * 16;
            (at ^ (nt % box_units * 16)) + nt / box_units * (128 * box_units * 16)
        };
        for (pair, lane, value) in
            (0..box_units).flat_map(|n| (0..32).flat_map(move |lane| (0..8).map(move |value| (2 * n, lane, value))))
        {
            let (matrix, half) = (value / 2, value % 2);
            let place = matrices.at_coord(&[lane, value].into()).unwrap();
            let (row, column) = (place % rows, place / rows - 8 * matrix);
            let address = told(8 * matrix + row, pair) + 2 * column;
            let (score_row, key) = score(lane, pair + matrix / 2, matrix % 2 * 2 + half);
            assert_eq!(address, bias_unit(score_row, key / 8, box_units) * 16 + key % 8 * 2, "{pair} {lane} {value}");
        }
    }
}

/// What `seen_keys` and `write_bits` of masks.cu make of a row of booleans.
#[test]
fn a_row_of_booleans_becomes_a_word_for_each_lane_of_a_quad() {
    for text in [
        "weigh_bytes(high, 0x80402010u, weigh_bytes(low, 0x08040201u, 0))",
        "of_lane(x.x, x.z, y.x, y.z, 0x5410) | of_lane(x.x, x.z, y.x, y.z, 0x7632) << 8",
        "of_lane(x.y, x.w, y.y, y.w, 0x5410) | of_lane(x.y, x.w, y.y, y.w, 0x7632) << 8",
        "to[0] = seen, to[4] = seen >> 8, to[8] = seen >> 16, to[12] = seen >> 24",
        "bits & 1u << (nt % 8 * 2 + e)",
    ] {
        assert!(MASKS.contains(text), "{text}");
    }
    let weigh = |keys: [u32; 4], weights: u32| (0..4).map(|n| keys[n] * (weights >> (8 * n) & 0xff)).sum::<u32>();
    let seen_keys = |keys: &[u32]| {
        // A half of a word is two keys; x has 16 of them, y the next 16.
        let of_lane = |lane: usize| {
            let pair = |eight: usize| [keys[8 * eight + 2 * lane], keys[8 * eight + 2 * lane + 1]];
            let (low, high) = ([pair(0), pair(1)].concat(), [pair(2), pair(3)].concat());
            weigh(low.try_into().unwrap(), 0x0804_0201) + weigh(high.try_into().unwrap(), 0x8040_2010)
        };
        (0..4).map(|lane| of_lane(lane) << (8 * lane)).sum::<u32>()
    };
    let keys: Vec<u32> = (0..128u32).map(|key| key.wrapping_mul(2_654_435_761) >> 31).collect();
    let mut row = [0u8; 16];
    for pair in 0..4 {
        for (lane, byte) in seen_keys(&keys[32 * pair..][..32]).to_le_bytes().into_iter().enumerate() {
            row[4 * lane + pair] = byte;
        }
    }
    for (lane, nt, e) in (0..4).flat_map(|lane| (0..16).flat_map(move |nt| (0..2).map(move |e| (lane, nt, e)))) {
        let word = u32::from_le_bytes(row[4 * lane..][..4].try_into().unwrap());
        let bits = if nt < 8 { word } else { word >> 16 };
        let (_, key) = score(lane as i64, nt as i64, e as i64);
        assert_eq!(bits >> (nt % 8 * 2 + e) & 1, keys[key as usize], "{lane} {nt} {e}");
    }
}
