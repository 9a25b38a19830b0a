"""Rank processes for the tests here."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks for tests that leave them alive."""
    pool = Pool(4)
    yield pool
    pool.close()
