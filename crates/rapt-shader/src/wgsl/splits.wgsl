// Parts of the keys, and what workgroups leave of theirs to `combine`. Deliberately absent: which rows of a part are whose.

// A part of the keys, where workgroups have split_keys of them: blocks of the part alone, which part it is, and the first four of its rows, counted over tasks.
struct Split { block: Block, index: u32, first_four: u32 }

// That of workgroup `item`.
fn split_of(p: Params, item: u32) -> Split {
    let run = item / p.dv_blocks;
    let index = run % p.num_splits;
    let tile = run / p.num_splits;
    let task = tile / p.row_tiles;
    let first_row = tile % p.row_tiles * BLOCK_M;
    var block = block_of_rows(p, p.first_task + task, first_row, item % p.dv_blocks * BLOCK_DV);
    block.first_key = max(block.first_key, index * p.split_keys);
    block.end_key = min(block.end_key, (index + 1u) * p.split_keys);
    return Split(block, index, task * p.row_fours + first_row / 4u);
}

// Where the record of the split's rows 4·four .. lies: row_max, row_sum, which rows have a bad score, and which a key; and column 0 of their acc_o.
fn record_of(p: Params, split: Split, four: u32) -> u32 { return four_at(p, split.first_four + four) + split.index * 3u; }
fn columns_of(p: Params, split: Split, four: u32) -> u32 {
    return four_at(p, split.first_four + four) + p.num_splits * 3u + split.index * p.head_dim_v;
}
fn put_record(at: u32, row_max: vec4<f32>, row_sum: vec4<f32>, flags: u32) {
    partials[at] = bitcast<vec4<u32>>(row_max);
    partials[at + 1u] = bitcast<vec4<u32>>(row_sum);
    partials[at + 2u] = vec4<u32>(flags, 0u, 0u, 0u);
}
