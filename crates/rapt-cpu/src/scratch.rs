//! Where things lie in a thread's scratch memory, and how long decode's partial rows are.
//!
//! ```text
//! forward   q o row_max row_sum odd_queries    tiles of queries along the lanes      odd_keys k_factors v_biases v_inverses o_factors   of codes as pairs
//!                p bias rows   one tile's      k_panel v_panel   packed
//! int8      as forward, and besides numbers row_factors key_sums key_factors value_factors
//! decode    q                     rows along head_dim                   p bias        one chunk's     k_panel           gathered
//!           code_q factors points codes   where it multiplies codes
//!           q_sums natural weights p_sums sums natural_sums   where it multiplies them as pairs, or as quads, with starts and units
//! ```

/// Offsets in elements of the accumulation dtype; each part starts at a multiple of 16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Scratch {
    /// Forward: `[tiles][q_lanes][queries]`. Decode: `[rows][head_dim_padded]`.
    pub(crate) q: usize,
    /// `[tiles][head_dim_v_padded][queries]`.
    pub(crate) o: usize,
    /// `[tiles][queries]` each.
    pub(crate) row_max: usize,
    pub(crate) row_sum: usize,
    /// Forward, of codes as pairs: `[block_n]` factors of K's keys, what V's add to scores and the inverses of V's, `[head_dim_v]` factors
    /// of the output; 0 where there are none.
    pub(crate) k_factors: usize,
    pub(crate) v_biases: usize,
    pub(crate) v_inverses: usize,
    pub(crate) o_factors: usize,
    /// Scores, then probabilities. Forward: `[block_n][queries]`. Decode: `[rows][block_n]`.
    pub(crate) p: usize,
    /// Forward, where products are formed tile by tile: three of p, from one to the next, and where weights begin in each that do not go over scores.
    pub(crate) p_len: usize,
    pub(crate) p_weights: usize,
    /// Forward, of numbers in parts: `[tiles][queries]` and `[block_n]` flags of rows whose scores are computed again; else unused.
    pub(crate) odd_queries: usize,
    pub(crate) odd_keys: usize,
    /// Forward, of numbers in parts: `[head_dim_v_padded][queries]`, what one block of keys adds to `o`.
    pub(crate) o_block: usize,
    /// Forward: lanes of a row of Q.
    pub(crate) q_lanes: usize,
    /// Forward: `[block_n][queries]`, with a mask. Decode: `[block_n]`.
    pub(crate) bias: usize,
    /// `[queries][max(q_lanes, head_dim, head_dim_v)_padded]`.
    pub(crate) rows: usize,
    /// Forward: `[block_n][head_dim]`, where packed. Decode: `[panel_keys][max(head_dim, head_dim_v)]` of the storage dtype, for
    /// K and V in turn.
    pub(crate) k_panel: usize,
    /// Forward: `[block_n][head_dim_v]`, where packed.
    pub(crate) v_panel: usize,
    /// Decode, where it multiplies codes: q with the factors of its channels, factors and zero points of [`factors_len`], and
    /// `[panel_keys][max(head_dim, head_dim_v)]` gathered codes.
    pub(crate) code_q: usize,
    pub(crate) factors: usize,
    pub(crate) points: usize,
    pub(crate) codes: usize,
    pub(crate) int8: Int8Scratch,
    /// Decode, where it multiplies codes as pairs, whose rows are whole spans (`kernels/code_pairs`): sums of lanes of q, two planes
    /// of one span, two planes of weights of [`CODE_KEYS`] keys, sums of lanes of weights, and what becomes of `o`: in the order of value vectors,
    /// and one row in the order of elements.
    pub(crate) q_sums: usize,
    pub(crate) natural: usize,
    pub(crate) weights: usize,
    pub(crate) p_sums: usize,
    pub(crate) sums: usize,
    pub(crate) natural_sums: usize,
    /// Decode, where it multiplies codes as quads: what sums begin with, and units of queries or weights. There `code_q` and `weights` are digits.
    pub(crate) starts: usize,
    pub(crate) units: usize,
    /// All of it.
    pub(crate) len: usize,
    pub(crate) head_dim_padded: usize,
    pub(crate) head_dim_v_padded: usize,
}

/// What int8 has besides what forward has: there q, K, V and the weights are quads of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Int8Scratch {
    /// Quads of a row of q.
    pub(crate) q_len: usize,
    /// `[head_dim_padded][queries]`: a tile of q before it is rounded.
    pub(crate) numbers: usize,
    /// `[tiles][queries]`: what makes scores of a row's products.
    pub(crate) row_factors: usize,
    /// `[block_n]` each: of a block's keys.
    pub(crate) key_sums: usize,
    pub(crate) key_factors: usize,
    /// `[head_dim_v_padded]`.
    pub(crate) value_factors: usize,
}

