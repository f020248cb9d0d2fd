//! What `cargo xtask tune` runs: the tiles of one instruction set, measured. A line of JSON per class, then one of provenance.
//!
//! ```text
//! for each class, for each axis (block_n, rows, …), the others as chosen so far:
//!     every candidate agrees with the reference on small problems, or the run ends
//!     rounds × (candidates in turn, a batch of calls each); a candidate's time is the median of its rounds' fastest calls
//!     the fastest is taken if it beats the one held so far by more than the margin
//! ```
//! Forward runs on one thread, where tiles matter; decode on `threads`, because they share the memory. K and V of decode
//! rotate through buffers beyond the last cache. Deliberately absent: the choice of classes' shapes by anyone else, peers.

use std::collections::HashSet;
use std::time::Instant;

use half::{bf16, f16};
use rapt_core::{
    Arch, COMPUTED, Caps, DType, Element, Executor, Kernel, Operands, Options, Result, SerialExecutor, Spec, Tensors,
    View, ViewMut, Workspace,
};
use rapt_cpu::run;
use rapt_cpu::tiles::{DecodeTile, ForwardTile, Tiles};
use rapt_cpu::tune::select_with;
use rapt_testkit::{Config, Rng, conformance};

/// A faster candidate is taken only beyond this: below it is noise.
const MARGIN: f64 = 0.02;
/// Rows per item that long queries begin with.
const LONG_ROWS: usize = 256;
/// The least that one turn of a candidate lasts, in seconds.
const TURN: f64 = 0.004;

struct ScopedThreads(usize);

impl Executor for ScopedThreads {
    fn threads(&self) -> usize {
        self.0
    }
    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        std::thread::scope(|scope| {
            for chunk in 1..chunks {
                scope.spawn(move || work(chunk));
            }
            work(0);
        });
        Ok(())
    }
}

/// The number `index` of a tile, by the name of its axis, as the table writes it.
const FORWARD: [&str; 3] = ["block_n", "rows", "narrow"];
const DECODE: [&str; 4] = ["block_n", "pv_keys", "ahead_bytes", "ahead_bytes_apart"];

