"""Stores that the tests of the page share; none of them writes to these."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ui.asking import Browser, browsing
from tests.ui.stores import hostile_store, small_store


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs with branches."""
    place = tmp_path_factory.mktemp("page") / "checkpoints"
    small_store(place)
    return place


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose texts are markup."""
    place = tmp_path_factory.mktemp("page") / "hostile"
    hostile_store(place)
    return place


@pytest.fixture(scope="module")
def browser(place: Path) -> Iterator[Browser]:
    with browsing(place) as browser:
        yield browser
