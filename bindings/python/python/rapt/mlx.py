"""Attention on arrays of MLX, where they lie: `rapt.mlx.attention(q, k, v)`.

MLX compiles Rapt's kernels (`mx.fast.metal_kernel`) and computes them when their result is asked for. Views keep their strides: nothing is copied to be
row by row. **Never run on Apple hardware**: docs/guides/metal.md.
"""

import functools

from rapt import _native

__all__ = ["attention"]


def attention(
    q, k, v, *, mask=None, causal=None, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None, layout="bhsd", out=None,
    out_dtype=None, return_lse=False, stream=None,
):  # fmt: skip
    """softmax(q·kᵀ · scale)·v as `rapt.attention` defines it, a new array of MLX; with `return_lse` a pair.

    float32, float16 and bfloat16; every mask and option but codes. `out` is refused: MLX's kernels write new arrays. Arrays whose elements lie further than
    2^31 elements apart give NaN.
    """
    import mlx.core as mx

    if out_dtype is not None:
        out_dtype = str(out_dtype).rpartition(".")[2]
    launch = _native.mlx_kernels(
        q, k, v, mask=mask, causal=causal, window=window, softcap=softcap, scale=scale, sinks=sinks, alibi_slopes=alibi_slopes, layout=layout,
        out=out, out_dtype=out_dtype, return_lse=return_lse,
    )  # fmt: skip
    (shape, dtype), lse = launch["out"], launch["lse"]
    made = {"out": (shape, getattr(mx, dtype)), "lse": (lse, mx.float32), "partials": ((launch["partials"],), mx.uint32)}
    arrays = {"q": q, "k": k, "v": v, "mask": mask, "sinks": sinks, "alibi": alibi_slopes}
    if not launch["kernels"]:
        arrays["out"], arrays["lse"] = mx.zeros(*made["out"]), None if lse is None else mx.zeros(*made["lse"])
    else:
        arrays["params"] = mx.array(memoryview(launch["params"]).cast("I").tolist(), dtype=mx.uint32)
    for each in launch["kernels"]:
        outputs = _kernel(mx, *(each[part] for part in ("name", "header", "source")), tuple(each["input_names"]), tuple(each["output_names"]))(
            inputs=[arrays[name] for name in each["input_names"]],
            grid=each["grid"],
            threadgroup=each["threadgroup"],
            output_shapes=[made[name][0] for name in each["output_names"]],
            output_dtypes=[made[name][1] for name in each["output_names"]],
            stream=stream,
        )
        arrays.update(zip(each["output_names"], outputs, strict=True))
    return (arrays["out"], arrays["lse"]) if return_lse else arrays["out"]


@functools.cache
def _kernel(mx, name, header, source, input_names, output_names):
    return mx.fast.metal_kernel(
        name=name, input_names=list(input_names), output_names=list(output_names), source=source, header=header, ensure_row_contiguous=False,
    )  # fmt: skip
