"""How a large object gets into S3 through obstore, which uploads parts by itself and repeats what fails (docs/decisions/028-…).

So this is the second of the two places that repeat a request; none is repeated in both. What obstore began and did not complete, it cannot
abort: s3fs's client does.
"""

import io
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckptstore.errors import CkptStoreError
from ckptstore.objects.s3_obstore import Obstore
from ckptstore.objects.s3_requests import Requests
from ckptstore.objects.s3_upload import PART_BYTES, S3Writer

if TYPE_CHECKING:
    from obstore import AsyncWritableFile

_PARTS_IN_FLIGHT = 4
"""Of one object; several threads write one each."""


class ObstoreWriter(S3Writer):
    """See `Writer`. An object of at most one part is put whole."""

    def __init__(self, requests: Requests, obstore: Obstore, path: str, slots: threading.Semaphore) -> None:
        super().__init__(requests, obstore.bucket, path, slots)
        self._obstore = obstore
        self._file: AsyncWritableFile | None = None

    def finish(self) -> None:
        try:
            self._send()
            self._complete()
        except BaseException:
            self.discard()
            raise
        self._file = None

    def discard(self) -> None:
        begun, self._file = self._file is not None, None
        self._part = io.BytesIO()
        if begun and self._end > PART_BYTES:
            # What cannot be aborted now is found by gc under the session's name.
            with suppress(CkptStoreError):
                self._requests.run(self._abort, self._what("abort"), writing=True)

    def _send(self) -> None:
        """Hand the part that was filled to obstore, which may wait until an earlier one has arrived, and begin the next one."""
        part, self._part = self._part.getvalue(), io.BytesIO()

        async def send(client: Any) -> None:
            if self._file is None:
                store = await self._obstore.store(client, repeating=True)
                self._file = self._obstore.api.open_writer_async(
                    store, self._object["Key"], buffer_size=PART_BYTES, max_concurrency=_PARTS_IN_FLIGHT
                )
            await self._file.write(part)

        self._requests.run(send, self._what("upload"), writing=True, once=True)

    def _complete(self) -> None:
        async def complete(client: Any) -> None:
            assert self._file is not None
            try:
                await self._file.close()
            except Exception:
                # It may have been completed by an attempt whose answer was lost; nobody else writes an object of this name.
                if not await self._is_there(client):
                    raise

        self._requests.run(complete, self._what("upload"), writing=True, once=True)

    async def _is_there(self, client: Any) -> bool:
        try:
            return bool((await client.head_object(**self._object))["ContentLength"] == self._end)
        except client.exceptions.ClientError:
            return False

    async def _abort(self, client: Any) -> None:
        uploads = await client.list_multipart_uploads(Bucket=self._object["Bucket"], Prefix=self._object["Key"])
        for upload in uploads.get("Uploads", ()):
            if upload["Key"] == self._object["Key"]:
                await client.abort_multipart_upload(**self._object, UploadId=upload["UploadId"])
