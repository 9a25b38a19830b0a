"""`ckptstore show`: everything about one commit. What takes a look at every other commit comes
last, so that the rest is there at once."""

import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptstore.cli import timestamps
from ckptstore.cli.exits import Exit
from ckptstore.cli.format import commit_document, commit_text, metric_text, short, step_text
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.cli.table import Column, Table, fields
from ckptstore.cli.trees import leaves_of, pickles_of, print_layout, read_layout, tensor_bytes
from ckptstore.core.ids import CommitId, pack_session
from ckptstore.core.model import CommitInfo
from ckptstore.core.text import bytes_text, count_text
from ckptstore.errors import Corrupt, NotFound
from ckptstore.index.queries import LeafInfo, PackInfo, Queries
from ckptstore.repository.resolve_ref import find_id
from ckptstore.repository.store_handle import StoreHandle

if TYPE_CHECKING:
    from ckptstore.maintenance.usage import CommitUsage

RELATIVES_SHOWN = 8


def run(args: Namespace, screen: Screen) -> Exit:
    with opened(args, args.ref) as store:
        queries = store.queries()
        info = queries.commit(find_id(queries, args.ref, args.run))
        children = [child for child in queries.log() if info.id in child.parents]
        leaves = leaves_of(store, queries, info)
        pickles, unknown = _pickles(store, info, leaves)
        layout, unread = _layout(store, info)
        packs = [pack for pack in queries.packs() if pack_session(pack.id) == info.session]
        if not screen.json:
            _print_facts(
                screen, info, [_known(queries, parent) for parent in info.parents], children
            )
            _print_metrics(screen, info)
            _print_trees(screen, leaves, pickles)
            if layout:
                print_layout(screen, layout)
            _print_packs(screen, packs)
            screen.flush()
        usage, problem = (
            (None, None) if args.fast or info.forgotten else _usage(store, screen, info)
        )
        if screen.json:
            document = _document(
                store, info, children, leaves, pickles, packs, usage, problem or unknown or unread
            )
            screen.document({**document, "layout": layout})
        else:
            _print_bytes(screen, info, usage)
    if problem:
        screen.complain(f"exclusive and shared bytes cannot be told: {problem}")
    if unknown:
        screen.complain(f"whether there are pickles cannot be told: {unknown}")
    if unread:
        screen.complain(f"how ranks held it cannot be told: {unread}")
    return Exit.DAMAGED if problem or unknown or unread else Exit.OK


def _layout(store: StoreHandle, info: CommitInfo) -> tuple[dict[str, Any] | None, str | None]:
    """How ranks held the commit, or why that cannot be told. What is forgotten may be gone."""
    if info.forgotten:
        return None, None
    try:
        return read_layout(store, info), None
    except (Corrupt, NotFound) as error:
        return None, str(error)


def _pickles(
    store: StoreHandle, info: CommitInfo, leaves: dict[str, list[LeafInfo]]
) -> tuple[dict[str, list[str]], str | None]:
    """The paths of pickled leaves by key, or why they cannot be told."""
    try:
        return pickles_of(store, info, leaves), None
    except (Corrupt, NotFound) as error:
        return {}, str(error)


def _usage(
    store: StoreHandle, screen: Screen, info: CommitInfo
) -> "tuple[CommitUsage | None, str | None]":
    """The commit's exclusive and shared bytes, or why they cannot be told: some other commit may be
    damaged."""
    from ckptstore.maintenance.usage import usage

    try:
        with screen.working("looking at what other commits share"):
            found = usage(store, detail=[info.id])
    except (Corrupt, NotFound) as error:
        return None, str(error)
    return next((commit for commit in found.commits if commit.commit == info.id), None), None


def _print_facts(
    screen: Screen, info: CommitInfo, parents: Sequence[str], children: Sequence[CommitInfo]
) -> None:
    age = timestamps.age_text(info.time_ns, time.time_ns())
    pairs = [
        ("commit", info.id),
        ("content", info.content),
        ("run", info.run),
        ("step", step_text(info.step)),
        ("tags", ", ".join(info.tags)),
        (
            "time",
            f"{timestamps.local_text(info.time_ns)} ({age} ago)"
            if age[-1].isalpha()
            else timestamps.local_text(info.time_ns),
        ),
        ("parents", _several(parents)),
        ("children", _several([commit_text(child) for child in children])),
        ("log entry", f"{info.n}, session {info.session}"),
        *(
            ("message" if not i else "", line)
            for i, line in enumerate(info.message.strip().splitlines())
        ),
    ]
    screen.table(fields("", [pair for pair in pairs if pair[1]]))
    if info.forgotten:
        screen.line("This commit is forgotten: gc will remove it.")


