"""With any number of bytes free, `open` and `reindex` that make the indexes anew answer or raise an
error of this package. A page without a block below a mapping would kill the process."""

import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.errors import Unavailable
from tests.support.mounts import free_bytes, small_disk, small_disk_problem

ROOT = Path(__file__).parents[2]
BLOCK_BYTES = 4096
ALL_BLOCKS = range(105)
"""More than both indexes of the small store take."""

SOME_BLOCKS = (0, 1, 2, 3, 4, *range(8, 105, 8))

DISK_BYTES = {"tmpfs": 24 << 20, "ext4": 48 << 20, "ext4 -b 1024": 48 << 20, "xfs": 320 << 20}


def sweep(store: Path, blocks: Iterable[int]) -> None:
    """Try each amount of free space in a child of this process, which has imported torch."""
    with ckptstore.open(store) as opened:
        for step in range(5):
            opened.commit({"m": {"a": torch.arange(1000) + step}}, step=step)
    for wanted_bytes in (BLOCK_BYTES * count for count in blocks):
        for work in (look, rebuild):
            shutil.rmtree(store / "index", ignore_errors=True)
            ballast = fill(store.parent, wanted_bytes)
            if not (child := os.fork()):
                code = 1
                try:
                    work(store)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            status = os.waitpid(child, 0)[1]
            assert not status, f"{work.__name__} with {wanted_bytes} bytes free: {status}"
            ballast.unlink()
    print("survived")


def fill(place: Path, wanted_bytes: int) -> Path:
    """Fill the disk but for about `wanted_bytes`: ext4 takes blocks for its own lists, and xfs
    refuses a file that would take its last blocks."""
    ballast = place / "ballast"
    with ballast.open("wb") as file:
        piece = free_bytes(place)
        while (piece := min(piece, free_bytes(place) - wanted_bytes)) >= BLOCK_BYTES:
            try:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, piece)
            except OSError:
                piece //= 2
        if (missing := wanted_bytes - free_bytes(place)) > 0:
            os.truncate(file.fileno(), max(os.fstat(file.fileno()).st_size - missing, 0))
    return ballast


def look(place: Path) -> None:
    with ckptstore.open(place) as store:
        assert [info.step for info in store.log()] == [4, 3, 2, 1, 0]
        assert store.checkout("latest").read("m/a")[0] == 4


def rebuild(place: Path) -> None:
    with ckptstore.open(place) as store:
        with suppress(Unavailable):
            store.reindex()
        assert len(store.log()) == 5


@contextmanager
def disk(kind: str, folder: Path) -> Iterator[Path]:
    place = folder / "disk"
    if kind == "tmpfs":
        with small_disk(place, size_bytes=DISK_BYTES[kind]):
            yield place
        return
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES[kind])
    place.mkdir()
    # No blocks are kept for root, who would find room where others find none.
    make = {
        "ext4": ("mkfs.ext4", "-q", "-m", "0", "-b", "4096"),
        "ext4 -b 1024": ("mkfs.ext4", "-q", "-m", "0", "-b", "1024"),
        "xfs": ("mkfs.xfs", "-q"),
    }[kind]
    subprocess.run([*make, str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        ("tmpfs", "SOME_BLOCKS"),
        *(
            pytest.param(kind, "ALL_BLOCKS", marks=[pytest.mark.soak, pytest.mark.timeout(1800)])
            for kind in DISK_BYTES
        ),
    ],
)
def test_indexes_that_do_not_fit_cost_no_process(tmp_path: Path, kind: str, blocks: str) -> None:
    if problem := small_disk_problem():
        pytest.skip(problem)
    if kind != "tmpfs" and not shutil.which(f"mkfs.{kind.split()[0]}"):
        pytest.skip(f"mkfs.{kind.split()[0]} is not installed")
    code = (
        "import sys; from tests.maintenance.test_nearly_full_disk import *; "
        f"sweep(Path(sys.argv[1]), {blocks})"
    )
    with disk(kind, tmp_path) as place:
        done = subprocess.run(
            [sys.executable, "-c", code, str(place / "store")],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
    assert done.stdout.split()[-1:] == ["survived"], done.stderr[-3000:]
