//! The dtypes of numbers: read exactly in f64, written by one rounding to nearest even.

use half::{bf16, f16};
use rapt_core::{Number, bf16_from_f64, f16_from_f64};

/// A floating-point element.
pub(crate) trait Real: Number {
    /// This number, exactly.
    fn to_f64(self) -> f64;
    /// The nearest number of this type; a tie goes to the even one, what is too large to infinity.
    fn from_f64(x: f64) -> Self;
}

impl Real for f64 {
    fn to_f64(self) -> f64 {
        self
    }
    fn from_f64(x: f64) -> Self {
        x
    }
}

impl Real for f32 {
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    fn from_f64(x: f64) -> Self {
        x as f32
    }
}

impl Real for f16 {
    fn to_f64(self) -> f64 {
        f64::from(self.to_f32())
    }
    fn from_f64(x: f64) -> Self {
        f16_from_f64(x)
    }
}

impl Real for bf16 {
    fn to_f64(self) -> f64 {
        f64::from(self.to_f32())
    }
    fn from_f64(x: f64) -> Self {
        bf16_from_f64(x)
    }
}

/// `$body` with `$real` the type of `$dtype`; another dtype is an error that names `$tensor`.
macro_rules! with_real {
    ($tensor:literal, $dtype:expr, $real:ident => $body:expr) => {{
        let dtype = $dtype;
        match dtype {
            rapt_core::DType::F64 => {
                type $real = f64;
                $body
            }
            rapt_core::DType::F32 => {
                type $real = f32;
                $body
            }
            rapt_core::DType::F16 => {
                type $real = half::f16;
                $body
            }
            rapt_core::DType::BF16 => {
                type $real = half::bf16;
                $body
            }
            got => {
                let allowed = rapt_core::COMPUTED.to_vec();
                Err(rapt_core::Error::UnsupportedDtype { tensor: $tensor, got, allowed }.into())
            }
        }
    }};
}

pub(crate) use with_real;

/// What a number that is not finite is called.
pub(crate) fn called(x: f64) -> &'static str {
    match (x.is_nan(), x > 0.0) {
        (true, _) => "NaN",
        (_, true) => "inf",
        _ => "-inf",
    }
}
