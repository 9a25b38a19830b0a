"""A service behind fsspec is held to the contract of every place for objects, and refused where it
overwrites."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

import ckptstore
from ckptstore.core.ids import new_session_id
from ckptstore.errors import InvalidInput
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage
from tests.storage.test_backend import BackendContract


class _Service(MemoryFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """Stands in for a library behind fsspec: objects in memory, under another scheme."""

    protocol = "gs"
    careful = True

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("gs://", "memory://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        super().pipe_file(path, value, mode=mode if self.careful else "overwrite", **options)


class _OldService(_Service):
    careful = False


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The library that serves `gs://`, to be exchanged by the test."""
    monkeypatch.setitem(_registry, "gs", _Service)
    yield _registry
    fsspec.filesystem("memory").store.clear()


class TestOtherServices(BackendContract):
    @pytest.fixture
    def url(self, service: dict[str, Any]) -> str:
        return f"gs://{new_session_id()}/store?client=fsspec"

    def test_nothing_is_left_of_the_trial(self, storage: Storage) -> None:
        assert storage.put_new("a", b"x") and not storage.put_new("a", b"y")
        assert list(storage.list("")) == [("a", 1)]

    def test_a_library_that_overwrites_is_refused_when_a_store_is_made_and_when_one_is_there(
        self, url: str, service: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path))
        with ckptstore.open(url) as store:
            store.commit({"x": 1}, step=1)
        service["gs"] = _OldService
        with pytest.raises(InvalidInput, match="overwrites"):
            ckptstore.open(url.replace("/store", "/new"))
        with ckptstore.open(url) as store, pytest.raises(InvalidInput, match="install a newer one"):
            store.commit({"x": 2}, step=2)
        service["gs"] = _Service
        with ckptstore.open(url) as store:
            assert [info.step for info in store.log()] == [1]


@pytest.mark.parametrize("url", ["http://example.org/store", "nonsense://store"])
def test_a_place_without_exclusive_creation_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="cannot live at"):
        open_storage(url)
