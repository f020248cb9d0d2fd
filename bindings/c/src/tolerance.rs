//! A tolerance for C: what is measured of codes when they are made, and calls that judge their heads by it.
//!
//! ```text
//! rapt_measured_create   x, codes ─► QuantizedView ──measure──► rapt_measured
//! rapt_attention         rapt_tolerance ─► Asked ─► Tolerance ──► Engine::attention_within ─► rapt_judgement
//! ```
//! Deliberately absent: the proofs that `served` keeps, since which heads fall back is a matter of values.

use engine::quant::{Measured, QuantError, QuantizedView, measure};
use engine::{Backing, Codes, Device, Engine, Error, Errors, Judgement, Options, Tensors, Tolerance, View};

use crate::abi::{rapt_codes, rapt_error, rapt_judgement, rapt_measured, rapt_tensor, rapt_tolerance};
use crate::handle;
use crate::read::{self, Call, CodesNames, optional, struct_size, to_read, to_write, view};
use crate::refusal::{Pointer, Refusal};

/// Measures how far the numbers of codes lie from `x`, which they were made of, into `*measured`: it is given back by
/// rapt_measured_destroy(), and a rapt_tolerance takes it. On an error `*measured` is as before.
///
/// `x` is F64, F32, F16 or BF16, [.., len, head_dim], and `tensor` with `codes` is k or v of a call in layout BHSD. A
/// rapt_measured has 8 bytes for each row, each column and each matrix, and holds none of the tensors.
///
/// # Safety
/// Each descriptor, and each tensor behind one, is what it says: readable memory that nobody writes during the call; `measured` leads to a
/// pointer that may be written. Each may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_measured_create(
    x: *const rapt_tensor,
    tensor: *const rapt_tensor,
    codes: *const rapt_codes,
    measured: *mut *mut rapt_measured,
) -> rapt_error {
    handle::create(measured, "measured", || {
        // SAFETY: the caller's word.
        let (x, tensor) = unsafe { (view("x", x)?, view("tensor", tensor)?) };
        let codes = to_read(codes, "codes")?;
        // SAFETY: the caller's word.
        let codes = unsafe { read::codes(&CodesNames::ALONE, codes) }?.ok_or(Refusal::Null("codes".into()))?;
        Ok(rapt_measured { measured: measured_of(&x, &tensor, &codes)? })
    })
}

fn measured_of(x: &View<'_>, tensor: &View<'_>, codes: &Codes<'_>) -> Result<Measured, Refusal> {
    for view in [Some(x), Some(tensor), Some(&codes.descale), codes.zero_point.as_ref()].into_iter().flatten() {
        if view.device() != Device::Cpu {
            let why = "errors are measured in host memory".to_owned();
            return Err(Error::DeviceUnavailable { device: view.device(), why }.into());
        }
    }
    let refuse = |error| match error {
        QuantError::Core(error) => Refusal::Engine(error),
        error => Refusal::Quant { tensor: "x", error },
    };
    if let Some(got) = codes.head_dim.filter(|got| x.shape().last() != Some(got)) {
        let allowed = "0, or the last size of x".to_owned();
        return Err(Error::Option { option: "codes.head_dim", got: got.to_string(), allowed }.into());
    }
    let quantized = QuantizedView::of_codes(*tensor, codes, *x.shape()).map_err(refuse)?;
    measure(x, &quantized).map_err(refuse)
}

/// Gives a rapt_measured back. NULL is ignored.
///
/// # Safety
/// `measured` came from rapt_measured_create(), was not destroyed before, and is used by no other thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_measured_destroy(measured: *mut rapt_measured) {
    // SAFETY: the caller's word.
    unsafe { handle::destroy(measured) };
}

/// The tolerance of a call, and where its judgement goes.
pub(crate) struct Asked<'a> {
    tolerance: Tolerance<'a>,
    judgement: Option<*mut rapt_judgement>,
}

