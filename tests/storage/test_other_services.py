"""The contract of every backend in buckets of Google's and containers of Azure's, on servers that
were started for it.

`$CKPTSTORE_TEST_GS` is the endpoint of one that speaks Google's API and has the bucket
`checkpoints`, `$CKPTSTORE_TEST_AZ` the connection string of one that speaks Azure's and has such a
container. Where one is missing, the tests of two hosts are skipped and say so.
"""

import os
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.core.ids import new_session_id
from ckptstore.storage.contract import Storage
from tests.maintenance.collecting import state_of
from tests.maintenance.stores import assert_equal
from tests.storage.test_backend import BackendContract

GOOGLE, AZURE = "CKPTSTORE_TEST_GS", "CKPTSTORE_TEST_AZ"
SENDING = pytest.mark.filterwarnings(
    "ignore:Sending a large body:ResourceWarning"
)  # by what these libraries hand to aiohttp


def _missing(variable: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        variable not in os.environ, reason=f"needs a server: {variable} names none"
    )


def _url(scheme: str) -> str:
    return f"{scheme}://checkpoints/{new_session_id()}/store"


def _options(scheme: str, client: str) -> dict[str, Any]:
    """Each client has options of its own."""
    if client == "fsspec":
        own = (
            {"endpoint_url": os.environ[GOOGLE], "token": "anon"}
            if scheme == "gs"
            else {"connection_string": os.environ[AZURE]}
        )
    elif scheme == "gs":
        own = {"base_url": os.environ[GOOGLE], "skip_signature": True}
    else:
        said = dict(each.split("=", 1) for each in os.environ[AZURE].strip(";").split(";"))
        own = {
            "account_name": said["AccountName"],
            "account_key": said["AccountKey"],
            "endpoint": said["BlobEndpoint"],
        }
    local = {"client_options": {"allow_http": True}} if client == "obstore" else {}
    return {**own, **local, "client": client}


@SENDING
@pytest.mark.parametrize("client", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    "scheme",
    [pytest.param("gs", marks=_missing(GOOGLE)), pytest.param("az", marks=_missing(AZURE))],
)
def test_two_hosts_commit_and_collect(
    scheme: str, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = _url(scheme), _options(scheme, client)
    for host in range(2):
        monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path / str(host)))
        with ckptstore.open(url, storage=ckptstore.Storage(options=options)) as store:
            store.commit(state_of(host), step=host)
    with ckptstore.open(url, storage=ckptstore.Storage(options=options)) as store:
        store.gc(max_unused=0.0, grace_s=0)
        for step in range(2):
            assert_equal(store.checkout(step).state_dict(), state_of(step))
        assert store.fsck().findings == ()


@SENDING
class _Service(BackendContract):
    scheme: str
    client = "obstore"

    @pytest.fixture
    def url(self) -> str:
        return _url(self.scheme)

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return _options(self.scheme, self.client)

    def test_nothing_is_left_of_the_trial(self, storage: Storage) -> None:
        assert storage.put_new("a", b"x") and not storage.put_new("a", b"y")
        assert list(storage.list("")) == [("a", 1)]


class TestGoogle(_Service):
    __test__ = GOOGLE in os.environ
    scheme = "gs"


class TestGoogleThroughFsspec(TestGoogle):
    client = "fsspec"


class TestAzure(_Service):
    __test__ = AZURE in os.environ
    scheme = "az"


class TestAzureThroughFsspec(TestAzure):
    client = "fsspec"
