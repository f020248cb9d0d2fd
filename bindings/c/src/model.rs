//! Exported programs for C: handles for a model, for its binding to given sizes, and for a session.
//!
//! ```text
//! rapt_model_open(engine) ─► rapt_model ──rapt_model_bind(inputs)──► rapt_bound      what the results will be
//!                               └──rapt_session_create──► rapt_session ──rapt_session_run(inputs, outputs)
//! ```
//! A model keeps the engine that it was opened with: its threads run the sessions' calls, on the CPU.
//! Inputs and results are `rapt_tensor`s in the order of the program's inputs and results. A number is a tensor without
//! dimensions (I64, F64, BOOL), `None` one that is all zero. `run` reads and checks a call.
//! Deliberately absent: results that Rapt allocates.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use engine::DType;
use engine::model::{Bound, InputForm, Model, OutputForm, Port, Session};

use crate::abi::{rapt_device, rapt_dtype, rapt_error, rapt_port, rapt_tensor};
use crate::handle::{create, destroy};
use crate::rapt_engine;
use crate::read::{struct_size, to_read, to_write};
use crate::refusal::{Refusal, guard};
use crate::run::{Given, INPUT, OUTPUT, dtype_of, read_inputs, run};

/// An exported program, ready to run; see rapt_model_open().
#[allow(non_camel_case_types, reason = "a name of rapt.h")]
pub struct rapt_model {
    model: Model,
    inputs: Vec<PortText>,
    outputs: Vec<PortText>,
}

/// A model for inputs of given sizes; see rapt_model_bind().
#[allow(non_camel_case_types, reason = "a name of rapt.h")]
pub struct rapt_bound {
    outputs: Vec<Form>,
}

/// Calls of a model that share what it keeps; see rapt_session_create().
#[allow(non_camel_case_types, reason = "a name of rapt.h")]
pub struct rapt_session {
    running: Mutex<Running>,
}

/// A session, and the binding of its last call: a loop with equal sizes binds once.
struct Running {
    session: Session,
    last: Option<(Vec<InputForm>, Bound)>,
}

/// What `rapt_port` points to.
struct PortText {
    name: CString,
    dtype: i32,
    is_written: bool,
    shape: Vec<i64>,
    sizes: Vec<CString>,
    /// The addresses of `sizes`, which do not move.
    pointers: Vec<*const c_char>,
}

impl PortText {
    fn new(port: &Port) -> Result<PortText, Refusal> {
        let text = |text: &str| CString::new(text).map_err(|_| Refusal::Nul);
        let sizes = port.sizes.iter().map(|size| text(size)).collect::<Result<Vec<CString>, Refusal>>()?;
        Ok(PortText {
            name: text(&port.name)?,
            dtype: port.dtype.map_or(rapt_dtype::RAPT_DTYPE_UNKNOWN as i32, |dtype| dtype.code().into()),
            is_written: port.is_written,
            shape: port.sizes.iter().map(|size| size.parse().unwrap_or(-1)).collect(),
            pointers: sizes.iter().map(|size| size.as_ptr()).collect(),
            sizes,
        })
    }

    fn port(&self) -> rapt_port {
        rapt_port {
            size: size_of::<rapt_port>(),
            name: self.name.as_ptr(),
            dtype: self.dtype,
            // One for each size that the archive holds: fewer than 2³¹.
            ndim: self.sizes.len() as i32,
            is_written: self.is_written.into(),
            is_dynamic: self.shape.contains(&-1).into(),
            shape: self.shape.as_ptr(),
            sizes: self.pointers.as_ptr(),
        }
    }
}

/// The form of a result, as C sees it.
struct Form {
    dtype: DType,
    shape: Vec<i64>,
    strides: Vec<i64>,
    bytes: i64,
}

impl Form {
    fn new(form: &OutputForm) -> Form {
        let sizes = if let OutputForm::Tensor { shape, .. } = form { shape.as_slice() } else { &[] };
        // A binding was found for these sizes, so they and their product fit an address.
        let shape: Vec<i64> = sizes.iter().map(|&size| i64::try_from(size).unwrap_or(i64::MAX)).collect();
        let mut strides = vec![1i64; shape.len()];
        for dim in (1..shape.len()).rev() {
            strides[dim - 1] = strides[dim].saturating_mul(shape[dim].max(1));
        }
        let (dtype, numel) = (dtype_of(form), shape.iter().fold(1i64, |numel, size| numel.saturating_mul(*size)));
        let bytes = if *form == OutputForm::None { 0 } else { numel.saturating_mul(dtype.size_bytes() as i64) };
        Form { dtype, shape, strides, bytes }
    }