impl<'a> Asked<'a> {
    /// That of a call's arguments.
    ///
    /// # Safety
    /// As rapt_attention(), for 'a.
    pub(crate) unsafe fn of(call: &Call) -> Result<Option<Self>, Refusal> {
        if call.options.is_null() {
            return Ok(None);
        }
        // SAFETY: the caller's word.
        unsafe { Self::read(read::options(call.options)?.tolerance) }
    }

    /// `None` for NULL.
    ///
    /// # Safety
    /// `given` leads to a tolerance that is what it says for 'a, or is NULL.
    unsafe fn read(given: *const rapt_tolerance) -> Result<Option<Self>, Refusal> {
        if given.is_null() {
            return Ok(None);
        }
        let given = to_read(given, "tolerance")?;
        // SAFETY: neither NULL nor unaligned; a struct of any version begins with its size.
        struct_size("tolerance.size", unsafe { (*given).size }, &[size_of::<rapt_tolerance>()])?;
        // SAFETY: as long as its size says.
        let given = unsafe { given.read() };
        // SAFETY: the caller's word.
        let (k, v) = unsafe {
            (
                backing("k_measured", given.k_measured, "k_original", given.k_original)?,
                backing("v_measured", given.v_measured, "v_original", given.v_original)?,
            )
        };
        let judgement = if given.judgement.is_null() {
            None
        } else {
            let pointer = Pointer { argument: "tolerance", field: Some("judgement") };
            let judgement = to_write(given.judgement, pointer)?;
            // SAFETY: neither NULL nor unaligned; that a judgement lies there is the caller's word.
            struct_size("judgement.size", unsafe { (*judgement).size }, &[size_of::<rapt_judgement>()])?;
            Some(judgement)
        };
        Ok(Some(Asked { tolerance: Tolerance { limit: given.limit, k, v }, judgement }))
    }

    /// # Safety
    /// As rapt_attention().
    pub(crate) unsafe fn run(&self, engine: &Engine, tensors: Tensors<'_>, options: &Options) -> Result<(), Refusal> {
        let done = engine.attention_within(tensors, options, &self.tolerance)?;
        // SAFETY: the caller's word.
        unsafe { self.write(&done) };
        Ok(())
    }

    /// # Safety
    /// As rapt_explain().
    pub(crate) unsafe fn judge(
        &self,
        engine: &Engine,
        tensors: Tensors<'_>,
        options: &Options,
    ) -> Result<Judgement, Refusal> {
        let found = engine.judge(tensors, options, &self.tolerance)?;
        // SAFETY: the caller's word.
        unsafe { self.write(&found) };
        Ok(found)
    }

    /// # Safety
    /// The place of the judgement is alive.
    unsafe fn write(&self, found: &Judgement) {
        let Some(to) = self.judgement else { return };
        let found = rapt_judgement {
            size: size_of::<rapt_judgement>(),
            quantized: found.quantized(),
            fell_back: found.fell_back(),
            worst_estimate: found.worst_estimate(),
            worst_bound: found.worst_bound(),
            worst_epsilon: found.worst_epsilon(),
        };
        // SAFETY: `read` found it neither NULL nor unaligned, and as long as this struct.
        unsafe { to.write(found) };
    }
}

/// # Safety
/// `measured` is alive for 'a and `original` is what it says, or they are NULL.
unsafe fn backing<'a>(
    field: &'static str,
    measured: *const rapt_measured,
    name: &'static str,
    original: *const rapt_tensor,
) -> Result<Option<Backing<'a>>, Refusal> {
    // SAFETY: the caller's word.
    let original = unsafe { optional(name, original) }?;
    if measured.is_null() {
        // Where there are codes the call is refused.
        return match original {
            None => Ok(None),
            Some(_) => {
                let allowed = format!("NULL, or {field} beside it");
                Err(Error::Option { option: name, got: "a tensor".to_owned(), allowed }.into())
            }
        };
    }
    let measured = to_read(measured, Pointer { argument: "tolerance", field: Some(field) })?;
    // SAFETY: neither NULL nor unaligned; that it is alive is the caller's word.
    let errors = Errors::Host(unsafe { &(*measured).measured });
    Ok(Some(Backing { errors, original }))
}
