"""How does s3fs's client move the bytes of S3 objects?

Uploads have parts of 8 MiB, several in flight while the next is filled. A read is one request for
an object, a range or the tail.

A finished object is never replaced: the request that creates it says `If-None-Match: *`. Each
object carries its writer's mark as metadata, so a writer whose answer was lost recognizes its
own object. Some servers ignore the condition when an upload of parts is completed, so the name
is looked up just before; there, two writers that complete at the same moment may still replace
one another.
"""

import io
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from ckptstore.core.config import MIB
from ckptstore.errors import CkptStoreError
from ckptstore.storage.contract import as_bytes, name_taken
from ckptstore.storage.s3_requests import Requests, is_status

PART_BYTES = 8 * MIB
"""S3 wants at least 5 MiB, and takes at most 10,000 parts."""

PARTS_IN_FLIGHT = 8
"""So many parts of one backend wait in memory for their answer; whoever has filled another one
waits."""

MARK = "ckptstore-writer"
"""The metadata that says which writer an object is of."""

SizeCheck: TypeAlias = Callable[[int], None]
"""Raises `Corrupt` for an object of more bytes than one of its kind may have."""

Got: TypeAlias = tuple[bytes | memoryview, int]
Get: TypeAlias = Callable[[Any, str, int, int | None, SizeCheck | None], Awaitable[Got]]
"""Read `start:stop` of an object at a path, or with a negative start its tail, in one attempt
within `Requests.run`, which supplies the client. Gives the bytes, as many as there are, and,
without a `stop`, the size of the object, which is checked before they are read."""


async def get(
    bucket: str, client: Any, path: str, start: int, stop: int | None, check: SizeCheck | None
) -> Got:
    """`Get` through s3fs's client."""
    wanted = f"bytes={start}-" if start or stop is not None else ""
    if start < 0:
        wanted = f"bytes={start}"
    elif stop is not None:
        wanted += str(stop - 1)
    try:
        answer = await client.get_object(
            Bucket=bucket, Key=path, **({"Range": wanted} if wanted else {})
        )
    except client.exceptions.ClientError as error:
        if is_status(error, 416):  # the range begins behind the object's end
            return b"", 0
        raise
    size = int(answer.get("ContentRange", f"/{answer['ContentLength']}").rpartition("/")[2])
    if check:
        check(size)
    async with answer["Body"] as body:
        return await body.read(), size


class S3Writer:
    """`Writer` into S3. An object of at most one part is put whole."""

    _once = False
    """Whether requests that create the object repeat themselves."""

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
        self._condition = {} if replace else {"IfNoneMatch": "*"}
        self._mark = {MARK: secrets.token_hex(16)}
        self._part = io.BytesIO()
        self._sent: list[Future[str]] = []
        self._upload: Any = None
        self._end = 0

    def append(self, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            data = as_bytes(buffer)
            while data.nbytes:
                if self._part.tell() == PART_BYTES:
                    self._send(self._taken())
                piece = data[: PART_BYTES - self._part.tell()]
                self._part.write(piece)  # a copy, because the caller's memory is his again
                self._end += piece.nbytes
                data = data[piece.nbytes :]

    def finish(self) -> bool:
        try:
            part = self._taken()
            if self._upload is not None:
                self._send(part)
            create = self._put_whole(part) if self._upload is None else self._completion()
            if not self._requests.run(
                partial(self._settled, create), self._what("upload"), writing=True, once=self._once
            ):
                raise name_taken(self._object["Key"], f"s3://{self._object['Bucket']}")
        except BaseException:
            self.discard()
            raise
        self._upload = None
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
                    partial(self._abort, upload=upload), self._what("abort"), writing=True
                )

    def _taken(self) -> bytes:
        """The filled part; the next one begins."""
        part, self._part = self._part.getvalue(), io.BytesIO()
        return part

    def _send(self, part: bytes) -> None:
        """Send a part without waiting for its answer."""
        if self._upload is None:
            self._upload = self._requests.run(
                lambda client: client.create_multipart_upload(**self._object, Metadata=self._mark),
                self._what("begin the upload of"),
                writing=True,
            )["UploadId"]
        number, upload = len(self._sent) + 1, self._upload

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

    def _put_whole(self, body: bytes) -> Callable[[Any], Awaitable[None]]:
        """The request that creates an object of one part."""
        return lambda client: client.put_object(
            **self._object, **self._condition, Body=io.BytesIO(body), Metadata=self._mark
        )

    def _completion(self) -> Callable[[Any], Awaitable[None]]:
        """The request that completes the upload, once all parts are sent."""
        what = self._what("upload")
        tags = [self._requests.result(future, what, writing=True) for future in self._sent]
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        upload = {"UploadId": self._upload, "MultipartUpload": {"Parts": parts}}

        async def complete(client: Any) -> None:
            try:
                await client.complete_multipart_upload(**self._object, **self._condition, **upload)
            except client.exceptions.ClientError as error:
                if not is_status(error, 501):  # the server does not know the condition here
                    raise
                await client.complete_multipart_upload(**self._object, **upload)

        return complete

    async def _abort(self, client: Any, upload: Any) -> None:
        await client.abort_multipart_upload(**self._object, UploadId=upload)

    async def _settled(self, create: Callable[[Any], Awaitable[None]], client: Any) -> bool:
        """Create the object; False if another one has the name.

        After a failure the name tells: the object is this writer's if an answer was lost, and
        another's if a race was (412, 409, on Ceph 400). Raises the failure again if neither is so,
        or nobody can tell.
        """
        try:
            if (
                self._condition
                and self._upload is not None
                and (own := await self._is_own(client)) is not None
            ):
                return own
            await create(client)
        except Exception:
            try:
                own = await self._is_own(client)
            except Exception:
                own = None
            if own is None or not (own or self._condition):
                raise
            return own
        return True

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
