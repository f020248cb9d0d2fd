//! The atlas: which thread holds which element, and where elements lie, instruction by instruction.
//!
//! ```text
//! registers: tv: (thread, value) ↦ row + rows·column         values fill 32-bit registers from the low bits on
//! storage:   index row + rows·column ↦ address in a unit
//! ```
//! Every atom names its source in the PTX ISA and is checked for coverage (each element of the tile has a place) and
//! injectivity (no two share one). Numbers of sections move between editions of the PTX ISA, so titles are cited.
//! Deliberately absent: sparse operands, block scales, pairs of blocks (`cta_group::2`).

mod matrix;
mod mma;
mod tcgen05;
mod wgmma;

use serde::Serialize;

use crate::composed::ComposedLayout;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::unit::{Place, Unit};

/// What an atom is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Read as a factor of a product.
    Operand,
    /// Read and written as the sum of a product.
    Accumulator,
    /// A move between registers and a memory; rows and columns are those of the memory.
    Transfer,
}

/// Where an atom's elements are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Map {
    /// In registers: (thread, value) ↦ row + rows·column.
    Registers {
        /// The map; its first mode are the threads.
        tv: Layout,
    },
    /// In a memory: row + rows·column ↦ address.
    Storage {
        /// The unit of the addresses.
        unit: Unit,
        /// The map.
        layout: ComposedLayout,
    },
}

/// One tile of one instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Atom {
    /// Its name, which [`Atom::named`] reads.
    pub name: String,
    /// In words.
    pub about: String,
    /// Where it is specified.
    pub source: &'static str,
    /// What it is.
    pub role: Role,
    /// Rows of the tile.
    pub rows: i64,
    /// Columns of the tile.
    pub cols: i64,
    /// Bits of an element.
    pub bits: u32,
    /// Where the elements are.
    pub map: Map,
}

impl Atom {
    /// The atom of a name such as `wgmma.m64n128k16.f16.d`.
    ///
    /// # Errors
    /// [`Error::Word`] with the patterns that exist.
    pub fn named(name: &str) -> Result<Atom> {
        let parts: Vec<&str> = name.split('.').collect();
        let found = match parts.as_slice() {
            ["mma", shape, dtype, operand] => mma::atom(shape, dtype, operand),
            ["wgmma", "smem", major, swizzle, rest @ ..] => wgmma::shared(major, swizzle, rest),
            ["wgmma", shape, dtype, operand] => wgmma::atom(shape, dtype, operand),
            ["ldmatrix" | "stmatrix", count, rest @ ..] => matrix::atom(parts[0], count, rest),
            ["tcgen05", "c", m, n] => tcgen05::accumulator(m, n),
            ["tcgen05", "a", m, k, dtype] => tcgen05::operand(m, k, dtype),
            ["tcgen05", way @ ("ld" | "st"), shape, count, rest @ ..] => tcgen05::transfer(way, shape, count, rest),
            _ => None,
        };
        let mut atom = found.ok_or_else(|| Error::Word {
            what: "atom",
            got: name.chars().take(80).collect(),
            allowed: PATTERNS.iter().map(|(pattern, _)| *pattern).collect::<Vec<_>>().join(", "),
        })?;
        name.clone_into(&mut atom.name);
        Ok(atom)
    }

    /// The tile's elements.
    #[must_use]
    pub fn size(&self) -> i64 {
        self.rows * self.cols
    }

    /// Threads and values for each, for registers.
    #[must_use]
    pub fn threads_and_values(&self) -> Option<(i64, i64)> {
        match &self.map {
            Map::Registers { tv } => {
                let threads = tv.mode(0)?.size();
                Some((threads, tv.size() / threads))
            }
            Map::Storage { .. } => None,
        }
    }

