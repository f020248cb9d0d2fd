//! Shared memory of each algorithm: the size of its kernel's `Shared`, which the kernels assert against `SHARED_BYTES`.

use rapt_core::DType;

use super::{
    Algorithm, DEVIATION_THREADS, KernelVariant, Loads, MMA_WARPS, Pass, Sequences, WIDE_PIECE_BYTES, generic_columns,
};
use crate::backward::{HOPPER_KEYS, HOPPER_ROWS, HOPPER_TALL_ROWS, HOPPER_TURNED_ROWS, HOPPER_WIDE_KEYS};
use crate::codes::{Codes, Operand, TileCodes, TileScales};
use crate::deviation::FIGURES_BYTES;
use crate::tensor_map::BOX_COLUMNS;

/// Blocks of K, and of V, that hopper_f32.cu has in flight.
pub(super) const HOPPER_F32_STAGES: u32 = 2;
/// Tiles of streamed rows of q or k that backward_halves.cu has in flight: beside two there is room for one of d_o or v.
pub(super) const BACKWARD_HALVES_STAGES: u32 = 2;
/// Tiles of queries that backward_hopper.cu and backward_hopper_wide.cu have in flight: one is loaded while that at hand is used.
pub(super) const BACKWARD_Q_STAGES: u32 = 2;
/// Shared memory that hopper.cu may fill: 227 KiB.
const RING_BYTES: u32 = 227 * 1024;

/// Elements of a row of a tile in shared memory: `row_of` of the kernels.
const fn row_of(dim: u32) -> u32 {
    if dim.is_multiple_of(64) { dim } else { dim + 8 }
}

impl KernelVariant {
    /// Tiles of K, and of V, that hopper.cu has in flight.
    pub(super) const fn ring_stages(&self) -> u32 {
        if self.ring_bytes(4) + self.mask_bytes(4) <= RING_BYTES { 4 } else { 2 }
    }

    /// Tiles of the mask that hopper.cu has in flight.
    pub(super) const fn mask_stages(&self) -> u32 {
        let rest = RING_BYTES.saturating_sub(self.ring_bytes(self.ring_stages()));
        if self.mask_bytes(4) <= rest {
            4
        } else if self.mask_bytes(3) <= rest {
            3
        } else {
            2
        }
    }

    /// Shared memory of hopper.cu's `MaskRing` with so many stages.
    const fn mask_bytes(&self, stages: u32) -> u32 {
        let tiles = match self.mask {
            None => return 0,
            // Bits, and bytes that are yet to become bits.
            Some(DType::Bool) => stages * self.block_m * 16 + (stages - 1) * self.block_m * self.block_n,
            Some(dtype) => {
                let key = if matches!(dtype, DType::F16 | DType::BF16) { 2 } else { 4 };
                stages * self.block_m * self.block_n * key + 16
            }
        };
        (tiles + stages * (4 * 8 + 4)).next_multiple_of(16)
    }

    /// Shared memory of hopper.cu with a ring of so many stages: tiles in boxes of 64 columns, barriers, notes.
    const fn ring_bytes(&self, stages: u32) -> u32 {
        let (k, v) = (self.dims.0.div_ceil(BOX_COLUMNS), self.dims.1.div_ceil(BOX_COLUMNS));
        let row = 2 * BOX_COLUMNS;
        row * (k * self.block_m + stages * (k + v) * self.block_n) + 8 * (2 + 4 * stages) + 128
    }

    /// Shared memory through which hopper.cu stores what it computed, if there is room for it. Not where it loads element by
    /// element, which has no register left for it.
    const fn staged_bytes(&self) -> u32 {
        let tile = 2 * self.block_m * self.dims.1.next_multiple_of(BOX_COLUMNS);
        let so_far = self.ring_bytes(self.ring_stages()) + self.mask_bytes(self.mask_stages());
        if matches!(self.loads, Loads::Tma) && so_far + tile <= RING_BYTES { tile } else { 0 }
    }

    /// Shared memory of one buffer for queries of hopper.cu, and its barriers.
    const fn queries_bytes(&self) -> u32 {
        2 * self.block_m * self.dims.0.next_multiple_of(BOX_COLUMNS) + 16
    }

