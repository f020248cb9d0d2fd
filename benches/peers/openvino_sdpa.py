"""OpenVINO's CPU plugin: a model of one ScaledDotProductAttention, at the inference precision of the row's dtype.

Inputs in the row's layout (permuted: [B,S,H,D] with a Transpose inside the model, which the plugin may fuse), zero-copy. In bf16
two forms are built and the faster one is measured: bf16 parameters, and f32 parameters with a bf16 inference precision.
"""

import numpy as np
import openvino as ov
from openvino import opset13 as ops

import inputs
from peers import Prepared, Unsupported, quickest

BSHD_TO_BHSD = [0, 2, 1, 3]


def as_tensor(array, parameters):
    """An OpenVINO tensor over the array's own memory."""
    if parameters == "bf16":
        return ov.Tensor(array, list(array.shape), ov.Type.bf16)
    return ov.Tensor(array, shared_memory=True)


class Engine:
    def __init__(self, threads, arguments):
        self.core = ov.Core()
        self.config = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
        self.native = self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")

    def versions(self):
        return {"openvino": ov.__version__, "capabilities": " ".join(self.native)}

    def prepare(self, row, copies):
        if row.layout.endswith("_copy"):
            raise Unsupported("a model reads its inputs where they lie")
        made = inputs.make(row)
        forms = ["bf16", "f32"] if row.dtype == "bf16" else [row.dtype]
        # What is not native is emulated in f32 by the plugin, and says so here.
        candidates = [self.build(row, made, copies, form) for form in forms]
        if len(candidates) > 1:
            candidates.sort(key=quickest)
        return candidates[0]

    def build(self, row, made, copies, parameters):
        permuted = {"q": row.layout == "permuted", "kv": row.layout in ("permuted", "bshd_cache")}
        element = {"bf16": ov.Type.bf16, "f32": ov.Type.f32}[parameters]

        def stored(array, is_permuted):
            array = array.transpose(BSHD_TO_BHSD) if is_permuted else array
            if row.dtype == "bf16" and parameters == "f32":
                array = inputs.to_float(array, "bf16")
            return inputs.aligned_copy(array)

        def read(parameter, is_permuted):
            return ops.transpose(parameter, ops.constant(BSHD_TO_BHSD)) if is_permuted else parameter

        def repeated(node, length, head_dim):
            """GQA: each kv head seen by its group, in the form that the plugin's own models use."""
            if row.num_kv_heads == row.num_q_heads:
                return node
            group_size = row.num_q_heads // row.num_kv_heads
            wide = [row.batch, row.num_kv_heads, group_size, length, head_dim]
            node = ops.broadcast(ops.unsqueeze(node, ops.constant([2])), ops.constant(wide))
            return ops.reshape(node, ops.constant([row.batch, row.num_q_heads, length, head_dim]), special_zero=False)

        arrays = [stored(made.q, permuted["q"])]
        arrays += [stored(made.k, permuted["kv"]), stored(made.v, permuted["kv"])]
        parameters_of_model = [ops.parameter(list(array.shape), element) for array in arrays]
        q = read(parameters_of_model[0], permuted["q"])
        k = repeated(read(parameters_of_model[1], permuted["kv"]), row.kv_len, row.head_dim)
        v = repeated(read(parameters_of_model[2], permuted["kv"]), row.kv_len, row.head_dim_v)
        words = {}
        if inputs.plain_causal(row) and made.mask is None:
            words["causal"] = True
        else:
            mask = inputs.combined_mask(row, made.mask)
            if mask is not None:
                is_bool = mask.dtype == bool
                mask = inputs.aligned_copy(mask) if is_bool else stored(mask, False)
                parameters_of_model.append(ops.parameter(list(mask.shape), ov.Type.boolean if is_bool else element))
                arrays.append(mask)
                words["attention_mask"] = parameters_of_model[-1]
        o = ops.scaled_dot_product_attention(q, k, v, **words)
        o = read(o, permuted["q"])  # stored as torch stores it: [B,S,H,D] again
        model = ov.Model([o], parameters_of_model, "attention")
        compiled = self.core.compile_model(model, "CPU", {**self.config, "INFERENCE_PRECISION_HINT": row.dtype})

        requests, kept = [], []
        for copy in range(copies):
            request = compiled.create_infer_request()
            for at, array in enumerate(arrays):
                rotated = inputs.aligned_copy(array) if copy and at in (1, 2) else array
                request.set_input_tensor(at, as_tensor(rotated, "bool" if rotated.dtype == bool else parameters))
                kept.append(rotated)
            requests.append(request)

        def run(request, kept=kept):  # `kept`: a request reads the arrays in place and does not own them
            request.infer(share_outputs=True)

        def output():
            run(requests[0])
            result = requests[0].get_output_tensor(0)
            array = result.data
            if result.element_type == ov.Type.bf16:
                array = inputs.to_float(array.view(np.uint16), "bf16")
            return np.array(array.transpose(BSHD_TO_BHSD) if permuted["q"] else array, np.float32)

        precision = str(compiled.get_property("INFERENCE_PRECISION_HINT").to_string())
        return Prepared(
            [lambda request=request: run(request) for request in requests],
            output,
            note=f"{parameters} parameters, {precision} inside",
        )
