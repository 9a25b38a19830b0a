"""A bucket is held to the contract of every place for objects, and to what only buckets do."""

import random
import socket
from typing import Any

import pytest

from ckptstore.core.ids import SessionId
from ckptstore.errors import CkptStoreError, InvalidInput, NotFound, Unavailable
from ckptstore.objects.backend import Backend, open_backend
from ckptstore.objects.s3_requests import Requests
from ckptstore.objects.s3_upload import PART_BYTES
from tests.objects.test_backend import SESSION, BackendContract
from tests.servers.s3 import S3Server, new_url


class TestS3(BackendContract):
    @pytest.fixture
    def url(self, s3: S3Server) -> str:
        return new_url()

    @pytest.fixture
    def options(self, s3: S3Server) -> dict[str, Any]:
        return s3.options()

    @pytest.mark.parametrize("size", [PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 5])
    def test_objects_around_the_size_of_a_part_come_back(self, backend: Backend, size: int) -> None:
        whole = random.randbytes(size)
        writer = backend.create("packs/aa/x", session=SESSION)
        for start in range(0, size, 3 << 20):
            writer.append([memoryview(whole)[start : start + (3 << 20)]])
        writer.finish()
        assert backend.size("packs/aa/x") == size
        out = memoryview(bytearray(size))
        backend.read_into("packs/aa/x", 0, [out[: size // 2], out[size // 2 :]])
        assert bytes(out) == whole
        assert list(backend.list("tmp/")) == []

    def test_a_large_object_is_put_in_parts(self, backend: Backend) -> None:
        whole = random.randbytes(PART_BYTES + 100)
        backend.put("log/checkpoint-000000001000", whole)
        assert backend.read("log/checkpoint-000000001000") == whole

    def test_an_upload_that_a_crash_left_behind_is_listed_under_its_session_and_can_be_deleted(self, url: str, s3: S3Server) -> None:
        backend = open_backend(url, storage_options=s3.options(deadline_s=2))  # moto answers what is not there with 500
        writer = backend.create(f"packs/{SESSION[:2]}/{SESSION}-0-3", session=SESSION)
        writer.append([memoryview(bytes(PART_BYTES + 1))])
        assert list(backend.list("packs/")) == []
        ((key, size),) = backend.list("tmp/")
        assert key.startswith(f"tmp/{SESSION}-")
        assert size == 0
        backend.delete(key)
        backend.delete(key)
        assert list(backend.list("tmp/")) == []
        with pytest.raises(CkptStoreError):
            writer.finish()

    def test_discarding_an_upload_aborts_it(self, backend: Backend) -> None:
        writer = backend.create(f"packs/{SESSION[:2]}/{SESSION}-0-3", session=SESSION)
        writer.append([memoryview(bytes(PART_BYTES + 1))])
        writer.discard()
        assert list(backend.list("tmp/")) == []

    def test_more_objects_are_listed_than_a_page_holds(self, s3: S3Server, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        for n in range(7):
            backend.put(f"log/{n}", b"x")
        real = backend._requests.run  # type: ignore[attr-defined]  # the test wants small pages

        def small_pages(request: Any, what: str, **more: Any) -> Any:
            class Client:
                def __init__(self, client: Any) -> None:
                    self._client = client

                def list_objects_v2(self, **asked: Any) -> Any:
                    return self._client.list_objects_v2(MaxKeys=3, **asked)

            return real(lambda client: request(Client(client)), what, **more)

        monkeypatch.setattr(backend._requests, "run", small_pages)  # type: ignore[attr-defined]
        assert [key for key, _ in backend.list("log/")] == [f"log/{n}" for n in range(7)]


def test_a_bucket_that_is_not_there_is_named(s3: S3Server) -> None:
    backend = open_backend("s3://no-such-bucket/store", storage_options=s3.options())
    with pytest.raises(NotFound, match="no-such-bucket"):
        backend.read("a")
    assert list(backend.list("")) == []
    with pytest.raises(InvalidInput, match="make the bucket first"):
        backend.put("a", b"x")


def test_credentials_in_the_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidInput) as caught:
        open_backend("s3://AKIAKEY:topsecret@bucket/store")
    assert "topsecret" not in str(caught.value)


def test_no_secret_is_in_an_error(s3: S3Server) -> None:
    options = {"endpoint_url": "http://127.0.0.1:1", "key": "AKIAKEY123", "secret": "top-secret-value", "deadline_s": 0.2}
    backend = open_backend("s3://bucket/store", storage_options=options)
    with pytest.raises(CkptStoreError) as caught:
        backend.put("a", b"x")
    error: BaseException | None = caught.value
    assert "s3://bucket/store" in str(error)
    assert "top-secret-value" not in str(error)


def test_a_session_is_named_by_the_uploads_of_its_packs_only() -> None:
    from ckptstore.objects.s3 import _name_of, _upload_of

    pack = f"some/place/packs/ab/{'ab' * 12}-0-17.2"
    assert _name_of(pack, "id").startswith(f"tmp/{SessionId('ab' * 12)}-")
    assert _upload_of(_name_of(pack, "id")) == (pack, "id")
    assert _name_of("place/log/checkpoint-000000001000", "id").startswith(f"tmp/{'0' * 24}-")


def test_a_server_that_takes_no_connections_is_asked_until_the_deadline() -> None:
    """As while it is started anew, or while a cable is unplugged."""
    attempts = 0

    async def look(client: Any) -> None:
        nonlocal attempts
        attempts += 1
        await client.head_object(Bucket="any", Key="any")

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and never listens
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        requests = Requests("s3://any", {"endpoint_url": endpoint, "key": "k", "secret": "s", "deadline_s": 2})
        with pytest.raises(Unavailable, match="given up after 2 s"):
            requests.run(look, "look")
    assert attempts > 1
