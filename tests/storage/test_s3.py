"""A bucket is held to the contract of every place for objects, and to what only buckets do."""

import multiprocessing
import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from ckptstore.core.ids import SessionId
from ckptstore.errors import CkptStoreError, Conflict, InvalidInput, NotFound, Unavailable
from ckptstore.plugins.buckets import bucket
from ckptstore.plugins.buckets.fsspec_client import FsspecClient, signer
from ckptstore.storage import open_storage
from ckptstore.storage.contract import PART_BYTES, Storage, Writer
from tests.storage.test_backend import SESSION, BackendContract, written
from tests.support.servers.proxy import Proxy, proxy_to
from tests.support.servers.s3 import S3Server, ends_halfway, new_url

T = TypeVar("T")


class LongPauses:
    """A clock for requests that fail again and again: each pause passes at once and counts as a
    third of the deadline. The fourth attempt is the last, on a machine of any load."""

    def __init__(self) -> None:
        self._passed_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._passed_s

    def sleep(self, pause_s: float) -> None:
        self._passed_s += max(pause_s, bucket.DEADLINE_S / 3)


@pytest.fixture
def _long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "time", LongPauses())


def patiently(request: Callable[[], T]) -> T:
    """The answer to `request`. A loaded machine may let a short deadline pass, and then it is
    sent again."""
    for _ in range(30):
        with suppress(Unavailable):
            return request()
    return request()


def through(proxy: Proxy, s3: S3Server, url: str, **options: Any) -> Storage:
    """The place at `url`, by way of `proxy`."""
    return open_storage(url, storage_options=s3.behind(proxy.endpoint).options(**options))


