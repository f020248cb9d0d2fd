//! Calibrates the estimate of `quantization_error`: how much larger than it the true error of a row is, over data of many kinds.
//!
//! ```text
//! RUSTFLAGS=-Ctarget-cpu=native cargo run --release -p rapt-reference --example calibrate > benches/calibration/tolerance.tsv
//! ```
//! The flag makes a fused multiplication one instruction, and changes no bit. 13 million rows, or as many as the argument says.
//! One line for each kind of data, each scheme and each length: all rows and the largest true / estimate of them; the rows where ε < 1 with
//! percentiles and the largest; whole heads (root of the sum of squares) where ε < 1 of every row; and how often a bound was less than the
//! error (never). One thread; the data follows from the numbers below alone.

use std::collections::BTreeMap;

use rapt_core::View;
use rapt_quant::{Format, Granularity, ScaleLayout, Scheme, measure, quantize};
use rapt_reference::{HeadErrors, Inputs, Problem, naive, quantization_error};

/// A generator of uniform and normal numbers (splitmix64, Box and Muller).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }
    fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
    fn normals(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| self.normal()).collect()
    }
    /// Student's t of 3 degrees of freedom.
    fn heavy(&mut self) -> f64 {
        let squares: f64 = (0..3).map(|_| self.normal().powi(2)).sum();
        self.normal() / (squares / 3.0).sqrt()
    }
}

const KINDS: [&str; 13] = [
    "gaussian",
    "outlier channels of k",
    "outlier channels of k and q",
    "outlier channels of v",
    "heavy tails",
    "low entropy",
    "uniform rows",
    "first key as sink",
    "sink logit",
    "rotary",
    "smooth",
    "repeated tokens",
    "offset values",
];

/// One head.
struct Head {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    sink: Option<f64>,
}

fn scale_channels(x: &mut [f64], dim: usize, channels: &[usize], factor: f64) {
    x.chunks_mut(dim).for_each(|row| channels.iter().for_each(|&c| row[c] *= factor));
}

fn make(kind: &str, random: &mut Random, (rows, len, dim): (usize, usize, usize)) -> Head {
    let (mut q, mut k, mut v) = (random.normals(rows * dim), random.normals(len * dim), random.normals(len * dim));
    let mut sink = None;
    let channels: Vec<usize> = (0..(dim / 32).max(1)).map(|_| random.below(dim)).collect();
    match kind {
        "outlier channels of k" => scale_channels(&mut k, dim, &channels, 30.0),
        "outlier channels of k and q" => {
            scale_channels(&mut k, dim, &channels, 10.0);
            scale_channels(&mut q, dim, &channels, 3.0);
        }
        "outlier channels of v" => scale_channels(&mut v, dim, &channels, 30.0),
        "heavy tails" => [&mut q, &mut k, &mut v].into_iter().flatten().for_each(|x| *x = random.heavy()),
        "low entropy" => {
            for row in q.chunks_mut(dim) {
                let j = random.below(len);
                row.iter_mut().zip(&k[j * dim..]).for_each(|(q, k)| *q = 0.3 * *q + 1.2 * k);
            }
        }
        "uniform rows" => q.iter_mut().for_each(|q| *q *= 0.02),
        "first key as sink" => {
            let along = random.normals(dim);
            q.chunks_mut(dim).for_each(|row| row.iter_mut().zip(&along).for_each(|(q, a)| *q = 0.7 * *q + 0.7 * a));
            let strength = (len as f64).ln() / (dim as f64).sqrt() * 1.4;
            k[..dim].iter_mut().zip(&along).for_each(|(k, a)| *k = strength * a);
            v[..dim].iter_mut().for_each(|v| *v *= 0.05);
        }
        "sink logit" => sink = Some((len as f64).ln()),
        "rotary" => {
            // A constant part of every key, turned by its position as rotary embeddings do.
            let base = random.normals(dim);
            for (j, row) in k.chunks_mut(dim).enumerate() {
                for pair in 0..dim / 2 {
                    let angle = j as f64 * 10_000f64.powf(-2.0 * pair as f64 / dim as f64);
                    let (x, y) = (base[2 * pair], base[2 * pair + 1]);
                    row[2 * pair] = 0.5 * row[2 * pair] + 2.0 * (x * angle.cos() - y * angle.sin());
                    row[2 * pair + 1] = 0.5 * row[2 * pair + 1] + 2.0 * (x * angle.sin() + y * angle.cos());
                }
            }
        }
        "smooth" => {
            // Each key and value is nearly the one before it.
            let keep = 0.995f64;
            let add = (1.0 - keep * keep).sqrt();
            for x in [&mut k, &mut v] {
                (dim..len * dim).for_each(|at| x[at] = keep * x[at - dim] + add * x[at]);
            }
        }
        "repeated tokens" => {
            let words = (len / 32).max(2).min(len);
            for j in words..len {
                let word = random.below(words);
                k.copy_within(word * dim..(word + 1) * dim, j * dim);
                v.copy_within(word * dim..(word + 1) * dim, j * dim);
            }
        }
        "offset values" => {
            let offset = random.normals(dim);
            v.chunks_mut(dim).for_each(|row| row.iter_mut().zip(&offset).for_each(|(v, o)| *v = 0.1 * *v + 3.0 * o));
        }
        _ => {}
    }
    Head { q, k, v, sink }
}

