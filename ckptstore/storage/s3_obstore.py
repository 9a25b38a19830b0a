"""How does obstore read and write S3 objects?

It takes less processor time than s3fs (docs/decisions/028-…). obstore gets the endpoint, the
region and the credentials from s3fs's client. For reads its own retries are off, because
`Requests` repeats temporary failures. A failed request is sent once more through s3fs's client
within the same attempt, because its errors are known here. obstore's threads do not survive a
fork, so a forked child reads through s3fs.

For writes, obstore uploads the parts and repeats failed ones itself: this is the second of two
places that repeat a request, and no request is repeated in both. obstore supports
`If-None-Match: *` for an object of one part. When it completes an upload of parts, the name is
looked up just before, and two writers that complete at the same moment may still replace one
another. obstore cannot abort an upload; s3fs's client does.
"""

import logging
import os
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ckptstore.core.text import secrets_of, without
from ckptstore.errors import CkptStoreError, InvalidInput
from ckptstore.storage.s3_requests import CONNECT_TIMEOUT_S, DEADLINE_S, READ_TIMEOUT_S, Requests
from ckptstore.storage.s3_upload import PART_BYTES, Got, S3Writer, SizeCheck, get

if TYPE_CHECKING:
    from obstore import AsyncWritableFile
    from obstore.store import ClientConfig, S3Credential, S3Store


_CREDENTIALS_LAST = timedelta(minutes=10)
"""So long obstore may use credentials that expire, then it asks again. botocore renews its own
earlier than that before they end."""

_MANY = 1000
"""So many attempts are never made before a deadline."""

_runtime_pid = 0
"""The process that used obstore first: its threads live there alone, and are shared by all
backends."""

_logger = logging.getLogger("ckptstore")


class Obstore:
    """obstore's client of one bucket, created when first needed."""

    def __init__(self, bucket: str, options: dict[str, Any], requests: Requests) -> None:
        """`options` are those for s3fs, and `requests` sends requests through s3fs. Raises
        `InvalidInput` if obstore is not installed."""
        try:
            import obstore
        except ImportError as error:
            raise InvalidInput(
                f"cannot use obstore: {error}; install ckptstore[obstore], or leave client=obstore "
                "out"
            ) from error
        self.api = obstore
        self.bucket = bucket
        self._requests = requests
        self.secrets = secrets_of(options)
        self._deadline = timedelta(seconds=float(options.get("deadline_s", DEADLINE_S)))
        self._trust = _trust(
            options.get("client_kwargs", {}).get("verify", os.environ.get("AWS_CA_BUNDLE"))
        )
        self._stores: dict[bool, S3Store] = {}
        self._told = False

    @property
    def usable(self) -> bool:
        """Whether this process owns obstore's threads."""
        global _runtime_pid
        _runtime_pid = _runtime_pid or os.getpid()
        return _runtime_pid == os.getpid()

    async def store(self, client: Any, *, repeating: bool = False) -> "S3Store":
        """The bucket as s3fs's client knows it; a `repeating` one repeats requests by itself, for
        as long as the deadline allows."""
        if repeating not in self._stores:
            self._stores[repeating] = await self._connect(client, repeating)
        return self._stores[repeating]

    async def _connect(self, client: Any, repeating: bool) -> "S3Store":
        from obstore.store import S3Store

        found = urlsplit(
            await client.generate_presigned_url(
                "get_object", Params={"Bucket": self.bucket, "Key": "any"}
            )
        )
        credentials = await self._requests.credentials()
        half = (
            self._deadline / 2
        )  # no attempt is begun after the first half, and none lasts for more than one
        return S3Store(
            self.bucket,
            aws_endpoint_url_s3=f"{found.scheme}://{found.netloc}",
            virtual_hosted_style_request=found.path == "/any",
            region=client.meta.region_name or "us-east-1",
            client_options={
                "allow_http": found.scheme == "http",
                "connect_timeout": min(timedelta(seconds=CONNECT_TIMEOUT_S), half),
                "read_timeout": min(timedelta(seconds=READ_TIMEOUT_S), half),
                "timeout": half,
                **self._trust,
            },
            retry_config={"max_retries": _MANY, "retry_timeout": half}
            if repeating
            else {"max_retries": 0},
            **(
                {"skip_signature": True}
                if credentials is None
                else {"credential_provider": _provider(credentials)}
            ),
        )

    async def get(
        self, client: Any, path: str, start: int, stop: int | None, check: SizeCheck | None
    ) -> Got:
        """`Get` through obstore; what it cannot read is read by s3fs."""
        try:
            if self.usable:
                return await self._get(await self.store(client), path, start, stop, check)
        except (FileNotFoundError, CkptStoreError):
            raise
        except Exception as error:
            _logger.log(
                logging.DEBUG if self._told else logging.WARNING,
                "obstore did not read from the bucket %s, s3fs is asked instead: %s",
                self.bucket,
                without(str(error).partition("\n")[0], self.secrets),
            )
            self._told = True
        return await get(self.bucket, client, path, start, stop, check)

    async def _get(
        self, store: "S3Store", path: str, start: int, stop: int | None, check: SizeCheck | None
    ) -> Got:
        if stop is not None:
            data = await self.api.get_range_async(store, path, start=start, end=stop)
            return memoryview(data), 0
        found = await self.api.get_async(
            store,
            path,
            options={"range": {"offset": start} if start > 0 else {"suffix": -start}}
            if start
            else None,
        )
        if check:
            check(found.meta["size"])
        return bytes(await found.bytes_async()), found.meta["size"]


