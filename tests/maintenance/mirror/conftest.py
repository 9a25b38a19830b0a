"""Stores in memory end with their test."""

from collections.abc import Iterator

import fsspec
import pytest


@pytest.fixture(autouse=True)
def _no_memory_left() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
