"""Rank processes for the tests here."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="package")
def pool() -> Iterator[Pool]:
    """Four ranks for tests that leave them alive. They end with the last test here: each gloo group
    that a test made has a thread that wakes a hundred times a second, whether it has work or
    not."""
    pool = Pool(4)
    yield pool
    pool.close()
