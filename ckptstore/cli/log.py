"""`ckptstore log`: commits, newest first, with their lineage."""

import math
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from ckptstore.cli import lineage
from ckptstore.cli.call import Answer, Call
from ckptstore.cli.commits import commit_document, first_line
from ckptstore.cli.exits import UsageError
from ckptstore.cli.options import parse_best, parse_moment
from ckptstore.cli.screen import Hint, Part
from ckptstore.core.model import CommitInfo
from ckptstore.core.tables import BLUE, TAG, Column, Table
from ckptstore.core.text import count_text, near
from ckptstore.errors import NotFound

SHOWN_ON_A_TERMINAL = 50
METRIC_COLUMNS = 3


def log(call: Call) -> Answer:
    args = call.args
    if args.graph and args.sort:
        raise UsageError(
            "--graph draws commits in the order of the log, which --sort changes", "ckptstore log"
        )
    wanted = _filter(args)
    everything = wanted is None and not args.sort
    limit = args.limit
    if limit is None and call.screen.terminal and not args.all:
        limit = SHOWN_ON_A_TERMINAL
    queries = call.open().queries()
    counts = {info.run: info.commits for info in queries.runs()}
    _check("of run", args.run, counts)
    runs = set(args.run) or set(counts)
    run = args.run[0] if len(set(args.run)) == 1 else None
    commits = known = queries.log(run, limit if everything else None)
    total = here = sum(counts[run] for run in runs)
    if not everything:
        commits = [info for info in known if wanted is None or wanted(info)]
        total = len(commits)
    if commits and args.sort:
        metric, large = parse_best(args.sort)
        _check("here has the metric", [metric], set(_metrics(commits)))
        commits = _best_first(commits, metric, large)
    commits = commits[:limit]
    if known and args.metric:
        _check("here has the metric", args.metric, set(_metrics(known)))
    page: list[Part] = [_table(call, commits, known, several=len(runs) > 1)] if commits else []
    if total > len(commits) and args.limit is None:
        page.append(Hint(f"{count_text(total - len(commits), 'more commit')}: --all lists all"))
    if not commits:
        page.append(Hint("no commit matches" if here else "no commits yet"))
    return Answer({"total": total, "commits": map(commit_document, commits)}, page)


def _filter(args: Namespace) -> Callable[[CommitInfo], bool] | None:
    """Whether a commit is wanted by its run, tags and time; None if all are."""
    runs = frozenset(args.run)
    # The query selects a single run.
    if len(runs) < 2 and not (args.tag or args.since or args.until):
        return None
    now_ns = time.time_ns()
    since = parse_moment(args.since, now_ns) if args.since else -math.inf
    until = parse_moment(args.until, now_ns, end=True) if args.until else math.inf

    def wants(info: CommitInfo) -> bool:
        return (
            (not runs or info.run in runs)
            and (
                not args.tag
                or any(fnmatchcase(tag, glob) for tag in info.tags for glob in args.tag)
            )
            and since <= info.time_ns <= until
        )

    return wants


def _table(
    call: Call, commits: Sequence[CommitInfo], known: Sequence[CommitInfo], *, several: bool
) -> Table:
    metrics = call.args.metric or _frequent_metrics(commits)
    columns = (
        Column("", style=BLUE),
        Column("commit", "id"),
        Column("step", "step"),
        Column("run"),
        Column("tags", fit="cut", style=TAG),
        Column("time", "time"),
        Column("logical", "bytes", spare=True),
        Column("new", "bytes"),
        *(
            Column(name, "metric", spare=i > 0 and not call.args.metric)
            for i, name in enumerate(metrics)
        ),
        Column("message", fit="cut"),
    )
    rows = [
        (
            line,
            info.id,
            info.step,
            info.run if several else None,
            info.tags,
            info.time_ns,
            info.logical_bytes,
            info.new_bytes,
            *map(info.metrics.get, metrics),
            first_line(info.message),
        )
        for line, info in zip(_graph(call, commits, known), commits, strict=True)
    ]
    return Table(columns, rows).without_empty("", "step", "run", "tags", "message")


def _graph(
    call: Call, commits: Sequence[CommitInfo], known: Sequence[CommitInfo]
) -> Iterable[str | None]:
    """The lineage beside each commit: if asked for, else on a terminal where it branches."""
    wanted = call.args.graph
    if wanted or (wanted is None and call.screen.terminal and not call.args.sort):
        parents = {info.id: info.parents for info in known}
        lines = lineage.draw(lineage.shown([info.id for info in commits], parents))
        if wanted or any(len(line) > 1 for line in lines):
            return lines
    return [None] * len(commits)


def _best_first(commits: Sequence[CommitInfo], metric: str, large: bool) -> list[CommitInfo]:
    """Sorted by the metric; commits without a number for it come last."""

    def rank(info: CommitInfo) -> tuple[bool, float]:
        number = info.metrics.get(metric, math.nan)
        return math.isnan(number), 0 if math.isnan(number) else -number if large else number

    return sorted(commits, key=rank)


def _check(what: str, wanted: Iterable[str], names: Collection[str]) -> None:
    """Raise `NotFound` unless all of `wanted` are among `names`."""
    for name in wanted:
        if name not in names:
            there = f"there are {', '.join(sorted(names)[:10])}" if names else "there are none"
            raise NotFound(f"no commit {what} {name!r}{near(name, names) or f'; {there}'}")


def _frequent_metrics(commits: Sequence[CommitInfo]) -> list[str]:
    """The metrics that most commits have; of equals, losses first."""
    counts = Counter(_metrics(commits))
    return sorted(counts, key=lambda name: (-counts[name], "loss" not in name, name))[
        :METRIC_COLUMNS
    ]


def _metrics(commits: Sequence[CommitInfo]) -> Iterator[str]:
    return (name for info in commits for name in info.metrics)
