//! The maps that the kernels rely on, computed by the device code itself, against rapt-layout's atlas of the instructions: which thread
//! holds which element, that scores are the next product's operand, and where elements stand in shared memory.
//!
//! `host/maps.cpp` is compiled with the kernels' own files and prints a map as numbers; where a kernel executes ldmatrix, mma.sync or
//! cp.async, `host/common/ptx.cuh` records the instruction instead. Needs a C++ compiler (`CXX`, else `c++`), as
//! Unix has it.
#![cfg(unix)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use rapt_core::{Format, swizzle};
use rapt_layout::Swizzle;
use rapt_layout::atlas::{Atom, Map};

/// A head dim whose rows are swizzled, and one whose rows are padded.
const HEAD_DIMS: [i64; 2] = [128, 80];

/// The maps of a head dim as a program.
fn program(head_dim: i64) -> PathBuf {
    compiled(head_dim, 800)
}

/// The same as a compute capability, times a hundred, has them: compiled once for all tests.
fn compiled(head_dim: i64, arch: u32) -> PathBuf {
    static PROGRAMS: Mutex<BTreeMap<(i64, u32), PathBuf>> = Mutex::new(BTreeMap::new());
    let mut programs = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
    programs.entry((head_dim, arch)).or_insert_with(|| compile(head_dim, arch)).clone()
}

