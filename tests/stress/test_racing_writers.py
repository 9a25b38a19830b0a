"""A thread writes to a state during its commit: the state may be torn, but every chunk matches
its id."""

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

import ckptstore
from ckptstore import Store
from ckptstore.interop.dcp import StoreWriter
from tests.interop.dcp_states import NO_DIST
from tests.support.grouped import grouped

STAGING_BYTES = 2 << 20
"""Of the state 6 MB: most of it is borrowed."""

Commit = Callable[[Store, Mapping[str, Any], int], object]


def _tensor() -> torch.Tensor:
    return torch.zeros(1_500_000)


def _directly(store: Store, state: Mapping[str, Any], step: int) -> object:
    return store.commit(state, step=step)


def _in_background(**options: Any) -> Commit:
    def commit(store: Store, state: Mapping[str, Any], step: int) -> object:
        return store.commit_async(state, step=step, **grouped("background", **options)).wait()

    return commit


def _by_dcp(store: Store, state: Mapping[str, Any], step: int) -> object:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        return dcp.save(
            dict(state),
            storage_writer=StoreWriter(store.url),
            checkpoint_id=str(step),
            **NO_DIST,
        )


WAYS: dict[str, tuple[dict[str, Any], Commit]] = {
    "commit": ({}, _directly),
    "zstd": ({"codec": "zstd"}, _directly),
    "direct I/O": ({"direct_io": True}, _directly),
    "commit_async": ({}, _in_background()),
    "borrowed": ({"staging_bytes": STAGING_BYTES}, _in_background()),
    "lazy": ({}, _in_background(staging="lazy")),
    "process": ({"executor": "process"}, _in_background()),
    "DCP": ({}, _by_dcp),
}


@contextmanager
def writing_to(tensor: torch.Tensor) -> Iterator[None]:
    """Another thread fills `tensor` with zeros and ones in turn while the block runs."""
    stop = threading.Event()

    def write() -> None:
        for value in itertools.cycle((1.0, 0.0)):
            if stop.is_set():
                return
            tensor.fill_(value)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _race(place: Path, way: str, commits: int) -> None:
    options, commit = WAYS[way]
    tensor = _tensor()
    state = {"m": {"t": tensor, "small": torch.zeros(8), "rows": torch.zeros(600, 700).t()}}
    with ckptstore.open(place, **grouped("storage", "background", **options)) as store:
        commit(store, {"m": {"first": 1}}, 0)  # starts a worker process, which meets no writer
        with writing_to(tensor):
            for step in range(1, commits + 1):
                commit(store, state, step)
        for value in (0.0, 1.0):
            tensor.fill_(value)
            clean = store.commit(state, step=commits + 1 + int(value))
            assert torch.equal(store.checkout(clean.id).state_dict("m")["t"], tensor)
        for info in store.log(limit=20):
            store.checkout(info.id).state_dict()
        assert not store.fsck("data").findings
    print(f"{way}: {commits} commits beside a racing writer; no chunk differs from its id")


@pytest.mark.parametrize("way", WAYS)
def test_a_racing_write_tears_a_state_and_never_damages_the_store(way: str, tmp_path: Path) -> None:
    _race(tmp_path / "store", way, 2)


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_a_thousand_commits_beside_a_racing_writer(way: str, tmp_path: Path) -> None:
    _race(tmp_path / "store", way, 1_000)


def test_an_unchanged_state_whose_packs_have_gone_is_written_again(tmp_path: Path) -> None:
    state = {"m": {"t": torch.randn(3_000_000)}}
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(3):  # the second finds what the first wrote, and is remembered
            last = store.commit(state, step=step)
        for step in (5, 6):
            store.commit({"other": step}, step=step)
        store.forget([0, 1, 2])
        store.gc(force=True, grace_s=0)
        again = store.commit(state, step=7)
        assert last.stats is not None and last.stats.new_chunks <= 1
        assert again.stats is not None and again.stats.new_chunks >= 12
        assert torch.equal(store.checkout(7).state_dict("m")["t"], state["m"]["t"])
        assert not store.fsck("data").findings
