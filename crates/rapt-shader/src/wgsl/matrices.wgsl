// The kernel on cooperative matrices, for many queries ($w), or for few and a part of the keys ($s): products of tiles by a subgroup, which sums them in
// float32. Numbers of tiles are float16 (halves.wgsl), or float32 where a device has those (floats.wgsl).
//
//   FlashAttention-2 (Dao 2023, arXiv:2307.08691, algorithm 1), whose reference moves only where a maximum grows by more than 2^8:
//     row_max = lowest; row_sum = 0; acc_o = 0
//     for each block of BLOCK_N keys, at multiples of it from key 0
//       s = q·k                                            by matrices; in workgroup memory, since a matrix has no elements in WGSL
//       x = scores of s;  if max x > row_max + 8 ln 2:  f = e^(row_max − max x);  row_max = max x;  row_sum, acc_o *= f
//       p = 2^SHIFT·e^(x − row_max);  row_sum += Σ p
//       acc_o += rounded(p)·v                              by matrices
//     out = acc_o / row_sum;  lse = row_max + ln (row_sum / 2^SHIFT)                         2^SHIFT is ONE
//     of a part of the keys: partials[row, split] = row_max, row_sum / 2^SHIFT, acc_o / 2^SHIFT, which `combine` folds
//
// What divides is the sum of weights before they are rounded.
// Its own rows alone decide whether a reference moves. acc_o passes through workgroup memory for that, and in other blocks stays in matrices.
//
// THREADS threads, of which a thread has four rows (4·four ..) and every LANES-th key of a block for the scores. Subgroups stand in rows of SUBGROUP_COLUMNS: each has
// $a tiles of rows, $n tiles of keys, and $n tiles of each BLOCK_N columns of values ($h).
//
// Of a block of keys, for each score (64 rows, 32 keys, 128 columns of float16, 2 × 2 subgroups), in bytes of workgroup memory:
//   4 + 4 s stored and read, 2 + 4 p stored and read, 8 k, 8 v, 8 tiles of k and v stored: 38, for 512 floating-point operations
// Tiles of q stay in matrices. Of k and v a thread has what comes next in registers: without that an H100 waited for memory most of
// the time (2026-11). Rows of workgroup memory are longer by 8 elements of float16, 4 of float32: matrices meet different banks.
//
// Numbers of k and v that are not finite are rare. So a first attempt does not ask for them: if there is one, a product or a sum of values is not finite either
// (a matrix multiplies and adds as IEEE 754 does), and a second attempt has 0 in their place and looks where they were. Bits of finite results are the same.
//
// A line with $a, $n, $h, $r and $k (rounds in which q is loaded, and tiles of columns of one), $j (tiles of keys), $i, $o or $l (what a thread loads, and scores) stands once for each. No operation crosses rows: the bits
// of a row depend neither on its neighbours nor on strides.
// Deliberately absent: a head_dim beyond DEPTH.

// 8 ln 2.
const GROWTH: f32 = 5.54517744;

// Keys that all threads load at once, LOADED columns each.
const K_ROWS: u32 = THREADS * LOADED / DEPTH;
const V_ROWS: u32 = THREADS * LOADED / BLOCK_DV;
const FOURS: u32 = BLOCK_M / 4u;
const LANES: u32 = THREADS / FOURS;
// How many maxima there is room for: of four lanes.
const SHARES: u32 = FOURS * 4u;

// q by row, ROUND columns of it; then k or v by key.
var<workgroup> tile: array<Numbers, BLOCK_N * PITCH>;
// By key, four rows: s; or by column acc_o; or of each thread sums, then flags.
var<workgroup> s_tile: array<vec4<f32>, BLOCK_N * PITCH_S>;
// By key, four rows.
var<workgroup> weights: array<Numbers, BLOCK_N * PITCH_P>;
// Maxima of threads, THREADS / SHARES of them in one place.
var<workgroup> shares: array<vec4<f32>, SHARES>;
// Where column 0 of a row lies in q, then in out.
var<workgroup> row_at: array<vec4<u32>, FOURS>;
// Whether a maximum of the block grew: 0, or one of these; of the first block there is nothing before.
var<workgroup> grown: atomic<u32>;
const GREW: u32 = 1u;
const GREW_FIRST: u32 = 2u;
// Whether the first attempt found a number that is not finite.
var<workgroup> is_odd: atomic<u32>;
// Blocks of values that are not finite: from the first key to the end.
var<workgroup> bad_first: atomic<u32>;
var<workgroup> bad_end: atomic<u32>;

