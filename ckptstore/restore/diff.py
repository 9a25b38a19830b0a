"""What changed from one commit to another? Compares schemas and pages; reads no tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckptstore.core.geometry import Grid
from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.restore.reader import Tree

VALUE_TEXT_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class LeafChange:
    """One leaf that differs. `before` and `after` describe it (`float32[768, 768]`, or a value's
    text); `changed_bytes` counts raw bytes in chunks that the other commit lacks at this path."""

    path: str
    change: Literal["added", "removed", "changed"]
    before: str
    after: str
    raw_bytes: int
    changed_bytes: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The leaves that differ, in order, and the number of equal ones."""

    changes: tuple[LeafChange, ...]
    unchanged: int

    @property
    def changed_bytes(self) -> int:
        return sum(change.changed_bytes for change in self.changes)


class _At(NamedTuple):
    """A leaf of a tree."""

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

    def __str__(self) -> str:
        kind, dtype, shape = self.kind
        if kind == "tensor":
            return f"{dtype}[{', '.join(map(str, shape))}]"
        inline = self.tree.content(self.i).inline
        if kind != "value" or inline is None:
            return f"{kind} of {self.tree.raw_bytes(self.i)} bytes"
        text = inline.decode("utf-8", "replace")
        shown = text[: VALUE_TEXT_CHARACTERS - 1] + "…"
        return text if len(text) <= VALUE_TEXT_CHARACTERS else shown


def compare(before: Mapping[str, Tree], after: Mapping[str, Tree]) -> Difference:
    """Compares the leaves of `after` in order, then those only in `before`."""
    old, new = _leaves(before), _leaves(after)
    changes = [
        change for path, leaf in new.items() if (change := _change(path, old.get(path), leaf))
    ]
    unchanged = len(new) - len(changes)
    changes += [
        LeafChange(path, "removed", str(leaf), "", leaf.own_bytes, leaf.own_bytes)
        for path, leaf in old.items()
        if path not in new
    ]
    return Difference(tuple(changes), unchanged)


def _leaves(trees: Mapping[str, Tree]) -> dict[str, _At]:
    return {
        path: _At(tree, i) for tree in trees.values() for i, path in enumerate(tree.schema.paths)
    }


def _change(path: str, old: _At | None, new: _At) -> LeafChange | None:
    size = new.own_bytes
    if old is None:
        return LeafChange(path, "added", "", str(new), size, size)
    was, now = old.tree.content(old.i), new.tree.content(new.i)
    same_kind = old.kind == new.kind
    if same_kind and (was.inline, was.ids, was.boxes) == (now.inline, now.ids, now.boxes):
        return None
    if same_kind and size and now.inline is None and now.boxes is None:
        size = _new_bytes(was.ids, now.ids, new.tree.grid(new.i))
    return LeafChange(path, "changed", str(old), str(new), new.own_bytes, size)


def _new_bytes(old: bytes, new: bytes, cells: Grid) -> int:
    """The raw bytes of the chunks of `new`, which lie in `cells`, that are not among `old`."""
    known = {old[k : k + CHUNK_ID_BYTES] for k in range(0, len(old), CHUNK_ID_BYTES)}
    return sum(
        stop - start
        for k, (start, stop) in enumerate(cells.spans())
        if new[k * CHUNK_ID_BYTES : (k + 1) * CHUNK_ID_BYTES] not in known
    )
