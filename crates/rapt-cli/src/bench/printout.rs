//! What was measured, as a table, as JSON and as a plot.
//!
//! ```text
//! GFLOP/s       2·(D + Dv)·scores / time, the scores that causal and window leave
//! % peak        of the rate of products of all threads, the best measured between the row's rounds: f32 FMA (f64: half of it), or
//!               where forward forms products of bfloat16 those of that unit
//! cycles/score  time · clock · threads of the row / scores; floor is what the plan says is the least
//! GB/s, % DRAM  each tensor once / time; of the read rate measured so
//! ```

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use rapt::doctor::{cpu_name, platform};
use rapt::{DType, Engine};
use serde_json::{Value, json};

use super::row::{Row, Timing, median};
use crate::explain::codes_json;

/// The rows of one run.
pub(crate) struct Printout {
    isa: &'static str,
    threads: usize,
    rows: Vec<(Row, Timing)>,
}

/// What a row comes to.
struct Figures {
    seconds: f64,
    spread: f64,
    gflops: f64,
    of_products: f64,
    cycles_per_score: f64,
    floor_cycles_per_score: f64,
    gbytes: f64,
    of_dram: f64,
}

impl Figures {
    /// `None` where the row was not timed.
    fn of(row: &Row, timing: &Timing) -> Option<Self> {
        let mut rounds = timing.seconds.clone();
        if rounds.is_empty() {
            return None;
        }
        let seconds = median(&mut rounds);
        let (cost, ceilings) = (timing.plan.cost(), &timing.ceilings);
        let products = products(row, timing);
        let bytes = cost.bytes_read + cost.bytes_written;
        let per_score = |cycles: f64| if cost.exponentials > 0.0 { cycles / cost.exponentials } else { 0.0 };
        Some(Figures {
            seconds,
            spread: (rounds[rounds.len() - 1] - rounds[0]) / seconds,
            gflops: cost.flops / seconds / 1e9,
            of_products: cost.flops / seconds / products,
            cycles_per_score: per_score(seconds * ceilings.clock_hz * timing.plan.threads() as f64),
            floor_cycles_per_score: per_score(cost.floor_cycles),
            gbytes: bytes / seconds / 1e9,
            of_dram: bytes / seconds / ceilings.dram_read,
        })
    }
}

/// The rate of the products that a row is made of.
fn products(row: &Row, timing: &Timing) -> f64 {
    let (kernel, ceilings) = (timing.plan.key().kernel, &timing.ceilings);
    match row.dtype {
        DType::F64 => ceilings.fma_flops / 2.0,
        DType::BF16 if kernel == rapt::Kernel::Forward && ceilings.bf16_flops > 0.0 => ceilings.bf16_flops,
        _ => ceilings.fma_flops,
    }
}

/// A time in the unit that fits it.
pub(super) fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.2} µs", s * 1e6),
        s if s < 1.0 => format!("{:.3} ms", s * 1e3),
        s => format!("{s:.3} s"),
    }
}

impl Printout {
    /// No rows yet.
    pub(crate) fn new(engine: &Engine) -> Self {
        Printout { isa: engine.caps().arch.name(), threads: engine.threads().get(), rows: Vec::new() }
    }

    /// One more row.
    pub(crate) fn push(&mut self, row: Row, timing: Timing) {
        self.rows.push((row, timing));
    }

    /// Whether every row was right.
    pub(crate) fn is_sound(&self) -> bool {
        self.rows.iter().all(|(_, timing)| timing.is_right())
    }

