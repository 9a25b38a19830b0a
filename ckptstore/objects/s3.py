"""Objects in a bucket, through s3fs's client: ranged reads straight into the reader's memory, parallel uploads, conditional puts.

A bucket shows an object whole and durably once its upload is acknowledged, so there is nothing to fsync. An upload that was never
completed shows up as a temporary file, `tmp/<session>-…`, and deleting that aborts it: gc treats both alike.
"""

import io
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptstore.core.ids import SessionId
from ckptstore.core.secrets import redact
from ckptstore.errors import Corrupt, InvalidInput, NotFound, ReadOnly
from ckptstore.objects.backend import OpenFile, check_key
from ckptstore.objects.s3_requests import Requests, is_status
from ckptstore.objects.s3_upload import PART_BYTES, PARTS_IN_FLIGHT, S3Writer

_READ_BYTES = 1 << 20
_UPLOADS = "tmp/"
_SESSION_OF = re.compile(r".*/(?P<session>[0-9a-f]{24})-[0-9]+-[0-9]+(?:\.2)?")
_NOBODY = "0" * 24
"""The session of uploads that name none: they go when nobody has moved them for long."""


class S3Backend:
    """See `Backend`."""

    def __init__(self, url: str, *, read_only: bool = False, storage_options: dict[str, Any] | None = None) -> None:
        place = url.partition("://")[2].rstrip("/")
        self._bucket, _, root = place.partition("/")
        if "@" in self._bucket or not self._bucket:
            raise InvalidInput(f"{redact(url)} names no bucket: wanted s3://BUCKET/PATH; key and secret belong in storage_options")
        self.url = url.rstrip("/")
        self.durable_root: Path | None = None
        self._prefix = f"{root}/" if root else ""
        self._read_only = read_only
        self._requests = Requests(self.url, storage_options or {})
        self._slots = threading.Semaphore(PARTS_IN_FLIGHT)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        path = self._path(key)
        if stop is not None and start >= stop:
            return b""

        async def read(client: Any) -> bytes:
            answer = await _get(client, self._bucket, path, _range(start, stop))
            return b"" if answer is None else await _body(answer)

        return self._requests.run(read, f"read {key}")

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        path = self._path(key)
        views = [buffer if buffer.ndim == 1 and buffer.itemsize == 1 else buffer.cast("B") for buffer in buffers if buffer.nbytes]
        wanted = sum(view.nbytes for view in views)

        async def read(client: Any) -> int:
            answer = await _get(client, self._bucket, path, _range(offset, offset + max(wanted, 1)))
            return 0 if answer is None else await _fill(answer, views)

        got = self._requests.run(read, f"read {key}")
        if got < wanted:
            raise Corrupt(f"{key} in {self.url} is too short: wanted {wanted} bytes from {offset} on, got {got}; run `ckptstore fsck`")

    def open_file(self, key: str) -> OpenFile:
        raise InvalidInput(f"{self.url} is no local directory, so its packs cannot be mapped into memory; use read instead")

    def will_need(self, key: str, offset: int, nbytes: int) -> None:
        """Nothing: requests run side by side as it is."""

    def read_tail(self, key: str, nbytes: int) -> tuple[bytes, int]:
        path = self._path(key)

        async def read(client: Any) -> tuple[bytes, int]:
            answer = await _get(client, self._bucket, path, f"bytes=-{nbytes}")
            if answer is None:
                return b"", 0
            data = await _body(answer)
            size = int(answer["ContentRange"].rpartition("/")[2]) if "ContentRange" in answer else len(data)
            return data[-nbytes:], size

        return self._requests.run(read, f"read {key}")

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
        writer = S3Writer(self._requests, self._bucket, path, self._slots)
        view = memoryview(data)
        if view.nbytes > PART_BYTES:
            writer.append([view])
            writer.finish()
        else:
            self._put(path, key, bytes(view))

    def put_new(self, key: str, data: bytes | memoryview) -> bool:
        """As in `Backend`. A repeated request may meet its own object and answer False: who needs to know reads the object."""
        path = self._path(key)
        self._check_writable(key)
        body = bytes(data)

        async def create(client: Any) -> bool:
            try:
                await client.put_object(Bucket=self._bucket, Key=path, Body=io.BytesIO(body), IfNoneMatch="*")
            except client.exceptions.ClientError as error:
                # Servers tell of a lost race in different words (409, 412, on Ceph 400 too); what counts is whether there is an object.
                if is_status(error, 400, 409, 412) and await _exists(client, self._bucket, path):
                    return False
                raise
            return True

        return self._requests.run(create, f"create {key} ({len(body)} bytes)", writing=True)

    def create(self, key: str, *, session: SessionId, lean: bool = False) -> S3Writer:
        path = self._path(key)
        self._check_writable(key)
        return S3Writer(self._requests, self._bucket, path, self._slots)

    def sync_dirs(self, keys: Iterable[str]) -> None:
        """A bucket has no directories."""

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
        return self._uploads() if prefix == _UPLOADS else self._objects(prefix)

    def close(self) -> None:
        """s3fs shares its connections among all who use them, so they stay open."""

    def _objects(self, prefix: str) -> Iterator[tuple[str, int]]:
        position: dict[str, str] = {}
        while True:

            async def list_page(client: Any, position: dict[str, str] = position) -> Any:
                return await client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix + prefix, **position)

            try:
                page = self._requests.run(list_page, f"list {prefix}")
            except NotFound:
                return
            for found in page.get("Contents", ()):
                if not found["Key"].endswith("/"):
                    yield found["Key"].removeprefix(self._prefix), int(found["Size"])
            if not page.get("IsTruncated"):
                return
            position = {"ContinuationToken": page["NextContinuationToken"]}

    def _uploads(self) -> Iterator[tuple[str, int]]:
        """Uploads that were begun and neither completed nor aborted, by names under `tmp/`."""
        keys: list[str] = []
        position: dict[str, str] = {}
        while True:

            async def list_page(client: Any, position: dict[str, str] = position) -> Any:
                return await client.list_multipart_uploads(Bucket=self._bucket, Prefix=self._prefix, **position)

            try:
                page = self._requests.run(list_page, "list uploads")
            except NotFound:
                break
            keys += [_name_of(upload["Key"], upload["UploadId"]) for upload in page.get("Uploads", ())]
            if not page.get("IsTruncated"):
                break
            position = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
        yield from ((key, 0) for key in sorted(keys))

    def _put(self, path: str, key: str, body: bytes) -> None:
        what = f"write {key} ({len(body)} bytes)"
        self._requests.run(lambda client: client.put_object(Bucket=self._bucket, Key=path, Body=io.BytesIO(body)), what, writing=True)

    def _path(self, key: str) -> str:
        return f"{self._prefix}{check_key(key)}"

    def _check_writable(self, key: str) -> None:
        if self._read_only:
            raise ReadOnly(f"cannot change {key}: {self.url} was opened for reading only; open it without read_only")