/// Quotients, counted by their logarithm.
#[derive(Default)]
struct Quotients {
    bins: BTreeMap<i32, u64>,
    count: u64,
    largest: f64,
    /// Where ε is 1 or more: how many, and the largest.
    far: (u64, f64),
}

impl Quotients {
    fn add(&mut self, quotient: f64, epsilon: f64) {
        if epsilon >= 1.0 {
            self.far = (self.far.0 + 1, self.far.1.max(quotient));
            return;
        }
        *self.bins.entry((quotient.max(1e-9).log2() * 16.0).ceil() as i32).or_default() += 1;
        self.count += 1;
        self.largest = self.largest.max(quotient);
    }
    /// The upper end of the bin in which this share of the quotients ends.
    fn percentile(&self, share: f64) -> f64 {
        let (mut seen, wanted) = (0, (share * self.count as f64).ceil() as u64);
        for (bin, count) in &self.bins {
            seen += count;
            if seen >= wanted {
                return f64::from(*bin).exp2().powf(1.0 / 16.0);
            }
        }
        0.0
    }
    fn merge(&mut self, other: &Quotients) {
        other.bins.iter().for_each(|(bin, count)| *self.bins.entry(*bin).or_default() += count);
        self.count += other.count;
        self.largest = self.largest.max(other.largest);
        self.far = (self.far.0 + other.far.0, self.far.1.max(other.far.1));
    }
}

#[derive(Default)]
struct Figures {
    rows: Quotients,
    heads: Quotients,
    violations: u64,
}

impl Figures {
    fn merge(&mut self, other: &Figures) {
        self.rows.merge(&other.rows);
        self.heads.merge(&other.heads);
        self.violations += other.violations;
    }
    fn line(&self, group: &str, name: &str) {
        let [a, b, c, d] = [0.5, 0.99, 0.999, 0.9999].map(|share| self.rows.percentile(share));
        let Figures { rows, heads, violations } = self;
        let (all, largest) = (rows.count + rows.far.0, rows.largest.max(rows.far.1));
        println!(
            "{group}\t{name}\t{all}\t{largest:.3}\t{}\t{a:.3}\t{b:.3}\t{c:.3}\t{d:.3}\t{:.3}\t{}\t{:.3}\t{violations}",
            rows.count, rows.largest, heads.count, heads.largest
        );
    }
}

fn schemes() -> Vec<(String, Scheme)> {
    let mut all = Vec::new();
    for format in Format::ALL {
        let granularities = match format.own_block_size() {
            Some(size) => vec![Granularity::Block(size)],
            None => vec![
                Granularity::Tensor,
                Granularity::Head,
                Granularity::Token,
                Granularity::Channel,
                Granularity::Block(16),
            ],
        };
        for granularity in granularities {
            if let Ok(scheme) = Scheme::new(format, Some(granularity), ScaleLayout::Plain) {
                all.push((format!("{format} {granularity}"), scheme));
            }
        }
    }
    all
}

