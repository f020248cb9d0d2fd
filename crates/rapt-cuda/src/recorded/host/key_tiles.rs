//! What backward_rows.cu leaves of sequences to backward_hopper.cu, and what backward_parts.cu makes of the sums of those, by their own sources on this
//! machine's processor.

use std::cell::RefCell;
use std::collections::HashMap;

use rapt_core::{BackwardOperands, BackwardSpec, Causal, GradientForms, Options};

use super::items::{judge, printed};
use super::varlen_backward::{LAYOUT, Packed};
use super::*;
use crate::backward::{BackwardParams, HopperItems};
use crate::launch::BackwardLaunch;
use crate::launch::backward::PassStep;
use crate::select::{Caps, backward::launch_plan};
use crate::variant::Pass;

const CAPS: Caps =
    Caps { arch: Arch::Sm90a, multiprocessors: 132, shared_bytes: 227 * 1024, clock_hz: None, bandwidth: None };

/// Functions by their sources and options.
type Compiled = HashMap<(String, Vec<String>), (HostDriver, Function)>;

thread_local! {
    /// What a test has compiled.
    static COMPILED: RefCell<Compiled> = RefCell::default();
}

fn launched(step: &PassStep, params: &BackwardParams) {
    let variant = step.step.variant;
    COMPILED.with_borrow_mut(|compiled| {
        let (driver, function) = compiled.entry((variant.source(), variant.options())).or_insert_with_key(|of| {
            let machine_code = HostCompiler.compile("", &of.0, &of.1).unwrap().unwrap().bytes;
            let driver = HostDriver::default();
            let function = driver.load(0, &machine_code, variant.entry(), variant.shared_bytes()).unwrap();
            (driver, function)
        });
        // SAFETY: the parameters have addresses of this process, as the plan wants them.
        unsafe { driver.launch(function, step.step.grid(), 0, params.with_units(step.units).as_bytes()) }.unwrap();
    });
}

fn step(launch: &BackwardLaunch, pass: Pass) -> &PassStep {
    launch.steps.iter().find(|of| of.step.variant.algorithm.pass() == Some(pass)).expect("a launch of the pass")
}

/// A workspace, and numbers in it.
struct Workspace(Vec<u128>);

impl Workspace {
    fn address(&mut self) -> usize {
        self.0.as_mut_ptr() as usize
    }
    fn numbers<T: Copy>(&self, byte: usize, len: usize) -> Vec<T> {
        assert!(byte + len * size_of::<T>() <= self.0.len() * 16);
        // SAFETY: within the workspace, whose bytes are numbers of any kind; `byte` is a multiple of 16.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().byte_add(byte).cast(), len) }.to_vec()
    }
    fn put<T: Copy>(&mut self, byte: usize, numbers: &[T]) {
        assert!(byte + size_of_val(numbers) <= self.0.len() * 16);
        // SAFETY: as above.
        unsafe {
            std::ptr::copy_nonoverlapping(numbers.as_ptr(), self.0.as_mut_ptr().byte_add(byte).cast(), numbers.len());
        }
    }
}

/// Where each sequence begins and ends.
fn ranges(offsets: &[i32]) -> impl Iterator<Item = std::ops::Range<usize>> {
    offsets.windows(2).map(|of| of[0] as usize..of[1] as usize)
}

/// What the rows of a sequence begin with among tiles of so many rows.
fn first_tile(offsets: &[i32], sequence: usize, rows: usize) -> usize {
    offsets[sequence] as usize / rows + sequence + 1
}

/// Rows in tiles of their sequence: lse to the base 2, and nothing attended behind the last.
fn check_rows(of: &Packed, log2_lse: &[f32], padded: usize, tile_rows: usize) {
    let [.., lse] = &of.given;
    let lse = lse.values();
    let rows = lse.len() / of.heads[0];
    for head in 0..of.heads[0] {
        for (n, range) in ranges(&of.of_q).enumerate() {
            let at = head * padded + first_tile(&of.of_q, n, tile_rows) * tile_rows;
            for row in 0..range.len().next_multiple_of(tile_rows) {
                let given = (row < range.len()).then(|| lse[head * rows + range.start + row] as f32);
                // A lse that is not relied on is found anew.
                if given == Some(2000.0) {
                    continue;
                }
                let expected = match given {
                    None | Some(f32::NEG_INFINITY) => f32::INFINITY,
                    Some(lse) => lse * std::f32::consts::LOG2_E,
                };
                let got = log2_lse[at + row];
                assert!(got == expected || (got - expected).abs() < 1e-5, "row {row} of {n}: {got} {expected}");
            }
        }
    }
}