/// Sizes that forward's scratch memory follows from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForwardSizes {
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
    /// Tiles of an item.
    pub(crate) tiles: usize,
    /// Queries of a tile.
    pub(crate) queries: usize,
    pub(crate) block_n: usize,
    pub(crate) has_mask: bool,
    pub(crate) pack_k: bool,
    pub(crate) pack_v: bool,
    /// Parts of a number where products are formed tile by tile: K, V and weights are whole tiles, and V has room for a second block.
    pub(crate) tiled: Option<usize>,
    pub(crate) pairs: FactorsOfPairs,
}

/// Which factors forward keeps beside codes that are multiplied as pairs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FactorsOfPairs {
    /// Of the keys of K, and of those of V.
    pub(crate) of_k: bool,
    pub(crate) of_v: bool,
    pub(crate) of_output: bool,
}

/// Sizes that decode's scratch memory follows from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodeSizes {
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
    pub(crate) rows: usize,
    pub(crate) block_n: usize,
    /// Most keys that are gathered at a time.
    pub(crate) panel_keys: usize,
    /// Whether K or V are codes that are multiplied as they are, and whether as pairs, or as quads.
    pub(crate) multiplies_codes: bool,
    pub(crate) multiplies_pairs: bool,
    pub(crate) multiplies_quads: bool,
}

/// Digits of a number in fixed point, where decode multiplies codes as quads of bytes.
pub(crate) const DIGITS: usize = 3;

/// Decode of quads: keys of a block of the second product, whose weights are fixed point against the largest of them.
pub(crate) const BLOCK: usize = 128;

/// Sets of lanes of a span that may be of different groups.
pub(crate) const SETS: usize = 2;

/// Decode: keys of a block of the second product where K or V are codes.
pub(crate) const CODE_KEYS: usize = 32;

/// Factors that decode keeps at a time: one for each key of a chunk, each channel, or each vector of the keys of a panel.
const fn factors_len(sizes: &DecodeSizes) -> usize {
    let dim = if sizes.head_dim > sizes.head_dim_v { sizes.head_dim } else { sizes.head_dim_v };
    // Vectors of eight lanes at least.
    let of_vectors = sizes.panel_keys * dim.div_ceil(8);
    let most = if of_vectors > dim { of_vectors } else { dim };
    if most > sizes.block_n { most } else { sizes.block_n }
}

/// Parts one after another.
#[derive(Default)]
struct Parts {
    len: usize,
}

impl Parts {
    fn next(&mut self, size: usize) -> usize {
        let at = self.len;
        self.len += size.next_multiple_of(16);
        at
    }

    /// As [`Parts::next`] where there is such a part, which is not the first; else 0.
    fn next_if(&mut self, is_there: bool, size: usize) -> usize {
        if is_there { self.next(size) } else { 0 }
    }
}

impl Scratch {
    pub(crate) fn forward(sizes: &ForwardSizes) -> Scratch {
        let ForwardSizes { head_dim, head_dim_v, tiles, queries, mut block_n, has_mask, pack_k, pack_v, tiled, pairs } =
            *sizes;
        // Transposes work on whole vectors of at most 16.
        let (head_dim_padded, head_dim_v_padded) = (head_dim.next_multiple_of(16), head_dim_v.next_multiple_of(16));
        let (mut k_dim, mut v_dim, mut q_lanes) = (head_dim, head_dim_v, head_dim_padded);
        let (mut p_weights, mut p_len) = (0, 0);
        if let Some(of_number) = tiled {
            block_n = block_n.next_multiple_of(32);
            // Of tiles, a lane is two numbers in one element, of each part: so much is room for two blocks, and more than K's one.
            (k_dim, v_dim) = (of_number * head_dim.next_multiple_of(32), of_number * head_dim_v_padded);
            q_lanes = of_number * head_dim.div_ceil(2).next_multiple_of(16);
            // Two parts of a pair of weights go over two scores.
            p_weights = if of_number > 2 { block_n * queries } else { 0 };
            p_len = p_weights + block_n * queries * of_number.max(2) / 2;
        }
        let of_parts = tiled.is_some_and(|of_number| of_number > 1);
        let rows = q_lanes.max(head_dim_padded).max(head_dim_v_padded);
        let mut parts = Parts::default();
        Scratch {
            q: parts.next(tiles * q_lanes * queries),
            o: parts.next(tiles * head_dim_v_padded * queries),
            row_max: parts.next(tiles * queries),
            row_sum: parts.next(tiles * queries),
            k_factors: parts.next_if(pairs.of_k, block_n),
            v_biases: parts.next_if(pairs.of_v, block_n),
            v_inverses: parts.next_if(pairs.of_v, block_n),
            o_factors: parts.next_if(pairs.of_output, head_dim_v_padded),
            odd_queries: parts.next_if(of_parts, tiles * queries),
            odd_keys: parts.next_if(of_parts, block_n),
            o_block: parts.next_if(of_parts, head_dim_v_padded * queries),
            p: parts.next(if p_len > 0 { 3 * p_len } else { block_n * queries }),
            p_len,
            p_weights,
            q_lanes,
            bias: parts.next(if has_mask { block_n * queries } else { 0 }),
            rows: parts.next(queries * rows),
            k_panel: parts.next(if pack_k { block_n * k_dim } else { 0 }),
            v_panel: parts.next(if pack_v { block_n * v_dim } else { 0 }),
            len: parts.len,
            head_dim_padded,
            head_dim_v_padded,
            ..Scratch::default()
        }
    }

