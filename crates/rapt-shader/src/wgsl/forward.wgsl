// The kernel for many queries: tiles of q, k and v in workgroup memory, products on registers, softmax as keys arrive.
//
//   FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithm 1) with the division at the end and not at every block, as FlashAttention-2 has
//   it (Dao 2023, arXiv:2307.08691, algorithm 1), and with a reference, row_max, that follows the maximum only where a score is far above it: p, row_sum,
//   acc_o and lse all refer to it, whatever it is. For each block of 64 or 32 rows, and 64 columns of values for each $g:
//     row_max = lowest; row_sum = 0; acc_o = 0
//     for each block of 64 keys, from key 0 in steps of 64, whatever the rows
//       s = q·k                                            summed over head_dim, through tiles of 16 columns
//       x = scores of s
//       where max x > row_max + GROWTH                     row_max' = max x;  f = e^(row_max − row_max');  row_sum *= f;  acc_o *= f
//       p = e^(x − row_max);  row_sum += Σ p
//       acc_o += Σ p·v                                     the sum of 64 products apart, through tiles of 16 keys
//     out = acc_o / row_sum;  lse = row_max + ln row_sum
// Whether numbers are finite is asked only in a second attempt, of a block where a score or a sum of the first was not.
//
// 128 threads as 8 × 16 (ty, tx). Thread (ty, tx) has rows 4·ty .. 4·ty + 4 of each 32 ($a), one in each component of its vectors; keys tx, tx + 16,
// tx + 32, tx + 48 ($n) of a block; and columns tx, tx + 16, tx + 32, tx + 48 ($c) of each 64.
//
// Of 64 rows, a step of q·k is 32 multiply-adds a thread on three vectors of workgroup memory, one of p·v 32 for each $g on two and $g.
//   multiply-adds of a block of keys     64·64·(head_dim + columns), of which a thread has 32·(head_dim + columns)
//   elements loaded for it               64·(2·head_dim + columns), a thread (2·head_dim + columns) / 2
//   workgroup memory                     8704 tiles + 780 = 9484 bytes of 64 columns, 12800 + 780 = 13580 of 128
//   registers of a thread                32 s, then weights, and 32 sums of p·v and 32 acc_o for each $g; 16 elements on their way, 16 operands, and some 50 beside
// Of 32 rows, half of each, and as many elements: where there are few blocks, twice as many multiprocessors have one. Both give the same bits.
// What comes next to tiles is on its way while products are formed: elements outside the operands are read where the last ones lie, as their score is
// masked, their column of q is 0 or their result is not stored, so that no branch stands between loads.
// Weights are in workgroup memory for 16 keys at a time, and stay in registers until then: so the kernel runs wherever WebGPU does. An H200 has two
// workgroups of 64 rows on a multiprocessor, by their registers.
// Rows of workgroup memory have a vector that is not used: threads that store down a column meet different banks.
//
// A line with $a, $n, $g, $c, $t (columns of a tile of q·k, keys of one of p·v), $e or $o (keys, and fours of keys, that a thread loads) stands once for each. Products of a tile are
// written out, in a loop of one turn: an H200 took 22.1 ms without either, 19.7 written out, and 18.7 so (float32 4,16,4096²,128; 2026-11). Maxima and sums cross threads in one fixed order,
// and no operation crosses rows: the bits of a row depend neither on its neighbours nor on strides. A masked weight is 0 and adds nothing.
// Deliberately absent: subgroups, cooperative matrices, and reads outside the operands (of a 16-bit or boolean element, outside its word).

// Columns of a tile of q and k; keys of one of v, and of the weights that are in workgroup memory at a time.
const TILE: u32 = 16u;
// Vectors from one row of workgroup memory to the next: one of each 4 rows, or of 4 keys, and one that is not used.
const PITCH: u32 = 8u * ROW_GROUPS + 1u;
const PITCH_K: u32 = 17u;
// Where the tile of k begins, and the weights behind a tile of v.
const TILE_K: u32 = TILE * PITCH;
const WEIGHTS: u32 = TILE * 16u * COLUMN_GROUPS;
// How far a score may lie above row_max.
const GROWTH: f32 = 8.0;

