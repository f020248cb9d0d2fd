//! The items of backward_hopper.cu and backward_hopper_wide.cu, by the kernels' own source on this machine's processor: each tile of keys once, each tile of
//! queries that sees it, and turns that only wait for items taken before.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::process::Stdio;
use std::sync::{LazyLock, Mutex, PoisonError};

use rapt_core::{BackwardSpec, Causal, GradientForms, Options, Tile};
use rapt_testkit::Rng;

use super::*;
use crate::backward::{HOPPER_KEYS, HOPPER_ROWS, HOPPER_TALL_ROWS, HOPPER_TURNED_ROWS, HOPPER_WIDE_KEYS, HopperItems};

/// The programs that are compiled: for all tests, as none can be written while another test runs it.
static COMPILED: LazyLock<Mutex<HashSet<PathBuf>>> = LazyLock::new(Mutex::default);

/// The program that prints items of so many queries a tile and keys.
fn program([rows, keys]: [usize; 2], is_varlen: bool) -> PathBuf {
    let program = folder().join(format!("items-{rows}-{keys}-{is_varlen}"));
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if !compiled.contains(&program) {
        std::fs::create_dir_all(folder()).unwrap();
        let own = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
        command.args(["-std=c++17", "-O1", "-w", &format!("-DBLOCK_M={rows}"), &format!("-DBLOCK_N={keys}")]);
        command.arg(format!("-DVARLEN={}", u8::from(is_varlen)));
        command.arg("-I").arg(own.join("tests/host")).arg("-I").arg(own.join("kernels"));
        let output = command.arg(own.join("tests/host/items.cpp")).arg("-o").arg(&program).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        compiled.insert(program.clone());
    }
    program
}

/// What the kernels' source says of the items in `bytes`, of so many queries a tile and keys: a list of numbers for each.
pub(super) fn printed(bytes: Vec<u8>, tiles: [usize; 2], is_varlen: bool) -> Vec<Vec<i64>> {
    let mut child =
        Command::new(program(tiles, is_varlen)).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || input.write_all(&bytes).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    let numbers = |line: &str| line.split(' ').map(|number| number.parse().unwrap()).collect();
    String::from_utf8(output.stdout).unwrap().lines().map(numbers).collect()
}

fn random_spec(rng: &mut Rng) -> BackwardSpec {
    let [batch, kv_heads, group] = [1 + rng.below(3), 1 + rng.below(6), rng.pick(&[1, 1, 3])];
    let lengths = [1, 63, 64, 65, 80, 81, 127, 128, 129, 300, 513, 1000 + rng.below(500), 8191, 8192 + rng.below(500)];
    let [q_len, kv_len] = [rng.pick(&lengths), rng.pick(&lengths)];
    let width = |rng: &mut Rng| rng.pick(&[None, None, Some(0), Some(1), Some(63), Some(127), Some(128), Some(1000)]);
    let options = Options {
        causal: rng.pick(&[None, None, Some(Causal::TopLeft), Some(Causal::BottomRight)]),
        window: Window { left: width(rng), right: width(rng) },
        ..Options::default()
    };
    spec_of([batch, kv_heads * group, q_len, 1], [batch, kv_heads, kv_len, 1], &options)
}

fn spec_of(q: [usize; 4], k: [usize; 4], options: &Options) -> BackwardSpec {
    let [of_q, of_k] = [q, k].map(|shape| vec![0f32; shape.iter().product()]);
    let q = View::contiguous("q", &of_q, q.into()).unwrap();
    let k = View::contiguous("k", &of_k, k.into()).unwrap();
    let forward = Spec::builder(&q, &k, &k, options).return_lse(true).build().unwrap();
    BackwardSpec::new(forward, &GradientForms::new(&q)).unwrap()
}

/// The gradients of one key head of `spec`, with its query heads, alone.
fn one_head_of(spec: &BackwardSpec) -> BackwardSpec {
    let forward = spec.forward();
    let options = Options { causal: forward.causal, window: forward.window, ..Options::default() };
    let [q, k] = [[1, forward.group_size(), forward.q_len(), 1], [1, 1, forward.kv_len(), 1]];
    spec_of(q, k, &options)
}