    pub(crate) fn int8(sizes: &ForwardSizes) -> Scratch {
        let ForwardSizes { head_dim, head_dim_v, tiles, queries, block_n, has_mask, .. } = *sizes;
        let (head_dim_padded, head_dim_v_padded) = (head_dim.next_multiple_of(16), head_dim_v.next_multiple_of(16));
        let q_len = head_dim.div_ceil(4);
        let mut parts = Parts::default();
        Scratch {
            q: parts.next(tiles * q_len * queries),
            o: parts.next(tiles * head_dim_v_padded * queries),
            row_max: parts.next(tiles * queries),
            row_sum: parts.next(tiles * queries),
            p: parts.next(block_n * queries),
            bias: parts.next(if has_mask { block_n * queries } else { 0 }),
            rows: parts.next(queries * head_dim_padded.max(head_dim_v_padded)),
            k_panel: parts.next(block_n * q_len),
            v_panel: parts.next(block_n.div_ceil(4) * head_dim_v),
            int8: Int8Scratch {
                q_len,
                numbers: parts.next(head_dim_padded * queries),
                row_factors: parts.next(tiles * queries),
                key_sums: parts.next(block_n),
                key_factors: parts.next(block_n),
                value_factors: parts.next(head_dim_v_padded),
            },
            len: parts.len,
            head_dim_padded,
            head_dim_v_padded,
            ..Scratch::default()
        }
    }

    pub(crate) fn decode(sizes: &DecodeSizes) -> Scratch {
        let DecodeSizes { head_dim, head_dim_v, rows, block_n, panel_keys, .. } = *sizes;
        let DecodeSizes { multiplies_codes, multiplies_pairs, multiplies_quads, .. } = *sizes;
        let (head_dim_padded, panel) = (head_dim.next_multiple_of(16), panel_keys * head_dim.max(head_dim_v));
        let of_codes = |size| if multiplies_codes { size } else { 0 };
        let of_pairs = |size| if multiplies_pairs { size } else { 0 };
        let of_quads = |size| if multiplies_quads { size } else { 0 };
        let of_either = |size| if multiplies_pairs || multiplies_quads { size } else { 0 };
        // Rows of whole spans, of which one has 64 elements at least, and a lane for each group of 16.
        let row = head_dim.max(head_dim_v).next_multiple_of(128);
        let (spans, lanes_of_groups) = (row / 64, (row / 16).next_multiple_of(16));
        // Of quads 4 vectors a plane of a span and digit.
        let code_q = if multiplies_pairs { row } else { head_dim_padded }.max(of_quads(spans * 4 * DIGITS * 16));
        let gathered = if multiplies_quads { BLOCK * row } else { panel_keys * row };
        // Of quads a byte for each key of a block and digit.
        let weights = of_pairs(CODE_KEYS * lanes_of_groups).max(of_quads(DIGITS * BLOCK / 4));
        let mut parts = Parts::default();
        Scratch {
            q: parts.next(rows * head_dim_padded),
            p: parts.next(rows * block_n),
            bias: parts.next(block_n),
            k_panel: parts.next(panel),
            code_q: parts.next(of_codes(rows * code_q)),
            factors: parts.next(of_codes(factors_len(sizes))),
            points: parts.next(of_codes(factors_len(sizes))),
            codes: parts.next(of_codes(if of_either(1) > 0 { gathered } else { panel }.div_ceil(4))),
            q_sums: parts.next(of_pairs(rows * row / 4)),
            natural: parts.next(of_pairs(128).max(of_quads(row))),
            weights: parts.next(rows * weights),
            p_sums: parts.next(of_either(rows * 16)),
            sums: parts.next(of_either(rows * row)),
            natural_sums: parts.next(of_either(row)),
            starts: parts.next(of_quads(rows * spans * SETS * DIGITS * 16)),
            units: parts.next(of_quads(rows)),
            len: parts.len,
            head_dim_padded,
            ..Scratch::default()
        }
    }
}

/// Elements of one partial row of decode: o, then the maximum and the sum.
pub(crate) fn partial_len(head_dim_v: usize) -> usize {
    (head_dim_v + 2).next_multiple_of(16)
}
