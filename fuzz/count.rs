//! Counts what a target accepted, and says so when libFuzzer ends.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

static RAN: AtomicU64 = AtomicU64::new(0);
static ACCEPTED: AtomicU64 = AtomicU64::new(0);
static AT_EXIT: Once = Once::new();

extern "C" fn say() {
    let (ran, accepted) = (RAN.load(Ordering::Relaxed), ACCEPTED.load(Ordering::Relaxed));
    eprintln!("rapt: {ran} problems, {accepted} accepted");
}

/// Counts one run.
pub fn count(accepted: bool) {
    AT_EXIT.call_once(|| {
        // SAFETY: a function that touches two statics and stderr.
        unsafe { libc::atexit(say) };
    });
    RAN.fetch_add(1, Ordering::Relaxed);
    ACCEPTED.fetch_add(u64::from(accepted), Ordering::Relaxed);
}
