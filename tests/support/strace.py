"""Faults at single system calls of a child: `strace` kills it at the n-th, or lets the n-th
fail."""

import ctypes
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.support.fork_server import Child

CHANGES = (
    "write,pwrite64,pwritev,pwritev2,fsync,fdatasync,sync_file_range,rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat,"
    "ftruncate,fallocate,msync"
)
_PR_SET_PTRACER = 0x59616D61
_ANYONE = ctypes.c_ulong(-1)
_CALL = re.compile(r"^(\d+) +(\w+)\(")


def allow_tracing() -> None:
    """Let anyone trace this process: elsewhere a process may trace its own children only."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANYONE, 0, 0, 0)


@contextmanager
def failing(pid: int, calls: str, error: str) -> Iterator[None]:
    """Within, `calls` of a process that runs fail with `error`."""
    tracer = _tracer(
        "-f",
        "-p",
        str(pid),
        "-o",
        "/dev/null",
        "-e",
        f"trace={calls}",
        "-e",
        f"inject={calls}:error={error}",
    )
    try:
        yield
    finally:
        tracer.terminate()
        tracer.communicate()


def traced(
    child: Child, log: Path, *options: str, calls: str = CHANGES, threads: bool = True
) -> int:
    """Let `child` go with a tracer attached; its exit code. `log` gets the calls it made, of its
    main thread only without `threads`."""
    tracer = _tracer(
        *["-f"] * threads, "-p", str(child.pid), "-o", str(log), "-e", f"trace={calls}", *options
    )
    child.go()
    code = child.wait()
    tracer.communicate()
    return code


def count_calls(log: Path) -> Counter[str]:
    """How often the busiest thread of a traced child made each call."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in log.read_text().splitlines():
        if match := _CALL.match(line):
            counts[match[1], match[2]] += 1
    most: Counter[str] = Counter()
    for (_, call), count in counts.items():
        most[call] = max(most[call], count)
    return most


def every_call(log: Path) -> list[tuple[str, int]]:
    """Each call of each kind by its number: where a fault can be put."""
    return [
        (call, n) for call, count in sorted(count_calls(log).items()) for n in range(1, count + 1)
    ]


@cache
def problem() -> str:
    """Why children cannot be traced here; empty if they can."""
    if not shutil.which("strace"):
        return "strace is not installed"
    tried = subprocess.run(
        ["strace", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False
    )
    return f"strace cannot trace here: {tried.stderr.strip()}" if tried.returncode else ""


def _tracer(*options: str) -> "subprocess.Popen[str]":
    """A tracer that has attached."""
    tracer = subprocess.Popen(["strace", *options], stderr=subprocess.PIPE, text=True)
    assert tracer.stderr
    attached = tracer.stderr.readline()
    assert "attached" in attached, attached
    return tracer
