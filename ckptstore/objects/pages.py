"""How is the content of a tree's leaves encoded in pages (docs/format.md §6)? Pure.

A page is closed before its 513th leaf and at 2,048 ids. So a change to one leaf changes one
page, and the same content gives the same pages for every writer.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TypeAlias

from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.core.model import INLINE_BYTES, Box, LeafContent, LeafKind
from ckptstore.errors import Corrupt, InvalidInput

MAX_LEAVES = 512
MAX_IDS = 2048

_MAGIC = b"CKPG"
_VERSION = 1
_HEAD = struct.Struct("<4sIIIQ")
_INLINE, _IDS, _EXTENT, _GONE = range(4)
_LENGTH = struct.Struct("<Q")
_COUNTS = struct.Struct("<II")

_Entry: TypeAlias = tuple[int, bytes]
"""A kind and its payload."""


@dataclass(frozen=True, slots=True)
class Page:
    """Leaves from `first_leaf` on. The ids of the first leaf begin with its id number
    `first_id`; those of the last may continue on the next page."""

    first_leaf: int
    first_id: int
    leaves: tuple[LeafContent, ...]


def split_pages(kinds: Sequence[LeafKind], contents: Sequence[LeafContent]) -> list[bytes]:
    """The pages of a tree with leaves of these kinds and contents, in order.

    `raw_bytes` is stored for `value` and `bytes` leaves that have ids, `boxes` for tensors that
    have ids. Raises `InvalidInput` for impossible contents.
    """
    pages: list[bytes] = []
    entries: list[_Entry] = []
    first = leaves = ids = 0
    first_id = 0
    for number, (kind, content) in enumerate(zip(kinds, contents, strict=True)):
        _check(number, content)
        chunked = content.inline is None and not content.gone
        extent = _encode_extent(kind, content) if chunked else b""
        done = 0
        while True:
            if leaves == MAX_LEAVES or ids == MAX_IDS:
                pages.append(_encode_page(first, first_id, entries))
                entries, first, first_id, leaves, ids = [], number, done // CHUNK_ID_BYTES, 0, 0
            if extent:
                entries.append((_EXTENT, extent))
            leaves += 1
            if not chunked:
                entries.append((_GONE, b"") if content.gone else (_INLINE, content.inline or b""))
                break
            part = content.ids[done : done + (MAX_IDS - ids) * CHUNK_ID_BYTES]
            entries.append((_IDS, part))
            ids += len(part) // CHUNK_ID_BYTES
            done += len(part)
            if done == len(content.ids):
                break
    return [*pages, _encode_page(first, first_id, entries)] if entries else pages


def _encode_page(first_leaf: int, first_id: int, entries: Sequence[_Entry]) -> bytes:
    count = len(entries)
    sizes = [len(data) // CHUNK_ID_BYTES if kind == _IDS else len(data) for kind, data in entries]
    return b"".join(
        (
            _HEAD.pack(_MAGIC, _VERSION, first_leaf, count, first_id),
            bytes(kind for kind, _ in entries),
            bytes(-count % 4),
            struct.pack(f"<{count}I", *sizes),
            *(data for _, data in entries),
        )
    )


def decode_page(data: bytes | memoryview) -> Page:
    """One page. Raises `Corrupt`. Allocates at most a few times the size of `data`."""
    magic, version, first_leaf, count, first_id = (
        _HEAD.unpack_from(data) if len(data) >= _HEAD.size else (b"", 0, 0, 0, 0)
    )
    if magic != _MAGIC or version != _VERSION:
        raise _corrupt(f"wanted {_MAGIC!r} and version {_VERSION}, got {magic!r} and {version}")
    if not count or _payload_offset(count) > len(data):
        raise _corrupt(f"{count} entries in {len(data)} bytes")
    kinds = bytes(data[_HEAD.size : _HEAD.size + count])
    sizes = struct.unpack_from(f"<{count}I", data, _payload_offset(count) - 4 * count)
    if max(kinds) > _GONE or any(data[_HEAD.size + count : _payload_offset(count) - 4 * count]):
        raise _corrupt("unknown kinds of entry")
    leaves = _decode_leaves(data, kinds, sizes)
    if first_id and not leaves[0].ids:
        raise _corrupt("it goes on with a leaf that has no ids")
    if len(leaves) > MAX_LEAVES or (
        kinds.count(_IDS) and sum(len(leaf.ids) for leaf in leaves) > MAX_IDS * CHUNK_ID_BYTES
    ):
        raise _corrupt(f"more than {MAX_LEAVES} leaves or {MAX_IDS} ids")
    return Page(first_leaf, first_id, tuple(leaves))


def join_pages(pages: Iterable[bytes | memoryview], count: int) -> list[LeafContent]:
    """The contents of all `count` leaves of a tree from its pages in order. Raises `Corrupt`.

    `raw_bytes` of a tensor with ids is 0: its schema has it. The caller checks that the number
    of ids matches the grid.
    """
    leaves: list[LeafContent] = []
    ids: list[bytes] = []
    for page in map(decode_page, pages):
        rest = page.leaves
        if page.first_id:
            if page.first_leaf != len(leaves) - 1 or page.first_id * CHUNK_ID_BYTES != sum(
                map(len, ids)
            ):
                raise _corrupt(
                    f"id {page.first_id} of leaf {page.first_leaf} does not follow what is before "
                    "it"
                )
            if replace(leaves[-1], ids=b"") != replace(rest[0], ids=b""):
                raise _corrupt(f"leaf {page.first_leaf} goes on with another extent")
            ids.append(rest[0].ids)
            rest = rest[1:]
        elif page.first_leaf != len(leaves):
            raise _corrupt(f"leaf {page.first_leaf} does not follow {len(leaves)} leaves")
        if rest:
            _finish_last(leaves, ids)
            leaves.extend(rest)
            ids = [rest[-1].ids]
    _finish_last(leaves, ids)
    if len(leaves) != count:
        raise _corrupt(f"wanted {count} leaves, got {len(leaves)}")
    return leaves


def _decode_leaves(
    data: bytes | memoryview, kinds: bytes, sizes: tuple[int, ...]
) -> list[LeafContent]:
    lengths = [
        size * CHUNK_ID_BYTES if kind == _IDS else size
        for kind, size in zip(kinds, sizes, strict=True)
    ]
    stops = list(accumulate(lengths, initial=_payload_offset(len(kinds))))
    if stops[-1] != len(data):
        raise _corrupt(f"its payloads end at byte {stops[-1]} of {len(data)}")
    leaves = []
    extent = _NO_EXTENT
    for kind, start, size in zip(kinds, stops, lengths, strict=False):
        if kind == _GONE:
            if size or extent is not _NO_EXTENT:
                raise _corrupt(f"a leaf that is gone has {size} bytes, or an extent")
            leaves.append(GONE)
        elif kind == _INLINE:
            if size > INLINE_BYTES or extent is not _NO_EXTENT:
                raise _corrupt(f"an inline leaf of {size} bytes, or with an extent")
            leaves.append(LeafContent(bytes(data[start : start + size]), b"", size))
        elif kind == _IDS:
            if not size:
                raise _corrupt("a leaf without content")
            leaves.append(
                LeafContent(None, bytes(data[start : start + size]), extent.raw_bytes, extent.boxes)
            )
            extent = _NO_EXTENT
        elif extent is not _NO_EXTENT:
            raise _corrupt("two extents for one leaf")
        else:
            extent = _decode_extent(data[start : start + size])
    if extent is not _NO_EXTENT:
        raise _corrupt("an extent without a leaf")
    return leaves


def _finish_last(leaves: list[LeafContent], ids: list[bytes]) -> None:
    """Assign to the last leaf the ids from all the pages that it spans, joined once."""
    if len(ids) > 1:
        leaves[-1] = replace(leaves[-1], ids=b"".join(ids))


def _check(number: int, content: LeafContent) -> None:
    if content.gone:
        if content != GONE:
            raise InvalidInput(f"leaf {number} is gone and has content; wanted none")
    elif content.inline is not None:
        if len(content.inline) > INLINE_BYTES or content.ids or content.boxes is not None:
            raise InvalidInput(
                f"leaf {number} cannot be inline: wanted at most {INLINE_BYTES} bytes and neither "
                "ids nor boxes"
            )
    elif not content.ids or len(content.ids) % CHUNK_ID_BYTES:
        raise InvalidInput(
            f"leaf {number} has {len(content.ids)} bytes of ids; wanted a positive multiple of "
            f"{CHUNK_ID_BYTES}"
        )


def _encode_extent(kind: LeafKind, content: LeafContent) -> bytes:
    if kind != "tensor":
        return _LENGTH.pack(content.raw_bytes)
    return b"" if content.boxes is None else _encode_boxes(content.boxes)


@lru_cache(64)  # layers are held alike
def _encode_boxes(boxes: tuple[Box, ...]) -> bytes:
    dimensions = {len(part) for box in boxes for part in box}
    if len(dimensions) != 1 or 0 in dimensions:
        raise InvalidInput(
            "a tensor cannot be held in these boxes: wanted one or more of one number of "
            f"dimensions, got {boxes}"
        )
    numbers = [n for box in boxes for part in box for n in part]
    return _COUNTS.pack(dimensions.pop(), len(boxes)) + struct.pack(f"<{len(numbers)}Q", *numbers)


def _decode_extent(data: bytes | memoryview) -> LeafContent:
    """A leaf without its ids. Eight bytes are a length; boxes take at least 24."""
    if len(data) == _LENGTH.size:
        return LeafContent(raw_bytes=_LENGTH.unpack(data)[0])
    n, boxes = _COUNTS.unpack_from(data) if len(data) > _COUNTS.size else (0, 0)
    if not n or not boxes or len(data) != _COUNTS.size + 16 * n * boxes:
        raise _corrupt(f"{boxes} boxes of {n} dimensions in {len(data)} bytes")
    numbers = struct.unpack_from(f"<{2 * n * boxes}Q", data, _COUNTS.size)
    return LeafContent(
        boxes=tuple(
            Box(numbers[i : i + n], numbers[i + n : i + 2 * n])
            for i in range(0, len(numbers), 2 * n)
        )
    )


def _payload_offset(count: int) -> int:
    return _HEAD.size + count + -count % 4 + 4 * count


def _corrupt(what: str) -> Corrupt:
    return Corrupt(f"a page is damaged: {what}; run `ckptstore fsck`")


_NO_EXTENT = LeafContent()
GONE = LeafContent(gone=True)
"""The content of a leaf that a thinning took away."""
