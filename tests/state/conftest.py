"""One process beside pytest's own, for all tests that want a state restored where nothing is known
of it."""

from collections.abc import Iterator

import pytest

from tests.state.fresh import Fresh


@pytest.fixture(scope="session")
def fresh() -> Iterator[Fresh]:
    process = Fresh()
    yield process
    process.close()