// q [16][8 · ROW_GROUPS], by column and four rows, and k [16][16], by column and tx; or v [16][COLUMN_GROUPS][16], four columns, and weights
// [16][8 · ROW_GROUPS], of a key for four rows; or maxima or sums of four rows; or four results, by column.
var<workgroup> tile: array<vec4<f32>, TILE * PITCH + TILE * 16u * COLUMN_GROUPS + TILE>;
// Of each thread, which rows attend its keys: eight bits for each $n, four for each $a of these.
var<workgroup> attended: array<u32, 128>;
// Whether a score or a sum is not finite; and the block of keys, counted from 1, where a score is more than GROWTH above row_max.
var<workgroup> is_odd: atomic<u32>;
var<workgroup> grown: atomic<u32>;
// Where column 0 of a row lies in q, then in out.
var<workgroup> row_at: array<vec4<u32>, 8u * ROW_GROUPS>;

// What a thread has on its way to tiles: of one column four rows of each 32 of q, and eight keys; of two keys four columns of each 64.
struct Columns {
    q_$a: vec4<u32>,
    k_$o: vec4<u32>,
}
struct Values {
    v_$e_$g: vec4<u32>,
}

// Column 0 of the keys that a thread loads of a block: behind the last the last one, which weighs nothing.
struct Keys {
    at_$o: vec4<u32>,
}
fn keys_from(p: Params, block: Block, n0: u32, thread: u32) -> Keys {
    let base = element(p.k_base, p.k_stride, block.batch, block.kv_head, 0u, 0u);
    let last = vec4<u32>(p.kv_len - 1u);
    let first = vec4<u32>(n0 + thread / TILE) + vec4<u32>(0u, 16u, 32u, 48u);
    var keys: Keys;
    keys.at_$o = base + min(first + vec4<u32>($ou * 8u), last) * p.k_stride.z;
    return keys;
}

// Columns d0 .. of the block's rows and of these keys. Behind the last column q is 0, and a key has its last.
fn queries_and_keys(p: Params, keys: Keys, d0: u32, thread: u32) -> Columns {
    var words: Columns;
    let column = d0 + thread % TILE;
    let d = min(column, p.head_dim - 1u);
    let at_q_$a = row_at[thread / TILE + $au * 8u] + d * p.q_stride.w;
    let of_q_$a = vec4<u32>(q_bits(at_q_$a.x), q_bits(at_q_$a.y), q_bits(at_q_$a.z), q_bits(at_q_$a.w));
    words.q_$a = select(vec4<u32>(), of_q_$a, vec4<bool>(column < p.head_dim));
    let at_k_$o = keys.at_$o + d * p.k_stride.w;
    words.k_$o = vec4<u32>(k_bits(at_k_$o.x), k_bits(at_k_$o.y), k_bits(at_k_$o.z), k_bits(at_k_$o.w));
    return words;
}

fn put_queries_and_keys(words: Columns, thread: u32, step: u32, asks: bool) {
    let at_q = thread % TILE * PITCH + thread / TILE;
    let at_k = TILE_K + thread % TILE * PITCH_K + thread / TILE;
    if asks {
        tile[at_q + $au * 8u] = for_tiles(words.q_$a, step);
        tile[at_k + $ou * 8u] = for_tiles(words.k_$o, step);
    } else {
        tile[at_q + $au * 8u] = bitcast<vec4<f32>>(words.q_$a);
        tile[at_k + $ou * 8u] = bitcast<vec4<f32>>(words.k_$o);
    }
}

