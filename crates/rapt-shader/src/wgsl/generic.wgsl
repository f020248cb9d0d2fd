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
// Deliberately absent: subgroups, cooperative matrices, and reads outside the operands (of a 16-bit or boolean element, outside its word).

// Columns of q and k, and keys of v, that a tile has.
const TILE: u32 = 16u;

// [16][16]: a column of q for four rows; then maxima or sums of four rows by tx; then four columns of a value.
var<workgroup> tile: array<vec4<f32>, 256>;
// [16][16]: a column of two keys.
var<workgroup> tile_k: array<vec2<f32>, 256>;
// [32][16]: the weights of a key for four rows.
var<workgroup> weights: array<vec4<f32>, 512>;
// [16][16], by tx and ty: four bits for each of the two keys, which rows attend it.
var<workgroup> attended: array<u32, 256>;

// Column d0 + tx of the thread's rows, and of two keys; 0 outside.
fn load_queries_and_keys(p: Params, block: Block, rows: Rows, n0: u32, d0: u32, tx: u32, ty: u32, step: u32) {
    let d = d0 + tx;
    var of_q = vec4<f32>();
    var of_k = vec2<f32>();
    if d < p.head_dim {
        for (var a = 0u; a < 4u; a++) {
            if rows.exist[a] { of_q[a] = for_tile(query(p, block, rows, a, d), step); }
        }
        let first = n0 + ty * 2u;
        for (var j = first; j < min(first + 2u, p.kv_len); j++) { of_k[j - first] = for_tile(key(p, block, j, d), step); }
    }
    tile[tx * 16u + ty] = of_q;
    tile_k[tx * 16u + ty] = of_k;
}

// Columns 4·tx .. of value j0 + ty; 0 outside.
fn load_values(p: Params, block: Block, j0: u32, tx: u32, ty: u32, step: u32) {
    var of_v = vec4<f32>();
    let first = block.first_column + tx * 4u;
    let end = select(0u, min(first + 4u, p.head_dim_v), j0 + ty < p.kv_len);
    for (var column = first; column < end; column++) { of_v[column - first] = for_tile(value(p, block, j0 + ty, column), step); }
    tile[ty * 16u + tx] = of_v;
}

// The kinds of column c of values j0 .. of a tile, for the rows that attend them.
fn kinds_of_values(p: Params, block: Block, n0: u32, j0: u32, c: u32, ty: u32) -> vec4<u32> {
    var kinds = vec4<u32>();
    for (var j = j0; j < min(j0 + TILE, p.kv_len); j++) {
        let kind = kind_of(value(p, block, j, c));
        let who = attended[(j - n0) / 2u * 16u + ty] >> ((j - n0) % 2u * 4u);
        kinds |= select(vec4<u32>(), vec4<u32>(kind), flags_of(who));
    }
    return kinds;
}

@compute @workgroup_size(256)
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
    let rows = rows_of(p, block, block.first_row + ty * 4u);
    let first_column = block.first_column + tx * 4u;
    let columns = min(max(p.head_dim_v, first_column) - first_column, 4u);

    // A row's share of this thread: row_sum over its keys, acc_o and the kinds in it over its columns. row_max is that of the whole row.
    var row_max = vec4<f32>(LOWEST);
    var row_sum = vec4<f32>();
    var bad = vec4<bool>();
    var live = vec4<bool>();
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
            load_queries_and_keys(p, block, rows, n0, d0, tx, ty, step);
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
                let d1 = min(d0 + TILE, p.head_dim);
                kinds_0 |= kinds_of_products(p, block, rows, n0 + tx * 2u, d0, d1);
                kinds_1 |= kinds_of_products(p, block, rows, n0 + tx * 2u + 1u, d0, d1);
            }
        }

        // row_max' = max(row_max, s)
        let scores_0 = scores_of(p, block, rows, n0 + tx * 2u, s_0, kinds_0);
        let scores_1 = scores_of(p, block, rows, n0 + tx * 2u + 1u, s_1, kinds_1);
        let weighs_0 = weighs(scores_0);
        let weighs_1 = weighs(scores_1);
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
        bad |= is_bad(scores_0) | is_bad(scores_1);
        live |= scores_0.attends | scores_1.attends;

        // acc_o += p·v
        for (var j0 = n0; j0 < min(n0 + BLOCK_N, block.end_key); j0 += TILE) {
            step++;
            workgroupBarrier();
            load_values(p, block, j0, tx, ty, step);
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
                for (var c = 0u; c < columns; c++) { kinds[c] |= kinds_of_values(p, block, n0, j0, first_column + c, ty); }
            }
        }
    }

    // The sums of rows, in the order of tx.
    workgroupBarrier();
    tile[tx * 16u + ty] = row_sum;
    attended[tx * 16u + ty] = bits_of(bad) | (bits_of(live) << 4u);
    workgroupBarrier();
    row_sum = vec4<f32>();
    var flags = 0u;
    for (var other = 0u; other < 16u; other++) {
        row_sum += tile[other * 16u + ty];
        flags |= attended[other * 16u + ty];
    }

    // out = acc_o / row_sum;  lse = row_max + ln row_sum
    let ends = ends_of(p, rows, row_max, row_sum, flags_of(flags), flags_of(flags >> 4u));
    let out_at = rows_at(p.out_base, p.out_stride, block, rows);
    var acc_o = array<vec4<f32>, 4>(acc_0, acc_1, acc_2, acc_3);
    for (var c = 0u; c < columns; c++) {
        let bits = results(ends, acc_o[c], kinds[c]);
        for (var a = 0u; a < 4u; a++) {
            if rows.exist[a] { store_out(out_at[a] + (first_column + c) * p.out_stride.w, bits[a]); }
        }
    }
    if p.has_lse != 0u && block.first_column == 0u && tx == 0u {
        let lse_at = rows_at(p.lse_base, p.lse_stride, block, rows);
        for (var a = 0u; a < 4u; a++) {
            if rows.exist[a] { lse[lse_at[a]] = ends.lse[a]; }
        }
    }
}
