"""`ckptstore diff`: what changed from one commit to another, leaf by leaf, folded on a terminal
where there is too much to look at."""

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptstore.cli.exits import Exit
from ckptstore.cli.format import (
    FOLD_ABOVE,
    commit_document,
    commit_text,
    fold,
    type_text,
    value_text,
)
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.cli.table import Column, Table
from ckptstore.cli.trees import reading, trees_of
from ckptstore.core.text import bytes_text
from ckptstore.repository.resolve_ref import find_id
from ckptstore.restore.diff import LeafChange, compare

if TYPE_CHECKING:
    from ckptstore.restore.reader import Tree

MARKS = {"added": "+", "removed": "-", "changed": "~"}


@dataclass(frozen=True, slots=True)
class Side:
    """A leaf in one of the two commits: the key it belongs to, its type, and the text of its value
    if it is one."""

    key: str
    type: str
    dtype: str
    value: str | None


@dataclass(frozen=True, slots=True)
class Row:
    """One leaf that differs."""

    change: LeafChange
    before: Side | None
    after: Side | None

    @property
    def key(self) -> str:
        side = self.after or self.before
        assert side is not None
        return side.key

    @property
    def what(self) -> str:
        """`float32[3] → float32[4]`, `100 → 200`, or the type of a tensor that has other bytes."""
        texts = [
            side.type if side.value is None else side.value
            for side in (self.before, self.after)
            if side
        ]
        return texts[0] if len(texts) == 1 or texts[0] == texts[1] else f"{texts[0]} → {texts[1]}"

    @property
    def alike(self) -> tuple[str, ...]:
        """What rows on one folded line have in common: how they changed, and tensors their dtypes,
        values their text."""
        sides = [side for side in (self.before, self.after) if side]
        return (self.change.change, *(side.dtype or f"{side.type} {side.value}" for side in sides))


def run(args: Namespace, screen: Screen) -> Exit:
    with opened(args, args.a, args.b) as store:
        queries = store.queries()
        infos = [queries.commit(find_id(queries, ref, args.run)) for ref in (args.a, args.b)]
        with reading(store) as reader:
            before, after = (trees_of(reader, info) for info in infos)
        found = compare(before, after)
    old, new = _where(before), _where(after)
    rows = [
        Row(change, _side(old, change.path), _side(new, change.path)) for change in found.changes
    ]
    if screen.json:
        screen.document(
            {
                "store": store.url,
                **{
                    name: commit_document(info)
                    for name, info in zip(("before", "after"), infos, strict=True)
                },
                "unchanged": found.unchanged,
                "changed_bytes": found.changed_bytes,
                "changes": [_document(row) for row in rows],
            }
        )
        return Exit.OK
    screen.hint(f"from {commit_text(infos[0])} to {commit_text(infos[1])}")
    folded = args.fold if args.fold is not None else screen.terminal and len(rows) > FOLD_ABOVE
    if args.stat:
        screen.table(_stat(rows, before, after))
    elif rows:
        screen.table(_folded(rows) if folded else _listed(rows))
    screen.line(_summary(rows, found.unchanged))
    return Exit.OK


def _where(trees: Mapping[str, "Tree"]) -> dict[str, tuple["Tree", int]]:
    return {path: (tree, i) for tree in trees.values() for path, i in tree.numbers.items()}


def _side(where: Mapping[str, tuple["Tree", int]], path: str) -> Side | None:
    if path not in where:
        return None
    tree, i = where[path]
    kind, inline = tree.schema.kinds[i], tree.content(i).inline
    value = value_text(inline) if kind == "value" and inline is not None else None
    return Side(
        tree.key,
        type_text(kind, tree.schema.dtypes[i], tree.schema.shapes[i]),
        tree.schema.dtypes[i],
        value,
    )


def _listed(rows: Iterable[Row]) -> Table:
    columns = (
        Column(""),
        Column("path", fit="wrap"),
        Column("what", fit="wrap"),
        Column("changed", right=True),
        Column("of", right=True),
    )
    return Table(
        columns,
        tuple(
            (MARKS[row.change.change], row.change.path, row.what, *_sizes([row])) for row in rows
        ),
    )


def _folded(rows: Iterable[Row]) -> Table:
    columns = (
        Column(""),
        Column("leaves", right=True),
        Column("path", fit="wrap"),
        Column("what", fit="wrap"),
        Column("changed", right=True),
        Column("of", right=True),
    )
    groups = fold(rows, lambda row: (row.change.path, row.alike))
    return Table(columns, tuple(_group(pattern, group) for pattern, group in groups))


def _group(pattern: str, rows: Sequence[Row]) -> tuple[str, ...]:
    texts = dict.fromkeys(row.what for row in rows)
    dtypes = dict.fromkeys(side.dtype for side in (rows[0].before, rows[0].after) if side)
    what = next(iter(texts)) if len(texts) == 1 else f"{' → '.join(dtypes)}, {len(texts)} shapes"
    return (MARKS[rows[0].change.change], f"{len(rows):,}", pattern, what, *_sizes(rows))


def _stat(rows: Sequence[Row], before: Mapping[str, "Tree"], after: Mapping[str, "Tree"]) -> Table:
    columns = (
        Column("key"),
        *(
            Column(name, right=True)
            for name in ("added", "removed", "changed", "unchanged", "changed bytes", "of")
        ),
    )
    cells = []
    for key in dict.fromkeys((*after, *before)):
        here = [row for row in rows if row.key == key]
        counts = [sum(row.change.change == change for row in here) for change in MARKS]
        tree = after.get(key)
        unchanged = len(tree.schema) - counts[0] - counts[2] if tree else 0
        total = (
            sum(tree.raw_bytes(i) for i, alias in enumerate(tree.schema.aliases) if alias < 0)
            if tree
            else 0
        )
        changed = sum(row.change.changed_bytes for row in here if row.change.change != "removed")
        cells.append(
            (
                key,
                *(f"{count:,}" for count in (*counts, unchanged)),
                bytes_text(changed),
                bytes_text(total),
            )
        )
    return Table(columns, tuple(cells))


def _sizes(rows: Sequence[Row]) -> tuple[str, str]:
    return bytes_text(sum(row.change.changed_bytes for row in rows)), bytes_text(
        sum(row.change.raw_bytes for row in rows)
    )


def _summary(rows: Sequence[Row], unchanged: int) -> str:
    if not rows:
        return f"no difference: {unchanged:,} leaves are the same"
    counts = ", ".join(
        f"{count:,} {change}"
        for change in MARKS
        if (count := sum(row.change.change == change for row in rows))
    )
    changed, total = _sizes(rows)
    return f"{counts}, {unchanged:,} unchanged; {changed} changed of {total} in these leaves"


def _document(row: Row) -> dict[str, object]:
    return {
        "path": row.change.path,
        "change": row.change.change,
        **{
            name: side and {"type": side.type, "value": side.value}
            for name, side in (("before", row.before), ("after", row.after))
        },
        "raw_bytes": row.change.raw_bytes,
        "changed_bytes": row.change.changed_bytes,
    }
