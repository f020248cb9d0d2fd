//! A plan in words and numbers, read from the [`LaunchPlan`](crate::LaunchPlan) that runs.

use std::fmt;

use crate::thousands::thousands;
use crate::{Certificate, Compute, INT8_BLOCK, Launch, MaskClass, PRounding, Plan, PlanPart, Spec};

impl Plan {
    /// The plan in words and numbers.
    #[must_use]
    pub fn explain(&self) -> Explanation<'_> {
        Explanation { plan: self, certificate: None }
    }
}

/// A plan in rows of a name and a text. `Display` prints them as a table.
#[derive(Clone, Copy, Debug)]
pub struct Explanation<'a> {
    plan: &'a Plan,
    certificate: Option<&'a Certificate>,
}

impl<'a> Explanation<'a> {
    /// With what was proven about the operands at hand.
    #[must_use]
    pub fn certified(self, certificate: &'a Certificate) -> Self {
        Explanation { certificate: Some(certificate), ..self }
    }

    /// The rows, in order.
    #[must_use]
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let launch = self.plan.launch();
        let mut rows = self.choice();
        rows.extend(self.request());
        match &launch {
            None => rows.push(("threads", self.plan.threads().to_string())),
            Some(launch) => rows.extend(launch.rows()),
        }
        rows.extend(self.costs(launch.as_ref()));
        rows.extend(self.certificate.into_iter().flat_map(Certificate::rows));
        rows
    }

    /// The kernel, and why it was chosen.
    fn choice(&self) -> Vec<(&'static str, String)> {
        let key = self.plan.key();
        let mut rows = vec![
            ("kernel", format!("{} {} on {}", key.kernel.name(), key.storage, key.arch.name())),
            ("why", self.plan.why()),
        ];
        let why_not_faster = self.plan.why_not_faster();
        if !why_not_faster.is_empty() {
            rows.push(("why not faster", why_not_faster));
        }
        rows.extend(self.plan.parts().into_iter().map(|PlanPart { variant, serves, launch, .. }| {
            ("part", format!("{variant}: {serves}; {} blocks of {} threads", launch.blocks, launch.block_threads))
        }));
        rows
    }

    /// Sizes, strides, options, and how they are computed.
    fn request(&self) -> Vec<(&'static str, String)> {
        let (spec, key) = (self.plan.spec(), self.plan.key());
        let mask = match key.mask {
            MaskClass::None => "none".to_owned(),
            MaskClass::Bool => "bool, True = attend, read in place".to_owned(),
            MaskClass::Additive => {
                format!("additive {}, read in place", spec.mask.map_or(key.accumulation, |mask| mask.dtype))
            }
        };
        let rounding = match key.p_rounding {
            PRounding::Accumulation => format!("nowhere: p stays {}", key.accumulation),
            PRounding::Storage => {
                format!("to {} for the product with v; its sum stays {}", key.storage, key.accumulation)
            }
            PRounding::TwoBf16 => {
                format!("to the sum of two bfloat16 for the product with v; its sum stays {}", key.accumulation)
            }
            PRounding::Fixed => format!(
                "to 24 bits against the largest of a block of keys, for the product with v; its sum stays {}",
                key.accumulation
            ),
            PRounding::Block => format!(
                "to 8 bits against the maximum of each block of {INT8_BLOCK} keys, for the product with v; its sum stays {}",
                key.accumulation
            ),
        };
        let mut rows = vec![
            (
                "problem",
                format!(
                    "batch {}, heads {} / {}, q_len {}, kv_len {}, head_dim {} / {}",
                    spec.batch(),
                    spec.num_q_heads(),
                    spec.num_kv_heads(),
                    spec.q_len(),
                    spec.kv_len(),
                    spec.head_dim(),
                    spec.head_dim_v()
                ),
            ),
            ("q strides", format!("{:?}", spec.q.strides)),
            ("k strides", format!("{:?}", spec.k.strides)),
            ("v strides", format!("{:?}", spec.v.strides)),
        ];
        if let Some(pages) = spec.pages.as_deref() {
            let used = pages.used(spec.kv_len());
            rows.push(("pages", format!("{used} of {} keys each, of a cache of {}", pages.page_size, pages.num_pages)));
        }
        if let Some(of) = spec.lengths.as_deref() {
            let most = spec.kv_len();
            rows.push((
                "lengths",
                format!("of each sequence, read on the device: at most {most}, {} of them new", of.added),
            ));
        }
        if let Some(of) = spec.varlen.as_deref() {
            rows.push((
                "sequences",
                format!("{}, one after another; the device reads where they begin", of.sequences()),
            ));
        }
        rows.extend(spec.quantized().map(|(tensor, numbers, codes)| (row_of_codes(tensor), codes.in_words(numbers))));
        if spec.compute == Compute::Int8 {
            let text = "int8, an approximation: q is rounded to int8 row by row, both products are formed of integers";
            rows.push(("compute", text.to_owned()));
        }
        rows.extend([
            ("out strides", format!("{:?}, {}", spec.out.strides, spec.out.dtype)),
            ("positions", positions(spec)),
            ("mask", mask),
            ("accumulation", key.accumulation.to_string()),
        ]);
        if let Some(dropout) = spec.dropout {
            let scale = dropout.scale();
            let text = format!(
                "p {}: which weights, Philox 4x32-10 says of seed, offset and place; those kept are scaled by {scale}, lse is without",
                dropout.p()
            );
            rows.push(("dropout", text));
        }
        rows.extend([
            ("p is rounded", rounding),
            (
                "tiles",
                format!(
                    "{} queries × {} keys, {} pieces of work, keys split in {}",
                    self.plan.block_m(),
                    self.plan.block_n(),
                    self.plan.items(),
                    self.plan.num_splits()
                ),
            ),
        ]);
        rows
    }

    /// What the run costs, and the memory that it uses.
    fn costs(&self, launch: Option<&Launch>) -> Vec<(&'static str, String)> {
        let cost = self.plan.cost();
        let floor = match (cost.floor_seconds, launch) {
            (Some(seconds), Some(launch)) => {
                format!("{:.1} µs on {} multiprocessors", seconds * 1e6, launch.multiprocessors)
            }
            (Some(seconds), None) => {
                format!(
                    "{:.1} µs on {} threads ({} cycles of one core)",
                    seconds * 1e6,
                    self.plan.threads(),
                    thousands(cost.floor_cycles)
                )
            }
            (None, _) => format!("{} cycles of one core", thousands(cost.floor_cycles)),
        };
        let packed = match (launch, self.plan.kv_in_place()) {
            (Some(_), _) => "pass through shared memory",
            (None, true) => "are read where they lie",
            (None, false) => "are packed block by block",
        };
        let copied = if cost.bytes_copied == 0 { "no tensor is materialised" } else { "to the device and back" };
        vec![
            ("flops", thousands(cost.flops)),
            ("bytes read", thousands(cost.bytes_read)),
            ("bytes written", thousands(cost.bytes_written)),
            ("floor", floor),
            ("bytes_copied", format!("{} ({copied})", thousands(cost.bytes_copied as f64))),
            ("bytes_packed", format!("{} (cache tiles; K and V {packed})", thousands(cost.bytes_packed))),
            ("workspace_bytes", thousands(self.plan.workspace_bytes())),
        ]
    }
}