    /// For people.
    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header([
            "B,H,Sq,Skv,D",
            "dtype",
            "kernel",
            "time",
            "± %",
            "GFLOP/s",
            "% peak",
            "cycles/score",
            "floor",
            "GB/s",
            "% DRAM",
            "error",
        ]);
        for column in table.column_iter_mut().skip(3) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        for (row, timing) in &self.rows {
            let mut cells = vec![row.name(), row.dtype.name().to_owned(), timing.plan.key().kernel.name().to_owned()];
            match Figures::of(row, timing) {
                Some(it) => cells.extend([
                    time(it.seconds),
                    format!("{:.0}", 50.0 * it.spread),
                    format!("{:.1}", it.gflops),
                    format!("{:.0}", 100.0 * it.of_products),
                    format!("{:.2}", it.cycles_per_score),
                    format!("{:.2}", it.floor_cycles_per_score),
                    format!("{:.1}", it.gbytes),
                    format!("{:.0}", 100.0 * it.of_dram),
                    format!("{:.1e}", timing.error),
                ]),
                None => {
                    cells.push("WRONG".to_owned());
                    cells.extend(std::iter::repeat_n(String::new(), 7));
                    cells.push(format!("{:.1e} > {:.0e}", timing.error, timing.limit));
                }
            }
            table.add_row(cells);
        }
        format!("{table}\n{}{}", self.beyond(), self.machine())
    }

    /// A line on rows that were faster than what they are held against, which then is no ceiling.
    fn beyond(&self) -> String {
        let is_beyond =
            |(row, timing): &&(Row, Timing)| Figures::of(row, timing).is_some_and(|it| it.of_products > 1.05);
        match self.rows.iter().filter(is_beyond).count() {
            0 => String::new(),
            count => format!(
                "{count} rows ran faster than the rate of products that was measured beside them: other work ran then, or their kernel \
                 has a unit that is not measured\n"
            ),
        }
    }

    /// The machine in a line or two.
    fn machine(&self) -> String {
        let timed = self.rows.iter().map(|(_, timing)| timing.ceilings);
        let Some(best) = timed.reduce(super::ceilings::Ceilings::max).filter(|best| best.clock_hz > 0.0) else {
            return format!("{} ({}), {}, {} threads", cpu_name(), platform(), self.isa, self.threads);
        };
        let per_cycle = best.fma_flops / best.clock_hz / self.threads as f64;
        let bf16 = best.bf16_flops / 1e9;
        let bf16 = if bf16 > 0.0 { format!(", products of bfloat16 {bf16:.1}") } else { String::new() };
        format!(
            "{} ({}), {}, {} threads: f32 FMA {:.1} GFLOP/s ({per_cycle:.0} per cycle and thread){bf16}, DRAM read {:.1} GB/s, {:.2} GHz",
            cpu_name(),
            platform(),
            self.isa,
            self.threads,
            best.fma_flops / 1e9,
            best.dram_read / 1e9,
            best.clock_hz / 1e9,
        )
    }

    /// For programs: every figure in plain units.
    pub(crate) fn json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(|(row, timing)| row_json(row, timing)).collect();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "cpu": cpu_name(),
            "platform": platform(),
            "isa": self.isa,
            "threads": self.threads,
            "rows": rows,
        })
    }

    /// A bar per row: per cent of the ceiling that holds it (DRAM for decode, else products).
    pub(crate) fn svg(&self) -> String {
        let bars = self.rows.iter().filter_map(|(row, timing)| {
            let it = Figures::of(row, timing)?;
            let (share, of) = if timing.plan.key().kernel == rapt::Kernel::Decode {
                (it.of_dram, "% DRAM")
            } else {
                (it.of_products, "% peak")
            };
            Some((format!("{} {} · {} · {of}", row.name(), row.dtype, time(it.seconds)), 100.0 * share))
        });
        let title = format!(
            "rapt {} on {} ({}, {} threads): per cent of what this machine can do",
            env!("CARGO_PKG_VERSION"),
            cpu_name(),
            self.isa,
            self.threads
        );
        bar_chart(&title, &bars.collect::<Vec<_>>())
    }
}

/// Horizontal bars with their labels and numbers, from 0 to the longest or 100.
fn bar_chart(title: &str, bars: &[(String, f64)]) -> String {
    const LABELS: f64 = 460.0;
    const LENGTH: f64 = 400.0;
    const STEP: f64 = 24.0;
    let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;");
    let longest = bars.iter().map(|(_, value)| *value).fold(100.0, f64::max);
    let height = 50.0 + STEP * bars.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{height}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"10\" y=\"22\" font-weight=\"bold\">{}</text>\n",
        LABELS + LENGTH + 70.0,
        escaped(title)
    );
    for (at, (label, value)) in bars.iter().enumerate() {
        let (top, length) = (38.0 + STEP * at as f64, LENGTH * value / longest);
        let text = top + 13.0;
        svg += &format!(
            "<text x=\"{}\" y=\"{text}\" text-anchor=\"end\">{}</text>\n\
             <rect x=\"{LABELS}\" y=\"{top}\" width=\"{length:.1}\" height=\"18\" fill=\"steelblue\"/>\n\
             <text x=\"{:.1}\" y=\"{text}\">{value:.1}</text>\n",
            LABELS - 8.0,
            escaped(label),
            LABELS + length + 6.0
        );
    }
    svg + "</svg>\n"
}

fn row_json(row: &Row, timing: &Timing) -> Value {
    let Timing { plan, ceilings, .. } = timing;
    let figures = Figures::of(row, timing).map(|it| {
        json!({
            "seconds": it.seconds,
            "rounds_seconds": timing.seconds,
            "calls": timing.calls,
            "flops_per_second": it.gflops * 1e9,
            "share_of_products": it.of_products,
            "cycles_per_score": it.cycles_per_score,
            "floor_cycles_per_score": it.floor_cycles_per_score,
            "bytes_per_second": it.gbytes * 1e9,
            "share_of_dram": it.of_dram,
            "products_flops_per_second": products(row, timing),
            "fma_flops_per_second": ceilings.fma_flops,
            "dram_read_bytes_per_second": ceilings.dram_read,
            "clock_hz": ceilings.clock_hz,
        })
    });
    json!({
        "name": row.name(),
        "shape": [row.batch, row.heads, row.q_len, row.kv_len, row.head_dim],
        "kv_heads": row.kv_heads,
        "head_dim_v": row.head_dim_v,
        "dtype": row.dtype.name(),
        "codes": codes_json(plan),
        "causal": row.options.causal.map(rapt::Causal::name),
        "kernel": plan.key().kernel.name(),
        "threads": plan.threads(),
        "flops": plan.cost().flops,
        "bytes": plan.cost().bytes_read + plan.cost().bytes_written,
        "correct": timing.is_right(),
        "error": timing.error,
        "error_limit": timing.limit,
        "timing": figures,
    })
}
