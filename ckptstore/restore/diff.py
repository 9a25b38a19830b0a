"""What changed from one commit to another? Compares schemas and pages; reads no tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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


def compare(before: Mapping[str, Tree], after: Mapping[str, Tree]) -> Difference:
    """Compares the leaves of `after` in order, then those only in `before`."""
    old, new = _leaves(before), _leaves(after)
    changes: list[LeafChange] = []
    unchanged = 0
    for path, (tree, i) in new.items():
        change = _change(path, old.get(path), tree, i)
        if change:
            changes.append(change)
        else:
            unchanged += 1
    changes += [
        LeafChange(
            path, "removed", _describe(tree, i), "", _own_bytes(tree, i), _own_bytes(tree, i)
        )
        for path, (tree, i) in old.items()
        if path not in new
    ]
    return Difference(tuple(changes), unchanged)


def _leaves(trees: Mapping[str, Tree]) -> dict[str, tuple[Tree, int]]:
    return {path: (tree, i) for tree in trees.values() for i, path in enumerate(tree.schema.paths)}


def _change(path: str, old: tuple[Tree, int] | None, tree: Tree, i: int) -> LeafChange | None:
    size = _own_bytes(tree, i)
    if old is None:
        return LeafChange(path, "added", "", _describe(tree, i), size, size)
    old_tree, j = old
    same_kind = _kind(old_tree, j) == _kind(tree, i)
    was, now = old_tree.content(j), tree.content(i)
    if same_kind and (was.inline, was.ids, was.boxes) == (now.inline, now.ids, now.boxes):
        return None
    return LeafChange(
        path,
        "changed",
        _describe(old_tree, j),
        _describe(tree, i),
        size,
        _changed_bytes(was.ids, tree, i) if same_kind else size,
    )


def _own_bytes(tree: Tree, i: int) -> int:
    """The raw bytes of leaf `i`; 0 for an alias, whose bytes belong to another leaf."""
    return 0 if tree.schema.aliases[i] >= 0 else tree.raw_bytes(i)


def _changed_bytes(old_ids: bytes, tree: Tree, i: int) -> int:
    content = tree.content(i)
    if tree.schema.aliases[i] >= 0:
        return 0
    if content.inline is not None or content.boxes is not None:
        return tree.raw_bytes(i)
    known = {old_ids[k : k + CHUNK_ID_BYTES] for k in range(0, len(old_ids), CHUNK_ID_BYTES)}
    spans = tree.grid(i).spans()
    return sum(
        stop - start
        for k, (start, stop) in enumerate(spans)
        if content.ids[k * CHUNK_ID_BYTES : (k + 1) * CHUNK_ID_BYTES] not in known
    )


def _kind(tree: Tree, i: int) -> tuple[str, str, tuple[int, ...]]:
    return tree.schema.kinds[i], tree.schema.dtypes[i], tree.schema.shapes[i]


def _describe(tree: Tree, i: int) -> str:
    kind = tree.schema.kinds[i]
    if kind == "tensor":
        return f"{tree.schema.dtypes[i]}[{', '.join(map(str, tree.schema.shapes[i]))}]"
    inline = tree.content(i).inline
    if kind == "value" and inline is not None:
        text = inline.decode("utf-8", "replace")
        return (
            text if len(text) <= VALUE_TEXT_CHARACTERS else text[: VALUE_TEXT_CHARACTERS - 1] + "…"
        )
    return f"{kind} of {tree.raw_bytes(i)} bytes"
