// What `decode` found of each split of the keys, folded to rows.
//
//   row_max = max of row_max of all splits;  f = e^(row_max of a split − row_max)
//   row_sum = Σ row_sum·f;  acc_o = Σ acc_o·f             in the order of the splits, acc_o of every fourth, and these four sums in their order
//   out = acc_o / row_sum;  lse = row_max + ln row_sum
//
// A workgroup of 128 threads has four rows, one in each component of its vectors, and 32 columns; a thread one split, then a column of every fourth
// split, four of them at once ($m), which are on their way together.
// Deliberately absent: more than 128 splits.

const SLICES: u32 = 4u;

// Of each split row_max, then its factor, 0 behind the last; row_sum; and two times four flags.
var<workgroup> factors: array<vec4<f32>, 128>;
var<workgroup> sums: array<vec4<f32>, 128>;
var<workgroup> found: array<u32, 128>;
// Of each thread its share of a column.
var<workgroup> shares: array<vec4<u32>, 128>;

@compute @workgroup_size(128)
fn attention(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let p = given;
    let item = group.y * groups.x + group.x;
    if item >= p.combine_items { return; }
    let column_blocks = (p.head_dim_v + BLOCK_DV - 1u) / BLOCK_DV;
    let first_column = item % column_blocks * BLOCK_DV;
    let tile = item / column_blocks;
    let task = p.first_task + tile / p.row_fours;
    let block = Block(task / p.kv_heads, task % p.kv_heads, tile % p.row_fours * 4u, 0u, 0u, 0u, 0u, 0u);
    let rows = rows_of(p, block, block.first_row);
    let record = tile * p.num_splits * (p.head_dim_v + 3u);
    let own = record + thread * (p.head_dim_v + 3u);
    factors[thread] = vec4<f32>(LOWEST);
    if thread < p.num_splits {
        factors[thread] = bitcast<vec4<f32>>(partials[own]);
        sums[thread] = bitcast<vec4<f32>>(partials[own + 1u]);
        found[thread] = partials[own + 2u].x;
    }
    workgroupBarrier();
    var row_max = vec4<f32>(LOWEST);
    for (var split = 0u; split < p.num_splits; split++) { row_max = max(row_max, factors[split]); }
    workgroupBarrier();
    factors[thread] = select(vec4<f32>(), exponential(factors[thread] - row_max), vec4<bool>(thread < p.num_splits));
    workgroupBarrier();
    var row_sum = vec4<f32>();
    var flags = 0u;
    for (var split = 0u; split < p.num_splits; split++) {
        row_sum = fma(sums[split], factors[split], row_sum);
        flags |= found[split];
    }

    // acc_o of the thread's splits; behind the last split the last one, with factor 0
    let slice = thread / BLOCK_DV;
    let column = first_column + thread % BLOCK_DV;
    var share = Sum(vec4<f32>(), vec4<u32>());
    if column < p.head_dim_v {
        for (var split = slice; split < p.num_splits; split += SLICES * 4u) {
            let bits_$m = partials[record + min(split + $mu * SLICES, p.num_splits - 1u) * (p.head_dim_v + 3u) + 3u + column];
            share = added(share, bits_$m, factors[split + $mu * SLICES]);
        }
    }
    shares[thread] = with_kinds(share.x, share.kinds);
    workgroupBarrier();

    let ends = ends_of(p, rows, row_max, row_sum, flags_of(flags), flags_of(flags >> 4u));
    if slice == 0u && column < p.head_dim_v {
        let out_at = rows_at(p.out_base, p.out_stride, block, rows);
        var sum = Sum(vec4<f32>(), vec4<u32>());
        for (var other = 0u; other < SLICES; other++) { sum = added(sum, shares[other * BLOCK_DV + thread], vec4<f32>(1.0)); }
        let bits = results(ends, sum.x, sum.kinds);
        for (var a = 0u; a < 4u; a++) {
            if rows.exist[a] { store_out(out_at[a] + column * p.out_stride.w, bits[a]); }
        }
    }
    if p.has_lse != 0u && first_column == 0u && thread == 0u {
        let lse_at = rows_at(p.lse_base, p.lse_stride, block, rows);
        for (var a = 0u; a < 4u; a++) {
            if rows.exist[a] { lse[lse_at[a]] = ends.lse[a]; }
        }
    }
}
