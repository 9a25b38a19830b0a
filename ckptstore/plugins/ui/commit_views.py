"""Views of one commit and of two as JSON: what it is, its leaves, with whom it shares them, what
changed. They read schemas and pages, and no tensor."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np

from ckptstore.errors import CkptStoreError, Corrupt, NotFound
from ckptstore.plugin.encoding import LeafPlacement
from ckptstore.plugin.model import CHUNK_ID_BYTES, CommitId, CommitInfo, Schema
from ckptstore.plugin.reading import Tree
from ckptstore.plugins.reports.difference import LeafAt, LeafChange, compare
from ckptstore.plugins.ui.history_views import brief, children_of
from ckptstore.plugins.ui.jobs import Job
from ckptstore.plugins.ui.lines import left_out, lines_for
from ckptstore.plugins.ui.opened import OpenStore
from ckptstore.plugins.ui.values import TEXT_CHARACTERS, Json, clip

RELATIVES_SHOWN = 50
PART = 25_000
"""Leaves in one answer."""
CHANGES_SHOWN = 20_000
COMPARED = 200
"""Commits that are looked at for shared leaves: those nearest in the log."""
COMPARED_LEAVES = 4_000_000
"""A limit of all leaves that are looked at for that."""

Found = tuple[Tree, int]


def commit(store: OpenStore, id_: str) -> Json:
    """Everything about a commit but its leaves. Damage hides what it hits, and is told."""
    info, history = store.commit(id_), store.history()
    children = children_of(history, info.id)
    problems: list[str] = []
    said, layout = None, None
    lines, incomplete = lines_for(store, info, None), list[str]()
    try:
        contents = store.contents(info)
        said, layout = contents.document, contents.layout
        lines, incomplete = lines_for(store, info, contents), left_out(info, contents)
    except (Corrupt, NotFound) as error:
        problems.append(f"links, leaves and layout cannot be read: {error}")
    groups = Counter(map(_placement, layout.leaves.values())) if layout else Counter[Json]()
    return {
        **brief(info),
        "entry": info.n,
        "content": info.content,
        "session": info.session,
        "message": clip(info.message, TEXT_CHARACTERS),
        "forgotten": info.forgotten,
        "thinned": [clip(glob) for glob in info.thinned],
        "cast": [[clip(glob), clip(dtype)] for glob, dtype in info.cast.items()],
        "leaves": info.leaves,
        "metrics": [[clip(name), value] for name, value in [*info.metrics.items()][:1_000]],
        "parents": [_relative(store, parent) for parent in info.parents[:RELATIVES_SHOWN]],
        "children": [brief(child) for child in children[:RELATIVES_SHOWN]],
        "child_count": len(children),
        "links": [[clip(name), clip(link, TEXT_CHARACTERS)] for name, link in said.links]
        if said
        else [],
        "keys": [clip(key) for key in (said.keys if said else info.schemas)],
        "world": layout.world if layout else 1,
        "layout": [[*group, count] for group, count in groups.most_common(100)],
        "lines": lines,
        "incomplete": [clip(key) for key in incomplete],
        "problems": [clip(problem, TEXT_CHARACTERS) for problem in problems],
    }


def _relative(store: OpenStore, commit: CommitId) -> Json:
    try:
        return brief(store.commit(commit))
    except NotFound:
        return {"id": commit, "purged": True}


def _placement(leaf: LeafPlacement) -> tuple[str, str, int]:
    ranks = {rank for group in leaf.ranks for rank in group}
    boxes = f"{len(leaf.boxes)} boxes" if leaf.boxes else "whole"
    return ", ".join(leaf.placements) or boxes, "×".join(map(str, leaf.mesh or ())), len(ranks)


def leaves_of(store: OpenStore, info: CommitInfo) -> list[Found]:
    """The leaves of a commit in the order of their numbers in URLs."""
    trees = store.contents(info).trees
    return [(tree, i) for tree in trees.values() for i in range(len(tree.schema))]


def leaf_at(store: OpenStore, info: CommitInfo, number: str) -> Found:
    """The leaf with this number. Raises `NotFound`."""
    leaves = leaves_of(store, info)
    if not number.isdecimal() or int(number) >= len(leaves):
        raise NotFound(
            f"commit {info.id[:12]} has no leaf {clip(number, 20)}; it has {len(leaves)}"
        )
    return leaves[int(number)]


def leaves(store: OpenStore, id_: str, part: str) -> Json:
    """A part of the leaves of a commit, as columns; `total` are all."""
    everything = leaves_of(store, store.commit(id_))
    start = int(part) * PART if part.isdecimal() else len(everything)
    found = everything[start : start + PART]
    return {"start": start, "total": len(everything), "part": PART, **_leaf_columns(found)}


def _leaf_columns(found: list[Found]) -> dict[str, Json]:
    at = [LeafAt(tree, i) for tree, i in found]
    schemas: list[tuple[Schema, int]] = [(tree.schema, i) for tree, i in found]
    return {
        "path": [clip(schema.paths[i]) for schema, i in schemas],
        "type": [schema.dtypes[i] or schema.kinds[i] for schema, i in schemas],
        "shape": [
            list(schema.shapes[i]) if schema.kinds[i] == "tensor" else None for schema, i in schemas
        ],
        "bytes": [leaf.own_bytes for leaf in at],
        "value": [
            leaf.text.value if leaf.tree.schema.kinds[leaf.i] == "value" else None for leaf in at
        ],
        "gone": [tree.is_gone(i) for tree, i in found],
        "alias": [
            clip(schema.paths[schema.aliases[i]]) if schema.aliases[i] >= 0 else None
            for schema, i in schemas
        ],
    }


def sharing(store: OpenStore, id_: str, job: Job) -> Json:
    """Stored bytes of each leaf, how many of the nearest commits have the same content in it, and
    the place in `since` of the oldest of them along first parents."""
    info, history = store.commit(id_), store.history()
    found = leaves_of(store, info)
    keys = [tree.content_key(i) for tree, i in found]
    others = sorted(history.commits, key=lambda other: abs(other.n - info.n))
    limit = min(COMPARED, max(1, COMPARED_LEAVES // max(len(found), 1)))
    counts = Counter[object]()
    since: list[CommitInfo] = [info]
    place_of = [0] * len(found)
    line = list(_line(store, info, limit))
    for done, other in enumerate(others[: limit + 1]):
        job.progress("looking at commits", done, min(len(others), limit + 1))
        if other.id != info.id:
            counts.update(_content_keys(store, other))
    alive = set(range(len(found)))
    for ancestor in line:
        job.progress("looking at ancestors", len(since), len(line))
        theirs = _content_keys(store, ancestor)
        alive = {i for i in alive if keys[i] in theirs}
        since.append(ancestor)
        for i in alive:
            place_of[i] = len(since) - 1
    return {
        "stored": _stored(store, found),
        "commits": [counts[key] if key is not None else None for key in keys],
        "since": [[other.id, other.step] for other in since],
        "place": place_of,
        "compared": min(len(others) - 1, limit),
    }


def _line(store: OpenStore, info: CommitInfo, limit: int) -> Iterator[CommitInfo]:
    """The ancestors of a commit by first parents, nearest first."""
    by_id = store.history().by_id
    for _ in range(limit):
        parent = by_id.get(info.parents[0]) if info.parents else None
        if parent is None:
            return
        yield (info := parent)


def _content_keys(store: OpenStore, info: CommitInfo) -> set[object]:
    try:
        return {tree.content_key(i) for tree, i in leaves_of(store, info)}
    except CkptStoreError:
        return set()


def _stored(store: OpenStore, found: list[Found]) -> list[int | None]:
    """The bytes that the chunks of each leaf take in packs; None where one cannot be located."""
    ids = [
        b"" if tree.schema.aliases[i] >= 0 or tree.is_gone(i) else tree.content(i).ids
        for tree, i in found
    ]
    where = store.reader.located(b"".join(ids))
    sizes, known = where["stored"].astype(np.int64), where["found"].astype(bool)
    ends = np.cumsum([0, *(len(each) // CHUNK_ID_BYTES for each in ids)])
    totals = np.concatenate([[0], np.cumsum(np.where(known, sizes, 0))])
    lost = np.concatenate([[0], np.cumsum(~known)])
    return [
        None if lost[b] > lost[a] else int(totals[b] - totals[a])
        for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]


def diff(store: OpenStore, a: str, b: str, job: Job) -> Json:
    """What changed from one commit to another, leaf by leaf, in the order of the state."""
    job.progress("comparing", 0, 1)
    ends = [store.commit(end) for end in (a, b)]
    before, after = (store.contents(info).trees for info in ends)
    found = compare(before, after)
    numbers = {
        path: number
        for number, path in enumerate(
            chain.from_iterable(tree.schema.paths for tree in after.values())
        )
    }
    shown = found.changes[:CHANGES_SHOWN]

    def column(value: Callable[[LeafChange], Json]) -> list[Json]:
        return [value(change) for change in shown]

    return {
        "a": brief(ends[0]),
        "b": brief(ends[1]),
        "unchanged": found.unchanged,
        "thinned": len(found.thinned),
        "total": len(found.changes),
        "counts": Counter(change.change for change in found.changes),
        "changed_bytes": found.changed_bytes,
        "path": column(lambda each: clip(each.path)),
        "number": column(lambda each: numbers.get(each.path)),
        "change": column(lambda each: each.change),
        "before": column(lambda each: clip(str(each.before)) if each.before else None),
        "after": column(lambda each: clip(str(each.after)) if each.after else None),
        "bytes": column(lambda each: each.raw_bytes),
        "changed": column(lambda each: each.changed_bytes),
    }
