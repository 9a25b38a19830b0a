"""What changed from one commit to another? Compares schemas and pages; reads no tensor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from ckptstore.errors import Corrupt
from ckptstore.plugin.encoding import canonical
from ckptstore.plugin.leaves import segment
from ckptstore.plugin.model import CHUNK_ID_BYTES, Grid
from ckptstore.plugin.reading import CommitContents, Tree, Trees
from ckptstore.plugin.text import Column, Table, bytes_text
from ckptstore.plugin.work import uncollected

Change: TypeAlias = Literal["added", "removed", "changed"]

VALUE_TEXT_CHARACTERS = 60
MARKS: dict[Change, str] = {"added": "+", "removed": "-", "changed": "~"}

_BRACKETS = {"list": ("[", "]"), "tuple": ("(", ")"), "set": ("{", "}")}


@dataclass(frozen=True, slots=True)
class LeafText:
    """A leaf as text: its type (`float32[768, 768]`), and the value of a value leaf."""

    type: str
    value: str | None

    def __str__(self) -> str:
        return self.type if self.value is None else self.value


@dataclass(frozen=True, slots=True)
class LeafChange:
    """One leaf that differs: what it was and what it is; None where the commit lacks it.
    `changed_bytes` counts raw bytes in chunks that the other commit lacks at this path."""

    path: str
    change: Change
    before: LeafText | None
    after: LeafText | None
    raw_bytes: int
    changed_bytes: int

    def __str__(self) -> str:
        texts = dict.fromkeys(str(side) for side in (self.before, self.after) if side)
        return " → ".join(texts)


@dataclass(frozen=True, slots=True, repr=False)
class Difference:
    """The leaves that differ, in order, the number of equal ones, and the paths of those that
    cannot be compared: one of the commits was thinned, and has no content of them."""

    changes: tuple[LeafChange, ...]
    unchanged: int
    thinned: tuple[str, ...] = ()

    @property
    def changed_bytes(self) -> int:
        return sum(change.changed_bytes for change in self.changes)

    def __repr__(self) -> str:
        return f"<diff: {self.summary}>"

    def __str__(self) -> str:
        return f"{self.table()}\n{self.summary}" if self.changes else self.summary

    def table(self) -> Table:
        """One row per leaf."""
        columns = (Column(""), Column("path", fit="wrap", least=24), Column("what", fit="wrap"))
        rows = [(MARKS[c.change], c.path, str(c), *sizes([c])) for c in self.changes]
        return Table((*columns, *SIZES), rows)

    @property
    def summary(self) -> str:
        thinned = f", {len(self.thinned):,} thinned away and not compared" if self.thinned else ""
        if not self.changes:
            return f"no difference: {self.unchanged:,} leaves are the same{thinned}"
        kinds = [change.change for change in self.changes]
        counts = ", ".join(f"{kinds.count(kind):,} {kind}" for kind in MARKS if kind in kinds)
        changed, total = map(bytes_text, sizes(self.changes))
        size = f"{changed} of {total} changed in these leaves"
        return f"{counts}, {self.unchanged:,} unchanged{thinned}; {size}"


SIZES = (Column("changed", "bytes", spare=True), Column("of", "bytes", spare=True))
"""The columns of `sizes`."""


def sizes(changes: Sequence[LeafChange]) -> tuple[int, int]:
    """The sums of changed bytes and of raw bytes."""
    return sum(c.changed_bytes for c in changes), sum(c.raw_bytes for c in changes)


def value_text(data: bytes) -> str:
    """The value of a value leaf as Python would write it, as far as that is possible without its
    class; cut at `VALUE_TEXT_CHARACTERS`."""
    try:
        text = _value(canonical.decode(data))
    except (Corrupt, LookupError, TypeError, ValueError):
        text = data.decode("utf-8", "backslashreplace")
    return text if len(text) <= VALUE_TEXT_CHARACTERS else text[: VALUE_TEXT_CHARACTERS - 1] + "…"


def _value(encoded: Any) -> str:
    if not isinstance(encoded, list):
        return repr(encoded)
    tag: str = encoded[0]
    payload: list[Any] = encoded[1:]
    if tag == "float":
        return repr(canonical.bits_float(payload[0]))
    if tag == "int":
        return str(payload[0])
    items = ", ".join(map(_value, payload))
    if tag in _BRACKETS:
        left, right = _BRACKETS[tag]
        return f"{left}{items}{',' if tag == 'tuple' and len(payload) == 1 else ''}{right}"
    return f"{tag}({items})"


class LeafAt(NamedTuple):
    """Leaf `i` of a tree."""

    tree: Tree
    i: int

    @property
    def kind(self) -> tuple[str, str, tuple[int, ...]]:
        schema = self.tree.schema
        return schema.kinds[self.i], schema.dtypes[self.i], schema.shapes[self.i]

    @property
    def own_bytes(self) -> int:
        """The raw bytes; 0 for an alias, whose bytes belong to another leaf."""
        return 0 if self.tree.schema.aliases[self.i] >= 0 else self.tree.raw_bytes(self.i)

    @property
    def text(self) -> LeafText:
        kind, dtype, shape = self.kind
        if kind == "tensor":
            return LeafText(f"{dtype}[{', '.join(map(str, shape))}]", None)
        if self.tree.is_gone(self.i):
            return LeafText(kind, None)
        inline = self.tree.content(self.i).inline
        return LeafText(
            kind, value_text(inline) if kind == "value" and inline is not None else None
        )


@uncollected()
def compare(
    before: Mapping[str, Tree],
    after: Mapping[str, Tree],
    *,
    old_keys: Sequence[str] = (),
    new_keys: Sequence[str] = (),
) -> Difference:
    """Compares the leaves of `after` in order, then those only in `before`. Trees may be in
    another order than the keys of the states, which is that of `old_keys` and `new_keys`."""
    old, new = _leaves(before), _leaves(after)
    thinned = [path for path, leaf in new.items() if _is_thinned(old.get(path), leaf)]
    left = new.keys() - set(thinned)
    changes = [
        change
        for path, leaf in new.items()
        if path in left and (change := _change(path, old.get(path), leaf))
    ]
    unchanged = len(left) - len(changes)
    removed = [
        LeafChange(path, "removed", leaf.text, None, leaf.own_bytes, leaf.own_bytes)
        for path, leaf in old.items()
        if path not in new
    ]
    then, now = _place_by(old_keys), _place_by(new_keys)
    changes.sort(key=lambda change: now(change.path))
    removed.sort(key=lambda change: then(change.path))
    return Difference((*changes, *removed), unchanged, tuple(sorted(thinned, key=now)))


def differing(
    before: CommitContents, after: CommitContents, *, by_key: bool = False
) -> tuple[Trees, Trees]:
    """The trees of two commits that are to be compared: with what is below those plain leaves that
    differ. Keys that share a tree are in one, unless `by_key`."""
    old, new = (each.stored_trees if by_key else each.joined_trees for each in (before, after))
    one, other = _plain_contents(old), _plain_contents(new)
    whole = {path for path, content in one.items() if other.get(path, "") == content}
    whole |= {path for found in (one, other) for path in found if found[path] is None}
    return before.below_all_but(whole, old), after.below_all_but(whole, new)


def _plain_contents(trees: Trees) -> dict[str, object]:
    """The contents of plain leaves by their paths; None of those that are gone."""
    return {
        tree.schema.paths[i]: tree.content_key(i)
        for tree in trees.values()
        if "plain" in tree.schema.kinds
        for i, kind in enumerate(tree.schema.kinds)
        if kind == "plain"
    }


def _leaves(trees: Mapping[str, Tree]) -> dict[str, LeafAt]:
    return {
        path: LeafAt(tree, i) for tree in trees.values() for i, path in enumerate(tree.schema.paths)
    }


def _place_by(keys: Sequence[str]) -> Callable[[str], int]:
    """The place of a path's key among `keys`."""
    places = {segment(key): place for place, key in enumerate(keys)}
    return lambda path: places.get(path.partition("/")[0], 0)