// Columns first .. first + ROUND of the block's rows of q; 0 outside.
fn load_queries(p: Params, block: Block, first: u32, thread: u32) {
    let d = first + thread % (ROUND / 4u) * 4u;
    let columns = p.head_dim - min(p.head_dim, d);
    for (var row = thread / (ROUND / 4u); row < BLOCK_M; row += THREADS * 4u / ROUND) {
        var words: Four;
        if block.first_row + row < p.rows {
            words = q_four(row_at[row / 4u][row % 4u] + d * p.q_stride.w, p.q_stride.w, columns);
        }
        if are_odd(exponents_of(words)) { atomicStore(&not_finite, 1u); }
        tile[row * PITCH_Q + (d - first) / 4u] = numbers(finite_four(words));
    }
}

// Whether a tensor's rows are read LOADED elements at a time.
fn by_loads(base: u32, stride: vec4<u32>, columns: u32) -> bool {
    return stride.w == 1u && columns % LOADED == 0u && columns != 0u && ((base | stride.x | stride.y | stride.z) & ALIGNMENT) == 0u;
}

// LOADED columns of a key, and of a value, which lie at `at` in row 0: behind the last row that, which weighs nothing.
fn key_load(p: Params, at: u32, j: u32) -> vec4<u32> { return k_load(at + min(j, p.kv_len - 1u) * p.k_stride.z); }
fn value_load(p: Params, at: u32, j: u32) -> vec4<u32> { return v_load(at + min(j, p.kv_len - 1u) * p.v_stride.z); }

// Keys n0 .. n0 + BLOCK_N, wherever their elements lie; 0 outside.
fn load_keys(p: Params, block: Block, n0: u32, thread: u32) -> bool {
    var exponents: Four;
    let d = thread % (DEPTH / 4u) * 4u;
    let columns = p.head_dim - min(p.head_dim, d);
    for (var j = thread / (DEPTH / 4u); j < BLOCK_N; j += THREADS * 4u / DEPTH) {
        var words: Four;
        if n0 + j < p.kv_len {
            words = k_four(element(p.k_base, p.k_stride, block.batch, block.kv_head, n0 + j, d), p.k_stride.w, columns);
        }
        exponents |= exponents_of(words);
        tile[j * PITCH + d / 4u] = numbers(finite_four(words));
    }
    return are_odd(exponents);
}

// Columns first_column .. of values n0 .. n0 + BLOCK_N, wherever their elements lie; 0 outside.
fn load_values(p: Params, block: Block, n0: u32, thread: u32) -> bool {
    var exponents: Four;
    let c = thread % (BLOCK_DV / 4u) * 4u;
    let columns = p.head_dim_v - min(p.head_dim_v, block.first_column + c);
    for (var j = thread / (BLOCK_DV / 4u); j < BLOCK_N; j += THREADS * 4u / BLOCK_DV) {
        var words: Four;
        if n0 + j < p.kv_len {
            words = v_four(element(p.v_base, p.v_stride, block.batch, block.kv_head, n0 + j, block.first_column + c), p.v_stride.w, columns);
        }
        exponents |= exponents_of(words);
        tile[j * PITCH + c / 4u] = numbers(finite_four(words));
    }
    return are_odd(exponents);
}

// Twice the bits of a number without its sign: so much and more where it is not finite.
const TWICE_INFINITY: u32 = 0xff000000u;
fn twice(x: vec4<f32>) -> vec4<u32> { return bitcast<vec4<u32>>(x) << vec4<u32>(1u); }

// How far scores of products lie above row_max, in one rounding wherever it stands.
fn distance_of(p: Params, products: vec4<f32>, row_max: vec4<f32>) -> vec4<f32> { return fma(products, vec4<f32>(p.scale), -row_max); }

