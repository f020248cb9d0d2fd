//! What a program keeps from one call to the next: the storages of buffers that it writes.

use std::collections::BTreeMap;

use rapt_core::DType;
use rapt_graph::{Cells, Interpreter, Meta, Tensor, ValueId};
use rapt_pt2::{Payload, StorageId};

use super::{Model, ModelError, cells};

/// A storage as numbers of one dtype. Names that read the same bytes as another dtype do not see its writes.
type Place = (StorageId, DType);

/// The storages that were written.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    written: BTreeMap<Place, Cells>,
}

/// The tensors that a run was given, by their places among the graph's inputs.
pub(super) type Held = Vec<(ValueId, Place, Tensor)>;

impl State {
    /// The number of bytes held.
    pub(super) fn held_bytes(&self) -> usize {
        let len = |cells: &Cells| match cells {
            Cells::Float(numbers) => numbers.len(),
            Cells::Int(numbers) => numbers.len(),
        };
        self.written.values().map(|cells| len(cells) * 8).sum()
    }

    /// Gives the interpreter every parameter, buffer and constant. Names that share a storage share it there too.
    pub(super) fn give(&self, model: &Model, interpreter: &mut Interpreter<'_>) -> Result<Held, ModelError> {
        let inner = &model.inner;
        let mut storages: BTreeMap<Place, Tensor> = BTreeMap::new();
        let mut held = Held::new();
        for (number, input) in inner.graph.inputs.iter().enumerate() {
            let (Some(name), Some((archive, payload))) = (input.source.state(), inner.payload(number)?) else {
                continue;
            };
            let place = (payload.storage, payload.dtype);
            let whole = storages.entry(place).or_insert_with(|| {
                let cells = self.written.get(&place).cloned();
                let cells = cells.unwrap_or_else(|| cells::of_bytes(payload.dtype, archive.storage(payload.storage)));
                Tensor::new(meta(payload), cells)
            });
            let tensor = whole.view(meta(payload));
            interpreter.set(name, &tensor)?;
            if let Some(id) = input.value {
                held.push((id, place, tensor));
            }
        }
        Ok(held)
    }

    /// Keeps the storages of what was written.
    pub(super) fn keep(&mut self, written: &[ValueId], held: &Held) {
        for (_, place, tensor) in held.iter().filter(|(id, ..)| written.contains(id)) {
            self.written.insert(*place, tensor.storage());
        }
    }
}

fn meta(payload: &Payload) -> Meta {
    let numbers = |sizes: &[usize]| sizes.iter().map(|&n| i64::try_from(n).unwrap_or(i64::MAX)).collect();
    Meta {
        dtype: payload.dtype,
        shape: numbers(&payload.sizes),
        strides: numbers(&payload.strides),
        offset: i64::try_from(payload.storage_offset).unwrap_or(i64::MAX),
    }
}
