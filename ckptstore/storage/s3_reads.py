"""How the bytes of objects come out of S3: whole, a range straight into the reader's memory, or the
tail."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from ckptstore.storage.s3_requests import is_status

_READ_BYTES = 1 << 20

SizeCheck: TypeAlias = Callable[[int], None]
"""Raises `Corrupt` for an object of more bytes than one of its kind may have."""


class S3Reads(Protocol):
    """Reads for one bucket, each a single attempt within `Requests.run`, whose client each of them
    gets."""

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
    """Through s3fs's client."""

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
    """Copy `data` to the front of `views`; what is left of these. What is more than they take goes
    nowhere."""
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
