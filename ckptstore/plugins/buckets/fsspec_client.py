"""How are the requests of a bucket, or of memory, sent through fsspec?

fsspec has a library for each service (s3fs, gcsfs, adlfs) and objects in memory. For S3, botocore
makes a few attempts for each request, so that one lost part does not cost a whole object, and
s3fs's own retries are off: layers of retries multiply, and three times five attempts keep a caller
waiting for minutes. `BucketStorage` repeats what still fails. Large objects go to S3 by `S3Upload`.
"""

import errno
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from ckptstore.plugin.storages import largest
from ckptstore.plugin.work import forks
from ckptstore.plugins.buckets import s3_upload
from ckptstore.plugins.buckets.s3_upload import Repeat, S3Upload

if TYPE_CHECKING:
    from obstore.store import S3Credential

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 15.0
ATTEMPTS = 3
CONNECTIONS = 32

_CREDENTIALS_LAST = timedelta(minutes=10)
"""obstore uses credentials that expire for so long, then it asks again. botocore renews its own
earlier than that before they end."""

_FINAL = (FileNotFoundError, FileExistsError, PermissionError, NotImplementedError)

_memory_lock = forks.lock()
"""fsspec's memory filesystem looks and then creates; under this lock the two are one step."""


class FsspecClient:
    """`Client` through fsspec. Except to S3, an object is sent by one call, so a writer keeps it in
    memory."""

    def __init__(self, url: str, options: dict[str, Any], deadline_s: float) -> None:
        # Imported here because a store on a local disk should not pay for it.
        import fsspec

        scheme = url.partition("://")[0]
        self._is_s3 = scheme in ("s3", "s3a")
        self._exclusion = _memory_lock if scheme == "memory" else nullcontext()
        if self._is_s3:
            options = _with_limits(options, deadline_s)
        self.fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        self._root = root.rstrip("/")
        self._limits: dict[str, Any] = {}
        self._lock = forks.lock()
        self._sign: Callable[[], S3Credential] | None = None
        self._uploader: tuple[dict[str, Any], Any] | None = None
        # A dict that another thread changes during a listing; else what the system tells.
        self._passing: tuple[type[Exception], ...] = (
            (RuntimeError,) if scheme == "memory" else (OSError,)
        )
        if self._is_s3:
            self.fs.retries = 1
            # botocore's limits do not cover the sending of a body
            self._limits = {"timeout": deadline_s}
            self._passing = _passing_errors()

    def may_pass(self, error: Exception) -> bool:
        """Whether a repeated request may succeed."""
        return isinstance(error, self._passing) and not (
            isinstance(error, _FINAL) or getattr(error, "errno", None) == errno.EINVAL
        )

    def get(self, key: str, start: int, stop: int | None) -> bytes:
        limit = largest(key)
        if stop is None and limit is not None:
            stop = limit + 1  # a larger object is refused, and not read to its end
        data: bytes = self.fs.cat_file(self._path(key), start=start or None, end=stop)
        return data

    def tail(self, key: str, nbytes: int) -> tuple[bytes, int]:
        raise NotImplementedError("fsspec looks up the size first, and so can the caller")

    def size(self, key: str) -> int:
        found = self.fs.info(self._path(key))
        if found["type"] != "file":
            raise FileNotFoundError(key)
        return int(found["size"])

    def put(self, key: str, data: bytes | memoryview, *, create: bool = False) -> None:
        options: dict[str, Any] = {"mode": "create"} if create else {}
        # Copied unless it is bytes: not every library behind fsspec takes a memoryview.
        body = _File(data) if self._is_s3 else bytes(data)
        if self._is_s3:  # in one request: the end of an upload in parts is not safe to repeat
            options |= {**self._limits, "chunksize": max(len(data), 1)}
        with self._exclusion if create else nullcontext():
            self.fs.pipe_file(self._path(key), body, **options)

    def upload(self, key: str, repeat: Repeat) -> S3Upload | None:
        """An upload in parts, whose requests `repeat` calls. None if the object is to be put
        whole."""
        return self.upload_in_parts(key, repeat) if self._is_s3 else None

    def upload_in_parts(self, key: str, repeat: Repeat) -> S3Upload:
        bucket, _, path = self._path(key).partition("/")
        return S3Upload(self._client(), bucket, path, repeat)

    def delete(self, key: str) -> None:
        self.fs.rm_file(self._path(key))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        directory, _, name = prefix.rpartition("/")
        self.fs.invalidate_cache()
        narrowed = {"prefix": name} if self._is_s3 and name else {}
        place = self._path(directory) if directory else self._root
        for path, found in self.fs.find(place, detail=True, **narrowed).items():
            yield path.removeprefix(f"{self._root}/"), int(found["size"])

    def uploads(self) -> Iterator[tuple[str, str]]:
        """Keys and ids of the uploads that were neither completed nor aborted. S3 alone shows
        them."""
        bucket, _, root = self._root.partition("/")
        prefix, more = f"{root}/" if root else "", self._is_s3
        position: dict[str, str] = {}
        while more:
            page = self.fs.call_s3(
                "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **position
            )
            for found in page.get("Uploads", ()):
                yield found["Key"].removeprefix(prefix), found["UploadId"]
            more = page.get("IsTruncated")
            if more:
                position = {name: page[f"Next{name}"] for name in ("KeyMarker", "UploadIdMarker")}

    def abort(self, key: str, upload: str) -> None:
        """Abort an upload that `uploads` listed, unless its object has its name."""
        bucket, _, path = self._path(key).partition("/")
        s3_upload.abort(self._client(), Bucket=bucket, Key=path, UploadId=upload)

    def _client(self) -> Any:
        """The client that sends uploads, with the credentials of now."""
        with self._lock:
            credentials: dict[str, Any] = {}
            if not self.fs.anon:
                self._sign = self._sign or signer(self.fs)
                found = self._sign()
                credentials = {
                    "aws_access_key_id": found["access_key_id"],
                    "aws_secret_access_key": found["secret_access_key"],
                    "aws_session_token": found["token"],
                }
            if self._uploader is None or self._uploader[0] != credentials:
                self._uploader = credentials, s3_upload.new_client(self.fs, credentials)
            return self._uploader[1]

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


