"""How does s3fs's client move the bytes of S3 objects?

Uploads have parts of 8 MiB, several in flight while the next is filled. Reads fetch an object
whole, a range straight into the reader's memory, or the tail.

A finished object is never replaced: the request that creates it says `If-None-Match: *`. Each
object carries its writer's mark as metadata, so a writer whose answer was lost recognizes its
own object. Some servers ignore the condition when an upload of parts is completed, so the name
is looked up just before; there, two writers that complete at the same moment may still replace
one another.
"""

import io
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from ckptstore.core.config import MIB
from ckptstore.errors import CkptStoreError, Unavailable
from ckptstore.storage.contract import as_bytes, name_taken
from ckptstore.storage.s3_requests import Requests, is_status

PART_BYTES = 8 * MIB
"""S3 wants at least 5 MiB, and takes at most 10,000 parts."""

PARTS_IN_FLIGHT = 8
"""So many parts of one backend wait in memory for their answer; whoever has filled another one
waits."""

MARK = "ckptstore-writer"
"""The metadata that says which writer an object is of."""

_TAKEN = (412, 409, 400)
"""By 412 a server says that the name is taken; by others (409, on Ceph 400) that the race for it
was lost."""


class S3Writer:
    """`Writer` into S3. An object of at most one part is put whole."""

    def __init__(
        self,
        requests: Requests,
        bucket: str,
        path: str,
        slots: threading.Semaphore,
        *,
        replace: bool,
    ) -> None:
        self._requests, self._slots = requests, slots
        self._object = {"Bucket": bucket, "Key": path}
        self._replace = replace
        self._mark = {MARK: secrets.token_hex(16)}
        self._part = io.BytesIO()
        self._sent: list[Future[str]] = []
        self._upload: str | None = None
        self._end = 0

    def append(self, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            data = as_bytes(buffer)
            while data.nbytes:
                if self._part.tell() == PART_BYTES:
                    self._send()
                piece = data[: PART_BYTES - self._part.tell()]
                self._part.write(piece)  # a copy, because the caller's memory is his again
                self._end += piece.nbytes
                data = data[piece.nbytes :]

    def finish(self) -> bool:
        try:
            if not (self._put() if self._upload is None else self._complete()):
                raise name_taken(self._object["Key"], f"s3://{self._object['Bucket']}")
        except BaseException:
            self.discard()
            raise
        self._upload, self._part = None, io.BytesIO()
        return True

    def discard(self) -> None:
        upload, self._upload = self._upload, None
        self._part = io.BytesIO()
        for future in self._sent:
            future.cancel()
        self._sent.clear()
        if upload is not None:
            # What cannot be aborted now is found by gc under the session's name.
            with suppress(CkptStoreError):
                self._requests.run(
                    lambda client: client.abort_multipart_upload(**self._object, UploadId=upload),
                    self._what("abort"),
                    writing=True,
                )

    def _send(self) -> None:
        """Send the filled part and begin the next one."""
        if self._upload is None:
            what = self._what("begin the upload of")
            created = self._requests.run(
                lambda client: client.create_multipart_upload(**self._object, Metadata=self._mark),
                what,
                writing=True,
            )
            self._upload = created["UploadId"]
        part, number, upload = self._part.getvalue(), len(self._sent) + 1, self._upload
        self._part = io.BytesIO()

        async def send(client: Any) -> str:
            answer = await client.upload_part(
                **self._object, UploadId=upload, PartNumber=number, Body=io.BytesIO(part)
            )
            return str(answer["ETag"])

        self._slots.acquire()
        try:
            future = self._requests.start(send)
        except BaseException:
            self._slots.release()
            raise
        future.add_done_callback(lambda _: self._slots.release())
        self._sent.append(future)

    def _put(self) -> bool:
        """Put an object of one part. False if another object has the name."""
        body = self._part.getvalue()

        async def put(client: Any) -> bool:
            try:
                await client.put_object(
                    **self._object, **self._condition, Body=io.BytesIO(body), Metadata=self._mark
                )
            except client.exceptions.ClientError as error:
                if not is_status(error, *_TAKEN) or (own := await self._is_own(client)) is None:
                    raise
                return own
            return True

        return self._requests.run(put, self._what("write"), writing=True)

    def _complete(self) -> bool:
        """Send the last part and complete the upload. False if another object has the name."""
        self._send()
        what = self._what("upload")
        tags = [self._requests.result(future, what, writing=True) for future in self._sent]
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]

        upload = {"UploadId": self._upload, "MultipartUpload": {"Parts": parts}}

        async def complete(client: Any) -> bool:
            if (own := await self._is_taken(client)) is not None:
                return own
            try:
                await client.complete_multipart_upload(**self._object, **self._condition, **upload)
            except client.exceptions.ClientError as error:
                if is_status(error, 501):  # the server does not know the condition here
                    await client.complete_multipart_upload(**self._object, **upload)
                    return True
                # An upload that is gone may be one that was completed, by an attempt whose answer
                # was lost.
                if (
                    not is_status(error, 404, *_TAKEN)
                    or (own := await self._is_own(client)) is None
                ):
                    raise
                if not own and self._replace:
                    raise Unavailable(
                        f"the upload of {self._object['Key']} was aborted by somebody else; repeat "
                        "the call"
                    ) from error
                return own
            return True

        return self._requests.run(complete, what, writing=True)

    @property
    def _condition(self) -> dict[str, str]:
        return {} if self._replace else {"IfNoneMatch": "*"}

    async def _is_taken(self, client: Any) -> bool | None:
        """None if the name is free or may be replaced, else as `_is_own`."""
        return None if self._replace else await self._is_own(client)

    async def _is_own(self, client: Any) -> bool | None:
        """Whether the object that has the name is this writer's; None if there is none."""
        try:
            found = await client.head_object(**self._object)
        except client.exceptions.ClientError as error:
            if is_status(error, 404):
                return None
            raise
        return bool(found.get("Metadata", {}).get(MARK) == self._mark[MARK])

    def _what(self, verb: str) -> str:
        return f"{verb} {self._object['Key']} ({self._end} bytes)"


