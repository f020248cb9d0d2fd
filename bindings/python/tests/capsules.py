"""DLPack capsules made by hand, of the first kind, for producers that tests make up."""

import ctypes


class Managed(ctypes.Structure):
    """DLManagedTensor of the first DLPack."""


DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(Managed))
Managed._fields_ = [
    ("data", ctypes.c_void_p),
    ("device_type", ctypes.c_int32),
    ("device_id", ctypes.c_int32),
    ("ndim", ctypes.c_int32),
    ("code", ctypes.c_uint8),
    ("bits", ctypes.c_uint8),
    ("lanes", ctypes.c_uint16),
    ("shape", ctypes.POINTER(ctypes.c_int64)),
    ("strides", ctypes.POINTER(ctypes.c_int64)),
    ("byte_offset", ctypes.c_uint64),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", DELETER),
]

# Nobody but the tests keeps what a capsule points to alive.
_kept = []


def capsule(data, device, shape, strides, tag, end, byte_offset=0):
    """(the capsule, what it points to); `end()` is called when its consumer is done. `tag`: code, bits, lanes."""
    sizes = ctypes.c_int64 * len(shape)
    shape, strides = sizes(*shape), strides and sizes(*strides)
    managed = Managed(data, *device, len(shape), *tag, shape, strides, byte_offset, None, DELETER(lambda _: end()))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    made = new(ctypes.addressof(managed), b"dltensor", None)
    _kept.append((managed, shape, strides))
    return made, managed
