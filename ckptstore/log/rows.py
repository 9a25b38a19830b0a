"""How are a hundred thousand rows of the log's state there at once, although nearly none of them is
asked for?

A log that is folded from its first entry has them in persistent maps. One that continues a
checkpoint has `Rows`: the rows as the checkpoint has them, sorted by key, each decoded when it is
asked for, and a persistent map of what changed since. So an open costs as much as reading the
bytes, and the next checkpoint copies the rows that did not change.
"""

import struct
from bisect import bisect_left
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    ValuesView,
)
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import lt
from typing import Any, Generic, TypeVar, cast

from rpds import HashTrieMap

from ckptstore.errors import Corrupt

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

_GONE: Any = object()
_ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class Form(Generic[K, V]):
    """How a key and a row are stored: keys in `key_bytes` each, so that their bytes sort as they
    do. What decodes raises `LookupError`, `TypeError` or `ValueError` for damage."""

    key_bytes: int
    encode_key: Callable[[K], bytes]
    decode_key: Callable[[bytes], K]
    encode: Callable[[V], bytes]
    decode: Callable[[bytes], V]


class Table(Generic[K, V]):
    """Rows in their stored form, sorted by key. Threads may share it."""

    def __init__(
        self, form: Form[K, V], keys: Sequence[bytes], lengths: Sequence[int], data: memoryview
    ) -> None:
        """Raises `ValueError` for keys that do not ascend, and rows that are not all the data."""
        self.form, self.keys, self.lengths, self.data = form, keys, lengths, data
        self.starts = list(accumulate(lengths, initial=0))
        if len(lengths) != len(keys) or self.starts[-1] != len(data):
            raise ValueError(f"{len(keys)} rows are not as long as their lengths say")
        if not all(map(lt, keys, keys[1:])):
            raise ValueError("keys of rows do not ascend")
        self._all: list[tuple[K, V]] | None = None

    def place(self, key: K) -> int | None:
        """The place of the row of `key`."""
        try:
            stored = self.form.encode_key(key)
        except (TypeError, ValueError, OverflowError, AttributeError):
            return None  # no key that a row can have
        place = bisect_left(self.keys, stored)
        found = place < len(self.keys) and self.keys[place] == stored
        # Hex digits have several spellings, keys have one.
        return place if found and self.form.decode_key(stored) == key else None

    def row(self, place: int) -> V:
        """The row at `place`. Raises `Corrupt`."""
        if self._all is not None:
            return self._all[place][1]
        try:
            return self.form.decode(bytes(self.data[self.starts[place] : self.starts[place + 1]]))
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise Corrupt(
                f"a checkpoint of the log's state has a malformed row: {error}; delete the "
                "store's log/checkpoint-* files, which are made again"
            ) from error

    def rows(self) -> list[tuple[K, V]]:
        """All rows with their keys, kept once they were decoded."""
        if self._all is None:
            decode = self.form.decode_key
            self._all = [(decode(key), self.row(place)) for place, key in enumerate(self.keys)]
        return self._all

    def stored(self) -> bytes:
        """Keys, lengths and rows, as `read_table` reads them."""
        lengths = struct.pack(f"<{len(self.lengths)}I", *self.lengths)
        return b"".join((*self.keys, lengths, self.data))


def read_table(form: Form[K, V], data: memoryview, count: int) -> Table[K, V]:
    """The table whose `stored` bytes are `data`. Raises `ValueError` or `struct.error`."""
    width = form.key_bytes
    ends = count * width, count * (width + 4)
    keys = bytes(data[: ends[0]])
    return Table(
        form,
        [keys[start : start + width] for start in range(0, ends[0], width)],
        struct.unpack(f"<{count}I", data[ends[0] : ends[1]]),
        data[ends[1] :],
    )


def table_of(form: Form[K, V], rows: "HashTrieMap[K, V] | Rows[K, V]") -> Table[K, V]:
    """All `rows` in their stored form."""
    if isinstance(rows, Rows):
        return rows.table()
    return Rows(Table(form, (), (), memoryview(b"")), rows).table()