fn row_of_codes(tensor: &str) -> &'static str {
    match tensor {
        "q" => "q codes",
        "k" => "k codes",
        _ => "v codes",
    }
}

/// Which keys a query sees by their positions.
fn positions(spec: &Spec) -> String {
    let causal = spec.causal.map_or("no causal mask".to_owned(), |causal| {
        format!("causal {}, diagonal at j = i + {}", causal.name(), spec.block_range().diagonal)
    });
    let end = |end: Option<usize>| end.map_or("unbounded".to_owned(), |n| n.to_string());
    match (spec.window.left, spec.window.right) {
        (None, None) => causal,
        (left, right) => format!("{causal}; window left {}, right {}", end(left), end(right)),
    }
}

impl Launch {
    fn rows(&self) -> Vec<(&'static str, String)> {
        let Launch { blocks, block_threads, shared_bytes, .. } = self;
        let mut rows = vec![(
            "launch",
            format!("{blocks} blocks of {block_threads} threads, {} bytes of shared memory", thousands(shared_bytes)),
        )];
        if let Some(compiled) = &self.compiled {
            rows.push(("registers", format!("{}, {} bytes of local memory", compiled.registers, compiled.local_bytes)));
            rows.push(("cubin", compiled.source.clone()));
        }
        rows
    }
}

impl fmt::Display for Explanation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows();
        let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, text) in rows {
            writeln!(f, "{name:width$}  {text}")?;
        }
        Ok(())
    }
}
