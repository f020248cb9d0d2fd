//! Why a request was refused, as the package's `RaptError` has it.

use rapt_core::{Error, ErrorKind};
use serde::Serialize;

use crate::hints;

/// A `RaptError`: its code, its message, and the expression that corrects the request, or nothing.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Refusal {
    pub(crate) code: &'static str,
    pub(crate) message: String,
    pub(crate) hint: String,
    pub(crate) tensor: Option<&'static str>,
}

/// The codes are the names of Python's exception classes.
const fn code(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::DtypeMismatch => "DtypeMismatchError",
        ErrorKind::UnsupportedDtype => "UnsupportedDtypeError",
        ErrorKind::Shape => "ShapeError",
        ErrorKind::Layout => "LayoutError",
        ErrorKind::Option => "OptionError",
        ErrorKind::Device => "DeviceError",
        ErrorKind::Kind => "KindError",
        ErrorKind::Number => "NumberError",
        _ => "UnsupportedError",
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let (code, hint, tensor) = (code(error.kind()), hints::expression(&error), error.tensor());
        Refusal { code, message: error.to_string(), hint, tensor }
    }
}

impl Refusal {
    /// A request that the package's own TypeScript would not have made.
    pub(crate) fn of_protocol(why: &impl ToString) -> Self {
        let message = format!("the request is not one of this package's: {}", why.to_string());
        Refusal { code: "UnsupportedError", message, hint: String::new(), tensor: None }
    }
}
