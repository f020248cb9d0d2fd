"""OpenVINO's CPU plugin: a model of one ScaledDotProductAttention, at the inference precision of the row's dtype.

Inputs in the row's layout (permuted: [B,S,H,D] with a Transpose inside the model, which the plugin may fuse), zero-copy. In bf16
two forms are built and the faster one is measured: bf16 parameters, and f32 parameters with a bf16 inference precision.

Decoding has one form more, and codes have no other: a model with the cache in its state, to which every call appends a key. The
plugin quantizes the state, u8 by default at any inference precision; here its precision is always asked for, and the note has what
`get_property` says of it.
"""

import functools
import time

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo

import inputs
from peers import Prepared, Unsupported, quickest

BSHD_TO_BHSD = [0, 2, 1, 3]

# The precision of the state by what the row has.
CACHES = {"int8": ov.Type.u8, "int4": ov.Type.u4, "f32": ov.Type.f32, "bf16": ov.Type.bf16}
LONGEST_FILL = 60.0  # seconds to fill all states of a row
GROWTH = 0.01  # of a row's keys: the state is made anew before it has more than so many too many


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
        if row.formats:
            return self.with_state(row, made, copies, CACHES[row.formats[0][0]])
        forms = ["bf16", "f32"] if row.dtype == "bf16" else [row.dtype]
        # What is not native is emulated in f32 by the plugin, and says so here.
        candidates = [self.build(row, made, copies, form) for form in forms]
        if row.kind == "decode" and row.q_len == 1 and row.layout == "contiguous" and made.mask is None:
            candidates.append(self.with_state(row, made, copies, CACHES[row.dtype]))
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

    def with_state(self, row, made, copies, cache):
        """K and V in the state of a model, `cache` being its precision."""
        config = {**self.config, "INFERENCE_PRECISION_HINT": row.dtype, "KV_CACHE_PRECISION": cache}
        compiled = self.core.compile_model(model_with_state(row), "CPU", config)
        q, k, v = (inputs.to_float(array, row.dtype) for array in (made.q, made.k, made.v))
        same = np.arange(row.batch, dtype=np.int32)

        def tensors(q, keys):
            """The parameters that append these keys."""
            given = [inputs.aligned_copy(array) for array in (q, k[:, :, keys], v[:, :, keys])]
            return [ov.Tensor(array, shared_memory=True) for array in (*given, same)]

        def give(request, these):
            for at, tensor in enumerate(these):
                request.set_input_tensor(at, tensor)

        def append(request, these):
            """`these` are kept until they are read: a request does not own their memory."""
            give(request, these)
            request.infer()

        before, last_but_one, last = slice(0, row.kv_len - 2), slice(row.kv_len - 2, row.kv_len - 1), slice(row.kv_len - 1, None)
        appends_last = tensors(q, last)

        def fill(request):
            """All keys but the last, which the first call appends. One is appended here: memory that grows then has grown."""
            if cache == ov.Type.u4:  # 2026.4 crashes where such a state is set: let the model append all
                request.reset_state()
                append(request, tensors(np.zeros_like(k[:, :, before]), before))
            else:
                for state in request.query_state():
                    state.state = ov.Tensor(inputs.aligned_copy((k if state.name == "k" else v)[:, :, before]))
            append(request, tensors(q, last_but_one))
            give(request, appends_last)

        requests = [compiled.create_infer_request() for _ in range(copies)]
        extra = [0] * copies
        for at, request in enumerate(requests):
            began = time.monotonic()
            fill(request)
            seconds = (time.monotonic() - began) * copies
            if at == 0 and seconds > LONGEST_FILL:
                raise Unsupported(f"{copies} states of {cache.to_string()} are filled by its own attention, which would take {seconds:.0f} s")

        def call(at):
            extra[at] += 1
            requests[at].infer(share_outputs=True)

        most = max(1, int(GROWTH / 2 * row.kv_len))  # of a batch; twice as many at most before a state is filled anew

        def rewind():
            for at, request in enumerate(requests):
                if extra[at] > most:
                    fill(request)
                    extra[at] = 0

        def output():
            fill(requests[0])
            extra[0] = 0
            call(0)
            return np.array(requests[0].get_output_tensor(0).data, np.float32)

        return Prepared(
            [functools.partial(call, at) for at in range(copies)], output, note=self.of_state(compiled, row),
            rewind=rewind, most_calls=most * copies,
        )  # fmt: skip

    @staticmethod
    def of_state(compiled, row):
        """What the plugin says of the precision of a state."""
        sides = []
        for side in ("KEY", "VALUE"):
            group = compiled.get_property(f"{side}_CACHE_GROUP_SIZE")
            codes = f" (a factor for {group or 'head_dim'} elements)" if row.formats else ""
            sides.append(f"{compiled.get_property(f'{side}_CACHE_PRECISION').to_string()} {side.lower()}s{codes}")
        return f"state of {sides[0]} and {sides[1]}, {compiled.get_property('INFERENCE_PRECISION_HINT').to_string()} inside"


def model_with_state(row):
    """Parameters are q, the key and value to append, and which batch each one continues; the plugin fuses all into one attention."""
    batch, heads, kv_heads = row.batch, row.num_q_heads, row.num_kv_heads
    # How many heads q has is open: where only the state matters, those of k are enough.
    q = ops.parameter([batch, -1, -1, row.head_dim], ov.Type.f32)
    k = ops.parameter([batch, kv_heads, -1, row.head_dim], ov.Type.f32)
    v = ops.parameter([batch, kv_heads, -1, row.head_dim_v], ov.Type.f32)
    order = ops.parameter([-1], ov.Type.i32)
    assigned = []

    def appended(name, new, head_dim):
        """The state with `new` behind it, every head repeated for its group."""
        described = VariableInfo()
        described.variable_id, described.data_type = name, ov.Type.f32
        described.data_shape = ov.PartialShape([batch, kv_heads, -1, head_dim])
        variable = Variable(described)
        empty = ops.broadcast(ops.constant(np.float32(0)), ops.constant([batch, kv_heads, 0, head_dim]))
        whole = ops.concat([ops.gather(ops.read_value(empty, variable), order, ops.constant(0)), new], 2)
        assigned.append(ops.assign(whole, variable))
        if heads == kv_heads:
            return whole
        group = ops.constant([1, 1, heads // kv_heads, 1, 1])
        whole = ops.broadcast(ops.unsqueeze(whole, ops.constant([2])), group, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(whole, ops.constant([0, heads, -1, head_dim]), special_zero=True)

    o = ops.scaled_dot_product_attention(q, appended("k", k, row.head_dim), appended("v", v, row.head_dim_v))
    return ov.Model([ops.result(o)], assigned, [q, k, v, order], "attention")
