"""Two ranks, each on a host of its own, which is a directory with an agent."""

from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="package")
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """For the directories of the hosts, by number."""
    yield tmp_path
    for path in tmp_path.glob("[0-9]*"):
        rmtree(path, ignore_errors=True)  # its agent ends
