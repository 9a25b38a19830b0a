"""The contract of every backend in buckets of Google's and containers of Azure's, on servers that were started for it.

`$CKPTSTORE_TEST_GS` is the endpoint of one that speaks Google's API and has the bucket `checkpoints`, `$CKPTSTORE_TEST_AZ` the connection
string of one that speaks Azure's and has such a container.
"""

import os
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.core.ids import new_session_id
from ckptstore.objects.backend import Backend
from tests.objects.test_backend import BackendContract
from tests.upkeep.collecting import state_of
from tests.upkeep.stores import assert_equal


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # by what these libraries hand to aiohttp
class _Service(BackendContract):
    def test_two_hosts_commit_and_collect(self, url: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for host in range(2):
            monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path / str(host)))
            with ckptstore.open(url, storage_options=options) as store:
                store.commit(state_of(host), step=host)
        with ckptstore.open(url, storage_options=options) as store:
            store.gc(max_unused=0.0)
            for step in range(2):
                assert_equal(store.checkout(step).state_dict(), state_of(step))
            assert store.fsck().findings == ()

    def test_nothing_is_left_of_the_trial(self, backend: Backend) -> None:
        assert backend.put_new("a", b"x") and not backend.put_new("a", b"y")
        assert list(backend.list("")) == [("a", 1)]


@pytest.mark.skipif("CKPTSTORE_TEST_GS" not in os.environ, reason="needs a server: CKPTSTORE_TEST_GS names none")
class TestGoogle(_Service):
    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"endpoint_url": os.environ["CKPTSTORE_TEST_GS"], "token": "anon"}

    @pytest.fixture
    def url(self) -> str:
        return f"gs://checkpoints/{new_session_id()}/store"


@pytest.mark.skipif("CKPTSTORE_TEST_AZ" not in os.environ, reason="needs a server: CKPTSTORE_TEST_AZ names none")
class TestAzure(_Service):
    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"connection_string": os.environ["CKPTSTORE_TEST_AZ"]}

    @pytest.fixture
    def url(self) -> str:
        return f"az://checkpoints/{new_session_id()}/store"
