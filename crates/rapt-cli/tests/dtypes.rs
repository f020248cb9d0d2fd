//! docs/reference/dtypes.md against the interfaces in Rust: every cell of the columns Rust and CLI.
#![allow(missing_docs)]

use std::collections::BTreeMap;
use std::process::Command;

use rapt::{DType, Device, Error, Extent, Options, Spec, View};

/// The rows of the table by dtype: cells by column.
fn table() -> BTreeMap<String, BTreeMap<String, String>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/dtypes.md");
    let text = std::fs::read_to_string(path).expect("docs/reference/dtypes.md");
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    };
    let mut lines = text.lines().skip_while(|line| !line.starts_with("| dtype |"));
    let names = cells(lines.next().expect("a table"));
    let rows = lines.skip(1).take_while(|line| line.starts_with("| `"));
    rows.map(cells).map(|row| (row[0].clone(), names.iter().cloned().zip(row).collect())).collect()
}

/// As q, k and v; and as a mask of float64 tensors.
fn rust(dtype: DType) -> String {
    let view = |dtype| {
        let (shape, strides) = ([1usize, 1, 4, 4], [16isize, 16, 4, 1]);
        // SAFETY: never read: specs look at dtype, shape and strides.
        unsafe {
            View::from_raw_parts(
                "q",
                std::ptr::without_provenance(64),
                dtype,
                shape.into(),
                strides.into(),
                Device::Cpu,
                Extent::Declared,
            )
        }
        .expect("a view of any dtype")
    };
    let mut served = Vec::new();
    for place in ["q", "mask"] {
        let q = view(if place == "q" { dtype } else { DType::F64 });
        let mask = (place == "mask").then(|| view(dtype));
        match Spec::builder(&q, &q, &q, &Options::default()).mask(mask.as_ref()).build() {
            Ok(spec) => {
                assert_eq!(spec.q.dtype, q.dtype(), "nothing is taken for another dtype");
                served.push(place);
            }
            // Codes are named too: they are served with their scales, of which the table does not speak.
            Err(error @ (Error::UnsupportedDtype { .. } | Error::MissingPart { .. })) => {
                assert!(error.to_string().contains(dtype.name()), "{error}");
            }
            Err(error) => panic!("{dtype}: {error}"),
        }
    }
    if served.is_empty() { "refused".into() } else { served.join(", ") }
}

#[test]
fn the_tables_rust_and_cli_columns_are_what_they_do() {
    let table = table();
    assert_eq!(table.len(), DType::ALL.len());
    for dtype in DType::ALL {
        let row = &table[dtype.name()];
        assert_eq!(row["schema"], dtype.schema_name());
        assert_eq!(row["code"], dtype.code().to_string());
        assert_eq!(row["bits"], dtype.bits().to_string());
        assert_eq!(row["Rust"], rust(*dtype), "{dtype}");
        let shape = ["explain", "--shape", "1,1,4,4,4", "--json", "--dtype", dtype.name()];
        let output = Command::new(env!("CARGO_BIN_EXE_rapt")).args(shape).output().expect("the binary starts");
        assert_eq!(output.status.success(), row["CLI"].contains('q'), "{dtype}");
        let text = String::from_utf8([output.stdout, output.stderr].concat()).expect("text");
        assert!(text.contains(dtype.name()), "{dtype} is named: {text}");
    }
}
