//! How large the pieces of the work are: a table that `cargo xtask tune` measured, looked up by the class of a request.
//!
//! ```text
//! forward   instruction set × dtype × head_dim ≤ 64 | ≤ 128 | more × q_len < 256 | < 1024 | more
//! decode    instruction set × dtype × one row per group | more
//! ```
//! `tiles.json` beside this crate's manifest has what was measured, on which machine and when; `table.rs` is written from it.
//! `block_n` and `pv_keys` decide how sums are grouped, so another table may change bits from one version to the next, never
//! from one call to another: a class forgets batch, heads, strides and threads. Among the classes of one head_dim `block_n`
//! is one number, so that rows keep their bits when more queries join them, unless those bring another instruction set (`select`).
//! The other numbers touch no bit.
//! Deliberately absent: tiles that the kernels are not compiled for. Instruction sets that nobody measured get
//! [`Tiles::DEFAULT`].

mod table;

use rapt_core::{Arch, DType, Spec};

use crate::arch;

/// How forward's work is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForwardTile {
    pub(crate) block_n: usize,
    pub(crate) rows: usize,
    pub(crate) narrow: bool,
}

impl ForwardTile {
    /// Keys per block, at most: the number taken is a multiple of the micro-tile's rows, and fewer for wide heads.
    pub const BLOCK_N: &[usize] = &[64, 128, 256];
    /// Rows per item, where there are items enough for all threads.
    pub const ROWS: &[usize] = &[64, 128, 256, 512, 1024];

    /// A tile of allowed numbers; `narrow`: a rest of at most one vector of rows gets a tile of one vector.
    #[must_use]
    pub const fn new(block_n: usize, rows: usize, narrow: bool) -> Option<Self> {
        if contains(Self::BLOCK_N, block_n) && contains(Self::ROWS, rows) {
            Some(ForwardTile { block_n, rows, narrow })
        } else {
            None
        }
    }

    /// The numbers as the table has them.
    #[must_use]
    pub fn numbers(&self) -> [usize; 3] {
        [self.block_n, self.rows, usize::from(self.narrow)]
    }
}

/// How decode's work is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DecodeTile {
    pub(crate) block_n: usize,
    pub(crate) pv_keys: usize,
    pub(crate) ahead_bytes: usize,
    pub(crate) ahead_bytes_apart: usize,
}

impl DecodeTile {
    /// Keys per chunk.
    pub const BLOCK_N: &[usize] = &[256, 512, 1024];
    /// Keys per block of the second product, which are read again from L1 for each slice of head_dim_v.
    pub const PV_KEYS: &[usize] = &[8, 16, 32];
    /// Bytes of K or V between what is read and what is asked for; 0: nothing is asked for.
    pub const AHEAD_BYTES: &[usize] = &[0, 1024, 2048, 4096, 8192, 16384];

    /// A tile of allowed numbers; the last is for rows that do not follow one another in memory.
    #[must_use]
    pub const fn new(block_n: usize, pv_keys: usize, ahead_bytes: usize, ahead_bytes_apart: usize) -> Option<Self> {
        let allowed = contains(Self::BLOCK_N, block_n)
            && contains(Self::PV_KEYS, pv_keys)
            && contains(Self::AHEAD_BYTES, ahead_bytes)
            && contains(Self::AHEAD_BYTES, ahead_bytes_apart);
        if allowed { Some(DecodeTile { block_n, pv_keys, ahead_bytes, ahead_bytes_apart }) } else { None }
    }

    /// The numbers as the table has them.
    #[must_use]
    pub fn numbers(&self) -> [usize; 4] {
        [self.block_n, self.pv_keys, self.ahead_bytes, self.ahead_bytes_apart]
    }
}

const fn contains(list: &[usize], number: usize) -> bool {
    let mut at = 0;
    while at < list.len() {
        if list[at] == number {
            return true;
        }
        at += 1;
    }
    false
}

/// The tiles of one request, for whichever kernel it gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiles {
    /// For many queries.
    pub forward: ForwardTile,
    /// For few.
    pub decode: DecodeTile,
}

impl Tiles {
    /// What holds where nothing was measured.
    pub const DEFAULT: Tiles = Tiles { forward: forward(128, 128, true), decode: decode(512, 8, 0, 0) };

    /// What the table says of `spec` on `arch`.
    #[must_use]
    pub fn of(spec: &Spec, arch: Arch) -> Tiles {
        let storage = spec.numerics.storage;
        let (Some(table), Some(dtype)) = (table_of(arch, storage), DTYPES.iter().position(|&dtype| dtype == storage))
        else {
            return Tiles::DEFAULT;
        };
        let head_dim = class(&HEAD_DIMS, spec.head_dim().max(spec.head_dim_v()).saturating_sub(1));
        let q_len = class(&Q_LENS, spec.q_len());
        let rows = usize::from(spec.group_size().saturating_mul(spec.q_len()) > 1);
        // The tables of pairs and of tiles are forward's.
        let few =
            if arch::is_paired(arch, storage) || arch::tiled(arch, storage).is_some() { &table::AVX512 } else { table };
        Tiles { forward: table.forward[dtype][head_dim][q_len], decode: few.decode[dtype][rows] }
    }
}

/// The dtypes of the table, in its order.
pub(crate) const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];
/// Where the classes of `head_dim − 1` and of `q_len` end.
const HEAD_DIMS: [usize; 2] = [64, 128];
const Q_LENS: [usize; 2] = [256, 1024];

/// The class of a number among those that begin at `ends`.
const fn class(ends: &[usize; 2], number: usize) -> usize {
    (number >= ends[0]) as usize + (number >= ends[1]) as usize
}

// head_dim 64, 65, 128, 129.
const _: () = assert!(class(&HEAD_DIMS, 63) == 0 && class(&HEAD_DIMS, 64) == 1);
const _: () = assert!(class(&HEAD_DIMS, 127) == 1 && class(&HEAD_DIMS, 128) == 2);
const _: () = assert!(class(&Q_LENS, 255) == 0 && class(&Q_LENS, 256) == 1);
const _: () = assert!(class(&Q_LENS, 1023) == 1 && class(&Q_LENS, 1024) == 2);

/// The tiles of one instruction set: `[dtype][head_dim][q_len]`, `[dtype][rows]`.
struct ArchTiles {
    forward: [[[ForwardTile; 3]; 3]; 4],
    decode: [[DecodeTile; 2]; 4],
}

fn table_of(arch: Arch, storage: DType) -> Option<&'static ArchTiles> {
    match arch {
        Arch::Avx2 => Some(&table::AVX2),
        Arch::Avx512Bf16 if arch::is_paired(arch, storage) => Some(&table::AVX512_BF16),
        Arch::Amx if arch::tiled(arch, storage).is_some() => Some(&table::AMX),
        Arch::Avx512 | Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx => Some(&table::AVX512),
        _ => None,
    }
}

/// An entry of the table: one that is not allowed does not compile.
const fn forward(block_n: usize, rows: usize, narrow: bool) -> ForwardTile {
    match ForwardTile::new(block_n, rows, narrow) {
        Some(tile) => tile,
        None => panic!("no such tile is compiled"),
    }
}

/// As above.
const fn decode(block_n: usize, pv_keys: usize, ahead_bytes: usize, ahead_bytes_apart: usize) -> DecodeTile {
    match DecodeTile::new(block_n, pv_keys, ahead_bytes, ahead_bytes_apart) {
        Some(tile) => tile,
        None => panic!("no such tile is compiled"),
    }
}
