//! The tiles of `matrices` (wgsl/matrices.wgsl): how subgroups share a block of rows, keys and columns, by what a device's matrices are.
//!
//! ```text
//! rows of a block      subgroup_rows · row_tiles · tile                     64, or 16 of a part of the keys
//! keys of a block      subgroup_columns · key_tiles · tile                  32, or 16
//! columns of values    column_blocks · keys of a block                      64 or 128
//! ```
//! Deliberately absent: which request takes them (select.rs).

use std::fmt::{self, Write};

use rapt_core::DType;

use crate::tiles::{BLOCK_M, Tiles};

/// Cooperative matrices that a device has: float16 times float16, summed in float32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixUnits {
    /// Rows, columns and products of a matrix: 16 or 8.
    pub tile: usize,
    /// Threads of a subgroup, always.
    pub subgroup_threads: usize,
    /// Whether there are those of float32 too.
    pub has_floats: bool,
}

impl MatrixUnits {
    /// Those of every Apple GPU since the M1.
    pub const METAL: MatrixUnits = MatrixUnits { tile: 8, subgroup_threads: 32, has_floats: true };
}

/// Columns of q and k, and of values, that have a variant.
const WIDTHS: [usize; 2] = [64, 128];

/// Columns of q and k, and of values of a workgroup, that have a variant for these; `None` where q has more.
fn columns(head_dim: usize, head_dim_v: usize) -> Option<(usize, usize)> {
    let depth = WIDTHS.into_iter().find(|width| head_dim <= *width)?;
    Some((depth, WIDTHS.into_iter().find(|width| head_dim_v <= *width).unwrap_or(WIDTHS[1])))
}

/// Rows of a block where a workgroup has a part of the keys.
const FEW_ROWS: usize = 16;

/// What identifies the tiles of a variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixTiles {
    /// The matrices.
    pub units: MatrixUnits,
    /// The numbers of q, k, v and weights in them: float16, or float32.
    pub numbers: DType,
    /// Threads of a workgroup.
    pub threads: usize,
    /// Rows of a block: 64, or fewer where a workgroup has a part of the keys.
    pub block_m: usize,
    /// Tiles of rows of a subgroup.
    pub row_tiles: usize,
    /// Whether four words of k and v are loaded as one.
    pub wide: bool,
    /// Keys of a block.
    pub block_n: usize,
    /// Columns of q and k: head_dim, with zeros behind it.
    pub depth: usize,
    /// Columns of values of a workgroup.
    pub block_dv: usize,
}

impl fmt::Display for MatrixTiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MatrixTiles { units: MatrixUnits { tile, subgroup_threads, .. }, threads, row_tiles, wide, .. } = self;
        let MatrixTiles { block_n, depth, block_dv, .. } = self;
        if self.numbers == DType::F32 {
            write!(f, "of {} ", self.numbers)?;
        }
        write!(f, "{tile}x{tile} by {subgroup_threads} of {threads} threads, {row_tiles} of rows, {block_n} keys, ")?;
        write!(f, "{depth} and {block_dv} columns{}", if *wide { ", wide" } else { "" })
    }
}

impl MatrixTiles {
    /// For these columns on a device with so much workgroup memory; `None` where there are no such tiles.
    pub(crate) fn fitting(
        units: MatrixUnits,
        storage: DType,
        head_dim: usize,
        head_dim_v: usize,
        shared_bytes: usize,
    ) -> Option<Self> {
        let numbers = if storage == DType::F16 { DType::F16 } else { DType::F32 };
        let (depth, block_dv) = columns(head_dim, head_dim_v)?;
        let tiles = MatrixTiles::of_columns(units, numbers, depth, block_dv);
        (tiles.is_whole() && tiles.shared_bytes() <= shared_bytes).then_some(tiles)
    }

    /// For few rows of float16 and a part of the keys; as [`fitting`](MatrixTiles::fitting).
    pub(crate) fn fitting_few_rows(
        units: MatrixUnits,
        head_dim: usize,
        head_dim_v: usize,
        shared_bytes: usize,
    ) -> Option<Self> {
        let (depth, block_dv) = columns(head_dim, head_dim_v)?;
        let tiles = MatrixTiles::of_few_rows(units, depth, block_dv);
        (tiles.is_whole() && tiles.shared_bytes() <= shared_bytes).then_some(tiles)
    }