/// A class: its names, the shape that stands for it (batch, query heads, kv heads, q_len, kv_len, head_dim).
struct Class {
    kernel: &'static str,
    names: [&'static str; 2],
    shape: [usize; 6],
}

fn classes() -> Vec<Class> {
    let mut all = Vec::new();
    for (head_dim, dim) in [("64", 64), ("128", 128), ("more", 256)] {
        // The longest first: its block_n is that of all lengths.
        for (q_len, heads, len) in [("more", 4, 1024), ("1023", 4, 512), ("255", 16, 77)] {
            all.push(Class { kernel: "forward", names: [head_dim, q_len], shape: [1, heads, heads, len, len, dim] });
        }
    }
    all.push(Class { kernel: "decode", names: ["any", "1"], shape: [1, 16, 16, 1, 4096, 128] });
    all.push(Class { kernel: "decode", names: ["any", "more"], shape: [1, 32, 8, 1, 8192, 128] });
    all
}

type Numbers = Vec<usize>;

fn numbers(kernel: &str, tiles: &Tiles) -> Numbers {
    if kernel == "forward" { tiles.forward.numbers().to_vec() } else { tiles.decode.numbers().to_vec() }
}

fn tiles(kernel: &str, numbers: &[usize]) -> Tiles {
    let default = Tiles::DEFAULT;
    if kernel == "forward" {
        let forward = ForwardTile::new(numbers[0], numbers[1], numbers[2] == 1).expect("of the lists");
        Tiles { forward, ..default }
    } else {
        let decode = DecodeTile::new(numbers[0], numbers[1], numbers[2], numbers[3]).expect("of the lists");
        Tiles { decode, ..default }
    }
}

fn candidates(kernel: &str, axis: usize) -> Vec<usize> {
    match (kernel, axis) {
        ("forward", 0) => ForwardTile::BLOCK_N.to_vec(),
        ("forward", 1) => ForwardTile::ROWS.to_vec(),
        ("forward", _) => vec![0, 1],
        (_, 0) => DecodeTile::BLOCK_N.to_vec(),
        (_, 1) => DecodeTile::PV_KEYS.to_vec(),
        _ => DecodeTile::AHEAD_BYTES.to_vec(),
    }
}

/// One element of `dtype`, from any number.
trait Number: Element {
    fn of(x: f64) -> Self;
}

macro_rules! number {
    ($($t:ty: $of:expr),*) => { $(impl Number for $t {
        fn of(x: f64) -> Self {
            $of(x)
        }
    })* };
}

number!(f64: |x| x, f32: |x| x as f32, f16: f16::from_f64, bf16: bf16::from_f64);

/// Buffers of one class, long enough to rotate.
struct Bench<T> {
    q: Vec<T>,
    kv: Vec<T>,
    out: Vec<T>,
    shape: [usize; 6],
    copies: usize,
    turn: usize,
}

impl<T: Number> Bench<T> {
    fn new(shape: [usize; 6], decode: bool, rotate_bytes: usize) -> Self {
        let [batch, heads, kv_heads, q_len, kv_len, dim] = shape;
        let one = 2 * batch * kv_heads * kv_len * dim;
        let copies = if decode { rotate_bytes.div_ceil(one * size_of::<T>()).max(1) } else { 1 };
        let mut rng = Rng::new(7);
        let base: Vec<T> = (0..1 << 14).map(|_| T::of(rng.normal())).collect();
        let filled = |n: usize| base.iter().copied().cycle().take(n).collect::<Vec<T>>();
        let q_size = batch * heads * q_len * dim;
        Bench { q: filled(q_size), kv: filled(one * copies), out: vec![T::of(0.0); q_size], shape, copies, turn: 0 }
    }

    fn call(&mut self, job: &Job<'_>, tiles: &Tiles, apart: bool, workspace: &mut Workspace) -> f64 {
        let [batch, heads, kv_heads, q_len, kv_len, dim] = self.shape;
        let one = batch * kv_heads * kv_len * dim;
        let (k, v) = self.kv[2 * one * self.turn..2 * one * (self.turn + 1)].split_at(one);
        self.turn = (self.turn + 1) % self.copies;
        let shape = |heads, len| if apart { [batch, len, heads, dim] } else { [batch, heads, len, dim] };
        let options = Options {
            layout: if apart { rapt_core::TensorLayout::Bshd } else { rapt_core::TensorLayout::Bhsd },
            ..Options::default()
        };
        let view = |name, data, heads, len: usize| View::contiguous(name, data, shape(heads, len).into());
        let tensors = Tensors::new(
            view("q", &self.q, heads, q_len).expect("as long as its shape"),
            view("k", k, kv_heads, kv_len).expect("as long as its shape"),
            view("v", v, kv_heads, kv_len).expect("as long as its shape"),
            ViewMut::contiguous("out", &mut self.out, shape(heads, q_len).into()).expect("as long as its shape"),
        );
        let out = &tensors.out;
        let spec =
            Spec::builder(&tensors.q, &tensors.k, &tensors.v, &options).out(out).build().expect("a valid request");
        let caps = Caps { arch: job.arch, threads: job.executor.threads(), clock_hz: None };
        let plan = select_with(&spec, &caps, tiles).expect("a plan");
        assert_eq!(plan.key().kernel == Kernel::Decode, job.kernel == "decode", "a shape of the class");
        workspace.ensure(plan.workspace_bytes()).expect("memory");
        let mut operands = Operands::check(tensors, &spec).expect("valid operands");
        let start = Instant::now();
        run(&plan, &mut operands, workspace, job.executor).expect("a run");
        start.elapsed().as_secs_f64()
    }
}

/// What is measured, and how.
struct Job<'a> {
    arch: Arch,
    dtype: DType,
    kernel: &'static str,
    executor: &'a dyn Executor,
    rounds: usize,
}

