"""A fake of MLX as far as `rapt.mlx` asks it: arrays over memory of numpy, and kernels that are declared as MLX declares them and run by metal_host.

    signature   inputs in their order, small ones in the constant address space, with their shape and strides where the source names them; outputs; then
                attributes of the grid that the source names
"""

import sys
import types

import metal_host
import numpy as np

calls = []
"""(keywords of metal_kernel, keywords of the call) of each run."""


class Dtype:
    """One dtype, by MLX's name."""

    def __init__(self, name, storage, metal):
        self.name, self.storage, self.metal = name, storage, metal

    def __str__(self):
        return f"mlx.core.{self.name}"


DTYPES = {
    name: Dtype(name, storage, metal)
    for name, storage, metal in [
        ("float32", np.float32, "float"), ("float16", np.float16, "ushort"), ("bfloat16", np.uint16, "ushort"), ("bool_", np.bool_, "bool"),
        ("uint32", np.uint32, "uint"), ("int32", np.int32, "int"), ("float64", np.float64, "double"),
    ]
}  # fmt: skip


class Array:
    """A view of numpy's, which says of itself what an array of MLX says: no strides."""

    def __init__(self, data, dtype):
        self.data, self.dtype, self.shape = data, dtype, tuple(data.shape)


Array.__module__ = "mlx.core"


def array(values, dtype):
    return Array(np.array(values, dtype.storage), dtype)


def zeros(shape, dtype):
    return Array(np.zeros(shape, dtype.storage), dtype)


def bounds(array):
    """The first byte of an array, and the one behind its last."""
    return np.lib.array_utils.byte_bounds(array) if hasattr(np.lib, "array_utils") else np.byte_bounds(array)


def owner(array):
    """The array whose memory this one shows."""
    of = array
    while getattr(of, "base", None) is not None:
        of = of.base
    return of if isinstance(of, np.ndarray) else array


def metal_kernel(*, name, input_names, output_names, source, header, ensure_row_contiguous):
    """As mx.fast.metal_kernel."""
    made = {"name": name, "input_names": input_names, "output_names": output_names, "source": source, "header": header}
    assert not ensure_row_contiguous

    def run(*, inputs, grid, threadgroup, output_shapes, output_dtypes, stream):
        calls.append((made, {"inputs": inputs, "grid": grid, "threadgroup": threadgroup, "stream": stream}))
        parameters, bound, keep = [], {}, []

        def bind(declared, array, is_output=False):
            slot = len(parameters)
            parameters.append(f"  {declared} [[buffer({slot})]]")
            begin, end = bounds(array)
            # Strides may reach past what there is: other arrays lie there, which are no part of this one.
            end = max(begin, min(end, bounds(owner(array))[1]))
            assert begin == array.ctypes.data or is_output or array.size == 0, "strides above 0"
            bound[slot] = (declared.split()[-1], begin, end - begin, is_output)
            keep.append(array)

        for called, of in zip(input_names, inputs, strict=True):
            space = "constant" if of.data.size < 8 else "const device"
            bind(f"{space} {of.dtype.metal}* {called}", of.data)
            if f"{called}_shape" in source:
                bind(f"constant int* {called}_shape", np.array(of.shape, np.int32))
            if f"{called}_strides" in source:
                item = of.data.itemsize
                bind(f"constant long* {called}_strides", np.array([step // item for step in of.data.strides], np.int64))
        outputs = [Array(np.full(shape, 0xFF if dtype is DTYPES["uint32"] else np.nan if dtype.name.startswith("float") else 0, dtype.storage), dtype)
                   for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]  # fmt: skip
        for called, of in zip(output_names, outputs, strict=True):
            bind(f"device {of.dtype.metal}* {called}", of.data, True)
        grids = ["uint thread_index_in_threadgroup", "uint3 threadgroup_position_in_grid", "uint3 threadgroups_per_grid"]
        assert all(each.split()[1] in source for each in grids)
        if "simdgroup_index_in_threadgroup" in source:
            grids.insert(0, "uint simdgroup_index_in_threadgroup")
        parameters += [f"  {each} [[{each.split()[1]}]]" for each in grids]
        text = f"{header}[[kernel]] void {name}(\n" + ",\n".join(parameters) + ") {\n" + source + "\n}\n"
        groups = grid[0] // threadgroup[0], grid[1]
        assert grid[0] % threadgroup[0] == 0 and threadgroup[1:] == (1, 1) and grid[2] == 1
        metal_host.run_inside(text.replace("const constant", "constant"), name, threadgroup[0], groups, bound)
        return outputs

    return run


def install():
    """`import mlx.core` finds it."""
    core = types.ModuleType("mlx.core")
    core.array, core.zeros, core.fast = array, zeros, types.SimpleNamespace(metal_kernel=metal_kernel)
    for name, dtype in DTYPES.items():
        setattr(core, name, dtype)
    package = types.ModuleType("mlx")
    package.core = core
    sys.modules["mlx"], sys.modules["mlx.core"] = package, core
    return core