def _print_metrics(screen: Screen, info: CommitInfo) -> None:
    if info.metrics:
        screen.table(
            fields("Metrics", [(name, metric_text(value)) for name, value in info.metrics.items()])
        )


def _print_trees(
    screen: Screen, leaves: dict[str, list[LeafInfo]], pickles: dict[str, list[str]]
) -> None:
    columns = (
        Column("key", style="bold"),
        Column("leaves", right=True),
        Column("tensor bytes", right=True),
        Column("types", fit="wrap"),
    )
    rows = tuple(
        (
            key,
            f"{len(tree):,}",
            bytes_text(sum(tensor_bytes(leaf) or 0 for leaf in tree)),
            _kinds_text(tree, pickles.get(key, ())),
        )
        for key, tree in leaves.items()
    )
    screen.table(Table(columns, rows, title="Trees"))
    if paths := [path for found in pickles.values() for path in found]:
        screen.line(f"Pickled, so restored with allow_pickle=True only: {_several(paths)}")


def _print_packs(screen: Screen, packs: Sequence[PackInfo]) -> None:
    columns = (
        Column("pack"),
        Column("bytes", right=True),
        Column("chunks", right=True),
        Column("holds"),
    )
    rows = tuple(
        (
            pack.id,
            bytes_text(pack.bytes),
            f"{pack.chunks:,}",
            "metadata" if pack.metadata else "tensors",
        )
        for pack in packs
    )
    if rows:
        screen.table(Table(columns, rows, title="Packs written by this commit"))


def _print_bytes(screen: Screen, info: CommitInfo, usage: "CommitUsage | None") -> None:
    pairs = [
        ("logical", bytes_text(info.logical_bytes), "the size of the state"),
        ("new", bytes_text(info.new_bytes), "what the store grew by when this was committed"),
    ]
    if usage is not None and usage.shared_bytes is not None:
        pairs += [
            (
                "exclusive",
                bytes_text(usage.exclusive_bytes),
                "what would be freed if this commit alone went",
            ),
            ("shared", bytes_text(usage.shared_bytes), "what it has in common with other commits"),
        ]
    screen.table(fields("Bytes", pairs))


def _kinds(leaves: Sequence[LeafInfo], pickles: Sequence[str]) -> Counter[str]:
    pickled = set(pickles)
    return Counter("pickle" if leaf.path in pickled else leaf.dtype or leaf.kind for leaf in leaves)


def _kinds_text(leaves: Sequence[LeafInfo], pickles: Sequence[str]) -> str:
    """`24 float32, 3 value`."""
    counts = _kinds(leaves, pickles)
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())


def _several(names: Sequence[str]) -> str:
    more = (
        f" and {count_text(len(names) - RELATIVES_SHOWN, 'other')}"
        if len(names) > RELATIVES_SHOWN
        else ""
    )
    return ", ".join(names[:RELATIVES_SHOWN]) + more


def _known(queries: Queries, commit: CommitId) -> str:
    try:
        return commit_text(queries.commit(commit))
    except NotFound:
        return f"{short(commit)} (purged)"


def _document(
    store: StoreHandle,
    info: CommitInfo,
    children: Sequence[CommitInfo],
    leaves: dict[str, list[LeafInfo]],
    pickles: dict[str, list[str]],
    packs: Sequence[PackInfo],
    usage: "CommitUsage | None",
    problem: str | None,
) -> dict[str, Any]:
    return {
        "store": store.url,
        "commit": {
            **commit_document(info),
            "children": [child.id for child in children],
            "exclusive_bytes": usage and usage.exclusive_bytes,
            "shared_bytes": usage and usage.shared_bytes,
        },
        "trees": [
            {
                "key": key,
                "schema": info.schemas[key],
                "leaves": len(tree),
                "tensor_bytes": sum(tensor_bytes(leaf) or 0 for leaf in tree),
                "dtypes": dict(_kinds(tree, pickles.get(key, ()))),
                "pickles": pickles.get(key, []),
            }
            for key, tree in leaves.items()
        ],
        "packs": [
            {"id": pack.id, "bytes": pack.bytes, "chunks": pack.chunks, "metadata": pack.metadata}
            for pack in packs
        ],
        "problem": problem,
    }