    fn tensor(&self) -> rapt_tensor {
        rapt_tensor {
            data: std::ptr::null_mut(),
            dtype: self.dtype.code().into(),
            device: rapt_device::RAPT_DEVICE_CPU as i32,
            device_index: 0,
            ndim: self.shape.len() as i32,
            shape: self.shape.as_ptr(),
            strides: self.strides.as_ptr(),
            storage_bytes: self.bytes,
            storage: std::ptr::null(),
        }
    }
}

/// # Safety
/// `engine` is alive, or NULL.
unsafe fn opened(
    engine: *const rapt_engine,
    open: impl FnOnce() -> Result<Model, Refusal>,
) -> Result<rapt_model, Refusal> {
    let engine = to_read(engine, "engine")?;
    // SAFETY: neither NULL nor unaligned; that an engine lies there is the caller's word.
    let model = open()?.on(Arc::clone(unsafe { &(*engine).engine }));
    let texts = |ports: &[Port]| ports.iter().map(PortText::new).collect::<Result<Vec<PortText>, Refusal>>();
    Ok(rapt_model { inputs: texts(model.inputs())?, outputs: texts(model.outputs())?, model })
}

/// Loads the program that torch.export.save() wrote to the file `path`, into `*model`: it is given back by
/// rapt_model_destroy(). On an error `*model` is as before. The engine's threads run the calls of the model's sessions; it may be
/// destroyed before the model, which then holds what it needs of it.
///
/// The file is mapped: nothing may change it until the model and its sessions are destroyed. Everything that needs no input is
/// checked here: the archive, that every operator is served (the error lists all that are not), and that what each node gives is
/// what the program says of it. A model may be used from any number of threads at once.
///
/// # Safety
/// `engine` is alive; `path` is a string that ends with NUL, in UTF-8 where the system wants it; `model` leads to a pointer that may be
/// written. Each may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_model_open(
    engine: *const rapt_engine,
    path: *const c_char,
    model: *mut *mut rapt_model,
) -> rapt_error {
    let open = || {
        let path = to_read(path, "path")?;
        // SAFETY: not NULL; that a NUL ends it is the caller's word.
        let path = unsafe { CStr::from_ptr(path) };
        Ok(Model::open(path_of(path)?)?)
    };
    // SAFETY: the caller's word.
    create(model, "model", || unsafe { opened(engine, open) })
}

#[cfg(unix)]
#[expect(clippy::unnecessary_wraps, reason = "elsewhere a path must be UTF-8")]
fn path_of(path: &CStr) -> Result<&Path, Refusal> {
    use std::os::unix::ffi::OsStrExt;
    Ok(Path::new(std::ffi::OsStr::from_bytes(path.to_bytes())))
}

#[cfg(not(unix))]
fn path_of(path: &CStr) -> Result<&Path, Refusal> {
    path.to_str().map(Path::new).map_err(|_| Refusal::Text { argument: "path" })
}

/// The same from the `len` bytes of such a file in memory. They are copied.
///
/// # Safety
/// `bytes` leads to `len` bytes, or is NULL; `engine` and `model` as for rapt_model_open().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_model_from_bytes(
    engine: *const rapt_engine,
    bytes: *const c_void,
    len: usize,
    model: *mut *mut rapt_model,
) -> rapt_error {
    let open = || {
        let bytes = to_read(bytes.cast::<u8>(), "bytes")?;
        if isize::try_from(len).is_err() {
            return Err(Refusal::Length { argument: "bytes", got: len });
        }
        // SAFETY: not NULL, and no longer than an allocation can be; that `len` bytes lie there is the caller's word.
        let bytes = unsafe { std::slice::from_raw_parts(bytes, len) };
        Ok(Model::from_bytes(bytes)?)
    };
    // SAFETY: the caller's word.
    create(model, "model", || unsafe { opened(engine, open) })
}

/// Gives a model back. Its sessions and bindings live on; names and sizes that rapt_model_input() told do not. NULL is ignored.
///
/// # Safety
/// `model` came from rapt_model_open() or rapt_model_from_bytes(), was not destroyed before, and is used by no other thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_model_destroy(model: *mut rapt_model) {
    // SAFETY: the caller's word.
    unsafe { destroy(model) }
}

/// How many inputs a call takes; 0 for NULL.
///
/// # Safety
/// `model` is alive, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_model_num_inputs(model: *const rapt_model) -> usize {
    // SAFETY: neither NULL nor unaligned; that a model lies there is the caller's word.
    to_read(model, "model").map_or(0, |model| unsafe { &*model }.inputs.len())
}

/// How many results a call gives; 0 for NULL.
///
/// # Safety
/// `model` is alive, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_model_num_outputs(model: *const rapt_model) -> usize {
    // SAFETY: neither NULL nor unaligned; that a model lies there is the caller's word.
    to_read(model, "model").map_or(0, |model| unsafe { &*model }.outputs.len())
}

