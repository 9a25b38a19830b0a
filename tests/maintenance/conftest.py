"""One tiny store per run, copied for each test that wants one."""

from pathlib import Path

import pytest

from tests.maintenance.stores import copy_of, make_store
from tests.support.fixtures import nursery, scratch

__all__ = ["nursery", "scratch"]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("template") / "store")


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Path:
    return copy_of(template, tmp_path / "store")
