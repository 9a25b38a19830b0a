"""How are chunks read from a peer process on the same host? From its memory, without a socket
(docs/decisions/037-…).

A probe first checks that the process can be read and is the peer. Chunks read this way are hashed
at their destination like all others.
"""

import ctypes
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ckptstore.core.ids import digest
from ckptstore.interop.chunk_transfer.protocol import Near

_SAME = ("/proc/sys/kernel/random/boot_id", "/proc/thread-self/ns/pid", "/proc/thread-self/ns/net")
"""Namespaces that two processes must share to count as near: kernel, process numbers and
network.
"""


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Probe:
    """Bytes of this process that a peer looks for: a peer that finds them can read its memory."""

    def __init__(self, instance: str) -> None:
        self._memory = ctypes.create_string_buffer(instance.encode())
        where = _where()
        self.near = Near(where, os.getpid(), ctypes.addressof(self._memory)) if where else None


def is_near(near: Near | None, instance: str) -> bool:
    """Whether the process of this instance is on this host and allows reading its memory."""
    if near is None or near.where != _where():
        return False
    found = memoryview(bytearray(len(instance)))
    return read_memory(near.pid, near.address, found) and found == instance.encode()


def address_of(memory: memoryview) -> int | None:
    """The address of bytes of this process; None for read-only bytes, which need not stay there."""
    return (
        None
        if memory.readonly or not memory.nbytes
        else ctypes.addressof(ctypes.c_char.from_buffer(memory))
    )


def read_memory(process: int, address: int, out: memoryview) -> bool:
    """Fill `out` from a process's memory at `address`; False if the process is gone or forbids
    it.
    """
    read, done, own = _read_function(), 0, address_of(out)
    while read and own is not None and done < out.nbytes:
        here, there = _Span(own + done, out.nbytes - done), _Span(address + done, out.nbytes - done)
        n = read(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)  # releases the GIL
        if n <= 0:
            return False
        done += n
    return done == out.nbytes


def _where() -> str:
    """An identity that near processes share; empty where the system has none."""
    if _read_function() is None:
        return ""
    with suppress(OSError):
        boot, *namespaces = _SAME
        parts = [
            Path(boot).read_text(encoding="ascii").strip(),
            *map(os.readlink, namespaces),
            str(os.getuid()),
        ]
        return digest(" ".join(parts).encode()).hex()[:32]
    return ""


@cache
def _read_function() -> Any:
    function = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if function:
        number = ctypes.c_ulong
        function.argtypes = (ctypes.c_int, ctypes.c_void_p, number, ctypes.c_void_p, number, number)
        function.restype = ctypes.c_ssize_t
    return function
