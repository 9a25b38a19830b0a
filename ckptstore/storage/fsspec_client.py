"""How are the requests of a bucket, or of memory, sent through fsspec?

fsspec has a library for each service (s3fs, gcsfs, adlfs) and objects in memory. For S3, botocore
makes a few attempts for each request, so that one lost part does not cost a whole object, and
s3fs's own retries are off: layers of retries multiply, and three times five attempts keep a caller
waiting for minutes. `BucketStorage` repeats what still fails.
"""

import errno
import io
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from ckptstore.core import forks
from ckptstore.storage.contract import PART_BYTES, largest

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 15.0
ATTEMPTS = 3
CONNECTIONS = 32
PARTS_IN_FLIGHT = 8

_FINAL = (FileNotFoundError, FileExistsError, PermissionError, NotImplementedError)

_memory_lock = forks.lock()
"""fsspec's memory filesystem looks and then creates; under this lock the two are one step."""


class FsspecClient:
    """`Client` through fsspec. An object is sent by one call, so a writer keeps it in memory."""

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
        self._in_parts: dict[str, Any] = {}
        # A dict that another thread changes during a listing; else what the system tells.
        self._passing: tuple[type[Exception], ...] = (
            (RuntimeError,) if scheme == "memory" else (OSError,)
        )
        if self._is_s3:
            self.fs.retries = 1
            self._in_parts = {
                "chunksize": PART_BYTES,
                "max_concurrency": PARTS_IN_FLIGHT,
                "timeout": deadline_s,  # botocore's limits do not cover the sending of a body
            }
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
        options = dict(self._in_parts)
        if create:
            options["mode"] = "create"
            if self._is_s3:  # in one request: not every server heeds a condition on an upload's end
                options["chunksize"] = max(len(data), 1)
        # Copied unless it is bytes: not every library behind fsspec takes a memoryview.
        in_parts = self._is_s3 and not create and len(data) >= 2 * PART_BYTES
        body = _Sliced(data) if in_parts else bytes(data)
        with self._exclusion if create else nullcontext():
            self.fs.pipe_file(self._path(key), body, **options)

    def upload(self, key: str) -> None:
        """None: objects are put whole."""

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
        """Abort an upload that `uploads` listed."""
        bucket, _, path = self._path(key).partition("/")
        self.fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=path, UploadId=upload)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


class _Sliced:
    """Bytes whose slices are files. aiohttp reads a file piece by piece; given bytes, it would copy
    all unsent bytes after each piece."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)

    def __len__(self) -> int:
        return self._data.nbytes

    def __getitem__(self, part: slice) -> io.BytesIO:
        return io.BytesIO(self._data[part])


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
