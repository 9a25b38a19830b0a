"""Where in an HDF5 file do its datasets lie? Those stored in one piece, without a filter.

The format is https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html. Its own library
is not asked: it runs in the trainer's process, and a damaged file may end that.
"""

from collections.abc import Iterator
from math import prod

from ckptstore.plugin.model import Shape, nbytes_of
from ckptstore.plugins.foreign.magic import HDF5_MAGIC
from ckptstore.plugins.foreign.sources import Entry, Window
from ckptstore.plugins.parsers.pickle_ops import TooLarge
from ckptstore.plugins.parsers.torch_files import NAME_MAX

_BYTES_MAX = 256 << 20
"""Most bytes of blocks that are read: each group, dataset and part of a header is one or some."""
_BLOCK_BYTES = 256
"""What a block counts beyond its bytes."""
_BLOCK_BYTES_MAX = 16 << 20
_NESTING = 100
_NOWHERE = (1 << 64) - 1
_DATASPACE, _DATATYPE, _LINK, _LAYOUT, _CONTINUED, _SYMBOLS = 1, 3, 6, 8, 16, 17
_CONTIGUOUS, _SOFT = 1, 2
_FIXED, _FLOAT, _ENUM = 0, 1, 8
_FLOATS = {
    (2, 10, 5, 10): "float16",
    (2, 7, 8, 7): "bfloat16",
    (4, 23, 8, 23): "float32",
    (8, 52, 11, 52): "float64",
}
"""By bytes, the bit where the exponent begins, and the bits of exponent and mantissa."""


class _File:
    """A file as blocks, of which a bounded number is read."""

    def __init__(self, file: Window) -> None:
        self._file, self._left = file, _BYTES_MAX

    def block(self, at: int, nbytes: int, magic: bytes = b"") -> bytes:
        self._left -= _BLOCK_BYTES + nbytes
        if self._left < 0 or nbytes > _BLOCK_BYTES_MAX:
            raise TooLarge(f"its structure has more than {_BYTES_MAX} bytes, or a part {nbytes}")
        data = self._file.read_at(at, nbytes)
        if not data.startswith(magic):
            raise ValueError(f"{magic!r} is not where it should be")
        return data


def hdf5_entries(window: Window) -> list[Entry]:
    """The datasets of a file, as `GROUP.DATASET`."""
    file = _File(window)
    found, seen = [], set[int]()
    todo = [("", _root(file), 0)]
    while todo:
        name, address, depth = todo.pop()
        if address in seen or depth > _NESTING:  # a hard link, perhaps to a group around it
            continue
        seen.add(address)
        dataset: dict[int, bytes] = {}
        for kind, data in _messages(file, address):
            if kind in (_LINK, _SYMBOLS):
                children = [_link(data)] if kind == _LINK else _symbols(file, data)
                for child, target in filter(None, children):
                    path = f"{name}.{child}" if name else child
                    todo.append((path[:NAME_MAX], target, depth + 1))
            elif kind in (_DATASPACE, _DATATYPE, _LAYOUT):
                dataset[kind] = data
        if len(dataset) == 3 and (entry := _dataset(name, dataset)):
            found.append(entry)
    return found


def _root(file: _File) -> int:
    """Where the header of the outermost group lies."""
    head = file.block(0, 16, HDF5_MAGIC)
    old = head[8] < 2
    if head[8] > 3 or (head[13:15] if old else head[9:11]) != b"\x08\x08":
        raise ValueError("a version, or widths of numbers, that nobody writes")
    at = 24 + 4 * (head[8] == 1) if old else 12
    data = file.block(at, 48)
    if _number(data, 0, 8):
        raise ValueError("addresses do not count from the beginning of the file")
    return _number(data, 40, 8) if old else _number(data, 24, 8)


