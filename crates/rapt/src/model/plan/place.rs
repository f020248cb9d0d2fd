//! Where the values of a program lie: buffers, and forms over them.

use std::sync::Arc;

use rapt_core::{DType, Workspace};
use rapt_graph::{Binding, Fact, Input as GraphInput, Meta, Source, ValueId};
use rapt_pt2::{Payload, StorageId};

use super::super::{Inner, ModelError};

/// Memory that values lie in.
#[derive(Clone, Debug)]
pub(in crate::model) enum Buffer {
    /// A storage of the archive that nothing writes.
    Archive(StorageId),
    /// A storage of the archive that the program writes: a session has its own.
    State(StorageId),
    /// The caller's n-th input.
    Input(usize),
    /// What the program computes of constants alone, computed once.
    Constant(Arc<Workspace>),
    /// A part of the arena: its place there, once it is known, and its length.
    Arena {
        /// The first byte.
        at: usize,
        /// The length in bytes.
        len: usize,
    },
}

/// A tensor: a form over a buffer. Its offset counts from the buffer's first byte, in elements.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::model) struct Place {
    /// The buffer's number.
    pub(in crate::model) buffer: usize,
    /// The form.
    pub(in crate::model) meta: Meta,
}

impl Place {
    /// The address of the first element, relative to the buffer's.
    pub(in crate::model) fn offset_bytes(&self) -> isize {
        self.meta.offset as isize * self.size().cast_signed()
    }

    /// The bytes of an element.
    pub(in crate::model) fn size(&self) -> usize {
        self.meta.dtype.size_bytes()
    }

    /// The same elements as one dimension repeats them.
    pub(super) fn broadcast(&self, shape: &[i64]) -> Place {
        Place { buffer: self.buffer, meta: self.meta.broadcast(shape) }
    }

    /// The same elements in row-major order in another shape, where strides reach.
    pub(super) fn reshaped(&self, shape: &[i64]) -> Option<Place> {
        if self.meta.shape == shape {
            return Some(self.clone());
        }
        Some(Place { buffer: self.buffer, meta: self.meta.reshaped(shape)? })
    }

    /// A part of a dimension.
    pub(super) fn narrowed(&self, dim: usize, start: i64, size: i64) -> Place {
        let mut place = self.clone();
        place.meta.offset += start * place.meta.strides[dim];
        place.meta.shape[dim] = size;
        place
    }

    /// The same memory as elements of a dtype, each element as one or several of them; `None` where several do not follow one
    /// another.
    pub(super) fn in_words(&self, dtype: DType) -> Option<Place> {
        let times = i64::try_from(self.meta.dtype.size_bytes() / dtype.size_bytes().max(1)).ok()?;
        let mut place = Place { buffer: self.buffer, meta: Meta { dtype, ..self.meta.clone() } };
        if times != 1 {
            let last = self.meta.rank().checked_sub(1).filter(|&d| self.meta.strides[d] == 1)?;
            place.meta.shape[last] *= times;
            place.meta.strides[..last].iter_mut().for_each(|stride| *stride *= times);
            place.meta.offset *= times;
        }
        Some(place)
    }

    /// Strides as kernels take them; those that lead nowhere are 0.
    pub(in crate::model) fn strides(&self) -> Vec<isize> {
        let stride = |(&n, &stride): (&i64, &i64)| if n == 1 { 0 } else { stride as isize };
        self.meta.shape.iter().zip(&self.meta.strides).map(stride).collect()
    }

    /// The sizes.
    pub(in crate::model) fn shape(&self) -> Vec<usize> {
        self.meta.shape.iter().map(|&n| usize::try_from(n).unwrap_or(0)).collect()
    }

    /// Whether both are the same elements in the same order.
    pub(super) fn is(&self, other: &Place) -> bool {
        self.buffer == other.buffer && self.meta.agrees(&other.meta)
    }
}

/// The places of a binding's values.
pub(super) struct Places<'a> {
    binding: &'a Binding,
    /// Of a value that a storage came with: its buffer, and where an offset of 0 lies in it.
    roots: Vec<Option<(usize, i64)>>,
    pub(super) buffers: Vec<Buffer>,
}

