"""The chunk index is the same on every supported lmdb, in one process and in its children."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from ckptstore.index.chunks import ChunkIndex
from ckptstore.index.chunks.lmdb_env import LOCK_BYTES
from tests.index.building import STORE, footer, pack_name
from tests.index.test_chunks import assert_found

ROOT = Path(__file__).parents[2]


def filled(path: Path) -> Path:
    with closing(ChunkIndex.open(path, STORE)) as index:
        index.add_pack(1, pack_name(1), footer(100, 1))
    return path


def in_child(code: str, path: Path, **environment: str) -> None:
    head = (
        "import os, sys; from pathlib import Path; from tests.index.test_lmdb_engines import *; "
        "path = Path(sys.argv[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + code, str(path)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_format_is_not_for_the_environment_to_choose(tmp_path: Path) -> None:
    code = (
        "filled(path)\nwith closing(ChunkIndex.open(path, STORE)) as index: assert index.indexed()"
    )
    in_child(code, tmp_path / "chunks.lmdb", LMDB_DEFAULT_LIB_VERSION="1")
    with closing(ChunkIndex.open(tmp_path / "chunks.lmdb", STORE)) as index:
        assert index.indexed() == {1}
        assert_found(index, 1, footer(100, 1))


def test_two_indexes_of_one_process_share_an_environment(tmp_path: Path) -> None:
    path = filled(tmp_path / "chunks.lmdb")
    with (
        closing(ChunkIndex.open(path, STORE)) as first,
        closing(ChunkIndex.open(path, STORE)) as second,
    ):
        second.add_pack(2, pack_name(2), footer(100, 2))
        assert first.indexed() == {1, 2}
        assert first.on_disk
        assert second.on_disk
        # What replaces a file is another environment; the other index follows.
        first.reset()
        assert second.indexed() == set()
        assert second.on_disk


def test_a_child_opens_the_index_before_and_after_its_parent_closed_it(tmp_path: Path) -> None:
    code = """
with closing(ChunkIndex.open(filled(path), STORE)) as index:
    child = os.fork()
    if not child:
        other = ChunkIndex.open(path, STORE)
        assert other.on_disk and index.on_disk
        other.add_pack(2, pack_name(2), footer(100, 2))
        assert index.indexed() == {1, 2}
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert index.indexed() == {1, 2}
"""
    in_child(code, tmp_path / "chunks.lmdb")


@pytest.mark.parametrize("left_bytes", [None, 0, LOCK_BYTES - 4096])
def test_an_index_without_its_whole_lock_file_is_made_anew(
    tmp_path: Path, left_bytes: int | None
) -> None:
    path = filled(tmp_path / "chunks.lmdb")
    lock = path / "lock.mdb"
    assert lock.stat().st_size == LOCK_BYTES
    if left_bytes is None:
        lock.unlink()
    else:
        os.truncate(lock, left_bytes)
    with closing(ChunkIndex.open(path, STORE)) as index:
        assert index.indexed() == set()
        assert index.on_disk
    assert lock.stat().st_size == LOCK_BYTES


def test_liblmdb_takes_the_lock_file_as_it_is(tmp_path: Path) -> None:
    with closing(ChunkIndex.open(filled(tmp_path / "chunks.lmdb"), STORE)) as index:
        env = index._env
        assert env
        assert isinstance(env.lmdb, lmdb.Environment)
        assert env.lmdb.max_readers() >= 1024