// A thread's weights of a block of keys: their sum, the largest score, which rows have a score that is bad, or attend a key, and `twice` the largest product.
struct Weighed { sum: vec4<f32>, top: vec4<f32>, bad: vec4<bool>, live: vec4<bool>, largest: vec4<u32> }

// Where `is_simple`, as where all rows see the block.
fn weigh(p: Params, block: Block, rows: Rows, n0: u32, row_max: vec4<f32>, four: u32, lane: u32, has_kinds: bool, is_simple: bool) -> Weighed {
    var weighed = Weighed(vec4<f32>(), row_max, vec4<bool>(), vec4<bool>(), vec4<u32>());
    for (var at = lane; at < BLOCK_N; at += LANES) {
        var kinds = vec4<u32>();
        if has_kinds { kinds = kinds_of_products(p, block, rows, n0 + at, 0u, p.head_dim); }
        let products = s_tile[at * PITCH_S + four];
        let scores = scores_of(p, block, rows, n0 + at, products, kinds);
        let weighing = weighs(scores);
        let distance = select(scores.x - row_max, distance_of(p, products, row_max), vec4<bool>(is_simple));
        let weight = select(vec4<f32>(), weights_of(distance), weighing);
        weighed.top = select(weighed.top, max(weighed.top, scores.x), weighing);
        weighed.sum += weight;
        weights[at * PITCH_P + four] = rounded(weight);
        weighed.bad |= is_bad(scores);
        weighed.live |= scores.attends;
        weighed.largest = max(weighed.largest, twice(products));
    }
    return weighed;
}

