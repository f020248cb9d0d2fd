//! One run of a plan: every buffer gets its address, the steps run in order, and what was written is put back where one fails.

mod parts;
mod strided;
mod team;
mod windows;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rapt_core::{Device, Error, Extent, Operands, Queue, Shape, Strides, Tensors, View, ViewMut};
use rapt_cpu::gemm::{Epilogue, Output, PackedView, Rows, SUM_ROW_STRIDE, Strided as Matrix};
use rapt_cpu::pointwise::Loop;
use rapt_cpu::rows::{RowKernel, RowOperands};
use rapt_graph::{OpError, Precision};

use super::host::Host;
use super::memory::{self, Strided};
use super::plan::{Batch, Head, Kernel, Move, Place, Plan, Step, Weights};
use super::{Inner, ModelError};

/// The addresses of one run.
pub(super) struct Frame<'a> {
    pub(super) inner: &'a Inner,
    pub(super) plan: &'a Plan,
    /// Whose threads share the work.
    pub(super) host: Host<'a>,
    /// Of each buffer.
    pub(super) bases: Vec<*mut u8>,
    /// Scratch memory: the plan's bytes for each of its threads.
    pub(super) scratch: *mut u8,
}

/// What memory held before it was written, its elements in row-major order.
enum Kept<'a> {
    /// All of a place.
    Place { place: &'a Place, bytes: Vec<u8> },
    /// The slices that a write by index reaches, one after another, and where each begins, in elements.
    Slices { moved: &'a Move, offsets: Vec<isize>, bytes: Vec<u8> },
}

// SAFETY: threads of one run share the addresses; each step says which of them write where.
unsafe impl Sync for Frame<'_> {}

/// An address that threads share.
#[derive(Clone, Copy)]
struct Shared(*mut u8);

// SAFETY: whoever writes through it writes where no other thread does.
unsafe impl Sync for Shared {}

impl Frame<'_> {
    /// Runs all steps. Where one fails, what outlasts the run is as it was.
    ///
    /// # Safety
    /// Every buffer has its address, and memory for all places of the plan that lie in it, which nobody else uses meanwhile.
    pub(super) unsafe fn run(&self) -> Result<(), ModelError> {
        let size = if self.plan.is_shared { self.plan.threads } else { 1 };
        team::together(self.host.executor, size, |team| {
            let host = Host { executor: team, ..self.host };
            let frame = Frame { host, bases: self.bases.clone(), ..*self };
            // SAFETY: promised by the caller.
            unsafe { frame.steps() }
        })?
    }

    /// # Safety
    /// As [`Frame::run`].
    unsafe fn steps(&self) -> Result<(), ModelError> {
        let last = self.plan.steps.iter().rposition(|step| step.may_fail);
        let mut kept = Vec::new();
        for (n, step) in self.plan.steps.iter().enumerate() {
            if last.is_some_and(|last| n <= last) {
                // SAFETY: promised by the caller.
                kept.extend(step.keeps.iter().map(|place| unsafe { self.keep(place) }));
                if let Kernel::Move(moved) = &step.kernel {
                    // SAFETY: promised by the caller.
                    kept.extend(unsafe { self.keep_slices(moved) });
                }
            }
            // SAFETY: promised by the caller.
            if let Err(error) = unsafe { self.step(step) } {
                for kept in kept.iter().rev() {
                    // SAFETY: as when it was kept.
                    unsafe { self.put_back(kept) };
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// The address of a place's first element.
    pub(super) fn at(&self, place: &Place) -> *mut u8 {
        self.bases[place.buffer].wrapping_offset(place.offset_bytes())
    }

    unsafe fn keep<'p>(&self, place: &'p Place) -> Kept<'p> {
        let shape = place.shape();
        let mut bytes = vec![0u8; shape.iter().product::<usize>() * place.size()];
        let from = Strided { ptr: self.at(place), strides: &memory::strides(place) };
        let to = Strided { ptr: bytes.as_mut_ptr(), strides: &memory::row_major(&shape) };
        // SAFETY: the place is readable, and `bytes` has room for it.
        unsafe { memory::copy(&shape, place.size(), from, to) };
        Kept::Place { place, bytes }
    }

    /// The slices that a write by index is about to overwrite; nothing where an index is out of range, which it refuses itself.
    unsafe fn keep_slices<'p>(&self, moved: &'p Move) -> Option<Kept<'p>> {
        if !moved.keeps {
            return None;
        }
        // SAFETY: promised by the caller of `run`.
        let offsets = unsafe { self.slices(moved) }.ok()?;
        let (shape, strides) = moved.slice();
        let size = moved.whole.size();
        let (row, length) = (memory::row_major(&shape), shape.iter().product::<usize>() * size);
        let mut bytes = vec![0u8; offsets.len() * length];
        for (offset, bytes) in offsets.iter().zip(bytes.chunks_exact_mut(length.max(1))) {
            let ptr = self.at(&moved.whole).wrapping_offset(offset * size.cast_signed());
            let from = Strided { ptr, strides: &strides };
            // SAFETY: the slice is readable, and `bytes` has room for it.
            unsafe { memory::copy(&shape, size, from, Strided { ptr: bytes.as_mut_ptr(), strides: &row }) };
        }
        Some(Kept::Slices { moved, offsets, bytes })
    }

    unsafe fn put_back(&self, kept: &Kept<'_>) {
        match kept {
            Kept::Place { place, bytes } => {
                let shape = place.shape();
                let from = Strided { ptr: bytes.as_ptr().cast_mut(), strides: &memory::row_major(&shape) };
                let to = Strided { ptr: self.at(place), strides: &memory::strides(place) };
                // SAFETY: as in `keep`.
                unsafe { memory::copy(&shape, place.size(), from, to) };
            }
            Kept::Slices { moved, offsets, bytes } => {
                let (shape, strides) = moved.slice();
                let size = moved.whole.size();
                let (row, length) = (memory::row_major(&shape), shape.iter().product::<usize>() * size);
                for (offset, bytes) in offsets.iter().zip(bytes.chunks_exact(length.max(1))) {
                    let ptr = self.at(&moved.whole).wrapping_offset(offset * size.cast_signed());
                    let from = Strided { ptr: bytes.as_ptr().cast_mut(), strides: &row };
                    // SAFETY: as in `keep_slices`.
                    unsafe { memory::copy(&shape, size, from, Strided { ptr, strides: &strides }) };
                }
            }
        }
    }

    fn failed(&self, step: &Step, cause: OpError) -> ModelError {
        let node = &self.inner.graph.nodes[step.node];
        ModelError::Values { node: node.name.clone(), target: node.target.clone(), cause }
    }

    unsafe fn step(&self, step: &Step) -> Result<(), ModelError> {
        // SAFETY: promised by the caller of `run`.
        unsafe {
            match &step.kernel {
                Kernel::Chain { each, operands } => {
                    self.chain(each, operands)?.map_err(|cause| self.failed(step, cause))
                }
                Kernel::Product { head, out, after } => self.product(head, out.as_ref(), after.as_ref()),
                Kernel::Batch(batch) => self.batch(batch),
                Kernel::Attention { plan, places } => self.attention(plan, places),
                Kernel::Rows { rows, places } => self.rows(rows, places),
                Kernel::Conv(conv) => self.conv(conv),
                Kernel::Experts(experts) => self.experts(experts)?.map_err(|cause| self.failed(step, cause)),
                Kernel::Strided { kernel, operands } => {
                    self.strided(&**kernel, operands)?.map_err(|cause| self.failed(step, cause))
                }
                Kernel::Move(moved) => self.moved(moved).map_err(|cause| self.failed(step, cause)),
                Kernel::Node { reads, writes } => {
                    let reads = reads.iter().map(|(id, place)| (*id, memory::tensor(self.bases[place.buffer], place)));
                    let op = &self.inner.graph.nodes[step.node].op;
                    let results = self.plan.binding.evaluate(step.node, op, reads, Precision::Rounded);
                    let results = results.map_err(|cause| self.failed(step, cause))?;
                    for (tensor, place) in results.iter().zip(writes) {
                        if let (Some(tensor), Some(place)) = (tensor, place) {
                            memory::put(tensor, self.bases[place.buffer], place);
                        }
                    }
                    Ok(())
                }
            }
        }
    }

    /// Runs the items of a step, each with scratch memory of its own, on as many threads as are worth it.
    fn items(&self, items: usize, run: &(dyn Fn(usize, *mut u8) + Sync)) -> Result<(), ModelError> {
        let threads = self.plan.threads.min(items);
        if threads <= 1 {
            for item in 0..items {
                run(item, self.scratch);
            }
            return Ok(());
        }
        let (next, taken, scratch) = (AtomicUsize::new(0), AtomicUsize::new(0), Shared(self.scratch));
        let work = |_chunk: usize| {
            let scratch = &scratch;
            // An executor's own numbering is not relied on: a slot belongs to whoever takes it first.
            let slot = taken.fetch_add(1, Ordering::Relaxed);
            if slot >= threads {
                return;
            }
            let own = scratch.0.wrapping_add(slot * self.plan.scratch_bytes);
            loop {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= items {
                    return;
                }
                run(item, own);
            }
        };
        self.host.executor.parallel_for(threads, &work)?;
        // An executor that ran nothing and says that it is done: a result with gaps is no answer.
        let done = next.load(Ordering::Relaxed);
        if done < items { Err(Error::WorkLeftUndone { done, items }.into()) } else { Ok(()) }
    }

    unsafe fn chain(&self, each: &Loop, operands: &[Place]) -> Result<Result<(), OpError>, ModelError> {
        let mut few = [std::ptr::null_mut(); 16];
        let mut many = Vec::new();
        let pointers = if operands.len() <= few.len() {
            for (pointer, place) in few.iter_mut().zip(operands) {
                *pointer = self.at(place);
            }
            &few[..operands.len()]
        } else {
            many.extend(operands.iter().map(|place| self.at(place)));
            &many[..]
        };
        let items = each.items(self.plan.threads);
        if items <= 1 {
            // SAFETY: promised by the caller of `run`: the pointers are those of the loop's operands.
            let done = if items == 0 { Ok(()) } else { unsafe { each.run_item(0, 1, pointers, self.scratch) } };
            return Ok(done.map_err(|_| OpError::ZeroDivision));
        }
        let (pointers, failed) = (SharedPointers(pointers), AtomicBool::new(false));
        let run = |item: usize, scratch: *mut u8| {
            let pointers = &pointers;
            // SAFETY: as above; items write apart.
            if unsafe { each.run_item(item, items, pointers.0, scratch) }.is_err() {
                failed.store(true, Ordering::Relaxed);
            }
        };
        self.items(items, &run)?;
        Ok(if failed.into_inner() { Err(OpError::ZeroDivision) } else { Ok(()) })
    }

    unsafe fn product(
        &self,
        head: &Head,
        out: Option<&Place>,
        after: Option<&(Box<Loop>, Vec<Place>)>,
    ) -> Result<(), ModelError> {
        let x = Rows { ptr: self.at(&head.x), row_stride: head.x.meta.strides[0] as isize };
        if let Weights::InCache(parts) = &head.weights {
            // SAFETY: promised by the caller of `run`.
            return unsafe { self.product_in_parts(head, parts, out, after) };
        }
        // SAFETY: promised by the caller of `run`.
        let weights = unsafe { self.packed(&head.weights)? };
        let gemm = &head.gemm;
        let (items, x) = (gemm.items(), SharedRows(x));
        match (out, after) {
            (Some(out), _) => {
                let rows = Shared(self.at(out));
                let row_stride = out.meta.strides[0] as isize;
                self.items(items, &|item, scratch| {
                    let (x, rows) = (&x, &rows);
                    let out = Output::Rows { ptr: rows.0, row_stride };
                    // SAFETY: promised by the caller of `run`.
                    unsafe { gemm.run_item(item, x.0, weights, out, scratch) };
                })
            }
            (None, Some((each, operands))) => {
                let own = head.scratch_bytes();
                self.items(items, &|item, scratch| {
                    let x = &x;
                    let after = After { frame: self, each, operands, scratch: scratch.wrapping_add(own), column: 0 };
                    // SAFETY: as above; the loop's scratch memory follows the product's.
                    unsafe { gemm.run_item(item, x.0, weights, Output::Epilogue(&after), scratch) };
                })
            }
            (None, None) => Ok(()),
        }
    }

    /// A right operand, packed: what is not, is packed now, to stay until the next one that goes to the same place.
    ///
    /// # Safety
    /// As [`Frame::run`].
    unsafe fn packed<'w>(&self, weights: &'w Weights) -> Result<PackedView<'w>, ModelError> {
        let (from, layout, to) = match weights {
            Weights::Packed(packed) => return Ok(packed.view()),
            Weights::EachRun { from, layout, to } => (from, layout, Shared(self.bases[*to])),
            Weights::InCache(_) => {
                return Err(ModelError::Plan { why: "columns are packed where they are used".into() });
            }
        };
        let matrix = self.matrix(from, 0);
        self.items(layout.panels(), &|item, _| {
            let to = &to;
            // SAFETY: promised by the caller: the matrix is there, and so is the memory for its panels.
            unsafe { layout.pack_panels(item..item + 1, matrix.get(), to.0) };
        })?;
        // SAFETY: all panels were packed.
        Ok(unsafe { layout.view(to.0) })
    }

    /// A matrix `[k, n]` of a batch, to be packed.
    fn matrix(&self, place: &Place, batch: isize) -> SharedMatrix {
        let [k_stride, n_stride] = place.meta.strides[place.meta.rank() - 2..] else { unreachable!("two dimensions") };
        let ptr = self.at(place).wrapping_offset(batch * place.size().cast_signed());
        SharedMatrix(Matrix { ptr, k_stride: k_stride as isize, n_stride: n_stride as isize })
    }

    unsafe fn batch(&self, batch: &Batch) -> Result<(), ModelError> {
        let [x, w, out] = &batch.places;
        let (bytes, packed) = (batch.layout.len_bytes(), Shared(self.bases[batch.packed]));
        let count = x.shape()[0];
        let at = |place: &Place, n: usize| {
            let step = place.meta.strides[0] as isize * n.cast_signed() * place.size().cast_signed();
            self.at(place).wrapping_offset(step)
        };
        let panels = batch.layout.panels();
        self.items(count * panels, &|item, _| {
            let (packed, n, panel) = (&packed, item / panels, item % panels);
            let matrix = self.matrix(w, w.meta.strides[0] as isize * n.cast_signed());
            // SAFETY: promised by the caller of `run`: the matrix is there, and so is the memory for its panels.
            unsafe { batch.layout.pack_panels(panel..panel + 1, matrix.get(), packed.0.wrapping_add(n * bytes)) };
        })?;
        let each = batch.gemm.items();
        self.items(count * each, &|item, scratch| {
            let (packed, n) = (&packed, item / each);
            let rows = Rows { ptr: at(x, n), row_stride: x.meta.strides[1] as isize };
            let out = Output::Rows { ptr: at(out, n), row_stride: out.meta.strides[1] as isize };
            // SAFETY: as above; the panels were packed before.
            unsafe {
                let weights: PackedView<'_> = batch.layout.view(packed.0.wrapping_add(n * bytes));
                batch.gemm.run_item(item % each, rows, weights, out, scratch);
            }
        })
    }

    unsafe fn attention(&self, plan: &rapt_core::Plan, places: &[Option<Place>; 6]) -> Result<(), ModelError> {
        let [Some(query), Some(key), Some(value), mask, Some(out), lse] = places else { return Ok(()) };
        // SAFETY: promised by the caller of `run`: every element of a place is there, and results overlap nothing.
        let tensors = unsafe {
            Tensors {
                mask: mask.as_ref().map(|place| self.view("mask", place)).transpose()?,
                lse: lse.as_ref().map(|place| self.view_mut("lse", place)).transpose()?,
                ..Tensors::new(
                    self.view("q", query)?,
                    self.view("k", key)?,
                    self.view("v", value)?,
                    self.view_mut("out", out)?,
                )
            }
        };
        let mut operands = Operands::check(tensors, plan.spec())?;
        self.host.engine.run_on(plan, &mut operands, &Queue::Host(self.host.executor))?;
        Ok(())
    }

    unsafe fn view(&self, name: &'static str, place: &Place) -> Result<View<'_>, ModelError> {
        let (shape, strides) = dims(place)?;
        // SAFETY: promised by the caller.
        let view = unsafe {
            View::from_raw_parts(name, self.at(place), place.meta.dtype, shape, strides, Device::Cpu, Extent::Declared)
        };
        Ok(view?)
    }

    unsafe fn view_mut(&self, name: &'static str, place: &Place) -> Result<ViewMut<'_>, ModelError> {
        let (shape, strides) = dims(place)?;
        let ptr = self.at(place);
        // SAFETY: promised by the caller.
        let view = unsafe {
            ViewMut::from_raw_parts(name, ptr, place.meta.dtype, shape, strides, Device::Cpu, Extent::Declared)
        };
        Ok(view?)
    }

    unsafe fn rows(&self, kernel: &RowKernel, places: &[Option<Place>; 4]) -> Result<(), ModelError> {
        let [Some(x), weight, bias, Some(out)] = places else { return Ok(()) };
        let at = |place: &Option<Place>| place.as_ref().map_or(std::ptr::null_mut(), |place| self.at(place));
        let operands = RowOperands {
            rows: x.shape()[0],
            x: self.at(x),
            x_stride: x.meta.strides[0] as isize,
            out_stride: out.meta.strides[0] as isize,
            weight: at(weight),
            bias: at(bias),
            ..RowOperands::new(self.at(out))
        };
        let (items, operands) = (kernel.items(operands.rows, self.plan.threads), SharedOperands(operands));
        self.items(items, &|item, scratch| {
            let operands = &operands;
            // SAFETY: promised by the caller of `run`.
            unsafe { kernel.run_item(item, items, &operands.0, scratch) };
        })
    }

    /// Slices by index. Every index is checked before anything is written.
    /// Where each slice of a move begins in the whole, in elements, in row-major order of the indices. Nothing is written.
    unsafe fn slices(&self, moved: &Move) -> Result<Vec<isize>, OpError> {
        let Move { whole, part, indices, from_end, rank, .. } = moved;
        let count: usize = part.shape()[..*rank].iter().product();
        let mut offsets = vec![0isize; count];
        for (dim, index) in indices {
            let size = whole.meta.shape[*dim];
            // SAFETY: promised by the caller of `run`.
            let numbers = unsafe { memory::tensor(self.bases[index.buffer], index) }.ints();
            for (offset, &number) in offsets.iter_mut().zip(&numbers) {
                let from_start = if number < 0 && *from_end { number.saturating_add(size) } else { number };
                if from_start < 0 || from_start >= size {
                    return Err(OpError::IndexOutOfRange { index: number, dim: *dim, size });
                }
                *offset += from_start as isize * whole.meta.strides[*dim] as isize;
            }
        }
        Ok(offsets)
    }

    unsafe fn moved(&self, moved: &Move) -> Result<(), OpError> {
        // SAFETY: promised by the caller of `run`.
        let offsets = unsafe { self.slices(moved)? };
        let Move { writes, whole, part, rank, copied, .. } = moved;
        if let Some(copied) = copied {
            let (from, to) = (memory::strides(copied), memory::strides(whole));
            let from = Strided { ptr: self.at(copied), strides: &from };
            // SAFETY: promised by the caller of `run`.
            unsafe { memory::copy(&whole.shape(), whole.size(), from, Strided { ptr: self.at(whole), strides: &to }) };
        }
        let size = whole.size();
        let (slice, of_whole) = moved.slice();
        let shape = part.shape();
        let own = memory::strides(part);
        let (steps, own) = own.split_at(*rank);
        for (n, offset) in offsets.iter().enumerate() {
            let (mut left, mut place) = (n, 0isize);
            for (&len, &step) in shape[..*rank].iter().zip(steps).rev() {
                place += (left % len).cast_signed() * step;
                left /= len;
            }
            let of_part = Strided { ptr: self.at(part).wrapping_offset(place * size.cast_signed()), strides: own };
            let ptr = self.at(whole).wrapping_offset(offset * size.cast_signed());
            let of_whole = Strided { ptr, strides: &of_whole };
            let (from, to) = if *writes { (of_part, of_whole) } else { (of_whole, of_part) };
            // SAFETY: the index is one of the dimension's; the rest is promised by the caller of `run`.
            unsafe { memory::copy(&slice, size, from, to) };
        }
        Ok(())
    }
}

fn dims(place: &Place) -> Result<(Shape, Strides), ModelError> {
    let many = || ModelError::Plan { why: format!("a tensor of {} dimensions", place.meta.rank()) };
    let shape = Shape::new(&place.shape()).ok_or_else(many)?;
    let strides = Strides::new(&memory::strides(place)).ok_or_else(many)?;
    Ok((shape, strides))
}

/// What follows a product, run on each tile of its sums.
struct After<'a> {
    frame: &'a Frame<'a>,
    each: &'a Loop,
    operands: &'a [Place],
    scratch: *mut u8,
    /// The first column of the part that is multiplied.
    column: usize,
}

