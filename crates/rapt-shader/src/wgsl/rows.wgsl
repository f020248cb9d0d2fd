// Rows of a block, and how one ends. A task is a head of k and v; its rows are the queries of the heads that share it, head by head.
// Addresses are counted in elements, modulo 2^32: that of an element is below 2^31, whatever lies between.
// Deliberately absent: which rows and keys a kernel gives to a thread.

const LOWEST: f32 = -3.40282347e38;

// What a workgroup computes: blocks of keys lie at multiples of BLOCK_N from key 0, whatever the rows.
struct Block { batch: u32, kv_head: u32, first_row: u32, first_column: u32, first_key: u32, end_key: u32 }

// Four rows, one in each component, of which those up to the task's last exist.
struct Rows { exist: vec4<bool>, head: vec4<u32>, i: vec4<u32>, lo: vec4<i32>, hi: vec4<i32> }

// Keys that query i sees: lo .. hi.
fn keys_lo(i: vec4<u32>) -> vec4<i32> { return clamp(vec4<i32>(i) + p.lo_shift, vec4<i32>(0), vec4<i32>(i32(p.kv_len))); }
fn keys_hi(i: vec4<u32>) -> vec4<i32> { return clamp(vec4<i32>(i) + p.hi_shift, vec4<i32>(0), vec4<i32>(i32(p.kv_len))); }

// Columns first_column .. of rows first_row .. of a task.
fn block_of_rows(task: u32, first_row: u32, first_column: u32) -> Block {
    let last_row = min(first_row + BLOCK_M, p.rows) - 1u;
    // Rows of several heads: any query may be among them.
    let is_one_head = first_row / p.q_len == last_row / p.q_len;
    let first_i = select(0u, first_row % p.q_len, is_one_head);
    let last_i = select(p.q_len - 1u, last_row % p.q_len, is_one_head);
    let first_key = u32(keys_lo(vec4<u32>(first_i)).x) / BLOCK_N * BLOCK_N;
    let end_key = u32(keys_hi(vec4<u32>(last_i)).x);
    return Block(task / p.kv_heads, task % p.kv_heads, first_row, first_column, first_key, end_key);
}

// Rows first .. first + 4 of a block's task.
fn rows_of(block: Block, first: u32) -> Rows {
    let r = vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u);
    let exist = r < vec4<u32>(p.rows);
    let of_group = r / p.q_len;
    let i = r - of_group * p.q_len;
    return Rows(exist, vec4<u32>(block.kv_head * p.group_size) + of_group, i, keys_lo(i), keys_hi(i));
}

fn element(base: u32, stride: vec4<u32>, batch: u32, head: u32, row: u32, column: u32) -> u32 {
    return base + batch * stride.x + head * stride.y + row * stride.z + column * stride.w;
}

// Column 0 of four rows of q or out.
fn rows_at(base: u32, stride: vec4<u32>, block: Block, rows: Rows) -> vec4<u32> {
    return vec4<u32>(base + block.batch * stride.x) + rows.head * stride.y + rows.i * stride.z;
}

// Four flags as bits.
fn bits_of(flags: vec4<bool>) -> u32 {
    let bits = select(vec4<u32>(), vec4<u32>(1u, 2u, 4u, 8u), flags);
    return bits.x | bits.y | bits.z | bits.w;
}
fn flags_of(bits: u32) -> vec4<bool> { return (vec4<u32>(bits) & vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>(); }

// How four rows end: what their sums are multiplied with and divided by, and their lse as bits.
struct Ends { is_dead: vec4<bool>, is_bad: vec4<bool>, factor: vec4<f32>, total: vec4<f32>, lse: vec4<u32> }

// `has_bad`: a score of the row is NaN or +inf; `is_live`: it attends a key.
fn ends_of(rows: Rows, row_max: vec4<f32>, row_sum: vec4<f32>, has_bad: vec4<bool>, is_live: vec4<bool>) -> Ends {
    var is_bad = has_bad;
    var factor = vec4<f32>(1.0);
    var total = row_sum;
    var top = row_max;
    if p.has_sinks != 0u {
        for (var a = 0u; a < 4u; a++) {
            if !rows.exist[a] { continue; }
            let bits = sinks_bits(p.sinks_base + rows.head[a] * p.sinks_stride);
            let kind = kind_of(bits);
            is_bad[a] = is_bad[a] || (kind & (IS_NAN | IS_POSITIVE_INFINITY)) != 0u;
            // A sink of −inf has no share.
            if kind == 0u {
                let sink = finite(bits);
                top[a] = max(row_max[a], sink);
                let shares = exponential(vec4<f32>(row_max[a] - top[a], sink - top[a], 0.0, 0.0));
                factor[a] = shares.x;
                total[a] = fma(row_sum[a], shares.x, shares.y);
            }
        }
    }
    let is_empty = total == vec4<f32>();
    let is_dead = !is_live;
    var lse = select(bitcast<vec4<u32>>(top + logarithm(total)), vec4<u32>(NAN_BITS), is_bad);
    lse = select(lse, vec4<u32>(INFINITY_BITS | SIGN_BIT), is_dead | (is_empty & !is_bad));
    // Every score is −inf: 0 / 0.
    return Ends(is_dead, is_bad | is_empty, factor, total, lse);
}

// Sums of four rows as bits; `kinds`: of what in them is not finite, which stands in their place.
fn with_kinds(x: vec4<f32>, kinds: vec4<u32>) -> vec4<u32> {
    var bits = bitcast<vec4<u32>>(x);
    if any(kinds != vec4<u32>()) {
        for (var a = 0u; a < 4u; a++) {
            if kinds[a] != 0u { bits[a] = bits_of_kind(kind_of_sum(kinds[a])); }
        }
    }
    return bits;
}

// Elements of out, one of each row, as bits; `kinds`: of the values in these sums.
fn results(ends: Ends, sums: vec4<f32>, kinds: vec4<u32>) -> vec4<u32> {
    let bits = with_kinds(sums * ends.factor / ends.total, kinds);
    return select(select(bits, vec4<u32>(NAN_BITS), ends.is_bad), vec4<u32>(), ends.is_dead);
}
