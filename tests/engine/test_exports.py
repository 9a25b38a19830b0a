"""Workers write the safetensors files that one process writes, whole or not at all."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from math import prod
from multiprocessing import get_context
from pathlib import Path
from random import Random
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

import ckptstore
from ckptstore.cli.call import Exit
from ckptstore.core.config import MIB
from ckptstore.errors import CkptStoreError, Conflict, InvalidInput, NotFound, Unavailable
from ckptstore.interop.formats import export
from ckptstore.plugins.engine import consolidated
from ckptstore.plugins.engine.consolidated import boxes_of
from ckptstore.plugins.engine.work import Place
from ckptstore.plugins.engine.writing import Part, write_part
from tests.cli.running import call
from tests.engine.test_checks import Deadly, asking

SMALL = 1 << 16
PROCESS_BYTES = 40 * MIB
"""A worker that has imported what it needs, and has done nothing."""


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, get_context("forkserver")) as executor:
        yield executor


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few hundred KiB are written by several tasks."""
    monkeypatch.setattr(consolidated, "TASK_BYTES", SMALL)


def state(seed: int = 0) -> dict[str, Any]:
    """Tensors of many shapes and dtypes, strided, tied, empty and without dimensions."""
    random = torch.Generator().manual_seed(seed)
    wide = torch.randn(300, 301, generator=random)
    return {
        "model": {
            "wide": wide,
            "tied": wide,
            "strided": torch.randn(70, 90, generator=random).T,
            "half": torch.randn(3, 5, 2000, generator=random).to(torch.bfloat16),
            "one_row": torch.randn(1, 1, 70_000, generator=random),
            "bytes": torch.randint(0, 255, (999,), generator=random, dtype=torch.uint8),
            "empty": torch.empty(0, 7),
            "scalar": torch.tensor(3.5),
            "layers": {str(i): torch.full((200 + i,), float(i)) for i in range(20)},
        },
        "optimizer": {"step": 7, "moment": torch.randn(300, 301, generator=random)},
    }


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    storage = ckptstore.Storage(chunk_bytes=SMALL)
    with ckptstore.open(tmp_path / "store", storage=storage) as store:
        store.commit(state(), step=1)
        yield store


def merged(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of all files, each from the one that the index names."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    places: dict[str, str] = index["weight_map"]
    files = {name: load_file(directory / name) for name in set(places.values())}
    assert sum(map(len, files.values())) == len(places)
    found = {name: files[file][name] for name, file in places.items()}
    size = sum(tensor.nbytes for tensor in found.values())
    assert index["metadata"]["total_size"] == size
    return found


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


def test_workers_write_the_file_that_one_process_writes(
    store: ckptstore.Store, tmp_path: Path, processes: Executor
) -> None:
    wanted = export(store.checkout(1), tmp_path / "wanted.safetensors", select="model")
    said = list[tuple[str, int, int]]()
    done = store.on(processes).export(
        1, tmp_path / "got.safetensors", select="model", progress=lambda *now: said.append(now)
    )
    assert (tmp_path / "got.safetensors").read_bytes() == wanted.files[0].read_bytes()
    assert replace(done, files=wanted.files) == wanted
    assert said[0][1] == 0 and said[-1][1] == said[-1][2] > 0
    assert len(said) > 5


@pytest.mark.parametrize("shard_bytes", [1, 100_000, 400_000])
def test_files_and_their_index_have_every_tensor_once(
    store: ckptstore.Store, tmp_path: Path, processes: Executor, shard_bytes: int
) -> None:
    wanted = export(store.checkout(1), tmp_path / "wanted.safetensors", select="model")
    done = store.on(processes).export(
        "latest", tmp_path / "out", select="model", shard_bytes=shard_bytes
    )
    assert_same(merged(tmp_path / "out"), load_file(wanted.files[0]))
    shards = [file for file in done.files if file.suffix == ".safetensors"]
    assert [file.name for file in shards] == [
        f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
    ]
    for file in shards:
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            nbytes = sum(opened.get_tensor(name).nbytes for name in names)
        assert nbytes <= shard_bytes or len(names) == 1
    assert done.left_out == wanted.left_out


def test_what_fits_into_one_file_has_no_index(
    store: ckptstore.Store, tmp_path: Path, processes: Executor
) -> None:
    done = store.on(processes).export(1, tmp_path / "out")
    assert [file.name for file in done.files] == ["model.safetensors"]
    assert "optimizer.moment" in load_file(done.files[0])


@given(
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 99),
)
def test_boxes_are_a_tensor_one_behind_the_other(
    shape: tuple[int, ...], width: int, limit_bytes: int
) -> None:
    whole = np.arange(prod(shape)).reshape(shape)
    boxes = list(boxes_of(shape, width, limit_bytes))
    parts = [whole[box.slices] for box in boxes]
    assert np.array_equal(np.concatenate([part.ravel() for part in parts]), whole.ravel())
    assert all(part.size * width <= limit_bytes or part.size <= 1 for part in parts)


