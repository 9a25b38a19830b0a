"""Where in a file of torch.save do its tensors lie? Storages, cut where their tensors end."""

import io
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckptstore.plugin.model import Shape, nbytes_of, width_of
from ckptstore.plugins.foreign.sources import Entry, Window
from ckptstore.plugins.foreign.strides import can_be_strided, is_row_major
from ckptstore.plugins.parsers.pickle_ops import (
    PICKLE_BYTES_MAX,
    Call,
    Name,
    Pairs,
    Persistent,
    TooLarge,
    counts_of,
    is_dict,
    item_of,
    items_of,
    walk,
)

_STORAGES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Untyped": "uint8",
}
_NESTING = 100
NAME_MAX = 1000


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor in a storage, from byte `start` on; `strides` are None if its elements lie row by
    row."""

    name: str
    dtype: str
    shape: Shape
    strides: Shape | None
    start: int


@dataclass(slots=True)
class _Storage:
    """A storage of `numel` elements and the tensors in it; `name` is that of the first."""

    dtype: str
    numel: int
    name: str
    views: list[_View] = field(default_factory=list)


def torch_archive(file: Window, members: Mapping[str, tuple[int, int]]) -> list[Entry]:
    """The tensors of an archive of torch.save."""
    (pickled,) = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    root = pickled.removesuffix("data.pkl")
    order = members.get(f"{root}byteorder")
    if order and file.read_at(*order) != b"little":
        return []
    start, nbytes = members[pickled]
    if nbytes > PICKLE_BYTES_MAX:
        raise TooLarge(f"its pickle has {nbytes} bytes")
    found = _storages(walk(io.BytesIO(file.read_at(start, nbytes))))
    places = {key: members.get(f"{root}data/{key}", (0, 0)) for key in found}
    return [entry for key, each in found.items() for entry in _cut(each, *places[key])]


def legacy_torch(file: Window) -> list[Entry]:
    """The tensors of a file that torch wrote before it used archives."""
    reader = file.reader()
    _, _, system = walk(reader), walk(reader), walk(reader)
    if item_of(system, "little_endian") is not True:
        return []
    found, keys = _storages(walk(reader)), walk(reader)
    position, entries = reader.tell(), []
    for key in keys:
        if not isinstance(key, str):
            raise ValueError("a storage has no name")
        each = found[key]
        numel = int.from_bytes(file.read_at(position, 8), "little")
        nbytes = numel * width_of(each.dtype)
        entries += _cut(each, position + 8, nbytes)
        position += 8 + nbytes
    return entries


def _cut(storage: _Storage, start: int, nbytes: int) -> list[Entry]:
    """The tensors of a storage at `start`. Of those that overlap, the largest; if none can be
    described, the storage as one vector, under a name of its own."""
    if nbytes != nbytes_of(storage.dtype, (storage.numel,)) or not nbytes:
        return []
    found: dict[tuple[int, str, Shape, Shape | None], Entry] = {}
    for view in storage.views:
        entry = Entry(view.name, view.dtype, view.shape, 0, 0, strides=view.strides)
        first, stop = start + view.start, start + view.start + entry.nbytes
        may = view.strides is None or can_be_strided(view.dtype, view.shape, view.strides)
        if may and first < stop <= start + nbytes:
            key = view.start, view.dtype, view.shape, view.strides
            found.setdefault(key, replace(entry, start=first, stop=stop))
    if entries := _apart(found.values()):
        return entries
    name = f"{storage.name}.storage" if storage.views else storage.name
    return [Entry(name, storage.dtype, (storage.numel,), start, start + nbytes)]


def _apart(entries: Iterable[Entry]) -> list[Entry]:
    """Those that do not overlap, the larger ones first."""
    starts: list[int] = []
    kept: list[Entry] = []
    for entry in sorted(entries, key=lambda each: (each.start - each.stop, each.start)):
        at = bisect_left(starts, entry.start)
        behind = at < len(kept) and kept[at].start < entry.stop
        if not behind and (not at or kept[at - 1].stop <= entry.start):
            starts.insert(at, entry.start)
            kept.insert(at, entry)
    return kept


def _storages(root: Any) -> dict[str, _Storage]:
    """The storages that an unpickled object would use, by key, with the tensors in each."""
    found: dict[str, _Storage] = {}
    seen: set[int] = set()
    # Names are made when they are needed: in a list of many values each would be as long as the way
    # there.
    todo: list[tuple[str, Iterator[tuple[str, Any]]]] = [("", iter([("", root)]))]
    while todo:
        above, children = todo[-1]
        if (child := next(children, None)) is None:
            todo.pop()
            continue
        key, node = child
        if id(node) in seen or len(todo) > _NESTING:
            continue
        seen.add(id(node))
        name = (f"{above}.{key}" if above and key else above or key)[:NAME_MAX]
        if isinstance(node, Call) and _is_tensor(node) and _note(found, name, node.args):
            continue
        if isinstance(node, Persistent):
            _storage(found, name, node)
        todo.append((name, _children(node)))
    return found


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    """What lies in a value, with the part of a name that leads there."""
    if isinstance(node, tuple | list):
        yield from ((str(i), value) for i, value in enumerate(node))
    elif isinstance(node, Pairs | Call):
        if isinstance(node, Call) and not is_dict(node) and isinstance(node.args, tuple):
            # A storage that some object has is not the object.
            yield from (("storage" if type(v) is Persistent else "", v) for v in node.args)
        yield from ((_text(key), value) for key, value in items_of(node))
        if isinstance(node, Call):
            yield from ((str(i), value) for i, value in enumerate(node.added))
            yield "", node.state


def _text(key: Any) -> str:
    return str(key)[:NAME_MAX] if isinstance(key, str | int | float) else type(key).__name__


def _is_tensor(call: Call) -> bool:
    return isinstance(call.function, Name) and (call.function.module, call.function.name) in {
        ("torch._utils", "_rebuild_tensor"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"),
    }


def _note(found: dict[str, _Storage], name: str, args: Any) -> bool:
    """Add a tensor to its storage. False if its arguments are not those of a tensor."""
    if not isinstance(args, tuple) or len(args) < 4 or type(args[1]) is not int or args[1] < 0:
        return False
    storage = _storage(found, name, args[0])
    if storage is None:
        return False
    shape, strides = counts_of(args[2]), counts_of(args[3])
    named = args[6] if len(args) > 6 and isinstance(args[6], Name) else None
    dtype = named.name if named else storage.dtype
    width = width_of(dtype)
    if len(shape) != len(strides):
        return False
    own = None if not prod(shape) or is_row_major(shape, strides) else strides
    storage.views.append(_View(name, dtype, shape, own, args[1] * width))
    return True


def _storage(found: dict[str, _Storage], name: str, node: Any) -> _Storage | None:
    pid = node.id if isinstance(node, Persistent) else None
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
        return None
    kind, key, numel = pid[1], pid[2], pid[4]
    if not isinstance(key, str):  # the text of another value may be endless
        return None
    dtype = _STORAGES.get(kind.name.removesuffix("Storage")) if isinstance(kind, Name) else None
    if dtype is None or type(numel) is not int or numel < 0:
        return None
    return found.setdefault(key, _Storage(dtype, numel, name or f"storage.{key}"))