/// Items of each sequence are those of a call alone, each head's in the same order, in which each waits for items taken before; the items.
fn check_items(of: &Packed, items: HopperItems, tiles: [usize; 2], key_tiles: &[u8]) -> Vec<Vec<i64>> {
    let lines = printed([items.as_bytes(), key_tiles].concat(), tiles, true);
    let mut seen = 0;
    for (n, (queries, keys)) in ranges(&of.of_q).zip(ranges(&of.of_kv)).enumerate() {
        let own: Vec<Vec<i64>> =
            lines.iter().filter(|line| line[0] == n as i64).map(|line| [&[0], &line[1..]].concat()).collect();
        seen += own.len();
        if queries.is_empty() || keys.is_empty() {
            assert!(own.iter().all(|line| line.len() == 5), "{own:?}");
            continue;
        }
        let [q, k] = [[1, of.heads[0], queries.len(), 1], [1, of.heads[1], keys.len(), 1]];
        let [of_q, of_k] = [q, k].map(|shape| vec![0f32; shape.iter().product()]);
        let q = View::contiguous("q", &of_q, q.into()).unwrap();
        let k = View::contiguous("k", &of_k, k.into()).unwrap();
        let options = Options { layout: Default::default(), ..of.options };
        let forward = Spec::builder(&q, &k, &k, &options).return_lse(true).build().unwrap();
        let alone = BackwardSpec::new(forward, &GradientForms::new(&q)).unwrap();
        let of_alone = HopperItems::new(&alone, tiles[1], CAPS.multiprocessors as usize);
        let of_alone = printed(of_alone.as_bytes().to_vec(), tiles, false);
        for head in 0..of.heads[1] as i64 {
            let [own, alone] = [&own, &of_alone].map(|all| all.iter().filter(|line| line[1] == head));
            assert!(own.eq(alone), "head {head} of sequence {n}");
        }
        let mut own = own.into_iter();
        judge(&alone, tiles, &mut own);
        assert_eq!(own.next(), None);
    }
    // Keys before the first sequence and behind the last, a tile of each, have zeros, of no query.
    let others = lines.iter().filter(|line| !(0..of.of_q.len() as i64 - 1).contains(&line[0]));
    assert!(others.clone().all(|line| line.len() == 5));
    assert_eq!((others.count(), seen + 2 * of.heads[1]), (2 * of.heads[1], lines.len()));
    lines
}

/// How many of the items have added to both parts of each of a head's tiles of so many queries.
fn turns(of: &Packed, items: &[Vec<i64>], tiles: usize, tile_rows: usize) -> Vec<u32> {
    let mut all = vec![0; of.heads[0] * tiles * 2];
    let group = of.heads[0] / of.heads[1];
    for line in items.iter().filter(|line| line.len() > 5) {
        let first = first_tile(&of.of_q, line[0] as usize, tile_rows);
        for (head, of) in (0..group).flat_map(|n| line[5..].chunks(3).map(move |of| (line[1] as usize * group + n, of)))
        {
            let at = (head * tiles + first + of[0] as usize) * 2;
            all[at..at + 2].iter_mut().for_each(|turns| *turns += 1);
        }
    }
    all
}

/// Sums that say where they belong, as warps of backward_hopper.cu hold them; what lies beyond rows is no number.
fn sums(of: &Packed, dim: usize, hopper: &KernelVariant, sum_rows: usize) -> Vec<f32> {
    let row_floats = hopper.dq_row() as usize;
    let places = if hopper.turns_dq() { turned_places } else { places };
    let rows = if hopper.turns_dq() { hopper.block_m as usize } else { 64 };
    let mut all = vec![f32::NAN; of.heads[0] * sum_rows * row_floats];
    for head in 0..of.heads[0] {
        for (n, range) in ranges(&of.of_q).enumerate() {
            let mut at = (head * sum_rows + first_tile(&of.of_q, n, 16) * 16) * row_floats;
            for first in (0..range.len()).step_by(rows) {
                let sixteens = (range.len() - first).min(rows).div_ceil(16);
                for [row, column] in places(sixteens, row_floats) {
                    all[at] = value(head, first + row, column.min(dim));
                    at += 1;
                }
            }
        }
    }
    all
}

