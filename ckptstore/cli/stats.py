"""`ckptstore stats`: the size of the store, and the commits that hold most of it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckptstore.cli.call import Answer, Call
from ckptstore.core.model import CommitInfo
from ckptstore.core.tables import TAG, Column, Table, fields
from ckptstore.core.text import bytes_text, count_text, exact_text
from ckptstore.index.rows import RunInfo

if TYPE_CHECKING:
    from ckptstore.maintenance.usage import CommitUsage


def stats(call: Call) -> Answer:
    from ckptstore.maintenance.usage import usage

    store = call.open()
    queries, config = store.queries(), store.config
    totals, runs = queries.totals(), queries.runs()
    with call.screen.progress(f"looking at what {count_text(totals.commits, 'commit')} share"):
        found = usage(store)
    ratio = found.logical_bytes / found.stored_bytes if found.stored_bytes else None
    heaviest = sorted(found.commits, key=lambda c: c.exclusive_bytes, reverse=True)[: call.args.top]
    infos = queries.commits([commit.commit for commit in heaviest])

    def page() -> Iterator[Table]:
        chunks = f"chunks of {bytes_text(config.chunk_bytes)}, codec {config.codec}"
        forgotten = f" and {totals.forgotten:,} forgotten" if totals.forgotten else ""
        counts = f"{count_text(totals.runs, 'run')}, {count_text(totals.tags, 'tag')}"
        stored = f"{count_text(found.packs, 'pack')}, {count_text(found.chunks, 'chunk')}"
        pairs = [
            ("store", store.url, chunks),
            ("commits", f"{totals.commits:,}{forgotten}", counts),
            ("logical", bytes_text(found.logical_bytes), "the size of all their states"),
            ("stored", bytes_text(found.stored_bytes), stored),
            ("dedup", f"{ratio:.1f}×" if ratio else "", "logical / stored"),
            (
                "unreferenced",
                bytes_text(found.unreferenced_bytes),
                "stored, but no commit needs it",
            ),
        ]
        yield fields("", pairs)
        yield from _lists(runs, zip(heaviest, infos, strict=True))

    document = {
        "store_id": config.store,
        "chunk_bytes": config.chunk_bytes,
        "codec": config.codec,
        "commits": totals.commits,
        "forgotten": totals.forgotten,
        "tags": totals.tags,
        "logical_bytes": found.logical_bytes,
        "stored_bytes": found.stored_bytes,
        "unreferenced_bytes": found.unreferenced_bytes,
        "dedup_ratio": ratio,
        "packs": found.packs,
        "chunks": found.chunks,
        "runs": [{**run._asdict(), "time": exact_text(run.time_ns)} for run in runs],
        "usage": [
            {
                "commit": commit.commit,
                "logical_bytes": commit.logical_bytes,
                "new_bytes": commit.new_bytes,
                "exclusive_bytes": commit.exclusive_bytes,
            }
            for commit in found.commits
        ],
    }
    return Answer(document, page())


def _lists(
    runs: Sequence[RunInfo], heaviest: "Iterable[tuple[CommitUsage, CommitInfo]]"
) -> Iterator[Table]:
    """The runs, and the commits that hold most bytes that no other commit has."""
    if runs:
        yield Table(
            (
                Column("run"),
                Column("commits", "count"),
                Column("latest", "id"),
                Column("step", "step"),
                Column("time", "time"),
            ),
            runs,
            "Runs",
        )
    if rows := [
        (i.id, i.run, i.step, i.tags, i.logical_bytes, i.new_bytes, c.exclusive_bytes)
        for c, i in heaviest
    ]:
        sizes = ("logical", "new", "exclusive")
        yield Table(
            (
                Column("commit", "id"),
                Column("run"),
                Column("step", "step"),
                Column("tags", fit="cut", style=TAG),
                *(Column(name, "bytes") for name in sizes),
            ),
            rows,
            "Most exclusive bytes (freed if this commit alone is deleted)",
        )
