// How rows end: sinks, rows without keys, rows that are NaN.

// How four rows end: what their sums are multiplied with and divided by, and their lse as bits.
struct Ends { is_dead: vec4<bool>, is_bad: vec4<bool>, factor: vec4<f32>, total: vec4<f32>, lse: vec4<u32> }

// `has_bad`: a score of the row is NaN or +inf; `is_live`: it attends a key.
fn ends_of(p: Params, rows: Rows, row_max: vec4<f32>, row_sum: vec4<f32>, has_bad: vec4<bool>, is_live: vec4<bool>) -> Ends {
    var is_bad = has_bad;
    var factor = vec4<f32>(1.0);
    // No key has a weight where every score is −inf: the sums are the result.
    let is_empty = (row_sum == vec4<f32>()) & !has_bad;
    var total = select(row_sum, vec4<f32>(1.0), is_empty);
    var top = row_max;
    if p.has_sinks != 0u {
        for (var a = 0u; a < 4u; a++) {
            if !rows.exist[a] || is_empty[a] { continue; }
            let bits = sinks_bits(p, p.sinks_base + rows.head[a] * p.sinks_stride);
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
    let is_dead = !is_live;
    var lse = select(bitcast<vec4<u32>>(top + logarithm(total)), vec4<u32>(NAN_BITS), is_bad);
    lse = select(lse, vec4<u32>(INFINITY_BITS | SIGN_BIT), is_dead | is_empty);
    return Ends(is_dead, is_bad, factor, total, lse);
}

// Elements of out, one of each row, as bits; `kinds`: of the values in these sums.
fn results(ends: Ends, sums: vec4<f32>, kinds: vec4<u32>) -> vec4<u32> {
    let bits = with_kinds(sums * ends.factor / ends.total, kinds);
    return select(select(bits, vec4<u32>(NAN_BITS), ends.is_bad), vec4<u32>(), ends.is_dead);
}
