"""A recorded fake of what torch has for Metal, beside the real torch of this machine.

    tensors     real ones whose device is mps, made of memory of this process by torch's C interface
    hooks       what torch asks of a backend before it makes such a tensor: compiled here, with torch's headers
    functions   aoti_torch_mps_… of the same library, which is loaded for all: each calls a function of Python

Every call is kept as it came; a dispatch is run by metal_host on the memory of the tensors. So the road is the real one from
`F.scaled_dot_product_attention` to the encoder: torch's dispatcher, its tensors, its storage offsets. Deliberately absent: any op of MPS but the
making of empty tensors.
"""

import ctypes
import tempfile
from pathlib import Path

import metal_host
import numpy as np
import torch

LIBTORCH = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))
PYTHON = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))
MPS = LIBTORCH.aoti_torch_device_type_mps()

# Each function's arguments.
H, P, I, U, L = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint64
FUNCTIONS = {
    "aoti_torch_mps_create_shader_library": "char* a, void** b",
    "aoti_torch_mps_get_kernel_function": "void* a, char* b, void** c",
    "aoti_torch_mps_run_command_block": "void* a, void* b, void* c",
    "aoti_torch_mps_start_encoding": "void* a",
    "aoti_torch_mps_set_arg_tensor": "void* a, unsigned b, void* c",
    "aoti_torch_mps_dispatch_array_with_group_size": "void* a, uint64_t* b, size_t c, uint64_t* d, size_t e",
    "torch_mps_set_arg_bytes": "void* a, unsigned b, void* c, uint64_t d",
}
TYPES = {"unsigned": U, "size_t": ctypes.c_size_t, "uint64_t": L, "char*": ctypes.c_char_p}


HOOKS = """#include <ATen/detail/MPSHooksInterface.h>
struct MPSHooks : at::MPSHooksInterface {
    MPSHooks(at::MPSHooksArgs = {}) {}
    void init() const override {}
    at::Device getDeviceFromPtr(void*) const override { return {at::kMPS, 0}; }
};
namespace at { C10_REGISTER_CLASS(MPSHooksRegistry, MPSHooks, ::MPSHooks); }
extern "C" {
"""


