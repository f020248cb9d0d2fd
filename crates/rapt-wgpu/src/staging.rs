//! Copies between the host and a device, by buffers that both see and that are kept between calls: to make one takes longer than to fill it.
//!
//! ```text
//! bytes ─► chunks, mapped ─► copies, submitted as chunks are full ─► buffers of the device ─► one readable buffer ─► bytes
//! ```
//! Deliberately absent: tensors (host.rs).

use std::sync::MutexGuard;
use std::sync::mpsc::channel;

use crate::chunks::Staging;
use crate::device::Open;
use crate::error::{GpuError, Result};

/// Bytes of a chunk.
const CHUNK: usize = 4 << 20;
/// Chunks that may be on their way: one is filled while others are copied.
const MOST_ON_THEIR_WAY: usize = 4;
/// Bytes of a readable buffer that is kept.
const MOST_KEPT: u64 = 64 << 20;
/// What the places of copies are a multiple of.
const ALIGNMENT: usize = wgpu::COPY_BUFFER_ALIGNMENT as usize;

/// A copy out of a chunk: where to, from which byte, and how many.
struct Piece {
    target: wgpu::Buffer,
    offset: usize,
    from: usize,
    bytes: usize,
}

/// A chunk that is filled.
struct Chunk {
    buffer: wgpu::Buffer,
    view: wgpu::BufferViewMut,
    filled: usize,
    pieces: Vec<Piece>,
}

/// Bytes on their way to buffers of the device. What was not [sent](Upload::finish) does not arrive.
pub(crate) struct Upload<'a> {
    open: &'a Open,
    staging: MutexGuard<'a, Staging>,
    chunk: Option<Chunk>,
}

impl<'a> Upload<'a> {
    pub(crate) fn new(open: &'a Open) -> Self {
        Upload { open, staging: open.staging(), chunk: None }
    }

    /// A mapped chunk.
    fn mapped(&mut self) -> Result<wgpu::Buffer> {
        self.staging.take_returned();
        let Staging { free, on_their_way, .. } = &mut *self.staging;
        if free.is_empty() && on_their_way.len() >= MOST_ON_THEIR_WAY {
            let wait = wgpu::PollType::Wait { submission_index: on_their_way.front().cloned(), timeout: None };
            let answer = self.open.guarded("poll", 0, || self.open.device.poll(wait))?;
            answer.map_err(|error| GpuError::Failed { call: "poll", why: error.to_string() })?;
            self.staging.take_returned();
        }
        match self.staging.free.pop() {
            Some(buffer) => Ok(buffer),
            None => {
                let usage = wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC;
                let descriptor =
                    wgpu::BufferDescriptor { label: Some("rapt"), size: CHUNK as u64, usage, mapped_at_creation: true };
                self.open.guarded("create_buffer", CHUNK, || self.open.device.create_buffer(&descriptor))
            }
        }
    }

    fn chunk(&mut self) -> Result<&mut Chunk> {
        if self.chunk.is_none() {
            let buffer = self.mapped()?;
            let view = buffer
                .get_mapped_range_mut(..)
                .map_err(|error| GpuError::Failed { call: "get_mapped_range_mut", why: error.to_string() })?;
            self.chunk = Some(Chunk { buffer, view, filled: 0, pieces: Vec::new() });
        }
        self.chunk.as_mut().ok_or(GpuError::OutOfMemory { bytes: CHUNK })
    }

