"""How does this process share its host: which boot is it, how much memory is left, and when does
Python's cycle collector pause?
"""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_lock = threading.Lock()
_inside = 0
_was_on = False


@contextmanager
def uncollected() -> Iterator[None]:
    """No automatic collection begins within the block. Threads may enter it concurrently: the
    last one out enables the collector again, if the first one disabled it.

    A walk over 10,000 tensors keeps about 60,000 new objects. Meanwhile the collector scans every
    object of the process, torch's included, once or twice, which takes longer than the walk. Use
    it only for short work without I/O: it affects the whole process, and cycles that hold device
    memory are freed later.
    """
    global _inside, _was_on
    with _lock:
        if _inside == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside = max(_inside - 1, 0)
            if _inside == 0 and _was_on:
                gc.enable()


def _in_child() -> None:
    """A forked child has none of the threads that were inside."""
    global _lock, _inside
    _lock = threading.Lock()
    if _inside and _was_on:
        gc.enable()
    _inside = 0


os.register_at_fork(after_in_child=_in_child)


@cache
def boot_id() -> str:
    """The id of the host's boot; empty where the host does not report it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated now without swapping or being killed; None if unknown.

    The smallest answer of the host and of every control group of this process counts. Page cache
    counts as free. `proc` and `sys/fs/cgroup` are read below `root`.
    """
    known = (_free_on_host(root), *map(_free_in_group, _limited_groups(root)))
    return min((free for free in known if free is not None), default=None)


def _free_on_host(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_bytes().splitlines():
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_group(files: tuple[Path, Path]) -> int | None:
    limit_file, usage_file = files
    try:
        limit, used = int(limit_file.read_bytes()), int(usage_file.read_bytes())
        lines = limit_file.with_name("memory.stat").read_bytes().splitlines()
        cached = dict(line.split() for line in lines).get(b"inactive_file", b"0")
        return max(limit - used + int(cached), 0)
    except (OSError, ValueError):  # a limit of `max` is none
        return None


@cache
def _limited_groups(root: Path) -> tuple[tuple[Path, Path], ...]:
    """The limit file and the usage file of each control group of this process, cgroup v1 and v2,
    that has a limit below the host's memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        limit, usage = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        top = root / "sys/fs/cgroup" / controllers
        group = top / path.lstrip("/")
        # A container may see its own group as the top.
        groups = [group, *group.parents] if group.exists() else [top]
        found += [(each / limit, each / usage) for each in groups if each.is_relative_to(top)]
    return tuple(files for files in found if _is_limited(files[0]))


def _is_limited(limit: Path) -> bool:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(limit.read_bytes()) < memory
    except (OSError, ValueError):
        return False
