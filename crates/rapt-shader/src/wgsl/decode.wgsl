// The kernel for few queries: bound by how fast k and v arrive, so keys are dealt to workgroups, and `combine` folds what each found.
//
//   FlashAttention's recurrence (Dao et al. 2022, arXiv:2205.14135, algorithm 1) on each split of the keys, from row_max = lowest on:
//     for each block of 64 keys, at multiples of 64 from key 0
//       s = q·k                                            k where it lies; head_dim over 8 lanes, whose sums are added in their order
//       x = scores of s;  row_max' = max(row_max, x);  f = e^(row_max − row_max')
//       p = e^(x − row_max');  row_sum = row_sum·f + Σ p
//       acc_o = acc_o·f + Σ p·v                            v where it lies; the sum of a block apart, every fourth key, and these four sums in their order
//     partials[row, split] = row_max, row_sum, acc_o
//
// 128 threads. Columns go by pairs, of which 16-bit elements that lie side by side are one word (`column_of`). Of q·k: 16 slots of 8 lanes; a lane
// has pairs lane, lane + 8, … ($i) of keys slot, slot + 16, slot + 32, slot + 48 ($n). Of scores: thread a·64 + key has that key and the a-th
// four rows. Of p·v: 4 slices of 32 threads; a thread has pair tx of each 32 ($h) of every fourth key, 8 of them at once (two, $q, of four, $n). Rows are four in
// the components of a vector, and one or two vectors ($a); or one, a number: `Each` is either.
//
// The floor is a read of k and v. So 16 pairs of the one and 16 of the other are always on their way: those of v while s and p are computed, the next of
// each while one is multiplied. No branch stands between two loads (keys and columns past the last are those of the last, and weigh
// nothing), and whether a number is not finite is asked once for a block: then its sums are formed anew, without those. Beside memory, for each element of
// 16 bits:
//   multiply-adds                        4 or 8; of one row 1
//   integers                             1.5 to see that it is finite, 5.5 to widen it (bfloat16: 1)
//   workgroup memory                     16 bytes, a quarter of a vector for each four rows
//   barriers                             4 or 6 in a block of 64 keys
//   workgroup memory of a workgroup      10884 + 5120 for each four rows: 16004 or 21124 bytes; of one row 4388
//   registers of a thread                16 or 32 s, then sums of p·v; 16 or 32 acc_o, 32 numbers of k or v, 32 words on their way, and some 50 beside
//
// The split of the keys follows from their number alone, and the order of all sums is fixed: the bits of a row depend neither on its
// neighbours nor on strides.
// Deliberately absent: subgroups, cooperative matrices, and reads outside the operands (of a 16-bit or boolean element, outside its word).

// Columns of all lanes, and columns of values of a workgroup for each $h.
const LANES: u32 = 8u;
const SLICES: u32 = 4u;
// From the sums of one lane to those of the next: 64 keys, and one that is not used, so that lanes meet different banks.
const PITCH: u32 = 65u;
// Pairs of columns of a row of q.
const PAIRS: u32 = 128u;

// q · SCALE, by pair and its two: fours of rows.
var<workgroup> queries: array<Each, 256u * ROW_GROUPS>;
// Sums of lanes [8][64], by key; or sums by thread; or sums of slices [4][128], by column.
var<workgroup> partial: array<Each, 520>;
// Of each thread its score, then of each eighth one the greatest of eight.
var<workgroup> maxima: array<Each, 128>;
// [64]: the weights of a key · SCALE.
var<workgroup> weights: array<Each, 64u * ROW_GROUPS>;
// Of each thread, four bits: which rows attend its key.
var<workgroup> attended: array<u32, 128>;

// The numbers / SCALE of a pair for a tile, which is the `step`-th.
fn pair_for_tile(pair: vec2<u32>, step: u32) -> vec2<f32> {
    let bits = bits_of_pair(pair);
    return vec2<f32>(for_tile(bits.x, step), for_tile(bits.y, step)) * INVERSE_SCALE;
}

// Whether pairs of a tensor lie in words, all of them: these strides and this base are of elements.
fn is_in_words(base: u32, stride: vec4<u32>, columns: u32) -> bool {
    return PAIRS_IN_WORDS && stride.w == 1u && ((base | stride.x | stride.y | stride.z | columns) & 1u) == 0u;
}

// Four keys, `step` apart, none behind the last.
fn keys_from(first: u32, step: u32, end: u32) -> vec4<u32> {
    return min(vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u) * step, vec4<u32>(end - 1u));
}