/// Microseconds of each candidate: the median over rounds of the fastest call of a turn.
fn measure<T: Number>(job: &Job<'_>, bench: &mut Bench<T>, apart: bool, all: &[Numbers]) -> Vec<f64> {
    let mut workspace = Workspace::new();
    let mut times = vec![Vec::new(); all.len()];
    for round in 0..=job.rounds {
        for at in 0..all.len() {
            let at = (at + round) % all.len();
            let tiles = tiles(job.kernel, &all[at]);
            let (start, mut best, mut calls) = (Instant::now(), f64::INFINITY, 0);
            while calls < 2 || start.elapsed().as_secs_f64() < TURN {
                best = best.min(bench.call(job, &tiles, apart, &mut workspace));
                calls += 1;
            }
            // The first round warms up.
            if round > 0 {
                times[at].push(best * 1e6);
            }
        }
    }
    for times in &mut times {
        times.sort_by(f64::total_cmp);
    }
    times.iter().map(|times| times[times.len() / 2]).collect()
}

/// Every candidate on small problems of every kind.
fn obeys(job: &Job<'_>, numbers: &Numbers, proven: &mut Proven) {
    if !proven.insert((job.arch.name(), job.dtype, job.kernel, numbers.clone())) {
        return;
    }
    let tiles = tiles(job.kernel, numbers);
    let mut workspace = Workspace::new();
    let engine = |spec: &Spec, tensors: Tensors<'_>| {
        let plan = select_with(spec, &Caps { arch: job.arch, threads: 1, clock_hz: None }, &tiles)?;
        workspace.ensure(plan.workspace_bytes())?;
        run(&plan, &mut Operands::check(tensors, spec)?, &mut workspace, &SerialExecutor)
    };
    let config = Config { problems: 12, dtypes: vec![job.dtype], fixed: false, ..Config::default() };
    if let Err(failure) = conformance(&mut [Box::new(engine)], &config) {
        panic!("{} {numbers:?}: {failure}", job.kernel);
    }
}

/// Candidates that agreed with the reference, once for all classes.
type Proven = HashSet<(&'static str, DType, &'static str, Numbers)>;

