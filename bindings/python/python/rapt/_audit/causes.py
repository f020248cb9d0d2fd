"""The names that a corruption can have: the table of causes in docs/reference/audit.md."""

CAUSES = frozenset(
    [
        "16-bit-read-as-32-bit", "wrong-16-bit-tag", "hidden-cast", "output-dtype",
        "wrong-shape", "halves-swapped", "q-k-transposed", "k-v-exchanged",
        "q-v-exchanged", "v-transposed", "output-transposed", "softmax-over-queries",
        "heads-transposed", "batches-mixed", "batch-mixing", "head-mixing",
        "contiguous-offsets-on-strided-view", "inner-stride-ignored", "negative-stride-read-forward", "only-head-0-computed",
        "only-batch-0-computed", "one-batch-repeated", "wrong-gqa-group", "scale-missing",
        "scale-squared", "scale-ignored", "scale-of-head-dim-v", "exp2-for-exp",
        "unnormalised", "scores-lost", "row-max-not-subtracted", "mask-ignored",
        "mask-inverted", "mask-transposed", "mask-misbroadcast", "mask-as-bias",
        "bias-read-as-bool", "bias-misapplied", "lowest-taken-for-minus-infinity", "alignment-swapped",
        "causal-ignored", "causal-inverted", "causal-off-by-one", "window-off-by-one",
        "window-ignored", "softcap-ignored", "sinks-ignored", "alibi-slopes-ignored",
        "tail-dropped", "tail-padded", "head-dim-tail-dropped", "stale-tail",
        "over-read", "over-write", "masked-nonfinite-leaks", "nan-query-swallowed",
        "nan-query-spreads", "stale-lse", "crash", "hang",
    ]
)


def listed(name):
    """`name`, which the table must have: a finding is looked up there."""
    if name not in CAUSES:
        raise LookupError(f"{name!r} is no cause of docs/reference/audit.md")
    return name
