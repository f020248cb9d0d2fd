//! What may be asked besides the tensors, each value validated when a [`Spec`](crate::Spec) is built.

use std::hash::{Hash, Hasher};

use crate::{DType, Error, Result};

/// Which keys a query may see, by position. `i` counts queries, `j` keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Causal {
    /// `j ≤ i`: PyTorch's `is_causal`.
    TopLeft,
    /// `j ≤ i + kv_len − q_len`: flash-attention's `causal`.
    BottomRight,
}

impl Causal {
    /// The name that bindings use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Causal::TopLeft => "top_left",
            Causal::BottomRight => "bottom_right",
        }
    }
}

/// A sliding window, ends included: `i + d − left ≤ j ≤ i + d + right`, with `d` as of [`Causal`]. `None`: unbounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Window {
    /// Keys before the diagonal.
    pub left: Option<usize>,
    /// Keys after the diagonal.
    pub right: Option<usize>,
}

/// How the dimensions of `q`, `k`, `v` and the outputs are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum TensorLayout {
    /// `[batch, heads, len, head_dim]`, `[heads, len, head_dim]` or `[len, head_dim]`.
    #[default]
    Bhsd,
    /// `[batch, len, heads, head_dim]`, `[len, heads, head_dim]` or `[len, head_dim]`.
    Bshd,
}

/// Keys that are one block to [`Compute::Int8`], from key 0 on: probabilities are rounded against the maximum of their block, so this is
/// a part of the definition and no tile of a kernel.
pub const INT8_BLOCK: usize = 128;

/// What products are formed of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Compute {
    /// The numbers that q, k and v hold or stand for.
    #[default]
    Exact,
    /// An approximation: q is rounded to int8 row by row, the probabilities to 8 bits block by block, and both products are formed of
    /// integers. k and v are int8 codes. `rapt_reference::int8` defines it.
    Int8,
    /// float8 in both products. No device has a kernel: a spec refuses it by name.
    Fp8,
}

impl Compute {
    /// Every one of them.
    pub const ALL: [Compute; 3] = [Compute::Exact, Compute::Int8, Compute::Fp8];

    /// The name that bindings use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Compute::Exact => "exact",
            Compute::Int8 => "int8",
            Compute::Fp8 => "fp8",
        }
    }

    /// The one of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|compute| compute.name() == name)
    }
}

/// A finite f64, so that a [`Spec`](crate::Spec) can be hashed and compared.
#[derive(Clone, Copy, Debug)]
pub struct Finite(f64);

impl Finite {
    /// `value` under the name `option`.
    ///
    /// # Errors
    /// [`Error::Option`] if `value` is NaN or infinite.
    pub fn new(option: &'static str, value: f64) -> Result<Self> {
        if value.is_finite() {
            Ok(Finite(value))
        } else {
            Err(Error::Option { option, got: value.to_string(), allowed: "any finite number".into() })
        }
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl PartialEq for Finite {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}
impl Eq for Finite {}
impl Hash for Finite {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

/// The options of a call. `Options::default()` is plain scaled dot-product attention.
///
/// Build one as `Options { causal: Some(Causal::TopLeft), ..Options::default() }` or with the `with_` methods.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Options {
    /// The factor of `q·k`; `None` is `1/sqrt(head_dim)`. Any finite number.
    pub softmax_scale: Option<f64>,
    /// `c·tanh(x/c)` applied to the scaled scores; `None` leaves them. Finite and greater than 0.
    pub softcap: Option<f64>,
    /// Causal masking; `None` is none.
    pub causal: Option<Causal>,
    /// A sliding window.
    pub window: Window,
    /// The order of dimensions.
    pub layout: TensorLayout,
    /// The dtype of `out`; `None` is that of `q`.
    pub out_dtype: Option<DType>,
    /// What products are formed of.
    pub compute: Compute,
    /// The probability that a weight is dropped, 0 to 1; 0 drops none. Which are dropped the run says:
    /// [`Tensors::dropout`](crate::Tensors::dropout).
    pub dropout_p: f64,
}

impl Options {
    /// With this factor of `q·k`.
    #[must_use]
    pub fn with_softmax_scale(self, softmax_scale: f64) -> Self {
        Options { softmax_scale: Some(softmax_scale), ..self }
    }
    /// With scores capped at `±softcap`.
    #[must_use]
    pub fn with_softcap(self, softcap: f64) -> Self {
        Options { softcap: Some(softcap), ..self }
    }
    /// With causal masking.
    #[must_use]
    pub fn with_causal(self, causal: Causal) -> Self {
        Options { causal: Some(causal), ..self }
    }
    /// With a sliding window.
    #[must_use]
    pub fn with_window(self, left: Option<usize>, right: Option<usize>) -> Self {
        Options { window: Window { left, right }, ..self }
    }
    /// With this order of dimensions.
    #[must_use]
    pub fn with_layout(self, layout: TensorLayout) -> Self {
        Options { layout, ..self }
    }
    /// With an output of this dtype.
    #[must_use]
    pub fn with_out_dtype(self, out_dtype: DType) -> Self {
        Options { out_dtype: Some(out_dtype), ..self }
    }
    /// With products formed of these.
    #[must_use]
    pub fn with_compute(self, compute: Compute) -> Self {
        Options { compute, ..self }
    }
    /// With weights dropped with this probability.
    #[must_use]
    pub fn with_dropout_p(self, dropout_p: f64) -> Self {
        Options { dropout_p, ..self }
    }
}
