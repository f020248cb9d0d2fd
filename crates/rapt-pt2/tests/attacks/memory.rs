//! Reading takes memory in proportion to the archive, whatever it holds.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use rapt_pt2::Archive;

use crate::builder::{Builder, PROGRAM, WEIGHTS};

/// The system's allocator, counting what each thread holds.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // A thread that is ending has no counters.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call goes to the system's allocator with the arguments it came with.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's duties are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's duties are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The greatest memory held while reading `bytes`, which exist before.
fn peak_bytes(bytes: Vec<u8>) -> (usize, String) {
    let bytes: std::sync::Arc<[u8]> = bytes.into();
    let before = HELD.get();
    PEAK.set(before);
    let said = Archive::from_bytes(bytes).map_or_else(|error| error.to_string(), |_| "read".to_owned());
    ((PEAK.get() - before) as usize, said)
}

/// A list of `part`, `count` times.
fn list(part: &str, count: usize) -> String {
    format!("[{}]", vec![part; count].join(", "))
}

#[test]
fn memory_is_at_most_the_stated_multiple_of_the_archive() {
    let argument = r#""arg": {"as_tensor": {"name": "w"}}"#;
    let sizes = r#""w": {"dtype": 7, "sizes": [{"as_int": 2}]"#;
    let nodes = r#""nodes": ["#;
    let expr = r#""expr_str": "Symbol('s0')", "hint": {"as_int": 4}"#;
    let count = 100_000;
    let programs = [
        PROGRAM.replacen(argument, &format!(r#""arg": {{"as_ints": {}}}"#, list("1", count)), 1),
        PROGRAM.replacen(argument, &format!(r#""arg": {{"as_bools": {}}}"#, list("true", count)), 1),
        PROGRAM.replacen(argument, &format!(r#""arg": {{"as_strings": {}}}"#, list(r#""""#, count)), 1),
        PROGRAM.replacen(argument, &format!(r#""arg": {{"as_sym_ints": {}}}"#, list(r#"{"as_int":1}"#, count)), 1),
        PROGRAM.replacen(
            argument,
            &format!(r#""arg": {{"as_optional_tensors": {}}}"#, list(r#"{"as_none":0}"#, count)),
            1,
        ),
        PROGRAM.replacen(sizes, &format!(r#""w": {{"dtype": 7, "sizes": {}"#, list(r#"{"as_int":1}"#, count)), 1),
        PROGRAM.replacen(
            nodes,
            &format!(r#""nodes": [{}, "#, vec![r#"{"target":"","inputs":[],"outputs":[]}"#; count].join(",")),
            1,
        ),
        PROGRAM.replacen(expr, &format!(r#""expr_str": "s0{}", "hint": null"#, "+s0".repeat(20_000)), 1),
        PROGRAM.replacen(expr, &format!(r#""expr_str": "Max(1{})", "hint": null"#, ",1".repeat(20_000)), 1),
        PROGRAM.replacen(
            r#""guards_code": ["#,
            &format!(r#""guards_code": [{}, "#, vec![r#""L['x'].ndim==2""#; count].join(",")),
            1,
        ),
        PROGRAM.replacen(r#""metadata": {}"#, &format!(r#""metadata": {}"#, list("[]", count)), 1),
        PROGRAM.to_owned() + &" ".repeat(100_000),
    ];
    for (i, program) in programs.into_iter().enumerate() {
        assert!(program.len() > PROGRAM.len() + 10_000, "program {i} is not the one meant");
        let archive = Builder::of(&program, WEIGHTS).build();
        let length = archive.len();
        let (peak, said) = peak_bytes(archive);
        let multiple = peak as f64 / length as f64;
        assert!(multiple <= rapt_pt2::MEMORY_MULTIPLE as f64, "program {i}: {multiple:.1} times ({said})");
    }
}
