// The kernel for many queries on a processor that computes what a GPU does (Mesa's lavapipe): its vector lanes are the threads of a subgroup, and a thread has rows to
// itself.
//
//   FlashAttention-2 (Dao 2023, arXiv:2307.08691, algorithm 1), for each block of 64 rows and 64 columns of values:
//     row_max = lowest; row_sum = 0; acc_o = 0
//     for each block of 4 keys, from key 0 in steps of 4, whatever the rows
//       s = q·k                                            summed over head_dim
//       x = scores of s;  row_max' = max(row_max, x);  f = e^(row_max − row_max')
//       p = e^(x − row_max');  row_sum = row_sum·f + Σ p
//       acc_o = acc_o·f + Σ p·v                            the sum of 4 products apart
//     out = acc_o / row_sum;  lse = row_max + ln row_sum
//
// 16 threads, of which thread t has rows 4·t .. 4·t + 4 of the block, one in each component of its vectors: q and acc_o of them in registers, 64 vectors each.
//
// Such a driver loads from memory lane by lane, at some 30 cycles for 8 lanes even of one place (estimated, Zen 5, 2026-11), and runs both sides of a branch, but no turn of a loop in which no
// lane is. So each lane loads a column of its own, of which all get the value from its register (`subgroupBroadcast`), and what is rare stands in a loop of one turn.
//   multiply-adds of a block of keys     64·4·128, of which a thread has 2048
//   elements loaded for it               4·128 by each subgroup of 8 threads, 64 a thread
//
// A line with $m (eights of columns), $l (columns of one, and the lanes that load them) or $n (keys) stands once for each. No operation crosses rows: the bits of a row depend
// neither on its neighbours nor on strides. A masked weight is 0 and adds nothing.
// Deliberately absent: workgroup memory, a head_dim beyond 64, and subgroups of other than 8 threads.

