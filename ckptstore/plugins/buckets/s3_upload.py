"""How does a large object get to S3? In parts, each of which is one request of botocore.

The libraries abort an upload whose end was not answered, or send its end again. After a Ceph
gateway has died within the end, the object has its name while its upload is still listed. To abort
that upload deletes the bytes of the object: the first read serves them, later ones do not. So here
an end is repeated only after a look at the name, an object counts as written only when its upload
is gone, and no upload is aborted whose object has its name.

Source of the requests: Amazon S3's API reference, *CreateMultipartUpload* and those it names.
"""

import errno
import io
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckptstore.plugin.model import MIB
from ckptstore.plugin.storages import PART_BYTES
from ckptstore.plugin.work import Pool

PARTS_IN_FLIGHT = 4
"""Of one object; several threads write one each."""

MARK = "ckptstorewriter"
"""The metadata that says which writer an object is of. Azure takes letters only."""

_PIECE_BYTES = MIB // 4

Repeat: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Calls a request until it is answered, or until the deadline."""


@dataclass(frozen=True, slots=True)
class _Part:
    number: int
    etag: str


class S3Upload:
    """An upload in parts, which are sent while more is written. One thread writes."""

    def __init__(self, client: Any, bucket: str, path: str, repeat: Repeat) -> None:
        self._client, self._repeat = client, repeat
        self._object = {"Bucket": bucket, "Key": path}
        self._mark = secrets.token_hex(16)
        self._held: list[memoryview] = []
        self._held_bytes = 0
        self._in_flight: deque[Future[_Part]] = deque()
        self._parts: list[_Part] = []
        self._pool = Pool(PARTS_IN_FLIGHT, name="ckptstore-upload")
        self._upload: str = repeat(self._begin)

    def write(self, data: bytes) -> None:
        """Send what fills parts, when fewer than `PARTS_IN_FLIGHT` are on their way."""
        rest = memoryview(data)
        while self._held_bytes + len(rest) >= PART_BYTES:
            stop = PART_BYTES - self._held_bytes
            self._send([*self._held, rest[:stop]])
            self._held, self._held_bytes, rest = [], 0, rest[stop:]
        self._held.append(rest)
        self._held_bytes += len(rest)

    def complete(self) -> bool:
        """Give the object its name; False if another object has it."""
        if self._held_bytes or not self._parts:
            self._send(self._held)
        while self._in_flight:
            self._arrived()
        self._pool.shutdown()
        return bool(self._repeat(self._end))

    def abort(self, *, answers: bool) -> None:
        """Send no more, and delete the parts if the server `answers`. May fail silently: gc finds
        what is left."""
        # A part that arrives after the end would stay.
        self._pool.shutdown(wait=answers, cancel_futures=True)
        if answers:
            with suppress(Exception):
                abort(self._client, **self._object, UploadId=self._upload)

    def _begin(self) -> str:
        with translated():
            found = self._client.create_multipart_upload(
                **self._object, Metadata={MARK: self._mark}
            )
        return str(found["UploadId"])

    def _send(self, data: Sequence[memoryview]) -> None:
        if len(self._in_flight) == PARTS_IN_FLIGHT:
            self._arrived()
        number = len(self._parts) + len(self._in_flight) + 1
        self._in_flight.append(
            self._pool.submit(lambda: self._repeat(lambda: self._send_part(number, data)))
        )

    def _send_part(self, number: int, data: Sequence[memoryview]) -> _Part:
        with translated():
            found = self._client.upload_part(
                **self._object,
                UploadId=self._upload,
                PartNumber=number,
                Body=_Body(data),
            )
        return _Part(number, found["ETag"])

    def _arrived(self) -> None:
        self._parts.append(self._in_flight.popleft().result())

    def _end(self) -> bool:
        """One attempt to complete the upload, or to learn that an earlier one did."""
        owner = self._owner()
        if owner is None:
            parts = [{"PartNumber": part.number, "ETag": part.etag} for part in self._parts]
            try:
                with translated():
                    self._client.complete_multipart_upload(
                        **self._object, UploadId=self._upload, MultipartUpload={"Parts": parts}
                    )
            except FileNotFoundError:  # there is no such upload: an earlier attempt arrived late
                if self._owner() != self._mark:
                    raise
            return True
        if owner == self._mark and self._is_listed():
            raise OSError(
                errno.EAGAIN, "the server has named the object, and has not ended its upload"
            )
        return owner == self._mark

    def _owner(self) -> str | None:
        """The mark of the object that has the name, None if there is none."""
        try:
            with translated():
                found = self._client.head_object(**self._object)
        except FileNotFoundError:
            return None
        return str(found["Metadata"].get(MARK, ""))

    def _is_listed(self) -> bool:
        try:
            with translated():
                self._client.list_parts(**self._object, UploadId=self._upload, MaxParts=1)
        except FileNotFoundError:
            return False
        return True


class _Body:
    """The bytes of a part, as a file: one that is sent piece by piece, so that each piece has the
    time for connecting, which bytes would have together. It copies nothing, and its pieces are
    larger than http.client asks for, because each costs a call."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._position = 0

    def read(self, size: int = -1) -> memoryview:
        if size < 0:
            return memoryview(b"".join(iter(lambda: self.read(_PIECE_BYTES), b"")))
        start = self._position
        for buffer in self._buffers:
            if start < len(buffer):
                found = buffer[start : start + max(size, _PIECE_BYTES)]
                self._position += len(found)
                return found
            start -= len(buffer)
        return memoryview(b"")

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        end = sum(map(len, self._buffers))
        self._position = position + (0, self._position, end)[whence]
        return self._position

    def tell(self) -> int:
        return self._position


def abort(client: Any, *, Bucket: str, Key: str, UploadId: str) -> None:
    """Abort an upload, unless its object has its name."""
    with translated():
        try:
            client.head_object(Bucket=Bucket, Key=Key)
        except Exception as error:
            if not _is_absent(error):
                raise
            client.abort_multipart_upload(Bucket=Bucket, Key=Key, UploadId=UploadId)


def new_client(fs: Any, credentials: dict[str, Any]) -> Any:
    """A client of botocore for the place and with the settings of `fs`, an s3fs filesystem. It
    makes one attempt at each request."""
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session

    place = fs.s3.meta  # connects, so fs has a session
    session = Session()
    session.register_component("data_loader", fs.session.get_component("data_loader"))
    config = {**fs.config_kwargs, "retries": {"total_max_attempts": 1, "mode": "standard"}}
    if place.endpoint_url.startswith("http:"):  # the signature has a checksum of the body
        config["request_checksum_calculation"] = "when_required"
    if fs.anon:
        config["signature_version"] = UNSIGNED
    return session.create_client(
        "s3",
        endpoint_url=place.endpoint_url,
        region_name=place.region_name,
        config=Config(**config),
        verify=fs.client_kwargs.get("verify"),
        **credentials,
    )


@contextmanager
def translated() -> Iterator[None]:
    """botocore's answers as `OSError`s, as s3fs tells them."""
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    try:
        yield
    except ClientError as error:
        if _is_absent(error):
            raise FileNotFoundError(str(error)) from error
        raise translate_boto_error(error) from error


def _is_absent(error: Exception) -> bool:
    answer = getattr(error, "response", {})
    return answer.get("Error", {}).get("Code") in ("404", "NoSuchKey", "NoSuchUpload")
