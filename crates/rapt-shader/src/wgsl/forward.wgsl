// The kernel for many queries: tiles of q, k and v in workgroup memory, products on registers, softmax as keys arrive.
//
//   FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithm 1) with the division at the end and not at every block, as FlashAttention-2 has
//   it (Dao 2023, arXiv:2307.08691, algorithm 1). For each block of 64 rows, and 64 columns of values for each $g:
//     row_max = lowest; row_sum = 0; acc_o = 0
//     for each block of 64 keys, from key 0 in steps of 64, whatever the rows
//       s = q·k                                            summed over head_dim, through tiles of 16 columns
//       x = scores of s;  row_max' = max(row_max, x);  f = e^(row_max − row_max')
//       p = e^(x − row_max');  row_sum = row_sum·f + Σ p
//       acc_o = acc_o·f + Σ p·v                            the sum of 64 products apart, through tiles of 32 keys
//     out = acc_o / row_sum;  lse = row_max + ln row_sum
//
// 128 threads as 8 × 16 (ty, tx). Thread (ty, tx) has rows 4·ty .. 4·ty + 4 and 32 + 4·ty .. 32 + 4·ty + 4 ($a), one in each component of
// its vectors; keys tx, tx + 16, tx + 32, tx + 48 ($n) of a block; and columns 4·tx .. 4·tx + 4 ($c) of each 64.
//
// A step of either product is 32 multiply-adds a thread on three vectors of workgroup memory: 10.7 a vector, where `generic` has 4 and 8.
//   multiply-adds of a block of keys     64·64·(head_dim + columns), of which a thread has 32·(head_dim + columns)
//   elements loaded for it               64·(2·head_dim + columns), a thread (2·head_dim + columns) / 2
//   workgroup memory                     8704 tiles + 17408 weights + 772 = 26884 bytes
//   registers of a thread                32 s, then 32 sums of p·v; 32 acc_o for each $g; 12 operands, and some 50 beside
// Rows of workgroup memory are 17 vectors long: threads that store down a column meet different banks.
//
// A line with $a, $n, $g, $c or $o (what a thread loads) stands once for each. Maxima and sums cross threads in one fixed order, and no operation crosses rows: the
// bits of a row depend neither on its neighbours nor on strides. A masked weight is 0 and adds nothing.
// Deliberately absent: subgroups, cooperative matrices, and reads outside the operands (of a 16-bit or boolean element, outside its word).

// Columns of a tile of q and k; keys of a tile of v.
const TILE: u32 = 16u;
const TILE_V: u32 = 32u;
// Vectors from one row of workgroup memory to the next: one of each 4 rows or keys, and one that is not used.
const PITCH: u32 = 17u;
// Where the tile of k begins.
const TILE_K: u32 = 272u;

// q [16][16], by column and four rows, and k likewise, by tx; or v [32][16], four columns; or maxima, sums or four results.
var<workgroup> tile: array<vec4<f32>, 544>;
// [64][16]: a key's scores, then its weights, for four rows.
var<workgroup> weights: array<vec4<f32>, 1088>;
// Of each thread, which rows attend its keys: eight bits for each $n, four for each $a of these.
var<workgroup> attended: array<u32, 128>;
// Where column 0 of a row lies in q, then in out.
var<workgroup> row_at: array<vec4<u32>, 16>;

fn block_of(p: Params, item: u32) -> Block {
    let run = item / p.dv_blocks;
    let first_row = (p.first_row_block + run % p.row_blocks) * BLOCK_M;
    return block_of_rows(p, p.first_task + run / p.row_blocks, first_row, item % p.dv_blocks * BLOCK_DV);
}

// Columns d0 .. of the block's rows, and of keys n0 ..; 0 outside. Whether a number is finite is asked when all have arrived.
fn load_queries_and_keys(p: Params, block: Block, n0: u32, d0: u32, thread: u32, step: u32) {
    let d = d0 + thread % TILE;
    let first = thread / TILE;
    let at_q_$o = row_at[first + $ou * 8u] + d * p.q_stride.w;
    let rows_$o = p.rows - min(p.rows, block.first_row + (first + $ou * 8u) * 4u);
    let at_k_$o = element(p.k_base, p.k_stride, block.batch, block.kv_head, n0 + first + $ou * 8u, d);
    let keys_$o = p.kv_len - min(p.kv_len, n0 + first + $ou * 8u);
    var of_q_$o = vec4<u32>();
    var of_k_$o = vec4<u32>();
    if d < p.head_dim {
        if $nu < rows_$o { of_q_$o[$n] = q_bits(at_q_$o[$n]); }
        if $nu * 16u < keys_$o { of_k_$o[$n] = k_bits(at_k_$o + $nu * 16u * p.k_stride.z); }
    }
    tile[thread % TILE * PITCH + first + $ou * 8u] = for_tiles(of_q_$o, step);
    tile[TILE_K + thread % TILE * PITCH + first + $ou * 8u] = for_tiles(of_k_$o, step);
}

