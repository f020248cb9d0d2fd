// The kernel for few queries: bound by how fast k and v arrive, so keys are dealt to workgroups, and `combine` folds what each found.
//
//   FlashAttention's recurrence (Dao et al. 2022, arXiv:2205.14135, algorithm 1) on each split of the keys, from row_max = lowest on:
//     for each block of 64 keys, at multiples of 64 from key 0
//       s = q·k                                            k where it lies; head_dim over 8 lanes, whose sums are added in their order
//       x = scores of s;  row_max' = max(row_max, x);  f = e^(row_max − row_max')
//       p = e^(x − row_max');  row_sum = row_sum·f + Σ p
//       acc_o = acc_o·f + Σ p·v                            v where it lies; every fourth key, and these four sums in their order
//     partials[row, split] = row_max, row_sum, acc_o
//
// 128 threads. Of q·k: 16 slots of 8 lanes; a lane has columns 2·lane, 2·lane + 1, 16 + 2·lane, … of keys slot, slot + 16, slot + 32, slot + 48
// ($n). Of scores: thread a·64 + key has that key and the a-th four rows. Of p·v: 4 slices of 32 threads; a thread has columns 2·tx, 2·tx + 1 ($e) of
// each 64 ($h) of every fourth key. Rows are four in the components of a vector, and one or two vectors ($a).
//
// Each element of k and v is read once for 4 or 8 rows, two of 16 bits as one word where they lie in one:
//   multiply-adds of an element          4 or 8
//   workgroup memory                     9348 + 4608 for each four rows: 13956 or 18564 bytes
//   registers of a thread                16 or 32 s, 16 or 32 acc_o, 8 elements, and some 50 beside
//
// The split of the keys follows from their number alone, and the order of all sums is fixed: the bits of a row depend neither on its
// neighbours nor on strides.
// Deliberately absent: subgroups, cooperative matrices, and reads outside the operands (of a 16-bit or boolean element, outside its word).

// Columns of all lanes, and columns of values of a workgroup for each $h.
const LANES: u32 = 8u;
const SLICES: u32 = 4u;
// From the sums of one lane to those of the next: 64 keys, and one that is not used, so that lanes meet different banks.
const PITCH: u32 = 65u;

// q, by column: fours of rows.
var<workgroup> queries: array<vec4<f32>, 256u * ROW_GROUPS>;
// Sums of lanes [8][64], by key; or maxima and sums by thread; or sums of slices [4][128], by column.
var<workgroup> partial: array<vec4<f32>, 520>;
// [64]: the weights of a key.
var<workgroup> weights: array<vec4<f32>, 64u * ROW_GROUPS>;
// Of each thread, four bits: which rows attend its key.
var<workgroup> attended: array<u32, 128>;

// Columns d and d + 1 of a key, of which `at` is the first; 0 outside.
fn key_pair(p: Params, at: u32, d: u32, step: u32) -> vec2<f32> {
    if d + 1u < p.head_dim {
        let bits = k_two(at, p.k_stride.w);
        return vec2<f32>(for_tile(bits.x, step), for_tile(bits.y, step));
    }
    return vec2<f32>(for_tile(k_bits(at), step), 0.0);
}