    /// Buffers for queries of hopper.cu: two where an item has few tiles, so that it does not wait for its queries (4096 × 77: 52 µs
    /// with one, 46 with two; 1024 × 1024: no difference; H200, 2026-11).
    pub(super) const fn q_stages(&self) -> u32 {
        let is_narrow = self.dims.0 <= BOX_COLUMNS && self.dims.1 <= BOX_COLUMNS && self.mask.is_none();
        if is_narrow && self.block_n <= 80 && matches!(self.loads, Loads::Tma) { 2 } else { 1 }
    }

    /// Whether hopper.cu stores through shared memory, from which TMA may write.
    pub(crate) const fn is_staged(&self) -> bool {
        matches!(self.algorithm, Algorithm::Hopper) && self.staged_bytes() > 0
    }

    /// Dynamic shared memory per block.
    pub(crate) fn shared_bytes(&self) -> u32 {
        match self.algorithm {
            Algorithm::Generic => self.generic_bytes(),
            Algorithm::Mma => self.mma_bytes(),
            Algorithm::Int8 => self.int8_bytes(),
            Algorithm::Decode => self.decode_bytes(),
            Algorithm::DecodeCodes => self.decode_codes_bytes(),
            Algorithm::Hopper => {
                let queries = (self.q_stages() - 1) * self.queries_bytes();
                let mask = self.mask_bytes(self.mask_stages());
                self.ring_bytes(self.ring_stages()) + mask + self.staged_bytes() + queries
            }
            Algorithm::HopperF32 => self.hopper_f32_bytes(),
            Algorithm::Wide => self.wide_bytes(),
            Algorithm::Latent => self.latent_bytes(),
            Algorithm::Combine
            | Algorithm::Append
            | Algorithm::Varlen
            | Algorithm::Backward(Pass::Rows | Pass::MaskParts) => 0,
            // Sums of the warps.
            Algorithm::Backward(Pass::Sinks) => 8 * 8,
            // Rows of dq, padded by a unit.
            Algorithm::Backward(Pass::Parts) => 2 * self.block_m * (self.dq_row() + 8),
            Algorithm::Backward(_) => self.backward_bytes(),
            Algorithm::BackwardHopper => self.backward_hopper_bytes(),
            Algorithm::BackwardMma(pass) => self.backward_mma_bytes(pass),
            Algorithm::BackwardHalves(pass) => self.backward_halves_bytes(pass),
            Algorithm::Deviation => self.deviation_bytes(),
            // Figures of a row and two largest errors, of each warp.
            Algorithm::DeviationEnd => DEVIATION_THREADS / 32 * (FIGURES_BYTES as u32 + 2 * 4),
        }
    }

    const fn generic_bytes(&self) -> u32 {
        let (size, depth) = if matches!(self.storage, DType::F64) { (8, 16) } else { (4, 32) };
        let padded = self.block_m + 4;
        let (qk, v) = (2 * depth * padded, depth * generic_columns(self.storage));
        (self.block_n * padded + if qk > v { qk } else { v }) * size + 16 * self.block_m
    }

    /// Weights, tiles or rows, and what is known of queries.
    const fn backward_bytes(&self) -> u32 {
        let (size, depth) = if matches!(self.storage, DType::F64) { (8, 16) } else { (4, 32) };
        let padded = self.block_m + 4;
        let (tiles, rows) = (2 * depth * padded, depth * generic_columns(self.storage));
        (self.block_n * padded + if tiles > rows { tiles } else { rows }) * size + self.block_m * (8 + 4 * size + 4 * 4)
    }

