"""How much memory can this process still allocate on this host?"""

import os
from functools import cache
from pathlib import Path

_ROOT = Path("/")


def free_bytes(root: Path = _ROOT) -> int | None:
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
    try:
        limit, used = (path.read_bytes().strip() for path in files)
        statistics = dict(
            line.split() for line in files[0].with_name("memory.stat").read_bytes().splitlines()
        )
        cached = statistics.get(b"inactive_file", b"0")
        return max(int(limit) - int(used) + int(cached), 0) if limit.isdigit() else None
    except (OSError, ValueError):
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
        text = limit.read_text().strip()
    except OSError:
        return False
    return text.isdigit() and int(text) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
