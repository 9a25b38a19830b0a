"""How a large object gets into S3 through obstore, which uploads parts by itself and repeats what
fails (docs/decisions/028-…).

obstore can say `If-None-Match: *` for an object of one part. It cannot where it completes an upload
of parts: the name is looked up just before, and two writers that complete at the same moment may
still replace one another.

So this is the second of the two places that repeat a request; none is repeated in both. What
obstore began and did not complete, it cannot abort: s3fs's client does.
"""

import io
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckptstore.errors import CkptStoreError
from ckptstore.storage.contract import name_taken
from ckptstore.storage.s3_obstore import Obstore
from ckptstore.storage.s3_requests import Requests
from ckptstore.storage.s3_upload import PART_BYTES, S3Writer

if TYPE_CHECKING:
    from obstore import AsyncWritableFile, Attributes, PutMode

_PARTS_IN_FLIGHT = 4
"""Of one object; several threads write one each."""


class ObstoreWriter(S3Writer):
    """See `Writer`. An object of at most one part is put whole."""

    def __init__(
        self,
        requests: Requests,
        obstore: Obstore,
        path: str,
        slots: threading.Semaphore,
        *,
        replace: bool,
    ) -> None:
        super().__init__(requests, obstore.bucket, path, slots, replace=replace)
        self._obstore = obstore
        self._file: AsyncWritableFile | None = None

    def finish(self) -> bool:
        try:
            if not (self._put() if self._file is None else self._complete()):
                raise name_taken(self._object["Key"], f"s3://{self._object['Bucket']}")
        except BaseException:
            self.discard()
            raise
        self._file = None
        return True

    def discard(self) -> None:
        begun, self._file = self._file is not None, None
        self._part = io.BytesIO()
        if begun and self._end > PART_BYTES:
            # What cannot be aborted now is found by gc under the session's name.
            with suppress(CkptStoreError):
                self._requests.run(self._abort, self._what("abort"), writing=True)

    def _send(self) -> None:
        """Hand the part that was filled to obstore, which may wait until an earlier one has
        arrived, and begin the next one."""
        part, self._part = self._part.getvalue(), io.BytesIO()

        async def send(client: Any) -> None:
            if self._file is None:
                store = await self._obstore.store(client, repeating=True)
                self._file = self._obstore.api.open_writer_async(
                    store,
                    self._object["Key"],
                    buffer_size=PART_BYTES,
                    max_concurrency=_PARTS_IN_FLIGHT,
                    attributes=self._attributes,
                )
            await self._file.write(part)

        self._requests.run(send, self._what("upload"), writing=True, once=True)

    def _put(self) -> bool:
        body = self._part.getvalue()

        async def put(client: Any) -> bool:
            store = await self._obstore.store(client, repeating=True)
            mode: PutMode = "overwrite" if self._replace else "create"
            try:
                await self._obstore.api.put_async(
                    store,
                    self._object["Key"],
                    body,
                    attributes=self._attributes,
                    mode=mode,
                    use_multipart=False,
                )
            except Exception:
                return await self._settled(client)
            return True

        return self._requests.run(put, self._what("upload"), writing=True, once=True)

    def _complete(self) -> bool:
        self._send()

        async def complete(client: Any) -> bool:
            assert self._file is not None
            if (own := await self._is_taken(client)) is not None:
                return own
            try:
                await self._file.close()
            except Exception:
                return await self._settled(client)
            return True

        return self._requests.run(complete, self._what("upload"), writing=True, once=True)

    async def _settled(self, client: Any) -> bool:
        """After a failure: True if the object is this writer's, by an attempt whose answer was
        lost; False if another one has the name. Raises the failure again where neither is so, or
        nobody can tell."""
        try:
            own = await self._is_own(client)
        except Exception:
            own = None
        if own is None or (self._replace and not own):
            raise
        return own

    @property
    def _attributes(self) -> "Attributes":
        return {**self._mark}

    async def _abort(self, client: Any) -> None:
        uploads = await client.list_multipart_uploads(
            Bucket=self._object["Bucket"], Prefix=self._object["Key"]
        )
        for upload in uploads.get("Uploads", ()):
            if upload["Key"] == self._object["Key"]:
                await client.abort_multipart_upload(**self._object, UploadId=upload["UploadId"])
