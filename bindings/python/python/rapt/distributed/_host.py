"""What ranks of one host find one another by: its name, and files of memory that all of them can map.

Deliberately absent: hosts without /proc and /dev/shm; their ranks send.
"""

import functools
import os
import tempfile

_SHARED = "/dev/shm"


@functools.cache
def boot():
    """What names this host until it starts anew: None where nothing does."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return None


def has_memory():
    """Whether files of memory can be made here."""
    return os.access(_SHARED, os.W_OK)


def processes():
    """What names the processes that this one can watch: None where it can watch none."""
    try:
        return f"{boot()} {os.readlink('/proc/self/ns/pid')}" if boot() and hasattr(os, "pidfd_open") else None
    except OSError:
        return None


def new_file(count_bytes):
    """The path of a file of so many bytes of memory, of this user alone, for whoever is told it. The caller unlinks it."""
    descriptor, path = tempfile.mkstemp(prefix=f"rapt-{os.getpid()}-", dir=_SHARED)
    try:
        with open(descriptor, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, count_bytes)
    except OSError:
        os.unlink(path)
        raise
    return path