    /// Own rows, streamed ones in stages, and states of queries among them, biases of a tile of a mask; or its sums, where these are more.
    const fn backward_mma_bytes(&self, pass: Pass) -> u32 {
        const fn pair(variant: &KernelVariant, rows: u32) -> u32 {
            let words = if matches!(variant.storage, DType::F32) { 2 } else { 1 };
            let (a, b) = (2 * rows * row_of(words * variant.dims.0), 2 * rows * row_of(words * variant.dims.1));
            a.next_multiple_of(128) + b.next_multiple_of(128)
        }
        let (is_of_keys, is_again) =
            (matches!(pass, Pass::Keys | Pass::KeysAgain), matches!(pass, Pass::KeysAgain | Pass::QueriesAgain));
        let (own, streamed) = if is_of_keys { (1, self.block_n) } else { (self.block_m, 1) };
        let stage = pair(self, self.block_n) + (16 * streamed).next_multiple_of(128);
        let (biases, sums) = match (pass, self.mask) {
            (Pass::Mask, Some(dtype)) => {
                let size = if matches!(dtype, DType::F16 | DType::BF16) { 2 } else { 4 };
                (self.block_m * (self.block_n + 8) * size, 4 * self.block_m * (self.block_n + 1))
            }
            _ => (0, 0),
        };
        let beside = (16 * own + biases + 4 * is_again as u32).next_multiple_of(128);
        let tiles = pair(self, self.block_m) + self.stages * stage + beside;
        if tiles > sums { tiles } else { sums }
    }

    /// Own rows, streamed ones in stages, states of streamed queries, powers of rows, barriers.
    const fn backward_halves_bytes(&self, pass: Pass) -> u32 {
        let (a, b) = (self.dims.0.div_ceil(BOX_COLUMNS), self.dims.1.div_ceil(BOX_COLUMNS));
        let (row, stages) = (2 * 2 * BOX_COLUMNS, BACKWARD_HALVES_STAGES);
        let tiles = row * (a * (self.block_m + stages * self.block_n) + b * (self.block_m + self.block_n));
        let states = if matches!(pass, Pass::Keys) { self.block_n } else { 1 };
        let powers = 2 * self.block_m + (stages + 1) * self.block_n;
        (tiles + 16 * states + 4 * powers + 2 * 8 * (stages + 1)).next_multiple_of(16)
    }

    /// Whether the gradients of a head are backward_hopper_wide.cu's, whose groups sum half of the columns each.
    pub(crate) const fn has_halves(&self) -> bool {
        self.dims.0 > 2 * BOX_COLUMNS || self.dims.1 > 2 * BOX_COLUMNS
    }

    /// Columns of dk and dv of a group there: whole boxes.
    pub(super) const fn half_columns(&self) -> (u32, u32) {
        let (a, b) = (self.dims.0.div_ceil(2 * BOX_COLUMNS), self.dims.1.div_ceil(2 * BOX_COLUMNS));
        (a * BOX_COLUMNS, b * BOX_COLUMNS)
    }

    /// Columns of dq that a group of backward_hopper.cu computes, zeros among them.
    pub(crate) const fn dq_columns(&self) -> u32 {
        if self.has_halves() {
            self.half_columns().0
        } else if self.is_tall() {
            self.dims.0.next_multiple_of(16)
        } else if self.dims.0 > BOX_COLUMNS {
            BOX_COLUMNS
        } else {
            BOX_COLUMNS / 2
        }
    }

    /// Columns of dq that a row has among its sums.
    pub(crate) const fn dq_row(&self) -> u32 {
        if self.turns_dq() {
            self.dims.0
        } else if self.is_tall() {
            self.dq_columns()
        } else {
            2 * self.dq_columns()
        }
    }

    /// Rows of a tile of queries of backward_hopper.cu or backward_hopper_wide.cu.
    pub(crate) const fn backward_block_m(&self) -> usize {
        if self.is_tall() {
            HOPPER_TALL_ROWS
        } else if self.turns_dq() {
            HOPPER_TURNED_ROWS
        } else {
            HOPPER_ROWS
        }
    }

    /// Keys of a tile there.
    pub(crate) const fn backward_block_n(&self) -> usize {
        if self.has_halves() { HOPPER_WIDE_KEYS } else { HOPPER_KEYS }
    }

    /// Whether backward_hopper.cu takes 128 queries a tile of a head and not 64. Beside softcap that spilled 4 to 68 bytes (NVRTC 13.2).
    pub(crate) const fn is_tall(&self) -> bool {
        !self.natural && self.dims.0 <= BOX_COLUMNS && self.dims.1 <= BOX_COLUMNS
    }

    /// Whether backward_hopper.cu computes dq transposed, columns as rows of the product: its tiles of queries need be no multiple of 64 then. A tile of a
    /// mask leaves no shared memory for that, and beside softcap it was slower (docs/lab/cuda.md).
    pub(crate) const fn turns_dq(&self) -> bool {
        !self.natural && self.mask.is_none() && self.dims.0 > BOX_COLUMNS && !self.has_halves()
    }

