"""onnxruntime's CPU provider. Every form in which it can be asked is built (ONNX Attention in 4-D or 3-D, com.microsoft
MultiHeadAttention with K and V as [B,S,H*D] or [B,H,S,D]), and the fastest is measured; the row's note says which.

[B,S,H*D] forms take the [B,S,H,D] storage of a permuted row as it is. For a contiguous row MultiHeadAttention gets its inputs in
the form it likes, whatever the row's layout: that is its best, and errs in its favour.

Decoding has one form more, and codes have no other: com.microsoft GroupQueryAttention, which writes the last key and value into the cache
of the others before it attends. Past and present are one buffer, as long as the row, so that every call does the same. Its codes are
symmetric, 8 bits as int8 and 4 bits with 8 added, two a byte, the first below; one factor for all or one for each channel.
"""

import functools

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

import inputs
from peers import Prepared, Unsupported, quickest

TYPES = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16}
BSHD = (0, 2, 1, 3)
BITS = {"int8": 8, "int4": 4}
CODES = {8: TensorProto.INT8, 4: TensorProto.UINT8}
PER_TENSOR, PER_CHANNEL = "PER_TENSOR", "PER_CHANNEL"


def flat(array):
    """[B,H,S,D] values as a contiguous [B,S,H*D] array."""
    batch, heads, length, head_dim = array.shape
    return inputs.aligned_copy(array.transpose(BSHD)).reshape(batch, length, heads * head_dim)


def codes_of(array, bits, granularity):
    """(codes, factors) of f32 values [B,H,S,D], as GroupQueryAttention reads them."""
    largest = np.abs(array).max((2,) if granularity == PER_CHANNEL else None, keepdims=True)
    if granularity == PER_CHANNEL:
        largest = largest.max(0, keepdims=True)
    most = 2 ** (bits - 1) - 1
    factors = np.maximum(largest / most, np.finfo(np.float32).tiny).astype(np.float32)
    codes = np.clip(np.rint(array / factors), -most, most).astype(np.int8)
    if bits == 4:
        nibbles = (codes + 8).astype(np.uint8)
        codes = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return inputs.aligned_copy(codes), factors.reshape(-1) if granularity == PER_TENSOR else factors


