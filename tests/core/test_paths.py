"""What a mount table says, with any bytes that a path may have."""

import os
import subprocess
from pathlib import Path

import pytest

from ckptstore.core import paths
from ckptstore.core.paths import file_system, is_network_filesystem, mount_points, parse_mounts


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("plain", b"plain"),
        ("größe", "größe".encode()),
        ("with space", rb"with\040space"),
        ("tab\tnewline\nbackslash\\", rb"tab\011newline\012backslash\134"),
        ("\\x41 \\u00fc", rb"\134x41\040\134u00fc"),
        (os.fsdecode(b"latin-\xfc"), b"latin-\xfc"),
        ("data-日本", "data-日本".encode()),
    ],
)
def test_a_mount_point_may_have_any_name(
    name: str, written: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = (
        b"21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n42 21 0:39 / /mnt/"
        + written
        + b" rw,relatime - nfs4 host:/x\\040y rw\n"
    )
    assert parse_mounts(table) == [("/", "ext4"), (f"/mnt/{name}", "nfs4")]
    (tmp_path / "mountinfo").write_bytes(table)
    monkeypatch.setattr(paths, "_MOUNT_TABLE", tmp_path / "mountinfo")
    assert is_network_filesystem(Path(f"/mnt/{name}/runs"))
    assert not is_network_filesystem(Path("/mnt/other"))
    assert mount_points() == {Path("/"), Path(f"/mnt/{name}")}


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        *((kind, False) for kind in ("ext4", "xfs", "tmpfs", "overlay", "fuseblk", "zfs")),
        *((kind, True) for kind in ("nfs4", "lustre", "ceph", "virtiofs", "of.tomorrow")),
        *((f"fuse.{kind}", True) for kind in ("glusterfs", "ceph-fuse", "rclone", "mfs", "x")),
        ("fuse", True),
    ],
)
def test_a_file_system_counts_as_shared_unless_it_is_known_to_be_local(
    kind: str, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mountinfo").write_text(f"21 1 8:1 / / rw shared:1 - {kind} source rw\n")
    monkeypatch.setattr(paths, "_MOUNT_TABLE", tmp_path / "mountinfo")
    assert is_network_filesystem(tmp_path) == shared


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_the_kernels_own_table_is_understood(tmp_path: Path) -> None:
    point = tmp_path / "größe 2\\ü"
    point.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "none", str(point)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        (point / "a").mkdir()
        assert file_system(point / "a") == "tmpfs"
        assert point in (mount_points() or ())
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)
