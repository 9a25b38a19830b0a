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

import io
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ckptstore.core.text import secrets_of, without
from ckptstore.errors import CkptStoreError, InvalidInput
from ckptstore.storage.contract import name_taken
from ckptstore.storage.s3_requests import CONNECT_TIMEOUT_S, DEADLINE_S, READ_TIMEOUT_S, Requests
from ckptstore.storage.s3_upload import PART_BYTES, ClientReads, S3Writer, SizeCheck, put_into

if TYPE_CHECKING:
    from obstore import AsyncWritableFile, Attributes, PutMode
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

T = TypeVar("T")


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


class ObstoreReads:
    """`S3Reads` through obstore."""

    def __init__(self, obstore: Obstore) -> None:
        self._obstore = obstore
        self._plain = ClientReads(obstore.bucket)
        self._told = False

    async def read(
        self, client: Any, path: str, start: int, stop: int | None, check: SizeCheck | None = None
    ) -> bytes:
        async def ask(store: "S3Store") -> bytes:
            if stop is not None:
                return bytes(
                    await self._obstore.api.get_range_async(store, path, start=start, end=stop)
                )
            found = await self._obstore.api.get_async(
                store, path, options={"range": {"offset": start}} if start else None
            )
            if check:
                check(found.meta["size"])
            return bytes(await found.bytes_async())

        found = await self._asked(client, ask)
        return await self._plain.read(client, path, start, stop, check) if found is None else found

    async def fill(self, client: Any, path: str, offset: int, views: Sequence[memoryview]) -> int:
        wanted = sum(view.nbytes for view in views)

        async def ask(store: "S3Store") -> memoryview:
            return memoryview(
                await self._obstore.api.get_range_async(store, path, start=offset, length=wanted)
            )

        found = await self._asked(client, ask) if wanted else None
        if found is None:
            return await self._plain.fill(client, path, offset, views)
        put_into(views, found)
        return found.nbytes

    async def tail(self, client: Any, path: str, nbytes: int) -> tuple[bytes, int]:
        async def ask(store: "S3Store") -> tuple[bytes, int]:
            found = await self._obstore.api.get_async(
                store, path, options={"range": {"suffix": nbytes}}
            )
            return bytes(await found.bytes_async()), found.meta["size"]

        found = await self._asked(client, ask)
        return await self._plain.tail(client, path, nbytes) if found is None else found

    async def _asked(self, client: Any, ask: "Callable[[S3Store], Awaitable[T]]") -> T | None:
        """obstore's answer, None where it has none. Raises `FileNotFoundError` for an object that
        is not there."""
        if not self._obstore.usable:
            return None
        try:
            return await ask(await self._obstore.store(client))
        except (FileNotFoundError, CkptStoreError):
            raise
        except Exception as error:
            self._tell(error)
            return None

    def _tell(self, error: Exception) -> None:
        level = logging.DEBUG if self._told else logging.WARNING
        said = without(str(error).partition("\n")[0], self._obstore.secrets)
        _logger.log(
            level,
            "obstore did not read from the bucket %s, s3fs is asked instead: %s",
            self._obstore.bucket,
            said,
        )
        self._told = True


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
        """Pass the filled part to obstore, which may wait for an earlier one, and begin the next
        part."""
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