@compute @workgroup_size(16)
fn attention(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let p = given;
    let item = group.y * groups.x + group.x;
    if item >= p.items { return; }
    let block = block_of(p, item);
    let rows = rows_of(p, block, block.first_row + thread * 4u);

    var q_$m_$l = vec4<f32>();
    var is_q_finite = true;
    for (var eight = 0u; eight * 8u < p.head_dim; eight++) {
        var of_q_$l = vec4<f32>();
        for (var l = 0u; l < min(8u, p.head_dim - eight * 8u); l++) {
            var bits = vec4<u32>();
            for (var a = 0u; a < 4u; a++) {
                if rows.exist[a] { bits[a] = query(p, block, rows, a, eight * 8u + l); }
            }
            is_q_finite = is_q_finite && are_finite(bits);
            if l == $lu { of_q_$l = vec4<f32>(finite(bits.x), finite(bits.y), finite(bits.z), finite(bits.w)); }
        }
        if eight == $mu { q_$m_$l = of_q_$l; }
    }

    var row_max = vec4<f32>(LOWEST);
    var row_sum = vec4<f32>();
    var acc_$m_$l = vec4<f32>();
    var bad = vec4<bool>();
    var live = vec4<bool>();
    // Blocks of values that are not finite: from the first key to the end.
    var first_bad = block.end_key;
    var end_bad = 0u;
    // Whether scores are products · scale and nothing else, where every row sees the key and products are below `limit`, as bits.
    let is_plain = is_q_finite && are_products(p, HAS_MASK) && all(rows.exist);
    let limit = product_limit(p.scale);
    // The lane's columns: behind the last the last one, as q is 0 there, or the result is not stored.
    let d_$m = min($mu * 8u + lane, p.head_dim - 1u) * p.k_stride.w;
    let c_$m = min(block.first_column + $mu * 8u + lane, p.head_dim_v - 1u) * p.v_stride.w;

    for (var n0 = block.first_key; n0 < block.end_key; n0 += BLOCK_N) {
        // s = q·k. Behind the last key lies the last one, which weighs nothing.
        let j_$n = min(n0 + $nu, p.kv_len - 1u);
        let at_k_$n = element(p.k_base, p.k_stride, block.batch, block.kv_head, j_$n, 0u);
        var s_$n = vec4<f32>();
        var odd_k = 0u;
        //@ for each $m
        {
            let bits_$n = k_bits(at_k_$n + d_$m);
            odd_k = max(odd_k, bits_$n & ~SIGN_BIT);
            let of_k_$n = finite(bits_$n);
            s_$n = fma(q_$m_$l, vec4<f32>(subgroupBroadcast(of_k_$n, $lu)), s_$n);
        }
        //@ end
        let has_kinds = !is_q_finite || subgroupAny(odd_k >= INFINITY_BITS);

        // x = scores of s; row_max' = max(row_max, x)
        var weighs_$n = vec4<bool>(true);
        var top = row_max;
        var largest = vec4<u32>();
        largest = max(largest, bitcast<vec4<u32>>(s_$n) & vec4<u32>(~SIGN_BIT));
        let is_short = is_plain && !has_kinds && is_seen(block, n0) && all(largest < vec4<u32>(limit));
        for (var is_long = !is_short; is_long; is_long = false) {
            for (var n = 0u; n < 4u; n++) {
                var products = vec4<f32>();
                if n == $nu { products = s_$n; }
                var kinds = vec4<u32>();
                if has_kinds { kinds = kinds_of_products(p, block, rows, n0 + n, 0u, p.head_dim); }
                let scores = scores_of(p, block, rows, n0 + n, products, kinds);
                let weighing = weighs(scores);
                if n == $nu { s_$n = scores.x; }
                if n == $nu { weighs_$n = weighing; }
                top = select(top, max(top, scores.x), weighing);
                bad |= is_bad(scores);
                live |= scores.attends;
            }
        }
        if is_short {
            s_$n *= p.scale;
            top = max(top, s_$n);
            live = vec4<bool>(true);
        }

        // p = e^(x − row_max'), in the place of s; row_sum = row_sum·f + Σ p
        s_$n = select(vec4<f32>(), exponential(s_$n - top), weighs_$n);
        let factor = exponential(row_max - top);
        var sum = vec4<f32>();
        sum += s_$n;
        row_sum = fma(row_sum, factor, sum);
        row_max = top;

        // acc_o = acc_o·f + Σ p·v
        let at_v_$n = element(p.v_base, p.v_stride, block.batch, block.kv_head, j_$n, 0u);
        var odd_v = 0u;
        //@ for each $m
        {
            let bits_$n = v_bits(at_v_$n + c_$m);
            odd_v = max(odd_v, bits_$n & ~SIGN_BIT);
            let of_v_$n = finite(bits_$n);
            var part_$l = vec4<f32>();
            part_$l = fma(s_$n, vec4<f32>(subgroupBroadcast(of_v_$n, $lu)), part_$l);
            acc_$m_$l = fma(acc_$m_$l, factor, part_$l);
        }
        //@ end
        if subgroupAny(odd_v >= INFINITY_BITS) {
            first_bad = min(first_bad, n0);
            end_bad = n0 + BLOCK_N;
        }
    }

    // out = acc_o / row_sum;  lse = row_max + ln row_sum
    let ends = ends_of(p, rows, row_max, row_sum, bad, live);
    let out_at = rows_at(p.out_base, p.out_stride, block, rows);
    let columns = min(BLOCK_DV, p.head_dim_v - block.first_column);
    for (var eight = 0u; eight * 8u < columns; eight++) {
        var acc_$l = vec4<f32>();
        if eight == $mu { acc_$l = acc_$m_$l; }
        for (var l = 0u; l < min(8u, columns - eight * 8u); l++) {
            var sums = vec4<f32>();
            if l == $lu { sums = acc_$l; }
            let column = block.first_column + eight * 8u + l;
            let bits = results(ends, sums, kinds_of_attended(p, block, rows, first_bad, end_bad, column));
            for (var a = 0u; a < 4u; a++) {
                if rows.exist[a] { store_out(out_at[a] + column * p.out_stride.w, bits[a]); }
            }
        }
    }
    if p.has_lse != 0u && block.first_column == 0u {
        let lse_at = rows_at(p.lse_base, p.lse_stride, block, rows);
        for (var a = 0u; a < 4u; a++) {
            if rows.exist[a] { lse[lse_at[a]] = ends.lse[a]; }
        }
    }
}