fn run(head: &Head, scheme: Scheme, [rows, len, dim]: [usize; 3]) -> Figures {
    let problem = Problem::plain(1, 1, rows, len, dim);
    let sinks = head.sink.map(|sink| [sink]);
    let sinks = sinks.as_ref().map(<[f64; 1]>::as_slice);
    let quantized = |x: &[f64]| {
        // What is quantized in practice has at most 24 bits.
        let x: Vec<f32> = x.iter().map(|&x| x as f32).collect();
        let view = View::contiguous("x", &x, [1, 1, len, dim].into()).expect("a tensor of this shape");
        let codes = quantize(&view, scheme, None).expect("finite numbers");
        let errors = measure(&view, &codes.view().expect("its parts")).expect("a matrix");
        let numbers = codes.view().expect("its parts").to_f32().expect("memory");
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        (wide(&x), wide(&numbers), errors)
    };
    let ((k, k_near, of_k), (v, v_near, of_v)) = (quantized(&head.k), quantized(&head.v));
    let exact = naive(&problem, &Inputs { sinks, ..Inputs::plain(&head.q, &k, &v) }).out;
    let inputs = Inputs { sinks, ..Inputs::plain(&head.q, &k_near, &v_near) };
    let near = naive(&problem, &inputs).out;
    let errors = HeadErrors { k: Some(of_k.matrix(0)), v: Some(of_v.matrix(0)) };
    let judged = quantization_error(&problem, &inputs, &[errors]);
    let (mut figures, mut true_squares, mut squares, mut epsilon) = (Figures::default(), 0.0, 0.0, 0f64);
    for ((exact, near), row) in exact.chunks(dim).zip(near.chunks(dim)).zip(&judged) {
        let error = exact.iter().zip(near).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
        // f64 itself errs by about this.
        let slack = 1e-13 * (row.norm + error);
        figures.violations += u64::from(error > row.after + slack || error > row.before + slack);
        if error > slack || row.estimate > slack {
            figures.rows.add(error / row.estimate, row.epsilon);
        }
        true_squares += error * error;
        squares += row.estimate * row.estimate;
        epsilon = epsilon.max(row.epsilon);
    }
    if squares > 0.0 {
        figures.heads.add((true_squares / squares).sqrt(), epsilon);
    }
    figures
}

fn main() {
    let asked: f64 = std::env::args().nth(1).map_or(13e6, |text| text.parse().expect("a number of rows"));
    // Length, queries of a head, and the share of all rows.
    let lengths = [(16, 64, 0.50), (64, 64, 0.43), (256, 64, 0.065), (1024, 32, 0.0045), (8192, 8, 0.0005)];
    let (schemes, dims) = (schemes(), [16, 32, 64, 128]);
    let mut by: BTreeMap<(&str, String), Figures> = BTreeMap::new();
    let mut random = Random(20_261_124);
    for (len, rows, share) in lengths {
        let each = asked * share / (KINDS.len() * schemes.len() * rows) as f64;
        for kind in KINDS {
            for (name, scheme) in &schemes {
                // Less than one head on the average is one with that probability.
                let heads = each.floor() as usize + usize::from(random.uniform() < each.fract());
                for at in 0..heads {
                    let dim = if len >= 256 { dims[(at + random.below(2)) % 4] } else { dims[random.below(16) / 7] };
                    let head = make(kind, &mut random, (rows, len, dim));
                    let figures = run(&head, *scheme, [rows, len, dim]);
                    by.entry(("kind", (*kind).to_owned())).or_default().merge(&figures);
                    by.entry(("scheme", name.clone())).or_default().merge(&figures);
                    by.entry(("length", format!("{len:5}"))).or_default().merge(&figures);
                    by.entry(("all", "all".to_owned())).or_default().merge(&figures);
                }
            }
        }
        eprintln!("length {len} done");
    }
    println!(
        "of\tname\trows\tlargest\trows where ε<1\tmedian\tp99\tp99.9\tp99.99\tlargest\theads where ε<1\tlargest\tbounds broken"
    );
    by.iter().for_each(|((group, name), figures)| figures.line(group, name));
}