// Columns first_column .. first_column + 64 of keys j0 ..; 0 outside.
fn load_values(p: Params, block: Block, j0: u32, first_column: u32, thread: u32, step: u32) {
    let column = first_column + thread % 16u * 4u;
    let columns = p.head_dim_v - min(p.head_dim_v, column);
    let first = thread / 16u;
    let at_$n = element(p.v_base, p.v_stride, block.batch, block.kv_head, j0 + first + $nu * 8u, column);
    var of_v_$n = vec4<u32>();
    if j0 + first + $nu * 8u < p.kv_len && $cu < columns { of_v_$n[$c] = v_bits(at_$n + $cu * p.v_stride.w); }
    tile[(first + $nu * 8u) * 16u + thread % 16u] = for_tiles(of_v_$n, step);
}

// The kinds of column c of keys j0 .. of a tile, for the thread's rows that attend them: three bits for each of eight rows.
fn kinds_of_values(p: Params, block: Block, n0: u32, j0: u32, c: u32, ty: u32) -> u32 {
    var kinds = 0u;
    if c >= p.head_dim_v { return kinds; }
    for (var j = j0; j < min(j0 + TILE_V, p.kv_len); j++) {
        let kind = kind_of(value(p, block, j, c));
        let who = attended[ty * 16u + (j - n0) % 16u] >> ((j - n0) / 16u * 8u);
        for (var row = 0u; row < 8u; row++) { kinds |= (kind * ((who >> row) & 1u)) << (row * 3u); }
    }
    return kinds;
}

// Of four rows' bits of those kinds.
fn kinds_of_rows(kinds: u32) -> vec4<u32> { return (vec4<u32>(kinds) >> vec4<u32>(0u, 3u, 6u, 9u)) & vec4<u32>(7u); }

