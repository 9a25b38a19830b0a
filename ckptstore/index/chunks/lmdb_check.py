"""Checking an LMDB file before liblmdb maps it: every page that liblmdb could follow is validated.

liblmdb trusts its file, and a bad page crashes the process. This module trusts nothing: it compares
sizes, page numbers, node offsets and the free list with liblmdb's assumptions, one tree level at a
time with numpy. Keys and values are not checked, since records carry their own checksums. The
format is that of LMDB 0.9 (data version 1, 64 bits, little-endian; `mdb.c`); any other fails.
"""

import os
import struct
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_ELSEWHERE, _SUBTREE = 1, 2
_NO_PAGE = (1 << 64) - 1
_HEADER_BYTES, _NODE_BYTES = 16, 8
_LARGEST_KEY = 511
_DEPTH = 32
_BLOCK_PAGES = 2048

_META = struct.Struct("<IIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_LAST = struct.Struct("<QQ")
_OVERFLOW_HEADER = struct.Struct("<QHHI")
_META_AT = 16
_TREES_AT = _META_AT + _META.size
_LAST_AT = _TREES_AT + 2 * _TREE.size

_Pages = npt.NDArray[np.uint8]
_Numbers = npt.NDArray[np.uint64]


class Damaged(Exception):
    """The file's content violates liblmdb's assumptions."""


class _Tree(NamedTuple):
    page_bytes: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class _Nodes(NamedTuple):
    """The nodes of some pages: the start of each in the pages' bytes, and its header."""

    at: npt.NDArray[np.int64]
    low: npt.NDArray[np.uint16]
    high: npt.NDArray[np.uint16]
    flags: npt.NDArray[np.uint16]
    key_bytes: npt.NDArray[np.uint16]


def check(path: Path, sizes: dict[bytes, tuple[int, int] | None]) -> None:
    """Raise `Damaged` unless `path` is a sound LMDB file with exactly the databases `sizes`.

    `sizes` maps names to the bytes of every key and value, where these are fixed. There must be no
    writer meanwhile. Raises `OSError` if the disk cannot read all of it.
    """
    try:
        page_bytes, free, main, pages = _open(path)
        walk = _Walk(pages, page_bytes)
        named = walk.named_trees(main)
        if named.keys() != sizes.keys():
            raise Damaged(f"it holds the databases {sorted(named)}; wanted {sorted(sizes)}")
        for name, tree in named.items():
            walk.tree(tree, sizes[name])
        walk.free_pages(free)
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise Damaged(f"a number in it leads outside of it: {error}") from error


def _open(path: Path) -> tuple[int, _Tree, _Tree, _Pages]:
    with path.open("rb") as file:
        head = file.read(65536 + 4096)
        size = len(head) + _read_through(file)
    page_bytes = struct.unpack_from("<I", head, _TREES_AT)[0] if len(head) >= 4096 else 0
    if page_bytes.bit_count() != 1 or not 512 <= page_bytes <= 65536 or len(head) < 2 * page_bytes:
        raise Damaged("no LMDB file")
    metas = [_meta(head[n * page_bytes : (n + 1) * page_bytes], n) for n in range(2)]
    free, main, last, _ = max(metas, key=lambda meta: meta[3])
    if {free.page_bytes, metas[0][0].page_bytes, metas[1][0].page_bytes} != {page_bytes} or size < (
        last + 1
    ) * page_bytes:
        raise Damaged(f"it has {size} bytes; its header wants {last + 1} pages")
    return page_bytes, free, main, np.memmap(path, np.uint8, "r", shape=(last + 1, page_bytes))


def _read_through(file: BufferedReader) -> int:
    """Read the rest of a file and return its bytes. An unreadable page raises here; mapped, it
    would kill the process."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    # A small index is opened often, and 8 MiB take a millisecond.
    buffer, total = (
        bytearray(min(max(left, 1), _BLOCK_PAGES * 4096)),
        0,
    )
    while got := file.readinto(buffer):
        total += got
    return total


def _meta(page: bytes, number: int) -> tuple[_Tree, _Tree, int, int]:
    flags = struct.unpack_from("<H", page, 10)[0]
    magic, version, _, _ = _META.unpack_from(page, _META_AT)
    if magic != _MAGIC or version != _VERSION or flags != 8:
        raise Damaged(f"meta page {number} is no meta page")
    free, main = (_Tree(*_TREE.unpack_from(page, _TREES_AT + i * _TREE.size)) for i in range(2))
    return free, main, *_LAST.unpack_from(page, _LAST_AT)


class _Walk:
    """One pass over every page reachable from the newest meta page; each page is visited once."""

    def __init__(self, pages: _Pages, page_bytes: int) -> None:
        self._pages, self._page_bytes = pages, page_bytes
        self._met = np.zeros(len(pages), np.bool_)
        self._met[:2] = True

    def named_trees(self, main: _Tree) -> dict[bytes, _Tree]:
        """The databases that the main one lists; it holds nothing else."""
        named = {}
        for block, nodes in self._leaves(main):
            if (
                (nodes.flags != _SUBTREE).any()
                or (nodes.low != _TREE.size).any()
                or nodes.high.any()
            ):
                raise Damaged("the main database holds other things than databases")
            for at, key_bytes in zip(nodes.at.tolist(), nodes.key_bytes.tolist(), strict=True):
                key = at + _NODE_BYTES
                named[block[key : key + key_bytes].tobytes()] = _Tree(
                    *_TREE.unpack(block[key + key_bytes : key + key_bytes + _TREE.size].tobytes())
                )
        return named

    def tree(self, tree: _Tree, sizes: tuple[int, int] | None) -> None:
        """Check a database of plain nodes, all of them of `sizes` if given."""
        for _, nodes in self._leaves(tree):
            if nodes.flags.any() or (
                sizes
                and (
                    (nodes.key_bytes != sizes[0]) | (nodes.low != sizes[1]) | (nodes.high != 0)
                ).any()
            ):
                raise Damaged("a record does not have the size that all have")

    def free_pages(self, tree: _Tree) -> None:
        """Check the database of free pages: descending lists of page numbers that nothing else
        uses."""
        for block, nodes in self._leaves(tree):
            if (nodes.key_bytes != 8).any() or (nodes.flags > _ELSEWHERE).any():
                raise Damaged("the list of free pages is none")
            for at, low, high, flags in zip(
                *(a.tolist() for a in (nodes.at, nodes.low, nodes.high, nodes.flags)), strict=True
            ):
                data = block[at + _NODE_BYTES + 8 :]
                if flags:
                    data = self._overflow(
                        int.from_bytes(data[:8].tobytes(), "little"), low | high << 16
                    )
                self._free_list(data[: low | high << 16])

    def _free_list(self, data: _Pages) -> None:
        numbers = np.frombuffer(data.tobytes()[: len(data) & ~7], np.uint64)
        if not len(numbers) or numbers[0] >= len(numbers):
            raise Damaged("a list of free pages is longer than its record")
        free = numbers[1 : int(numbers[0]) + 1]
        if (free[1:] >= free[:-1]).any():
            raise Damaged("a list of free pages is not in order")
        self._meet(free)

    def _overflow(self, first: int, data_bytes: int) -> _Pages:
        self._meet(np.array([first], np.uint64))
        page = self._pages[first]
        number, _, flags, count = _OVERFLOW_HEADER.unpack(page[:_HEADER_BYTES].tobytes())
        if (
            number != first
            or flags != _OVERFLOW
            or not 0 < count <= len(self._pages) - first
            or data_bytes > count * self._page_bytes - 16
        ):
            raise Damaged(f"page {first} is no overflow page")
        self._meet(np.arange(first + 1, first + count, dtype=np.uint64))
        return self._pages[first : first + count].reshape(-1)[_HEADER_BYTES:]

    def _leaves(self, tree: _Tree) -> Iterator[tuple[_Pages, _Nodes]]:
        """The leaf pages of a tree in blocks, as bytes, with their nodes; the branch pages above
        are checked on the way."""
        if tree.root == _NO_PAGE and not tree.depth:
            return
        if tree.flags & ~8 or not 0 < tree.depth <= _DEPTH:
            raise Damaged("a tree is of a kind that is not used here")
        level = np.array([tree.root], np.uint64)
        for _ in range(tree.depth - 1):
            level = np.concatenate([_children(nodes) for _, nodes in self._blocks(level, _BRANCH)])
        entries = 0
        for block, nodes in self._blocks(level, _LEAF):
            entries += len(nodes.at)
            yield block, nodes
        if entries != tree.entries or len(level) != tree.leaf_pages:
            raise Damaged(
                f"a tree has {entries} records on {len(level)} pages; wanted {tree.entries} on "
                f"{tree.leaf_pages}"
            )

    def _blocks(self, level: _Numbers, kind: int) -> Iterator[tuple[_Pages, _Nodes]]:
        self._meet(level)
        for start in range(0, len(level), _BLOCK_PAGES):
            numbers = level[start : start + _BLOCK_PAGES]
            block = self._pages[numbers]
            yield block.reshape(-1), _nodes(block, numbers, kind)

    def _meet(self, numbers: _Numbers) -> None:
        if len(numbers) and int(numbers.max()) >= len(self._pages):
            raise Damaged(f"page {numbers.max()} lies behind the last one")
        ordered = np.sort(numbers)  # np.unique imports numpy.ma, which takes longer than the check
        if self._met[numbers].any() or (ordered[1:] == ordered[:-1]).any():
            raise Damaged("a page is used twice")
        self._met[numbers] = True


def _children(nodes: _Nodes) -> _Numbers:
    high, top = (
        a.astype(np.uint64) << np.uint64(shift)
        for a, shift in ((nodes.high, 16), (nodes.flags, 32))
    )
    children: _Numbers = nodes.low.astype(np.uint64) | high | top
    return children


def _nodes(block: _Pages, numbers: _Numbers, kind: int) -> _Nodes:
    """The nodes of pages, which must fill each page from its upper bound to its end."""
    page_bytes = block.shape[1]
    head = block[:, :_HEADER_BYTES].copy()
    _, flags, lower, upper = head.view("<u2")[:, 4:8].astype(np.int64).T
    if (head.view("<u8")[:, 0] != numbers).any() or (flags != kind).any():
        raise Damaged("a page is not the one that it should be")
    if (
        (lower < _HEADER_BYTES + 2 * _least_nodes(kind))
        | (lower > upper)
        | (upper > page_bytes)
        | (lower & 1 == 1)
    ).any():
        raise Damaged("the bounds of a page are wrong")
    counts = (lower - _HEADER_BYTES) // 2
    most = int(counts.max())
    offsets = block[:, _HEADER_BYTES : _HEADER_BYTES + 2 * most].copy().view("<u2").astype(np.int64)
    used = np.arange(most) < counts[:, None]
    of_page = np.repeat(np.arange(len(block)), counts)
    offset = offsets[used]
    if ((offset > page_bytes - _NODE_BYTES) | (offset & 1 == 1)).any():
        raise Damaged("a node lies outside of its page")
    at = of_page * page_bytes + offset
    header = block.view("<u2").reshape(-1)[at[:, None] // 2 + np.arange(_NODE_BYTES // 2)]
    nodes = _Nodes(at, *header.T)
    _check_filled(
        nodes, kind, of_page * page_bytes + page_bytes, np.arange(len(block)) * page_bytes + upper
    )
    return nodes


def _least_nodes(kind: int) -> int:
    """The least number of nodes of a page: liblmdb aborts on a branch page with one."""
    return 2 if kind == _BRANCH else 1


def _check_filled(
    nodes: _Nodes, kind: int, ends: npt.NDArray[np.int64], uppers: npt.NDArray[np.int64]
) -> None:
    size = _NODE_BYTES + nodes.key_bytes.astype(np.int64)
    if kind == _LEAF:
        inside = nodes.low.astype(np.int64) | nodes.high.astype(np.int64) << 16
        size += np.where(nodes.flags & _ELSEWHERE, 8, inside)
    size += size & 1
    order = np.argsort(nodes.at, kind="stable")
    starts, stops, ends = nodes.at[order], (nodes.at + size)[order], ends[order]
    last = np.append(ends[1:] != ends[:-1], True)
    first = np.append(True, last[:-1])
    follows = np.where(last, ends, np.append(starts[1:], 0))
    if (
        (stops != follows).any()
        or (starts[first] != uppers).any()
        or (nodes.key_bytes > _LARGEST_KEY).any()
    ):
        raise Damaged("the nodes of a page do not fill it")
