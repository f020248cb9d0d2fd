"""Every planted fault, and what the auditor must find of it. Those that only a GPU shows are `on_a_gpu()`'s: they need torch."""

from collections.abc import Callable
from typing import NamedTuple

from . import boundary, values

LEAK = "masked-nonfinite-leaks"


class Mutant(NamedTuple):
    """An attention with one fault."""

    function: Callable
    hazard: str
    """The hazard that must find it."""
    cause: str
    """What it must be called."""
    follows: tuple = ()
    """Causes of further findings that follow from it."""
    dtype: str = "float32"
    """The dtype that it is audited with."""
    reproduces: bool = True
    """Whether its program fails by itself."""


ON_ANY_DEVICE = [
    Mutant(values.scale_missing, "accuracy", "scale-missing"),
    Mutant(values.scale_squared, "accuracy", "scale-squared"),
    Mutant(values.scale_argument_ignored, "scale", "scale-ignored"),
    Mutant(values.exp2_without_log2e, "accuracy", "exp2-for-exp"),
    Mutant(values.unnormalised, "accuracy", "unnormalised"),
    Mutant(values.row_max_not_subtracted, "large-logits", "row-max-not-subtracted", follows=(LEAK, "fully-masked-row", "lowest-finite-mask", "zero-length")),
    Mutant(values.q_and_k_exchanged, "accuracy", "q-k-transposed"),
    Mutant(values.softmax_over_queries, "accuracy", "softmax-over-queries"),
    Mutant(values.halves_swapped, "accuracy", "halves-swapped"),
    Mutant(values.neighbours_swapped, "accuracy", "halves-swapped"),
    Mutant(values.heads_transposed, "accuracy", "heads-transposed", follows=("head-mixing",)),
    Mutant(values.head_0_only, "accuracy", "only-head-0-computed"),
    Mutant(values.batch_0_repeated, "accuracy", "one-batch-repeated"),
    Mutant(values.gqa_modulo, "gqa-groups", "wrong-gqa-group"),
    Mutant(values.heads_leak, "head-mixing", "head-mixing", follows=("accuracy",)),
    Mutant(values.mask_ignored, "bool-mask", "mask-ignored"),
    Mutant(values.mask_inverted, "bool-mask", "mask-inverted"),
    Mutant(values.mask_of_head_0, "bool-mask", "mask-misbroadcast"),
    Mutant(values.bias_added_twice, "additive-mask", "bias-misapplied"),
    Mutant(values.lowest_taken_for_masked, "lowest-finite-mask", "lowest-taken-for-minus-infinity"),
    Mutant(values.masked_rows_get_the_mean, "fully-masked-row", "fully-masked-row", follows=(LEAK,)),
    Mutant(values.bottom_right_for_top_left, "causal", "alignment-swapped"),
    Mutant(values.causal_without_diagonal, "causal", "causal-off-by-one"),
    Mutant(values.nan_leaks, "nan-in-masked-v", LEAK),
    Mutant(values.narrowed_to_f32, "accuracy", "hidden-cast", dtype="float64"),
    Mutant(values.halved_precision, "accuracy", "hidden-cast"),
    Mutant(values.sloppy_exp, "accuracy", "accuracy"),
    Mutant(values.nondeterministic_reduction, "nondeterminism", "nondeterminism"),
    Mutant(boundary.contiguous_offsets, "permuted-strides", "contiguous-offsets-on-strided-view", follows=("expanded-strides", "padding")),
    Mutant(boundary.contiguous_offsets_in_k, "permuted-strides", "contiguous-offsets-on-strided-view", follows=("expanded-strides", "padding")),
    Mutant(boundary.inner_stride_ignored, "inner-stride", "inner-stride-ignored"),
    Mutant(boundary.negative_stride_forward, "negative-strides", "negative-stride-read-forward"),
    Mutant(boundary.mask_read_flat, "mask-broadcast", "mask-misbroadcast"),
    Mutant(boundary.bf16_as_f32, "dtype-tag", "16-bit-read-as-32-bit", follows=(LEAK,), dtype="bfloat16"),
    Mutant(boundary.bf16_as_f16, "dtype-tag", "wrong-16-bit-tag", dtype="bfloat16"),
    Mutant(boundary.tail_over_read, "over-read", "over-read"),
    Mutant(boundary.tail_over_read_unseen, "guard-pages", "over-read"),
    Mutant(boundary.tail_of_keys_dropped, "odd-lengths", "tail-dropped", follows=("kv-length-mismatch",)),
    Mutant(boundary.tail_of_head_dim_dropped, "odd-head-dim", "head-dim-tail-dropped"),
    Mutant(boundary.stale_tail, "odd-lengths", "stale-tail"),
    Mutant(boundary.stale_workspace, "stale-state", "stale-state"),
    Mutant(boundary.head_dim_v_reversed, "head-dim-v", "head-dim-v"),
    Mutant(boundary.scales_q_in_place, "inputs-modified", "inputs-modified"),
    Mutant(boundary.short_keys_accepted, "kv-length-mismatch", "kv-length-mismatch"),
    Mutant(boundary.aborts_on_long_keys, "odd-lengths", "crash"),
    Mutant(boundary.float32_results, "dtype-tag", "output-dtype", dtype="bfloat16"),
    Mutant(boundary.stale_lse, "lse", "stale-lse"),
]


def on_a_gpu():
    """The mutants of test_gpu_audit."""
    from . import gpu

    return [
        Mutant(gpu.on_another_stream, "stream-order", "stream-order"),
        Mutant(gpu.remembered, "graph-capture", "graph-capture"),
        Mutant(gpu.waiting, "device-wait", "device-wait"),
        Mutant(gpu.reaching, "over-read", "over-read"),
        # Its program looks at what is read.
        Mutant(gpu.scribbling, "guard-pages", "over-write", reproduces=False),
        Mutant(gpu.faulting, "over-read", "over-read"),
    ]


def with_gradients():
    """Faults of the backward and of dropout."""
    from .gradients import FAULTS

    found = {
        "scale_forgotten": "gradients",
        "one_head_of_a_group": "gqa-gradients",
        "mask_gradient_of_one_batch": "mask-gradients",
        "masked_keys_weigh_a_little": "masked-gradients",
        "nan_of_masked_values_spreads": "nan-in-masked-gradients",
        "dead_rows_give_what_arrives": "dead-row-gradients",
        "strides_of_d_o_forgotten": "gradient-strides",
        "d_o_scaled_in_place": "gradient-aliasing",
        "shared_memory_of_d_o_read_once": "gradient-aliasing",
        "sums_in_any_order": "gradient-nondeterminism",
        "probability_of_eight_bits": "dropped-part",
        "kept_weights_unscaled": "dropped-part",
        "heads_drop_alike": "dropped-part",
        "deaf_to_the_seed": "dropout-seed",
        "one_mask_for_all_calls": "dropout-seed",
        "backward_draws_again": "dropout-reuse",
    }
    follows = {"one_mask_for_all_calls": ("dropped-part",)}
    return [Mutant(FAULTS[name], hazard, hazard, follows.get(name, ())) for name, hazard in found.items()]