// Bits of two columns of a value, from `column` on; 0 outside.
fn value_pair(p: Params, at: u32, column: u32) -> vec2<u32> {
    if column + 1u < p.head_dim_v { return v_two(at, p.v_stride.w); }
    if column < p.head_dim_v { return vec2<u32>(v_bits(at), 0u); }
    return vec2<u32>();
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
    let split = item / p.dv_blocks % p.num_splits;
    let tile = item / p.dv_blocks / p.num_splits;
    let task = tile / p.row_tiles;
    let first_column = item % p.dv_blocks * BLOCK_DV;
    let block = block_of_rows(p, p.first_task + task, tile % p.row_tiles * BLOCK_M, first_column);
    let first_key = max(block.first_key, split * p.split_keys);
    let end_key = min(block.end_key, (split + 1u) * p.split_keys);
    let lane = thread % LANES;
    let slot = thread / LANES;
    // Of scores.
    let key_of_block = thread % 64u;
    let four = thread / 64u;
    let has_rows = four < ROW_GROUPS;
    let rows = rows_of(p, block, block.first_row + four * 4u);
    // Of p·v.
    let tx = thread % 32u;
    let slice = thread / 32u;

    if thread == 0u { atomicStore(&not_finite, 0u); }
    workgroupBarrier();
    for (var at = thread; at < 256u * ROW_GROUPS; at += 128u) {
        let d = at / ROW_GROUPS;
        let of_rows = rows_of(p, block, block.first_row + at % ROW_GROUPS * 4u);
        var of_q = vec4<f32>();
        if d < p.head_dim {
            for (var a = 0u; a < 4u; a++) {
                if of_rows.exist[a] { of_q[a] = for_tile(query(p, block, of_rows, a, d), 1u); }
            }
        }
        queries[at] = of_q;
    }
    workgroupBarrier();
    let is_q_finite = atomicLoad(&not_finite) == 0u;
    var step = 1u;

    var row_max_$a = vec4<f32>(LOWEST);
    var row_sum = vec4<f32>();
    var acc_$a_$h_$e = vec4<f32>();
    var kinds_$a_$h_$e = vec4<u32>();
    var bad = vec4<bool>();
    var live = vec4<bool>();

    for (var n0 = first_key; n0 < end_key; n0 += BLOCK_N) {
        // s = q·k, a lane's share
        step++;
        workgroupBarrier();
        let j_$n = n0 + slot + $nu * 16u;
        let at_$n = element(p.k_base, p.k_stride, block.batch, block.kv_head, j_$n, 0u);
        var s_$a_$n = vec4<f32>();
        for (var d = lane * 2u; d < p.head_dim; d += LANES * 2u) {
            var of_k_$n = vec2<f32>();
            if j_$n < end_key { of_k_$n = key_pair(p, at_$n + d * p.k_stride.w, d, step); }
            let of_q_$a_$e = queries[(d + $eu) * ROW_GROUPS + $au];
            s_$a_$n = fma(of_q_$a_$e, vec4<f32>(of_k_$n[$e]), s_$a_$n);
        }

        // s of the thread's key: the sums of lanes, in their order
        var products = vec4<f32>();
        //@ for each $a
        workgroupBarrier();
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
        var scores = scores_of(p, block, rows, j, products, kinds);
        scores.attends &= vec4<bool>(has_rows && j < end_key);
        let weighing = weighs(scores);
        bad |= is_bad(scores);
        live |= scores.attends;
        workgroupBarrier();
        partial[thread] = select(vec4<f32>(LOWEST), scores.x, weighing);
        attended[thread] = bits_of(scores.attends);
        workgroupBarrier();
        if thread % 8u == 0u {
            var most = partial[thread];
            for (var other = 1u; other < 8u; other++) { most = max(most, partial[thread + other]); }
            partial[thread] = most;
        }
        workgroupBarrier();
        var top_$a = row_max_$a;
        for (var eight = 0u; eight < 8u; eight++) {
            top_$a = max(top_$a, partial[$au * 64u + eight * 8u]);
        }

        // p = e^(x − row_max'); row_sum = row_sum·f + Σ p
        let factor_$a = exponential(row_max_$a - top_$a);
        row_max_$a = top_$a;
        //@ for each $a
        if four == $au {
            let weight = select(vec4<f32>(), exponential(scores.x - top_$a), weighing);
            row_sum = fma(row_sum, factor_$a, weight);
            weights[key_of_block * ROW_GROUPS + $au] = weight;
        }
        //@ end
        workgroupBarrier();

        // acc_o = acc_o·f + Σ p·v
        acc_$a_$h_$e *= factor_$a;
        let end = min(n0 + BLOCK_N, end_key);
        var are_values_finite = true;
        for (var j = n0 + slice; j < end; j += SLICES) {
            let weight_$a = weights[(j - n0) * ROW_GROUPS + $au];
            let column_$h = first_column + $hu * 64u + tx * 2u;
            let bits_$h = value_pair(p, element(p.v_base, p.v_stride, block.batch, block.kv_head, j, column_$h), column_$h);
            acc_$a_$h_$e = fma(weight_$a, vec4<f32>(finite(bits_$h[$e])), acc_$a_$h_$e);
            are_values_finite = are_values_finite && is_finite(bits_$h.x) && is_finite(bits_$h.y);
        }
        if !are_values_finite {
            kinds_$a_$h_$e |= kinds_of_values(p, block, n0, end, first_column + $hu * 64u + tx * 2u + $eu, slice, $au);
        }
    }

    // A record of each four rows: row_max, row_sum, which rows have a bad score and which a key, and acc_o by column.
    workgroupBarrier();
    partial[thread] = row_sum;
    attended[thread] = bits_of(bad) | (bits_of(live) << 4u);
    workgroupBarrier();
    //@ for each $a
    let record_$a = ((task * p.row_fours + tile % p.row_tiles * ROW_GROUPS + $au) * p.num_splits + split) * (p.head_dim_v + 3u);
    let has_record_$a = block.first_row + $au * 4u < p.rows;
    if thread == $au && first_column == 0u && has_record_$a {
        var sum = vec4<f32>();
        var flags = 0u;
        for (var other = 0u; other < 64u; other++) {
            sum += partial[$au * 64u + other];
            flags |= attended[$au * 64u + other];
        }
        partials[record_$a] = bitcast<vec4<u32>>(row_max_$a);
        partials[record_$a + 1u] = bitcast<vec4<u32>>(sum);
        partials[record_$a + 2u] = vec4<u32>(flags, 0u, 0u, 0u);
    }
    //@ end
    //@ for each $a
    workgroupBarrier();
    partial[slice * 128u + $hu * 64u + tx * 2u + $eu] = bitcast<vec4<f32>>(with_kinds(acc_$a_$h_$e, kinds_$a_$h_$e));
    workgroupBarrier();
    if first_column + thread < p.head_dim_v && has_record_$a {
        var sum = Sum(vec4<f32>(), vec4<u32>());
        for (var other = 0u; other < SLICES; other++) {
            sum = added(sum, bitcast<vec4<u32>>(partial[other * 128u + thread]), vec4<f32>(1.0));
        }
        partials[record_$a + 3u + first_column + thread] = with_kinds(sum.x, sum.kinds);
    }
    //@ end
}