// The block's columns of keys j0 ..: behind the last key and the last column those.
fn values(p: Params, block: Block, j0: u32, thread: u32) -> Values {
    var words: Values;
    let column = vec4<u32>(block.first_column + thread % 16u) + vec4<u32>(0u, 16u, 32u, 48u);
    let last = vec4<u32>(p.head_dim_v - 1u);
    let columns_$g = min(column + vec4<u32>($gu * 64u), last) * p.v_stride.w;
    let j_$e = min(j0 + thread / 16u + $eu * 8u, p.kv_len - 1u);
    let at_$e_$g = columns_$g + element(p.v_base, p.v_stride, block.batch, block.kv_head, j_$e, 0u);
    words.v_$e_$g = vec4<u32>(v_bits(at_$e_$g.x), v_bits(at_$e_$g.y), v_bits(at_$e_$g.z), v_bits(at_$e_$g.w));
    return words;
}

fn put_values(words: Values, thread: u32, step: u32, asks: bool) {
    if asks {
        tile[((thread / 16u + $eu * 8u) * COLUMN_GROUPS + $gu) * 16u + thread % 16u] = for_tiles(words.v_$e_$g, step);
    } else {
        tile[((thread / 16u + $eu * 8u) * COLUMN_GROUPS + $gu) * 16u + thread % 16u] = bitcast<vec4<f32>>(words.v_$e_$g);
    }
}

