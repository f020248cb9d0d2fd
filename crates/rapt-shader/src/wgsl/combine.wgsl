// What `decode` found of each split of the keys, folded to rows.
//
//   row_max = max of row_max of all splits;  f = e^(row_max of a split − row_max)
//   row_sum = Σ row_sum·f, of eight splits side by side, then these sums in their order
//   acc_o = Σ acc_o·f, of every 16th split, then these sums in their order
//   out = acc_o / row_sum;  lse = row_max + ln row_sum
//
// A workgroup of 128 threads has four rows, one in each component of its vectors, and 8 columns; a thread one split, then a column of every 16th
// split, eight of them ($m). These are on their way from the start: the rest takes less than they do.
// Deliberately absent: more than 128 splits.

const SLICES: u32 = 16u;

// Of each split row_max, then its factor, 0 behind the last; its row_sum times that; and two times four flags.
var<workgroup> factors: array<vec4<f32>, 128>;
var<workgroup> sums: array<vec4<f32>, 128>;
var<workgroup> found: array<u32, 128>;
// Of eight splits the maximum, then the sum; and their flags.
var<workgroup> eights: array<vec4<f32>, 16>;
var<workgroup> found_of_eight: array<u32, 16>;
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
    let records = four_at(p, tile);

    // Behind the last split the last one, with factor 0, and behind the last column that.
    let slice = thread / BLOCK_DV;
    let column = first_column + thread % BLOCK_DV;
    let last_split = p.num_splits - 1u;
    let at_column = records + p.num_splits * 3u + min(column, p.head_dim_v - 1u);
    let own = records + min(thread, last_split) * 3u;
    let of_own_$n = partials[own + $nu];
    let bits_$m = partials[at_column + min(slice + $mu * SLICES, last_split) * p.head_dim_v];

    let is_split = vec4<bool>(thread < p.num_splits);
    let own_max = select(vec4<f32>(LOWEST), bitcast<vec4<f32>>(of_own_0), is_split);
    factors[thread] = own_max;
    workgroupBarrier();
    if thread < 16u {
        var most = vec4<f32>(LOWEST);
        most = max(most, factors[thread * 8u + $mu]);
        eights[thread] = most;
    }
    workgroupBarrier();
    var row_max = vec4<f32>(LOWEST);
    row_max = max(row_max, eights[$eu]);
    let own_factor = select(vec4<f32>(), exponential(own_max - row_max), is_split);
    factors[thread] = own_factor;
    sums[thread] = bitcast<vec4<f32>>(of_own_1) * own_factor;
    found[thread] = of_own_2.x;
    workgroupBarrier();
    if thread < 16u {
        var sum = vec4<f32>();
        var flags = 0u;
        sum += sums[thread * 8u + $mu];
        flags |= found[thread * 8u + $mu];
        eights[thread] = sum;
        found_of_eight[thread] = flags;
    }
    // acc_o of the thread's splits
    var largest = vec4<u32>();
    largest = max(largest, bits_$m & vec4<u32>(~SIGN_BIT));
    if all(largest < vec4<u32>(INFINITY_BITS)) {
        var share = vec4<f32>();
        share = fma(bitcast<vec4<f32>>(bits_$m), factors[slice + $mu * SLICES], share);
        shares[thread] = bitcast<vec4<u32>>(share);
    } else {
        var share = Sum(vec4<f32>(), vec4<u32>());
        for (var of_slice = slice; of_slice < p.num_splits; of_slice += SLICES) {
            share = added(share, partials[at_column + of_slice * p.head_dim_v], factors[of_slice]);
        }
        shares[thread] = with_kinds(share.x, share.kinds);
    }
    workgroupBarrier();
    var row_sum = vec4<f32>();
    var flags = 0u;
    row_sum += eights[$eu];
    flags |= found_of_eight[$eu];

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
