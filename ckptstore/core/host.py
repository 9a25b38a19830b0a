"""How much memory this host has to give: what is free on it and within the control groups of this
process."""

import os
from functools import cache
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Bytes that could be allocated now without swapping or being killed, page cache counted as
    free; None where nobody says."""
    known = [
        free for free in (_free_on_host(), *map(_free_in_group, _groups())) if free is not None
    ]
    return min(known, default=None)


def _free_on_host() -> int | None:
    try:
        with open("/proc/meminfo", "rb") as lines:
            for line in lines:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return (
        os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if "SC_AVPHYS_PAGES" in os.sysconf_names
        else None
    )


def _free_in_group(files: tuple[Path, Path]) -> int | None:
    try:
        limit, used = (path.read_bytes().strip() for path in files)
        cached = dict(
            line.split() for line in (files[0].parent / "memory.stat").read_bytes().splitlines()
        ).get(b"inactive_file", b"0")
        return max(int(limit) - int(used) + int(cached), 0) if limit.isdigit() else None
    except (OSError, ValueError):
        return None


@cache
def _groups() -> tuple[tuple[Path, Path], ...]:
    """The limit and usage files of those of this process's control groups that have a limit below
    the host's memory."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            names = (
                ("memory.max", "memory.current")
                if not controllers
                else ("memory.limit_in_bytes", "memory.usage_in_bytes")
            )
            root = _CGROUPS / controllers
            place = root / path.lstrip("/")
            # A container may see its own group as the root.
            places = [place, *place.parents] if place.exists() else [root]
            found += [
                (each / names[0], each / names[1]) for each in places if each.is_relative_to(root)
            ]
    return tuple(files for files in found if _is_limited(files[0]))


def _is_limited(limit: Path) -> bool:
    try:
        text = limit.read_text().strip()
    except OSError:
        return False
    return text.isdigit() and int(text) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
