"""How much one read of a local disk takes: what fits a processor's cache, or a run where the page
cache lacks it."""

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
    tensor = torch.rand(6 << 20)
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
    """One after the other of the streams gets a read, which goes on where its last one ended."""
    tensor, streams = torch.rand(12 << 20), 2
    places: list[tuple[str, int]] = []
    monkeypatch.setattr(LocalStorage, "is_cached", lambda *_: False)
    with ckptstore.open(tmp_path / "store", threads=1) as store:
        store.commit({"m": {"t": tensor}})
    with ckptstore.open(tmp_path / "store", threads=streams) as store:
        read = ObjectStore._read

        def noted(self: ObjectStore, request: object, runs: Sequence[Any], *rest: Any) -> None:
            places[:] = [(pack.id, run.offset) for pack, run in runs]
            read(self, request, runs, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(ObjectStore, "_read", noted)
        got = store.checkout().read("m/t")
    assert torch.equal(got, tensor)
    assert len(places) > 2 * streams
    each = [places[i::streams] for i in range(streams)]
    assert [*each[0], *each[1]] == sorted(places)