    /// The tiles for so many columns. At head_dim 128 they take 23 KiB, of which two workgroups share a multiprocessor of NVIDIA's: of all that were timed on an
    /// H200 the fastest (2026-11, docs/lab/vulkan.md). Apple's have 128 registers of 32 bits a thread: one tile of rows to a subgroup, whose sums take 32 of them
    /// (never timed).
    fn of_columns(units: MatrixUnits, numbers: DType, depth: usize, block_dv: usize) -> Self {
        let (threads, block_m, row_tiles, block_n) = (128, BLOCK_M, 2, 32);
        let tiles = MatrixTiles { units, numbers, threads, block_m, row_tiles, wide: false, block_n, depth, block_dv };
        if units == MatrixUnits::METAL {
            let narrow = numbers == DType::F16 || depth.max(block_dv) == WIDTHS[0];
            return MatrixTiles { threads: 256, row_tiles: 1, block_n: if narrow { 32 } else { 16 }, ..tiles };
        }
        tiles
    }

    /// The tiles for few rows, most of them empty: a subgroup for each tile of keys, so that as many workgroups as memory has room for load at once.
    fn of_few_rows(units: MatrixUnits, depth: usize, block_dv: usize) -> Self {
        let (block_m, block_n) = (FEW_ROWS, 32);
        let threads = units.subgroup_threads * (block_n / units.tile);
        let row_tiles = block_m / units.tile;
        let numbers = DType::F16;
        MatrixTiles { units, numbers, threads, block_m, row_tiles, wide: false, block_n, depth, block_dv }
    }

    /// Every one that a plan may have.
    pub(crate) fn all() -> Vec<Self> {
        let halves = |tile, subgroup_threads| MatrixUnits { tile, subgroup_threads, has_floats: false };
        let units = [halves(16, 32), halves(16, 64), halves(8, 8), MatrixUnits::METAL].map(|units| (units, DType::F16));
        let columns = WIDTHS.into_iter().flat_map(|depth| WIDTHS.map(|block_dv| (depth, block_dv)));
        let of = |(units, numbers)| {
            columns.clone().map(move |(depth, dv)| MatrixTiles::of_columns(units, numbers, depth, dv))
        };
        let of_few = units
            .into_iter()
            .flat_map(|(units, _)| columns.clone().map(move |(depth, dv)| MatrixTiles::of_few_rows(units, depth, dv)));
        let whole = units.into_iter().chain([(MatrixUnits::METAL, DType::F32)]).flat_map(of);
        let all = whole.chain(of_few).filter(MatrixTiles::is_whole);
        let with_wide = |tiles: MatrixTiles| {
            let wide = tiles.has_wide_loads().then_some(MatrixTiles { wide: true, ..tiles });
            std::iter::once(tiles).chain(wide)
        };
        all.flat_map(with_wide).collect()
    }

    /// Whether a workgroup has a part of the keys.
    pub(crate) const fn is_split(&self) -> bool {
        self.block_m < BLOCK_M
    }

    /// Subgroups, along rows.
    const fn subgroup_rows(&self) -> usize {
        self.block_m / (self.row_tiles * self.units.tile)
    }

    /// Subgroups, along keys and columns.
    const fn subgroup_columns(&self) -> usize {
        self.threads / self.units.subgroup_threads / self.subgroup_rows()
    }

    /// Tiles of keys of a subgroup.
    const fn key_tiles(&self) -> usize {
        self.block_n / (self.subgroup_columns() * self.units.tile)
    }