/// What input `place` is, counted from 0, in the order in which rapt_session_run() takes them. The caller sets `port->size` to
/// sizeof(rapt_port); all else is written.
///
/// # Safety
/// `model` is alive, or NULL; `port` leads to `port->size` bytes, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_model_input(model: *const rapt_model, place: usize, port: *mut rapt_port) -> rapt_error {
    guard(|| {
        let model = to_read(model, "model")?;
        // SAFETY: neither NULL nor unaligned; that a model lies there is the caller's word, and that of `port`.
        unsafe { describe(&(*model).inputs, INPUT, place, port) }
    })
}

/// What result `place` is, counted from 0, in the order in which rapt_session_run() writes them. The caller sets `port->size` to
/// sizeof(rapt_port); all else is written.
///
/// # Safety
/// `model` is alive, or NULL; `port` leads to `port->size` bytes, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_model_output(model: *const rapt_model, place: usize, port: *mut rapt_port) -> rapt_error {
    guard(|| {
        let model = to_read(model, "model")?;
        // SAFETY: neither NULL nor unaligned; that a model lies there is the caller's word, and that of `port`.
        unsafe { describe(&(*model).outputs, OUTPUT, place, port) }
    })
}

/// # Safety
/// `port` leads to `port->size` bytes, or is NULL.
unsafe fn describe(ports: &[PortText], what: &'static str, place: usize, port: *mut rapt_port) -> Result<(), Refusal> {
    let port = to_write(port, "port")?;
    // SAFETY: neither NULL nor unaligned; a struct of any version begins with its size.
    struct_size("port.size", unsafe { (*port).size }, &[size_of::<rapt_port>()])?;
    let found = ports.get(place).ok_or(Refusal::Place { what, got: place, count: ports.len() })?;
    // SAFETY: as long as its size says, which was found to be that of this struct.
    unsafe { port.write(found.port()) };
    Ok(())
}

/// What runs for a model, in words, as a table of lines: into `*text`, which the caller gives back by rapt_string_free(). On an
/// error `*text` is as before.
///
/// # Safety
/// `model` is alive, or NULL; `text` leads to a pointer that may be written, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_model_explain(model: *const rapt_model, text: *mut *mut c_char) -> rapt_error {
    guard(|| {
        let (model, text) = (to_read(model, "model")?, to_write(text, "text")?);
        // SAFETY: neither NULL nor unaligned; that a model lies there is the caller's word.
        let table = unsafe { &(*model).model }.explain().to_string();
        let table = CString::new(table).map_err(|_| Refusal::Nul)?;
        // SAFETY: neither NULL nor unaligned.
        unsafe { text.write(table.into_raw()) };
        Ok(())
    })
}

/// What the results of these inputs will be, into `*bound`, which is given back by rapt_bound_destroy(). On an error `*bound` is
/// as before.
///
/// Dtypes, numbers of dimensions and sizes of the inputs are read, and the values of those that are numbers, not tensors;
/// strides must be there, and `data` of tensors may be NULL. Every guard of the program is checked. Nothing is computed.
///
/// # Safety
/// `model` is alive, or NULL; `inputs` leads to `num_inputs` tensors that are what they say, or is NULL; `bound` leads to a pointer that
/// may be written, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_model_bind(
    model: *const rapt_model,
    inputs: *const rapt_tensor,
    num_inputs: usize,
    bound: *mut *mut rapt_bound,
) -> rapt_error {
    create(bound, "bound", || {
        let model = to_read(model, "model")?;
        // SAFETY: neither NULL nor unaligned; that a model lies there is the caller's word.
        let model = unsafe { &(*model).model };
        // SAFETY: the caller's word.
        let given = unsafe { read_inputs(model, inputs, num_inputs) }?;
        let forms: Vec<InputForm> = given.iter().map(Given::form).collect();
        Ok(rapt_bound { outputs: model.bind(&forms)?.outputs().iter().map(Form::new).collect() })
    })
}

/// Gives a binding back. NULL is ignored.
///
/// # Safety
/// `bound` came from rapt_model_bind(), was not destroyed before, and is used by no other thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_bound_destroy(bound: *mut rapt_bound) {
    // SAFETY: the caller's word.
    unsafe { destroy(bound) }
}

