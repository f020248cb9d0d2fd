//! One run of a program: what the inputs and the places of results say, proven, then run.
//!
//! ```text
//! rapt_tensor ─► Parts ─► Given ─► InputForm ──bind──► Bound ─► Input, Place ──check_written──► run_into
//! ```
//! Deliberately absent: any conversion, and any write before everything was checked.

use engine::model::{Bound, Input, InputForm, Model, ModelError, OutputForm, Port, Session};
use engine::{DType, Device, View, ViewMut, prove_disjoint, prove_injective};

use crate::abi::rapt_tensor;
use crate::read::{Parts, to_read};
use crate::refusal::Refusal;

/// What errors call an input beside its name.
pub(crate) const INPUT: &str = "input";
/// What errors call a result's place beside its name.
pub(crate) const OUTPUT: &str = "output";

/// # Safety
/// As rapt_session_run().
pub(crate) unsafe fn run(
    session: &mut Session,
    bound: &Bound,
    given: &[Given],
    outputs: *const rapt_tensor,
    num_outputs: usize,
) -> Result<(), Refusal> {
    let model = session.model().clone();
    let mut inputs = Vec::with_capacity(given.len());
    for (place, (given, port)) in given.iter().zip(model.inputs()).enumerate() {
        // SAFETY: the caller's word.
        inputs.push(unsafe { given.input(bound.writes(place)) }.map_err(|refusal| refusal.of(&port.name))?);
    }
    // SAFETY: as above.
    let places = unsafe { read_outputs(&model, bound, outputs, num_outputs) }?;
    let mut tensors = Vec::with_capacity(places.len());
    for (place, port) in places.iter().zip(model.outputs()) {
        tensors.push(match place {
            // SAFETY: as above.
            Place::Tensor(parts) => Some(unsafe { parts.view_mut(OUTPUT) }.map_err(|refusal| refusal.of(&port.name))?),
            Place::Number(_) | Place::None => None,
        });
    }
    check_written(&model, &inputs, &tensors, &places)?;
    session.run_into(bound, &mut inputs, &mut tensors)?;
    for (place, form) in places.into_iter().zip(bound.outputs()) {
        if let Place::Number(mut view) = place {
            let to = view.as_mut_ptr();
            // SAFETY: `read_outputs` found a tensor without dimensions of the number's dtype here: one aligned element.
            unsafe {
                match form {
                    OutputForm::Int(n) => to.cast::<i64>().write(*n),
                    OutputForm::Float(x) => to.cast::<f64>().write(*x),
                    OutputForm::Bool(b) => to.write((*b).into()),
                    OutputForm::Tensor { .. } | OutputForm::None => {}
                }
            }
        }
    }
    Ok(())
}

/// An input as it was given.
pub(crate) enum Given {
    Tensor(Parts),
    Int(i64),
    Float(f64),
    Bool(bool),
    None,
}

impl Given {
    /// # Safety
    /// As rapt_session_run(), for one of its inputs.
    unsafe fn read(port: &Port, given: *const rapt_tensor) -> Result<Given, Refusal> {
        // SAFETY: the caller's word.
        let parts = unsafe { Parts::read(INPUT, given) }?;
        let is_number = parts.shape.is_empty() && parts.device() == Device::Cpu;
        Ok(match (port.dtype, parts.dtype) {
            (None, DType::Unknown) => Given::None,
            (None, DType::I64 | DType::F64 | DType::Bool) if is_number => {
                // SAFETY: as above.
                let view = unsafe { parts.view(INPUT) }?;
                // SAFETY: one element of this dtype, not NULL and aligned, as `view` found.
                unsafe {
                    match parts.dtype {
                        DType::I64 => Given::Int(view.as_ptr().cast::<i64>().read()),
                        DType::F64 => Given::Float(view.as_ptr().cast::<f64>().read()),
                        _ => Given::Bool(view.as_ptr().read() != 0),
                    }
                }
            }
            _ => Given::Tensor(parts),
        })
    }

    pub(crate) fn form(&self) -> InputForm {
        match self {
            Given::Tensor(parts) => InputForm::Tensor { dtype: parts.dtype, shape: parts.shape.to_vec() },
            Given::Int(n) => InputForm::Int(*n),
            Given::Float(x) => InputForm::Float(*x),
            Given::Bool(b) => InputForm::Bool(*b),
            Given::None => InputForm::None,
        }
    }

    /// # Safety
    /// As rapt_session_run(), for one of its inputs, for 'a.
    unsafe fn input<'a>(&self, is_written: bool) -> Result<Input<'a>, Refusal> {
        Ok(match self {
            // SAFETY: the caller's word.
            Given::Tensor(parts) if is_written => Input::Write(unsafe { parts.view_mut(INPUT) }?),
            // SAFETY: as above.
            Given::Tensor(parts) => Input::Read(unsafe { parts.view(INPUT) }?),
            Given::Int(n) => Input::Int(*n),
            Given::Float(x) => Input::Float(*x),
            Given::Bool(b) => Input::Bool(*b),
            Given::None => Input::None,
        })
    }
}