fn compile(head_dim: i64, arch: u32) -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (host, kernels) = (own.join("tests/host"), own.join("kernels"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("maps-{head_dim}-{arch}"));
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let mut command = Command::new(&compiler);
    // The folder of the stand-ins comes first: files of theirs are taken in place of the kernels'.
    command.args(["-std=c++17", "-O0", "-Wno-unknown-pragmas"]).arg("-I").arg(&host).arg("-I").arg(kernels);
    command.arg(format!("-DHEAD_DIM={head_dim}")).args(["-DHEAD_DIM_V=64", "-DVECTOR=1"]);
    command.arg(format!("-D__CUDA_ARCH__={arch}"));
    let output = command.arg(host.join("maps.cpp")).arg("-o").arg(&program).output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", compiler.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// The lines of one map.
fn printed(program: &Path, map: &str) -> Vec<Vec<i64>> {
    let output = Command::new(program).arg(map).output().unwrap();
    assert!(output.status.success(), "{map}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Vec<i64>> =
        text.lines().map(|line| line.split_whitespace().map(|number| number.parse().unwrap()).collect()).collect();
    assert!(!lines.is_empty(), "{map}");
    lines
}

fn map(name: &str) -> Vec<Vec<i64>> {
    printed(&program(HEAD_DIMS[0]), name)
}

fn registers(name: &str) -> (rapt_layout::Layout, i64, i64, i64) {
    let atom = Atom::named(name).unwrap();
    atom.verify().unwrap();
    let (threads, values) = atom.threads_and_values().unwrap();
    let Map::Registers { tv } = atom.map else { panic!("{name} is not in registers") };
    (tv, threads, values, atom.rows)
}

/// Row and column of what thread `thread` holds as its value `value`, of an atom with so many rows.
fn element(tv: &rapt_layout::Layout, rows: i64, thread: i64, value: i64) -> (i64, i64) {
    let at = tv.at_coord(&[thread, value].into()).unwrap();
    (at % rows, at / rows)
}

/// Row and column of element `e` of tile `nt` of the sums of a thread of four warps, by `accumulator`.
struct Sums(Vec<Vec<i64>>);

impl Sums {
    fn read(program: &Path) -> Self {
        Sums(printed(program, "accumulator"))
    }

    fn at(&self, thread: i64, nt: i64, e: i64) -> (i64, i64) {
        let [_, row, column] = self.0[thread as usize][..] else { panic!("three numbers") };
        (16 * (thread / 32) + row + 8 * (e / 2), 8 * nt + column + e % 2)
    }
}

#[test]
fn a_threads_scores_are_the_accumulators_of_wgmma_and_mma() {
    let sums = Sums(map("accumulator"));
    for n in [64, 80, 96, 112, 128, 256] {
        let (tv, threads, values, rows) = registers(&format!("wgmma.m64n{n}k16.f32.d"));
        assert_eq!((threads, values), (128, n / 2));
        for thread in 0..threads {
            for (nt, e) in (0..n / 8).flat_map(|nt| (0..4).map(move |e| (nt, e))) {
                assert_eq!(element(&tv, rows, thread, nt * 4 + e), sums.at(thread, nt, e));
            }
        }
    }
    let (tv, threads, values, rows) = registers("mma.m16n8k16.f32.c");
    for (lane, e) in (0..threads).flat_map(|lane| (0..values).map(move |e| (lane, e))) {
        assert_eq!(element(&tv, rows, lane, e), sums.at(lane, 0, e));
    }
}

#[test]
fn packed_scores_are_the_operand_of_the_next_product() {
    let program = program(HEAD_DIMS[0]);
    let sums = Sums::read(&program);
    for (name, warps) in [("wgmma.m64n8k16.bf16.a", 4), ("mma.m16n8k16.bf16.a", 1)] {
        let (tv, threads, values, rows) = registers(name);
        assert_eq!((threads, values), (32 * warps, 8));
        for line in printed(&program, "operand") {
            let [nt, r, tile, word] = line[..] else { panic!("four numbers") };
            for (thread, e) in (0..threads).flat_map(|thread| (0..2).map(move |e| (thread, e))) {
                let (row, key) = element(&tv, rows, thread, word * 2 + e);
                assert_eq!((row, 16 * tile + key), sums.at(thread, nt, r * 2 + e), "{name} {thread} {nt} {r}");
            }
        }
    }
}

#[test]
fn bits_of_keys_are_in_their_order() {
    let bit: BTreeMap<(i64, i64), i64> = map("bits").into_iter().map(|line| ((line[0], line[1]), line[2])).collect();
    assert_eq!(bit.len(), 32);
    assert_eq!(bit.values().collect::<BTreeSet<_>>().len(), 32);
    for line in map("before") {
        let [n, count] = line[..] else { panic!("two numbers") };
        for ((nt, e), bit) in &bit {
            // `below` of hopper/consumer.cuh sets the lowest `count` bits.
            assert_eq!(*bit < count, nt * 8 + e < n, "{n} {nt} {e}");
        }
    }
}

#[test]
fn an_element_of_a_box_lies_where_wgmma_reads_it() {
    let place = |name: &str| {
        let Map::Storage { layout, .. } = Atom::named(name).unwrap().map else { panic!("{name} is not in memory") };
        layout
    };
    // Queries and keys are rows of 64 columns, K-major; values are rows too, and so MN-major: columns are the product's.
    let (keys, values) = (place("wgmma.smem.k.128b.bf16.x64"), place("wgmma.smem.mn.128b.bf16.x64"));
    for line in map("box") {
        let [row, column, byte] = line[..] else { panic!("three numbers") };
        assert_eq!(keys.at_coord(&[row, column].into()).unwrap(), byte);
        assert_eq!(values.at_coord(&[column, row].into()).unwrap(), byte);
        // The distance that the descriptor names, and what tiles are aligned to.
        assert!((row, column) != (8, 0) || byte == 1024);
    }
}

/// A store of four 8 x 8 matrices by a warp, two elements of each a lane: where they go, how many a lane has, and rows of a matrix.
fn stored_by_four(name: &str) -> (rapt_layout::Layout, i64, i64) {
    let (tv, threads, values, rows) = registers(name);
    assert_eq!((threads, values, rows), (32, 8, 8));
    (tv, values, rows)
}

/// The byte of each row and column of a box.
fn bytes_of_box(program: &Path) -> BTreeMap<(i64, i64), i64> {
    printed(program, "box").into_iter().map(|line| ((line[0], line[1]), line[2])).collect()
}

#[test]
fn sums_leave_registers_for_the_boxes_that_are_written_out() {
    let (tv, values, rows) = stored_by_four("stmatrix.x4");
    let program = program(HEAD_DIMS[0]);
    let sums = Sums::read(&program);
    let swizzled = bytes_of_box(&program);
    let address: BTreeMap<(i64, i64, i64), i64> =
        printed(&program, "stmatrix").into_iter().map(|line| ((line[0], line[1], line[2]), line[3])).collect();
    for ((lane, nt, first), value) in address.keys().flat_map(|key| (0..values).map(move |value| (*key, value))) {
        // Which lane names the row that this lane's value goes to.
        let (matrix, half) = (value / 2, value % 2);
        let (row, column) = element(&tv, rows, lane, value);
        let column = column - 8 * matrix;
        let stored = address[&(8 * matrix + row, nt, first)] + 2 * column;
        // The words are of rows 0 and 1 of a tile, then of the next.
        let (sum_row, sum_column) = sums.at(lane, nt + matrix / 2, matrix % 2 * 2 + half);
        // 16 rows of a box of 64 columns, then those of the next.
        let box_at = (sum_column / 64 - first) * (16 * 128);
        assert_eq!(stored, box_at + swizzled[&(sum_row, sum_column % 64)], "{nt} {lane} {value}");
    }
    // Where lanes write out themselves: 16 bytes of four rows each, and which lane's row that is.
    let mut written = BTreeSet::new();
    for line in printed(&program, "out") {
        let [_, i, row, column, owner] = line[..] else { panic!("five numbers") };
        assert_eq!(sums.at(owner, 0, i / 2 * 2).0, row);
        for n in 0..8 {
            assert_eq!(swizzled[&(row, column)] + 2 * n, swizzled[&(row, column + n)]);
            assert!(written.insert((row, column + n)));
        }
    }
    assert_eq!(written.len(), 16 * 64);
}

#[test]
fn sums_leave_registers_turned() {
    let (tv, values, rows) = stored_by_four("stmatrix.x4.trans");
    let program = program(HEAD_DIMS[0]);
    let sums = Sums::read(&program);
    let swizzled = bytes_of_box(&program);
    let address: BTreeMap<(i64, i64), i64> =
        printed(&program, "turned").into_iter().map(|line| ((line[0], line[1]), line[2])).collect();
    let mut seen = BTreeSet::new();
    for ((warp, lane), value) in address.keys().flat_map(|key| (0..values).map(move |value| (*key, value))) {
        let (matrix, half) = (value / 2, value % 2);
        let (row, column) = element(&tv, rows, lane, value);
        let column = column - 8 * matrix;
        let stored = address[&(warp, 8 * matrix + row)] + 2 * column;
        // The words are of rows 0 and 1 of a tile, then of the next.
        let (sum_row, sum_column) = sums.at(lane, matrix / 2, matrix % 2 * 2 + half);
        assert_eq!(stored, swizzled[&(sum_column, warp * 16 + sum_row)], "{warp} {lane} {value}");
        assert!(seen.insert(stored));
    }
    assert_eq!(seen.len(), 16 * 64);
}

#[test]
fn biases_lie_as_tma_swizzles_them_and_are_loaded_as_the_scores_lie() {
    let program = program(HEAD_DIMS[0]);
    let sums = Sums::read(&program);
    let (matrices, lanes, values, rows) = registers("ldmatrix.x4");
    assert_eq!((lanes, values, rows), (32, 8, 8));
    let biases = printed(&program, "biases");
    for box_units in [2, 4, 8] {
        let swizzle = Swizzle::of_span(box_units * 16).unwrap();
        let mut unit_at = BTreeMap::new();
        for line in biases.iter().filter(|line| line[0] == box_units) {
            let [_, row, unit, byte, beyond] = line[..] else { panic!("five numbers") };
            let in_box = row * box_units * 16 + unit % box_units * 16;
            let box_at = unit / box_units * (128 * box_units * 16);
            assert_eq!(byte, box_at + swizzle.apply(in_box), "{box_units} {row} {unit}");
            assert_eq!(byte, beyond, "{box_units} {row} {unit}");
            unit_at.insert((row, unit), byte);
        }
        // A lane of warp 0 names row lane % 16 of unit lane / 16 behind an even one (MaskRows::Place), and is given four words.
        for (pair, lane, value) in
            (0..box_units).flat_map(|n| (0..32).flat_map(move |lane| (0..8).map(move |value| (2 * n, lane, value))))
        {
            let (matrix, half) = (value / 2, value % 2);
            let (row, column) = element(&matrices, rows, lane, value);
            let names = 8 * matrix + row;
            let address = unit_at[&(names % 16, pair + names / 16)] + 2 * (column - 8 * matrix);
            let (score_row, key) = sums.at(lane, pair + matrix / 2, matrix % 2 * 2 + half);
            assert_eq!(address, unit_at[&(score_row, key / 8)] + key % 8 * 2, "{pair} {lane} {value}");
        }
    }
}

#[test]
fn a_row_of_booleans_becomes_a_word_for_each_lane_of_a_quad() {
    let program = program(HEAD_DIMS[0]);
    let sums = Sums::read(&program);
    for line in printed(&program, "seen") {
        let (keys, bits) = line.split_at(128);
        for (lane, nt, e) in (0..4).flat_map(|lane| (0..16).flat_map(move |nt| (0..2).map(move |e| (lane, nt, e)))) {
            let (_, key) = sums.at(lane, nt, e);
            let bit = bits[(lane * 32 + nt * 2 + e) as usize];
            assert_eq!(bit != 0, keys[key as usize] != 0, "{lane} {nt} {e}");
        }
    }
}

/// Row and column of the element at each byte of a tile.
fn elements_of_tile(program: &Path) -> BTreeMap<i64, (i64, i64)> {
    let lines = printed(program, "tile");
    let tile: BTreeMap<i64, (i64, i64)> = lines.iter().map(|line| (line[2], (line[0], line[1]))).collect();
    assert_eq!(tile.len(), lines.len(), "no two elements in one place");
    tile
}

#[test]
fn cp_async_puts_every_element_where_ldmatrix_reads_it_from_distinct_banks() {
    for head_dim in HEAD_DIMS {
        let program = program(head_dim);
        let tile = elements_of_tile(&program);
        let mut loaded = BTreeSet::new();
        for line in printed(&program, "load") {
            let [_, 2, to, from, 16] = line[..] else { panic!("16 bytes by cp.async: {line:?}") };
            for n in 0..8 {
                let (row, column) = tile[&(to + 2 * n)];
                assert_eq!(from + 2 * n, 2 * (row * 1000 + column), "{head_dim}");
                assert!(loaded.insert((row, column)));
            }
        }
        assert_eq!(loaded.len() as i64, 32 * head_dim);
        // 8 rows of a matrix: 16 bytes each, of the 128 that shared memory gives at once.
        let at: BTreeMap<(i64, i64), i64> = tile.iter().map(|(byte, element)| (*element, *byte)).collect();
        for (row, column) in (0..32).step_by(8).flat_map(|row| (0..head_dim).step_by(8).map(move |c| (row, c))) {
            let banks: BTreeSet<i64> = (row..row + 8).map(|row| at[&(row, column)] / 16 % 8).collect();
            assert_eq!(banks.len(), 8, "{head_dim} {row} {column}");
        }
    }
}

#[test]
fn each_product_of_q_and_k_has_the_operands_of_its_rows_keys_and_columns() {
    let (matrix, lanes, values, matrix_rows) = registers("ldmatrix.x4");
    let (a, _, a_values, a_rows) = registers("mma.m16n8k16.bf16.a");
    let (b, _, b_values, b_rows) = registers("mma.m16n8k16.bf16.b");
    assert_eq!((lanes, values, a_values, b_values), (32, 8, 8, 4));
    for head_dim in HEAD_DIMS {
        let program = program(head_dim);
        let tile = elements_of_tile(&program);
        // k lies behind 16 rows of q, as row 16 lies behind 16 rows; its units are in their order.
        let (q_bytes, _) = tile.iter().find(|(_, element)| **element == (16, 0)).unwrap();
        // Of each lane: the addresses that it names, and its products.
        let (mut named, mut products) = (vec![Vec::new(); 32], vec![Vec::new(); 32]);
        for line in printed(&program, "multiply") {
            match line[..] {
                [lane, 0, address, _, _] => named[lane as usize].push(address),
                [lane, 1, nt, a, b] => products[lane as usize].push((nt, a, b)),
                _ => panic!("an operand of several ldmatrix: {line:?}"),
            }
        }
        // Row and column, of q or of k, that lane `lane` has as half `half` of word `word`, which names call and matrix.
        let value_of = |lane: i64, word: i64, half: i64| {
            let (call, at) = ((word / 4) as usize, word % 4);
            let (row, column) = element(&matrix, matrix_rows, lane, at * 2 + half);
            let byte = named[(8 * at + row) as usize][call] + 2 * (column - 8 * at);
            if byte < *q_bytes { (false, tile[&byte]) } else { (true, tile[&(byte - q_bytes)]) }
        };
        for lane in 0..32 {
            let mut columns: BTreeMap<i64, i64> = BTreeMap::new();
            assert_eq!(products[lane as usize].len() as i64, 4 * head_dim / 16);
            for (nt, a_word, b_word) in &products[lane as usize] {
                let d = *columns.entry(*nt).and_modify(|d| *d += 16).or_insert(0);
                for value in 0..a_values {
                    let (row, column) = element(&a, a_rows, lane, value);
                    assert_eq!(value_of(lane, a_word + value / 2, value % 2), (false, (row, d + column)));
                }
                for value in 0..b_values {
                    let (row, column) = element(&b, b_rows, lane, value);
                    assert_eq!(value_of(lane, b_word + value / 2, value % 2), (true, (8 * nt + column, d + row)));
                }
            }
            assert!(columns.values().all(|d| *d == head_dim - 16) && columns.len() == 4, "every column of every key");
        }
    }
}

/// The kinds of kernels/common/codes.cuh, each by a format whose codes it is.
const KINDS: [(i64, Format); 6] = [
    (1, Format::Int8),
    (2, Format::Uint8),
    (3, Format::Int4),
    (4, Format::E4m3fn),
    (5, Format::E5m2),
    (6, Format::Nvfp4),
];

#[test]
fn swizzled_factors_are_read_where_they_stand() {
    let lines = map("swizzled");
    assert_eq!(lines.len(), 300 * 4 * (1 + 2 + 5));
    for line in lines {
        let [tiles, row, column, place] = line[..] else { panic!("four numbers") };
        let expected = swizzle::swizzled(row as usize, column as usize, 4 * tiles as usize);
        assert_eq!(place as usize, expected, "({row}, {column}) in rows of {tiles} tiles");
    }
}

#[test]
fn eight_codes_become_their_numbers_in_their_order() {
    for arch in [800, 890] {
        let program = compiled(HEAD_DIMS[0], arch);
        let mut seen: BTreeMap<[i64; 4], BTreeSet<i64>> = BTreeMap::new();
        for line in printed(&program, "numbers") {
            let [kind, half, zero_point, column, code, bits] = line[..] else { panic!("six numbers") };
            let (_, format) = KINDS.into_iter().find(|of| of.0 == kind).unwrap();
            let (expected, got) = (format.decode(code as u8) - zero_point as f32, f32::from_bits(bits as u32));
            let place = format!("{format} {code} less {zero_point} in column {column}, float16 {half}");
            assert!(got == expected || got.is_nan() && expected.is_nan(), "{place}: {got}, not {expected}");
            let is_float = format.has_zero_point() || got != 0.0;
            assert!(is_float || got.is_sign_negative() == expected.is_sign_negative(), "{place}: the sign of 0");
            seen.entry([kind, half, zero_point, column]).or_default().insert(code);
        }
        assert_eq!(seen.len(), 2 * 8 * (5 + 6));
        for ([kind, ..], codes) in seen {
            assert_eq!(codes.len(), if [3, 6].contains(&kind) { 16 } else { 256 }, "every code in every column");
        }
    }
}

#[test]
fn codes_are_multiplied_as_their_numbers_each_once() {
    let kinds = KINDS;
    // By bits in their place, and as compute capability 8.9 converts e4m3fn.
    for arch in [800, 890] {
        let program = compiled(HEAD_DIMS[0], arch);
        let mut tiles: BTreeMap<[i64; 5], BTreeSet<(i64, i64)>> = BTreeMap::new();
        for line in printed(&program, "codes") {
            let [side, operand, kind, dim, run, row, column, code, bits] = line[..] else { panic!("nine numbers") };
            let (_, format) = kinds.into_iter().find(|of| of.0 == kind).unwrap();
            // uint8 comes out 128 too small without a bias: its zero point makes up for it.
            let less = if kind == 2 && operand != 1 { 128.0 } else { 0.0 };
            let expected = format.decode(code as u8) - less;
            let got = f32::from_bits(bits as u32);
            let place = format!("{format} {code} as {operand} at {row} {column} of {dim} by {run}");
            assert_eq!(got, expected, "{place}");
            assert!(got != 0.0 || got.is_sign_negative() == format.decode(code as u8).is_sign_negative(), "{place}");
            assert!(tiles.entry([side, operand, kind, dim, run]).or_default().insert((row, column)), "{place} twice");
        }
        assert_eq!(tiles.len(), 3 * (6 * 9 + 2));
        for ([_, _, _, dim, _], elements) in tiles {
            assert_eq!(elements.len() as i64, 16 * dim);
            assert!(elements.iter().all(|(row, column)| (0..16).contains(row) && (0..dim).contains(column)));
        }
    }
}