/// What result `place` will be, into `*output`: a row-major tensor in host memory whose `data` is NULL and whose `storage_bytes` is
/// what it takes. With `data` set to that many bytes it is a place for rapt_session_run(). `shape` and `strides` live as long as
/// the binding. A number is a tensor without dimensions, None has the dtype RAPT_DTYPE_UNKNOWN and takes no bytes.
///
/// # Safety
/// `bound` is alive, or NULL; `output` leads to a tensor that may be written, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_bound_output(
    bound: *const rapt_bound,
    place: usize,
    output: *mut rapt_tensor,
) -> rapt_error {
    guard(|| {
        let (bound, output) = (to_read(bound, "bound")?, to_write(output, "output")?);
        // SAFETY: neither NULL nor unaligned; that a binding lies there is the caller's word.
        let forms = unsafe { &(*bound).outputs };
        let form = forms.get(place).ok_or(Refusal::Place { what: OUTPUT, got: place, count: forms.len() })?;
        // SAFETY: neither NULL nor unaligned; that it may be written is the caller's word.
        unsafe { output.write(form.tensor()) };
        Ok(())
    })
}

/// A session of a model into `*session`, which is given back by rapt_session_destroy(): calls that share what the program keeps,
/// such as a cache that it writes in place. It starts as the archive has it. On an error `*session` is as before.
///
/// # Safety
/// `model` is alive, or NULL; `session` leads to a pointer that may be written, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_session_create(model: *const rapt_model, session: *mut *mut rapt_session) -> rapt_error {
    create(session, "session", || {
        let model = to_read(model, "model")?;
        // SAFETY: neither NULL nor unaligned; that a model lies there is the caller's word.
        let session = unsafe { &(*model).model }.session();
        Ok(rapt_session { running: Mutex::new(Running { session, last: None }) })
    })
}

/// Gives a session back, with what it keeps. NULL is ignored.
///
/// # Safety
/// `session` came from rapt_session_create(), was not destroyed before, and is used by no other thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_session_destroy(session: *mut rapt_session) {
    // SAFETY: the caller's word.
    unsafe { destroy(session) }
}

/// Runs the program on `inputs`, and writes its results where `outputs` say: each of the result's dtype and sizes, as
/// rapt_model_bind() tells them, with strides of its own. Nothing is converted.
///
/// A number is a tensor without dimensions: I64, F64 or BOOL. An input that is None is a rapt_tensor of zeros; the place of a result
/// that is None is not read. An input that the program writes (`is_written` of its rapt_port) is written where it lies. Outputs and
/// written inputs share no byte with another operand and contain every address once.
///
/// On an error nothing was written, the session keeps what it had, and serves the next call. (After RAPT_ERROR_INTERNAL, a defect of
/// Rapt, outputs and what the session keeps are unspecified.) Calls of one session at once wait for one another.
///
/// # Safety
/// `session` is alive, or NULL. `inputs` and `outputs` lead to as many tensors as told, or are NULL; each is what it says: readable
/// memory that nobody writes during the call, and for outputs and written inputs writable memory that nobody else uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_session_run(
    session: *mut rapt_session,
    inputs: *const rapt_tensor,
    num_inputs: usize,
    outputs: *const rapt_tensor,
    num_outputs: usize,
) -> rapt_error {
    guard(|| {
        let session = to_read(session.cast_const(), "session")?;
        // SAFETY: neither NULL nor unaligned; that a session lies there is the caller's word.
        let mut running = unsafe { &(*session).running }.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's word.
        let given = unsafe { read_inputs(running.session.model(), inputs, num_inputs) }?;
        let forms: Vec<InputForm> = given.iter().map(Given::form).collect();
        let last = running.last.take().filter(|(last, _)| *last == forms);
        let bound = match last {
            Some((_, bound)) => bound,
            None => running.session.bind(&forms)?,
        };
        // SAFETY: the caller's word.
        let done = unsafe { run(&mut running.session, &bound, &given, outputs, num_outputs) };
        running.last = Some((forms, bound));
        done
    })
}

/// Forgets what the calls so far have left: the session is as it began.
///
/// # Safety
/// `session` is alive, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_session_reset(session: *mut rapt_session) -> rapt_error {
    guard(|| {
        let session = to_read(session.cast_const(), "session")?;
        // SAFETY: neither NULL nor unaligned; that a session lies there is the caller's word.
        unsafe { &(*session).running }.lock().unwrap_or_else(PoisonError::into_inner).session.reset();
        Ok(())
    })
}

/// The number of bytes that a session holds beside the archive; 0 for NULL.
///
/// # Safety
/// `session` is alive, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_session_held_bytes(session: *const rapt_session) -> usize {
    let mut held = 0;
    guard(|| {
        if !session.is_null() {
            let session = to_read(session, "session")?;
            // SAFETY: neither NULL nor unaligned; that a session lies there is the caller's word.
            let running = unsafe { &(*session).running }.lock().unwrap_or_else(PoisonError::into_inner);
            held = running.session.held_bytes();
        }
        Ok(())
    });
    held
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Handles are used from any thread.
    #[test]
    fn what_handles_hold_may_change_threads() {
        fn check<T: Send>() {}
        check::<Running>();
        check::<Model>();
    }
}