    /// Tiles of d_o there.
    pub(super) const fn backward_d_o_stages(&self) -> u32 {
        if self.has_halves() { 1 } else { 2 }
    }

    /// Boxes of 128 bytes of a tile's keys, of a mask there.
    pub(super) fn backward_mask_boxes(&self) -> u32 {
        self.mask.map_or(0, |dtype| (self.block_n * dtype.size_bytes() as u32).div_ceil(2 * BOX_COLUMNS))
    }

    /// Parts of dq of a group that wait for their turn there: two where tiles of queries and masks leave room.
    pub(super) const fn backward_dq_stages(&self) -> u32 {
        if self.has_halves() || self.turns_dq() || self.mask.is_some() { 1 } else { 2 }
    }

    /// K and V, weights, parts of dq in stages, q and d_o in stages, what is known of queries, barriers and two items.
    fn backward_hopper_bytes(&self) -> u32 {
        let has_halves = self.has_halves();
        let boxes_of =
            |dim: u32, half: u32| if has_halves { 2 * half / BOX_COLUMNS } else { dim.div_ceil(BOX_COLUMNS) };
        let (half, half_v) = self.half_columns();
        let (boxes, boxes_v) = (boxes_of(self.dims.0, half), boxes_of(self.dims.1, half_v));
        let (row, stages, d_o_stages) = (2 * BOX_COLUMNS, BACKWARD_Q_STAGES, self.backward_d_o_stages());
        let weights = 2 * self.block_m * self.block_n * if has_halves { 3 } else { 2 };
        let of_keys = row * self.block_n * (boxes + boxes_v) + weights;
        let of_queries = row * self.block_m * (stages * boxes + d_o_stages * boxes_v) + 2 * 4 * stages * self.block_m;
        let of_mask = row * self.block_m * self.backward_mask_boxes() + if self.mask.is_some() { 2 * 8 } else { 0 };
        let piece = if has_halves {
            BOX_COLUMNS
        } else if self.turns_dq() {
            self.block_m
        } else {
            self.dq_columns()
        };
        let parts = self.backward_dq_stages() * 2 * 4 * BOX_COLUMNS * piece;
        let barriers = 8 * (2 * stages + 2 * d_o_stages + 3 + (4 + 2 * self.backward_dq_stages()) * 2);
        let items = if matches!(self.sequences, Sequences::Varlen) { 8 + 2 * 14 * 4 } else { 2 * 5 * 4 };
        (of_keys + of_queries + of_mask + parts + barriers + items).next_multiple_of(1024)
    }

    /// Weights twice; a tile of values, or of queries and keys; what is known of keys, and of rows.
    const fn deviation_bytes(&self) -> u32 {
        const DEPTH: u32 = 32;
        let (rows, keys) = (self.block_m + 4, self.block_n + 4);
        let (qk, v) = (4 * DEPTH * (rows + keys), 4 * DEPTH * (128 + 8));
        let of_keys = self.block_n * (2 * 4 * rows + 4 * 4);
        let of_rows = self.block_m * (9 * 8 + 6 * 8 + 4 * 4 + 8);
        of_keys + if qk > v { qk } else { v } + of_rows + DEVIATION_THREADS / 32 * 2 * 4
    }

    const fn mma_bytes(&self) -> u32 {
        let (k_row, v_row) = (row_of(self.dims.0), row_of(self.dims.1));
        let (k_terms, v_terms, coded) = match self.codes {
            Codes::Tiles { k, v } => (k.terms(Operand::K), v.terms(Operand::V), self.coded_bytes(k, v)),
            _ => (1, 1, 0),
        };
        let tiles = 2 * (self.block_m * k_row + self.block_n * (k_terms * k_row + v_terms * v_row)) + coded;
        let staged = 4 * MMA_WARPS * 16 * (self.dims.1 + 4);
        if tiles > staged { tiles } else { staged }
    }