class Fake:
    """The calls, and what is alive between them."""

    def __init__(self):
        self.calls, self.texts, self.memory, self.mistake = [], [], {}, None
        self.bound, self.params = {}, b""

    # --- torch's functions; each answers 0 ---------------------------------------------------------------------------------

    def aoti_torch_mps_create_shader_library(self, source, handle):
        self.texts.append(source.decode())
        self.calls.append(("library", title(source.decode())))
        ctypes.c_void_p.from_address(handle).value = len(self.texts)

    def aoti_torch_mps_get_kernel_function(self, library, name, handle):
        self.calls.append(("function", name.decode()))
        ctypes.c_void_p.from_address(handle).value = library

    def aoti_torch_mps_run_command_block(self, kernel, callback, data):
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(callback)(kernel, data)

    def aoti_torch_mps_start_encoding(self, kernel):
        self.bound, self.params = {}, b""

    def aoti_torch_mps_set_arg_tensor(self, kernel, slot, handle):
        begin, size = described(handle)
        self.bound[slot] = begin, size

    def torch_mps_set_arg_bytes(self, kernel, slot, at, size):
        assert slot == 0
        self.params = ctypes.string_at(at, size)

    def aoti_torch_mps_dispatch_array_with_group_size(self, kernel, threads, n, group, m):
        assert n == m == 3
        threads, group = (list((ctypes.c_uint64 * 3).from_address(at)) for at in (threads, group))
        assert threads[0] % group[0] == 0 and group[1:] == [1, 1] and threads[2] == 1
        self.calls.append(("dispatch", tuple(threads), tuple(group), dict(self.bound), self.params))
        text, bound, seen = self.texts[kernel - 1], {}, set()
        for slot, (begin, size) in sorted(self.bound.items()):
            # What stands for a tensor that a request does not have is neither read nor written.
            is_output = slot in (7, 8) or slot == 9 and not title(text).startswith("// combine")
            bound[slot] = (f"slot {slot}", begin, 0 if begin in seen else size, is_output)
            seen.add(begin)
        metal_host.run(text, group[0], (threads[0] // group[0], threads[1]), self.params, bound)


def title(text):
    """The line that says which variant a text is."""
    return next(line for line in text.splitlines() if line.startswith("// "))


def described(handle):
    """(address, bytes to the end of its storage) of a tensor's first element."""
    at, size, offset, dtype = ctypes.c_void_p(), ctypes.c_int64(), ctypes.c_int64(), ctypes.c_int32()
    for name, to in (("data_ptr", at), ("storage_size", size), ("storage_offset", offset), ("dtype", dtype)):
        assert getattr(LIBTORCH, f"aoti_torch_get_{name}")(ctypes.c_void_p(handle), ctypes.byref(to)) == 0
    item = {LIBTORCH.aoti_torch_dtype_uint8(): 1, LIBTORCH.aoti_torch_dtype_bool(): 1, LIBTORCH.aoti_torch_dtype_float32(): 4}.get(dtype.value, 2)
    return at.value, size.value - offset.value * item


def install():
    """The fake, entered into the process."""
    fake = Fake()
    source = [HOOKS]
    for name, arguments in FUNCTIONS.items():
        words = ", ".join(each.split()[-1] for each in arguments.split(", "))
        source.append(f"int (*on_{name})({arguments});\nint {name}({arguments}) {{ return on_{name}({words}); }}")
    folder = Path(tempfile.mkdtemp(prefix="rapt-mps-"))
    (folder / "fake.cpp").write_text("\n".join([*source, "}"]))
    of_torch = Path(torch.__file__).parent
    words = ["-std=c++20", "-shared", "-fPIC", f"-I{of_torch / 'include'}", "-o", str(folder / "fake.so"), str(folder / "fake.cpp")]
    metal_host.call(*words, f"-L{of_torch / 'lib'}", "-ltorch_cpu", "-lc10")
    library = ctypes.CDLL(str(folder / "fake.so"), mode=ctypes.RTLD_GLOBAL)
    fake.keep = [library]
    for name, arguments in FUNCTIONS.items():
        types = [TYPES.get(each.split()[0], ctypes.c_void_p) for each in arguments.split(", ")]
        call = ctypes.CFUNCTYPE(ctypes.c_int, *types)(answering(fake, name))
        ctypes.c_void_p.in_dll(library, f"on_{name}").value = ctypes.cast(call, ctypes.c_void_p).value
        fake.keep.append(call)
    lib = torch.library.Library("aten", "IMPL")
    lib.impl("empty.memory_format", lambda size, **options: empty(fake, size, None, options.get("dtype")), "MPS")
    lib.impl("empty_strided", lambda size, stride, **options: empty(fake, size, stride, options.get("dtype")), "MPS")
    fake.keep.append(lib)
    return fake


def answering(fake, name):
    """A function of C that keeps what went wrong."""

    def call(*arguments):
        try:
            if fake.mistake == name:
                return 1
            getattr(fake, name)(*arguments)
            return 0
        except Exception as error:  # noqa: BLE001 - told by the test
            fake.calls.append(("error", repr(error)))
            return 1

    return call


NUMPY = {torch.float32: np.float32, torch.float16: np.float16, torch.bool: np.bool_, torch.uint8: np.uint8, torch.bfloat16: np.uint16}


def empty(fake, size, stride, dtype):
    """A new tensor in memory of its own, filled with NaN."""
    dtype = torch.float32 if dtype is None else dtype
    if stride is None:
        stride, step = [], 1
        for n in reversed(size):
            stride.insert(0, step)
            step *= max(n, 1)
    item = np.dtype(NUMPY[dtype]).itemsize
    extent = (sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1) * item if all(size) else 0
    return tensor(fake, np.full(max(extent, 1), 0xFF, np.uint8), dtype, size, stride)


def tensor(fake, memory, dtype, size, stride, offset=0):
    """A tensor on mps over `memory`, an array that is one storage."""
    code = getattr(LIBTORCH, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()
    fake.memory[memory.ctypes.data] = memory
    made, rank = ctypes.c_void_p(), len(size)
    array = lambda of: (ctypes.c_int64 * max(rank, 1))(*of)  # noqa: E731
    data = ctypes.c_void_p(memory.ctypes.data)
    status = LIBTORCH.aoti_torch_create_tensor_from_blob(
        data, ctypes.c_int64(rank), array(size), array(stride), ctypes.c_int64(offset), code, MPS, 0, ctypes.byref(made)
    )
    assert status == 0
    found = ctypes.py_object()
    assert PYTHON.torch_tensor_to_pyobject(made, None, ctypes.byref(found)) == 0
    LIBTORCH.aoti_torch_delete_tensor_object(made)
    return found.value


def array_of(fake, of):
    """The numbers of a tensor on mps, as f64."""
    begin = of.data_ptr() - of.storage_offset() * of.element_size()
    memory = fake.memory[begin]
    flat = memory.reshape(-1).view(np.uint8)[: memory.nbytes // of.element_size() * of.element_size()].view(NUMPY[of.dtype])
    steps = [step * of.element_size() for step in of.stride()]
    seen = np.lib.stride_tricks.as_strided(flat[of.storage_offset() :], tuple(of.shape), steps)
    if of.dtype is torch.bfloat16:
        return (seen.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return seen.astype(np.float64)
