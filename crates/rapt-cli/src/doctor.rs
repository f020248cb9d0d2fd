//! `rapt doctor`: what this machine and build are, and whether they compute the reference. `rapt.doctor()` of Python shows
//! the same [`Facts`].

use clap::Args as ClapArgs;
use rapt::doctor::{SelfTest, VARIABLES, cpu_name, metal, platform, self_test, variables, vulkan};
use rapt::{Arch, Engine, Threads};
use serde::{Serialize, Serializer};

use crate::{Host, Outcome, exit, say, table};

#[derive(ClapArgs, Debug)]
pub(crate) struct Args {
    /// The report as JSON.
    #[arg(long)]
    json: bool,
}

type Pairs<T> = Vec<(String, T)>;

/// What a host adds: Python tells of its own packages.
#[derive(Debug, Default)]
pub struct HostFacts {
    /// How many threads attention on torch tensors has, and whose they are.
    pub torch_threads: Option<String>,
    /// What was measured on this kind of processor beside PyTorch.
    pub beside_torch: Option<String>,
    /// Versions by name; `None` is not installed.
    pub versions: Pairs<Option<String>>,
    /// What Vulkan shows, where the host asks it rather than this build.
    pub vulkan: Option<Pairs<String>>,
}

/// All that `doctor` finds out.
#[derive(Debug, Serialize)]
pub struct Facts {
    version: &'static str,
    cpu: String,
    platform: String,
    isa: &'static str,
    isa_available: Vec<&'static str>,
    threads: usize,
    threads_from: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    torch_threads: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    beside_torch: Option<String>,
    #[serde(serialize_with = "as_map")]
    cuda: Pairs<String>,
    #[serde(serialize_with = "as_map")]
    vulkan: Pairs<String>,
    #[serde(serialize_with = "as_map")]
    metal: Pairs<String>,
    #[serde(serialize_with = "as_map", skip_serializing_if = "Vec::is_empty")]
    versions: Pairs<Option<String>>,
    #[serde(serialize_with = "as_map")]
    environment: Pairs<Option<String>>,
    self_test: Vec<Case>,
    ok: bool,
}

/// One case of the self-test: a relative L2 error, or why there is none.
#[derive(Debug, Serialize)]
struct Case {
    dtype: &'static str,
    kernel: &'static str,
    passed: bool,
    error: Option<f64>,
    refusal: Option<String>,
    limit: f64,
}

/// In the order of the list, which a map of serde_json would not keep.
fn as_map<S: Serializer, T: Serialize>(pairs: &Pairs<T>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().map(|(name, value)| (name, value)))
}

pub(crate) fn run(args: &Args, host: &dyn Host) -> Outcome {
    let facts = Facts::gather(&Engine::new(None)?, host.facts()?);
    let text = if args.json { facts.json() } else { facts.table() };
    say(&text)?;
    Ok(if facts.ok { exit::OK } else { exit::FAILED })
}

impl Facts {
    /// Asks the machine, and runs the self-test on `engine`.
    #[must_use]
    pub fn gather(engine: &Engine, host: HostFacts) -> Self {
        let self_test: Vec<Case> = self_test(engine).iter().map(Case::of).collect();
        let threads = engine.threads();
        Facts {
            version: env!("CARGO_PKG_VERSION"),
            cpu: cpu_name(),
            platform: platform(),
            isa: engine.caps().arch.name(),
            isa_available: rapt::available_isas().iter().copied().map(Arch::name).collect(),
            threads: threads.get(),
            threads_from: match threads {
                Threads::Asked(_) => "the caller",
                Threads::Environment(_) => "RAPT_NUM_THREADS",
                Threads::Available(_) => "available_parallelism",
            },
            torch_threads: host.torch_threads,
            beside_torch: host.beside_torch,
            cuda: rapt::cuda::report(),
            vulkan: host.vulkan.unwrap_or_else(vulkan),
            metal: metal(),
            versions: host.versions,
            environment: variables(),
            ok: self_test.iter().all(|case| case.passed),
            self_test,
        }
    }

    /// For programs.
    #[must_use]
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("text, numbers and lists of them")
    }

    /// For people.
    #[must_use]
    pub fn table(&self) -> String {
        table::framed(&self.rows())
    }

    fn rows(&self) -> Vec<(String, String)> {
        let row = |name: &str, text: String| (name.to_owned(), text);
        let mut rows = vec![
            row("rapt", self.version.to_owned()),
            row("cpu", format!("{} ({})", self.cpu, self.platform)),
            row("isa", format!("{} (available: {})", self.isa, self.isa_available.join(", "))),
            row("threads", format!("{} (from {})", self.threads, self.threads_from)),
        ];
        rows.extend(self.torch_threads.iter().map(|text| row("threads in torch", text.clone())));
        rows.extend(self.beside_torch.iter().map(|text| row("beside PyTorch", text.clone())));
        rows.extend(self.cuda.iter().cloned());
        rows.extend(self.vulkan.iter().cloned());
        rows.extend(self.metal.iter().cloned());
        let versions = self.versions.iter().filter(|(name, _)| name != "rapt");
        rows.extend(versions.map(|(name, text)| row(name, text.clone().unwrap_or("not installed".to_owned()))));
        for (name, value) in &self.environment {
            let note = if VARIABLES.contains(&name.as_str()) { "" } else { " (no variable of Rapt)" };
            rows.push(row(name, value.as_ref().map_or("not set".to_owned(), |value| format!("{value:?}{note}"))));
        }
        rows.extend(self.self_test.iter().map(Case::row));
        rows
    }
}

impl Case {
    fn of(test: &SelfTest) -> Self {
        let (error, refusal) = match &test.error {
            Ok(error) => (Some(*error), None),
            Err(refusal) => (None, Some(refusal.to_string())),
        };
        let (dtype, kernel, limit) = (test.dtype.name(), test.kernel, test.limit);
        Case { dtype, kernel, passed: test.passed(), error, refusal, limit }
    }

    fn row(&self) -> (String, String) {
        let verdict = if self.passed { "ok" } else { "FAILED" };
        let error = match (&self.refusal, self.error) {
            (None, Some(error)) => format!("relative error {error:.1e}, limit {:.0e}", self.limit),
            (refusal, _) => refusal.clone().unwrap_or_default(),
        };
        (format!("self-test {} {}", self.dtype, self.kernel), format!("{verdict}, {error}"))
    }
}
