"""Memory and threads that a store works with."""

import pytest

from ckptstore.errors import Unavailable
from ckptstore.repository.thread_pool import Scratch


def test_an_allocation_that_fails_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"cannot allocate .* and repeat"):
        Scratch().take(1 << 60)


def test_lent_memory_returns_and_fits_a_slightly_larger_request() -> None:
    scratch = Scratch()
    with scratch.lend(900_000) as first:
        assert len(first) == 900_000
    with scratch.lend(1_000_000) as second, scratch.lend(1_000_000) as third:
        assert second.obj is first.obj
        assert third.obj is not first.obj


def test_no_bytes_need_no_memory() -> None:
    scratch = Scratch()
    with scratch.lend(0) as memory:
        assert len(memory) == 0
    with scratch.lend(1) as memory:
        assert len(memory) == 1
