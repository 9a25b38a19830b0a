"""Any damage to the chunk index's files leaves the process alive, with correct locations or none.

Checks that might kill the process run in another one, which reports at its end.
"""

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import StoreId
from ckptstore.core.process import file_lock
from ckptstore.index.chunks import ChunkIndex, lmdb_check
from ckptstore.index.chunks import index as module
from ckptstore.index.chunks.lmdb_env import DATABASES
from ckptstore.index.chunks.records import RECORD_BYTES, decode, encode, ids_of, seed_of
from tests.index.building import STORE, footer, pack_name
from tests.index.test_chunks import assert_found, assert_missing, ids
from tests.support.mounts import failing_disk, power_disk_problem

verify = pytest.importorskip("lmdb.verify", reason="lmdb before 3.0 verifies no file").verify

PACKS = range(1, 30)


def filled(path: Path) -> Path:
    """An index with several levels of pages, pages that are free, and chunks that two packs
    hold."""
    with closing(ChunkIndex.open(path, STORE)) as index:
        for number in PACKS:
            index.add_pack(number, pack_name(number), footer(400, number // 2))
        index.drop_packs(range(1, 8))
    return path


def assert_right_or_missing(index: ChunkIndex) -> None:
    for number in PACKS:
        table = footer(400, number // 2)
        rows = index.get_many(ids(table))
        found = rows["found"] == 1
        assert (rows["offset"][found] == table["offset"][found]).all()
        assert (rows["pack"][found] // 2 == number // 2).all()


def run(code: str, *arguments: object) -> None:
    head = (
        "import sys; from tests.index.test_chunk_damage import *; path, seed = "
        "Path(sys.argv[1]), int(sys.argv[2])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["survived"]), done.stderr[-3000:]


def damage_and_use(good: Path, seed: int, trials: int) -> None:
    """Change some bytes of a copy, aimed at headers often, then read and write through it."""
    rng = random.Random(seed)
    data = good / "data.mdb"
    size = data.stat().st_size
    for n in range(trials):
        path = good.with_name(f"copy{n}")
        shutil.copytree(good, path)
        with (path / "data.mdb").open("r+b") as file:
            for _ in range(rng.choice((1, 1, 3, 50))):
                page = rng.randrange(size // 4096) * 4096
                file.seek(
                    page
                    + rng.choice(
                        (
                            rng.randrange(4096),
                            rng.randrange(16),
                            rng.randrange(64),
                            rng.randrange(160),
                        )
                    )
                )
                file.write(rng.choice((rng.randbytes(1), rng.randbytes(8), bytes(8), b"\xff" * 8)))
        if rng.random() < 0.2:
            os.truncate(path / "data.mdb", rng.randrange(size))
        with closing(ChunkIndex.open(path, STORE)) as index:
            assert_right_or_missing(index)
            for number in (50, 51):
                index.add_pack(number, pack_name(number), footer(300, number))
            index.drop_packs([10, 11, 50])
            assert_missing(index, footer(300, 50))
            assert_found(index, 51, footer(300, 51))
            index.reset()
            assert index.indexed() == set()
        shutil.rmtree(path)


@pytest.mark.parametrize("trials", [40, pytest.param(1500, marks=pytest.mark.soak)])
def test_whatever_bytes_change_no_process_dies_and_no_place_is_wrong(
    tmp_path: Path, seed: int, trials: int
) -> None:
    run(f"damage_and_use(path, seed, {trials}); print('survived')", filled(tmp_path / "good"), seed)


def test_a_page_that_the_disk_cannot_read_costs_no_process(tmp_path: Path) -> None:
    if problem := power_disk_problem("ext4"):
        pytest.skip(problem)
    with failing_disk(tmp_path / "disk") as lose:
        path = filled(tmp_path / "disk" / "chunks.lmdb")
        lose(path / "data.mdb", (path / "data.mdb").stat().st_size // 2)
        run("use_after_loss(path)\nprint('survived')", path, 0)


def use_after_loss(path: Path) -> None:
    with closing(ChunkIndex.open(path, STORE)) as index:
        assert_right_or_missing(index)
        index.add_pack(50, pack_name(50), footer(300, 50))
        assert_found(index, 50, footer(300, 50))


@pytest.mark.parametrize("left_bytes", [0, 4096, 5000, 8192, 40_000])
def test_a_file_that_is_cut_below_a_running_process_is_replaced(
    tmp_path: Path, left_bytes: int
) -> None:
    code = """
index = ChunkIndex.open(path, STORE)
assert_right_or_missing(index)
os.truncate(path / "data.mdb", seed)
assert_missing(index, footer(400, 10))
assert index.indexed() == set()
index.add_pack(20, pack_name(20), footer(400, 10))
assert_found(index, 20, footer(400, 10))
os.truncate(path / "data.mdb", seed)
index.add_pack(21, pack_name(21), footer(400, 11))
assert_found(index, 21, footer(400, 11))
assert index.on_disk
print("survived")
"""
    run(code, filled(tmp_path / "chunks.lmdb"), left_bytes)


def _stamp(text: str) -> Callable[[Path], object]:
    return lambda path: (path / "stamp").write_text(text)


SPOILED: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path / "data.mdb", 20_000),
    "empty": lambda path: (path / "data.mdb").write_bytes(b""),
    "zeros": lambda path: (path / "data.mdb").write_bytes(bytes(100_000)),
    "no data": lambda path: (path / "data.mdb").unlink(),
    "no stamp": lambda path: (path / "stamp").unlink(),
    "another format": _stamp("0 whatever"),
    "bytes for a stamp": lambda path: (path / "stamp").write_bytes(b"\xff\xfe"),
    "another boot": lambda path: (path / "stamp").write_text(
        (path / "stamp").read_text()[:-10] + "123456789\n"
    ),
    "a file": lambda path: (shutil.rmtree(path), path.write_text("no folder")),
    "a dangling link": lambda path: (shutil.rmtree(path), path.symlink_to("nowhere")),
    "another LMDB database": lambda path: (shutil.rmtree(path), _other_database(path)),
}


def _other_database(path: Path) -> None:
    import lmdb

    path.mkdir()
    with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_a_file_that_cannot_be_used_is_replaced(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    path = filled(tmp_path / "chunks.lmdb")
    spoil(path)
    with closing(ChunkIndex.open(path, STORE)) as index:
        assert index.indexed() == set()
        assert_missing(index, footer(400, 10))
        index.add_pack(20, pack_name(20), footer(400, 10))
        assert index.on_disk
        assert_found(index, 20, footer(400, 10))
    assert [
        place.name for place in tmp_path.iterdir() if place.name.startswith("chunks.lmdb.")
    ] in ([], ["chunks.lmdb.lock"])


def test_another_store_s_index_is_replaced(tmp_path: Path) -> None:
    with closing(ChunkIndex.open(filled(tmp_path / "chunks.lmdb"), StoreId("6" * 32))) as index:
        assert index.indexed() == set()


def test_an_index_that_another_process_replaced_is_opened_again(tmp_path: Path) -> None:
    path = filled(tmp_path / "chunks.lmdb")
    with closing(ChunkIndex.open(path, STORE)) as index:
        assert index.indexed()
        run(
            "index = ChunkIndex.open(path, STORE); index.reset(); index.add_pack(77, "
            "pack_name(77), footer(10, 77)); print('survived')",
            path,
            0,
        )
        assert index.indexed() == {77}
        assert_found(index, 77, footer(10, 77))
        index.add_pack(78, pack_name(78), footer(10, 78))
    with closing(ChunkIndex.open(path, STORE)) as index:
        assert index.indexed() == {77, 78}


def test_a_record_that_does_not_match_its_check_is_missing_and_the_index_begins_again(
    tmp_path: Path,
) -> None:
    path = filled(tmp_path / "chunks.lmdb")
    chunk = ids(footer(400, 10))[:32]
    data = bytearray((path / "data.mdb").read_bytes())
    at = data.index(chunk)
    while at >= 0:
        data[at + 33] ^= 1
        at = data.find(chunk, at + 1)
    (path / "data.mdb").write_bytes(data)
    with closing(ChunkIndex.open(path, STORE)) as index:
        assert index.indexed()
        assert not index.get_many(chunk)["found"].any()
        assert index.indexed() == set()


@given(st.integers(0, 255), st.integers(0, 7), st.integers(0, 31 + RECORD_BYTES))
def test_any_flipped_bit_of_a_record_or_its_key_is_noticed(
    record: int, bit: int, byte: int
) -> None:
    table = footer(256, 1)
    changed = bytearray(encode(seed_of(STORE), 3, table).tobytes())
    changed[record * (32 + RECORD_BYTES) + byte] ^= 1 << bit
    parts = np.frombuffer(changed, np.uint8).reshape(-1, 32 + RECORD_BYTES)
    got, whole = decode(
        seed_of(STORE), ids_of(parts[:, :32].tobytes()), bytearray(parts[:, 32:].tobytes())
    )
    assert not whole
    assert got["found"].tolist() == [int(n != record) for n in range(256)]


def test_a_sound_file_passes_where_lmdb_s_own_verifier_passes_it(tmp_path: Path) -> None:
    path = filled(tmp_path / "chunks.lmdb") / "data.mdb"
    assert not verify(str(path), subdir=False)
    lmdb_check.check(path, DATABASES)


def test_what_lmdb_s_own_verifier_refuses_in_structure_is_refused(
    tmp_path: Path, seed: int
) -> None:
    good, rng = (filled(tmp_path / "chunks.lmdb") / "data.mdb").read_bytes(), random.Random(seed)
    path, refused = tmp_path / "data.mdb", 0
    for _ in range(60):
        data = bytearray(good)
        page = rng.randrange(2, len(data) // 4096) * 4096
        data[page + rng.randrange(16)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        if _refuses(path):
            refused += 1
            with pytest.raises(lmdb_check.Damaged):
                lmdb_check.check(path, DATABASES)
    assert refused


def _refuses(path: Path) -> bool:
    return bool(verify(str(path), subdir=False))


def test_without_a_place_to_write_everything_is_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with closing(ChunkIndex.open(tmp_path / "file" / "chunks.lmdb", STORE)) as index:
        assert not index.on_disk
        index.add_pack(1, pack_name(1), footer(100, 1))
        index.add_pack(2, pack_name(2), footer(100, 2))
        assert_found(index, 1, footer(100, 1))
        assert index.pack_ids([2]) == {2: pack_name(2)}
        index.drop_packs([1])
        assert_missing(index, footer(100, 1))
        assert index.indexed() == {2}
        index.reset()
        assert index.indexed() == set()


def test_what_could_not_be_written_is_found_in_memory_and_written_later(tmp_path: Path) -> None:
    path = tmp_path / "chunks.lmdb"
    with closing(ChunkIndex.open(path, STORE, lock_timeout_s=0.05)) as index:
        with file_lock(path.with_name("chunks.lmdb.lock"), timeout_s=1) as held:
            assert held
            index.add_pack(1, pack_name(1), footer(100, 1))
        assert index.indexed() == {1}
        assert_found(index, 1, footer(100, 1))
        index.add_pack(2, pack_name(2), footer(100, 2))
    with closing(ChunkIndex.open(path, STORE)) as index:
        assert index.indexed() == {1, 2}
        assert_found(index, 1, footer(100, 1))


def test_a_lock_whose_holder_hangs_is_waited_for_once(tmp_path: Path) -> None:
    """A process that was stopped within a write held up each look into the index for seconds."""
    path, timeout_s = filled(tmp_path / "chunks.lmdb"), 0.3
    with file_lock(path.with_name("chunks.lmdb.lock"), timeout_s=1) as held:
        assert held
        started = time.monotonic()
        with closing(ChunkIndex.open(path, STORE, lock_timeout_s=timeout_s)) as index:
            for number in range(11, 16):
                index.add_pack(number, pack_name(number), footer(100, number))
                assert_found(index, number, footer(100, number))
            assert time.monotonic() - started < 3 * timeout_s
            assert not index.on_disk
    with closing(ChunkIndex.open(path, STORE, lock_timeout_s=timeout_s)) as index:
        assert index.on_disk


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_leaves_the_rest_in_memory(tmp_path: Path) -> None:
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(tmp_path)], check=False
    ).returncode:
        pytest.skip("this container may not mount")
    try:
        with closing(ChunkIndex.open(tmp_path / "chunks.lmdb", STORE)) as index:
            for number in range(1, 12):
                index.add_pack(number, pack_name(number), footer(1000, number))
            for number in range(1, 12):
                assert_found(index, number, footer(1000, number))
            assert index.indexed() == set(range(1, 12))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_boot_is_part_of_the_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path / "chunks.lmdb")
    (tmp_path / "boot_id").write_text("another boot\n")
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "boot_id")
    with closing(ChunkIndex.open(path, STORE)) as index:
        assert index.indexed() == set()