async def _get(client: Any, bucket: str, path: str, wanted: str) -> Any:
    """The answer to a ranged read; None for a range behind the object's end."""
    try:
        return await client.get_object(Bucket=bucket, Key=path, **({"Range": wanted} if wanted else {}))
    except client.exceptions.ClientError as error:
        if is_status(error, 416):
            return None
        raise


async def _body(answer: Any) -> bytes:
    async with answer["Body"] as body:
        return bytes(await body.read())


async def _fill(answer: Any, views: Sequence[memoryview]) -> int:
    """Put the body into `views` as it comes; how many bytes that were. What is more than they take is not read."""
    got, rest = 0, list(views)
    async with answer["Body"] as body:
        while rest and (data := memoryview(await body.read(_READ_BYTES))):
            while data and rest:
                n = min(len(data), len(rest[0]))
                rest[0][:n] = data[:n]
                data, rest[0], got = data[n:], rest[0][n:], got + n
                if not rest[0]:
                    rest.pop(0)
    return got


async def _exists(client: Any, bucket: str, path: str) -> bool:
    try:
        await client.head_object(Bucket=bucket, Key=path)
    except client.exceptions.ClientError as error:
        if is_status(error, 404):
            return False
        raise
    return True


def _range(start: int, stop: int | None) -> str:
    if stop is None:
        return f"bytes={start}-" if start else ""
    return f"bytes={start}-{stop - 1}"


def _name_of(path: str, upload: str) -> str:
    """The name under `tmp/` of an upload, from which it can be found again."""
    found = _SESSION_OF.fullmatch(f"/{path}")
    both = f"{path}\0{upload}".encode().hex()
    return f"{_UPLOADS}{found['session'] if found else _NOBODY}-{both}"


def _upload_of(key: str) -> tuple[str, str] | None:
    """Path and id of the upload that `key` names, if it names one."""
    if not key.startswith(_UPLOADS):
        return None
    try:
        path, _, upload = bytes.fromhex(key.rpartition("-")[2]).decode().partition("\0")
    except ValueError:
        return None
    return (path, upload) if upload else None
