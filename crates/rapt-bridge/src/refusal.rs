//! An error as what crosses, and back. Its texts arrive as they left.

use std::ffi::c_void;

use rapt_core::{Device, Error};

use crate::abi::{Status, Texts, text};

/// Done.
pub(crate) const OK: Status = 0;
const UNSUPPORTED: Status = 1;
const UNAVAILABLE: Status = 2;
const OUT_OF_MEMORY: Status = 3;
const PANICKED: Status = 4;
/// Any other: its text is what is known.
const FAILED: Status = 5;

impl Texts {
    pub(crate) fn say(&self, kind: u32, text: &str) {
        // SAFETY: `take` is the taker's own function for its own context, and the text is alive for the call.
        unsafe { (self.take)(self.context, kind, text.as_ptr(), text.len()) }
    }

    /// Says `error`, whose code it gives.
    pub(crate) fn refuse(&self, error: &Error) -> Status {
        match error {
            Error::Unsupported { what, why, instead } => {
                self.say(text::WHAT, what);
                self.say(text::WHY, why);
                self.say(text::INSTEAD, instead);
                UNSUPPORTED
            }
            Error::DeviceUnavailable { why, .. } => {
                self.say(text::WHY, why);
                UNAVAILABLE
            }
            Error::OutOfMemory { bytes } => {
                self.say(text::WHAT, &bytes.to_string());
                OUT_OF_MEMORY
            }
            Error::WorkerPanicked { message } => {
                self.say(text::WHY, message);
                PANICKED
            }
            Error::DeviceFailed { why, .. } => {
                self.say(text::WHY, why);
                FAILED
            }
            other => {
                self.say(text::WHY, &other.to_string());
                FAILED
            }
        }
    }
}

/// The texts of one call, in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct Said(pub(crate) Vec<(u32, String)>);

unsafe extern "C" fn take(context: *mut c_void, kind: u32, text: *const u8, bytes: usize) {
    let said = context.cast::<Said>();
    // SAFETY: `taker` made the context of a `Said` that outlives the call, and nobody else has it; the text is alive for the call.
    let (said, text) = unsafe { (&mut *said, std::slice::from_raw_parts(text, bytes)) };
    said.0.push((kind, String::from_utf8_lossy(text).into_owned()));
}

impl Said {
    /// What the other library says its texts to, for the length of one call.
    pub(crate) fn taker(&mut self) -> Texts {
        Texts { context: std::ptr::from_mut(self).cast(), take }
    }

    /// The first text of this kind; empty if there is none.
    pub(crate) fn text(&self, kind: u32) -> String {
        self.0.iter().find(|(of, _)| *of == kind).map_or_else(String::new, |(_, text)| text.clone())
    }

    /// What `code` and these texts say.
    pub(crate) fn error(&self, code: Status, device: Device) -> Error {
        let why = self.text(text::WHY);
        match code {
            UNSUPPORTED => Error::unsupported(self.text(text::WHAT), why, self.text(text::INSTEAD)),
            UNAVAILABLE => Error::DeviceUnavailable { device, why },
            OUT_OF_MEMORY => Error::OutOfMemory { bytes: self.text(text::WHAT).parse().unwrap_or(0) },
            PANICKED => Error::WorkerPanicked { message: why },
            _ => Error::DeviceFailed { device, why },
        }
    }
}
