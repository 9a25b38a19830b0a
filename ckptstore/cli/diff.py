"""`ckptstore diff`: what changed from one commit to another, leaf by leaf."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptstore.cli.call import Answer, Call
from ckptstore.cli.commits import (
    commit_document,
    commit_text,
    fold,
    is_folded,
    reader_of,
    trees_of,
)
from ckptstore.cli.screen import Hint, Part, columns, fields_of
from ckptstore.core.text import Column, Table
from ckptstore.repository.resolve_ref import find_id
from ckptstore.restore.diff import MARKS, SIZES, Difference, LeafChange, compare, sizes

if TYPE_CHECKING:
    from ckptstore.restore.reader import Tree


def diff(call: Call) -> Answer:
    refs = (call.args.a, call.args.b)
    store = call.open(*refs)
    queries = store.queries()
    old, new = (queries.commit(find_id(store, queries, ref, call.args.run)) for ref in refs)
    reader = reader_of(call, store)
    before, after = trees_of(reader, old), trees_of(reader, new)
    found = compare(before, after)
    page: list[Part] = [Hint(f"from {commit_text(old)} to {commit_text(new)}")]
    if call.args.stat:
        page.append(_stat(before, after))
    elif found.changes:
        page.append(_folded(found) if is_folded(call, len(found.changes)) else found.table())
    page.append(found.summary)
    document = {
        "before": commit_document(old),
        "after": commit_document(new),
        **fields_of(found, "unchanged", "changed_bytes", "changes"),
    }
    return Answer(document, page)


def _folded(found: Difference) -> Table:
    groups = fold(found.changes, lambda change: (change.path, (change.change, *_dtypes(change))))
    rows = [
        (MARKS[group[0].change], len(group), pattern, _what(group), *sizes(group))
        for pattern, group in groups
    ]
    return Table((*columns("", "leaves", "path", "what"), *SIZES), rows)


def _dtypes(change: LeafChange) -> Iterator[str]:
    """What the changes on one folded line have in common: the dtypes of tensors, and the text of
    other leaves."""
    for side in filter(None, (change.before, change.after)):
        yield side.type.partition("[")[0] if side.value is None else f"{side.type} {side.value}"


def _what(group: Sequence[LeafChange]) -> str:
    texts = dict.fromkeys(map(str, group))
    if len(texts) == 1:
        return next(iter(texts))
    return f"{' → '.join(dict.fromkeys(_dtypes(group[0])))}, {len(texts)} shapes"


def _stat(before: Mapping[str, "Tree"], after: Mapping[str, "Tree"]) -> Table:
    """Sums per key."""
    counts = (Column(name, "count") for name in (*MARKS, "unchanged"))
    rows = []
    for key in dict.fromkeys((*after, *before)):
        old, new = ({key: trees[key]} if key in trees else {} for trees in (before, after))
        found, everything = compare(old, new), compare({}, new).changes
        kinds = [change.change for change in found.changes]
        left = [change for change in found.changes if change.after]
        changed, total = sizes(left)[0], sizes(everything)[1]
        rows.append((key, *map(kinds.count, MARKS), found.unchanged, changed, total))
    return Table((*columns("key"), *counts, Column("changed bytes", "bytes"), SIZES[1]), rows)