// One pair of columns of four keys, of which `at` are column 0.
struct Pairs { x: vec4<u32>, y: vec4<u32> }

fn key_pairs(p: Params, in_words: bool, at: vec4<u32>, pair: u32) -> Pairs {
    let d_$e = min(column_of(pair, $eu), p.head_dim - 1u);
    if in_words {
        let word_$n = k_word(at[$n] + d_0);
        return Pairs(vec4<u32>(word_0.x, word_1.x, word_2.x, word_3.x), vec4<u32>());
    }
    let pair_$n = k_pair(at[$n] + d_0 * p.k_stride.w, at[$n] + d_1 * p.k_stride.w);
    return Pairs(vec4<u32>(pair_0.x, pair_1.x, pair_2.x, pair_3.x), vec4<u32>(pair_0.y, pair_1.y, pair_2.y, pair_3.y));
}

fn value_pairs(p: Params, in_words: bool, at: vec4<u32>, first_column: u32, pair: u32) -> Pairs {
    let c_$e = min(first_column + column_of(pair, $eu), p.head_dim_v - 1u);
    if in_words {
        let word_$n = v_word(at[$n] + c_0);
        return Pairs(vec4<u32>(word_0.x, word_1.x, word_2.x, word_3.x), vec4<u32>());
    }
    let pair_$n = v_pair(at[$n] + c_0 * p.v_stride.w, at[$n] + c_1 * p.v_stride.w);
    return Pairs(vec4<u32>(pair_0.x, pair_1.x, pair_2.x, pair_3.x), vec4<u32>(pair_0.y, pair_1.y, pair_2.y, pair_3.y));
}

// The kinds of a column of the thread's slice of keys n0 .. end, for four rows that attend them.
fn kinds_of_values(p: Params, block: Block, n0: u32, end: u32, column: u32, slice: u32, a: u32) -> vec4<u32> {
    var kinds = vec4<u32>();
    if column >= p.head_dim_v { return kinds; }
    for (var j = n0 + slice; j < end; j += SLICES) {
        let kind = kind_of(value(p, block, j, column));
        kinds |= select(vec4<u32>(), vec4<u32>(kind), flags_of(attended[a * 64u + j - n0]));
    }
    return kinds;
}

