"""Any damage to the chunk index's files leaves the process alive, with correct locations or none.

Checks that might kill the process run in another one, which reports at its end.
"""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import StoreId
from ckptstore.index import chunks as module
from ckptstore.index.chunks import ChunkIndex, checks, run_of_pack, salvage, seed_of
from ckptstore.storage.file_lock import file_lock
from tests.index.building import STORE, footer, pack_name
from tests.index.test_chunks import assert_found, assert_missing, ids
from tests.support.mounts import failing_disk, power_disk_problem

PACKS = range(1, 30)


def run_at(path: Path) -> Path:
    """The only file of an index."""
    (run,) = path.iterdir()
    return run


def filled(path: Path) -> Path:
    """An index of one file, with chunks that two packs hold."""
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


def damage_and_use(good: Path, seed: int) -> None:
    """Change some bytes of a copy, aimed at its end often, then read and write through it."""
    rng = random.Random(seed)
    size = run_at(good).stat().st_size
    for n in range(120):
        path = good.with_name(f"copy{n}")
        shutil.copytree(good, path)
        with run_at(path).open("r+b") as file:
            for _ in range(rng.choice((1, 1, 3, 50))):
                file.seek(size - 1 - rng.randrange(rng.choice((16, 40, 1200, size))))
                file.write(rng.choice((rng.randbytes(1), rng.randbytes(8), bytes(8), b"\xff" * 8)))
        if rng.random() < 0.2:
            os.truncate(run_at(path), rng.randrange(size))
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


def test_whatever_bytes_change_no_process_dies_and_no_place_is_wrong(
    tmp_path: Path, seed: int
) -> None:
    run("damage_and_use(path, seed); print('survived')", filled(tmp_path / "good"), seed)


def test_a_page_that_the_disk_cannot_read_costs_no_process(tmp_path: Path) -> None:
    if problem := power_disk_problem("ext4"):
        pytest.skip(problem)
    with failing_disk(tmp_path / "disk") as lose:
        path = filled(tmp_path / "disk" / "chunks")
        lose(run_at(path), run_at(path).stat().st_size // 2)
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
os.truncate(run_at(path), seed)
assert_missing(index, footer(400, 10))
assert index.indexed() == set()
index.add_pack(20, pack_name(20), footer(400, 10))
assert_found(index, 20, footer(400, 10))
os.truncate(run_at(path), seed)
index.add_pack(21, pack_name(21), footer(400, 11))
assert_found(index, 21, footer(400, 11))
assert index.on_disk
print("survived")
"""
    run(code, filled(tmp_path / "chunks"), left_bytes)


SPOILED: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(run_at(path), 20_000),
    "empty": lambda path: run_at(path).write_bytes(b""),
    "zeros": lambda path: run_at(path).write_bytes(bytes(100_000)),
    "no data": lambda path: run_at(path).unlink(),
    "another format": lambda path: run_at(path).write_bytes(
        run_at(path).read_bytes()[:-16] + b"ckptstore run 0\n"
    ),
    "a file": lambda path: (shutil.rmtree(path), path.write_text("no folder")),
    "a dangling link": lambda path: (shutil.rmtree(path), path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_a_file_that_cannot_be_used_is_replaced(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    path = filled(tmp_path / "chunks")
    spoil(path)
    with closing(ChunkIndex.open(path, STORE)) as index:
        assert index.indexed() == set()
        assert_missing(index, footer(400, 10))
        index.add_pack(20, pack_name(20), footer(400, 10))
        assert index.on_disk
        assert_found(index, 20, footer(400, 10))
    assert [place.name for place in tmp_path.iterdir() if place.name.startswith("chunks.")] in (
        [],
        ["chunks.lock"],
    )


def test_another_store_s_index_is_replaced(tmp_path: Path) -> None:
    with closing(ChunkIndex.open(filled(tmp_path / "chunks"), StoreId("6" * 32))) as index:
        assert index.indexed() == set()


def test_an_index_that_another_process_replaced_is_opened_again(tmp_path: Path) -> None:
    path = filled(tmp_path / "chunks")
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
    path = filled(tmp_path / "chunks")
    chunk = ids(footer(400, 10))[:32]
    data = bytearray(run_at(path).read_bytes())
    at = data.index(chunk)
    while at >= 0:
        data[at + 33] ^= 1
        at = data.find(chunk, at + 1)
    run_at(path).write_bytes(data)
    with closing(ChunkIndex.open(path, STORE)) as index:
        assert index.indexed()
        assert not index.get_many(chunk)["found"].any()
        assert index.indexed() == set()


@given(st.integers(0, 255), st.integers(0, 7), st.integers(0, 63))
def test_any_flipped_bit_of_a_record_or_its_key_is_noticed(
    record: int, bit: int, byte: int
) -> None:
    records = run_of_pack(seed_of(STORE), 3, pack_name(3), footer(256, 1)).records
    changed = bytearray(records.tobytes())
    changed[record * 64 + byte] ^= 1 << bit
    got = np.frombuffer(changed, records.dtype)
    sound = checks(seed_of(STORE), got["chunk"], got["where"]) == got["where"]["check"]
    assert sound.tolist() == [n != record for n in range(256)]


def test_the_records_that_are_left_of_a_damaged_file_are_salvaged(
    tmp_path: Path, seed: int
) -> None:
    path, rng = filled(tmp_path / "chunks"), random.Random(seed)
    records = _salvaged(path, STORE)
    assert len(records) == 400 * len(PACKS[7:])
    data = bytearray(run_at(path).read_bytes())
    for _ in range(5):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    run_at(path).write_bytes(data[: -rng.randrange(1, 5000)])
    left = _salvaged(path, STORE)
    assert left <= records
    assert len(left) > len(records) - 90
    assert not _salvaged(path, StoreId("6" * 32))


def _salvaged(path: Path, store: StoreId) -> set[tuple[bytes, tuple[int, ...]]]:
    found = salvage(path, store)
    return {pair for ids_, rows in found for pair in zip(ids_.tolist(), rows.tolist(), strict=True)}


def test_without_a_place_to_write_everything_is_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with closing(ChunkIndex.open(tmp_path / "file" / "chunks", STORE)) as index:
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
    path = tmp_path / "chunks"
    with closing(ChunkIndex.open(path, STORE, lock_timeout_s=0.05)) as index:
        with file_lock(path.with_name("chunks.lock"), timeout_s=1) as held:
            assert held
            index.add_pack(1, pack_name(1), footer(100, 1))
        assert index.indexed() == {1}
        assert_found(index, 1, footer(100, 1))
        index.add_pack(2, pack_name(2), footer(100, 2))
    with closing(ChunkIndex.open(path, STORE)) as index:
        assert index.indexed() == {1, 2}
        assert_found(index, 1, footer(100, 1))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_leaves_the_rest_in_memory(tmp_path: Path) -> None:
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(tmp_path)], check=False
    ).returncode:
        pytest.skip("this container may not mount")
    try:
        with closing(ChunkIndex.open(tmp_path / "chunks", STORE)) as index:
            for number in range(1, 12):
                index.add_pack(number, pack_name(number), footer(1000, number))
            for number in range(1, 12):
                assert_found(index, number, footer(1000, number))
            assert index.indexed() == set(range(1, 12))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_boot_is_part_of_the_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path / "chunks")
    (tmp_path / "boot_id").write_text("another boot\n")
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "boot_id")
    with closing(ChunkIndex.open(path, STORE)) as index:
        assert index.indexed() == set()