def _messages(file: _File, address: int) -> Iterator[tuple[int, bytes]]:
    """The messages of an object's header, in order."""
    head = file.block(address, 16)
    new = head.startswith(b"OHDR")
    if new:
        flags = head[5]
        at = address + 6 + 16 * bool(flags & 32) + 4 * bool(flags & 16)
        width = 1 << (flags & 3)
        blocks = [(at + width, _number(file.block(at, width), 0, width))]
        prefix = 4 + 2 * bool(flags & 4)
    else:
        if head[0] != 1:
            raise ValueError("no header of an object is where it should be")
        blocks, prefix = [(address + 16, _number(head, 8, 4))], 8
    while blocks:
        data, at = file.block(*blocks.pop()), 0
        while at + prefix <= len(data):
            kind = data[at] if new else _number(data, at, 2)
            nbytes = _number(data, at + (1 if new else 2), 2)
            message = data[at + prefix : at + prefix + nbytes]
            at += prefix + nbytes
            if kind == _CONTINUED:
                where, size = _number(message, 0, 8), _number(message, 8, 8)
                blocks.append((where + 4, size - 8) if new else (where, size))
            else:
                yield kind, message


def _symbols(file: _File, data: bytes) -> Iterator[tuple[str, int] | None]:
    """The links of a group of the old kind: a B-tree of names that lie in a heap."""
    tree, heap = _number(data, 0, 8), _number(data, 8, 8)
    head = file.block(heap, 32, b"HEAP")
    names = file.block(_number(head, 24, 8), _number(head, 8, 8))
    todo = [(tree, 1 << 8)]
    while todo:
        at, above = todo.pop()
        head = file.block(at, 24, b"TREE")
        level, count = head[5], _number(head, 6, 2)
        if head[4] or level >= above:
            raise ValueError("the tree of a group is not one")
        children = file.block(at + 24, 16 * count)
        for child in (_number(children, 16 * i + 8, 8) for i in range(count)):
            if level:
                todo.append((child, level))
                continue
            entries = _number(file.block(child, 8, b"SNOD"), 6, 2)
            table = file.block(child + 8, 40 * entries)
            for i in range(0, len(table), 40):
                if _number(table, i + 16, 4) != _SOFT:
                    start = _number(table, i, 8)
                    name = names[start : start + NAME_MAX].partition(b"\0")[0]
                    yield name.decode("utf-8", "replace"), _number(table, i + 8, 8)


def _link(data: bytes) -> tuple[str, int] | None:
    """The name and the object of a link of the new kind. None for one that is no hard link."""
    flags, at = data[1], 2
    if flags & 8:
        if data[2]:
            return None
        at += 1
    at += 8 * bool(flags & 4) + bool(flags & 16)
    width = 1 << (flags & 3)
    start = at + width
    stop = start + _number(data, at, width)
    return data[start:stop].decode("utf-8", "replace"), _number(data, stop, 8)


def _dataset(name: str, messages: dict[int, bytes]) -> Entry | None:
    """A dataset; None for one of another type, or that is not in one piece."""
    layout, dtype = messages[_LAYOUT], _dtype(messages[_DATATYPE])
    shape = _shape(messages[_DATASPACE])
    if layout[0] not in (3, 4) or layout[1] != _CONTIGUOUS or dtype is None or shape is None:
        return None
    start, nbytes = _number(layout, 2, 8), _number(layout, 10, 8)
    if start == _NOWHERE or not prod(shape) or nbytes != nbytes_of(dtype, shape):
        return None
    return Entry(name, dtype, shape, start, start + nbytes)


def _shape(data: bytes) -> Shape | None:
    version, rank = data[0], data[1]
    if version not in (1, 2) or (version == 2 and data[3] > 1):
        return None
    at = 8 if version == 1 else 4
    return tuple(_number(data, at + 8 * i, 8) for i in range(rank))


def _dtype(data: bytes) -> str | None:
    """torch's name for a type, if it is in the order of bytes that torch has."""
    kind, flags, nbytes = data[0] & 15, data[1], _number(data, 4, 4)
    if kind == _ENUM:  # h5py's bool
        return "bool" if nbytes == 1 and data[8] & 15 == _FIXED else None
    if flags & 1:
        return None
    if kind == _FLOAT:
        return _FLOATS.get((nbytes, data[12], data[13], data[15]))
    if kind == _FIXED and nbytes in (1, 2, 4, 8) and _number(data, 10, 2) == 8 * nbytes:
        return f"{'' if flags & 8 else 'u'}int{8 * nbytes}"
    return None


def _number(data: bytes, at: int, nbytes: int) -> int:
    if at + nbytes > len(data):
        raise ValueError("a part ends too early")
    return int.from_bytes(data[at : at + nbytes], "little")
