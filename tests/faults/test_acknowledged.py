"""What is in the log is acknowledged: nothing that fails afterwards makes the call fail, and a
closed store holds on to nothing."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.errors import Unavailable
from ckptstore.index import chunks
from ckptstore.index.catalog import Catalog
from ckptstore.storage.local import LocalStorage
from tests.support.checker import assert_same, view_of
from tests.support.fixtures import store_of
from tests.support.workloads import small

STEP = 2


@pytest.fixture
def template(scratch: Path) -> Path:
    return store_of(scratch / "store", STEP)


def _refuse(*_: object) -> None:
    raise Unavailable("storage is gone")


def test_a_commit_in_the_log_does_not_fail_for_its_session_file(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckptstore.open(template) as store:
        monkeypatch.setattr(LocalStorage, "delete", _refuse)
        commit = store.commit(small(STEP), step=STEP).id
    assert commit in view_of(template).live


@pytest.mark.parametrize("method", ["position", "missing_schemas"])
def test_a_commit_in_the_log_does_not_fail_for_the_catalog(
    method: str, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckptstore.open(template) as store:
        monkeypatch.setattr(Catalog, method, _refuse)
        commit = store.commit(small(STEP), step=STEP).id
        monkeypatch.undo()
        assert store.log()[0].id == commit


def test_a_closed_store_holds_no_file_open(template: Path) -> None:
    with ckptstore.open(template) as store:
        store.commit(small(STEP), step=STEP)
    with ckptstore.open(template, read_only=True) as store:
        store.log()
        store.checkout(0).state_dict()
    held = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    assert not [path for path in held if path.startswith(str(template))]


def test_a_chunk_index_that_storage_does_not_answer_for_is_done_without(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def scandir(self, path: Path) -> Any:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with ckptstore.open(template) as store:
        monkeypatch.setattr(chunks, "os", Gone())
        commit = store.commit(small(STEP), step=STEP).id
        assert_same(store.checkout(commit).state_dict(), small(STEP), "without the chunk index")
