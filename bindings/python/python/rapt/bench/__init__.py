"""`python -m rapt.bench cuda`: attention on this GPU, Rapt and its peers in one interleaved run (docs/reference/benchmarks.md).

    rows (cuda.toml) ─► engines prepared ─► check against the reference ─► rounds: ceilings, then a batch of every engine ─► report

`cli` is the command, `rows` the declarations and their arithmetic, `engines` who is measured, `check` and `gradients` what is right, `device` the GPU
and its ceilings, `measure` the rounds, `report` figures, tables, record and bars; `table` and `chart` are plain text and SVG.
torch and numpy are imported when a run starts, not before. The CPU has `cargo xtask bench cpu`, whose rows, tables and chart these are too.
"""