/// Row and column of each sum of so many times 16 rows: warps have 16 rows.
fn places(sixteens: usize, columns: usize) -> Vec<[usize; 2]> {
    let mut all = Vec::new();
    for column in (0..columns).step_by(8) {
        for (thread, e) in (0..sixteens * 32).flat_map(|thread| (0..4).map(move |e| (thread, e))) {
            all.push([thread / 32 * 16 + thread % 32 / 4 + e / 2 * 8, column + thread % 4 * 2 + e % 2]);
        }
    }
    all
}

/// The same where warps have 16 columns, a first group 64 of them.
fn turned_places(sixteens: usize, columns: usize) -> Vec<[usize; 2]> {
    let mut all = Vec::new();
    for group in [0..64, 64..columns] {
        for row in (0..sixteens * 16).step_by(8) {
            for (thread, e) in (0..group.len() * 2).flat_map(|thread| (0..4).map(move |e| (thread, e))) {
                let column = group.start + thread / 32 * 16 + thread % 32 / 4 + e / 2 * 8;
                all.push([row + thread % 4 * 2 + e % 2, column]);
            }
        }
    }
    all
}

/// A number that float16 holds.
fn value(head: usize, row: usize, column: usize) -> f32 {
    ((row * 7 + column * 3 + head) % 128) as f32
}

/// A request of these heads, planned for a device that has backward_hopper.cu.
struct Planned {
    of: Packed,
    dim: usize,
    /// Of how many sequences tiles are taken together, if not of as many as are planned.
    sequences: Option<usize>,
}

impl Planned {
    fn new(heads: [usize; 2], dim: usize, lengths: [&[usize]; 2], options: Options, guard: Guard) -> Self {
        let options = Options { layout: LAYOUT, softmax_scale: Some(1.0), ..options };
        Planned { of: Packed::of_heads(heads, DType::F16, dim, lengths, options, guard), dim, sequences: None }
    }

    /// Runs the passes before and behind backward_hopper.cu, and `between` them; the bits of dq.
    fn run(&self, between: impl FnOnce(&BackwardLaunch, HopperItems, &mut Workspace)) -> Vec<u64> {
        let [dq, ..] = self.of.with(self.of.totals(), None, |spec, tensors| {
            let launch = launch_plan(spec, &CAPS).unwrap();
            let items = launch.hopper.as_ref().unwrap().items;
            let items = self.sequences.map_or(items, |n| items.of_sequences(n));
            let mut workspace = Workspace(vec![u128::MAX; launch.workspace_bytes.div_ceil(16)]);
            let mut operands = BackwardOperands::check(tensors, spec).unwrap();
            let params = launch
                .params
                .at(&mut operands, workspace.address())
                .with_notes(&launch.noting.unwrap(), workspace.address())
                .with_items(&items);
            launched(step(&launch, Pass::Rows), &params);
            between(&launch, items, &mut workspace);
            launched(step(&launch, Pass::Parts), &params);
        });
        dq
    }

    fn check(&self) {
        let Planned { of, dim, .. } = self;
        let mut block_rows = 0;
        let dq = self.run(|launch, items, workspace| {
            let hopper = step(launch, Pass::Together).step.variant;
            let tiles = [hopper.block_m, hopper.block_n].map(|n| n as usize);
            let ([log2_lse, dq_sums, key_tiles], [padded_rows, sum_rows, key_units]) = launch.noting.unwrap().parts();
            check_rows(of, &workspace.numbers(log2_lse, of.heads[0] * padded_rows), padded_rows, tiles[0]);
            let lines = check_items(of, items, tiles, &workspace.numbers(key_tiles, key_units * 48));
            workspace.put(dq_sums, &sums(of, *dim, &hopper, sum_rows));
            let noted_heads = (of.of_q.len() - 1) * of.heads[1];
            let turns = turns(of, &lines, padded_rows / tiles[0], tiles[0]);
            workspace.put(launch.noting.unwrap().turns(noted_heads), &turns);
            block_rows = step(launch, Pass::Parts).step.variant.block_m as usize;
        });
        let rows = of.totals()[0].len();
        let mut expected = vec![0f32; of.heads[0] * rows * dim];
        for (queries, keys) in ranges(&of.of_q).zip(ranges(&of.of_kv)) {
            // With the diagonal at the last key the first rows see none where queries are more.
            let is_causal = of.options.causal.is_some();
            let unseen = if is_causal { queries.len().saturating_sub(keys.len()) / block_rows * block_rows } else { 0 };
            for head in 0..of.heads[0] {
                for row in if keys.is_empty() { 0..0 } else { unseen..queries.len() } {
                    for column in 0..*dim {
                        expected[(head * rows + queries.start + row) * dim + column] = value(head, row, column);
                    }
                }
            }
        }
        let got: Vec<f32> = dq.into_iter().map(|bits| f64::from_bits(bits) as f32).collect();
        let off = got.iter().zip(&expected).position(|(got, expected)| got != expected);
        assert_eq!(off.map(|at| (at / dim % rows, at % dim, got[at], expected[at])), None);
    }
}

