// The kernel that serves every request: any strides, sizes and options, on the ordinary units.
//
//   for each block of 64 rows (queries of the heads that share K and V) and 64 columns of values
//     for each block of 32 keys, from key 0 in steps of 32, whatever the rows
//       s = q·k over head_dim in steps of 16                   both tiles through workgroup memory
//       s -> scores; row_max' = max(row_max, s); p = e^(s − row_max'); row_sum and acc_o rescaled
//       acc_o += p·v over keys in steps of 16
//     out = acc_o / row_sum;  lse = row_max + ln row_sum
//
// 256 threads as 16 × 16 (ty, tx). Thread (ty, tx) has rows 4·ty .. 4·ty + 4, one in each component of its vectors; keys 2·tx and 2·tx + 1
// of a block, and columns 4·tx .. 4·tx + 4. Maxima and sums cross threads in workgroup memory in one fixed order, and no operation crosses
// rows: the bits of a row depend neither on its neighbours nor on strides. A masked weight is 0 and adds nothing.
// What is not finite is 0 in the tiles; the threads whose rows attend it look at it once more (`kinds_of_products`, `kinds_of_values`).
// Addresses are counted in elements, modulo 2^32: that of an element is below 2^31, whatever lies between.
// Deliberately absent: subgroups, cooperative matrices, and reads outside the operands (of a 16-bit or boolean element, outside its word).

const BLOCK_M: u32 = 64u;
const BLOCK_N: u32 = 32u;
const BLOCK_DV: u32 = 64u;
// Columns of q and k, and keys of v, that a tile has.
const TILE: u32 = 16u;
const LOWEST: f32 = -3.40282347e38;

// [16][16]: a column of q for four rows; then maxima or sums of four rows by tx; then four columns of a value.
var<workgroup> tile: array<vec4<f32>, 256>;
// [16][16]: a column of two keys.
var<workgroup> tile_k: array<vec2<f32>, 256>;
// [32][16]: the weights of a key for four rows.
var<workgroup> weights: array<vec4<f32>, 512>;
// [16][16], by tx and ty: four bits for each of the two keys, which rows attend it.
var<workgroup> attended: array<u32, 256>;
// The last tile in which a number was not finite.
var<workgroup> not_finite: atomic<u32>;

// What a workgroup computes.
struct Block { batch: u32, kv_head: u32, first_row: u32, first_column: u32, first_key: u32, end_key: u32 }

// A thread's rows, one in each component, of which the first `count` exist.
struct Rows { count: u32, exist: vec4<bool>, head: vec4<u32>, i: vec4<u32>, lo: vec4<i32>, hi: vec4<i32> }

// Keys that query i sees: lo .. hi.
fn keys_lo(i: vec4<u32>) -> vec4<i32> { return clamp(vec4<i32>(i) + p.lo_shift, vec4<i32>(0), vec4<i32>(i32(p.kv_len))); }
fn keys_hi(i: vec4<u32>) -> vec4<i32> { return clamp(vec4<i32>(i) + p.hi_shift, vec4<i32>(0), vec4<i32>(i32(p.kv_len))); }

fn block_of(item: u32) -> Block {
    let run = item / p.dv_blocks;
    let task = p.first_task + run / p.row_blocks;
    let first_row = (p.first_row_block + run % p.row_blocks) * BLOCK_M;
    let last_row = min(first_row + BLOCK_M, p.rows) - 1u;
    // Rows of several heads: any query may be among them.
    let is_one_head = first_row / p.q_len == last_row / p.q_len;
    let first_i = select(0u, first_row % p.q_len, is_one_head);
    let last_i = select(p.q_len - 1u, last_row % p.q_len, is_one_head);
    let first_key = u32(keys_lo(vec4<u32>(first_i)).x) / BLOCK_N * BLOCK_N;
    let end_key = u32(keys_hi(vec4<u32>(last_i)).x);
    let first_column = (item % p.dv_blocks) * BLOCK_DV;
    return Block(task / p.kv_heads, task % p.kv_heads, first_row, first_column, first_key, end_key);
}

fn rows_of(block: Block, ty: u32) -> Rows {
    let first = block.first_row + ty * 4u;
    let count = min(max(p.rows, first) - first, 4u);
    let r = vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u);
    let exist = r < vec4<u32>(p.rows);
    let of_group = r / p.q_len;
    let i = r - of_group * p.q_len;
    return Rows(count, exist, vec4<u32>(block.kv_head * p.group_size) + of_group, i, keys_lo(i), keys_hi(i));
}

