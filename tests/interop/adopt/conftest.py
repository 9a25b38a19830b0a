"""An empty store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore
from ckptstore.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with ckptstore.open(
        tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=1 << 16)
    ) as opened:
        yield opened
