//! docs/reference/dtypes.md against this interface: every cell of the column C.

use std::ffi::CStr;

use rapt_c::{rapt_dtype_bits, rapt_dtype_name, rapt_error, rapt_last_error};

use crate::support::{Call, MASK, OUT, Owned, Q};

/// Room for every element of the call in the widest dtype.
const ROOM: usize = 64 * 16;

/// What a call with this dtype answers: q, k, v and out of it, or the mask of a float64 call.
fn answers(engine: &Owned, code: i32, bits: usize) -> (rapt_error, rapt_error) {
    const F64: i32 = 8;
    let run = |of_q: i32, of_mask: Option<i32>| {
        // Zeros are a number, and False, in every dtype.
        let mut rooms = [[0u128; ROOM / 16]; 5];
        let mut call = Call::new(engine, 1);
        for (at, room) in (Q..=MASK).zip(&mut rooms) {
            call.tensors[at].data = room.as_mut_ptr().cast();
            call.tensors[at].dtype = of_q;
        }
        call.options.sinks = std::ptr::null();
        call.options.alibi_slopes = std::ptr::null();
        call.options.lse = std::ptr::null();
        match of_mask {
            Some(dtype) => call.tensors[MASK].dtype = dtype,
            None => call.options.mask = std::ptr::null(),
        }
        assert_eq!(OUT, MASK - 1);
        call.run()
    };
    assert!(bits <= 128);
    (run(code, None), run(F64, Some(code)))
}

#[test]
fn every_dtype_is_served_or_refused_as_its_row_says() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/dtypes.md");
    let text = std::fs::read_to_string(path).expect("docs/reference/dtypes.md");
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    };
    let mut lines = text.lines().skip_while(|line| !line.starts_with("| dtype |"));
    let names = cells(lines.next().expect("a table"));
    let column = |name: &str| names.iter().position(|known| known == name).expect("a column");
    let engine = Owned::new(1);
    let mut rows = 0;
    for row in lines.skip(1).take_while(|line| line.starts_with("| `")).map(cells) {
        let code: i32 = row[column("code")].parse().expect("a number");
        let bits = rapt_dtype_bits(code);
        // SAFETY: a string that lives as long as the library, for a code that is known.
        let name = unsafe { CStr::from_ptr(rapt_dtype_name(code)) }.to_str().expect("ASCII");
        assert_eq!((name, bits.to_string()), (row[0].as_str(), row[column("bits")].clone()));
        let (as_q, as_mask) = answers(&engine, code, bits);
        let mut said = Vec::new();
        for (answer, place) in [(as_q, "q"), (as_mask, "mask")] {
            match answer {
                rapt_error::RAPT_OK => said.push(place),
                rapt_error::RAPT_ERROR_UNSUPPORTED_DTYPE => {}
                other => {
                    // SAFETY: the message of this thread.
                    let message = unsafe { CStr::from_ptr(rapt_last_error()) };
                    panic!("{name} as {place}: {other:?}, {message:?}");
                }
            }
        }
        let said = if said.is_empty() { "refused".to_owned() } else { said.join(", ") };
        assert_eq!(said, row[column("C")], "{name}");
        rows += 1;
    }
    assert_eq!(rows, 22);
}