def test_the_command_writes_shards_on_threads_of_this_host(
    store: ckptstore.Store, tmp_path: Path
) -> None:
    words = ("-s", store.url, "export", "1")
    out = tmp_path / "out"
    done = call(*words, str(out), "--select", "model", "--shard-size", "100KiB", "--json")
    assert done.code == Exit.OK, done.err
    assert [Path(file).name for file in done.document["files"]] == sorted(os.listdir(out))
    assert_same(
        merged(out),
        load_file(export(store.checkout(1), tmp_path / "w.safetensors", select="model").files[0]),
    )
    for wrong in (
        (str(out / "x.safetensors"), "--shard-size", "1MiB"),
        (str(out / "x"), "--shard-size", "1MiB", "--format", "torch"),
        (str(out / "x"), "--on", "spark"),
    ):
        assert call(*words, *wrong).code == Exit.USAGE
        assert sorted(os.listdir(tmp_path)) == ["out", "store", "w.safetensors"]


# -- refusals


def test_refusals_leave_nothing(
    store: ckptstore.Store, tmp_path: Path, processes: Executor
) -> None:
    on = store.on(processes)
    store.commit({"model": {"c": torch.ones(3, dtype=torch.complex128)}}, step=2)
    (tmp_path / "taken").mkdir()
    with pytest.raises(Conflict, match="exists"):
        on.export(1, tmp_path / "taken")
    with pytest.raises(NotFound):
        on.export(9, tmp_path / "out")
    with pytest.raises(NotFound, match="no leaves"):
        on.export(1, tmp_path / "out", select="no-such")
    with pytest.raises(InvalidInput, match="complex128"):
        on.export(2, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["store", "taken"]


def test_a_worker_that_does_not_see_the_file_makes_none(
    store: ckptstore.Store, tmp_path: Path
) -> None:
    handle = store._handle
    place = Place.of(handle)
    missing = tmp_path / "elsewhere" / "model.safetensors"
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(Unavailable, match="does not reach"):
        write_part(Part(place, store.checkout(1).id, str(missing), ()))
    assert not missing.exists()
    missing.touch()
    other = replace(place, store=type(place.store)("0" * 32))
    with pytest.raises(Unavailable, match="wanted the store 000"):
        write_part(Part(other, store.checkout(1).id, str(missing), ()))


def test_damage_ends_an_export_and_leaves_nothing(
    store: ckptstore.Store, tmp_path: Path, processes: Executor
) -> None:
    packs = [path for path in (tmp_path / "store" / "packs").rglob("*-0-*") if path.is_file()]
    largest = max(packs, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 3] ^= 1
    largest.write_bytes(data)
    with pytest.raises(CkptStoreError, match="does not match"):
        store.on(processes).export(1, tmp_path / "out", shard_bytes=100_000)
    assert os.listdir(tmp_path) == ["store"]


def test_chunks_that_gc_moves_meanwhile_are_found(store: ckptstore.Store, tmp_path: Path) -> None:
    """A worker opens the store when its task begins, and reads by the log."""
    wanted = export(store.checkout(1), tmp_path / "w.safetensors").files[0].read_bytes()
    for step in (2, 3, 4):
        store.commit({**state(), "other": torch.full((50_000,), float(step))}, step=step)

    class Collecting(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            made = super().submit(fn, *args, **kwargs)
            with ckptstore.open(tmp_path / "store") as other:
                if len(other.log()) > 2:
                    other.forget(other.log()[1].id)
                other.gc(max_unused=0.0, grace_s=0)
            return made

    with Collecting(2) as executor:
        store.on(executor).export(1, tmp_path / "got.safetensors")
    assert (tmp_path / "got.safetensors").read_bytes() == wanted


# -- what dies


def test_after_a_worker_died_nothing_is_there_and_the_next_export_is_whole(
    store: ckptstore.Store, tmp_path: Path, processes: Executor
) -> None:
    with Deadly(Random().randrange(1, 8)) as executor, pytest.raises(Unavailable, match="repeat"):
        store.on(executor).export(1, tmp_path / "out", shard_bytes=200_000)
    assert os.listdir(tmp_path) == ["store"]
    store.on(processes).export(1, tmp_path / "out", shard_bytes=200_000)
    wanted = export(store.checkout(1), tmp_path / "w.safetensors").files[0]
    assert_same(merged(tmp_path / "out"), load_file(wanted))


ASKS = """
import sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import ckptstore
from ckptstore.plugins.engine import consolidated
if __name__ == "__main__":
    consolidated.TASK_BYTES = 1 << 16
    with ckptstore.open(sys.argv[1]) as store:
        with ProcessPoolExecutor(2, get_context("forkserver")) as executor:
            executor.submit(int).result()
            print("ready", flush=True)
            while True:
                store.on(executor).export(1, f"{sys.argv[2]}/out", shard_bytes=200_000)
                import shutil; shutil.rmtree(f"{sys.argv[2]}/out")
"""


def test_after_the_host_that_asks_died_files_are_whole_or_go(
    store: ckptstore.Store, tmp_path: Path, processes: Executor
) -> None:
    script, place = tmp_path / "asks.py", tmp_path / "exports"
    script.write_text(ASKS)
    place.mkdir()
    command = [sys.executable, script, store.url, place]
    with asking(command) as asks:
        assert asks.stdout is not None
        line = asks.stdout.readline()
        time.sleep(Random().uniform(0.0, 0.5))
        asks.kill()
    assert line == "ready\n"
    wanted = load_file(export(store.checkout(1), tmp_path / "w.safetensors").files[0])
    if (place / "out").exists() and (place / "out" / "model.safetensors.index.json").exists():
        assert set(merged(place / "out")) <= set(wanted)
    target = place / ("out" if not (place / "out").exists() else "again")
    store.on(processes).export(1, target, shard_bytes=200_000)
    assert_same(merged(target), wanted)
    if target.name == "out":
        assert os.listdir(place) == ["out"], "the next export removes what was left"


# -- memory


def test_a_worker_needs_less_than_256_mib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server of the tests has imported torch, as no worker does: that is not counted."""
    monkeypatch.setattr(consolidated, "TASK_BYTES", 256 * MIB)

    def peak(executor: ProcessPoolExecutor) -> int:
        return executor.submit(getrusage, RUSAGE_SELF).result().ru_maxrss << 10

    with ckptstore.open(tmp_path / "store") as store:
        store.commit({"model": {"w": torch.arange(96 * MIB // 4, dtype=torch.float32)}}, step=1)
        with ProcessPoolExecutor(1, get_context("forkserver")) as executor:
            before = peak(executor)
            store.on(executor).export(1, tmp_path / "out.safetensors")
            used = PROCESS_BYTES + peak(executor) - before
    print(f"peak of a worker: {used / MIB:.0f} MiB, which began with {before / MIB:.0f}")
    assert used <= 256 * MIB