/// Goes along the axes of one class; answers what is chosen.
fn tune<T: Number>(
    job: &Job<'_>,
    class: &Class,
    held: Numbers,
    first_axis: usize,
    rotate_bytes: usize,
    proven: &mut Proven,
) -> Numbers {
    let axes: &[&str] = if job.kernel == "forward" { &FORWARD } else { &DECODE };
    let mut bench = Bench::<T>::new(class.shape, job.kernel == "decode", rotate_bytes);
    let start = held.clone();
    let (mut held, mut seen) = (held, Vec::new());
    for axis in first_axis..axes.len() {
        // Compiled for vectors of sixteen; and only the shortest class has a rest of rows to speak of.
        let wide = matches!(job.arch, Arch::Avx512 | Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx)
            && job.dtype != DType::F64;
        if axes[axis] == "narrow" && !(wide && class.names[1] == "255") {
            continue;
        }
        let all: Vec<Numbers> = candidates(job.kernel, axis)
            .into_iter()
            .map(|number| {
                let mut numbers = held.clone();
                numbers[axis] = number;
                numbers
            })
            .collect();
        all.iter().for_each(|numbers| obeys(job, numbers, proven));
        let apart = axes[axis] == "ahead_bytes_apart";
        let us = measure(job, &mut bench, apart, &all);
        let of =
            |numbers: &Numbers| us[all.iter().position(|one| one == numbers).expect("the held one is a candidate")];
        let best = all.iter().min_by(|a, b| of(a).total_cmp(&of(b))).expect("candidates");
        let figures: Vec<String> = all.iter().zip(&us).map(|(one, us)| format!("[{},{us:.1}]", one[axis])).collect();
        seen.push(format!("\"{}\":[{}]", axes[axis], figures.join(",")));
        if of(best) < of(&held) * (1.0 - MARGIN) {
            held.clone_from(best);
        }
    }
    println!(
        "{{\"arch\":\"{}\",\"dtype\":\"{}\",\"kernel\":\"{}\",\"head_dim\":\"{}\",\"{}\":\"{}\",\"shape\":{:?},\"held\":{start:?},\"tile\":{held:?},\"measured_us\":{{{}}}}}",
        job.arch.name(),
        job.dtype,
        job.kernel,
        class.names[0],
        if job.kernel == "forward" { "q_len" } else { "rows" },
        class.names[1],
        class.shape,
        seen.join(",")
    );
    held
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| words.iter().position(|word| word == name).and_then(|at| words.get(at + 1));
    let number = |name: &str, default| value(name).map_or(default, |text| text.parse().expect("a number"));
    let (rounds, threads, rotate) = (number("--rounds", 7), number("--threads", 2), number("--rotate-mb", 160) << 20);
    // Of short queries too: which of them have tiles, `select` says.
    rapt_cpu::tile_every_request();
    let found = rapt_cpu::available();
    let asked = |name: &str| value("--arch").is_none_or(|list| list.split(',').any(|one| one == name));
    let (one, many) = (SerialExecutor, ScopedThreads(threads));
    let mut proven = Proven::new();
    for &arch in found.iter().filter(|arch| !["scalar", "avx512_vnni"].contains(&arch.name()) && asked(arch.name())) {
        for dtype in COMPUTED {
            // The dot instruction serves forward in bf16, tiles forward in what is a sum of bf16; the rest is AVX-512's.
            let pairs = matches!(arch, Arch::Avx512Bf16 | Arch::Amx);
            if pairs && dtype != DType::BF16 && (arch == Arch::Avx512Bf16 || dtype == DType::F64) {
                continue;
            }
            let mut block_n = 0;
            for class in classes().iter().filter(|class| !pairs || class.kernel == "forward") {
                let executor: &dyn Executor = if class.kernel == "decode" { &many } else { &one };
                let job = Job { arch, dtype, kernel: class.kernel, executor, rounds };
                let mut held = numbers(class.kernel, &Tiles::DEFAULT);
                let longest = class.names[1] == "more" || class.kernel == "decode";
                if !longest {
                    held[0] = block_n;
                } else if class.kernel == "forward" {
                    // Rows that lie apart are packed once per item: among equals, long queries share more of it.
                    held[1] = LONG_ROWS;
                }
                let first_axis = usize::from(!longest);
                let chosen = match dtype {
                    DType::F64 => tune::<f64>(&job, class, held, first_axis, rotate, &mut proven),
                    DType::F32 => tune::<f32>(&job, class, held, first_axis, rotate, &mut proven),
                    DType::F16 => tune::<f16>(&job, class, held, first_axis, rotate, &mut proven),
                    _ => tune::<bf16>(&job, class, held, first_axis, rotate, &mut proven),
                };
                block_n = chosen[0];
            }
        }
    }
    let unix_seconds =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    println!(
        "{{\"machine\":\"{}\",\"threads\":{threads},\"rounds\":{rounds},\"margin\":{MARGIN},\"unix_seconds\":{unix_seconds},\"words\":\"{}\"}}",
        machine(),
        words.join(" ")
    );
}

/// The processor, by vendor, family and model: what its instructions cost.
fn machine() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))?;
        Some(line.split(':').nth(1)?.trim().to_owned())
    };
    match (field("model name"), field("cpu family"), field("model")) {
        (Some(name), Some(family), Some(model)) => format!("{name} (family {family} model {model})"),
        _ => std::env::consts::ARCH.to_owned(),
    }
}
