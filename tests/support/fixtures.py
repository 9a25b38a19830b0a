"""Fixtures that more than one folder of tests needs."""

import atexit
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

import ckptstore
from tests.support.fork_server import Nursery
from tests.support.workloads import CHUNK_BYTES, small


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in memory where there is one: thousands of fsyncs there cost nothing."""
    with in_memory() as place:
        yield place


@contextmanager
def in_memory() -> Iterator[Path]:
    """The same for the time of the block."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="ckptstore-", dir=memory if memory.is_dir() else None
    ) as place:
        yield Path(place)


def store_of(place: Path, steps: int) -> Path:
    """A store at `place` with a small commit for each of `steps`."""
    with ckptstore.open(place, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
        for step in range(steps):
            store.commit(small(step), step=step)
    return place


@pytest.fixture
def nursery() -> Nursery:
    """Where children are forked from that may be killed: one for all tests, started when the first
    needs it."""
    return _shared_nursery()


@cache
def _shared_nursery() -> Nursery:
    server = Nursery()
    atexit.register(server.close)
    return server