def _change(path: str, old: LeafAt | None, new: LeafAt) -> LeafChange | None:
    size = new.own_bytes
    if old is None:
        return LeafChange(path, "added", None, new.text, size, size)
    was, now = old.tree.content(old.i), new.tree.content(new.i)
    same_kind = old.kind == new.kind
    if same_kind and (was.inline, was.ids, was.boxes) == (now.inline, now.ids, now.boxes):
        return None
    if same_kind and size and now.inline is None and now.boxes is None:
        size = _new_bytes(was.ids, now.ids, new.tree.grid(new.i))
    return LeafChange(path, "changed", old.text, new.text, new.own_bytes, size)


def _is_thinned(old: LeafAt | None, new: LeafAt) -> bool:
    """Whether a leaf is in both commits, and its content not in both."""
    return old is not None and (old.tree.is_gone(old.i) or new.tree.is_gone(new.i))


def _new_bytes(old: bytes, new: bytes, cells: Grid) -> int:
    """The raw bytes of the chunks of `new`, which lie in `cells`, that are not among `old`."""
    known = {old[k : k + CHUNK_ID_BYTES] for k in range(0, len(old), CHUNK_ID_BYTES)}
    return sum(
        stop - start
        for k, (start, stop) in enumerate(cells.spans())
        if new[k * CHUNK_ID_BYTES : (k + 1) * CHUNK_ID_BYTES] not in known
    )