// SAFETY: used by the thread that made it alone.
unsafe impl Sync for After<'_> {}

impl Epilogue for After<'_> {
    unsafe fn tile(
        &self,
        rows: std::ops::Range<usize>,
        columns: std::ops::Range<usize>,
        sums: *mut u8,
        row_stride: usize,
    ) {
        debug_assert_eq!(row_stride, SUM_ROW_STRIDE);
        let mut few = [std::ptr::null_mut(); 16];
        few[0] = sums;
        let at = |place: &Place| {
            let [row, column] = place.meta.strides[..] else { return std::ptr::null_mut() };
            let first = (self.column + columns.start).cast_signed();
            let steps = rows.start.cast_signed() * row as isize + first * column as isize;
            self.frame.at(place).wrapping_offset(steps * place.size().cast_signed())
        };
        let (rows, columns) = (rows.len(), columns.len());
        let mut many = Vec::new();
        let pointers = if self.operands.len() < few.len() {
            for (pointer, place) in few[1..].iter_mut().zip(self.operands) {
                *pointer = at(place);
            }
            &few[..=self.operands.len()]
        } else {
            many.push(sums);
            many.extend(self.operands.iter().map(at));
            &many[..]
        };
        // Groups with integer divisions are not fused with products: nothing fails.
        // SAFETY: promised by the caller: the tile is this thread's, and so are the results' parts.
        let _ = unsafe { self.each.run_rectangle(rows, columns, pointers, self.scratch) };
    }
}

macro_rules! shared {
    ($($name:ident($ty:ty);)*) => {$(
        /// Addresses that threads share.
        #[derive(Clone, Copy)]
        struct $name($ty);
        // SAFETY: threads read through it, or write where no other does.
        unsafe impl Sync for $name {}
    )*};
}

shared! {
    SharedRows(Rows);
    SharedMatrix(Matrix);
    SharedOperands(RowOperands);
}

impl SharedMatrix {
    fn get(&self) -> Matrix {
        self.0
    }
}

/// The operands of a loop.
struct SharedPointers<'a>(&'a [*mut u8]);

// SAFETY: as above.
unsafe impl Sync for SharedPointers<'_> {}
