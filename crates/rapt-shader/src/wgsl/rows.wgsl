// Rows of a block, and their sums. A task is a head of k and v; its rows are the queries of the heads that share it, head by head.
// Addresses are counted in elements, modulo 2^32: that of an element is below 2^31, whatever lies between.
// Deliberately absent: which rows and keys a kernel gives to a thread.

const LOWEST: f32 = -3.40282346e38;
// Rows of a block of a window: one BLOCK_M, or several.
const WINDOW_ROWS: u32 = 64u;

// What a workgroup computes: blocks of keys lie at multiples of BLOCK_N from key 0, whatever the rows. Every row sees keys seen_from .. seen_to.
struct Block { batch: u32, kv_head: u32, first_row: u32, first_column: u32, first_key: u32, end_key: u32, seen_from: u32, seen_to: u32 }

// Four rows, one in each component, of which those up to the task's last exist.
struct Rows { exist: vec4<bool>, head: vec4<u32>, i: vec4<u32>, lo: vec4<i32>, hi: vec4<i32> }

// Keys that query i sees: lo .. hi.
fn keys_lo(p: Params, i: vec4<u32>) -> vec4<i32> { return clamp(vec4<i32>(i) + p.lo_shift, vec4<i32>(0), vec4<i32>(i32(p.kv_len))); }
fn keys_hi(p: Params, i: vec4<u32>) -> vec4<i32> { return clamp(vec4<i32>(i) + p.hi_shift, vec4<i32>(0), vec4<i32>(i32(p.kv_len))); }

// Columns first_column .. of rows first_row .. of a task.
fn block_of_rows(p: Params, task: u32, first_row: u32, first_column: u32) -> Block {
    let last_row = min(first_row + BLOCK_M, p.rows) - 1u;
    // Rows of several heads: any query may be among them.
    let is_one_head = first_row / p.q_len == last_row / p.q_len;
    let first_i = select(0u, first_row % p.q_len, is_one_head);
    let last_i = select(p.q_len - 1u, last_row % p.q_len, is_one_head);
    let first_key = u32(keys_lo(p, vec4<u32>(first_i)).x) / BLOCK_N * BLOCK_N;
    let end_key = u32(keys_hi(p, vec4<u32>(last_i)).x);
    let seen_from = u32(keys_lo(p, vec4<u32>(last_i)).x);
    let seen_to = u32(keys_hi(p, vec4<u32>(first_i)).x);
    return Block(task / p.kv_heads, task % p.kv_heads, first_row, first_column, first_key, end_key, seen_from, seen_to);
}

// That of workgroup `item`, where each has BLOCK_M rows and BLOCK_DV columns of a task. Its rows may lie behind the last: windows have blocks of 64.
fn block_of(p: Params, item: u32) -> Block {
    let run = item / p.dv_blocks;
    let rows = run / p.row_tiles;
    let first_row = (p.first_row_block + rows % p.row_blocks) * WINDOW_ROWS + run % p.row_tiles * BLOCK_M;
    return block_of_rows(p, p.first_task + rows / p.row_blocks, first_row, item % p.dv_blocks * BLOCK_DV);
}

// What four rows leave of all splits: the records of these, then their acc_o, by column.
fn four_at(p: Params, four: u32) -> u32 { return four * p.num_splits * (p.head_dim_v + 3u); }

// Whether every row of the block that exists sees keys n0 .. n0 + BLOCK_N.
fn is_seen(block: Block, n0: u32) -> bool { return n0 >= block.seen_from && n0 + BLOCK_N <= block.seen_to; }

// Rows first .. first + 4 of a block's task.
fn rows_of(p: Params, block: Block, first: u32) -> Rows { return rows_in(p, block, rows_from(first)); }
fn rows_from(first: u32) -> vec4<u32> { return vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u); }
fn rows_in(p: Params, block: Block, r: vec4<u32>) -> Rows {
    let exist = r < vec4<u32>(p.rows);
    let of_group = r / p.q_len;
    let i = r - of_group * p.q_len;
    return Rows(exist, vec4<u32>(block.kv_head * p.group_size) + of_group, i, keys_lo(p, i), keys_hi(p, i));
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

// Sums of four rows, and the kinds of what in them is not finite.
struct Sum { x: vec4<f32>, kinds: vec4<u32> }

// As bits, what is not finite in place of the sum.
fn with_kinds(x: vec4<f32>, kinds: vec4<u32>) -> vec4<u32> {
    var bits = bitcast<vec4<u32>>(x);
    if any(kinds != vec4<u32>()) {
        for (var a = 0u; a < 4u; a++) {
            if kinds[a] != 0u { bits[a] = bits_of_kind(kind_of_sum(kinds[a])); }
        }
    }
    return bits;
}

// `sum` and the sum of these bits times `factor`.
fn added(sum: Sum, bits: vec4<u32>, factor: vec4<f32>) -> Sum {
    if are_finite(bits) { return Sum(fma(bitcast<vec4<f32>>(bits), factor, sum.x), sum.kinds); }
    var whole = sum;
    for (var a = 0u; a < 4u; a++) {
        whole.x[a] = fma(finite(bits[a]), factor[a], whole.x[a]);
        whole.kinds[a] |= kind_of(bits[a]);
    }
    return whole;
}
