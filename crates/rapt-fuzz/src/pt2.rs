//! Archives of exported programs, and the expressions and guards in them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;

use rapt_pt2::{
    Archive, Call, Guard, InputValue, Key, Kind, Payload, Program, Symbols, Tree, parse_condition, parse_expr,
    parse_real,
};

/// A table without payloads.
const NO_PAYLOADS: &[u8] = br#"{"config": {}}"#;
/// The table of one weight of two floats.
const ONE_WEIGHT: &[u8] = br#"{"config": {"weight": {"path_name": "weight_0", "is_param": true, "use_pickle": false, "tensor_meta": {"dtype": 7, "sizes": [{"as_int": 2}], "requires_grad": true, "device": {"type": "cpu", "index": null}, "strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7}}}}"#;

/// A small program that is read.
const PROGRAM: &str = include_str!("../../rapt-pt2/tests/attacks/program.json");
/// What edits put in the place of a number or text of the program.
const REPLACEMENTS: [&str; 24] = [
    "0",
    "1",
    "2",
    "-1",
    "7",
    "13",
    "9223372036854775807",
    "1e400",
    "0.5",
    "null",
    "true",
    "\"NaN\"",
    "\"x\"",
    "\"w\"",
    "\"y\"",
    "\"weight\"",
    "\"s0\"",
    "\"2*s0 + 1\"",
    "\"Max(1, Symbol('s0'))\"",
    "\"L['x'].size()[0] > 1\"",
    "[]",
    "{}",
    "{\"as_int\": 2}",
    "\"\"",
];

/// An archive. The first byte says what the rest is: 0 the archive itself, 1 its program, 2 its table of constants, 3 edits
/// of a program (a scalar's number and its replacement), each in an archive that is otherwise whole, so that an altered byte
/// reaches the parser and not the checksum before it.
///
/// # Panics
/// If what was accepted holds a tensor outside its storage, or cannot be evaluated without a panic.
pub fn pt2_archive(data: &[u8]) -> bool {
    let (mode, rest) = data.split_first().unwrap_or((&0, &[]));
    let bytes = match mode % 4 {
        0 => rest.to_vec(),
        1 => archive(rest, NO_PAYLOADS),
        2 => archive(MINIMAL, rest),
        _ => archive(edited(PROGRAM, rest).as_bytes(), NO_PAYLOADS),
    };
    match Archive::from_bytes(bytes.into()) {
        Ok(archive) => {
            for payload in archive.weights().values().chain(archive.constants().values()) {
                check_payload(&archive, payload);
            }
            let _ = archive.check_storages();
            check_program(archive.program());
            true
        }
        Err(error) => {
            assert!(error.to_string().len() > 8, "{error:?}");
            false
        }
    }
}

/// A JSON text with some scalars replaced: each three bytes name a scalar and a replacement.
pub(crate) fn edited(text: &str, edits: &[u8]) -> String {
    if edits.len() < 3 {
        return text.to_owned();
    }
    let scalars = scalars(text);
    let mut replaced: BTreeMap<usize, &str> = BTreeMap::new();
    for edit in edits.chunks_exact(3).take(8) {
        let scalar = usize::from(u16::from_le_bytes([edit[0], edit[1]])) % scalars.len().max(1);
        replaced.insert(scalar, REPLACEMENTS[usize::from(edit[2]) % REPLACEMENTS.len()]);
    }
    let (mut written, mut at) = (String::with_capacity(text.len() + 64), 0);
    for (scalar, replacement) in replaced {
        let Some(range) = scalars.get(scalar) else { continue };
        written.push_str(&text[at..range.start]);
        written.push_str(replacement);
        at = range.end;
    }
    written + &text[at..]
}

/// Where the numbers, texts and words of a JSON text stand that are no keys.
fn scalars(json: &str) -> Vec<Range<usize>> {
    let bytes = json.as_bytes();
    let (mut scalars, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let start = at;
        at += 1;
        if bytes[start] == b'"' {
            while bytes[at] != b'"' {
                at += 1 + usize::from(bytes[at] == b'\\');
            }
            at += 1;
        } else if bytes[start].is_ascii_alphanumeric() {
            while bytes[at].is_ascii_alphanumeric() {
                at += 1;
            }
        } else {
            continue;
        }
        if bytes[at] != b':' {
            scalars.push(start..at);
        }
    }
    scalars
}

/// The text of an expression, a condition, a real or a guard. The first byte says what the rest is: 0 the text itself, 1 the
/// choices of a grammar.
///
/// # Panics
/// If an expression's own text does not mean the same.
pub fn pt2_expr(data: &[u8]) -> bool {
    let (mode, rest) = data.split_first().unwrap_or((&0, &[]));
    let text = match mode % 2 {
        0 => String::from_utf8_lossy(rest).into_owned(),
        _ => generated(&mut rest.iter().copied(), 5),
    };
    let symbols: Symbols = [("s0", 7), ("s1", 3), ("u0", -5)].map(|(name, value)| (name.to_owned(), value)).into();
    let expr = parse_expr(&text).ok();
    if let Some(expr) = &expr {
        // Its text can be too long or too deep for the parser, which its form was not.
        if let Ok(again) = parse_expr(&expr.to_string()) {
            assert_eq!(expr.eval(&symbols).ok(), again.eval(&symbols).ok(), "{expr}");
        }
    }
    let condition = parse_condition(&text).map(|condition| drop(condition.eval(&symbols))).is_ok();
    let real = parse_real(&text).map(|real| drop(real.eval(&symbols))).is_ok();
    let guard = Guard::parse(&text, call()).map(|guard| drop(guard.check(&inputs()))).is_ok();
    expr.is_some() || condition || real || guard
}