def _provider(credentials: Any) -> "Callable[[], Awaitable[S3Credential]]":
    """A credential provider for obstore that returns, and renews, botocore's credentials."""

    async def provide() -> "S3Credential":
        found = await credentials.get_frozen_credentials()
        expires = (
            datetime.now(UTC) + _CREDENTIALS_LAST
            if hasattr(credentials, "refresh_needed")
            else None
        )
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": expires,
        }

    return provide


def _trust(verify: bool | str | None) -> "ClientConfig":
    """The TLS options, as botocore has them."""
    if verify is False:
        return {"allow_invalid_certificates": True}
    return {"root_certificate": Path(verify).read_bytes()} if isinstance(verify, str) else {}


_PARTS_IN_FLIGHT = 4
"""Of one object; several threads write one each."""


class ObstoreWriter(S3Writer):
    """`Writer` through obstore. An object of at most one part is put whole."""

    _once = True
    _upload: "AsyncWritableFile | None"

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

    def _send(self, part: bytes) -> None:
        """Pass a part to obstore, which may wait for an earlier one."""

        async def send(client: Any) -> None:
            if self._upload is None:
                self._upload = self._obstore.api.open_writer_async(
                    await self._obstore.store(client, repeating=True),
                    self._object["Key"],
                    buffer_size=PART_BYTES,
                    max_concurrency=_PARTS_IN_FLIGHT,
                    attributes={**self._mark},
                )
            await self._upload.write(part)

        self._requests.run(send, self._what("upload"), writing=True, once=True)

    def _put_whole(self, body: bytes) -> Callable[[Any], Awaitable[None]]:
        async def put(client: Any) -> None:
            await self._obstore.api.put_async(
                await self._obstore.store(client, repeating=True),
                self._object["Key"],
                body,
                attributes={**self._mark},
                mode="create" if self._condition else "overwrite",
                use_multipart=False,
            )

        return put

    def _completion(self) -> Callable[[Any], Awaitable[None]]:
        async def complete(client: Any) -> None:
            assert self._upload is not None
            await self._upload.close()

        return complete

    async def _abort(self, client: Any, upload: Any) -> None:
        if self._end <= PART_BYTES:
            return
        uploads = await client.list_multipart_uploads(
            Bucket=self._object["Bucket"], Prefix=self._object["Key"]
        )
        for upload in uploads.get("Uploads", ()):
            if upload["Key"] == self._object["Key"]:
                await client.abort_multipart_upload(**self._object, UploadId=upload["UploadId"])
