"""`ckptstore stats`: what the store holds in all, and which commits hold most of it."""

import time
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptstore.cli import timestamps
from ckptstore.cli.exits import Exit
from ckptstore.cli.format import step_text
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.cli.table import Column, Table, fields
from ckptstore.core.model import CommitInfo
from ckptstore.core.text import bytes_text, count_text
from ckptstore.index.queries import RunInfo, Totals
from ckptstore.repository.store_handle import StoreHandle

if TYPE_CHECKING:
    from ckptstore.maintenance.usage import CommitUsage, Usage


def run(args: Namespace, screen: Screen) -> Exit:
    from ckptstore.maintenance.usage import usage

    with opened(args) as store:
        queries = store.queries()
        totals, runs = queries.totals(), queries.runs()
        with screen.working(f"looking at what {count_text(totals.commits, 'commit')} share"):
            found = usage(store)
        heaviest = sorted(found.commits, key=lambda commit: commit.exclusive_bytes, reverse=True)[
            : args.top
        ]
        infos = queries.commits([commit.commit for commit in heaviest])
        if screen.json:
            _print_document(store, screen, totals, runs, found)
            return Exit.OK
        _print_totals(store, screen, totals, found)
    _print_runs(screen, runs)
    _print_heaviest(screen, heaviest, infos)
    return Exit.OK


def _print_totals(store: StoreHandle, screen: Screen, totals: Totals, found: "Usage") -> None:
    forgotten = f" and {totals.forgotten:,} forgotten" if totals.forgotten else ""
    pairs = [
        (
            "store",
            store.url,
            f"chunks of {bytes_text(store.config.chunk_bytes)}, codec {store.config.codec}",
        ),
        (
            "commits",
            f"{totals.commits:,}{forgotten}",
            f"{count_text(totals.runs, 'run')}, {count_text(totals.tags, 'tag')}",
        ),
        ("logical", bytes_text(found.logical_bytes), "the size of all their states"),
        (
            "stored",
            bytes_text(found.stored_bytes),
            f"{count_text(found.packs, 'pack')}, {count_text(found.chunks, 'chunk')}",
        ),
        ("dedup", _ratio_text(found), "logical / stored"),
        ("unreferenced", bytes_text(found.unreferenced_bytes), "stored, and no commit needs it"),
    ]
    screen.table(fields("", pairs))


def _print_runs(screen: Screen, runs: Sequence[RunInfo]) -> None:
    now_ns = time.time_ns()
    columns = (
        Column("run"),
        Column("commits", right=True),
        Column("latest", style="yellow"),
        Column("step", right=True),
        Column("age" if screen.terminal else "time", right=screen.terminal),
    )
    rows = tuple(
        (
            run.run,
            f"{run.commits:,}",
            run.latest[: screen.id_digits],
            step_text(run.step),
            timestamps.age_text(run.time_ns, now_ns)
            if screen.terminal
            else timestamps.utc_text(run.time_ns),
        )
        for run in runs
    )
    if rows:
        screen.table(Table(columns, rows, title="Runs"))


def _print_heaviest(
    screen: Screen, heaviest: "Sequence[CommitUsage]", infos: Sequence[CommitInfo]
) -> None:
    columns = (
        Column("commit", style="yellow"),
        Column("run"),
        Column("step", right=True),
        Column("tags", fit="cut", style="bold green"),
        Column("logical", right=True),
        Column("new", right=True),
        Column("exclusive", right=True),
    )
    rows = tuple(
        (
            info.id[: screen.id_digits],
            info.run,
            step_text(info.step),
            ", ".join(info.tags),
            *(
                bytes_text(n)
                for n in (commit.logical_bytes, commit.new_bytes, commit.exclusive_bytes)
            ),
        )
        for commit, info in zip(heaviest, infos, strict=True)
    )
    if rows:
        screen.table(
            Table(columns, rows, title="Most exclusive bytes (freed if that commit alone went)")
        )


def _print_document(
    store: StoreHandle, screen: Screen, totals: Totals, runs: Sequence[RunInfo], found: "Usage"
) -> None:
    screen.document(
        {
            "store": store.url,
            "store_id": store.config.store,
            "chunk_bytes": store.config.chunk_bytes,
            "codec": store.config.codec,
            "commits": totals.commits,
            "forgotten": totals.forgotten,
            "tags": totals.tags,
            "logical_bytes": found.logical_bytes,
            "stored_bytes": found.stored_bytes,
            "unreferenced_bytes": found.unreferenced_bytes,
            "dedup_ratio": found.logical_bytes / found.stored_bytes if found.stored_bytes else None,
            "packs": found.packs,
            "chunks": found.chunks,
            "runs": [
                {
                    "run": run.run,
                    "commits": run.commits,
                    "latest": run.latest,
                    "step": run.step,
                    "time": timestamps.exact_text(run.time_ns),
                }
                for run in runs
            ],
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
    )


def _ratio_text(found: "Usage") -> str:
    return f"{found.logical_bytes / found.stored_bytes:.1f}×" if found.stored_bytes else ""