class TestS3(BackendContract):
    """Through obstore, which is what takes over where it is installed."""

    client = "obstore"

    @pytest.fixture
    def url(self, s3: S3Server) -> str:
        return new_url()

    @pytest.fixture
    def options(self, s3: S3Server) -> dict[str, Any]:
        return s3.options()

    @pytest.mark.parametrize(
        "size", [PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 5]
    )
    def test_objects_around_the_size_of_a_part_come_back(self, storage: Storage, size: int) -> None:
        whole = random.randbytes(size)
        writer = storage.create("packs/aa/x", session=SESSION)
        for start in range(0, size, 3 << 20):
            writer.append([memoryview(whole)[start : start + (3 << 20)]])
        writer.finish()
        assert storage.size("packs/aa/x") == size
        out = memoryview(bytearray(size))
        storage.read_into("packs/aa/x", 0, [out[: size // 2], out[size // 2 :]])
        assert bytes(out) == whole
        assert list(storage.list("tmp/")) == []

    def test_a_large_object_is_put_whole(self, storage: Storage) -> None:
        whole = random.randbytes(PART_BYTES + 100)
        storage.put("log/checkpoint-000000001000", whole)
        assert storage.read("log/checkpoint-000000001000") == whole

    @pytest.mark.parametrize("size", [5, 3 * PART_BYTES + 5])
    def test_an_object_whose_answer_was_lost_is_known_for_its_own(
        self, s3: S3Server, url: str, size: int
    ) -> None:
        """It has its name, so the repeated request is refused; what has the name is what was
        sent. Of an object that is put whole, equal bytes tell, and they may be another's."""
        lost: list[bytes] = []
        with proxy_to(s3.address) as proxy:
            storage = through(proxy, s3, url, deadline_s=8)
            storage.size("packs/aa/x")
            writer = storage.create("packs/aa/x", session=SESSION)
            writer.append([memoryview(whole := random.randbytes(size))])

            def lose(data: bytes) -> bytes:
                ended = (
                    b"CompleteMultipartUploadResult" in data
                    if size > PART_BYTES
                    else data.startswith(b"HTTP/1.1 200")
                )
                if ended and not lost:
                    lost.append(data)
                    raise OSError("the connection broke")
                return data

            proxy.faults.spoil = lose
            assert writer.finish() or size <= PART_BYTES
            assert lost
            assert storage.read("packs/aa/x") == whole
            with pytest.raises(Conflict):
                written(storage, "packs/aa/x", whole[::-1]).finish()
            with suppress(Conflict):
                assert not written(storage, "packs/aa/x", whole).finish()
            assert storage.read("packs/aa/x") == whole

    @pytest.mark.usefixtures("_long_pauses")  # moto answers what is not there with 500
    def test_an_upload_that_a_crash_left_behind_is_listed_under_its_session_and_can_be_deleted(
        self, url: str, s3: S3Server, storage: Storage
    ) -> None:
        begin_upload(s3, url, f"packs/{SESSION[:2]}/{SESSION}-0-3")
        assert list(storage.list("packs/")) == []
        ((key, size),) = storage.list("tmp/")
        assert key.startswith(f"tmp/{SESSION}-")
        assert size == 0
        storage.delete(key)
        with suppress(CkptStoreError):  # moto's 500
            storage.delete(key)
        assert list(storage.list("tmp/")) == []

    def test_an_upload_of_another_store_in_the_bucket_is_not_listed(
        self, url: str, s3: S3Server, storage: Storage
    ) -> None:
        begin_upload(s3, new_url(), f"packs/{SESSION[:2]}/{SESSION}-0-3")
        begin_upload(s3, f"{url.partition('?')[0]}-2", f"packs/{SESSION[:2]}/{SESSION}-0-3")
        assert list(storage.list("tmp/")) == []

    def test_discarding_an_upload_aborts_it(self, storage: Storage) -> None:
        writer = storage.create(f"packs/{SESSION[:2]}/{SESSION}-0-3", session=SESSION)
        writer.append([memoryview(bytes(3 * PART_BYTES))])
        writer.discard()
        assert list(storage.list("tmp/")) == []
        assert list(storage.list("packs/")) == []

    @pytest.mark.skipif(
        "CKPTSTORE_TEST_S3" in os.environ, reason="moto accepts requests that a proxy has changed"
    )
    def test_more_objects_and_uploads_are_listed_than_a_page_holds(
        self, url: str, s3: S3Server
    ) -> None:
        with proxy_to(s3.address) as proxy:
            storage = through(proxy, s3, url)
            for n in range(7):
                storage.put(f"log/{n}", b"x")
                begin_upload(s3, url, f"packs/ab/{'ab' * 12}-0-{n}")
            proxy.faults.rewrite = lambda data: data.replace(
                b"list-type=2", b"list-type=2&max-keys=3"
            ).replace(b"?uploads", b"?uploads&max-uploads=3")
            assert [key for key, _ in storage.list("log/")] == [f"log/{n}" for n in range(7)]
            assert len({key for key, _ in storage.list("tmp/")}) == 7

    @pytest.mark.parametrize("name", ["a", "with space", "grün", "100%", "a+b", "~[x]{y}^"])
    def test_names_of_every_kind_are_read(self, s3: S3Server, url: str, name: str) -> None:
        storage = open_storage(url.replace("/store", f"/{name}"), storage_options=s3.options())
        storage.put(f"{name}/b", b"0123456789")
        assert (storage.read(f"{name}/b"), storage.read_tail(f"{name}/b", 3)) == (
            b"0123456789",
            (b"789", 10),
        )

    def test_what_was_appended_is_the_callers_again(self, storage: Storage) -> None:
        buffer, whole = bytearray(3 << 20), random.randbytes(30 << 20)
        writer = storage.create("packs/aa/x", session=SESSION)
        for start in range(0, len(whole), len(buffer)):
            buffer[:] = whole[start : start + len(buffer)]
            writer.append([memoryview(buffer)])
        buffer[:] = bytes(len(buffer))
        writer.finish()
        assert storage.read("packs/aa/x") == whole

    @pytest.mark.parametrize("fault", ["reset", "busy"])
    def test_an_upload_is_repeated_until_it_succeeds(
        self, s3: S3Server, url: str, seed: int, fault: str
    ) -> None:
        whole = random.randbytes(3 * PART_BYTES + 5)
        with proxy_to(s3.address, seed) as proxy:
            storage = through(proxy, s3, url)
            setattr(proxy.faults, fault, 0.3 if fault == "busy" else 0.001)
            assert written(storage, "packs/aa/x", whole).finish()
        assert open_storage(url, storage_options=s3.options()).read("packs/aa/x") == whole

    @pytest.mark.skipif(
        "CKPTSTORE_TEST_S3" in os.environ, reason="moto is changed: tests/shared/test_rgw.py"
    )
    @pytest.mark.usefixtures("_long_pauses")
    def test_an_upload_that_is_listed_beside_its_object_is_neither_relied_on_nor_aborted(
        self, storage: Storage
    ) -> None:
        """Ceph's gateway, killed within the end of an upload, leaves both, and an abort deletes
        the bytes of the object."""
        whole = random.randbytes(PART_BYTES + 5)
        key = f"packs/{SESSION[:2]}/{SESSION}-0-3"
        with ends_halfway():
            writer = written(storage, key, whole)
            with pytest.raises(Unavailable, match="not ended its upload"):
                writer.finish()
            writer.discard()
            ((upload, _),) = storage.list("tmp/")
            assert storage.read(key) == whole
            storage.delete(upload)
            assert storage.read(key) == whole
            storage.delete(key)
            storage.delete(upload)
            assert list(storage.list("")) == []

    def test_an_upload_that_was_ended_without_an_answer_is_not_ended_again(
        self, url: str, s3: S3Server
    ) -> None:
        ends: list[bytes] = []
        lost: list[bytes] = []

        def lose(data: bytes) -> bytes:
            if b"CompleteMultipartUploadResult" in data and not lost:
                lost.append(data)
                raise OSError("the connection broke")
            return data

        def note(data: bytes) -> bytes:
            ends.extend([data] if data.startswith(b"POST") and b"uploadId=" in data else [])
            return data

        with proxy_to(s3.address) as proxy:
            writer = written(through(proxy, s3, url), "packs/aa/x", bytes(PART_BYTES + 5))
            proxy.faults.spoil, proxy.faults.rewrite = lose, note
            assert writer.finish()
        assert lost
        assert len(ends) == 1

    def test_an_upload_to_a_server_that_went_silent_ends_at_the_deadline_and_leaves_what_gc_finds(
        self, s3: S3Server, url: str
    ) -> None:
        with proxy_to(s3.address) as proxy:
            storage = through(proxy, s3, url, deadline_s=2)

            def begun() -> Writer:
                writer = storage.create(f"packs/{SESSION[:2]}/{SESSION}-0-3", session=SESSION)
                writer.append([memoryview(bytes(PART_BYTES + 1))])
                writer.append([memoryview(bytes(PART_BYTES))])
                return writer

            writer = patiently(begun)
            assert patiently(lambda: list(storage.list("tmp/")))
            proxy.faults.silent.set()
            started = time.monotonic()
            with pytest.raises(Unavailable, match="given up after 2 s"):
                writer.finish()
            assert time.monotonic() - started < 30
        left = open_storage(url, storage_options=s3.options())
        assert [SESSION in key for key, _ in left.list("tmp/")] == [True]
        assert not list(left.list("packs/"))

    @pytest.mark.usefixtures("_long_pauses")  # moto answers what is not there with 500
    def test_an_upload_begins_before_the_object_is_complete(self, storage: Storage) -> None:
        writer = storage.create(f"packs/{SESSION[:2]}/{SESSION}-0-3", session=SESSION)
        writer.append([memoryview(bytes(3 * PART_BYTES))])
        ((key, _),) = storage.list("tmp/")
        storage.delete(key)
        with pytest.raises(CkptStoreError):
            writer.finish()
        assert list(storage.list("")) == []

    @pytest.mark.parametrize("fault", ["reset", "busy", "cut"])
    def test_a_read_is_repeated_until_it_succeeds(
        self, s3: S3Server, url: str, seed: int, fault: str
    ) -> None:
        whole = random.randbytes(3 << 20)
        open_storage(url, storage_options=s3.options()).put("a", whole)
        with proxy_to(s3.address, seed) as proxy:
            setattr(proxy.faults, fault, 0.5 if fault == "busy" else 0.02)
            storage = through(proxy, s3, url)
            for _ in range(3):
                out = memoryview(bytearray(len(whole)))
                storage.read_into("a", 0, [out])
                assert out == whole

    def test_a_read_from_a_server_that_went_silent_ends_at_the_deadline(
        self, s3: S3Server, url: str
    ) -> None:
        with proxy_to(s3.address) as proxy:
            storage = through(proxy, s3, url, deadline_s=2)
            patiently(lambda: storage.put("a", b"x"))
            patiently(lambda: storage.read("a"))
            proxy.faults.silent.set()
            started = time.monotonic()
            with pytest.raises(Unavailable, match="given up after 2 s"):
                storage.read("a")
            assert time.monotonic() - started < 20

    def test_a_large_object_for_a_server_that_went_silent_is_given_up(
        self, s3: S3Server, url: str
    ) -> None:
        """Its bytes do not fit into the buffers of the kernel, so sending them waits, too."""
        with proxy_to(s3.address) as proxy:
            storage = through(proxy, s3, url, deadline_s=2)
            patiently(lambda: storage.size("a"))  # connects
            writer = storage.create("packs/aa/x", session=SESSION)
            writer.append([memoryview(bytes(10))])
            proxy.faults.silent.set()
            started = time.monotonic()

            def send() -> None:
                for _ in range(8):
                    writer.append([memoryview(bytes(PART_BYTES))])
                writer.finish()

            with pytest.raises(Unavailable, match="given up after 2 s"):
                send()
            writer.discard()
            assert time.monotonic() - started < 30

    def test_a_forked_child_reads_and_writes(self, storage: Storage) -> None:
        storage.put("a", b"0123")

        def child() -> None:
            out = memoryview(bytearray(2))
            storage.read_into("a", 2, [out])
            storage.put("b", out)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert storage.read("b") == b"23"

    def test_the_client_is_the_one_that_was_chosen(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = "FsspecClient" if self.client == "obstore" else "ObstoreClient"
        monkeypatch.setattr(f"ckptstore.plugins.buckets.bucket.{other}", None)
        storage.put("a", b"0123456789")
        assert storage.read("a", 8) == b"89"

    def test_a_region_that_is_not_told_is_found(self, url: str, s3: S3Server) -> None:
        options = s3.options()
        del options["client_kwargs"]
        storage = open_storage(url, storage_options=options)
        storage.put("a", b"0123456789")
        assert storage.read("a") == b"0123456789"


class TestThroughFsspec(TestS3):
    """The same through s3fs."""

    client = "fsspec"

    @pytest.fixture
    def url(self, s3: S3Server) -> str:
        return f"{new_url()}?client=fsspec"


class TestObstore:
    """What obstore alone does."""

    @pytest.fixture
    def url(self, s3: S3Server) -> str:
        return new_url()

    def test_a_read_is_one_request_and_so_is_one_in_vain(self, s3: S3Server, url: str) -> None:
        with proxy_to(s3.address) as proxy:
            storage = through(proxy, s3, url)
            storage.put("a", b"0123456789")
            out = memoryview(bytearray(4))
            storage.read("a")
            before = proxy.requests
            storage.read("a", 2, 5)
            storage.read_into("a", 1, [out])
            storage.read_tail("a", 5)
            with pytest.raises(NotFound):
                storage.read("b")
            assert proxy.requests == before + 4


@pytest.mark.parametrize("more", ["?client=curl", "?clint=obstore", "?obstore"])
def test_a_client_that_is_not_known_is_refused(more: str) -> None:
    with pytest.raises(InvalidInput, match="obstore"):
        open_storage(f"s3://bucket/store{more}")


def test_the_client_may_be_an_option_and_is_no_part_of_the_name() -> None:
    for url, options in (
        ("s3://bucket/store?client=fsspec", None),
        ("s3://bucket/store", {"client": "fsspec"}),
    ):
        storage = open_storage(url, storage_options=options)
        assert storage.url == "s3://bucket/store"
        assert isinstance(storage.client()[0], FsspecClient)  # type: ignore[attr-defined]


def test_an_option_that_obstore_does_not_follow_chooses_the_other_client() -> None:
    encrypted = {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}}
    storage = open_storage("s3://bucket/store", storage_options=encrypted)
    assert isinstance(storage.client()[0], FsspecClient)  # type: ignore[attr-defined]
    chosen = open_storage("s3://bucket/store?client=obstore", storage_options=encrypted)
    with pytest.raises(InvalidInput, match="client=fsspec"):
        chosen.read("a")


CLIENTS = pytest.mark.parametrize("client", ["obstore", "fsspec"])


@CLIENTS
def test_a_bucket_that_is_not_there_is_named(s3: S3Server, client: str) -> None:
    storage = open_storage(
        f"s3://no-such-bucket/store?client={client}", storage_options=s3.options()
    )
    with pytest.raises(NotFound, match="no-such-bucket"):
        storage.read("a")
    assert list(storage.list("")) == []
    with pytest.raises(NotFound, match="make the bucket first"):
        storage.put("a", b"x")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ("from-environment", "its-secret")),
        ({"key": "given", "secret": "given-secret"}, ("given", "given-secret")),
        (
            {"client_kwargs": {"aws_access_key_id": "nested", "aws_secret_access_key": "deep-key"}},
            ("nested", "deep-key"),
        ),
    ],
)
def test_what_the_client_signs_with_is_told(
    options: dict[str, Any], wanted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore signs with the same; nothing is sent here."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "its-secret")
    client = FsspecClient("s3://bucket", {"endpoint_url": "http://127.0.0.1:9", **options}, 1)
    client.fs.connect()
    found = signer(client.fs)()
    assert (found and (found["access_key_id"], found["secret_access_key"])) == wanted


def test_credentials_in_the_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidInput) as caught:
        open_storage("s3://AKIAKEY:topsecret@bucket/store")
    assert "topsecret" not in str(caught.value)