    /// Tiles of bytes, a scale of each query, and of keys a factor and where they lie.
    const fn int8_bytes(&self) -> u32 {
        let (k_row, v_row) = (2 * row_of(self.dims.0 / 2), 2 * row_of(self.dims.1 / 2));
        let is_paged = matches!(self.sequences, Sequences::Paged);
        let is_by_token = matches!(self.codes, Codes::Tiles { k: TileCodes { scales: TileScales::Token, .. }, .. });
        let factors = if is_by_token || is_paged { 4 * self.block_n } else { 4 * 4 };
        let places = if is_paged { 2 * 2 * 4 * self.block_n } else { 2 * 4 };
        let keys = (self.block_n * (k_row + v_row) + factors + places).next_multiple_of(128);
        (keys + self.block_m * (k_row + 4)).next_multiple_of(128)
    }

    /// `CodedStages` of kernels/mma/coded_tiles.cuh.
    const fn coded_bytes(&self, k: TileCodes, v: TileCodes) -> u32 {
        // Codes, factors and zero points; a factor of the score, one of the weight and its logarithm; where a key lies, and whether it does.
        let key = k.staged_bytes(self.dims.0) + v.staged_bytes(self.dims.1) + 3 * 4 + 2 * 4 + 1;
        let channels = if matches!(k.scales, TileScales::Channel) { self.dims.0 } else { 4 };
        // And what is the head's.
        self.block_n * key + 4 * channels + 4 * 8 + 4 * 4
    }

    const fn wide_bytes(&self) -> u32 {
        let element = if matches!(self.storage, DType::F32) { 4 } else { 2 };
        // Weights, and what pairs of warps share of their rows.
        let (weights, beside) = (self.block_m * self.block_n * element, 2 * 4 * self.block_m);
        self.block_m * self.dims.0 * element + self.stages * self.block_n * WIDE_PIECE_BYTES + weights + beside
    }

    /// q, two tiles of keys, weights, and what pairs of warps share of their rows.
    const fn latent_bytes(&self) -> u32 {
        2 * self.dims.0 * (self.block_m + 2 * self.block_n) + self.block_m * (2 * self.block_n + 2 * 4)
    }

    const fn decode_bytes(&self) -> u32 {
        let (k_row, v_row) = (row_of(self.dims.0), row_of(self.dims.1));
        let ring = 2 * self.decode_warps() * self.stages * self.block_n * (k_row + v_row);
        ring + 2 * 16 * k_row + self.hand_over_bytes()
    }

    /// `HandOver` of kernels/decode/hand_over.cuh.
    const fn hand_over_bytes(&self) -> u32 {
        let parts = 16 * self.decode_warps() / 32;
        let (left, so_far) = (4 * 32 * (self.dims.1 + 8 + 2), 4 * 16 * self.dims.1 + 2 * 4 * 32 * parts);
        left + so_far + 2 * 8 + 8
    }

    fn decode_codes_bytes(&self) -> u32 {
        let Codes::Tiles { k, v } = self.codes else { return 0 };
        let (dim, dim_v) = self.dims;
        let key = k.pitch(dim) + k.scale_bytes(dim) + v.pitch(dim_v) + v.scale_bytes(dim_v);
        let stage = (self.block_n * key).next_multiple_of(128);
        let queries = self.block_m * (2 * dim * self.q_terms(k) + 4);
        (self.decode_warps() * self.stages * stage + queries + self.hand_over_bytes()).next_multiple_of(128)
    }

    /// How many float16 of q decode_codes.cu multiplies: as many as hold it, beside a factor of its column.
    fn q_terms(&self, k: TileCodes) -> u32 {
        match (self.storage, k.scales) {
            (DType::F32, _) => 3,
            (_, TileScales::Channel) => 2,
            _ => 1,
        }
    }

    const fn hopper_f32_bytes(&self) -> u32 {
        let (k, v) = (self.dims.0.div_ceil(BOX_COLUMNS), self.dims.1.div_ceil(BOX_COLUMNS));
        let (row, stages) = (2 * 2 * BOX_COLUMNS, HOPPER_F32_STAGES);
        let tiles = row * (k * self.block_m + stages * (k + v) * self.block_n);
        tiles + 4 * (self.block_m + stages * 2 * self.block_n) + 8 * 4 * stages + 2 * 4 * (2 + 2 * stages)
    }
}
