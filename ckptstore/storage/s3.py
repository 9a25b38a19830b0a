"""How do objects lie in an S3 bucket: ranged reads, parallel uploads, conditional puts?

s3fs's client moves the bytes; with `client=obstore`, as an option or as
`s3://BUCKET/PATH?client=obstore`, obstore does.

A bucket shows an object whole and durably once its upload is acknowledged, so no fsync is
needed. An incomplete upload is listed as a temporary file, `tmp/<session>-…`, and deleting that
aborts it: gc treats both alike.
"""

import io
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ckptstore.core.ids import SessionId
from ckptstore.core.text import redact
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.storage.contract import RemoteStorage, check_key, check_size
from ckptstore.storage.s3_obstore import Obstore, ObstoreWriter
from ckptstore.storage.s3_requests import Requests, is_status
from ckptstore.storage.s3_upload import PART_BYTES, PARTS_IN_FLIGHT, Get, S3Writer, get

_CLIENTS = ("s3fs", "obstore")
_UPLOADS = "tmp/"
_SESSION_OF = re.compile(r".*/(?P<session>[0-9a-f]{24})-[0-9]+-[0-9]+(?:\.2)?")
_NOBODY = "0" * 24
"""The session of uploads that name none: they go when nobody has moved them for long."""


class S3Storage(RemoteStorage):
    """`Storage` in an S3 bucket."""

    def __init__(
        self, url: str, *, read_only: bool = False, storage_options: dict[str, Any] | None = None
    ) -> None:
        url, _, query = url.partition("?")
        options = dict(storage_options or {})
        client = _client(query, options.pop("client", _CLIENTS[0]))
        self._bucket, _, root = url.partition("://")[2].rstrip("/").partition("/")
        if (
            not self._bucket or "@" in self._bucket or ":" in self._bucket
        ):  # with a colon, a `/` may be the password's
            raise InvalidInput(
                f"{redact(url)} names no bucket: wanted s3://BUCKET/PATH; key and secret belong in "
                "storage_options"
            )
        self.url = url.rstrip("/")
        self._prefix = f"{root}/" if root else ""
        self._read_only = read_only
        self._requests = Requests(self.url, options)
        self._obstore = (
            Obstore(self._bucket, options, self._requests) if client == "obstore" else None
        )
        self._get: Get = self._obstore.get if self._obstore else partial(get, self._bucket)
        self._slots = threading.Semaphore(PARTS_IN_FLIGHT)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        path = self._path(key)
        if stop is not None and start >= stop:
            return b""
        check = partial(check_size, key, where=self.url) if stop is None else None
        data, _ = self._requests.run(
            lambda client: self._get(client, path, start, stop, check), f"read {key}"
        )
        return bytes(data)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        path = self._path(key)
        stop = offset + max(sum(buffer.nbytes for buffer in buffers), 1)
        data, _ = self._requests.run(
            lambda client: self._get(client, path, offset, stop, None), f"read {key}"
        )
        self._fill(key, offset, buffers, data)

    def read_tail(self, key: str, nbytes: int) -> tuple[bytes, int]:
        path = self._path(key)
        data, size = self._requests.run(
            lambda client: self._get(client, path, -nbytes, None, None), f"read {key}"
        )
        return bytes(data[-nbytes:]), size

    def size(self, key: str) -> int | None:
        path = self._path(key)

        async def look(client: Any) -> int:
            return int((await client.head_object(Bucket=self._bucket, Key=path))["ContentLength"])

        try:
            return self._requests.run(look, f"look up {key}")
        except NotFound:
            return None

    def put(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> None:
        path = self._path(key)
        self._check_writable(key)
        view = memoryview(data)
        writer = (
            self._writer(path, replace=True)
            if view.nbytes > PART_BYTES
            else S3Writer(self._requests, self._bucket, path, self._slots, replace=True)
        )
        writer.append([view])
        writer.finish()

    def put_new(self, key: str, data: bytes | memoryview) -> bool:
        """See `Storage`. A repeated request may find its own object and return False; read the
        object to be sure."""
        path = self._path(key)
        self._check_writable(key)
        body = bytes(data)

        async def create(client: Any) -> bool:
            try:
                await client.put_object(
                    Bucket=self._bucket, Key=path, Body=io.BytesIO(body), IfNoneMatch="*"
                )
            except client.exceptions.ClientError as error:
                # 412 says that there is an object. Servers tell of a lost race in other words, too
                # (409, on Ceph 400).
                if is_status(error, 412) or (
                    is_status(error, 400, 409) and await _exists(client, self._bucket, path)
                ):
                    return False
                raise
            return True

        return self._requests.run(create, f"create {key} ({len(body)} bytes)", writing=True)

    def create(
        self, key: str, *, session: SessionId, unbuffered: bool = False, aside: bool = False
    ) -> S3Writer:
        path = self._path(key)
        self._check_writable(key)
        return self._writer(path, replace=False)

    def delete(self, key: str) -> None:
        path = self._path(key)
        self._check_writable(key)
        if upload := _upload_of(key):
            path, number = upload

            async def remove(client: Any) -> None:
                await client.abort_multipart_upload(Bucket=self._bucket, Key=path, UploadId=number)
        else:

            async def remove(client: Any) -> None:
                await client.delete_object(Bucket=self._bucket, Key=path)

        try:
            self._requests.run(remove, f"delete {key}", writing=True)
        except NotFound:
            return

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        if directory := prefix.rpartition("/")[0]:
            check_key(directory)
        if prefix == _UPLOADS:
            return iter(sorted([*self._objects(prefix), *self._uploads()]))
        return self._objects(prefix)

    def _objects(self, prefix: str) -> Iterator[tuple[str, int]]:
        for page in self._pages(
            "list_objects_v2", prefix, {"ContinuationToken": "NextContinuationToken"}
        ):
            for found in page.get("Contents", ()):
                if not found["Key"].endswith("/"):
                    yield found["Key"].removeprefix(self._prefix), int(found["Size"])

    def _uploads(self) -> Iterator[tuple[str, int]]:
        """Uploads neither completed nor aborted, by their names under `tmp/`."""
        marks = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        for page in self._pages("list_multipart_uploads", "", marks):
            for upload in page.get("Uploads", ()):
                yield _name_of(upload["Key"], upload["UploadId"]), 0

    def _pages(self, request: str, prefix: str, marks: Mapping[str, str]) -> Iterator[Any]:
        """The pages of a list. `marks` name the arguments that ask for the next page, and where
        the page before has their values."""
        position: dict[str, str] = {}
        while True:

            async def list_page(client: Any, position: dict[str, str] = position) -> Any:
                return await getattr(client, request)(
                    Bucket=self._bucket, Prefix=self._prefix + prefix, **position
                )

            try:
                page = self._requests.run(list_page, f"list {prefix or 'everything'}")
            except NotFound:
                return
            yield page
            if not page.get("IsTruncated"):
                return
            position = {mark: page[name] for mark, name in marks.items()}

    def _writer(self, path: str, *, replace: bool) -> S3Writer:
        if self._obstore and self._obstore.usable:
            return ObstoreWriter(self._requests, self._obstore, path, self._slots, replace=replace)
        return S3Writer(self._requests, self._bucket, path, self._slots, replace=replace)

    def _path(self, key: str) -> str:
        return f"{self._prefix}{check_key(key)}"


def _client(query: str, otherwise: str) -> str:
    """The client named in the URL's query, else the other argument."""
    given = dict(each.partition("=")[::2] for each in query.split("&")) if query else {}
    if unknown := sorted(
        given.keys() - {"client"}
    ):  # the names alone: what is unknown may have a secret for its value
        raise InvalidInput(
            f"a bucket's URL knows no {unknown[0]!r} behind the '?'; wanted client=s3fs or "
            "client=obstore"
        )
    client = given.get("client", otherwise)
    if client not in _CLIENTS:
        raise InvalidInput(
            f"no client for buckets is called {redact(client)!r}; wanted one of "
            f"{', '.join(_CLIENTS)}"
        )
    return client


async def _exists(client: Any, bucket: str, path: str) -> bool:
    try:
        await client.head_object(Bucket=bucket, Key=path)
    except client.exceptions.ClientError as error:
        if is_status(error, 404):
            return False
        raise
    return True


def _name_of(path: str, upload: str) -> str:
    """The name under `tmp/` that identifies an upload."""
    found = _SESSION_OF.fullmatch(f"/{path}")
    both = f"{path}\0{upload}".encode().hex()
    return f"{_UPLOADS}{found['session'] if found else _NOBODY}-{both}"


def _upload_of(key: str) -> tuple[str, str] | None:
    """Path and id of the upload that `key` names, if any."""
    if not key.startswith(_UPLOADS):
        return None
    try:
        path, _, upload = bytes.fromhex(key.rpartition("-")[2]).decode().partition("\0")
    except ValueError:
        return None
    return (path, upload) if upload else None
