//! Refusals: what a call answers instead of doing its work, and the message that each thread keeps of the last one.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use engine::model::ModelError;
use engine::quant::QuantError;
use engine::{DType, Device, Error, ErrorKind};

use crate::abi::rapt_error;

/// A pointer that a caller gave, as messages name it: an argument, or a field of the struct behind one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pointer {
    pub(crate) argument: &'static str,
    pub(crate) field: Option<&'static str>,
}

impl From<&'static str> for Pointer {
    fn from(argument: &'static str) -> Self {
        Pointer { argument, field: None }
    }
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.argument)?;
        self.field.map_or(Ok(()), |field| write!(f, "->{field}"))
    }
}

/// Why a call was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    /// By the engine.
    #[error(transparent)]
    Engine(#[from] Error),
    /// By a program.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// By the format of a cache, of new keys or values.
    #[error("{tensor} as codes: {error}")]
    Quant { tensor: &'static str, error: QuantError },
    /// By a cache that is to be made, of its form.
    #[error(transparent)]
    Form(Error),
    /// Of an input or a result of a program, by its name in the call.
    #[error("{name}: {refusal}")]
    Port { name: String, refusal: Box<Refusal> },
    /// An input or a result that the program does not have.
    #[error("there is no {what} {got}: the program has {count}")]
    Place { what: &'static str, got: usize, count: usize },
    /// Another number of places for results than the program has.
    #[error("the program gives {expected} results ({}), got {got} places", names.join(", "))]
    Results { expected: usize, got: usize, names: Vec<String> },
    /// A place for a result of another dtype than the result has. It is never converted.
    #[error("its place has dtype {got}, the result has {expected}")]
    ResultDtype { expected: DType, got: DType },
    /// A place for a result that is not in host memory.
    #[error("its place is on {got}: programs run on the CPU")]
    ResultDevice { got: Device },
    /// A place for a number that has dimensions.
    #[error("its place has {got} dimensions, the result is a number and has none")]
    ResultNumber { got: usize },
    /// Memory that a program writes and that something else of the call lies in too.
    #[error("it is written, and shares memory with {other}")]
    Overlap { other: String },
    /// A text that is no path on this system.
    #[error("{argument} is no UTF-8")]
    #[cfg_attr(unix, expect(dead_code, reason = "any bytes are a path there"))]
    Text { argument: &'static str },
    /// A length that no allocation has.
    #[error("{argument} is {got} bytes, longer than an allocation can be")]
    Length { argument: &'static str, got: usize },
    /// A pointer that must lead somewhere is NULL.
    #[error("{0} is NULL")]
    Null(Pointer),
    /// A pointer to a struct or an array that is no multiple of its alignment.
    #[error("{pointer} leads to an address that is no multiple of {align_bytes} bytes, the alignment of what it says")]
    Unaligned { pointer: Pointer, align_bytes: usize },
    /// A tensor with a number of dimensions that no tensor has.
    #[error("{tensor} has ndim {got}; allowed: 0 to {most}")]
    Rank { tensor: &'static str, got: i32, most: i32 },
    /// A negative size.
    #[error("{tensor} has size {got} in dimension {dim}; sizes are 0 or more")]
    NegativeSize { tensor: &'static str, dim: usize, got: i64 },
    /// A number of a tensor that does not fit this machine's addresses.
    #[error("{tensor} has {what} {got}, which does not fit this machine's addresses")]
    TooWide { tensor: &'static str, what: &'static str, got: i64 },
    /// A length of storage that is none.
    #[error("{tensor} has storage_bytes {got}; allowed: 0 or -1 (not told), or the length of its allocation")]
    Storage { tensor: &'static str, got: i64 },
    /// Host memory has one device.
    #[error("{tensor} is on host memory with device_index {got}; allowed: 0")]
    DeviceIndex { tensor: &'static str, got: i32 },
    /// A text that C cannot hold.
    #[error("the text holds a NUL")]
    Nul,
}

impl Refusal {
    fn code(&self) -> rapt_error {
        match self {
            Refusal::Engine(error) | Refusal::Form(error) | Refusal::Model(ModelError::Core(error)) => match error {
                Error::OutOfMemory { .. } | Error::OutOfPages { .. } => rapt_error::RAPT_ERROR_OUT_OF_MEMORY,
                Error::WorkerPanicked { .. } => rapt_error::RAPT_ERROR_INTERNAL,
                error => of_kind(error.kind()),
            },
            Refusal::Model(error) => of_kind(error.kind()),
            Refusal::Quant { error, .. } => of_kind(error.kind()),
            Refusal::Port { refusal, .. } => refusal.code(),
            Refusal::Nul => rapt_error::RAPT_ERROR_INTERNAL,
            Refusal::Null(_) | Refusal::Unaligned { .. } => rapt_error::RAPT_ERROR_POINTER,
            Refusal::Rank { .. } | Refusal::NegativeSize { .. } | Refusal::ResultNumber { .. } => {
                rapt_error::RAPT_ERROR_SHAPE
            }
            Refusal::TooWide { .. } | Refusal::Storage { .. } | Refusal::Overlap { .. } => {
                rapt_error::RAPT_ERROR_LAYOUT
            }
            Refusal::DeviceIndex { .. } | Refusal::ResultDevice { .. } => rapt_error::RAPT_ERROR_DEVICE,
            Refusal::Results { .. } => rapt_error::RAPT_ERROR_KIND,
            Refusal::ResultDtype { .. } => rapt_error::RAPT_ERROR_DTYPE_MISMATCH,
            Refusal::Place { .. } | Refusal::Text { .. } | Refusal::Length { .. } => rapt_error::RAPT_ERROR_OPTION,
        }
    }

    /// What it says: the cause, and what to write instead where that is one expression.
    fn message(&self) -> String {
        match self {
            Refusal::Model(ModelError::Dtype { input, expected, .. }) => {
                format!("{self}. Mend: convert {input} to RAPT_DTYPE_{}", format!("{expected:?}").to_uppercase())
            }
            Refusal::Engine(error) | Refusal::Form(error) => match hint(error, self.owner()) {
                Some(hint) => format!("{error}. Mend: {hint}"),
                None => error.to_string(),
            },
            Refusal::Port { name, refusal } => format!("{name}: {}", refusal.message()),
            refusal => refusal.to_string(),
        }
    }

    /// The struct that has the rapt_codes of the call.
    fn owner(&self) -> &'static str {
        if matches!(self, Refusal::Form(_)) { "form" } else { "options" }
    }

    /// This refusal, of the input or result with this name.
    pub(crate) fn of(self, name: &str) -> Refusal {
        Refusal::Port { name: name.to_owned(), refusal: Box::new(self) }
    }
}

/// What to write in C instead, where that is one expression.
fn hint(error: &Error, owner: &str) -> Option<String> {
    // `k_descale` is `options->k_codes->descale`.
    let field = |part: &str| part.split_once('_').map(|(operand, field)| format!("{owner}->{operand}_codes->{field}"));
    let constant = |dtype: DType| format!("RAPT_DTYPE_{}", format!("{dtype:?}").to_uppercase());
    match error {
        Error::MissingPart { part, .. } => field(part).map(|field| format!("point {field} to it")),
        Error::UnexpectedPart { part, .. } => field(part).map(|field| format!("{field} = NULL")),
        Error::OtherDtype { tensor: tensor @ ("q" | "k" | "v" | "k_cache" | "v_cache"), expected, .. }
            if !expected.is_computed() =>
        {
            let operand = tensor.trim_end_matches("_cache");
            Some(format!(
                "options->{operand}_codes = NULL if {tensor} has numbers, else its codes in {}",
                constant(*expected)
            ))
        }
        Error::OtherDtype { tensor, expected, .. } => Some(format!("{tensor} in {}", constant(*expected))),
        Error::UnknownSequence { .. } => {
            Some("an id that rapt_kv_cache_new_sequence() or rapt_kv_cache_fork() gave for this cache".to_owned())
        }
        Error::ToleranceExceeded { .. } => Some(
            "tolerance->k_original and v_original, codes with finer factors, or a larger tolerance->limit".to_owned(),
        ),
        Error::Option { option: "out_dtype", got, .. } if got == "None" => {
            Some(format!("options->out_dtype = {}", constant(DType::F32)))
        }
        _ => None,
    }
}

fn of_kind(kind: ErrorKind) -> rapt_error {
    match kind {
        ErrorKind::DtypeMismatch => rapt_error::RAPT_ERROR_DTYPE_MISMATCH,
        ErrorKind::UnsupportedDtype => rapt_error::RAPT_ERROR_UNSUPPORTED_DTYPE,
        ErrorKind::Shape => rapt_error::RAPT_ERROR_SHAPE,
        ErrorKind::Layout => rapt_error::RAPT_ERROR_LAYOUT,
        ErrorKind::Option => rapt_error::RAPT_ERROR_OPTION,
        ErrorKind::Device => rapt_error::RAPT_ERROR_DEVICE,
        ErrorKind::Kind => rapt_error::RAPT_ERROR_KIND,
        ErrorKind::DtypeBoundary => rapt_error::RAPT_ERROR_DTYPE_BOUNDARY,
        ErrorKind::Program => rapt_error::RAPT_ERROR_PROGRAM,
        ErrorKind::Index => rapt_error::RAPT_ERROR_INDEX,
        ErrorKind::ZeroDivision => rapt_error::RAPT_ERROR_ZERO_DIVISION,
        ErrorKind::Number => rapt_error::RAPT_ERROR_NUMBER,
        _ => rapt_error::RAPT_ERROR_UNSUPPORTED,
    }
}

/// The name of a code.
pub(crate) fn name(code: i32) -> &'static CStr {
    macro_rules! names {
        ($($name:ident)*) => {
            match code {
                $(code if code == rapt_error::$name as i32 => concat!(stringify!($name), "\0"),)*
                _ => "unknown\0",
            }
        };
    }
    let name = names!(
        RAPT_OK RAPT_ERROR_DTYPE_MISMATCH RAPT_ERROR_UNSUPPORTED_DTYPE RAPT_ERROR_SHAPE RAPT_ERROR_LAYOUT
        RAPT_ERROR_OPTION RAPT_ERROR_DEVICE RAPT_ERROR_KIND RAPT_ERROR_UNSUPPORTED RAPT_ERROR_POINTER
        RAPT_ERROR_OUT_OF_MEMORY RAPT_ERROR_INTERNAL RAPT_ERROR_DTYPE_BOUNDARY RAPT_ERROR_PROGRAM
        RAPT_ERROR_INDEX RAPT_ERROR_ZERO_DIVISION RAPT_ERROR_NUMBER
    );
    CStr::from_bytes_with_nul(name.as_bytes()).unwrap_or_default()
}

thread_local! {
    static CODE: Cell<rapt_error> = const { Cell::new(rapt_error::RAPT_OK) };
    static MESSAGE: RefCell<CString> = RefCell::new(CString::default());
}

/// The code of the last refusal of this thread.
pub(crate) fn last_code() -> rapt_error {
    // A thread that is ending has no state any more.
    CODE.try_with(Cell::get).unwrap_or(rapt_error::RAPT_OK)
}

/// The message of the last refusal of this thread.
pub(crate) fn last_message() -> *const c_char {
    MESSAGE.try_with(|message| message.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

fn keep(code: rapt_error, mut message: String) -> rapt_error {
    message.retain(|letter| letter != '\0');
    let message = CString::new(message).unwrap_or_default();
    // A thread that is ending loses the message, not the answer.
    let _ = CODE.try_with(|last| last.set(code));
    let _ = MESSAGE.try_with(|last| *last.borrow_mut() = message);
    code
}

fn told(payload: &(dyn Any + Send)) -> rapt_error {
    keep(rapt_error::RAPT_ERROR_INTERNAL, Error::worker_panicked(payload).to_string())
}

/// Runs `body`: a refusal becomes its code and the thread's last message, and a panic does too.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Refusal>) -> rapt_error {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => rapt_error::RAPT_OK,
        Ok(Err(refusal)) => keep(refusal.code(), refusal.message()),
        Err(payload) => told(payload.as_ref()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_answer_and_its_message_is_kept() {
        assert_eq!(guard(|| panic!("broken")), rapt_error::RAPT_ERROR_INTERNAL);
        // SAFETY: a string of this thread, which no call has changed since.
        let message = unsafe { CStr::from_ptr(last_message()) }.to_str().unwrap();
        assert!(message.contains("broken"), "{message}");
        assert_eq!(guard(|| Ok(())), rapt_error::RAPT_OK);
        assert_eq!(last_code(), rapt_error::RAPT_ERROR_INTERNAL, "a call that succeeds leaves the last error");
    }

    #[test]
    fn memory_that_could_not_be_had_and_a_panic_of_a_worker_have_codes_of_their_own() {
        let code = |error: Error| Refusal::from(error).code();
        assert_eq!(code(Error::OutOfMemory { bytes: 1 }), rapt_error::RAPT_ERROR_OUT_OF_MEMORY);
        assert_eq!(code(Error::WorkerPanicked { message: String::new() }), rapt_error::RAPT_ERROR_INTERNAL);
    }
}
