"""Where in the data files of an OCDBT database, as Orbax writes them, do its values lie?

The format is https://google.github.io/tensorstore/kvstore/ocdbt: a manifest leads to the root of a
B+tree, whose leaves say where each key's value lies. Values are chunks of zarr arrays, mostly
compressed, which an equal array has again, at another offset of a file of another name.
"""

from collections.abc import Mapping
from posixpath import normpath

from ckptstore.plugins.foreign.sources import Entry, Window
from ckptstore.plugins.parsers.pickle_ops import TooLarge

_MANIFEST, _NODE = b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde"
_HEADER_BYTES, _CHECKSUM_BYTES = 14, 4
_NODE_BYTES_MAX = 128 << 20
"""Most bytes of a node, decoded; tensorstore writes up to 100 MB."""
_TREE_BYTES_MAX = 1 << 30
"""Most bytes of all nodes of a tree, decoded one by one."""
_HEIGHT_MAX = 32
_COUNT_MAX = 1 << 20
"""Most entries of all nodes."""
_TEXT_MAX = 1 << 16
_INLINE = 0


class _Fields:
    """The fields of a decoded node, in order. Raises `ValueError` behind its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at, self.size = data, 0, len(data)

    def raw(self, nbytes: int) -> bytes:
        if nbytes > len(self._data) - self._at:
            raise ValueError("a node ends too early")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def byte(self) -> int:
        return self.raw(1)[0]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 64, 7):
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number is too long")

    def varints(self, count: int) -> list[int]:
        if count > _COUNT_MAX:
            raise TooLarge(f"a node has {count} entries")
        return [self.varint() for _ in range(count)]

    def texts(self, count: int, *, numbered: bool) -> tuple[list[bytes], list[int]]:
        """Texts of which each begins as the one before it does, and if `numbered`, a number of
        each."""
        same = [0, *self.varints(max(count - 1, 0))]
        rest = self.varints(count)
        numbers = self.varints(count if numbered else 0)
        texts, last, total = [], b"", 0
        for shared, more in zip(same[:count], rest, strict=True):
            total += shared + more
            if shared > len(last) or shared + more > _TEXT_MAX or total > _NODE_BYTES_MAX:
                raise ValueError("the names in a node are no names, or too long")
            last = last[:shared] + self.raw(more)
            texts.append(last)
        return texts, numbers

    def files(self, above: bytes) -> list[tuple[bytes, bytes]]:
        """The table of data files: for each, the folder that its own files are relative to, and its
        name. `above` is the folder of the node."""
        names, bases = self.texts(self.varint(), numbered=True)
        return [
            (above + name[:base], above + name) for name, base in zip(names, bases, strict=True)
        ]


def ocdbt_entries(manifest: Window, files: Mapping[str, Window]) -> dict[str, list[Entry]]:
    """The values in the data files of the newest version, by file, as vectors of bytes under their
    keys. `files` are by their names relative to `manifest`. Raises anything for what is no
    database, or damaged."""
    fields = _decoded(manifest, 0, manifest.size, _MANIFEST)
    fields.raw(16)
    if fields.varint():
        return {}  # the versions lie in a file of another name
    fields.varints(2)
    fields.byte()
    if fields.varint():
        fields.raw(4)
    table = fields.files(b"")
    count = fields.varint()
    fields.varints(count)
    heights = list(fields.raw(count))
    numbers, offsets, lengths = (fields.varints(count) for _ in range(3))
    found: dict[str, dict[int, Entry]] = {}
    seen: set[tuple[bytes, int]] = set()
    todo = [(*table[numbers[-1]], offsets[-1], lengths[-1], heights[-1], b"")] if count else []
    read_bytes = entries = 0
    while todo:
        folder, name, offset, nbytes, height, prefix = todo.pop()
        if (name, offset) in seen or height > _HEIGHT_MAX:
            raise ValueError("a node is in the tree twice, or the tree is too high")
        seen.add((name, offset))
        fields = _decoded(files[_path(name)], offset, nbytes, _NODE)
        if fields.byte() != height:
            raise ValueError("a node has another height than its parent says")
        table = fields.files(folder)
        count = fields.varint()
        read_bytes += nbytes + fields.size
        entries += count + len(table)
        if read_bytes > _TREE_BYTES_MAX or entries > _COUNT_MAX:
            raise TooLarge("its tree is too large")
        if height:
            keys, shared = fields.texts(count, numbered=True)
            numbers, offsets, lengths = (fields.varints(count) for _ in range(3))
            todo += [
                (*table[numbers[i]], offsets[i], lengths[i], height - 1, prefix + key[: shared[i]])
                for i, key in enumerate(keys)
            ]
            continue
        (keys, _), lengths = fields.texts(count, numbered=False), fields.varints(count)
        away = [i for i, kind in enumerate(fields.varints(count)) if kind != _INLINE]
        numbers, offsets = (fields.varints(len(away)) for _ in range(2))
        for k, i in enumerate(away):
            path = _path(table[numbers[k]][1])
            key = (prefix + keys[i]).decode("utf-8", "replace")
            if path in files and lengths[i]:
                entry = Entry(key, "uint8", (lengths[i],), offsets[k], offsets[k] + lengths[i])
                found.setdefault(path, {}).setdefault(offsets[k], entry)
    return {path: list(entries.values()) for path, entries in found.items()}


def _path(name: bytes) -> str:
    return normpath(name.decode())


def _decoded(file: Window, offset: int, nbytes: int, magic: bytes) -> _Fields:
    """The fields of a node, or of a manifest. Checksums are not compared: the bytes of the file are
    what is kept."""
    if not _HEADER_BYTES + _CHECKSUM_BYTES <= nbytes <= _NODE_BYTES_MAX:
        raise TooLarge(f"a node has {nbytes} bytes")
    data = file.read_at(offset, nbytes)
    if data[:4] != magic or int.from_bytes(data[4:12], "little") != nbytes or data[12]:
        raise ValueError("not a node")
    body = data[_HEADER_BYTES:-_CHECKSUM_BYTES]
    if data[13]:
        import zstandard

        with zstandard.ZstdDecompressor().stream_reader(body) as stream:
            body = stream.read(_NODE_BYTES_MAX + 1)
        if len(body) > _NODE_BYTES_MAX:
            raise TooLarge("a node is too large")
    return _Fields(body)