    /// Appends `bytes` to what lies in `target` before `offset`, which is a multiple of 4 or follows what was appended last.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`], [`GpuError::Lost`], [`GpuError::Failed`].
    pub(crate) fn append(&mut self, target: &wgpu::Buffer, mut offset: usize, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let Chunk { view, filled, pieces, .. } = self.chunk()?;
            let count = bytes.len().min(CHUNK - *filled);
            let (now, rest) = bytes.split_at(count);
            view.slice(*filled..*filled + count).copy_from_slice(now);
            match pieces.last_mut() {
                Some(last) if last.target == *target && last.offset + last.bytes == offset => last.bytes += count,
                _ => pieces.push(Piece { target: target.clone(), offset, from: *filled, bytes: count }),
            }
            *filled += count;
            (offset, bytes) = (offset + count, rest);
            if *filled == CHUNK {
                self.send()?;
            }
        }
        Ok(())
    }

    /// Fills `target` up with 0, of which `offset` bytes were appended.
    ///
    /// # Errors
    /// As [`append`](Upload::append).
    pub(crate) fn end(&mut self, target: &wgpu::Buffer, offset: usize) -> Result<()> {
        self.append(target, offset, &[0; ALIGNMENT][..offset.next_multiple_of(ALIGNMENT) - offset])
    }

    /// Submits the copies of what was appended.
    fn send(&mut self) -> Result<()> {
        let Some(Chunk { buffer, view, pieces, .. }) = self.chunk.take() else { return Ok(()) };
        drop(view);
        let device = &self.open.device;
        let submission = self.open.guarded("copy_buffer_to_buffer", CHUNK, || {
            buffer.unmap();
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("rapt") });
            for Piece { target, offset, from, bytes } in &pieces {
                encoder.copy_buffer_to_buffer(&buffer, *from as u64, target, *offset as u64, *bytes as u64);
            }
            let submission = self.open.queue.submit([encoder.finish()]);
            let (mapped, sender) = (buffer.clone(), self.staging.returned.0.clone());
            buffer.slice(..).map_async(wgpu::MapMode::Write, move |answer| {
                if answer.is_ok() {
                    drop(sender.send(mapped));
                }
            });
            submission
        })?;
        self.staging.on_their_way.push_back(submission);
        Ok(())
    }

    /// Submits what was not yet.
    ///
    /// # Errors
    /// As [`append`](Upload::append).
    pub(crate) fn finish(mut self) -> Result<()> {
        self.send()
    }
}

/// Hands the first bytes of each of these buffers to `read`, when all that was submitted before has ended.
///
/// # Errors
/// [`GpuError::OutOfMemory`], [`GpuError::Lost`], [`GpuError::Failed`]. Nothing is handed over then.
pub(crate) fn download<T>(
    open: &Open,
    buffers: &[(&wgpu::Buffer, usize)],
    read: impl FnOnce(&[&[u8]]) -> T,
) -> Result<T> {
    let mut staging = open.staging();
    let sizes = || buffers.iter().map(|(_, bytes)| bytes.next_multiple_of(ALIGNMENT));
    let whole: usize = sizes().sum();
    let kept = staging.readable.take().filter(|buffer| buffer.size() >= whole as u64);
    let readable = match kept {
        Some(buffer) => buffer,
        None => open.buffer(whole, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST)?,
    };
    open.guarded("copy_buffer_to_buffer", whole, || {
        let mut encoder = open.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("rapt") });
        let mut at = 0;
        for ((buffer, _), size) in buffers.iter().zip(sizes()) {
            encoder.copy_buffer_to_buffer(buffer, 0, &readable, at, size as u64);
            at += size as u64;
        }
        open.queue.submit([encoder.finish()]);
    })?;
    let failed = |why: String| open.lost().unwrap_or(GpuError::Failed { call: "map_async", why });
    let (sender, mapped) = channel();
    open.guarded("map_async", whole, || {
        readable.slice(..whole as u64).map_async(wgpu::MapMode::Read, move |answer| drop(sender.send(answer)));
        open.device.poll(wgpu::PollType::wait_indefinitely())
    })?
    .map_err(|error| failed(error.to_string()))?;
    match mapped.recv() {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return Err(failed(error.to_string())),
        Err(error) => return Err(failed(error.to_string())),
    }
    let view = readable.slice(..whole as u64).get_mapped_range().map_err(|error| failed(error.to_string()))?;
    let mut rest = &view[..];
    let mut parts = Vec::with_capacity(buffers.len());
    for ((_, bytes), size) in buffers.iter().zip(sizes()) {
        let (part, behind) = rest.split_at(size);
        parts.push(&part[..*bytes]);
        rest = behind;
    }
    let answer = read(&parts);
    drop(view);
    readable.unmap();
    staging.readable = Some(readable).filter(|buffer| buffer.size() <= MOST_KEPT);
    Ok(answer)
}