@compute @workgroup_size(THREADS)
fn attention(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    let p = given;
    let item = group.y * groups.x + group.x;
    if item >= p.items { return; }
    //@ for each $w
    let block = block_of(p, item);
    //@ end
    //@ for each $s
    let split = split_of(p, item);
    let block = split.block;
    //@ end
    let four = thread % FOURS;
    let lane = thread / FOURS;
    let rows = rows_of(p, block, block.first_row + four * 4u);
    // Of the subgroup's matrices the first row, and the first key or column of BLOCK_N.
    let first_m = subgroup / SUBGROUP_COLUMNS * ROWS_OF_SUBGROUP;
    let first_n = subgroup % SUBGROUP_COLUMNS * KEYS_OF_SUBGROUP;

    if thread == 0u {
        atomicStore(&not_finite, 0u);
        atomicStore(&is_odd, 0u);
        atomicStore(&bad_first, block.end_key);
        atomicStore(&bad_end, 0u);
    }
    // What the thread loads of k and v at a time: LOADED columns of every so many keys, from these places in row 0. Behind the last column its own are loaded, of which
    // k meets zeros of q, and v has sums that are not stored.
    let k_by_loads = by_loads(p.k_base, p.k_stride, p.head_dim);
    let v_by_loads = by_loads(p.v_base, p.v_stride, p.head_dim_v);
    let k_row = thread / (DEPTH / LOADED);
    let k_column = thread % (DEPTH / LOADED) * LOADED;
    let v_row = thread / (BLOCK_DV / LOADED);
    let v_column = thread % (BLOCK_DV / LOADED) * LOADED;
    let k_at = element(p.k_base, p.k_stride, block.batch, block.kv_head, 0u, min(k_column, p.head_dim - LOADED));
    let v_at = element(p.v_base, p.v_stride, block.batch, block.kv_head, 0u, min(block.first_column + v_column, p.head_dim_v - LOADED));
    // Those of the next block are on their way while one is multiplied.
    var k_words_$i = vec4<u32>();
    var v_words_$o = vec4<u32>();
    if block.first_key < block.end_key {
        if k_by_loads { k_words_$i = key_load(p, k_at, block.first_key + k_row + $iu * K_ROWS); }
        if v_by_loads { v_words_$o = value_load(p, v_at, block.first_key + v_row + $ou * V_ROWS); }
    }
    if lane == 0u { row_at[four] = rows_at(p.q_base, p.q_stride, block, rows); }
    workgroupBarrier();
    // Asked before the barrier behind which a key may not be.
    var is_q_finite = true;
    //@ for each $r
    load_queries(p, block, $ru * ROUND, thread);
    workgroupBarrier();
    let q_$a_$r_$k = coopLoadT<MatrixA>(&tile[(first_m + $au * TILE) * PITCH_Q + $ku * TILE / 4u], PITCH_Q);
    is_q_finite = atomicLoad(&not_finite) == 0u;
    workgroupBarrier();
    //@ end
    // Scores of finite numbers are finite, where their sums are.
    let is_simple = !HAS_MASK && p.softcap == 0.0 && p.has_alibi == 0u && abs(p.scale) < 1e24;

    // A row's share of this thread: row_sum over its keys.
    var row_max = vec4<f32>(LOWEST);
    var row_sum = vec4<f32>();
    var acc_$a_$h_$n = MatrixC();
    var bad = vec4<bool>();
    var live = vec4<bool>();
    var step = 1u;

    for (var attempt = 0u; attempt < 2u; attempt++) {
        let asks = attempt == 1u;
        var largest = vec4<u32>();
        row_max = vec4<f32>(LOWEST);
        row_sum = vec4<f32>();
        acc_$a_$h_$n = MatrixC();
        bad = vec4<bool>();
        live = vec4<bool>();

        for (var n0 = block.first_key; n0 < block.end_key; n0 += BLOCK_N) {
            // The tile of k.
            step++;
            var has_odd = false;
            if k_by_loads {
                if asks {
                    var exponents: Four;
                    exponents |= exponents_of_load(k_words_$i);
                    has_odd = are_odd(exponents);
                    put((k_row + $iu * K_ROWS) * PITCH + k_column / 4u, finite_load(k_words_$i));
                } else {
                    put((k_row + $iu * K_ROWS) * PITCH + k_column / 4u, k_words_$i);
                }
                k_words_$i = key_load(p, k_at, n0 + BLOCK_N + k_row + $iu * K_ROWS);
            } else {
                has_odd = load_keys(p, block, n0, thread);
            }
            if has_odd { atomicStore(&not_finite, step); }
            if thread == 0u { atomicStore(&grown, 0u); }
            workgroupBarrier();

            // s = q·k
            var s_$a_$n = MatrixC();
            //@ for each $r
            //@ for each $k
            {
                let of_k_$n = coopLoad<MatrixB>(&tile[(first_n + $nu * TILE) * PITCH + ($ru * ROUND + $ku * TILE) / 4u], PITCH);
                s_$a_$n = coopMultiplyAdd(q_$a_$r_$k, of_k_$n, s_$a_$n);
            }
            //@ end
            //@ end
            coopStore(s_$a_$n, &s_tile[(first_n + $nu * TILE) * PITCH_S + (first_m + $au * TILE) / 4u], PITCH_S);
            workgroupBarrier();
            let has_kinds = !is_q_finite || atomicLoad(&not_finite) == step;

            // The tile of v.
            has_odd = false;
            if v_by_loads {
                if asks {
                    var exponents: Four;
                    exponents |= exponents_of_load(v_words_$o);
                    has_odd = are_odd(exponents);
                    put((v_row + $ou * V_ROWS) * PITCH + v_column / 4u, finite_load(v_words_$o));
                } else {
                    put((v_row + $ou * V_ROWS) * PITCH + v_column / 4u, v_words_$o);
                }
                v_words_$o = value_load(p, v_at, n0 + BLOCK_N + v_row + $ou * V_ROWS);
            } else {
                has_odd = load_values(p, block, n0, thread);
            }
            if has_odd {
                atomicMin(&bad_first, n0);
                atomicMax(&bad_end, n0 + BLOCK_N);
            }

            // x = scores of s; p = 2^SHIFT·e^(x − row_max)
            var sum = vec4<f32>();
            var top = row_max;
            var is_plain = is_simple && is_seen(block, n0) && !has_kinds;
            if is_plain && asks && !HAS_FINITE_SUMS {
                is_plain = is_plain && are_finite(bitcast<vec4<u32>>(s_tile[(lane + $lu * LANES) * PITCH_S + four] * p.scale));
            }
            if is_plain {
                // The scores of all keys are products times scale.
                //@ for each $l
                {
                    let products = s_tile[(lane + $lu * LANES) * PITCH_S + four];
                    let x = products * p.scale;
                    let weight = weights_of(distance_of(p, products, row_max));
                    top = max(top, x);
                    sum += weight;
                    weights[(lane + $lu * LANES) * PITCH_P + four] = rounded(weight);
                    largest = max(largest, twice(x));
                }
                //@ end
                live = vec4<bool>(true);
            } else {
                let weighed = weigh(p, block, rows, n0, row_max, four, lane, has_kinds, is_simple);
                sum = weighed.sum;
                top = weighed.top;
                bad |= weighed.bad;
                live |= weighed.live;
                largest = max(largest, weighed.largest);
            }
            if any(top - row_max > vec4<f32>(GROWTH)) { atomicStore(&grown, select(GREW, GREW_FIRST, n0 == block.first_key)); }
            let growth = workgroupUniformLoad(&grown);
            if growth != 0u {
                // row_max = max x, p once more, and acc_o *= f where it grew
                for (var turn = 0u; turn < THREADS / SHARES; turn++) {
                    if thread / SHARES == turn {
                        if turn > 0u { top = max(top, shares[thread % SHARES]); }
                        shares[thread % SHARES] = top;
                    }
                    workgroupBarrier();
                }
                for (var other = 0u; other < 4u; other++) { top = max(top, shares[other * FOURS + four]); }
                let grows = top - row_max > vec4<f32>(GROWTH);
                let factor = select(vec4<f32>(1.0), factor_of(row_max - top), grows);
                row_max = select(row_max, top, grows);
                row_sum *= factor;
                if is_plain {
                    sum = vec4<f32>();
                    for (var at = lane; at < BLOCK_N; at += LANES) {
                        let weight = weights_of(distance_of(p, s_tile[at * PITCH_S + four], row_max));
                        sum += weight;
                        weights[at * PITCH_P + four] = rounded(weight);
                    }
                } else {
                    sum = weigh(p, block, rows, n0, row_max, four, lane, has_kinds, is_simple).sum;
                }
                workgroupBarrier();
                if growth == GREW {
                    //@ for each $h
                    coopStore(acc_$a_$h_$n, &s_tile[(first_n + $nu * TILE) * PITCH_S + (first_m + $au * TILE) / 4u], PITCH_S);
                    workgroupBarrier();
                    for (var at = lane; at < BLOCK_N; at += LANES) { s_tile[at * PITCH_S + four] *= factor; }
                    workgroupBarrier();
                    acc_$a_$h_$n = coopLoad<MatrixC>(&s_tile[(first_n + $nu * TILE) * PITCH_S + (first_m + $au * TILE) / 4u], PITCH_S);
                    workgroupBarrier();
                    //@ end
                }
            }
            row_sum += sum;

            // acc_o += p·v
            //@ for each $j
            {
                let of_p_$a = coopLoad<MatrixA>(&weights[$ju * TILE * PITCH_P + (first_m + $au * TILE) / 4u], PITCH_P);
                let of_v_$h_$n = coopLoadT<MatrixB>(&tile[$ju * TILE * PITCH + ($hu * BLOCK_N + first_n + $nu * TILE) / 4u], PITCH);
                acc_$a_$h_$n = coopMultiplyAdd(of_p_$a, of_v_$h_$n, acc_$a_$h_$n);
            }
            //@ end
            workgroupBarrier();
        }
        if asks { break; }
        var shows = any(largest >= vec4<u32>(TWICE_INFINITY));
        //@ for each $h
        workgroupBarrier();
        coopStore(acc_$a_$h_$n, &s_tile[(first_n + $nu * TILE) * PITCH_S + (first_m + $au * TILE) / 4u], PITCH_S);
        workgroupBarrier();
        for (var at = lane; at < BLOCK_N; at += LANES) { shows = shows || !are_finite(bitcast<vec4<u32>>(s_tile[at * PITCH_S + four])); }
        //@ end
        if shows { atomicStore(&is_odd, 1u); }
        if workgroupUniformLoad(&is_odd) == 0u { break; }
        if k_by_loads { k_words_$i = key_load(p, k_at, block.first_key + k_row + $iu * K_ROWS); }
        if v_by_loads { v_words_$o = value_load(p, v_at, block.first_key + v_row + $ou * V_ROWS); }
    }

    // The sums of rows, in the order of lanes.
    workgroupBarrier();
    s_tile[thread] = row_sum;
    workgroupBarrier();
    row_sum = vec4<f32>();
    for (var other = 0u; other < LANES; other++) { row_sum += s_tile[other * FOURS + four]; }
    workgroupBarrier();
    s_tile[thread] = bitcast<vec4<f32>>(vec4<u32>(bits_of(bad) | (bits_of(live) << 4u)));
    workgroupBarrier();
    var flags = 0u;
    for (var other = 0u; other < LANES; other++) { flags |= bitcast<vec4<u32>>(s_tile[other * FOURS + four]).x; }

    let first_bad = atomicLoad(&bad_first);
    let end_bad = atomicLoad(&bad_end);
    //@ for each $s
    let record = record_of(p, split, four);
    let columns = columns_of(p, split, four);
    let has_record = block.first_row + four * 4u < p.rows;
    if lane == 0u && block.first_column == 0u && has_record {
        put_record(record, row_max, row_sum / ONE, flags);
    }
    //@ for each $h
    workgroupBarrier();
    coopStore(acc_$a_$h_$n, &s_tile[(first_n + $nu * TILE) * PITCH_S + (first_m + $au * TILE) / 4u], PITCH_S);
    workgroupBarrier();
    for (var at = lane; at < BLOCK_N; at += LANES) {
        let column = block.first_column + $hu * BLOCK_N + at;
        if !has_record || column >= p.head_dim_v { break; }
        let kinds = kinds_of_attended(p, block, rows, first_bad, end_bad, column);
        partials[columns + column] = with_kinds(s_tile[at * PITCH_S + four] / ONE, kinds);
    }
    //@ end
    //@ end
    //@ for each $w
    // out = acc_o / row_sum, BLOCK_N columns at a time by way of `s_tile`; lse = row_max + ln row_sum
    var ends = ends_of(p, rows, row_max, row_sum / ONE, flags_of(flags), flags_of(flags >> 4u));
    ends.total *= ONE;
    if lane == 0u { row_at[four] = rows_at(p.out_base, p.out_stride, block, rows); }
    if p.has_lse != 0u && block.first_column == 0u && lane < 4u {
        let at = rows_at(p.lse_base, p.lse_stride, block, rows);
        if rows.exist[lane] { lse[at[lane]] = ends.lse[lane]; }
    }
    //@ for each $h
    {
        workgroupBarrier();
        coopStore(acc_$a_$h_$n, &s_tile[(first_n + $nu * TILE) * PITCH_S + (first_m + $au * TILE) / 4u], PITCH_S);
        workgroupBarrier();
        let first_column = block.first_column + $hu * BLOCK_N;
        for (var at = lane; at < BLOCK_N; at += LANES) {
            let kinds = kinds_of_attended(p, block, rows, first_bad, end_bad, first_column + at);
            s_tile[at * PITCH_S + four] = bitcast<vec4<f32>>(results(ends, s_tile[at * PITCH_S + four], kinds));
        }
        workgroupBarrier();
        let column = thread % BLOCK_N;
        for (var row = thread / BLOCK_N; row < BLOCK_M; row += THREADS / BLOCK_N) {
            if first_column + column >= p.head_dim_v || block.first_row + row >= p.rows { break; }
            let bits = bitcast<vec4<u32>>(s_tile[column * PITCH_S + row / 4u])[row % 4u];
            store_out(row_at[row / 4u][row % 4u] + (first_column + column) * p.out_stride.w, bits);
        }
    }
    //@ end
    //@ end
}