    /// Whether every subgroup has whole tiles, each of them once.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        let (rows, threads) = (self.subgroup_rows(), self.units.subgroup_threads);
        rows > 0
            && threads > 0
            && self.threads.is_multiple_of(threads * rows)
            && self.subgroup_columns() > 0
            && self.block_n.is_multiple_of(self.subgroup_columns() * self.units.tile)
            && (self.block_n * self.depth.min(self.block_dv)).is_multiple_of(self.loaded() * self.threads)
    }

    /// Whether they have a variant with wide loads. Which of the two runs is chosen when k and v are bound.
    pub(crate) fn has_wide_loads(&self) -> bool {
        self.numbers == DType::F16 && self.units.tile == 16
    }

    /// Elements that a thread loads at a time.
    pub(crate) const fn loaded(&self) -> usize {
        16 / self.numbers.size_bytes()
    }

    /// In how many parts the columns of q are loaded, so that 64 rows of a part fit where a block of keys does.
    const fn rounds(&self) -> usize {
        self.block_m.div_ceil(self.block_n)
    }

    /// Vectors of four from one row of the tile of q, k or v to the next.
    fn pitch(&self) -> usize {
        self.depth.max(self.block_dv) / 4 + 2
    }

    /// Vectors of four from one key of s, and of the weights, to the next: longer than the rows, so that matrices meet different banks, where as many workgroups
    /// have room. At 12 KiB NVIDIA's driver has four of them on a multiprocessor, at 13 three: decode took 113 µs and 128 (H200, 2026-11).
    fn pitches_of_rows(&self) -> [usize; 2] {
        let fours = self.block_m / 4;
        if self.is_split() { [fours, fours] } else { [fours + 1, fours + 2] }
    }

    /// Bytes of workgroup memory: the tile, s, weights; maxima of four lanes; where rows lie; five words.
    #[must_use]
    pub fn shared_bytes(&self) -> usize {
        let fours = self.block_m / 4;
        let four = 4 * self.numbers.size_bytes();
        let [pitch_s, pitch_p] = self.pitches_of_rows();
        let of_key = self.pitch() * four + pitch_s * 16 + pitch_p * four;
        self.block_n * of_key + 4 * fours * 16 + fours * 16 + 5 * 4
    }

    pub(crate) fn tiles(&self) -> Tiles {
        let &MatrixTiles { block_m, block_n, block_dv, .. } = self;
        Tiles { block_m, block_n, block_dv, threads: self.threads, shared_bytes: self.shared_bytes() }
    }

    /// How often lines of the text stand.
    pub(crate) fn words(&self) -> Vec<(&'static str, usize)> {
        let &MatrixTiles { units: MatrixUnits { tile, .. }, threads, block_m, row_tiles, block_n, .. } = self;
        let &MatrixTiles { depth, block_dv, .. } = self;
        vec![
            ("$r", self.rounds()),
            ("$k", depth / self.rounds() / tile),
            ("$j", block_n / tile),
            ("$h", block_dv / block_n),
            ("$a", row_tiles),
            ("$n", self.key_tiles()),
            ("$i", block_n * depth / self.loaded() / threads),
            ("$o", block_n * block_dv / self.loaded() / threads),
            ("$l", block_n * block_m / 4 / threads),
            ("$w", usize::from(!self.is_split())),
            ("$s", usize::from(self.is_split())),
        ]
    }

    /// What the text names of them. `reads_anywhere`: what a thread loads may begin at any element.
    pub(crate) fn constants(&self, reads_anywhere: bool) -> String {
        let tile = self.units.tile;
        let [pitch_s, pitch_p] = self.pitches_of_rows();
        let mut text = String::new();
        let numbers = [
            ("TILE", tile),
            ("THREADS", self.threads),
            ("DEPTH", self.depth),
            ("PITCH", self.pitch()),
            ("PITCH_S", pitch_s),
            ("PITCH_P", pitch_p),
            ("ROUND", self.depth / self.rounds()),
            // The rows of a part of q are longer too where there is room for it.
            ("PITCH_Q", if self.rounds() == 1 { self.pitch() } else { self.depth / self.rounds() / 4 }),
            ("SUBGROUP_COLUMNS", self.subgroup_columns()),
            ("ROWS_OF_SUBGROUP", self.row_tiles * tile),
            ("KEYS_OF_SUBGROUP", self.key_tiles() * tile),
            // What the places of what a thread loads are a multiple of, less 1.
            ("ALIGNMENT", if reads_anywhere { 0 } else { if self.wide { 7 } else { 1 } }),
        ];
        for (name, number) in numbers {
            let _ = writeln!(text, "const {name}: u32 = {number}u;");
        }
        let numbers = if self.numbers == DType::F16 { "f16" } else { "f32" };
        for (name, number, role) in [("MatrixA", numbers, "A"), ("MatrixB", numbers, "B"), ("MatrixC", "f32", "C")] {
            let _ = writeln!(text, "alias {name} = coop_mat{tile}x{tile}<{number}, {role}>;");
        }
        text
    }
}