#[test]
fn tiles_of_sequences_are_those_of_calls_alone() {
    let (plain, causal) = (Options::default(), Options::default().with_causal(Causal::BottomRight));
    let heap = Guard::Heap { shift: 0 };
    let mixed: [&[usize]; 2] = [&[70, 0, 0, 5, 129, 64, 17, 300], &[90, 10, 0, 0, 65, 128, 700, 1]];
    for dim in [32, 64, 80, 100, 128, 200] {
        Planned::new([2, 1], dim, mixed, plain, heap).check();
    }
    Planned::new([2, 1], 64, [&[300, 20, 1, 128], &[300, 200, 1, 130]], causal, heap).check();
    // One query head for a key head: last keys first, where the diagonal bounds what a key sees. One sequence after another, some, and more than a warp's lanes.
    let long: [&[usize]; 2] = [&[128, 640, 63, 1, 300], &[300, 640, 64, 513, 1]];
    for sequences in [1, 2, 3, 40] {
        let of = Planned::new([2, 2], 128, long, causal, heap);
        Planned { sequences: Some(sequences), ..of }.check();
    }
    // Long sequences have the other order of keys, beside short ones.
    let long: [&[usize]; 2] = [&[300, 8192, 8191], &[8300, 8192, 8191]];
    let before_or_at = Options { window: Window { left: Some(0), right: None }, ..plain };
    for options in [causal, before_or_at] {
        Planned::new([1, 1], 16, long, options, heap).check();
        Planned::new([2, 1], 16, long, options, heap).check();
    }
    let many: Vec<usize> = (0..75).map(|n| n * 37 % 200).collect();
    for sequences in [7, 40, 100] {
        let of = Planned::new([1, 1], 16, [&many, &many], causal, heap);
        Planned { sequences: Some(sequences), ..of }.check();
    }
}

#[test]
fn offsets_that_are_not_in_order_leave_tiles_without_keys() {
    let lengths: [&[usize]; 2] = [&[70, 0, 0, 5, 129, 64], &[90, 10, 0, 0, 65, 128]];
    let mut planned = Planned::new([2, 2], 64, lengths, Options::default(), Guard::BackPage);
    let good = [planned.of.of_q.clone(), planned.of.of_kv.clone()];
    for bad in [
        [2, 72, 60, 80, 10, 206, 270],
        [-5, 72, 72, 72, 77, 206, 270],
        [2, 72, 72, 72, 77, 206, i32::MAX],
        [5000, 4000, 3000, 2000, 1000, 500, -1],
    ] {
        for [q, kv] in [[&bad[..], &good[1]], [&good[0], &bad], [&bad, &bad]] {
            (planned.of.of_q, planned.of.of_kv) = (q.to_vec(), kv.to_vec());
            let dq = planned.run(|launch, items, workspace| {
                let ([.., key_tiles], [.., key_units]) = launch.noting.unwrap().parts();
                let tiles: Vec<[i32; 12]> = workspace.numbers(key_tiles, key_units);
                assert!(items.count() > 0 && tiles.iter().all(|tile| tile[4..6] == [0, 0]), "{q:?} {kv:?}");
            });
            // Nobody has added to dq: what is written are zeros, until it is computed by another kernel.
            assert_eq!(dq.len(), 2 * 64 * planned.of.totals()[0].len());
        }
    }
}