    /// For each element, row + rows·column: (thread, value), or the place in the memory.
    ///
    /// # Errors
    /// [`Error::NoSuchLayout`] if an element has none, or two; then the atlas is wrong.
    pub fn verify(&self) -> Result<()> {
        let refuse =
            |why: &str| Error::NoSuchLayout { operation: "atlas", layout: self.name.clone(), why: why.to_owned() };
        match &self.map {
            Map::Registers { tv } => {
                if tv.size() != self.size() || !tv.is_bijective()? {
                    return Err(refuse("threads and values do not cover the tile once"));
                }
            }
            Map::Storage { unit, layout } => {
                let mut addresses = layout.offsets()?;
                if i64::try_from(addresses.len()) != Ok(self.size()) || unit.bits() < self.bits && unit.bits() != 8 {
                    return Err(refuse("the map does not fit the tile"));
                }
                for address in &addresses {
                    if !Place::new(unit.space(), unit.bit_address(*address)?, self.bits).exists() {
                        return Err(refuse("an element lies outside the memory"));
                    }
                }
                addresses.sort_unstable();
                let step = i64::from(self.bits.div_ceil(unit.bits()));
                if addresses.windows(2).any(|pair| pair[1] - pair[0] < step) {
                    return Err(refuse("two elements share a place"));
                }
            }
        }
        Ok(())
    }
}

/// Patterns of names, and an example of each.
pub const PATTERNS: [(&str, &str); 10] = [
    ("mma.m16n8k{8|16|32}.{f16|bf16|tf32|s8|u8|e4m3|e5m2}.{a|b}", "mma.m16n8k16.f16.a"),
    ("mma.m16n8k{8|16|32}.{f32|s32|f16}.c", "mma.m16n8k16.f32.c"),
    ("wgmma.m64n{8…256}k{8|16|32}.{f16|bf16|tf32|e4m3|e5m2|s8|u8}.a", "wgmma.m64n128k16.f16.a"),
    ("wgmma.m64n{8…256}k{8|16|32}.{f32|s32|f16}.d", "wgmma.m64n128k16.f32.d"),
    ("wgmma.smem.{k|mn}.{none|32b|64b|128b}.DTYPE[.x{8…256}]", "wgmma.smem.k.128b.f16"),
    ("ldmatrix.x{1|2|4}[.trans], stmatrix.x{1|2|4}[.trans]", "ldmatrix.x4"),
    ("tcgen05.c.m{128|64|64ws|32ws}.n{8…256}", "tcgen05.c.m128.n128"),
    ("tcgen05.a.m{128|64}.k{…}.DTYPE", "tcgen05.a.m128.k128.bf16"),
    ("tcgen05.ld.{32x32b|16x64b|16x128b|16x256b}.x{1…128}[.pack16]", "tcgen05.ld.32x32b.x64"),
    ("tcgen05.st.{32x32b|16x64b|16x128b|16x256b}.x{1…128}[.unpack16]", "tcgen05.st.32x32b.x64"),
];

/// Names of the atoms that the atlas lists; patterns reach more sizes than these.
#[must_use]
pub fn names() -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for (k, dtypes) in
        [(8, &["f16", "bf16", "tf32"][..]), (16, &["f16", "bf16", "s8", "u8"]), (32, &["s8", "u8", "e4m3", "e5m2"])]
    {
        for dtype in dtypes {
            names.extend(["a", "b"].map(|operand| format!("mma.m16n8k{k}.{dtype}.{operand}")));
        }
    }
    names.extend(["f32", "s32", "f16"].map(|dtype| format!("mma.m16n8k16.{dtype}.c")));
    for (k, dtypes) in [(16, &["f16", "bf16"][..]), (8, &["tf32"]), (32, &["e4m3", "e5m2", "s8", "u8"])] {
        names.extend(dtypes.iter().map(|dtype| format!("wgmma.m64n128k{k}.{dtype}.a")));
    }
    for n in [8, 64, 128, 256] {
        names.extend(["f32", "f16"].map(|dtype| format!("wgmma.m64n{n}k16.{dtype}.d")));
    }
    for major in ["k", "mn"] {
        for swizzle in ["none", "32b", "64b", "128b"] {
            let dtypes = if major == "k" { &["f16", "e4m3"][..] } else { &["f16"] };
            names.extend(dtypes.iter().map(|dtype| format!("wgmma.smem.{major}.{swizzle}.{dtype}")));
        }
    }
    for way in ["ldmatrix", "stmatrix"] {
        for count in [1, 2, 4] {
            names.extend(["", ".trans"].map(|trans| format!("{way}.x{count}{trans}")));
        }
    }
    names.extend(["m128", "m64", "m64ws", "m32ws"].map(|m| format!("tcgen05.c.{m}.n128")));
    for m in ["m128", "m64"] {
        names.extend(["k128.f16", "k128.bf16", "k128.e4m3", "k64.tf32"].map(|rest| format!("tcgen05.a.{m}.{rest}")));
    }
    for (way, pack) in [("ld", ".pack16"), ("st", ".unpack16")] {
        for (shape, most) in [("32x32b", 128), ("16x64b", 128), ("16x128b", 64), ("16x256b", 32)] {
            for count in (0..8).map(|log| 1 << log).filter(|count| *count <= most) {
                names.push(format!("tcgen05.{way}.{shape}.x{count}"));
            }
            names.push(format!("tcgen05.{way}.{shape}.x1{pack}"));
        }
    }
    names
}