class _File(io.BytesIO):
    """A file with a length. aiohttp reads a file piece by piece; given bytes, it would copy all
    unsent bytes after each piece."""

    def __len__(self) -> int:
        return self.getbuffer().nbytes


def _with_limits(options: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    """`options` for s3fs with our limits; the caller's other settings stay."""
    config = {
        "connect_timeout": min(CONNECT_TIMEOUT_S, deadline_s / 2),
        "read_timeout": min(READ_TIMEOUT_S, deadline_s / 2),
        "max_pool_connections": CONNECTIONS,
        "request_checksum_calculation": "when_supported",
        # Chunks that were read are compared with their checksums anyway.
        "response_checksum_validation": "when_required",
        **options.get("config_kwargs", {}),
        "retries": {"total_max_attempts": ATTEMPTS, "mode": "standard"},
    }
    return {**options, "config_kwargs": config}


def _passing_errors() -> tuple[type[Exception], ...]:
    """The errors that s3fs raises if a request did not arrive or was not answered, or if the answer
    broke off."""
    from aiohttp import ClientError as BrokenTransfer
    from botocore.exceptions import ConnectionError as NotConnected
    from botocore.exceptions import FlexibleChecksumError, HTTPClientError, IncompleteReadError

    return (
        OSError,
        NotConnected,
        HTTPClientError,
        IncompleteReadError,
        FlexibleChecksumError,
        BrokenTransfer,
    )


def signer(fs: Any) -> "Callable[[], S3Credential]":
    """A function that returns the credentials with which s3fs signs; they are renewed if they
    expire."""
    from aiobotocore.credentials import AioCredentials
    from fsspec.asyn import sync

    given: Mapping[str, str] = {
        "aws_access_key_id": fs.key,
        "aws_secret_access_key": fs.secret,
        "aws_session_token": fs.token,
        **fs.client_kwargs,
    }
    key, secret = given["aws_access_key_id"], given["aws_secret_access_key"]
    credentials = (
        AioCredentials(key, secret, given["aws_session_token"])
        if key and secret
        else sync(fs.loop, fs.session.get_credentials)
    )

    def provide() -> "S3Credential":
        found = sync(fs.loop, credentials.get_frozen_credentials)
        renewed = hasattr(credentials, "refresh_needed")
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LAST if renewed else None,
        }

    return provide
