// Elements of q, k and v, and scores: the one place that reads masks.
// What is not finite is 0 in tiles; the threads whose rows attend it look at it once more (`kinds_of_products`).
// Deliberately absent: where a kernel keeps its tiles.

// The last tile in which a number was not finite.
var<workgroup> not_finite: atomic<u32>;

// Far below the largest number.
const LARGE: f32 = 1e38;

fn query(p: Params, block: Block, rows: Rows, a: u32, d: u32) -> u32 {
    return q_bits(element(p.q_base, p.q_stride, block.batch, rows.head[a], rows.i[a], d));
}
fn key(p: Params, block: Block, j: u32, d: u32) -> u32 { return k_bits(element(p.k_base, p.k_stride, block.batch, block.kv_head, j, d)); }
fn value(p: Params, block: Block, j: u32, c: u32) -> u32 { return v_bits(element(p.v_base, p.v_stride, block.batch, block.kv_head, j, c)); }

// The number of these bits for a tile, which is the `step`-th.
fn for_tile(bits: u32, step: u32) -> f32 {
    if !is_finite(bits) { atomicStore(&not_finite, step); }
    return finite(bits);
}

fn for_tiles(bits: vec4<u32>, step: u32) -> vec4<f32> {
    if are_finite(bits) { return bitcast<vec4<f32>>(bits); }
    atomicStore(&not_finite, step);
    return vec4<f32>(finite(bits.x), finite(bits.y), finite(bits.z), finite(bits.w));
}

// The kinds of the products of four rows and key j, columns d0 .. d1.
fn kinds_of_products(p: Params, block: Block, rows: Rows, j: u32, d0: u32, d1: u32) -> vec4<u32> {
    var kinds = vec4<u32>();
    if j >= p.kv_len { return kinds; }
    for (var d = d0; d < d1; d++) {
        let of_k = key(p, block, j, d);
        for (var a = 0u; a < 4u; a++) {
            if rows.exist[a] { kinds[a] |= kind_of_product(query(p, block, rows, a, d), of_k); }
        }
    }
    return kinds;
}

// Scores of one key: `kind` is 0 where the score x is finite, and `attends` false where it is masked.
struct Scores { x: vec4<f32>, kind: vec4<u32>, attends: vec4<bool> }

// x as it is rounded. Without it a driver may form a product and the difference that takes it in one step, at one place of a text and not at another: and
// the bits of a row would depend on which of them it comes by. has_lse is 0 or 1, which the driver does not know.
fn as_rounded(p: Params, x: vec4<f32>) -> vec4<f32> { return bitcast<vec4<f32>>(bitcast<vec4<u32>>(x) | vec4<u32>(p.has_lse >> 1u)); }

// s = softcap(q·k · scale) − slope·|i + diagonal − j| + bias, of products q·k whose terms have these kinds.
fn scores_of(p: Params, block: Block, rows: Rows, j: u32, products: vec4<f32>, kinds: vec4<u32>) -> Scores {
    let attends = rows.exist & (vec4<i32>(i32(j)) >= rows.lo) & (vec4<i32>(i32(j)) < rows.hi);
    var scores = Scores(as_rounded(p, products * p.scale), vec4<u32>(), attends);
    if p.softcap != 0.0 { scores.x = as_rounded(p, p.softcap * hyperbolic_tangent(scores.x * p.inverse_softcap)); }
    if any(kinds != vec4<u32>()) || !are_finite(bitcast<vec4<u32>>(products)) {
        for (var a = 0u; a < 4u; a++) {
            var kind = kind_of_sum(kinds[a] | kind_of(bitcast<u32>(products[a])));
            if kind == 0u { continue; }
            kind = kind_of_product(bits_of_kind(kind), bitcast<u32>(p.scale));
            // The cap of an infinity is a number.
            if p.softcap != 0.0 && kind != IS_NAN {
                scores.x[a] = select(p.softcap, -p.softcap, kind == IS_NEGATIVE_INFINITY);
                kind = 0u;
            }
            scores.kind[a] = kind;
        }
    }
    if p.has_alibi != 0u {
        for (var a = 0u; a < 4u; a++) {
            if !scores.attends[a] { continue; }
            let slope = alibi_bits(p, p.alibi_base + rows.head[a] * p.alibi_stride);
            let distance = f32(abs(i32(rows.i[a]) + p.diagonal - i32(j)));
            scores.kind[a] |= kind_of_product(slope ^ SIGN_BIT, bitcast<u32>(distance));
            scores.x[a] = fma(-finite(slope), distance, scores.x[a]);
        }
    }
    if HAS_MASK {
        for (var a = 0u; a < 4u; a++) {
            if !scores.attends[a] { continue; }
            let bias = bias_of(element(p.mask_base, p.mask_stride, block.batch, rows.head[a], rows.i[a], j));
            scores.attends[a] = !bias.hides;
            scores.kind[a] |= kind_of(bias.bits);
            scores.x[a] += finite(bias.bits);
        }
    }
    let bits = bitcast<vec4<u32>>(scores.x);
    if any(scores.kind != vec4<u32>()) || !are_finite(bits) {
        for (var a = 0u; a < 4u; a++) {
            scores.kind[a] = kind_of_sum(scores.kind[a] | kind_of(bits[a]));
            scores.x[a] = finite(bits[a]);
        }
    }
    return scores;
}

// Of attended keys, those whose scores are numbers weigh.
fn weighs(scores: Scores) -> vec4<bool> { return scores.attends & (scores.kind == vec4<u32>()); }
fn is_bad(scores: Scores) -> vec4<bool> {
    return scores.attends & ((scores.kind & vec4<u32>(IS_NAN | IS_POSITIVE_INFINITY)) != vec4<u32>());
}

// Whether scores of keys that a row sees are products · scale and nothing else, and below which bits products stay finite by it.
fn are_products(p: Params, has_mask: bool) -> bool { return !has_mask && p.has_alibi == 0u && p.softcap == 0.0 && is_finite(bitcast<u32>(p.scale)); }
fn product_limit(scale: f32) -> u32 { return bitcast<u32>(LARGE / max(abs(scale), 1.0)); }

// The kinds of column c of keys first .. end, for four rows that attend them. What is rare stands in a loop of one turn, which a processor passes by.
fn kinds_of_attended(p: Params, block: Block, rows: Rows, first: u32, end: u32, c: u32) -> vec4<u32> {
    var kinds = vec4<u32>();
    if c >= p.head_dim_v { return kinds; }
    for (var j = first; j < min(end, block.end_key); j++) {
        let kind = kind_of(value(p, block, j, c));
        for (var is_odd = kind != 0u; is_odd; is_odd = false) {
            kinds |= select(vec4<u32>(), vec4<u32>(kind), scores_of(p, block, rows, j, vec4<f32>(), vec4<u32>()).attends);
        }
    }
    return kinds;
}