fn element(base: u32, stride: vec4<u32>, batch: u32, head: u32, row: u32, column: u32) -> u32 {
    return base + batch * stride.x + head * stride.y + row * stride.z + column * stride.w;
}
fn query(block: Block, rows: Rows, a: u32, d: u32) -> u32 {
    return q_bits(element(p.q_base, p.q_stride, block.batch, rows.head[a], rows.i[a], d));
}
fn key(block: Block, j: u32, d: u32) -> u32 { return k_bits(element(p.k_base, p.k_stride, block.batch, block.kv_head, j, d)); }
fn value(block: Block, j: u32, c: u32) -> u32 { return v_bits(element(p.v_base, p.v_stride, block.batch, block.kv_head, j, c)); }

// The number of these bits for a tile, which is the `step`-th.
fn for_tile(bits: u32, step: u32) -> f32 {
    if kind_of(bits) != 0u { atomicStore(&not_finite, step); }
    return finite(bits);
}

// Column d0 + tx of the thread's rows, and of two keys; 0 outside.
fn load_queries_and_keys(block: Block, rows: Rows, n0: u32, d0: u32, tx: u32, ty: u32, step: u32) {
    let d = d0 + tx;
    var of_q = vec4<f32>();
    var of_k = vec2<f32>();
    if d < p.head_dim {
        for (var a = 0u; a < rows.count; a++) { of_q[a] = for_tile(query(block, rows, a, d), step); }
        let first = n0 + ty * 2u;
        for (var j = first; j < min(first + 2u, p.kv_len); j++) { of_k[j - first] = for_tile(key(block, j, d), step); }
    }
    tile[tx * 16u + ty] = of_q;
    tile_k[tx * 16u + ty] = of_k;
}

// Columns 4·tx .. of value j0 + ty; 0 outside.
fn load_values(block: Block, j0: u32, tx: u32, ty: u32, step: u32) {
    var of_v = vec4<f32>();
    let first = block.first_column + tx * 4u;
    let end = select(0u, min(first + 4u, p.head_dim_v), j0 + ty < p.kv_len);
    for (var column = first; column < end; column++) { of_v[column - first] = for_tile(value(block, j0 + ty, column), step); }
    tile[ty * 16u + tx] = of_v;
}

// The kinds of the products of the thread's rows and key j, columns d0 .. of a tile in which something is not finite.
fn kinds_of_products(block: Block, rows: Rows, j: u32, d0: u32) -> vec4<u32> {
    var kinds = vec4<u32>();
    if j >= p.kv_len { return kinds; }
    for (var d = d0; d < min(d0 + TILE, p.head_dim); d++) {
        let of_k = key(block, j, d);
        for (var a = 0u; a < rows.count; a++) { kinds[a] |= kind_of_product(query(block, rows, a, d), of_k); }
    }
    return kinds;
}

