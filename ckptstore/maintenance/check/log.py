"""fsck's first level: the log, its checkpoints, the refs, and the catalog, which must agree with
the log."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore.core.ids import ChunkId, CommitId, checkpoint_key, log_key, segment_key
from ckptstore.errors import CkptStoreError
from ckptstore.index.catalog_sqlite import open_catalog
from ckptstore.index.queries import LeafInfo, Queries
from ckptstore.log.fold import State
from ckptstore.maintenance.check.log_audit import BadEntry, Chain
from ckptstore.maintenance.check.metadata_reader import Trees, in_order
from ckptstore.maintenance.check.offline_store import OfflineStore
from ckptstore.maintenance.check.report import Finding, Kind, Severity

if TYPE_CHECKING:
    from ckptstore.index.catalog import Catalog

_LOOKS = 5
"""How often the catalog is checked again while others change it."""

_REPAIR = (
    "run `ckptstore repair`: it knows whether the entry can be made again, from a mirror "
    "with --from"
)


def log_findings(chain: Chain) -> Iterator[Finding]:
    """Invalid entries, checkpoints and segments. Pure."""
    yield from (_bad_entry(bad) for bad in chain.bad)
    for n, problem in chain.bad_checkpoints:
        what = f"the checkpoint of the log's state at entry {n} is ignored: {problem}"
        yield Finding(
            Kind.CHECKPOINT,
            what,
            "run `ckptstore repair --apply`, which removes it",
            Severity.INDEX,
            checkpoint_key(n),
            n,
        )
    for n, problem in chain.bad_segments:
        what = f"the segment of the log up to entry {n} is ignored: {problem}"
        yield Finding(
            Kind.CHECKPOINT,
            what,
            "run `ckptstore repair --apply`, which removes it",
            Severity.INDEX,
            segment_key(n),
            n,
        )
    for key in chain.unknown:
        yield Finding(
            Kind.FOREIGN,
            f"{key} is nothing that belongs into a log",
            "delete it if it is yours",
            Severity.NOTE,
            key,
        )
    if not chain.certain:
        what = (
            "what the bad entries did is unknown: commits, tags and packs that only they name "
            "are not in what follows"
        )
        yield Finding(Kind.ENTRY, what, _REPAIR)


def ref_findings(state: State) -> Iterator[Finding]:
    """Tags that name no commit, and forgotten commits that a tag names. Pure."""
    for name, commit in sorted(state.tags.items()):
        if commit not in state.commits:
            what = f"tag {name!r} names commit {commit[:12]}, which is not in the log"
            yield Finding(
                Kind.REF,
                what,
                f"set it again: `ckptstore tag {name} REF`, or remove it: `ckptstore tag -d "
                f"{name}`",
            )


def catalog_findings(offline_store: OfflineStore, trees: Trees) -> Iterator[Finding]:
    """Differences between this host's catalog and a fold of the log up to the same entry. Reads
    every entry again."""
    # The module imports SQLAlchemy; programs that never run fsck need not wait for it.
    from ckptstore.index.catalog import (
        Catalog,
    )

    # Unlike Path.exists, false for a damaged inode, whose file is recreated.
    if not os.path.exists(offline_store.catalog_path):
        return
    for _ in range(_LOOKS):
        stamp = _stamp(offline_store.catalog_path)
        found = list(
            _catalog_findings(offline_store, trees, Catalog.temporary(offline_store.config.store))
        )
        # Others may replace the catalog, or create it.
        if not found or _stamp(offline_store.catalog_path) == stamp:
            break
    yield from found


def _catalog_findings(
    offline_store: OfflineStore, trees: Trees, fresh: "Catalog"
) -> Iterator[Finding]:
    """Compare a snapshot of the catalog with `fresh`, which was folded from the log and is
    closed here."""
    catalog = open_catalog(offline_store.catalog_path, offline_store.config.store)
    if catalog is None:
        fresh.close()
        yield _catalog("cannot be read, or is of another store or version")
        return
    try:
        with catalog.one_moment():
            position = catalog.position()
            fresh.fold(
                takewhile(
                    lambda entry: entry.n <= position.n, offline_store.open_log().read_entries()
                )
            )
            yield from (_catalog(what) for what in _differences(catalog, fresh.queries(), trees))
    except CkptStoreError as error:
        yield _catalog(str(error))
    finally:
        fresh.close()
        catalog.close()


def _stamp(path: Path) -> tuple[int, ...]:
    """Detects changes of the file at `path` and of its write-ahead log."""
    stamps: list[int] = []
    for name in (path, path.with_name(path.name + "-wal")):
        with suppress(OSError):
            status = os.stat(name)
            stamps += (status.st_ino, status.st_size, status.st_mtime_ns)
    return tuple(stamps)


def document_findings(
    state: State, problems: Sequence[tuple[CommitId, CkptStoreError]]
) -> Iterator[Finding]:
    """Commits whose documents cannot be read. Pure."""
    rows = dict(in_order(state))
    for commit, error in problems:
        row = rows[commit]
        what = (
            f"the document of commit {commit[:12]} (run {row.run}, step {row.step}) cannot be "
            f"read: {error}"
        )
        step = (
            "run `ckptstore repair`, with --from and a mirror that has it; no other commit is hit"
        )
        yield Finding(
            Kind.DOCUMENT,
            what,
            step,
            _severity(row.soft),
            f"commits/{row.session}-{commit}",
            row.n,
            commits=(commit,),
        )


def _bad_entry(bad: BadEntry) -> Finding:
    state = "is missing" if bad.data is None else "is damaged"
    return Finding(
        Kind.ENTRY,
        f"entry {bad.n} of the log {state}: {bad.problem}",
        _REPAIR,
        key=log_key(bad.n),
        entry=bad.n,
    )


def _catalog(what: str) -> Finding:
    return Finding(Kind.CATALOG, f"the catalog {what}", "run `ckptstore reindex`", Severity.INDEX)


def _differences(catalog: Queries, fresh: Queries, trees: Trees) -> Iterator[str]:
    asked: tuple[tuple[str, Any, Any], ...] = (
        ("position", catalog.position(), fresh.position()),
        ("commits", catalog.log(forgotten=True), fresh.log(forgotten=True)),
        ("tags", catalog.tags(), fresh.tags()),
        ("runs", catalog.runs(), fresh.runs()),
        ("packs", catalog.packs(), fresh.packs()),
        ("totals", catalog.totals(), fresh.totals()),
    )
    for name, got, wanted in asked:
        # Compared by repr, because a metric may be NaN.
        if repr(got) != repr(wanted):
            yield f"has other {name} than the log: {_first_difference(got, wanted)}"
    for schema in sorted(
        {schema for info in fresh.log(forgotten=True) for schema in info.schemas.values()}
    ):
        leaves = catalog.leaves(schema)
        # None if the schema cannot be read, which is a separate finding.
        wanted = _leaves(trees, schema)
        if leaves is not None and wanted is not None and leaves != wanted:
            yield f"has other leaves than schema {schema[:12]}"


def _first_difference(got: Any, wanted: Any) -> str:
    if isinstance(got, list) and len(got) == len(wanted):
        got, wanted = next((a, b) for a, b in zip(got, wanted, strict=True) if repr(a) != repr(b))
    return f"wanted {wanted!s:.300}, got {got!s:.300}"


def _leaves(trees: Trees, schema_id: str) -> list[LeafInfo] | None:
    try:
        schema = trees.schema(ChunkId(bytes.fromhex(schema_id)))
    except CkptStoreError:
        return None
    columns = zip(
        schema.paths, schema.kinds, schema.dtypes, schema.shapes, schema.aliases, strict=True
    )
    return [LeafInfo(*row) for row in columns]


def _severity(soft: int) -> Severity:
    return Severity.NOTE if soft else Severity.DAMAGE