@compute @workgroup_size(128)
fn attention(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let p = given;
    let item = group.y * groups.x + group.x;
    if item >= p.items { return; }
    let split = split_of(p, item);
    let block = split.block;
    let first_column = block.first_column;
    let first_key = block.first_key;
    let end_key = block.end_key;
    let lane = thread % LANES;
    let slot = thread / LANES;
    // Of scores.
    let key_of_block = thread % 64u;
    let four = thread / 64u;
    let has_rows = four < ROW_GROUPS;
    var rows = rows_of(p, block, block.first_row + four * 4u);
    rows.exist = existing(rows.exist);
    // Of p·v.
    let tx = thread % 32u;
    let slice = thread / 32u;

    if thread == 0u { atomicStore(&not_finite, 0u); }
    workgroupBarrier();
    for (var at = thread; at < 256u * ROW_GROUPS; at += 128u) {
        let place = at / ROW_GROUPS;
        let d = column_of(place % PAIRS, place / PAIRS);
        var of_rows = rows_of(p, block, block.first_row + at % ROW_GROUPS * 4u);
        of_rows.exist = existing(of_rows.exist);
        var of_q = vec4<f32>();
        if d < p.head_dim {
            for (var a = 0u; a < 4u; a++) {
                if of_rows.exist[a] { of_q[a] = for_tile(query(p, block, of_rows, a, d), 1u); }
            }
        }
        queries[at] = each_of(of_q * SCALE);
    }
    workgroupBarrier();
    let is_q_finite = atomicLoad(&not_finite) == 0u;
    workgroupBarrier();
    var step = 1u;

    var row_max_$a = Each(LOWEST);
    var row_sum = Each();
    var acc_$a_$h_$e = Each();
    var kinds_$a_$h_$e = EachBits();
    var bad = vec4<bool>();
    var live = vec4<bool>();

    let k_in_words = is_in_words(p.k_base, p.k_stride, p.head_dim);
    let v_in_words = is_in_words(p.v_base, p.v_stride, p.head_dim_v);
    let has_second = first_column + 64u < p.head_dim_v;
    let k_at = element(p.k_base, p.k_stride, block.batch, block.kv_head, 0u, 0u);
    let v_at = element(p.v_base, p.v_stride, block.batch, block.kv_head, 0u, 0u);
    var next_k_$i = Pairs(vec4<u32>(), vec4<u32>());
    // Where there is no second: any finite number.
    var next_v_$h_$q = Pairs(vec4<u32>(), vec4<u32>());
    if first_key < end_key {
        let at = vec4<u32>(k_at) + keys_from(first_key + slot, 16u, end_key) * p.k_stride.z;
        next_k_$i = key_pairs(p, k_in_words, at, lane + $iu * LANES);
    }

    for (var n0 = first_key; n0 < end_key; n0 += BLOCK_N) {
        let end = min(n0 + BLOCK_N, end_key);
        let first_v_$q = vec4<u32>(v_at) + keys_from(n0 + slice + $qu * 4u * SLICES, SLICES, end) * p.v_stride.z;
        next_v_0_$q = value_pairs(p, v_in_words, first_v_$q, first_column, tx);
        if has_second {
            next_v_1_$q = value_pairs(p, v_in_words, first_v_$q, first_column, 32u + tx);
        }

        // s = q·k, a lane's share
        step++;
        let at_k = vec4<u32>(k_at) + keys_from(n0 + slot, 16u, end_key) * p.k_stride.z;
        var s_$a_$n = Each();
        var odd_k = 0u;
        for (var first = 0u; first * 2u < p.head_dim; first += LANES * 4u) {
            let pair_$n_$i = vec2<u32>(next_k_$i.x[$n], next_k_$i.y[$n]);
            if (first + LANES * 4u) * 2u < p.head_dim {
                next_k_$i = key_pairs(p, k_in_words, at_k, first + lane + (4u + $iu) * LANES);
            }
            odd_k = odd_of(pair_$n_$i, odd_k);
            let of_k_$n_$i = numbers_of(pair_$n_$i);
            //@ for each $i
            {
                let of_q_$a_$e = queries[(first + lane + $iu * LANES + $eu * PAIRS) * ROW_GROUPS + $au];
                s_$a_$n = fma(of_q_$a_$e, Each(of_k_$n_$i[$e]), s_$a_$n);
            }
            //@ end
        }

        if is_odd(odd_k) {
            s_$a_$n = Each();
            for (var first = 0u; first * 2u < p.head_dim; first += LANES) {
                let pairs = key_pairs(p, k_in_words, at_k, first + lane);
                let of_k_$n = pair_for_tile(vec2<u32>(pairs.x[$n], pairs.y[$n]), step);
                let of_q_$a_$e = queries[(first + lane + $eu * PAIRS) * ROW_GROUPS + $au];
                s_$a_$n = fma(of_q_$a_$e, Each(of_k_$n[$e]), s_$a_$n);
            }
        }

        // s of the thread's key: the sums of lanes, in their order
        var products = Each();
        //@ for each $a
        if $au > 0u { workgroupBarrier(); }
        partial[lane * PITCH + slot + $nu * 16u] = s_$a_$n;
        workgroupBarrier();
        if four == $au {
            for (var other = 0u; other < LANES; other++) { products += partial[other * PITCH + key_of_block]; }
        }
        //@ end

        // x = scores of s; row_max' = max(row_max, x)
        let j = n0 + key_of_block;
        var kinds = vec4<u32>();
        if has_rows && (!is_q_finite || atomicLoad(&not_finite) == step) { kinds = kinds_of_products(p, block, rows, j, 0u, p.head_dim); }
        var scores = scores_of(p, block, rows, j, four_of(products), kinds);
        scores.attends &= vec4<bool>(has_rows && j < end_key);
        let weighing = weighs(scores);
        bad |= is_bad(scores);
        live |= scores.attends;
        maxima[thread] = each_of(select(vec4<f32>(LOWEST), scores.x, weighing));
        attended[thread] = bits_of(scores.attends);
        workgroupBarrier();
        if thread % 8u == 0u {
            var most = maxima[thread];
            for (var other = 1u; other < 8u; other++) { most = max(most, maxima[thread + other]); }
            maxima[thread] = most;
        }
        workgroupBarrier();
        var top_$a = row_max_$a;
        for (var eight = 0u; eight < 8u; eight++) {
            top_$a = max(top_$a, maxima[$au * 64u + eight * 8u]);
        }

        // p = e^(x − row_max'); row_sum = row_sum·f + Σ p
        let factor_$a = each_of(exponential(four_of(row_max_$a - top_$a)));
        row_max_$a = top_$a;
        //@ for each $a
        if four == $au {
            let weight = each_of(select(vec4<f32>(), exponential(scores.x - four_of(top_$a)), weighing));
            row_sum = fma(row_sum, factor_$a, weight);
            weights[key_of_block * ROW_GROUPS + $au] = weight * SCALE;
        }
        //@ end
        workgroupBarrier();

        // acc_o = acc_o·f + Σ p·v
        var part_$a_$h_$e = Each();
        var odd_v = 0u;
        for (var j = n0 + slice; j < end; j += SLICES * 8u) {
            let pair_$q_$n_$h = vec2<u32>(next_v_$h_$q.x[$n], next_v_$h_$q.y[$n]);
            if j + SLICES * 8u < end {
                let at_$q = vec4<u32>(v_at) + keys_from(j + (8u + $qu * 4u) * SLICES, SLICES, end) * p.v_stride.z;
                next_v_0_$q = value_pairs(p, v_in_words, at_$q, first_column, tx);
                if has_second {
                    next_v_1_$q = value_pairs(p, v_in_words, at_$q, first_column, 32u + tx);
                }
            } else if n0 + BLOCK_N < end_key {
                let at = vec4<u32>(k_at) + keys_from(n0 + BLOCK_N + slot, 16u, end_key) * p.k_stride.z;
                next_k_$i = key_pairs(p, k_in_words, at, lane + $iu * LANES);
            }
            odd_v = odd_of(pair_$q_$n_$h, odd_v);
            let of_v_$q_$n_$h = numbers_of(pair_$q_$n_$h);
            //@ for each $q
            //@ for each $n
            {
                let weight_$a = weights[(j - n0 + ($qu * 4u + $nu) * SLICES) * ROW_GROUPS + $au];
                part_$a_$h_$e = fma(weight_$a, Each(of_v_$q_$n_$h[$e]), part_$a_$h_$e);
            }
            //@ end
            //@ end
        }
        if is_odd(odd_v) {
            var are_finite_values = true;
            part_$a_$h_$e = Each();
            for (var j = n0 + slice; j < end; j += SLICES) {
                let at = vec4<u32>(v_at + j * p.v_stride.z);
                let weight_$a = weights[(j - n0) * ROW_GROUPS + $au];
                let pairs_$h = value_pairs(p, v_in_words, at, first_column, $hu * 32u + tx);
                let bits_$h = bits_of_pair(vec2<u32>(pairs_$h.x.x, pairs_$h.y.x));
                are_finite_values = are_finite_values && is_finite(bits_$h.x) && is_finite(bits_$h.y);
                part_$a_$h_$e = fma(weight_$a, Each(finite(bits_$h[$e]) * INVERSE_SCALE), part_$a_$h_$e);
            }
            if !are_finite_values {
                kinds_$a_$h_$e |= each_bits_of(kinds_of_values(p, block, n0, end, first_column + column_of($hu * 32u + tx, $eu), slice, $au));
            }
        }
        acc_$a_$h_$e = fma(acc_$a_$h_$e, factor_$a, part_$a_$h_$e);
    }

    // What each four rows leave.
    workgroupBarrier();
    partial[thread] = row_sum;
    attended[thread] = bits_of(bad) | (bits_of(live) << 4u);
    workgroupBarrier();
    //@ for each $a
    let has_record_$a = block.first_row + $au * 4u < p.rows;
    if thread == $au && first_column == 0u && has_record_$a {
        var sum = Each();
        var flags = 0u;
        for (var other = 0u; other < 64u; other++) {
            sum += partial[$au * 64u + other];
            flags |= attended[$au * 64u + other];
        }
        put_record(record_of(p, split, $au), four_of(row_max_$a), four_of(sum), flags);
    }
    //@ end
    //@ for each $a
    workgroupBarrier();
    partial[slice * 128u + column_of($hu * 32u + tx, $eu)] = each_of(bitcast<vec4<f32>>(with_kinds(four_of(acc_$a_$h_$e), four_bits_of(kinds_$a_$h_$e))));
    workgroupBarrier();
    if first_column + thread < p.head_dim_v && has_record_$a {
        var sum = Sum(vec4<f32>(), vec4<u32>());
        for (var other = 0u; other < SLICES; other++) {
            sum = added(sum, bitcast<vec4<u32>>(four_of(partial[other * 128u + thread])), vec4<f32>(1.0));
        }
        partials[columns_of(p, split, $au) + first_column + thread] = with_kinds(sum.x, sum.kinds);
    }
    //@ end
}
