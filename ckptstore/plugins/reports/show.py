"""`ckptstore show` and `stats`: everything about one commit, and the size of the whole store."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ckptstore.cli.call import Answer, Call, Exit, UsageError
from ckptstore.cli.commits import (
    commit_document,
    config_text,
    document_of,
    schemas_of,
    short,
    step_text,
)
from ckptstore.cli.screen import columns, fields_of, to_json
from ckptstore.errors import Corrupt, NotFound
from ckptstore.plugin.handles import PackInfo, Queries, StoreHandle
from ckptstore.plugin.leaves import pickled_paths
from ckptstore.plugin.model import SHARED, CommitDocument, CommitId, CommitInfo, Schema
from ckptstore.plugin.text import (
    BOLD,
    Column,
    Table,
    age_text,
    bytes_text,
    count_text,
    exact_text,
    fields,
    local_text,
)
from ckptstore.plugins.reports.listing import find_info, tensor_bytes

if TYPE_CHECKING:
    from ckptstore.plugin.encoding import LeafPlacement
    from ckptstore.plugin.policies import Policy
    from ckptstore.plugins.reports.usage import CommitUsage

T = TypeVar("T")

RELATIVES_SHOWN = 8


class _Group(NamedTuple):
    """Leaves placed alike: their placements, the shape of the mesh, and the number of ranks with a
    part."""

    placements: str
    mesh: str
    ranks: int
    leaves: int


def show(call: Call) -> Answer:
    """What depends on every other commit is told if asked for, and last: the rest is printed at
    once."""
    store = call.open(call.args.ref)
    info, queries = find_info(call, store, call.args.ref), store.queries()
    children, packs = queries.children(info.id), queries.packs(info.session)
    problems: list[str] = []

    def attempt(what: str, read: Callable[[], T]) -> T | None:
        """What `read` returns, or None if damage prevents that."""
        try:
            return read()
        except (Corrupt, NotFound) as error:
            problems.append(f"{what} cannot be told: {error}")
            return None

    schemas = schemas_of(store, queries, info)
    trees = [_tree(name, info, schema) for name, schema in schemas.items()]
    said = layout = used = None
    if not info.forgotten:  # else it may be deleted
        said = attempt("links and the layout on ranks", lambda: document_of(store, info))
    if said:
        layout = attempt("the layout on ranks", lambda: _layout(store, said))
    links = dict(said.links) if said else None
    parents = [_known(queries, parent) for parent in info.parents]
    call.screen.print(_page(info, parents, children, trees, layout, packs, said))
    if call.args.usage and not info.forgotten:
        used = attempt("exclusive and shared bytes", lambda: _usage(call, store, info))
    exclusive, shared = (used.exclusive_bytes, used.shared_bytes) if used else (None, None)
    commit = {
        **commit_document(info),
        "links": links,
        "cast_errors": said.cast.errors if said and said.cast else [],
        "thinned_from": said.thinned.source if said and said.thinned else None,
        "children": [child.id for child in children],
        "exclusive_bytes": exclusive,
        "shared_bytes": shared,
    }
    document = {
        "commit": commit,
        "trees": trees,
        "packs": packs,
        "problem": problems[-1].partition(": ")[2] if problems else None,
        "layout": layout,
    }
    sizes = [
        ("logical", info.logical_bytes, "the size of the state"),
        ("new", info.new_bytes, "what the store grew by when this was committed"),
        ("exclusive", exclusive, "what would be freed if this commit alone went"),
        ("shared", shared, "what it has in common with other commits"),
    ]
    pairs = [(name, bytes_text(size), why) for name, size, why in sizes if size is not None]
    code = Exit.DAMAGED if problems else Exit.OK
    return Answer(document, [fields("Bytes", pairs)], problems, code)


def _usage(call: Call, store: StoreHandle, info: CommitInfo) -> "CommitUsage | None":
    """Exclusive and shared bytes. Any other damaged commit can prevent this."""
    from ckptstore.plugins.reports.usage import usage

    with call.screen.progress("looking at what other commits share"):
        found = usage(store, detail=[info.id])
    return next((commit for commit in found.commits if commit.commit == info.id), None)


def _layout(store: StoreHandle, document: CommitDocument) -> dict[str, Any] | None:
    """The number of ranks, and groups of leaves placed alike; None for a commit of one rank."""
    if document.layout is None:
        return None
    from ckptstore.plugin.encoding import decode_layout

    layout = decode_layout(store.objects.read_metadata(document.layout))
    counts = Counter(map(_placement, layout.leaves.values()))
    groups = [_Group(*placement, n) for placement, n in counts.items()]
    return {"world": layout.world, "groups": groups} if layout.world > 1 else None


def _placement(leaf: "LeafPlacement") -> tuple[str, str, int]:
    ranks = {rank for ranks in leaf.ranks for rank in ranks}
    boxes = f"{len(leaf.boxes)} boxes" if leaf.boxes else "whole"
    return ", ".join(leaf.placements) or boxes, "x".join(map(str, leaf.mesh or ())), len(ranks)


def _tree(name: str, info: CommitInfo, schema: Schema) -> dict[str, Any]:
    node, pickles = schema.skeleton, dict.fromkeys(pickled_paths(schema))
    shared = () if isinstance(node, int) or node.keys is None else node.keys
    columns = zip(schema.paths, schema.dtypes, schema.kinds, strict=True)
    kinds = Counter("pickle" if path in pickles else dtype or kind for path, dtype, kind in columns)
    return {
        "keys": list(shared) if name == SHARED else [name],
        "schema": info.schemas[name],
        "leaves": len(schema),
        "tensor_bytes": sum(tensor_bytes(schema, i) or 0 for i in range(len(schema))),
        "dtypes": dict(kinds.most_common()),
        "pickles": list(pickles),
    }


def _page(
    info: CommitInfo,
    parents: Sequence[str],
    children: Sequence[CommitInfo],
    trees: Sequence[dict[str, Any]],
    layout: dict[str, Any] | None,
    packs: Sequence[PackInfo],
    said: CommitDocument | None,
) -> Iterator[str | Table]:
    links = dict(said.links) if said else {}
    source = said.thinned.source if said and said.thinned else None
    age = age_text(info.time_ns, time.time_ns())
    when = local_text(info.time_ns) + (f" ({age} ago)" if age[-1].isalpha() else "")
    pairs = [
        ("commit", info.id),
        ("content", info.content),
        ("run", info.run),
        ("step", "" if info.step is None else str(info.step)),
        ("tags", ", ".join(info.tags)),
        ("time", when),
        ("parents", _several(parents)),
        ("children", _several([step_text(child) for child in children])),
        ("log entry", f"{info.n}, session {info.session}"),
        ("lossy", ", ".join(f"{glob} as {dtype}" for glob, dtype in info.cast.items())),
        ("without", ", ".join(info.thinned) + (f", which {short(source)} had" if source else "")),
    ]
    message = info.message.strip().splitlines()
    pairs += [("" if i else "message", line) for i, line in enumerate(message)]
    yield fields("", [pair for pair in pairs if pair[1]])
    if info.forgotten:
        yield "This commit is forgotten: gc deletes it unless `ckptstore undelete` restores it."
    if info.metrics:
        metrics = (Column("name", style=BOLD), Column("value", "metric"))
        yield Table(metrics, list(info.metrics.items()), "Metrics", header=False)
    if said and said.cast:
        named = columns("path", "was", "largest error", "relative", "NaN", "overflows")
        yield Table(named, [*said.cast.errors], "Lost precision")
    if links:
        yield fields("Links", list(links.items()))
    named = columns("keys", "leaves", "tensor bytes", "types")
    yield Table(named, [_tree_row(tree) for tree in trees], "Trees")
    if paths := [path for tree in trees for path in tree["pickles"]]:
        yield f"Pickled, so restored with allow_pickle=True only: {_several(paths)}"
    if layout:
        named = columns("placed as", "mesh", "ranks", "leaves")
        yield Table(named, layout["groups"], f"Layout: {layout['world']} ranks")
    if packs:
        rows = [
            (pack.id, pack.bytes, pack.chunks, "metadata" if pack.metadata else "tensors")
            for pack in packs
        ]
        yield Table(
            columns("pack", "bytes", "chunks", "holds"), rows, "Packs written by this commit"
        )


def _tree_row(tree: dict[str, Any]) -> tuple[object, ...]:
    """A row with the types as `24 float32, 3 value`."""
    types = ", ".join(f"{count:,} {kind}" for kind, count in tree["dtypes"].items())
    return _several(tree["keys"]), tree["leaves"], tree["tensor_bytes"], types


def _several(names: Sequence[str]) -> str:
    more = len(names) - RELATIVES_SHOWN
    rest = f" and {count_text(more, 'other')}" if more > 0 else ""
    return ", ".join(names[:RELATIVES_SHOWN]) + rest


def _known(queries: Queries, commit: CommitId) -> str:
    try:
        return step_text(queries.commit(commit))
    except NotFound:
        return f"{short(commit)} (purged)"


def stats(call: Call) -> Answer:
    from ckptstore.cli.policies import policies_of
    from ckptstore.plugins.reports.usage import usage

    policies = policies_of(call.args)
    if call.args.what_if or call.args.compact or policies:
        return _what_if(call, policies)
    store = call.open()
    queries, config = store.queries(), store.config
    totals, runs = queries.totals(), queries.runs()
    with call.screen.progress(f"looking at what {count_text(totals.commits, 'commit')} share"):
        found = usage(store)
    ratio = found.logical_bytes / found.stored_bytes if found.stored_bytes else None
    document = {
        "store_id": config.store,
        **fields_of(config, "chunk_bytes", "codec"),
        **fields_of(totals, "commits", "forgotten", "tags"),
        **fields_of(found, "logical_bytes", "stored_bytes", "unreferenced_bytes"),
        "dedup_ratio": ratio,
        **fields_of(found, "packs", "chunks"),
        "runs": [{**run._asdict(), "time": exact_text(run.time_ns)} for run in runs],
        "usage": [
            fields_of(commit, "commit", "logical_bytes", "new_bytes", "exclusive_bytes")
            for commit in found.commits
        ],
    }
    forgotten = f" and {totals.forgotten:,} forgotten" if totals.forgotten else ""
    counts = f"{count_text(totals.runs, 'run')}, {count_text(totals.tags, 'tag')}"
    stored = f"{count_text(found.packs, 'pack')}, {count_text(found.chunks, 'chunk')}"
    unreferenced = bytes_text(found.unreferenced_bytes)
    pairs = [
        ("store", store.url, config_text(config)),
        ("commits", f"{totals.commits:,}{forgotten}", counts),
        ("logical", bytes_text(found.logical_bytes), "the size of all their states"),
        ("stored", bytes_text(found.stored_bytes), stored),
        ("dedup", f"{ratio:.1f}×" if ratio else "", "logical / stored"),
        ("unreferenced", unreferenced, "stored, but no commit needs it"),
    ]
    page = [fields("", pairs)]
    if runs:
        page.append(Table(columns("run", "commits", "latest", "step", "time"), runs, "Runs"))
    if found.commits and call.args.top:
        page.append(_heaviest(queries, found.commits, call.args.top))
    return Answer(document, page)


def _what_if(call: Call, policies: "Sequence[Policy]") -> Answer:
    """What policies would free, and compaction."""
    from ckptstore.plugin.maintenance import Maintenance
    from ckptstore.plugin.upkeep import CompactPolicy, policy_of

    if not (call.args.what_if and (call.args.compact or policies)):
        raise UsageError(
            "--what-if takes --keep options or --compact, and these need --what-if: `ckptstore "
            "stats --what-if --keep-last 5 --thin 'optimizer/**'`"
        )
    document: dict[str, object] = {}
    page: list[object] = []
    handle = call.open()
    if policies:
        doing, method = "looking at what commits need", Maintenance.forecast
        found = call.carry_out(method, handle, doing, policies=policies, all_runs=True)
        document |= to_json(found)
        page += [found.table(), found.summary]
    if call.args.compact:
        policy = policy_of(handle.log.replay()) or CompactPolicy()
        estimate = call.carry_out(Maintenance.compact, handle, policy=policy, dry_run=True)
        document["compact"] = to_json(estimate.runs)
        page += [estimate.table(), estimate.summary]
    return Answer(document, page)


def _heaviest(queries: Queries, commits: "Sequence[CommitUsage]", top: int) -> Table:
    usages = sorted(commits, key=attrgetter("exclusive_bytes"), reverse=True)[:top]
    infos = queries.commits([usage.commit for usage in usages])
    rows = [
        (i.id, i.run, i.step, i.tags, i.logical_bytes, i.new_bytes, usage.exclusive_bytes)
        for i, usage in zip(infos, usages, strict=True)
    ]
    names = ("commit", "run", "step", "tags", "logical", "new", "exclusive")
    title = "Most exclusive bytes (freed if this commit alone is deleted)"
    return Table(columns(*names), rows, title)
