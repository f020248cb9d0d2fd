//! Buffers that host and device both see, kept between calls. Deliberately absent: what is copied through them (staging.rs).

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};

/// What is kept between calls.
#[derive(Debug)]
pub(crate) struct Staging {
    /// Mapped chunks.
    pub(crate) free: Vec<wgpu::Buffer>,
    /// Of each chunk on its way the submission that copies it.
    pub(crate) on_their_way: VecDeque<wgpu::SubmissionIndex>,
    /// Chunks that were copied and are mapped again.
    pub(crate) returned: (Sender<wgpu::Buffer>, Receiver<wgpu::Buffer>),
    pub(crate) readable: Option<wgpu::Buffer>,
}

impl Default for Staging {
    fn default() -> Self {
        let (free, on_their_way) = (Vec::new(), VecDeque::new());
        Staging { free, on_their_way, returned: channel(), readable: None }
    }
}

impl Staging {
    /// Takes back the chunks that were copied, in the order in which they were submitted.
    pub(crate) fn take_returned(&mut self) {
        while let Ok(buffer) = self.returned.1.try_recv() {
            self.free.push(buffer);
            self.on_their_way.pop_front();
        }
    }
}