_READ_BYTES = 1 << 20

SizeCheck: TypeAlias = Callable[[int], None]
"""Raises `Corrupt` for an object of more bytes than one of its kind may have."""


class S3Reads(Protocol):
    """Reads of one bucket, each a single attempt within `Requests.run`, which supplies the
    client."""

    async def read(
        self, client: Any, path: str, start: int, stop: int | None, check: SizeCheck | None = None
    ) -> bytes:
        """The bytes `start:stop` of the object, as many of them as there are. `check` is told where
        they end before they are read."""

    async def fill(self, client: Any, path: str, offset: int, views: Sequence[memoryview]) -> int:
        """Fill `views`, of bytes, from `offset` on; how many bytes there were for them."""

    async def tail(self, client: Any, path: str, nbytes: int) -> tuple[bytes, int]:
        """The last `nbytes` of the object, or all of a shorter one, and its size."""


class ClientReads:
    """`S3Reads` through s3fs's client."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket

    async def read(
        self, client: Any, path: str, start: int, stop: int | None, check: SizeCheck | None = None
    ) -> bytes:
        answer = await self._get(client, path, _range(start, stop))
        if check and answer is not None:
            check(start + int(answer["ContentLength"]))
        return b"" if answer is None else await _body(answer)

    async def fill(self, client: Any, path: str, offset: int, views: Sequence[memoryview]) -> int:
        wanted = sum(view.nbytes for view in views)
        answer = await self._get(client, path, _range(offset, offset + max(wanted, 1)))
        return 0 if answer is None else await _fill(answer, views)

    async def tail(self, client: Any, path: str, nbytes: int) -> tuple[bytes, int]:
        answer = await self._get(client, path, f"bytes=-{nbytes}")
        if answer is None:
            return b"", 0
        data = await _body(answer)
        size = (
            int(answer["ContentRange"].rpartition("/")[2])
            if "ContentRange" in answer
            else len(data)
        )
        return data[-nbytes:], size

    async def _get(self, client: Any, path: str, wanted: str) -> Any:
        """The answer to a ranged read; None for a range behind the object's end."""
        try:
            return await client.get_object(
                Bucket=self._bucket, Key=path, **({"Range": wanted} if wanted else {})
            )
        except client.exceptions.ClientError as error:
            if is_status(error, 416):
                return None
            raise


def put_into(views: Sequence[memoryview], data: memoryview) -> list[memoryview]:
    """Copy `data` to the front of `views`; returns their rest. Excess data is dropped."""
    rest = list(views)
    while data and rest:
        n = min(len(data), len(rest[0]))
        rest[0][:n] = data[:n]
        data, rest[0] = data[n:], rest[0][n:]
        if not rest[0]:
            rest.pop(0)
    return rest


async def _body(answer: Any) -> bytes:
    async with answer["Body"] as body:
        return bytes(await body.read())


async def _fill(answer: Any, views: Sequence[memoryview]) -> int:
    """Put the body into `views` as it comes; how many bytes that were. What is more than they take
    is not read."""
    rest = list(views)
    async with answer["Body"] as body:
        while rest and (data := memoryview(await body.read(_READ_BYTES))):
            rest = put_into(rest, data)
    return sum(map(len, views)) - sum(map(len, rest))


def _range(start: int, stop: int | None) -> str:
    if stop is None:
        return f"bytes={start}-" if start else ""
    return f"bytes={start}-{stop - 1}"