impl<'a> Places<'a> {
    /// The places of the inputs. `written` are those whose storage the program writes.
    pub(super) fn new(inner: &Inner, binding: &'a Binding, written: &[ValueId]) -> Result<Places<'a>, ModelError> {
        let graph = &inner.graph;
        let mut places = Places { binding, roots: vec![None; graph.values.len()], buffers: Vec::new() };
        let storage_of = |place: usize| inner.payload(place);
        let mut states = Vec::new();
        for (place, input) in graph.inputs.iter().enumerate() {
            if input.value.is_some_and(|id| written.contains(&id)) {
                states.extend(storage_of(place)?.map(|payload| payload.storage));
            }
        }
        let mut user = 0;
        let mut storages: Vec<(StorageId, usize)> = Vec::new();
        for (place, input) in graph.inputs.iter().enumerate() {
            let shift = places.stated_offset(input);
            let buffer = match storage_of(place)? {
                Some(payload) => {
                    places.check_state(input, payload)?;
                    let id = payload.storage;
                    let known = storages.iter().find(|(other, _)| *other == id).map(|(_, buffer)| *buffer);
                    let buffer = known.unwrap_or_else(|| {
                        let state = states.contains(&id);
                        let buffer = places.push(if state { Buffer::State(id) } else { Buffer::Archive(id) });
                        storages.push((id, buffer));
                        buffer
                    });
                    let offset = i64::try_from(payload.storage_offset).unwrap_or(i64::MAX);
                    Some((buffer, offset - shift))
                }
                None => {
                    user += 1;
                    let is_tensor = input.value.is_some_and(|id| matches!(binding.fact(id), Fact::Tensor(_)));
                    is_tensor.then(|| (places.push(Buffer::Input(user - 1)), -shift))
                }
            };
            if let (Some(id), Some(root)) = (input.value, buffer) {
                places.roots[id.0 as usize] = Some(root);
            }
            debug_assert!(matches!(input.source, Source::User | Source::Fixed(_)) || buffer.is_some());
        }
        Ok(places)
    }

    /// That the archive has a parameter, buffer or constant as the program states it.
    fn check_state(&self, input: &GraphInput, payload: &Payload) -> Result<(), ModelError> {
        let signed = |n: &usize| i64::try_from(*n).unwrap_or(i64::MAX);
        let offset = signed(&payload.storage_offset);
        let got = Meta {
            dtype: payload.dtype,
            shape: payload.sizes.iter().map(signed).collect(),
            strides: payload.strides.iter().map(signed).collect(),
            offset: self.stated_offset(input),
        };
        match input.value.map(|id| self.binding.fact(id)) {
            Some(Fact::Tensor(expected)) if !got.agrees(expected) || offset < expected.offset => {
                let (name, expected) = (input.name.clone(), expected.to_string());
                Err(ModelError::Graph(rapt_graph::Error::StateForm { name, expected, got: got.to_string() }))
            }
            _ => Ok(()),
        }
    }

    /// The offset that the program states for an input.
    fn stated_offset(&self, input: &GraphInput) -> i64 {
        match input.value.map(|id| self.binding.fact(id)) {
            Some(Fact::Tensor(meta)) => meta.offset,
            _ => 0,
        }
    }

    fn push(&mut self, buffer: Buffer) -> usize {
        self.buffers.push(buffer);
        self.buffers.len() - 1
    }

    /// The buffer of a value, once it has one.
    pub(super) fn buffer(&self, id: ValueId) -> Option<usize> {
        self.roots[self.binding.storage(id)?.0 as usize].map(|(buffer, _)| buffer)
    }

    /// Where a value lies.
    pub(super) fn of(&self, id: ValueId) -> Option<Place> {
        let Fact::Tensor(meta) = self.binding.fact(id) else { return None };
        let (buffer, shift) = self.roots[self.binding.storage(id)?.0 as usize]?;
        let mut meta = meta.clone();
        meta.offset += shift;
        Some(Place { buffer, meta })
    }

    /// Gives a value that has a storage of its own a part of the arena.
    pub(super) fn fresh(&mut self, id: ValueId) -> usize {
        let Fact::Tensor(meta) = self.binding.fact(id) else { return usize::MAX };
        let buffer = self.scratch(meta);
        self.roots[id.0 as usize] = Some((buffer, 0));
        buffer
    }

    /// A part of the arena for a tensor of this form.
    pub(super) fn scratch(&mut self, meta: &Meta) -> usize {
        let elements = meta.extent().and_then(|extent| usize::try_from(extent).ok()).unwrap_or(0);
        self.push(Buffer::Arena { at: 0, len: elements * meta.dtype.size_bytes() })
    }

    /// Gives a value that has a storage of its own a constant.
    pub(super) fn constant(&mut self, id: ValueId, memory: Arc<Workspace>) {
        let buffer = self.push(Buffer::Constant(memory));
        self.roots[id.0 as usize] = Some((buffer, 0));
    }

    /// A buffer of constants.
    pub(super) fn constant_memory(&mut self, memory: Workspace) -> usize {
        self.push(Buffer::Constant(Arc::new(memory)))
    }

    /// Lets a value that would have a storage of its own lie where another one does.
    pub(super) fn alias(&mut self, id: ValueId, of: ValueId) {
        self.roots[id.0 as usize] = self.binding.storage(of).and_then(|root| self.roots[root.0 as usize]);
    }

    /// Whether nothing ever writes to this buffer, and it is known before a run.
    pub(super) fn is_constant(&self, buffer: usize) -> bool {
        matches!(self.buffers[buffer], Buffer::Archive(_) | Buffer::Constant(_))
    }

    /// Whether what is written there outlasts a run, or is the caller's.
    pub(super) fn is_kept(&self, buffer: usize) -> bool {
        matches!(self.buffers[buffer], Buffer::State(_) | Buffer::Input(_))
    }
}
