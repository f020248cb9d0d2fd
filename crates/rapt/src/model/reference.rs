//! The same program by its definition: rapt-graph's interpreter, node by node in f64 and i64, without plans and kernels.
//!
//! It answers the question which of two results is wrong. Deliberately absent: speed, and any effect: inputs and what a session
//! keeps are read, never written.

use std::collections::BTreeMap;

use rapt_core::DType;
use rapt_graph::{Cells, Fact, Interpreter, Item, Meta, Precision, Tensor};
use rapt_pt2::StorageId;

use super::memory::{self, Strided};
use super::state::State;
use super::{Input, InputForm, Model, ModelError, Output, Session, cells};
use crate::Shape;

impl Model {
    /// The results by definition: every node computes in f64 or i64, and rounds once to its dtype
    /// ([`Precision::Rounded`]) or not at all ([`Precision::Wide`]: floats come back as float64). What a run writes is not
    /// written here. A hundred times slower than [`Model::run`], and 8 bytes for every element of the weights.
    ///
    /// # Errors
    /// As [`Model::run`].
    pub fn reference(&self, inputs: &mut [Input<'_>], precision: Precision) -> Result<Vec<Output>, ModelError> {
        reference(self, &State::default(), inputs, precision)
    }
}

impl Session {
    /// As [`Model::reference`], with what the session keeps. It stays as it is.
    ///
    /// # Errors
    /// As [`Session::run`].
    pub fn reference(&self, inputs: &mut [Input<'_>], precision: Precision) -> Result<Vec<Output>, ModelError> {
        reference(self.model(), self.state(), inputs, precision)
    }
}

fn reference(
    model: &Model,
    state: &State,
    inputs: &mut [Input<'_>],
    precision: Precision,
) -> Result<Vec<Output>, ModelError> {
    let inner = &*model.inner;
    let forms: Vec<InputForm> = inputs.iter().map(Input::form).collect();
    let binding = inner.bind(&forms)?;
    for (input, port) in inputs.iter().zip(&inner.inputs) {
        input.check_device(port)?;
    }
    let mut interpreter = Interpreter::new(&inner.graph, precision);
    let mut storages: BTreeMap<(StorageId, u8), Tensor> = BTreeMap::new();
    for place in 0..inner.graph.inputs.len() {
        let Some(payload) = inner.payload(place)? else { continue };
        let Some(name) = inner.graph.inputs[place].source.state() else { continue };
        // Names that share a storage see each other's writes.
        let whole = storages.entry((payload.storage, payload.dtype.code())).or_insert_with(|| {
            let cells = cells::of_bytes(payload.dtype, state.bytes(inner, payload.storage));
            Tensor::new(Meta::contiguous(payload.dtype, &[]), cells)
        });
        let signed = |numbers: &[usize]| numbers.iter().map(|&n| n as i64).collect::<Vec<i64>>();
        let (shape, strides) = (signed(&payload.sizes), signed(&payload.strides));
        let meta = Meta { dtype: payload.dtype, shape, strides, offset: payload.storage_offset as i64 };
        interpreter.set(name, &whole.view(meta))?;
    }
    let stated: Vec<Option<&Fact>> =
        inner.graph.user_inputs().map(|input| input.value.map(|id| binding.fact(id))).collect();
    let items: Vec<Item> = inputs.iter_mut().zip(stated).map(|(input, stated)| item(input, stated)).collect();
    interpreter
        .run(&items)
        .map_err(|error| inner.of_values(error))?
        .into_iter()
        .map(|item| output(item, precision))
        .collect()
}

/// An input as the interpreter has it: as the program states it.
fn item(input: &mut Input<'_>, stated: Option<&Fact>) -> Item {
    let (ptr, strides) = match input {
        Input::Read(view) => (view.as_ptr().cast_mut(), view.strides().to_vec()),
        Input::Write(view) => (view.as_mut_ptr(), view.strides().to_vec()),
        Input::Int(n) => return Item::Int(*n),
        Input::Float(x) => return Item::Float(*x),
        Input::Bool(b) => return Item::Bool(*b),
        Input::None => return Item::None,
    };
    let Some(Fact::Tensor(meta)) = stated else { return Item::None };
    let shape: Vec<usize> = meta.shape.iter().map(|&n| n as usize).collect();
    let size = meta.dtype.size_bytes();
    let mut bytes = vec![0u8; shape.iter().product::<usize>() * size];
    let to = Strided { ptr: bytes.as_mut_ptr(), strides: &memory::row_major(&shape) };
    // SAFETY: the view vouches for its elements, and `bytes` has room for each.
    unsafe { memory::copy(&shape, size, Strided { ptr, strides: &strides }, to) };
    let tensor = Tensor::zeros(Meta { offset: 0, ..meta.clone() });
    tensor.write(Precision::Wide, cells::of_bytes(meta.dtype, &bytes));
    Item::Tensor(tensor)
}

fn output(item: Item, precision: Precision) -> Result<Output, ModelError> {
    let tensor = match item {
        Item::Tensor(tensor) => tensor,
        Item::Int(n) => return Ok(Output::Int(n)),
        Item::Float(x) => return Ok(Output::Float(x)),
        Item::Bool(b) => return Ok(Output::Bool(b)),
        Item::None => return Ok(Output::None),
    };
    let numbers = tensor.cast(tensor.meta.dtype, precision);
    let is_wide = precision == Precision::Wide && matches!(numbers, Cells::Float(_));
    let dtype = if is_wide { DType::F64 } else { tensor.meta.dtype };
    let sizes: Vec<usize> = tensor.meta.shape.iter().map(|&n| n as usize).collect();
    let many = || ModelError::Plan { why: format!("a result of {} dimensions", sizes.len()) };
    let mut out = crate::Tensor::zeros(dtype, Shape::new(&sizes).ok_or_else(many)?)?;
    let bytes = cells::to_bytes(dtype, &numbers);
    // SAFETY: a new tensor is row-major, and has as many elements of this dtype.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.view_mut()?.as_mut_ptr(), bytes.len()) };
    Ok(Output::Tensor(out))
}