/// Takes the items of one request from `lines`, and holds them to what its positions say.
pub(super) fn judge(spec: &BackwardSpec, [of_tile, of_item]: [usize; 2], lines: &mut impl Iterator<Item = Vec<i64>>) {
    let forward = spec.forward();
    let (q_len, kv_len, range) = (forward.q_len(), forward.kv_len(), forward.block_range());
    let (mut taken, mut added) = (HashSet::new(), HashMap::new());
    let (key_tiles, query_tiles) = (kv_len.div_ceil(of_item), q_len.div_ceil(of_tile));
    for _ in 0..forward.batch() * forward.num_kv_heads() * key_tiles {
        let line = lines.next().expect("an item");
        let [batch, head, tile, whole_from, whole_to] = line[..5] else { panic!("{line:?}") };
        assert!((batch as usize) < forward.batch() && (head as usize) < forward.num_kv_heads(), "{line:?}");
        assert!((tile as usize) < key_tiles && taken.insert((batch, head, tile)), "{line:?}");
        let keys = tile as usize * of_item..((tile as usize + 1) * of_item).min(kv_len);
        let mut seeing = HashSet::new();
        for of in line[5..].chunks(3) {
            let [i, turn, in_all] = of else { panic!("{line:?}") };
            assert!((0..query_tiles as i64).contains(i) && seeing.insert(*i), "{line:?}");
            let (before, all): &mut (i64, i64) = added.entry((batch, head, *i)).or_insert((0, *in_all));
            assert_eq!((turn, in_all), (&*before, &*all), "tile {i} of {line:?} of {forward:?}");
            *before += 1;
        }
        for i in 0..query_tiles as i64 {
            let rows = i as usize * of_tile..((i as usize + 1) * of_tile).min(q_len);
            let met = range.tile(rows.start, rows.end, keys.start, keys.end);
            assert!(met == Tile::Empty || seeing.contains(&i), "{line:?} leaves {i} out");
            if (whole_from..=whole_to).contains(&(i * of_tile as i64)) {
                assert!(met == Tile::Full && rows.len() == of_tile && keys.len() == of_item, "{i} of {line:?}");
            }
        }
    }
    for i in 0..query_tiles {
        let rows = i * of_tile..((i + 1) * of_tile).min(q_len);
        let (lo, hi) = range.keys_of_run(rows.start, rows.end);
        // backward_parts.cu reads what these sums are, and waits for all turns.
        assert!(lo == hi || added.contains_key(&(0, 0, i as i64)), "nothing adds to tile {i} of {forward:?}");
    }
    for ((_, _, i), (turns, in_all)) in added {
        assert_eq!(turns, in_all, "tile {i} of {forward:?}");
    }
}

#[test]
fn items_wait_only_for_items_taken_before() {
    let mut rng = Rng::new(1);
    let specs: Vec<BackwardSpec> = (0..400).map(|_| random_spec(&mut rng)).collect();
    let of_keys = [HOPPER_TALL_ROWS, HOPPER_TURNED_ROWS, HOPPER_ROWS].map(|rows| [rows, HOPPER_KEYS]);
    for tiles in of_keys.into_iter().chain([[HOPPER_ROWS, HOPPER_WIDE_KEYS]]) {
        let items: Vec<HopperItems> =
            specs.iter().map(|spec| HopperItems::new(spec, tiles[1], 1 + rng.below(140))).collect();
        let bytes = items.iter().flat_map(|of| of.as_bytes().to_vec()).collect();
        let mut lines = printed(bytes, tiles, false).into_iter();
        for spec in &specs {
            judge(spec, tiles, &mut lines);
        }
        assert_eq!(lines.next(), None);
    }
}

/// dq is summed in that order: its bits are those of the head alone.
#[test]
fn the_order_of_a_head_does_not_depend_on_what_is_beside_it() {
    let mut rng = Rng::new(2);
    for [rows, keys] in
        [[HOPPER_TALL_ROWS, HOPPER_KEYS], [HOPPER_TURNED_ROWS, HOPPER_KEYS], [HOPPER_ROWS, HOPPER_WIDE_KEYS]]
    {
        let specs: Vec<BackwardSpec> = (0..100).map(|_| random_spec(&mut rng)).collect();
        for spec in &specs {
            let [all, alone] = [(spec, 132), (&one_head_of(spec), 78)].map(|(spec, blocks)| {
                let lines = printed(HopperItems::new(spec, keys, blocks).as_bytes().to_vec(), [rows, keys], false);
                lines.into_iter().filter(|line| line[..2] == [0, 0]).collect::<Vec<_>>()
            });
            assert_eq!(all, alone, "{:?}", spec.forward());
        }
    }
}