// The kinds of column c of keys j0 .. of a tile, for the thread's rows that attend them: three bits for each of eight rows.
fn kinds_of_values(p: Params, block: Block, n0: u32, j0: u32, c: u32, ty: u32) -> u32 {
    var kinds = 0u;
    if c >= p.head_dim_v { return kinds; }
    for (var j = j0; j < min(j0 + TILE, p.kv_len); j++) {
        let kind = kind_of(value(p, block, j, c));
        let n = j - n0;
        let who = attended[ty * 16u + n % 16u] >> (n / 16u * 8u);
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
    if block.first_row >= p.rows { return; }
    let own_$a = min(rows_from(block.first_row + $au * 32u + ty * 4u), vec4<u32>(p.rows - 1u));
    if tx == 0u { row_at[ty + $au * 8u] = rows_at(p.q_base, p.q_stride, block, rows_in(p, block, own_$a)); }
    if thread == 0u {
        atomicStore(&not_finite, 0u);
        atomicStore(&is_odd, 0u);
        atomicStore(&grown, 0u);
    }

    // A row's share of this thread: row_sum over its keys, acc_o and the kinds in it over its columns. row_max is that of the whole row.
    // `bad` and `live` have a bit for each of its rows, four for each $a.
    var row_max_$a = vec4<f32>(LOWEST);
    var row_sum_$a = vec4<f32>();
    var acc_$a_$g_$c = vec4<f32>();
    var kinds: array<u32, 8>;
    var bad = 0u;
    var live = 0u;
    var step = 0u;

    // Whether scores are products · scale and nothing else, where every row sees the key and products are below `limit`, as bits.
    let is_plain = are_products(p, HAS_MASK) && block.first_row + BLOCK_M <= p.rows;
    let limit = product_limit(p.scale);

    workgroupBarrier();
    for (var attempt = 0u; attempt < 2u; attempt++) {
        let asks = attempt == 1u;
        row_max_$a = vec4<f32>(LOWEST);
        row_sum_$a = vec4<f32>();
        acc_$a_$g_$c = vec4<f32>();
        bad = 0u;
        live = 0u;
        var worst = vec4<u32>();
        // What comes next to tiles. Nothing is read where there are no keys.
        var next: Columns;
        if block.first_key < block.end_key {
            next = queries_and_keys(p, keys_from(p, block, block.first_key, thread), 0u, thread);
        }
        for (var n0 = block.first_key; n0 < block.end_key; n0 += BLOCK_N) {
            // s = q·k
            var s_$a_$n = vec4<f32>();
            let keys = keys_from(p, block, n0, thread);
            let first_step = step + 1u;
            for (var d0 = 0u; d0 < p.head_dim; d0 += TILE) {
                step++;
                workgroupBarrier();
                put_queries_and_keys(next, thread, step, asks);
                workgroupBarrier();
                next = queries_and_keys(p, keys, d0 + TILE, thread);
                for (var first = 0u; first < TILE; first += 16u) {
                    //@ for each $t
                    {
                        let d = first + $tu;
                        let of_q_$a = tile[d * PITCH + ty + $au * 8u];
                        let of_k = tile[TILE_K + d * PITCH_K + tx];
                        s_$a_$n = fma(of_q_$a, vec4<f32>(of_k[$n]), s_$a_$n);
                    }
                    //@ end
                }
            }
            let has_kinds = atomicLoad(&not_finite) >= first_step;
            var next_values = values(p, block, n0, thread);

            // x = scores of s, lowest where it does not weigh; top = max(row_max, x)
            var attends = 0xffffffffu;
            var weighing = 0xffffffffu;
            var top_$a = row_max_$a;
            var largest = vec4<u32>();
            largest = max(largest, bitcast<vec4<u32>>(s_$a_$n) & vec4<u32>(~SIGN_BIT));
            worst = max(worst, largest);
            if is_plain && !has_kinds && is_seen(block, n0) && all(largest < vec4<u32>(limit)) {
                s_$a_$n *= p.scale;
                top_$a = max(top_$a, s_$a_$n);
            } else {
                let rows_$a = rows_of(p, block, block.first_row + $au * 32u + ty * 4u);
                attends = 0u;
                weighing = 0u;
                for (var n = 0u; n < 4u; n++) {
                    var products_$a = vec4<f32>();
                    if n == $nu { products_$a = s_$a_$n; }
                    let j = n0 + tx + n * 16u;
                    var kinds_$a = vec4<u32>();
                    if has_kinds {
                        kinds_$a = kinds_of_products(p, block, rows_$a, j, 0u, p.head_dim);
                    }
                    let scores_$a = scores_of(p, block, rows_$a, j, products_$a, kinds_$a);
                    if n == $nu { s_$a_$n = select(vec4<f32>(LOWEST), scores_$a.x, weighs(scores_$a)); }
                    top_$a = select(top_$a, max(top_$a, scores_$a.x), weighs(scores_$a));
                    attends |= bits_of(scores_$a.attends) << (n * 8u + $au * 4u);
                    weighing |= bits_of(weighs(scores_$a)) << (n * 8u + $au * 4u);
                    bad |= bits_of(is_bad(scores_$a)) << ($au * 4u);
                }
            }
            live |= attends | (attends >> 8u) | (attends >> 16u) | (attends >> 24u);
            if any(top_$a > row_max_$a + vec4<f32>(GROWTH)) { atomicStore(&grown, n0 / BLOCK_N + 1u); }
            if workgroupUniformLoad(&grown) == n0 / BLOCK_N + 1u {
                // row_max' = max x, f = e^(row_max − row_max'), row_sum *= f, acc_o *= f, of these rows alone
                tile[tx * PITCH + ty + $au * 8u] = top_$a;
                workgroupBarrier();
                for (var other = 0u; other < 16u; other++) {
                    top_$a = max(top_$a, tile[other * PITCH + ty + $au * 8u]);
                }
                let grows_$a = top_$a > row_max_$a + vec4<f32>(GROWTH);
                let factor_$a = select(vec4<f32>(1.0), exponential(row_max_$a - top_$a), grows_$a);
                row_max_$a = select(row_max_$a, top_$a, grows_$a);
                row_sum_$a *= factor_$a;
                acc_$a_$g_$c *= factor_$a;
                workgroupBarrier();
            }

            // p = e^(x − row_max), in the place of s; row_sum += Σ p
            s_$a_$n = exponential(s_$a_$n - row_max_$a);
            if weighing != 0xffffffffu {
                s_$a_$n = select(vec4<f32>(), s_$a_$n, flags_of(weighing >> ($nu * 8u + $au * 4u)));
            }
            var sum_$a = vec4<f32>();
            sum_$a += s_$a_$n;
            row_sum_$a += sum_$a;
            attended[thread] = attends;

            // acc_o += Σ p·v
            var part_$a_$g_$c = vec4<f32>();
            for (var j0 = n0; j0 < min(n0 + BLOCK_N, block.end_key); j0 += TILE) {
                step++;
                if j0 > n0 { workgroupBarrier(); }
                put_values(next_values, thread, step, asks);
                if j0 == n0 + $nu * TILE { tile[WEIGHTS + tx * PITCH + ty + $au * 8u] = s_$a_$n; }
                workgroupBarrier();
                if j0 + TILE < min(n0 + BLOCK_N, block.end_key) {
                    next_values = values(p, block, j0 + TILE, thread);
                    // Not a value from before: it would hold registers.
                    next = Columns();
                } else {
                    next = queries_and_keys(p, keys_from(p, block, n0 + BLOCK_N, thread), 0u, thread);
                }
                for (var first = 0u; first < TILE; first += 16u) {
                    //@ for each $t
                    {
                        let j = first + $tu;
                        let weight_$a = tile[WEIGHTS + j * PITCH + ty + $au * 8u];
                        let of_v_$g = tile[(j * COLUMN_GROUPS + $gu) * 16u + tx];
                        part_$a_$g_$c = fma(weight_$a, vec4<f32>(of_v_$g[$c]), part_$a_$g_$c);
                    }
                    //@ end
                }
                if atomicLoad(&not_finite) == step {
                    kinds[$gu * 4u + $cu] |= kinds_of_values(p, block, n0, j0, block.first_column + $gu * 64u + $cu * 16u + tx, ty);
                }
            }
            acc_$a_$g_$c += part_$a_$g_$c;
        }
        if asks { break; }
        worst = max(worst, bitcast<vec4<u32>>(acc_$a_$g_$c) & vec4<u32>(~SIGN_BIT));
        if any(worst >= vec4<u32>(INFINITY_BITS)) { atomicStore(&is_odd, 1u); }
        if workgroupUniformLoad(&is_odd) == 0u { break; }
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

    // out = acc_o / row_sum, 16 columns at a time by way of `weights`, whose rows are columns now; lse = row_max + ln row_sum
    let rows_$a = rows_of(p, block, block.first_row + $au * 32u + ty * 4u);
    let ends_$a = ends_of(p, rows_$a, row_max_$a, row_sum_$a, flags_of(flags >> ($au * 4u)), flags_of(flags >> (8u + $au * 4u)));
    if tx == 0u { row_at[ty + $au * 8u] = rows_at(p.out_base, p.out_stride, block, rows_$a); }
    if p.has_lse != 0u && block.first_column == 0u && tx < 4u {
        let at_$a = rows_at(p.lse_base, p.lse_stride, block, rows_$a);
        if rows_$a.exist[tx] { lse[at_$a[tx]] = ends_$a.lse[tx]; }
    }
    //@ for each $g
    for (var c = 0u; c < 4u; c++) {
        var sums_$a = vec4<f32>();
        if c == $cu { sums_$a = acc_$a_$g_$c; }
        workgroupBarrier();
        tile[tx * PITCH + ty + $au * 8u] = bitcast<vec4<f32>>(results(ends_$a, sums_$a, kinds_of_rows(kinds[$gu * 4u + c] >> ($au * 12u))));
        workgroupBarrier();
        let column = thread % 16u;
        let first_column = block.first_column + $gu * 64u + c * 16u;
        for (var row = thread / 16u; row < BLOCK_M; row += 8u) {
            if first_column + column >= p.head_dim_v || block.first_row + row >= p.rows { break; }
            let bits = bitcast<vec4<u32>>(tile[column * PITCH + row / 4u])[row % 4u];
            store_out(row_at[row / 4u][row % 4u] + (first_column + column) * p.out_stride.w, bits);
        }
    }
    //@ end
}
