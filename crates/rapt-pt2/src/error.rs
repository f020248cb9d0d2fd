//! Why an archive is refused: one variant per cause, each with the entry, the place in the JSON, or the name concerned.

use std::path::PathBuf;

use rapt_core::DType;

use crate::{ExprError, ParseError};

/// The command that saves a program anew, for archives whose schema has major version 8: tried with
/// torch 2.15 on archives of 2.7 and 2.8. Those of 2.5 have version 7.3, which torch 2.15 does not load.
pub const SAVE_ANEW: &str =
    "python -c \"import torch; torch.export.save(torch.export.load('old.pt2'), 'new.pt2')\"  # with torch 2.9 or later";

/// What to do about a program that no torch of today loads, because the schema's major version differs.
pub const EXPORT_ANEW: &str =
    "torch.export.save(torch.export.export(model, args), 'new.pt2')  # with torch 2.9 or later, from the model itself";

/// How a program of this major version of the schema is brought to a version that is read.
fn anew(major: u64) -> &'static str {
    if major == 8 { SAVE_ANEW } else { EXPORT_ANEW }
}

/// Why an archive or a program is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be opened or mapped.
    #[error("{}: {cause}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// The bytes are no zip archive, or one that is cut off or altered.
    #[error("not a whole zip archive: {reason}")]
    NotZip {
        /// What does not hold.
        reason: &'static str,
    },
    /// Something of the archive is larger than a reader of hostile input accepts.
    #[error("{what} is {found}; at most {limit} is read")]
    Limit {
        /// What is too large, with its unit.
        what: String,
        /// Its size.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// An entry whose name is not a plain relative path.
    #[error("entry {name:?} has no plain relative path for a name")]
    EntryName {
        /// The name, with bytes that are no UTF-8 replaced.
        name: String,
    },
    /// Two entries of one name.
    #[error("two entries are named {name:?}")]
    DuplicateEntry {
        /// The name.
        name: String,
    },
    /// An entry that is compressed. `torch.export.save` stores.
    #[error(
        "entry {name:?} is compressed (method {method}); archives of torch.export are stored, so that weights can be mapped"
    )]
    Compressed {
        /// The entry.
        name: String,
        /// The method's number in the zip format.
        method: u16,
    },
    /// An entry that is encrypted.
    #[error("entry {name:?} is encrypted")]
    Encrypted {
        /// The entry.
        name: String,
    },
    /// An entry whose header or bytes do not lie in the archive as its directory says.
    #[error("entry {name:?}: {reason}")]
    EntryPlace {
        /// The entry.
        name: String,
        /// What does not hold.
        reason: &'static str,
    },
    /// Two entries that share bytes.
    #[error("entries {first:?} and {second:?} overlap")]
    Overlap {
        /// The one that starts first.
        first: String,
        /// The one that starts within it.
        second: String,
    },
    /// An entry whose checksum is not that of its bytes.
    #[error("entry {name:?} is damaged: its CRC-32 is {found:08x}, the archive says {expected:08x}")]
    Damaged {
        /// The entry.
        name: String,
        /// The CRC-32 of the bytes.
        found: u32,
        /// The CRC-32 that the archive's directory gives.
        expected: u32,
    },
    /// The entries do not lie in one folder.
    #[error("the archive's entries lie in {first:?} and {second:?}; an archive of torch.export has one folder")]
    SecondRoot {
        /// The first entry's folder.
        first: String,
        /// Another entry's.
        second: String,
    },
    /// An entry that every archive has is missing.
    #[error("the archive has no entry {name:?}")]
    MissingEntry {
        /// The name, without the archive's folder.
        name: String,
    },
    /// The bytes of the weights are not little-endian.
    #[error("byteorder is {found:?}; only little is read")]
    ByteOrder {
        /// What the archive says.
        found: String,
    },
    /// `archive_format` is not `pt2`.
    #[error("archive_format is {found:?}, not pt2")]
    ArchiveFormat {
        /// What the archive says.
        found: String,
    },
    /// `archive_version` is not 0.
    #[error("archive_version is {found:?}; only 0 is known")]
    ArchiveVersion {
        /// What the archive says.
        found: String,
    },
    /// The archive holds no exported program.
    #[error("the archive holds no exported program (no entry models/….json)")]
    NoModel,
    /// The archive holds machine code of AOTInductor instead of a program.
    #[error(
        "the archive holds code that AOTInductor compiled, which only libtorch runs; save the exported program itself: torch.export.save(program, 'model.pt2')"
    )]
    AotInductor,
    /// The archive holds several programs and none that was asked for.
    #[error("the archive holds no program {asked:?}; it holds {}", .found.join(", "))]
    ModelName {
        /// The name that was asked for.
        asked: String,
        /// The names of the programs.
        found: Vec<String>,
    },
    /// The archive has the form of torch 2.7 and older, or 2.8: weights are pickled.
    #[error("the archive is of torch {written_by}: its weights are pickled, which is code to run. Save it anew: {anew}", anew = anew(*.major))]
    OldArchive {
        /// The versions of torch that write this form.
        written_by: &'static str,
        /// The schema's major version.
        major: u64,
    },
    /// The schema's version is not served.
    #[error("schema version {}.{} of torch {torch} is not read; 8.14 (torch 2.9) and later 8.x are. Save it anew: {anew}", .found.0, .found.1, anew = anew(.found.0))]
    SchemaVersion {
        /// Major and minor version.
        found: (u64, u64),
        /// The version of torch that wrote it.
        torch: String,
    },
    /// The JSON is not well formed, or not of the schema.
    #[error("{entry}, at {path}: {reason}")]
    Json {
        /// The entry.
        entry: String,
        /// Where, such as `graph_module.graph.nodes[3].inputs[0].arg`.
        path: String,
        /// What the parser met.
        reason: String,
    },
    /// A dtype code that the schema does not name, or the code for an unknown dtype.
    #[error("{name}: dtype code {code} is not known; the known codes are {}", known_codes())]
    DtypeCode {
        /// The value or payload.
        name: String,
        /// The code.
        code: i64,
    },
    /// A memory format or layout code that the schema does not name.
    #[error("{name}: {what} {code} is not known")]
    UnknownCode {
        /// The node.
        name: String,
        /// What the code is of.
        what: &'static str,
        /// The code.
        code: i64,
    },
    /// A tensor that is not strided.
    #[error("{name}: layout {layout} is not served; only strided tensors (7) are")]
    Layout {
        /// The value or payload.
        name: String,
        /// The layout's code in the schema.
        layout: i64,
    },
    /// A tensor whose metadata contradicts itself.
    #[error("{name}: {reason}")]
    TensorMeta {
        /// The value or payload.
        name: String,
        /// What does not hold.
        reason: &'static str,
    },
    /// An expression of shapes that is not understood.
    #[error("{name}: {cause}")]
    Expr {
        /// The value whose shape it is.
        name: String,
        /// What is not understood, with the text.
        cause: ParseError,
    },
    /// A guard that is not understood.
    #[error("guard {text:?} is not understood: {cause}")]
    Guard {
        /// The guard's text.
        text: String,
        /// What is not understood.
        cause: ParseError,
    },
    /// A guard on something that is no input.
    #[error("guard {text:?} speaks of {source_text}, which is no input of the program")]
    GuardSource {
        /// The guard's text.
        text: String,
        /// The part of it.
        source_text: String,
    },
    /// A name that is used before anything defines it.
    #[error("{user} uses {name:?}, which nothing before it defines")]
    Undefined {
        /// The node, or "the graph's outputs" and the like.
        user: String,
        /// The name.
        name: String,
    },
    /// A name that is defined twice.
    #[error("{name:?} is defined twice, by {user} again")]
    Redefined {
        /// The node.
        user: String,
        /// The name.
        name: String,
    },
    /// A value without the metadata of its kind.
    #[error("{name:?} of {user} has no entry in {table}")]
    NoMeta {
        /// The node.
        user: String,
        /// The value.
        name: String,
        /// The table of the schema that should have it.
        table: &'static str,
    },
    /// The signature and the graph disagree.
    #[error("the signature and the graph disagree: {reason}")]
    Signature {
        /// Where.
        reason: String,
    },
    /// The program is no inference program.
    #[error("the program has an output of kind {kind}; only programs for inference are served")]
    Training {
        /// The schema's name of the output's kind.
        kind: &'static str,
    },
    /// The program takes an object that is no tensor and no number.
    #[error("input {name:?} is of kind {kind}; only tensors and plain values are served")]
    InputKind {
        /// The input.
        name: String,
        /// The schema's name of its kind.
        kind: &'static str,
    },
    /// The description of how the program is called is not understood.
    #[error("{which} is not understood: {reason}")]
    Tree {
        /// `in_spec` or `out_spec`.
        which: &'static str,
        /// What does not hold.
        reason: String,
    },
    /// A weight or constant that is pickled: a tensor subclass or an object.
    #[error(
        "{name:?} is pickled, which is code to run: tensor subclasses and custom objects are not served. Turn them into plain tensors before torch.export.export"
    )]
    Pickled {
        /// The weight or constant.
        name: String,
    },
    /// A weight or constant that reaches past the end of its payload.
    #[error("{name:?} needs {needs} bytes of {entry:?}, which has {has}")]
    PayloadSize {
        /// The weight or constant.
        name: String,
        /// The entry.
        entry: String,
        /// The end of its last element, in bytes.
        needs: u64,
        /// The entry's size.
        has: u64,
    },
    /// The signature names a weight or constant that the archive does not hold.
    #[error("input {value:?} is {kind} {name:?}, which the archive does not hold")]
    NoPayload {
        /// The value's name in the graph.
        value: String,
        /// "parameter", "buffer" or "constant".
        kind: &'static str,
        /// The name in the model.
        name: String,
    },
    /// A weight or constant whose form is not what the graph says of it.
    #[error("input {value:?} is {graph} in the graph, but its payload {name:?} is {payload}")]
    PayloadForm {
        /// The value's name in the graph.
        value: String,
        /// Its form there.
        graph: String,
        /// The name in the model.
        name: String,
        /// The payload's form.
        payload: String,
    },
    /// A size of a constant form has no value.
    #[error("{name}: {cause}")]
    Value {
        /// The value or payload.
        name: String,
        /// Why.
        cause: ExprError,
    },
}

/// Every dtype code with its name.
fn known_codes() -> String {
    let names = DType::ALL.iter().filter(|dtype| **dtype != DType::Unknown);
    names.map(|dtype| format!("{} {}", dtype.code(), dtype.schema_name())).collect::<Vec<_>>().join(", ")
}
