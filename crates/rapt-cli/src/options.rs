//! What `explain` and `run` take alike, and how it is written on a command line.

use clap::{Args, ValueEnum};
use rapt::{Causal, Compute, Options, TensorLayout, Window};

/// Where the diagonal lies.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum CausalName {
    /// j ≤ i.
    #[value(name = "top_left")]
    TopLeft,
    /// j ≤ i + kv_len − q_len.
    #[value(name = "bottom_right")]
    BottomRight,
}

/// The order of dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LayoutName {
    /// [batch, heads, len, head_dim].
    Bhsd,
    /// [batch, len, heads, head_dim].
    Bshd,
}

/// What products are formed of.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ComputeName {
    /// The numbers that q, k and v hold or stand for.
    Exact,
    /// An approximation: q and the probabilities are rounded to 8 bits; k and v are int8 codes.
    Int8,
    /// Refused: no device has a kernel.
    Fp8,
}

/// The options of a problem.
#[derive(Args, Debug)]
pub(crate) struct ProblemArgs {
    /// Causal masking; without a value, top_left.
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "top_left")]
    causal: Option<CausalName>,
    /// Keys before and after the diagonal that are seen, ends included; `none` is unbounded.
    #[arg(long, value_name = "LEFT,RIGHT", value_parser = window)]
    window: Option<Window>,
    /// c of c·tanh(s/c).
    #[arg(long, value_name = "C", allow_negative_numbers = true)]
    softcap: Option<f64>,
    /// The factor of q·k [default: 1/sqrt(head_dim)].
    #[arg(long, allow_negative_numbers = true)]
    scale: Option<f64>,
    /// The order of dimensions of q, k, v and out.
    #[arg(long, value_enum, default_value = "bhsd")]
    pub(crate) layout: LayoutName,
    /// What products are formed of.
    #[arg(long, value_enum, default_value = "exact")]
    compute: ComputeName,
    /// Threads [default: RAPT_NUM_THREADS, else what the system offers].
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
}

impl ProblemArgs {
    /// The façade's options.
    pub(crate) fn options(&self) -> Options {
        Options {
            softmax_scale: self.scale,
            softcap: self.softcap,
            causal: self.causal.map(|causal| match causal {
                CausalName::TopLeft => Causal::TopLeft,
                CausalName::BottomRight => Causal::BottomRight,
            }),
            window: self.window.unwrap_or_default(),
            layout: match self.layout {
                LayoutName::Bhsd => TensorLayout::Bhsd,
                LayoutName::Bshd => TensorLayout::Bshd,
            },
            out_dtype: None,
            compute: match self.compute {
                ComputeName::Exact => Compute::Exact,
                ComputeName::Int8 => Compute::Int8,
                ComputeName::Fp8 => Compute::Fp8,
            },
            dropout_p: 0.0,
        }
    }
}

fn window(text: &str) -> Result<Window, String> {
    let end = |text: &str| match text.trim() {
        "none" => Ok(None),
        number => number.parse().map(Some).map_err(|_| format!("{number:?} is neither a number from 0 up nor `none`")),
    };
    let (left, right) = text.split_once(',').ok_or("two ends are needed, as in 128,0 or none,0")?;
    Ok(Window { left: end(left)?, right: end(right)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_read() {
        assert_eq!(window("128,0"), Ok(Window { left: Some(128), right: Some(0) }));
        assert_eq!(window("none, 3"), Ok(Window { left: None, right: Some(3) }));
        for wrong in ["128", "-1,0", "1,2,3", "a,b", ""] {
            assert!(window(wrong).is_err(), "{wrong}");
        }
    }
}
