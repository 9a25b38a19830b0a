"""Free host memory respects every control group of the process, in both versions of cgroups."""

import os
from pathlib import Path

import pytest

from ckptstore.core.config import MIN_STAGING_BYTES
from ckptstore.core.process import free_bytes
from ckptstore.state.staging_buffers import default_budget

MIB = 1 << 20
V2 = ("sys/fs/cgroup", "0::", ("memory.max", "memory.current"))
V1 = (
    "sys/fs/cgroup/memory",
    "4:memory:",
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
UNLIMITED = {"0::": b"max", "4:memory:": str((1 << 63) - 4096).encode()}

both_versions = pytest.mark.parametrize(("tree", "line", "names"), [V2, V1], ids=["v2", "v1"])


def write_meminfo(root: Path, available: int) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_bytes(b"MemAvailable: %d kB\n" % (available >> 10))


def write_group(folder: Path, names: tuple[str, str], limit: bytes, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_bytes(limit + b"\n")
    (folder / names[1]).write_bytes(b"%d\n" % used)
    (folder / "memory.stat").write_bytes(b"anon 1\ninactive_file %d\n" % cached)


@both_versions
def test_the_default_staging_budget_respects_a_nested_limit(
    tree: str, line: str, names: tuple[str, str], tmp_path: Path
) -> None:
    write_meminfo(tmp_path, 8 << 30)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}/job/task\n")
    write_group(tmp_path / tree, names, UNLIMITED[line], 900 * MIB, 0)
    write_group(tmp_path / tree / "job", names, b"%d" % (400 * MIB), 200 * MIB, 0)
    write_group(tmp_path / tree / "job/task", names, UNLIMITED[line], 150 * MIB, 0)
    assert free_bytes(tmp_path) == 200 * MIB
    assert default_budget(tmp_path) == 100 * MIB


@both_versions
def test_the_nearest_limit_counts_and_cache_counts_as_free(
    tree: str, line: str, names: tuple[str, str], tmp_path: Path
) -> None:
    write_meminfo(tmp_path, 8 << 30)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}/job/task\n")
    write_group(tmp_path / tree / "job", names, b"%d" % (400 * MIB), 0, 0)
    write_group(tmp_path / tree / "job/task", names, b"%d" % (300 * MIB), 250 * MIB, 30 * MIB)
    assert free_bytes(tmp_path) == 80 * MIB


@both_versions
def test_a_container_sees_its_own_group_as_the_root(
    tree: str, line: str, names: tuple[str, str], tmp_path: Path
) -> None:
    write_meminfo(tmp_path, 8 << 30)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}/docker/0123\n")
    write_group(tmp_path / tree, names, b"%d" % (200 * MIB), 0, 0)
    assert free_bytes(tmp_path) == 200 * MIB


def test_without_a_limit_the_host_decides(tmp_path: Path) -> None:
    write_meminfo(tmp_path, 512 * MIB)
    assert free_bytes(tmp_path) == 512 * MIB
    assert default_budget(tmp_path) == 256 * MIB


def test_the_default_budget_has_a_floor(tmp_path: Path) -> None:
    write_meminfo(tmp_path, 1 * MIB)
    assert default_budget(tmp_path) == MIN_STAGING_BYTES


def test_the_real_host_has_memory() -> None:
    free = free_bytes()
    assert free is not None
    assert 0 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
