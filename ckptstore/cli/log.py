"""`ckptstore log`: commits, the newest first, with their lineage."""

import math
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptstore.cli import lineage, timestamps
from ckptstore.cli.exits import Exit, UsageError
from ckptstore.cli.format import commit_document, first_line, metric_text, step_text
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.cli.table import Column, Table
from ckptstore.core.model import CommitInfo
from ckptstore.core.text import bytes_text, count_text, near
from ckptstore.errors import NotFound
from ckptstore.index.queries import Queries

SHOWN_ON_A_TERMINAL = 50
METRIC_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Filter:
    """Which commits are wanted, beyond their number: of any of `runs`, with a tag that any of the
    globs `tags` matches; None wants all.

    Times are in ns, both ends included; `best` is a metric and whether large is good."""

    runs: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    since: int | None = None
    until: int | None = None
    best: tuple[str, bool] | None = None

    @property
    def everything(self) -> bool:
        return self == Filter()

    def wants(self, info: CommitInfo) -> bool:
        return (
            (self.runs is None or info.run in self.runs)
            and (
                self.tags is None
                or any(fnmatchcase(tag, glob) for tag in info.tags for glob in self.tags)
            )
            and (self.since is None or info.time_ns >= self.since)
            and (self.until is None or info.time_ns <= self.until)
        )


def run(args: Namespace, screen: Screen) -> Exit:
    now_ns = time.time_ns()
    if args.graph and args.sort:
        raise UsageError(
            "--graph draws commits in the order of the log, which --sort changes", "ckptstore log"
        )
    wanted = _filter(args, now_ns)
    limit = args.limit
    if limit is None and screen.terminal and not args.all:
        limit = SHOWN_ON_A_TERMINAL
    with opened(args) as store:
        queries = store.queries()
        runs = _runs(queries, args.run)
        known = queries.log(
            args.run[0] if args.run and not wanted.runs else None,
            limit if wanted.everything else None,
        )
        total = (
            sum(runs.values())
            if wanted.everything
            else len(matching := [info for info in known if wanted.wants(info)])
        )
        commits = known if wanted.everything else _best_first(matching, wanted.best)[:limit]
        _check_metrics(args.metric or (), known)
        if screen.json:
            screen.document(
                {
                    "store": store.url,
                    "total": total,
                    "commits": [commit_document(info) for info in commits],
                }
            )
            return Exit.OK
    _print(args, screen, commits, known, several=len(runs) > 1, now_ns=now_ns)
    if total > len(commits) and args.limit is None:
        screen.hint(f"{count_text(total - len(commits), 'more commit')}: --all shows every one")
    if not commits:
        screen.hint("no commit matches" if sum(runs.values()) else "no commits yet")
    return Exit.OK


def _print(
    args: Namespace,
    screen: Screen,
    commits: Sequence[CommitInfo],
    known: Sequence[CommitInfo],
    *,
    several: bool,
    now_ns: int,
) -> None:
    metrics = args.metric or _metrics_present(commits)
    nodes = lineage.shown([info.id for info in commits], {info.id: info.parents for info in known})
    graph = (
        args.graph
        if args.graph is not None
        else screen.terminal and not args.sort and lineage.branches(nodes)
    )
    lines = lineage.draw(nodes) if graph else [""] * len(commits)
    if not screen.unicode:
        lines = [line.translate(lineage.ASCII) for line in lines]
    age = screen.terminal
    columns = (
        *([Column("", style="blue")] if graph else []),
        Column("commit", style="yellow"),
        Column("step", right=True),
        *([Column("run")] if several else []),
        Column("tags", fit="cut", style="bold green"),
        Column("age" if age else "time", right=age),
        Column("logical", right=True, spare=1),
        Column("new", right=True),
        *(
            Column(name, right=True, spare=0 if args.metric or not i else 1 + i, style="cyan")
            for i, name in enumerate(metrics)
        ),
        Column("message", fit="cut"),
    )
    rows = tuple(
        (
            *([line] if graph else []),
            info.id[: screen.id_digits],
            step_text(info.step),
            *([info.run] if several else []),
            ", ".join(info.tags),
            timestamps.age_text(info.time_ns, now_ns) if age else timestamps.utc_text(info.time_ns),
            bytes_text(info.logical_bytes),
            bytes_text(info.new_bytes),
            *(metric_text(info.metrics[name]) if name in info.metrics else "" for name in metrics),
            first_line(info.message),
        )
        for line, info in zip(lines, commits, strict=True)
    )
    if rows:
        screen.table(_without_empty(Table(columns, rows), ("step", "tags", "message")))


def _without_empty(table: Table, names: Iterable[str]) -> Table:
    """The table without those columns of `names` in which nobody wrote anything."""
    for name in names:
        i = [column.name for column in table.columns].index(name)
        if not any(row[i] for row in table.rows):
            table = table.without(name)
    return table


def _filter(args: Namespace, now_ns: int) -> Filter:
    best = None
    if args.sort:
        metric, _, order = args.sort.rpartition(":")
        best = (
            (metric, order == "max") if metric and order in ("min", "max") else (args.sort, False)
        )
    since = timestamps.parse_moment(args.since, now_ns) if args.since else None
    until = timestamps.parse_moment(args.until, now_ns, end=True) if args.until else None
    several = (
        tuple(args.run) if len(set(args.run or ())) > 1 else None
    )  # one alone is chosen by the query
    return Filter(several, tuple(args.tag) if args.tag else None, since, until, best)


def _runs(queries: Queries, named: Sequence[str] | None) -> dict[str, int]:
    """How many commits each run has that may be shown. Raises `NotFound` for a run without any."""
    runs = {info.run: info.commits for info in queries.runs()}
    if named is None:
        return runs
    for run in named:
        if run not in runs:
            raise NotFound(f"no commit of run {run!r}{near(run, runs) or _those_there(runs)}")
    return {run: runs[run] for run in named}


def _those_there(runs: Iterable[str]) -> str:
    return f"; there are {', '.join(list(runs)[:10])}" if runs else "; the store has no commits"


def _best_first(commits: Sequence[CommitInfo], best: tuple[str, bool] | None) -> list[CommitInfo]:
    """Sorted by the metric, commits without a number for it last; as they are without `best`."""
    if best is None:
        return list(commits)
    metric, large = best
    _check_metrics([metric], commits)

    def rank(info: CommitInfo) -> float:
        value = info.metrics.get(metric, math.nan)
        return math.inf if math.isnan(value) else -value if large else value

    return sorted(
        commits, key=lambda info: (math.isnan(info.metrics.get(metric, math.nan)), rank(info))
    )


def _check_metrics(wanted: Iterable[str], commits: Sequence[CommitInfo]) -> None:
    names = {name for info in commits for name in info.metrics}
    for name in wanted:
        if commits and name not in names:
            there = (
                f"; there are {', '.join(sorted(names)[:10])}" if names else "; none has metrics"
            )
            raise NotFound(f"no commit here has a metric {name!r}{near(name, names) or there}")


def _metrics_present(commits: Sequence[CommitInfo]) -> list[str]:
    """The metrics that most commits have, losses first among equals; at most three."""
    counts: dict[str, int] = {}
    for info in commits:
        for name in info.metrics:
            counts[name] = counts.get(name, 0) + 1
    return sorted(counts, key=lambda name: (-counts[name], "loss" not in name, name))[
        :METRIC_COLUMNS
    ]