class Rows(Mapping[K, V]):
    """A persistent map of keys to rows, used as rpds's are: a change makes a new one. Threads may
    share it. `changed` has what is not as in `table`, and `_GONE` for what is in the table alone.
    """

    __slots__ = ("_changed", "_count", "_table")

    def __init__(
        self,
        table: Table[K, V],
        changed: "HashTrieMap[K, V] | None" = None,
        count: int | None = None,
    ) -> None:
        self._table = table
        self._changed: HashTrieMap[K, V] = HashTrieMap() if changed is None else changed
        self._count = len(table.keys) if count is None else count

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: object) -> bool:
        return self._found(cast(K, key), decode=False) is not _ABSENT

    def __getitem__(self, key: K) -> V:
        if (row := self._found(key)) is _ABSENT:
            raise KeyError(key)
        return cast(V, row)

    def get(self, key: K, default: Any = None) -> Any:
        return default if (row := self._found(key)) is _ABSENT else row

    def __iter__(self) -> Iterator[K]:
        own = (key for key, row in self._changed.items() if row is not _GONE)
        stored = map(self._table.form.decode_key, self._table.keys)
        return chain(own, (key for key in stored if key not in self._changed))

    def items(self) -> ItemsView[K, V]:
        return _Items(self)

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def __repr__(self) -> str:
        return f"<{len(self)} rows>"

    def pairs(self) -> Iterator[tuple[K, V]]:
        """All keys with their rows, in no order."""
        changed = ((key, row) for key, row in self._changed.items() if row is not _GONE)
        return chain(changed, (pair for pair in self._table.rows() if pair[0] not in self._changed))

    def insert(self, key: K, row: V) -> "Rows[K, V]":
        """This map with `row` as that of `key`."""
        count = self._count + (key not in self)
        return Rows(self._table, self._changed.insert(key, row), count)

    def update(self, rows: Iterable[tuple[K, V]]) -> "Rows[K, V]":
        """This map with all `rows`; of a key that occurs twice the last."""
        now = self
        for key, row in rows:
            now = now.insert(key, row)
        return now

    def discard(self, key: K) -> "Rows[K, V]":
        """This map without `key`, which it need not have."""
        if key not in self:
            return self
        stored = self._table.place(key) is not None
        left = self._changed.insert(key, _GONE) if stored else self._changed.discard(key)
        return Rows(self._table, left, self._count - 1)

    def table(self) -> Table[K, V]:
        """All rows in their stored form. Rows of the table below are copied, not coded again."""
        old, form = self._table, self._table.form
        changed = sorted(
            ((form.encode_key(key), row) for key, row in self._changed.items()),
            key=lambda item: item[0],
        )
        keys: list[bytes] = []
        lengths: list[int] = []
        data: list[bytes | memoryview] = []
        at = 0

        def copy(stop: int) -> None:
            keys.extend(old.keys[at:stop])
            lengths.extend(old.lengths[at:stop])
            data.append(old.data[old.starts[at] : old.starts[stop]])

        for key, row in changed:
            place = bisect_left(old.keys, key, at)
            copy(place)
            at = place + (place < len(old.keys) and old.keys[place] == key)
            if row is not _GONE:
                stored = form.encode(row)
                keys.append(key)
                lengths.append(len(stored))
                data.append(stored)
        copy(len(old.keys))
        return Table(form, keys, lengths, memoryview(b"".join(data)))

    def _found(self, key: K, *, decode: bool = True) -> Any:
        """The row of `key`, or anything in its place without `decode`; else `_ABSENT`."""
        row = self._changed.get(key, _ABSENT)
        if row is _ABSENT and (place := self._table.place(key)) is not None:
            return self._table.row(place) if decode else None
        return _ABSENT if row is _GONE else row


class _Items(ItemsView[K, V]):
    """Each row once, without a look-up of each key."""

    def __init__(self, rows: Rows[K, V]) -> None:
        super().__init__(rows)
        self._rows = rows

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return self._rows.pairs()


class _Values(ValuesView[V]):
    def __init__(self, rows: Rows[Any, V]) -> None:
        super().__init__(rows)
        self._rows = rows

    def __iter__(self) -> Iterator[V]:
        return (row for _, row in self._rows.pairs())