class Engine:
    def __init__(self, threads, arguments):
        self.options = ort.SessionOptions()
        self.options.intra_op_num_threads = threads
        self.options.inter_op_num_threads = 1
        self.options.log_severity_level = 4

    def versions(self):
        return {"onnxruntime": ort.__version__}

    def prepare(self, row, copies):
        if row.layout.endswith("_copy"):
            raise Unsupported("a session reads its inputs where they lie")
        made = inputs.make(row)
        built, problems = [], []
        for form in self.forms(row):
            try:
                build = self.over_cache if form.startswith("GroupQueryAttention") else self.build
                built.append(build(row, made, copies, form))
                built[-1].calls[0]()
            except Exception as problem:  # each form has gaps of its own (GQA, Dv != D, masks): the others may do
                problems.append(f"{form}: {problem}".splitlines()[0][:120])
                built = [candidate for candidate in built if candidate.note != form]
        if not built:
            raise Unsupported("; ".join(problems))
        return min(built, key=quickest)

    @staticmethod
    def forms(row):
        if row.formats:
            yield from (f"GroupQueryAttention, {BITS[row.formats[0][0]]} bits {granularity}" for granularity in (PER_TENSOR, PER_CHANNEL))
            return
        if row.kind == "decode" and row.q_len == 1 and row.mask == "none":
            yield "GroupQueryAttention"
        bshd = row.layout in ("permuted", "bshd_cache")
        # In 4-D a permuted row would have to be copied first.
        yield "Attention 3-D" if bshd else "Attention 4-D"
        if row.num_kv_heads == row.num_q_heads:
            yield "MultiHeadAttention"
            if not bshd:
                yield "MultiHeadAttention, K and V [B,H,S,D]"

    def session(self, graph):
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)])
        model.ir_version = 10
        return ort.InferenceSession(model.SerializeToString(), self.options, providers=["CPUExecutionProvider"])

    def over_cache(self, row, made, copies, form):
        """GroupQueryAttention: the cache is of the row's numbers, or of codes of them in the bits and granularity that `form` names."""
        last = slice(row.kv_len - 1, None)
        feeds = {"q": flat(made.q), "k": flat(made.k[:, :, last]), "v": flat(made.v[:, :, last])}
        kinds = dict.fromkeys(feeds, TYPES[row.dtype])
        words = {"num_heads": row.num_q_heads, "kv_num_heads": row.num_kv_heads}
        names = ["q", "k", "v", "past_k", "past_v", "seqlens_k", "total"]
        if row.formats:
            bits, granularity = BITS[row.formats[0][0]], form.split()[-1]
            (past_k, k_scale), (past_v, v_scale) = (codes_of(inputs.to_float(x, row.dtype), bits, granularity) for x in (made.k, made.v))
            words |= {"k_quant_type": granularity, "v_quant_type": granularity, "kv_cache_bit_width": bits}
            names += ["", "", "", "", "", "k_scale", "v_scale"]
            feeds |= {"k_scale": k_scale, "v_scale": v_scale}
            kind_of_cache = CODES[bits]
        else:
            past_k, past_v = inputs.aligned_copy(made.k), inputs.aligned_copy(made.v)
            kind_of_cache = TYPES[row.dtype]
        feeds |= {"seqlens_k": np.full(row.batch, row.kv_len - 1, np.int32), "total": np.array(row.kv_len, np.int32)}
        kinds |= {"seqlens_k": TensorProto.INT32, "total": TensorProto.INT32, "k_scale": TensorProto.FLOAT, "v_scale": TensorProto.FLOAT}
        caches = {"past_k": past_k, "past_v": past_v}
        out_shape = [row.batch, row.q_len, row.num_q_heads * row.head_dim_v]
        node = helper.make_node("GroupQueryAttention", names, ["o", "present_k", "present_v"], domain="com.microsoft", **words)
        taken = [helper.make_tensor_value_info(name, kinds[name], list(array.shape)) for name, array in feeds.items()]
        taken += [helper.make_tensor_value_info(name, kind_of_cache, list(array.shape)) for name, array in caches.items()]
        given = [helper.make_tensor_value_info("o", TYPES[row.dtype], out_shape)]
        given += [helper.make_tensor_value_info(f"present_{x}", kind_of_cache, list(caches[f"past_{x}"].shape)) for x in "kv"]
        session = self.session(helper.make_graph([node], "attention", taken, given))

        result = inputs.aligned_copy(np.zeros(out_shape, made.q.dtype))
        bindings, kept = [], [feeds, result]
        for copy in range(copies):
            binding = session.io_binding()
            for name, array in feeds.items():
                binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
            for name, array in caches.items():
                kept.append(inputs.aligned_copy(array))
                value = ort.OrtValue.ortvalue_from_numpy(kept[-1])
                binding.bind_ortvalue_input(name, value)
                binding.bind_ortvalue_output(name.replace("past", "present"), value)
            binding.bind_ortvalue_output("o", ort.OrtValue.ortvalue_from_numpy(result))
            bindings.append(binding)

        def call(binding, kept=kept):  # `kept`: ortvalue_from_numpy reads the arrays in place
            session.run_with_iobinding(binding)

        def output():
            call(bindings[0])
            heads = result.reshape(row.batch, row.q_len, row.num_q_heads, row.head_dim_v)
            return np.array(heads.transpose(BSHD), np.float32)

        return Prepared([functools.partial(call, binding) for binding in bindings], output, note=form)

    def build(self, row, made, copies, form):
        as_flat = (flat, flat) if form in ("Attention 3-D", "MultiHeadAttention") else (flat, inputs.aligned_copy)
        if form == "Attention 4-D":
            as_flat = (inputs.aligned_copy, inputs.aligned_copy)
        feeds = {"q": as_flat[0](made.q), "k": as_flat[1](made.k), "v": as_flat[1](made.v)}
        causal = inputs.plain_causal(row) and made.mask is None
        mask = None if causal else inputs.combined_mask(row, made.mask)
        if form.startswith("Attention"):
            names, words = ["q", "k", "v"], {"is_causal": int(causal)}
            if form == "Attention 3-D":
                words |= {"q_num_heads": row.num_q_heads, "kv_num_heads": row.num_kv_heads}
            if mask is not None:
                names.append("mask")
                feeds["mask"] = np.ascontiguousarray(np.broadcast_to(mask, (*mask.shape[:2], row.q_len, row.kv_len)))
            node = helper.make_node("Attention", names, ["o"], **words)
        else:
            names, words = ["q", "k", "v"], {"num_heads": row.num_q_heads, "unidirectional": int(causal)}
            if mask is not None:
                names += ["", "", "mask"]
                bias = np.where(mask, 0, -np.inf) if mask.dtype == bool else mask
                whole = np.broadcast_to(bias, (*mask.shape[:2], row.q_len, row.kv_len))
                feeds["mask"] = np.ascontiguousarray(whole.astype(made.q.dtype))
            node = helper.make_node("MultiHeadAttention", names, ["o"], domain="com.microsoft", **words)

        def value(name):
            kind = TensorProto.BOOL if feeds[name].dtype == bool else TYPES[row.dtype]
            return helper.make_tensor_value_info(name, kind, list(feeds[name].shape))

        flat_output = form != "Attention 4-D"
        out_shape = (
            [row.batch, row.q_len, row.num_q_heads * row.head_dim_v] if flat_output
            else [row.batch, row.num_q_heads, row.q_len, row.head_dim_v]
        )  # fmt: skip
        graph = helper.make_graph(
            [node], "attention", [value(name) for name in feeds], [helper.make_tensor_value_info("o", TYPES[row.dtype], out_shape)]
        )
        session = self.session(graph)

        result = inputs.aligned_copy(np.zeros(out_shape, made.q.dtype))
        bindings, kept = [], [feeds, result]
        for copy in range(copies):
            binding = session.io_binding()
            for name, array in feeds.items():
                if copy and name in "kv":
                    array = inputs.aligned_copy(array)
                    kept.append(array)
                binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
            binding.bind_ortvalue_output("o", ort.OrtValue.ortvalue_from_numpy(result))
            bindings.append(binding)

        def output():
            session.run_with_iobinding(bindings[0])
            array = bindings[0].copy_outputs_to_cpu()[0]
            if flat_output:
                array = array.reshape(row.batch, row.q_len, row.num_q_heads, row.head_dim_v).transpose(BSHD)
            return np.array(array, np.float32)

        def call(binding, kept=kept):  # `kept`: ortvalue_from_numpy reads the arrays in place
            session.run_with_iobinding(binding)

        return Prepared([lambda binding=binding: call(binding) for binding in bindings], output, note=form)
