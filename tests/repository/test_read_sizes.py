"""How much one read of a local disk takes: what fits a processor's cache, or a run where the page
cache lacks it."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.repository.chunk_store import COLD_BYTES, HASHED_BYTES, ObjectStore
from ckptstore.storage.local import LocalStorage


@pytest.mark.parametrize(("cached", "most"), [(True, HASHED_BYTES), (False, COLD_BYTES)])
def test_a_cold_read_is_a_run_and_a_warm_one_fits_the_processors_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool, most: int
) -> None:
    tensor = torch.rand(12 << 20)
    sizes: list[int] = []
    read_into = LocalStorage.read_into

    def sized(self: LocalStorage, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        sizes.append(sum(buffer.nbytes for buffer in buffers))
        read_into(self, key, offset, buffers)

    monkeypatch.setattr(LocalStorage, "is_cached", lambda *_: cached)
    with ckptstore.open(tmp_path / "store", threads=2) as store:
        store.commit({"m": {"t": tensor}})
        monkeypatch.setattr(LocalStorage, "read_into", sized)
        got = store.checkout().read("m/t")
    assert torch.equal(got, tensor)
    assert max(sizes) == most and sum(sizes) < 1.1 * tensor.nbytes
    assert len(sizes) < 2 + 1.5 * tensor.nbytes / most


def test_cold_reads_are_in_as_many_streams_as_there_are_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other of the streams gets a read, which goes on where its last one ended. There
    is one more than the store has threads."""
    tensor, streams = torch.rand(24 << 20), 3
    places: list[tuple[str, int]] = []
    readers: set[int] = set()
    monkeypatch.setattr(LocalStorage, "is_cached", lambda *_: False)
    with ckptstore.open(tmp_path / "store", threads=1) as store:
        store.commit({"m": {"t": tensor}})
    with ckptstore.open(tmp_path / "store", threads=streams - 1) as store:
        read = ObjectStore._read

        def noted(self: ObjectStore, request: object, runs: Sequence[Any], *rest: Any) -> None:
            places[:] = [(pack.id, run.offset) for pack, run in runs]
            readers.add(threading.get_ident())
            read(self, request, runs, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(ObjectStore, "_read", noted)
        got = store.checkout().read("m/t")
    assert torch.equal(got, tensor)
    assert len(places) > 2 * streams
    assert len(readers) == streams
    stride = -(-len(places) // streams)
    assert places == [place for start in range(stride) for place in sorted(places)[start::stride]]


@pytest.mark.parametrize(("nbytes", "files"), [(8 << 20, 3), (1 << 20, 1)])
def test_threads_that_read_much_at_once_have_files_of_their_own(
    tmp_path: Path, nbytes: int, files: int
) -> None:
    """For each open file, the kernel knows one place to read on from."""
    storage, together = LocalStorage(tmp_path), threading.Barrier(3)
    data = bytes(nbytes)
    storage.put("object", data)
    got: list[bytearray] = []

    def read() -> None:
        memory = bytearray(nbytes)
        together.wait(60)
        for _ in range(2):
            storage.read_into("object", 0, [memoryview(memory)])
        got.append(memory)
        together.wait(60)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert times_open(tmp_path / "object") == files
    assert got == [data] * 3
    storage.close()
    assert times_open(tmp_path / "object") == 0


def times_open(path: Path) -> int:
    """How often this process has a file open."""
    return [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()].count(str(path))
