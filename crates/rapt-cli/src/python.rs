//! Subcommands whose code is Python: `audit` and `bench cuda`. Their words are declared here, so that there is one help
//! text; the values are checked where they are used.

use std::ffi::OsString;

use clap::{Args as ClapArgs, ValueEnum};
use serde::Serialize;

/// A subcommand for Python: its name, what clap read, and the words as they were typed.
#[derive(Debug)]
pub struct PythonCommand {
    /// `audit` or `bench cuda`.
    pub name: &'static str,
    /// The options as a JSON object, by their Python names.
    pub options: String,
    /// All words after `rapt`.
    pub words: Vec<OsString>,
}

impl PythonCommand {
    pub(crate) fn new(name: &'static str, options: &impl Serialize, words: &[OsString]) -> serde_json::Result<Self> {
        Ok(PythonCommand { name, options: serde_json::to_string(options)?, words: words.to_vec() })
    }
}

/// How grave a finding is.
#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Severity {
    Critical,
    High,
    Medium,
    Low,
    Never,
}

/// The tensors that an attention takes.
#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Auto,
    Torch,
    Numpy,
}

/// Exit codes: 0 nothing as grave as --fail-on, 1 findings as grave, 2 wrong usage, 3 the attention cannot be audited.
#[derive(ClapArgs, Debug, Serialize)]
pub(crate) struct AuditArgs {
    /// torch, rapt, or MODULE:FUNCTION with the signature of scaled_dot_product_attention or of rapt.attention (the
    /// current folder is searched).
    target: Option<String>,
    /// cpu, cuda, cuda:N or mps.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Of float32, bfloat16, float16, float64.
    #[arg(long, value_name = "NAME,..", default_value = "float32,bfloat16,float16,float64")]
    dtypes: String,
    /// All, or names of --list, separated by commas.
    #[arg(long, value_name = "NAME,..", default_value = "all")]
    hazards: String,
    /// The tensors that the attention takes.
    #[arg(long, value_enum, default_value = "auto")]
    kind: Kind,
    /// Seconds to spend, reproducers included.
    #[arg(long = "budget", value_name = "SECONDS", default_value_t = 60.0, allow_negative_numbers = true)]
    budget_s: f64,
    /// Exit with 1 from this severity up.
    #[arg(long, value_enum, default_value = "high")]
    fail_on: Severity,
    /// Write the report as JSON; - is stdout, in place of the table.
    #[arg(long, value_name = "PATH", allow_hyphen_values = true)]
    json: Option<String>,
    /// Write JUnit XML; what --fail-on does not reach is no failure.
    #[arg(long, value_name = "PATH")]
    junit: Option<String>,
    /// Write one self-contained page.
    #[arg(long, value_name = "PATH")]
    html: Option<String>,
    /// List the hazards and end.
    #[arg(long)]
    list: bool,
}

/// What a run must reach.
#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Reach {
    /// The bars that rows name.
    Bars,
    /// torch's default kernel, on every row.
    NoSlowerThanDefault,
}

/// Exit codes: 0; 1 a row of Rapt failed or left the tolerance, --check is not met, or there is no GPU; 2 wrong usage; 130
/// interrupted.
#[derive(ClapArgs, Debug, Serialize)]
pub(crate) struct CudaArgs {
    /// Shapes, groups or globs over row names [default: all].
    #[arg(long, visible_alias = "filter", value_name = "NAME,..", value_delimiter = ',')]
    rows: Option<Vec<String>>,
    /// Of bf16, f16, f32.
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    dtypes: Option<Vec<String>>,
    /// The rows of the backward alone, which a run leaves out otherwise (unless --rows names them).
    #[arg(long)]
    backward: bool,
    /// Of flash, cudnn, cudnn-fp8, efficient, flex, fa4 [default: all that are here].
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    peers: Option<Vec<String>>,
    /// Timed rounds per row [default: 7].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    rounds: Option<i64>,
    /// Length of one timed batch [default: 0.004].
    #[arg(long, value_name = "S", allow_negative_numbers = true)]
    seconds: Option<f64>,
    /// Tiny shapes, two rounds: tries the harness, its figures mean nothing.
    #[arg(long)]
    quick: bool,
    /// Write the record; - is stdout, in place of the table.
    #[arg(long, value_name = "PATH", allow_hyphen_values = true)]
    json: Option<String>,
    /// Write the plot.
    #[arg(long, value_name = "PATH")]
    svg: Option<String>,
    /// Write a dated record there: .json, .md and .svg.
    #[arg(long, value_name = "FOLDER")]
    out: Option<String>,
    /// Exit with 1 where this is not reached.
    #[arg(long, value_enum)]
    check: Option<Reach>,
    /// Print the rows and end; needs no GPU.
    #[arg(long)]
    list: bool,
}