@CLIENTS
def test_no_secret_is_in_an_error(client: str) -> None:
    options = {
        "endpoint_url": "http://127.0.0.1:1",
        "key": "AKIAKEY123",
        "secret": "top-secret-value",
        "deadline_s": 0.2,
    }
    storage = open_storage(f"s3://bucket/store?client={client}", storage_options=options)
    with pytest.raises(CkptStoreError) as caught:
        storage.put("a", b"x")
    error: BaseException | None = caught.value
    assert "s3://bucket/store" in str(error)
    assert "top-secret-value" not in str(error)


def test_a_session_is_named_by_the_uploads_of_its_packs_only() -> None:
    from ckptstore.plugins.buckets.bucket import _name_of, _upload_of

    pack = f"some/place/packs/ab/{'ab' * 12}-0-17.2"
    assert _name_of(pack, "id").startswith(f"tmp/{SessionId('ab' * 12)}-")
    assert _upload_of(_name_of(pack, "id")) == (pack, "id")
    assert _name_of("place/log/checkpoint-000000001000", "id").startswith(f"tmp/{'0' * 24}-")


@CLIENTS
def test_a_server_that_takes_no_connections_is_asked_until_the_deadline(client: str) -> None:
    """As while it is started anew, or while a cable is unplugged."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and never listens
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        options = {"endpoint_url": endpoint, "key": "k", "secret": "s", "deadline_s": 2}
        options["client_kwargs"] = {"region_name": "us-east-1"}
        storage = open_storage(f"s3://any?client={client}", storage_options=options)
        started = time.monotonic()
        with pytest.raises(Unavailable, match="given up after 2 s"):
            storage.size("any")
        assert 1 < time.monotonic() - started < 20


def begin_upload(s3: S3Server, url: str, key: str) -> None:
    """Begin an upload of `key` in the store at `url`, as a process that is killed then."""
    import boto3

    bucket, _, root = url.partition("?")[0].removeprefix("s3://").partition("/")
    client = boto3.client(
        "s3",
        endpoint_url=s3.endpoint,
        aws_access_key_id=s3.key,
        aws_secret_access_key=s3.secret,
        region_name="us-east-1",
    )
    client.create_multipart_upload(Bucket=bucket, Key=f"{root}/{key}")
    client.close()