/// # Safety
/// `inputs` leads to `count` tensors that are what they say, or is NULL.
pub(crate) unsafe fn read_inputs(
    model: &Model,
    inputs: *const rapt_tensor,
    count: usize,
) -> Result<Vec<Given>, Refusal> {
    let ports = model.inputs();
    if count != ports.len() {
        let names = ports.iter().map(|port| port.name.clone()).collect();
        return Err(ModelError::InputCount { expected: ports.len(), got: count, names }.into());
    }
    if count == 0 {
        return Ok(Vec::new());
    }
    let inputs = to_read(inputs, "inputs")?;
    let read = |(place, port): (usize, &Port)| {
        // SAFETY: below `count`, the length that the caller told.
        unsafe { Given::read(port, inputs.add(place)) }.map_err(|refusal| refusal.of(&port.name))
    };
    ports.iter().enumerate().map(read).collect()
}

/// Where a result goes.
enum Place<'a> {
    Tensor(Parts),
    Number(ViewMut<'a>),
    None,
}

/// The places of the results, each of its result's dtype.
///
/// # Safety
/// As rapt_session_run(), for 'a.
unsafe fn read_outputs<'a>(
    model: &Model,
    bound: &Bound,
    outputs: *const rapt_tensor,
    count: usize,
) -> Result<Vec<Place<'a>>, Refusal> {
    let (ports, forms) = (model.outputs(), bound.outputs());
    if count != forms.len() {
        let names = ports.iter().map(|port| port.name.clone()).collect();
        return Err(Refusal::Results { expected: forms.len(), got: count, names });
    }
    if count == 0 {
        return Ok(Vec::new());
    }
    let outputs = to_read(outputs, "outputs")?;
    let read = |(at, form): (usize, &OutputForm)| -> Result<Place<'a>, Refusal> {
        let expected = dtype_of(form);
        if *form == OutputForm::None {
            return Ok(Place::None);
        }
        // SAFETY: below `count`, the length that the caller told.
        let parts = unsafe { Parts::read(OUTPUT, outputs.add(at)) }?;
        if parts.dtype != expected {
            return Err(Refusal::ResultDtype { expected, got: parts.dtype });
        }
        if parts.device() != Device::Cpu {
            return Err(Refusal::ResultDevice { got: parts.device() });
        }
        if matches!(form, OutputForm::Tensor { .. }) {
            return Ok(Place::Tensor(parts));
        }
        if !parts.shape.is_empty() {
            return Err(Refusal::ResultNumber { got: parts.shape.len() });
        }
        // SAFETY: the caller's word.
        Ok(Place::Number(unsafe { parts.view_mut(OUTPUT) }?))
    };
    let named = |(at, form)| read((at, form)).map_err(|refusal| refusal.of(&ports[at].name));
    forms.iter().enumerate().map(named).collect()
}

/// Refuses a result or a written input that shares memory with another operand, or has one address for two elements.
fn check_written(
    model: &Model,
    inputs: &[Input<'_>],
    tensors: &[Option<ViewMut<'_>>],
    places: &[Place<'_>],
) -> Result<(), Refusal> {
    let outputs = tensors.iter().zip(places).zip(model.outputs()).filter_map(|((tensor, place), port)| {
        let number = if let Place::Number(view) = place { Some(view) } else { None };
        Some((tensor.as_ref().or(number)?, port))
    });
    let changed = inputs.iter().zip(model.inputs()).filter_map(|(input, port)| match input {
        Input::Write(view) => Some((view, port)),
        _ => None,
    });
    let written: Vec<(&ViewMut<'_>, &Port)> = outputs.chain(changed).collect();
    let read = |(input, port)| match input {
        &Input::Read(view) => Some((view, port)),
        _ => None,
    };
    let read: Vec<(View<'_>, &Port)> = inputs.iter().zip(model.inputs()).filter_map(read).collect();
    for (at, (view, port)) in written.iter().enumerate() {
        prove_injective(OUTPUT, view).map_err(|error| Refusal::from(error).of(&port.name))?;
        let earlier = written[..at].iter().map(|(view, port)| (view.as_view(), *port));
        for (other, of) in read.iter().copied().chain(earlier) {
            prove_disjoint(OUTPUT, view, INPUT, &other).map_err(|error| match error {
                engine::Error::OutputOverlaps { .. } => Refusal::Overlap { other: of.name.clone() }.of(&port.name),
                error => Refusal::from(error).of(&port.name),
            })?;
        }
    }
    Ok(())
}

/// The dtype of a result: of a number, that of the tensor without dimensions that it is written to.
pub(crate) fn dtype_of(form: &OutputForm) -> DType {
    match form {
        OutputForm::Tensor { dtype, .. } => *dtype,
        OutputForm::Int(_) => DType::I64,
        OutputForm::Float(_) => DType::F64,
        OutputForm::Bool(_) => DType::Bool,
        OutputForm::None => DType::Unknown,
    }
}
