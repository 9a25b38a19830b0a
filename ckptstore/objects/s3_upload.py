"""How a large object gets into S3: parts of 8 MiB, several on their way at once while the next is filled."""

import io
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ckptstore.core.config import MIB
from ckptstore.errors import CkptStoreError, Unavailable
from ckptstore.objects.backend import as_bytes
from ckptstore.objects.s3_requests import Requests, is_status

PART_BYTES = 8 * MIB
"""S3 wants at least 5 MiB, and takes at most 10,000 parts."""

PARTS_IN_FLIGHT = 8
"""So many parts of one backend wait in memory for their answer; whoever has filled another one waits."""


class S3Writer:
    """See `Writer`. An object of at most one part is put whole."""

    def __init__(self, requests: Requests, bucket: str, path: str, slots: threading.Semaphore) -> None:
        self._requests, self._slots = requests, slots
        self._object = {"Bucket": bucket, "Key": path}
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

    def finish(self) -> None:
        try:
            if self._upload is None:
                body = self._part.getvalue()
                self._requests.run(
                    lambda client: client.put_object(**self._object, Body=io.BytesIO(body)), self._what("write"), writing=True
                )
            else:
                self._send()
                self._complete()
        except BaseException:
            self.discard()
            raise
        self._upload, self._part = None, io.BytesIO()

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
                    lambda client: client.abort_multipart_upload(**self._object, UploadId=upload), self._what("abort"), writing=True
                )

    def _send(self) -> None:
        """Let the part that was filled go, and begin the next one."""
        if self._upload is None:
            what = self._what("begin the upload of")
            created = self._requests.run(lambda client: client.create_multipart_upload(**self._object), what, writing=True)
            self._upload = created["UploadId"]
        part, number, upload = self._part.getvalue(), len(self._sent) + 1, self._upload
        self._part = io.BytesIO()

        async def send(client: Any) -> str:
            answer = await client.upload_part(**self._object, UploadId=upload, PartNumber=number, Body=io.BytesIO(part))
            return str(answer["ETag"])

        self._slots.acquire()
        try:
            future = self._requests.start(send)
        except BaseException:
            self._slots.release()
            raise
        future.add_done_callback(lambda _: self._slots.release())
        self._sent.append(future)

    def _complete(self) -> None:
        what = self._what("upload")
        tags = [self._requests.result(future, what, writing=True) for future in self._sent]
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]

        async def complete(client: Any) -> None:
            try:
                await client.complete_multipart_upload(**self._object, UploadId=self._upload, MultipartUpload={"Parts": parts})
            except client.exceptions.ClientError as error:
                # An upload that is gone may be one that was completed, by an attempt whose answer was lost.
                if not is_status(error, 404):
                    raise
                found = await client.head_object(**self._object)
                if found["ContentLength"] != self._end:
                    raise Unavailable(f"the upload of {self._object['Key']} was aborted by somebody else; repeat the call") from error

        self._requests.run(complete, what, writing=True)

    def _what(self, verb: str) -> str:
        return f"{verb} {self._object['Key']} ({self._end} bytes)"
