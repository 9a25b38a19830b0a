"""`ckptstore diff`: what changed from one commit to another, by leaf, by pattern or by key."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from ckptstore.cli.call import Answer, Call
from ckptstore.cli.commits import commit_document, commit_text, reader_of
from ckptstore.cli.screen import Hint, Part, columns, fields_of
from ckptstore.plugin.reading import Tree, Trees, contents_at
from ckptstore.plugin.text import Column, Table
from ckptstore.plugins.reports.difference import (
    MARKS,
    SIZES,
    Difference,
    LeafChange,
    compare,
    differing,
    sizes,
)
from ckptstore.plugins.reports.listing import FOLD_ABOVE, find_info
from ckptstore.plugins.reports.listing import fold as folded


def diff(call: Call) -> Answer:
    refs = (call.args.a, call.args.b)
    store = call.open(*refs)
    old, new = (find_info(call, store, ref) for ref in refs)
    reader = reader_of(call, store)
    was, now = (contents_at(store, reader, info) for info in (old, new))
    found = compare(*differing(was, now), old_keys=was.keys, new_keys=now.keys)
    apart = partial(differing, was, now, by_key=True)
    page: list[Part] = [Hint(f"from {commit_text(old)} to {commit_text(new)}")]
    if call.args.stat:
        page += [_stat(*apart()), found.summary]
    elif found.changes:
        page += _listed(found, apart, fold=call.args.fold)
    else:
        page.append(found.summary)
    document = {
        "before": commit_document(old),
        "after": commit_document(new),
        **fields_of(found, "unchanged", "changed_bytes", "changes", "thinned"),
    }
    return Answer(document, page)


def _listed(
    found: Difference, apart: Callable[[], tuple[Trees, Trees]], *, fold: bool | None
) -> list[Part]:
    """The changes, folded if they are many, or if they still are, sums per key and what is more
    than another content of a tensor; and the summary."""
    if fold is False or (fold is None and len(found.changes) <= FOLD_ABOVE):
        return [found.table(), found.summary]
    everything = _folded(found.changes)
    if fold or len(everything.rows) <= FOLD_ABOVE:
        return [everything, found.summary]
    notable = _folded([change for change in found.changes if not _is_content(change)])
    page: list[Part] = [_stat(*apart())]
    if 0 < len(notable.rows) <= FOLD_ABOVE:
        page.append(notable)
    advice = "--fold lists all changed leaves by pattern, --all one by one"
    return [*page, found.summary, advice]


def _is_content(change: LeafChange) -> bool:
    """Whether a leaf was and is a tensor of one dtype and shape."""
    old, new = change.before, change.after
    return bool(old and new and old.type == new.type and new.value is None)


def _folded(changes: Sequence[LeafChange]) -> Table:
    groups = folded(changes, lambda change: (change.path, (change.change, *_dtypes(change))))
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


def _stat(before: Mapping[str, Tree], after: Mapping[str, Tree]) -> Table:
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