// The kinds of column c of values j0 .. of a tile, for the rows that attend them.
fn kinds_of_values(block: Block, n0: u32, j0: u32, c: u32, ty: u32) -> vec4<u32> {
    var kinds = vec4<u32>();
    for (var j = j0; j < min(j0 + TILE, p.kv_len); j++) {
        let kind = kind_of(value(block, j, c));
        let who = attended[(j - n0) / 2u * 16u + ty] >> ((j - n0) % 2u * 4u);
        kinds |= select(vec4<u32>(), vec4<u32>(kind), (vec4<u32>(who) & vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>());
    }
    return kinds;
}

// Scores of one key: `kind` is 0 where the score x is finite, and `attends` false where it is masked.
struct Scores { x: vec4<f32>, kind: vec4<u32>, attends: vec4<bool> }

// s = softcap(q·k · scale) − slope·|i + diagonal − j| + bias, of products q·k whose terms have these kinds.
fn scores_of(block: Block, rows: Rows, j: u32, products: vec4<f32>, kinds: vec4<u32>) -> Scores {
    var scores: Scores;
    scores.attends = rows.exist & (vec4<i32>(i32(j)) >= rows.lo) & (vec4<i32>(i32(j)) < rows.hi);
    scores.x = products * p.scale;
    if p.softcap != 0.0 { scores.x = p.softcap * hyperbolic_tangent(scores.x * p.inverse_softcap); }
    for (var a = 0u; a < rows.count; a++) {
        if !scores.attends[a] { continue; }
        var x = scores.x[a];
        var kind = kind_of_sum(kinds[a] | kind_of(bitcast<u32>(products[a])));
        if kind != 0u {
            kind = kind_of_product(bits_of_kind(kind), bitcast<u32>(p.scale));
            // The cap of an infinity is a number.
            if p.softcap != 0.0 && kind != IS_NAN {
                x = select(p.softcap, -p.softcap, kind == IS_NEGATIVE_INFINITY);
                kind = 0u;
            }
        }
        if p.has_alibi != 0u {
            let slope = alibi_bits(p.alibi_base + rows.head[a] * p.alibi_stride);
            let distance = f32(abs(i32(rows.i[a]) + p.diagonal - i32(j)));
            kind |= kind_of_product(slope ^ SIGN_BIT, bitcast<u32>(distance));
            x = fma(-finite(slope), distance, x);
        }
        let bias = bias_of(element(p.mask_base, p.mask_stride, block.batch, rows.head[a], rows.i[a], j));
        if bias.hides {
            scores.attends[a] = false;
            continue;
        }
        x += finite(bias.bits);
        scores.kind[a] = kind_of_sum(kind | kind_of(bias.bits) | kind_of(bitcast<u32>(x)));
        scores.x[a] = finite(bitcast<u32>(x));
    }
    return scores;
}

// Four flags as bits.
fn bits_of(flags: vec4<bool>) -> u32 {
    let bits = select(vec4<u32>(), vec4<u32>(1u, 2u, 4u, 8u), flags);
    return bits.x | bits.y | bits.z | bits.w;
}

// A row's end: what its sums are multiplied with and divided by, and its lse as bits.
struct RowEnd { is_dead: bool, is_bad: bool, factor: f32, total: f32, lse: u32 }

// `flags`: bit 0, a score of the row is NaN or +inf; bit 4, it attends a key.
fn row_end(head: u32, row_max: f32, row_sum: f32, flags: u32) -> RowEnd {
    var end = RowEnd((flags & 16u) == 0u, (flags & 1u) != 0u, 1.0, row_sum, NAN_BITS);
    var top = row_max;
    if p.has_sinks != 0u {
        let sink = sinks_bits(p.sinks_base + head * p.sinks_stride);
        let kind = kind_of(sink);
        end.is_bad = end.is_bad || (kind & (IS_NAN | IS_POSITIVE_INFINITY)) != 0u;
        if kind == 0u {
            top = max(row_max, finite(sink));
            let shares = exponential(vec4<f32>(row_max - top, finite(sink) - top, 0.0, 0.0));
            end.factor = shares.x;
            end.total = fma(row_sum, shares.x, shares.y);
        }
    }
    if end.is_dead || (end.total == 0.0 && !end.is_bad) {
        end.lse = INFINITY_BITS | SIGN_BIT;
    } else if !end.is_bad {
        end.lse = bitcast<u32>(top + logarithm(vec4<f32>(end.total)).x);
    }
    // Every score is −inf: 0 / 0.
    end.is_bad = end.is_bad || end.total == 0.0;
    return end;
}

// An element of out as bits, of a sum that these kinds of values are in.
fn normalised(end: RowEnd, sum: f32, kinds: u32) -> u32 {
    if end.is_dead { return 0u; }
    if end.is_bad { return NAN_BITS; }
    if kinds != 0u { return bits_of_kind(kind_of_sum(kinds)); }
    return bitcast<u32>(sum * end.factor / end.total);
}

@compute @workgroup_size(256)
fn attention(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let item = group.y * groups.x + group.x;
    if item >= p.items { return; }
    let tx = thread % 16u;
    let ty = thread / 16u;
    let block = block_of(item);
    let rows = rows_of(block, ty);
    let first_column = block.first_column + tx * 4u;
    let columns = min(max(p.head_dim_v, first_column) - first_column, 4u);

    // A row's share of this thread: row_sum over its keys, acc_o and the kinds in it over its columns. row_max is that of the whole row.
    var row_max = vec4<f32>(LOWEST);
    var row_sum = vec4<f32>();
    var is_bad = vec4<bool>();
    var is_live = vec4<bool>();
    var acc_0 = vec4<f32>();
    var acc_1 = vec4<f32>();
    var acc_2 = vec4<f32>();
    var acc_3 = vec4<f32>();
    var kinds: array<vec4<u32>, 4>;
    var step = 0u;
    if thread == 0u { atomicStore(&not_finite, 0u); }

    for (var n0 = block.first_key; n0 < block.end_key; n0 += BLOCK_N) {
        // s = q·k: sums of 16 products, and of these.
        var s_0 = vec4<f32>();
        var s_1 = vec4<f32>();
        var kinds_0 = vec4<u32>();
        var kinds_1 = vec4<u32>();
        for (var d0 = 0u; d0 < p.head_dim; d0 += TILE) {
            step++;
            workgroupBarrier();
            load_queries_and_keys(block, rows, n0, d0, tx, ty, step);
            workgroupBarrier();
            var part_0 = vec4<f32>();
            var part_1 = vec4<f32>();
            for (var d = 0u; d < min(TILE, p.head_dim - d0); d++) {
                let of_q = tile[d * 16u + ty];
                let of_k = tile_k[d * 16u + tx];
                part_0 = fma(of_q, vec4<f32>(of_k.x), part_0);
                part_1 = fma(of_q, vec4<f32>(of_k.y), part_1);
            }
            s_0 += part_0;
            s_1 += part_1;
            if atomicLoad(&not_finite) == step {
                kinds_0 |= kinds_of_products(block, rows, n0 + tx * 2u, d0);
                kinds_1 |= kinds_of_products(block, rows, n0 + tx * 2u + 1u, d0);
            }
        }

        // row_max' = max(row_max, s)
        let scores_0 = scores_of(block, rows, n0 + tx * 2u, s_0, kinds_0);
        let scores_1 = scores_of(block, rows, n0 + tx * 2u + 1u, s_1, kinds_1);
        let weighs_0 = scores_0.attends & (scores_0.kind == vec4<u32>());
        let weighs_1 = scores_1.attends & (scores_1.kind == vec4<u32>());
        var top = max(select(row_max, max(row_max, scores_0.x), weighs_0), select(row_max, max(row_max, scores_1.x), weighs_1));
        workgroupBarrier();
        tile[tx * 16u + ty] = top;
        workgroupBarrier();
        for (var other = 0u; other < 16u; other++) { top = max(top, tile[other * 16u + ty]); }

        // p = e^(s − row_max')
        let factor = exponential(row_max - top);
        let p_0 = select(vec4<f32>(), exponential(scores_0.x - top), weighs_0);
        let p_1 = select(vec4<f32>(), exponential(scores_1.x - top), weighs_1);
        row_max = top;
        row_sum = fma(row_sum, factor, p_0 + p_1);
        acc_0 *= factor;
        acc_1 *= factor;
        acc_2 *= factor;
        acc_3 *= factor;
        weights[tx * 32u + ty] = p_0;
        weights[tx * 32u + 16u + ty] = p_1;
        attended[tx * 16u + ty] = bits_of(scores_0.attends) | (bits_of(scores_1.attends) << 4u);
        let bad = vec4<u32>(IS_NAN | IS_POSITIVE_INFINITY);
        is_bad |= (scores_0.attends & ((scores_0.kind & bad) != vec4<u32>())) | (scores_1.attends & ((scores_1.kind & bad) != vec4<u32>()));
        is_live |= scores_0.attends | scores_1.attends;

        // acc_o += p·v
        for (var j0 = n0; j0 < min(n0 + BLOCK_N, block.end_key); j0 += TILE) {
            step++;
            workgroupBarrier();
            load_values(block, j0, tx, ty, step);
            workgroupBarrier();
            var part_0 = vec4<f32>();
            var part_1 = vec4<f32>();
            var part_2 = vec4<f32>();
            var part_3 = vec4<f32>();
            for (var j = 0u; j < min(TILE, block.end_key - j0); j++) {
                let weight = weights[(j0 - n0 + j) * 16u + ty];
                let of_v = tile[j * 16u + tx];
                part_0 = fma(weight, vec4<f32>(of_v.x), part_0);
                part_1 = fma(weight, vec4<f32>(of_v.y), part_1);
                part_2 = fma(weight, vec4<f32>(of_v.z), part_2);
                part_3 = fma(weight, vec4<f32>(of_v.w), part_3);
            }
            acc_0 += part_0;
            acc_1 += part_1;
            acc_2 += part_2;
            acc_3 += part_3;
            if atomicLoad(&not_finite) == step {
                for (var c = 0u; c < columns; c++) { kinds[c] |= kinds_of_values(block, n0, j0, first_column + c, ty); }
            }
        }
    }

    // The sums of rows, in the order of tx.
    workgroupBarrier();
    tile[tx * 16u + ty] = row_sum;
    attended[tx * 16u + ty] = bits_of(is_bad) | (bits_of(is_live) << 4u);
    workgroupBarrier();
    row_sum = vec4<f32>();
    var flags = 0u;
    for (var other = 0u; other < 16u; other++) {
        row_sum += tile[other * 16u + ty];
        flags |= attended[other * 16u + ty];
    }

    // out = acc_o / row_sum;  lse = row_max + ln row_sum
    var acc_o = array<vec4<f32>, 4>(acc_0, acc_1, acc_2, acc_3);
    for (var a = 0u; a < rows.count; a++) {
        let end = row_end(rows.head[a], row_max[a], row_sum[a], (flags >> a) & 17u);
        for (var c = 0u; c < columns; c++) {
            let at = element(p.out_base, p.out_stride, block.batch, rows.head[a], rows.i[a], first_column + c);
            store_out(at, normalised(end, acc_o[c][a], kinds[c][a]));
        }
        if p.has_lse != 0u && block.first_column == 0u && tx == 0u {
            lse[element(p.lse_base, p.lse_stride, block.batch, rows.head[a], rows.i[a], 0u)] = end.lse;
        }
    }
}
