// What `decode` found of each split of the keys, folded to rows.
//
//   row_max = max of row_max of all splits;  f = e^(row_max of a split − row_max)
//   row_sum = Σ row_sum·f;  acc_o = Σ acc_o·f             in the order of the splits
//   out = acc_o / row_sum;  lse = row_max + ln row_sum
//
// A workgroup of 128 threads has four rows, one in each component of its vectors; a thread one split, then every 128th column.
// Deliberately absent: more than 128 splits.

// Of each split row_max, then its factor; row_sum; and two times four flags.
var<workgroup> factors: array<vec4<f32>, 128>;
var<workgroup> sums: array<vec4<f32>, 128>;
var<workgroup> found: array<u32, 128>;

@compute @workgroup_size(128)
fn attention(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let p = given;
    let item = group.y * groups.x + group.x;
    if item >= p.combine_items { return; }
    let task = p.first_task + item / p.row_fours;
    let block = Block(task / p.kv_heads, task % p.kv_heads, item % p.row_fours * 4u, 0u, 0u, 0u);
    let rows = rows_of(p, block, block.first_row);
    let record = item * p.num_splits * (p.head_dim_v + 3u);
    let own = record + thread * (p.head_dim_v + 3u);
    if thread < p.num_splits {
        factors[thread] = bitcast<vec4<f32>>(partials[own]);
        sums[thread] = bitcast<vec4<f32>>(partials[own + 1u]);
        found[thread] = partials[own + 2u].x;
    }
    workgroupBarrier();
    var row_max = vec4<f32>(LOWEST);
    for (var split = 0u; split < p.num_splits; split++) { row_max = max(row_max, factors[split]); }
    workgroupBarrier();
    if thread < p.num_splits { factors[thread] = exponential(factors[thread] - row_max); }
    workgroupBarrier();
    var row_sum = vec4<f32>();
    var flags = 0u;
    for (var split = 0u; split < p.num_splits; split++) {
        row_sum = fma(sums[split], factors[split], row_sum);
        flags |= found[split];
    }

    let ends = ends_of(p, rows, row_max, row_sum, flags_of(flags), flags_of(flags >> 4u));
    let out_at = rows_at(p.out_base, p.out_stride, block, rows);
    for (var column = thread; column < p.head_dim_v; column += 128u) {
        var sum = Sum(vec4<f32>(), vec4<u32>());
        for (var split = 0u; split < p.num_splits; split++) {
            sum = added(sum, partials[record + split * (p.head_dim_v + 3u) + 3u + column], factors[split]);
        }
        let bits = results(ends, sum.x, sum.kinds);
        for (var a = 0u; a < 4u; a++) {
            if rows.exist[a] { store_out(out_at[a] + column * p.out_stride.w, bits[a]); }
        }
    }
    if p.has_lse != 0u && thread == 0u {
        let lse_at = rows_at(p.lse_base, p.lse_stride, block, rows);
        for (var a = 0u; a < 4u; a++) {
            if rows.exist[a] { lse[lse_at[a]] = ends.lse[a]; }
        }
    }
}