@compute @workgroup_size(128)
fn attention(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let p = given;
    let item = group.y * groups.x + group.x;
    if item >= p.items { return; }
    let tx = thread % 16u;
    let ty = thread / 16u;
    let block = block_of(p, item);
    let rows_$a = rows_of(p, block, block.first_row + $au * 32u + ty * 4u);

    // A row's share of this thread: row_sum over its keys, acc_o and the kinds in it over its columns. row_max is that of the whole row.
    // `bad` and `live` have a bit for each of the eight rows, four for each $a.
    var row_max_$a = vec4<f32>(LOWEST);
    var row_sum_$a = vec4<f32>();
    var acc_$a_$g_$c = vec4<f32>();
    var kinds: array<u32, 8>;
    var bad = 0u;
    var live = 0u;
    var step = 0u;
    if thread == 0u { atomicStore(&not_finite, 0u); }
    if tx == 0u { row_at[ty + $au * 8u] = rows_at(p.q_base, p.q_stride, block, rows_$a); }

    // Whether scores are products · scale and nothing else, where every row sees the key.
    let is_plain = !HAS_MASK && p.has_alibi == 0u && p.softcap == 0.0 && all(rows_0.exist & rows_1.exist);

    for (var n0 = block.first_key; n0 < block.end_key; n0 += BLOCK_N) {
        // s = q·k
        var s_$a_$n = vec4<f32>();
        let first_step = step + 1u;
        for (var d0 = 0u; d0 < p.head_dim; d0 += TILE) {
            step++;
            workgroupBarrier();
            load_queries_and_keys(p, block, n0, d0, thread, step);
            workgroupBarrier();
            for (var d = 0u; d < TILE; d++) {
                let of_q_$a = tile[d * PITCH + ty + $au * 8u];
                let of_k = tile[TILE_K + d * PITCH + tx];
                s_$a_$n = fma(of_q_$a, vec4<f32>(of_k[$n]), s_$a_$n);
            }
        }
        let has_kinds = atomicLoad(&not_finite) >= first_step;
        weights[(tx + $nu * 16u) * PITCH + ty + $au * 8u] = s_$a_$n;

        // x = scores of s; row_max' = max(row_max, x)
        var attends = 0u;
        var weighing = 0u;
        var top_$a = row_max_$a;
        let is_seen_$a = all(vec4<i32>(i32(n0)) >= rows_$a.lo) && all(vec4<i32>(i32(n0 + BLOCK_N)) <= rows_$a.hi);
        let are_plain = is_plain && !has_kinds && is_seen_0 && is_seen_1;
        for (var n = 0u; n < 4u; n++) {
            let at = (tx + n * 16u) * PITCH + ty;
            let x_$a = weights[at + $au * 8u] * p.scale;
            if are_plain && are_finite(bitcast<vec4<u32>>(x_0)) && are_finite(bitcast<vec4<u32>>(x_1)) {
                weights[at + $au * 8u] = x_$a;
                top_$a = max(top_$a, x_$a);
                attends |= 255u << (n * 8u);
                weighing |= 255u << (n * 8u);
            } else {
                let j = n0 + tx + n * 16u;
                var kinds_$a = vec4<u32>();
                if has_kinds {
                    kinds_$a = kinds_of_products(p, block, rows_$a, j, 0u, p.head_dim);
                }
                let scores_$a = scores_of(p, block, rows_$a, j, weights[at + $au * 8u], kinds_$a);
                weights[at + $au * 8u] = scores_$a.x;
                top_$a = select(top_$a, max(top_$a, scores_$a.x), weighs(scores_$a));
                attends |= bits_of(scores_$a.attends) << (n * 8u + $au * 4u);
                weighing |= bits_of(weighs(scores_$a)) << (n * 8u + $au * 4u);
                bad |= bits_of(is_bad(scores_$a)) << ($au * 4u);
            }
        }
        live |= attends | (attends >> 8u) | (attends >> 16u) | (attends >> 24u);
        workgroupBarrier();
        tile[tx * PITCH + ty + $au * 8u] = top_$a;
        workgroupBarrier();
        for (var other = 0u; other < 16u; other++) {
            top_$a = max(top_$a, tile[other * PITCH + ty + $au * 8u]);
        }

        // p = e^(x − row_max'); row_sum = row_sum·f + Σ p
        var sum_$a = vec4<f32>();
        for (var n = 0u; n < 4u; n++) {
            let at = (tx + n * 16u) * PITCH + ty;
            let who = weighing >> (n * 8u);
            let weight_$a = select(vec4<f32>(), exponential(weights[at + $au * 8u] - top_$a), flags_of(who >> ($au * 4u)));
            weights[at + $au * 8u] = weight_$a;
            sum_$a += weight_$a;
        }
        let factor_$a = exponential(row_max_$a - top_$a);
        row_sum_$a = fma(row_sum_$a, factor_$a, sum_$a);
        row_max_$a = top_$a;
        attended[thread] = attends;

        // acc_o = acc_o·f + Σ p·v
        //@ for each $g
        {
            let first_column = block.first_column + $gu * 64u;
            var part_$a_$c = vec4<f32>();
            for (var j0 = n0; j0 < min(n0 + BLOCK_N, block.end_key); j0 += TILE_V) {
                step++;
                workgroupBarrier();
                load_values(p, block, j0, first_column, thread, step);
                workgroupBarrier();
                for (var j = 0u; j < TILE_V; j++) {
                    let weight_$a = weights[(j0 - n0 + j) * PITCH + ty + $au * 8u];
                    let of_v = tile[j * 16u + tx];
                    part_$a_$c = fma(weight_$a, vec4<f32>(of_v[$c]), part_$a_$c);
                }
                if atomicLoad(&not_finite) == step {
                    kinds[$gu * 4u + $cu] |= kinds_of_values(p, block, n0, j0, first_column + tx * 4u + $cu, ty);
                }
            }
            acc_$a_$g_$c = fma(acc_$a_$g_$c, factor_$a, part_$a_$c);
        }
        //@ end
    }

    // The sums of rows, in the order of tx.
    workgroupBarrier();
    tile[tx * PITCH + ty + $au * 8u] = row_sum_$a;
    attended[thread] = bad | ((live & 255u) << 8u);
    workgroupBarrier();
    row_sum_$a = vec4<f32>();
    var flags = 0u;
    for (var other = 0u; other < 16u; other++) {
        row_sum_$a += tile[other * PITCH + ty + $au * 8u];
        flags |= attended[ty * 16u + other];
    }

    // out = acc_o / row_sum, 64 columns at a time by way of `weights`, whose rows are columns now; lse = row_max + ln row_sum
    let ends_$a = ends_of(p, rows_$a, row_max_$a, row_sum_$a, flags_of(flags >> ($au * 4u)), flags_of(flags >> (8u + $au * 4u)));
    if tx == 0u { row_at[ty + $au * 8u] = rows_at(p.out_base, p.out_stride, block, rows_$a); }
    if p.has_lse != 0u && block.first_column == 0u && tx < 4u {
        let at_$a = rows_at(p.lse_base, p.lse_stride, block, rows_$a);
        if rows_$a.exist[tx] { lse[at_$a[tx]] = ends_$a.lse[tx]; }
    }
    //@ for each $g
    {
        workgroupBarrier();
        weights[(tx * 4u + $cu) * PITCH + ty + $au * 8u] = bitcast<vec4<f32>>(results(ends_$a, acc_$a_$g_$c, kinds_of_rows(kinds[$gu * 4u + $cu] >> ($au * 12u))));
        workgroupBarrier();
        let column = thread % 64u;
        let first_column = block.first_column + $gu * 64u;
        for (var row = thread / 64u; row < 64u; row += 2u) {
            if first_column + column >= p.head_dim_v || block.first_row + row >= p.rows { break; }
            let bits = bitcast<vec4<u32>>(weights[column * PITCH + row / 4u])[row % 4u];
            store_out(row_at[row / 4u][row % 4u] + (first_column + column) * p.out_stride.w, bits);
        }
    }
    //@ end
}