/// An expression of at most `depth` operations one in another, chosen byte by byte.
fn generated(choices: &mut dyn Iterator<Item = u8>, depth: usize) -> String {
    let choice = choices.next().unwrap_or(0);
    let kind = if depth == 0 { choice % 4 } else { choice % 16 };
    let mut operand = || generated(choices, depth.saturating_sub(1));
    match kind {
        0 => "s0".to_owned(),
        1 => "s1".to_owned(),
        2 => "u0".to_owned(),
        3 => (choice / 16).to_string(),
        4 => format!("({} + {})", operand(), operand()),
        5 => format!("({} - {})", operand(), operand()),
        6 => format!("{}*{}", operand(), operand()),
        7 => format!("({} // {})", operand(), operand()),
        8 => format!("({} % {})", operand(), operand()),
        9 => format!("({})**{}", operand(), choice / 64),
        10 => format!("Max({}, {})", operand(), operand()),
        11 => format!("Min({}, {}, 3)", operand(), operand()),
        12 => format!("Abs({})", operand()),
        13 => format!("-{}", operand()),
        14 => format!("Where(StrictLessThan({}, {}), {}, 1)", operand(), operand(), operand()),
        _ => format!("math.floor({} / 3)", operand()),
    }
}

/// A call with a tensor, an integer and a tensor in a dictionary.
fn call() -> &'static Call {
    static CALL: OnceLock<Call> = OnceLock::new();
    CALL.get_or_init(|| Call {
        positional: vec![(Some("x".to_owned()), Tree::Leaf), (Some("n".to_owned()), Tree::Leaf)],
        keyword: vec![(
            "d".to_owned(),
            Tree::Node(Kind::Dict("dict", vec![Key::Text("a".to_owned())]), vec![Tree::Leaf]),
        )],
        output: Tree::Leaf,
    })
}

fn inputs() -> [InputValue<'static>; 3] {
    let x = InputValue::Tensor { sizes: &[8, 4], strides: &[4, 1], storage_offset: 0 };
    [x, InputValue::Int(3), InputValue::Tensor { sizes: &[2, 6, 1], strides: &[6, 1, 1], storage_offset: 2 }]
}

fn check_payload(archive: &Archive, payload: &Payload) {
    let storage = archive.storage(payload.storage);
    if payload.numel() == 0 {
        return;
    }
    let dims = payload.sizes.iter().zip(&payload.strides);
    let last = payload.storage_offset + dims.map(|(size, stride)| (size - 1) * stride).sum::<usize>();
    let size = payload.dtype.size_bytes();
    assert_eq!(storage[last * size..][..size].len(), size);
}

fn check_program(program: &Program) {
    let symbols: Symbols =
        program.symbols.iter().map(|symbol| (symbol.name.clone(), symbol.hint.unwrap_or(symbol.min))).collect();
    for meta in program.graph.tensors.values() {
        assert_eq!(meta.sizes.len(), meta.strides.len());
        meta.sizes.iter().chain(&meta.strides).for_each(|expr| drop(expr.eval(&symbols)));
    }
    program.graph.sym_ints.values().for_each(|expr| drop(expr.eval(&symbols)));
    let _ = program.check_guards(&inputs());
    if let Some(call) = &program.call {
        (0..call.inputs()).for_each(|number| drop(call.input_path(number)));
    }
}

/// A program without nodes that takes nothing and returns nothing.
const MINIMAL: &[u8] = br#"{"graph_module": {"graph": {"inputs": [], "outputs": [], "nodes": [], "tensor_values": {}, "sym_int_values": {}, "sym_bool_values": {}}, "signature": {"input_specs": [], "output_specs": []}}, "schema_version": {"major": 8, "minor": 20}}"#;

/// An archive of a program with one weight, and a table of constants whose payload is `tensor_0`.
fn archive(program: &[u8], constants: &[u8]) -> Vec<u8> {
    let entries: [(&str, &[u8]); 8] = [
        ("m/data/weights/weight_0", &[0; 8]),
        ("m/data/weights/model_weights_config.json", ONE_WEIGHT),
        ("m/data/constants/tensor_0", &[1; 48]),
        ("m/data/constants/model_constants_config.json", constants),
        ("m/models/model.json", program),
        ("m/archive_format", b"pt2"),
        ("m/archive_version", b"0"),
        ("m/byteorder", b"little"),
    ];
    zip(&entries)
}

/// A zip file of stored entries.
pub(crate) fn zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut archive, mut directory) = (Vec::new(), Vec::new());
    let put = |bytes: &mut Vec<u8>, numbers: &[(usize, usize)]| {
        for (number, width) in numbers {
            bytes.extend_from_slice(&number.to_le_bytes()[..*width]);
        }
    };
    for (name, bytes) in entries {
        let (crc, offset) = (crc32fast::hash(bytes) as usize, archive.len());
        put(&mut archive, &[(0x0403_4b50, 4), (0, 8), (0, 2), (0, 4), (0, 8), (name.len(), 2), (0, 2)]);
        archive.extend_from_slice(name.as_bytes());
        archive.extend_from_slice(bytes);
        put(&mut directory, &[(0x0201_4b50, 4), (0, 8), (0, 4), (crc, 4), (bytes.len(), 4), (bytes.len(), 4)]);
        put(&mut directory, &[(name.len(), 2), (0, 8), (0, 4), (offset, 4)]);
        directory.extend_from_slice(name.as_bytes());
    }
    let (start, count) = (archive.len(), entries.len());
    archive.extend_from_slice(&directory);
    put(&mut archive, &[(0x0605_4b50, 4), (0, 4), (count, 2), (count, 2), (directory.len(), 4), (start, 4), (0, 2)]);
    archive
}