/// `prefix` and a number.
pub(crate) fn number_after(text: &str, prefix: &str) -> Option<i64> {
    let digits = text.strip_prefix(prefix)?;
    let is_number = !digits.is_empty() && digits.len() < 6 && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse().ok())?
}

/// An operand's dtype: one of `allowed`.
pub(crate) fn dtype_of(text: &str, allowed: &[Dtype]) -> Option<Dtype> {
    text.parse().ok().filter(|dtype| allowed.contains(dtype))
}

/// A layout of flat threads and values; modes of one element are left out.
pub(crate) fn thread_value(threads: &[(i64, i64)], values: &[(i64, i64)]) -> Option<Layout> {
    let mode = |modes: &[(i64, i64)]| {
        let moving: Vec<(i64, i64)> = modes.iter().copied().filter(|(extent, _)| *extent > 1).collect();
        Layout::from_flat(&moving).ok()
    };
    Layout::from_modes([mode(threads)?, mode(values)?]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The atom's map is `formula`: thread and value ↦ row and column.
    #[track_caller]
    pub(super) fn maps_as(name: &str, threads: i64, formula: impl Fn(i64, i64) -> (i64, i64)) {
        let atom = Atom::named(name).unwrap();
        let Map::Registers { tv } = &atom.map else { panic!("registers") };
        let (has_threads, values) = atom.threads_and_values().unwrap();
        assert_eq!(has_threads, threads);
        for (thread, value) in (0..threads).flat_map(|thread| (0..values).map(move |value| (thread, value))) {
            let (row, col) = formula(thread, value);
            let got = tv.at_coord(&[thread, value].into()).unwrap();
            assert_eq!(got, row + atom.rows * col, "{name} thread {thread} value {value}");
        }
    }

    #[test]
    fn every_atom_covers_its_tile_once() {
        let names = names();
        assert!(names.len() > 100);
        for name in names {
            let atom = Atom::named(&name).unwrap_or_else(|error| panic!("{error}"));
            atom.verify().unwrap_or_else(|error| panic!("{error}"));
            assert!(atom.source.starts_with("PTX ISA") && !atom.about.is_empty(), "{name}");
        }
        for (_, example) in PATTERNS {
            assert_eq!(Atom::named(example).unwrap().name, example);
        }
    }

    #[test]
    fn a_wrong_map_is_seen() {
        let mut atom = Atom::named("mma.m16n8k16.f16.a").unwrap();
        atom.map = Map::Registers { tv: "((4,8),(2,2,2)):((32,1),(16,8,64))".parse().unwrap() };
        assert!(atom.verify().is_err(), "two registers at the same columns");
        let mut atom = Atom::named("tcgen05.a.m128.k128.bf16").unwrap();
        atom.map = Map::Storage { unit: Unit::TmemElements(16), layout: "(128,128):(64,1)".parse().unwrap() };
        assert!(atom.verify().is_err(), "rows share lanes");
    }

    #[test]
    fn unknown_names_list_the_patterns() {
        for wrong in [
            "",
            "mma",
            "mma.m16n8k64.f16.a",
            "mma.m16n8k16.f16.d",
            "wgmma.m64n12k16.f32.d",
            "tcgen05.c.m100.n8",
            "tcgen05.ld.16x256b.x64",
            "tcgen05.ld.32x32b.x3",
            "tcgen05.ld.32x32b.x1.unpack16",
            "ldmatrix.x3",
            "wgmma.smem.k.96b.f16",
            "tcgen05.a.m128.k8.bf16",
            "wgmma.m64n99999999999999999999k16.f32.d",
        ] {
            let Err(Error::Word { what: "atom", allowed, .. }) = Atom::named(wrong) else { panic!("{wrong}") };
            assert!(allowed.contains("tcgen05.c.m{128"));
        }
    }
}
