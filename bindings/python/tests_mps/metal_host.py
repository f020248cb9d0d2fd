"""Kernels in Metal's language run on this processor: Python's side of crates/rapt-shader/tests/msl/host.

A text is compiled as it is by the machine's C++ compiler; docs/internals/metal.md says what the host judges. Compiled texts are kept in a temporary
folder of the process.
"""

import ctypes
import functools
import os
import re
import subprocess
import tempfile
from pathlib import Path

HOST = Path(__file__).parents[3] / "crates/rapt-shader/tests/msl/host"
FLAGS = (
    "-std=c++20 -U_FORTIFY_SOURCE -O1 -fPIC -fno-strict-aliasing -Wno-attributes -Wno-unknown-pragmas -march=native -c"
).split()  # fmt: skip
ENTRY = """
struct Slot {{ void* at; template <class T> operator T*() const {{ return static_cast<T*>(at); }} }};
extern "C" __attribute__((no_sanitize("thread"))) void rapt_kernel(void* const* slots, const uint* group, const uint* groups, uint thread) {{
    {call}
}}
"""


GRID = "metal::uint3{group[0], group[1], 0}; metal::uint3{groups[0], groups[1], 1}"
"""Where a workgroup is among all, as arguments."""
SIMDGROUP = "[[simdgroup_index_in_threadgroup]]"


class Range(ctypes.Structure):
    """Bytes that a kernel may read (rights 1) or write (2)."""

    _fields_ = [("name", ctypes.c_char_p), ("begin", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("rights", ctypes.c_uint32)]


class Launch(ctypes.Structure):
    """What lockstep.cpp is asked to run."""

    _fields_ = [
        ("slots", ctypes.POINTER(ctypes.c_void_p)), ("ranges", ctypes.POINTER(Range)), ("num_ranges", ctypes.c_uint32),
        ("threads", ctypes.c_uint32), ("groups", ctypes.c_uint32 * 2), ("message", ctypes.c_char_p), ("message_bytes", ctypes.c_uint64),
    ]  # fmt: skip


def compiler():
    """The C++ compiler."""
    return os.environ.get("CXX", "c++")


def has_compiler():
    """Whether there is one."""
    try:
        return subprocess.run([compiler(), "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@functools.cache
def folder():
    """Where <metal_stdlib>, the host and compiled texts lie."""
    made = Path(tempfile.mkdtemp(prefix="rapt-msl-"))
    (made / "metal_stdlib").write_text((HOST / "stdlib.h").read_text())
    (made / "simdgroup.h").write_text((HOST / "simdgroup.h").read_text())
    call(*FLAGS, "-O2", str(HOST / "lockstep.cpp"), "-o", str(made / "lockstep.o"))
    return made


def call(*words):
    done = subprocess.run([compiler(), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def program(text):
    """The text with the lines that the host adds: which memory is a workgroup's, and the call. And the slots of the kernel."""
    members, kernel = text.split("[[kernel", 1)
    slots = [int(slot) for slot in re.findall(r"\[\[buffer\((\d+)\)\]\]", kernel)]
    lines = []
    for line in kernel.splitlines():
        lines.append(line)
        if line.startswith("    threadgroup "):
            name = re.split(r"[ \[;]", line.removeprefix("    threadgroup "))[1]
            lines.append(f'    rapt_space("{name}", &{name}, sizeof {name});')
    body = "\n".join(lines)
    arguments = "".join(f", Slot{{slots[{slot}]}}" for slot in slots if slot)
    group = GRID.replace("; ", ", ")
    simdgroup = ", thread / 32" if SIMDGROUP in kernel else ""
    entry = ENTRY.format(call=f"attention(*static_cast<const Params*>(slots[0]){arguments}, {group}, thread{simdgroup});")
    return f"{members}#undef threadgroup\n#define threadgroup alignas(1 << 16) static\n[[kernel{body}\n{entry}", slots


def inside(text, name):
    """As `program`, of a kernel that MLX declares: its attributes come in the order of their names."""
    head, kernel = text.split("[[kernel", 1)
    slots = [int(slot) for slot in re.findall(r"\[\[buffer\((\d+)\)\]\]", kernel)]
    simdgroup = ["thread / 32"] if SIMDGROUP in kernel else []
    arguments = ", ".join([*(f"Slot{{slots[{slot}]}}" for slot in slots), *simdgroup, "thread", *GRID.split("; ")])
    source, _ = program(text)
    return source[: source.index("\nstruct Slot")] + ENTRY.format(call=f"{name}({arguments});"), slots


@functools.cache
def compiled(text, name=None):
    """The function that runs a text's workgroups, and its slots. name: of a kernel that MLX declares."""
    source, slots = program(text) if name is None else inside(text, name)
    path = folder() / f"text{abs(hash(text)):x}"
    path.with_suffix(".cpp").write_text(source)
    call(*FLAGS, "-ffast-math", "-fsanitize=thread", f"-I{folder()}", str(path.with_suffix(".cpp")), "-o", str(path.with_suffix(".o")))
    call("-shared", str(path.with_suffix(".o")), str(folder() / "lockstep.o"), "-o", str(path.with_suffix(".so")))
    run = ctypes.CDLL(str(path.with_suffix(".so"))).rapt_run
    run.argtypes, run.restype = [ctypes.POINTER(Launch)], ctypes.c_int
    return run, slots


def run(text, threads, groups, params, bound):
    """Run `groups` workgroups. bound: {slot: (name, address, bytes, whether it is written)}; AssertionError for a forbidden access."""
    function, slots = compiled(text)
    assert sorted(bound) == [slot for slot in slots if slot], "each slot of the kernel, and no other"
    aligned = (ctypes.c_char * (len(params) + 16))()
    begin = -(-ctypes.addressof(aligned) // 16) * 16
    ctypes.memmove(begin, params, len(params))
    launch(function, threads, groups, {0: ("params", begin, len(params), False), **bound})


def run_inside(text, name, threads, groups, bound):
    """As `run`, of a kernel that MLX declares, whose parameters are one of its inputs."""
    function, slots = compiled(text, name)
    assert sorted(bound) == slots
    launch(function, threads, groups, bound)


def launch(function, threads, groups, bound):
    """Runs a compiled text."""
    table, ranges = (ctypes.c_void_p * 31)(), []
    for slot, (name, address, size, is_output) in bound.items():
        table[slot] = address
        ranges.append(Range(name.encode(), address, size, 2 if is_output else 1))
    message = ctypes.create_string_buffer(512)
    asked = Launch(
        table, (Range * len(ranges))(*ranges), len(ranges), threads, (ctypes.c_uint32 * 2)(*groups), ctypes.addressof(message), 512,
    )  # fmt: skip
    assert function(ctypes.byref(asked)) == 0, message.value.decode()
