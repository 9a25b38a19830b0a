"""`ckptstore log`: commits with their lineage, newest first."""

import math
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from graphlib import TopologicalSorter

from ckptstore.cli.call import Answer, Call, UsageError
from ckptstore.cli.commits import commit_document, first_line
from ckptstore.cli.parser import parse_best, parse_moment
from ckptstore.cli.screen import Hint, Part, columns
from ckptstore.errors import NotFound
from ckptstore.plugin.handles import Queries, StoreHandle
from ckptstore.plugin.model import CommitId, CommitInfo
from ckptstore.plugin.text import BLUE, Column, Table, count_text, exact_text, near
from ckptstore.plugins.reports.listing import links_of

SHOWN_ON_A_TERMINAL = 50
METRIC_COLUMNS = 3

_LANES = " ───│╭╮┬│╰╯┴│├┤┼"
"""A lane by the directions in which lines leave it: up 8, down 4, left 2, right 1."""


def log(call: Call) -> Answer:
    args = call.args
    if args.graph and args.sort:
        raise UsageError("--graph draws commits in the order of the log, which --sort changes")
    everything = len(set(args.run)) < 2 and not (args.tag or args.since or args.until or args.sort)
    wanted, limit = _filter(args), args.limit
    if limit is None and call.screen.terminal and not args.all:
        limit = SHOWN_ON_A_TERMINAL
    store = call.open()
    run = args.run[0] if len(set(args.run)) == 1 else None
    times = _times(store) if args.forgotten else None
    counts, known = _known(store.queries(), run, limit if everything else None, times)
    _check("of run", args.run, counts)
    runs, commits = set(args.run) or set(counts), [*filter(wanted, known)]
    here = sum(counts[run] for run in runs)
    total = here if everything else len(commits)
    if commits and args.sort:
        metric, large = parse_best(args.sort)
        _check("here has the metric", [metric], set(_metrics(commits)))
        commits = _best_first(commits, metric, large)
    commits = commits[:limit]
    if known and args.metric:
        _check("here has the metric", args.metric, set(_metrics(known)))
    page: list[Part] = []
    if commits:
        page.append(_table(call, commits, known, times or {}, several=len(runs) > 1))
    if total > len(commits) and args.limit is None:
        page.append(Hint(f"{count_text(total - len(commits), 'more commit')}: --all lists all"))
    if not commits:
        none = "no commit is forgotten" if args.forgotten else "no commits yet"
        page.append(Hint("no commit matches" if here else none))
    elif args.forgotten:
        page.append(Hint("`ckptstore undelete REF` restores one, until a gc deletes it"))
    documents = _documents(call, store, commits, times)
    return Answer({"total": total, "commits": documents}, page)


def _times(store: StoreHandle) -> dict[CommitId, int]:
    """When each forgotten commit was forgotten."""
    rows = store.log.replay().commits.items()
    return {commit: row.forgotten_ns for commit, row in rows if row.soft}


def _known(
    queries: Queries, run: str | None, limit: int | None, times: Mapping[CommitId, int] | None
) -> tuple[Mapping[str, int], list[CommitInfo]]:
    """How many commits each run has, and the commits of `run`: the newest `limit`, or given
    `times` all that are forgotten."""
    if times is None:
        return {info.run: info.commits for info in queries.runs()}, queries.log(run, limit)
    found = [info for info in queries.log(forgotten=True) if info.id in times]
    counts = dict.fromkeys((info.run for info in queries.runs()), 0)
    counts |= Counter(info.run for info in found)
    return counts, [info for info in found if run in (None, info.run)]


def _documents(
    call: Call,
    store: StoreHandle,
    commits: Sequence[CommitInfo],
    times: Mapping[CommitId, int] | None,
) -> Iterator[dict[str, object]]:
    """The commits as `--json` prints them. Their own documents are read for nothing else."""
    links = links_of(call, store, commits)
    for info in commits:
        document = {**commit_document(info), "links": links[info.id]}
        if times is not None:
            time_ns = times[info.id]
            document |= {"forgotten_time": exact_text(time_ns), "forgotten_time_ns": time_ns}
        yield document


def _filter(args: Namespace) -> Callable[[CommitInfo], bool]:
    """Whether a commit is wanted by its run, tags and time."""
    now_ns = time.time_ns()
    since = parse_moment(args.since, now_ns) if args.since else -math.inf
    until = parse_moment(args.until, now_ns, end=True) if args.until else math.inf
    return lambda info: (
        (not args.run or info.run in args.run)
        and (not args.tag or any(fnmatchcase(tag, glob) for tag in info.tags for glob in args.tag))
        and since <= info.time_ns <= until
    )


def _table(
    call: Call,
    commits: Sequence[CommitInfo],
    known: Sequence[CommitInfo],
    times: Mapping[CommitId, int],
    *,
    several: bool,
) -> Table:
    metrics = call.args.metric or _frequent_metrics(commits)
    chosen = (
        Column("", style=BLUE),
        *columns(
            "commit",
            "step",
            "run",
            "tags",
            "time",
            "forgotten",
            "logical",
            "new",
            "without",
            "lossy",
        ),
        *(
            Column(name, "metric", spare=i > 0 and not call.args.metric)
            for i, name in enumerate(metrics)
        ),
        *columns("message"),
    )
    rows = [
        (
            line,
            info.id,
            info.step,
            info.run if several else None,
            info.tags,
            info.time_ns,
            times.get(info.id),
            info.logical_bytes,
            info.new_bytes,
            info.thinned,
            [f"{glob}: {dtype}" for glob, dtype in info.cast.items()],
            *map(info.metrics.get, metrics),
            first_line(info.message),
        )
        for line, info in zip(_graph(call, commits, known), commits, strict=True)
    ]
    return Table(chosen, rows).without_empty(
        "", "step", "run", "tags", "forgotten", "without", "lossy", "message"
    )


def _graph(
    call: Call, commits: Sequence[CommitInfo], known: Sequence[CommitInfo]
) -> Iterable[str | None]:
    """The lineage beside each commit: if asked for, else on a terminal where it branches."""
    wanted = call.args.graph
    if wanted or (wanted is None and call.screen.terminal and not call.args.sort):
        parents = {info.id: info.parents for info in known}
        lines = draw(shown([info.id for info in commits], parents))
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


@dataclass(frozen=True, slots=True)
class Node:
    """A commit to draw. `parents` are among the commits drawn; `cut` says that it has others, which
    are not."""

    id: CommitId
    parents: tuple[CommitId, ...]
    cut: bool = False


def shown(order: Sequence[CommitId], parents: Mapping[CommitId, Sequence[CommitId]]) -> list[Node]:
    """The commits of `order` as nodes. A parent that is not among them is replaced by its nearest
    ancestors that are.

    `parents` may know more commits than `order` has, in any order.
    """
    drawn = frozenset(order)
    nearest: dict[CommitId, tuple[CommitId, ...]] = {}
    for commit in TopologicalSorter(parents).static_order():
        found = (
            near
            for parent in parents.get(commit, ())
            for near in ((parent,) if parent in drawn else nearest[parent])
        )
        nearest[commit] = tuple(dict.fromkeys(found))
    return [
        Node(commit, nearest[commit], cut=bool(parents.get(commit)) and not nearest[commit])
        for commit in order
    ]


def draw(nodes: Sequence[Node]) -> list[str]:
    """The lineage beside a log, newest first. One line per node: `●` a commit, `○` one whose
    parents are not drawn.

    A lane is a column with a line down to a commit that follows. A commit takes the leftmost lane
    that leads to it, and the other such lanes end there (`╯`). Its second and later parents open
    lanes (`╮`) or join the lanes that lead to them (`├`, `┤`).
    """
    lanes: list[CommitId | None] = []
    return [_line(node, lanes) for node in nodes]


def _line(node: Node, lanes: list[CommitId | None]) -> str:
    """Draw `node` and move `lanes` on below it."""
    above = [wanted is not None for wanted in lanes]
    arriving = [i for i, wanted in enumerate(lanes) if wanted == node.id]
    here = arriving[0] if arriving else _free(lanes, 0)
    for i in arriving:
        lanes[i] = None
    lanes[here] = node.parents[0] if node.parents else None
    ends = {here, *arriving}
    for parent in node.parents[1:]:
        at = lanes.index(parent) if parent in lanes else _free(lanes, here + 1)
        lanes[at] = parent
        ends.add(at)
    above += [False] * (len(lanes) - len(above))
    line = ""
    for i, wanted in enumerate(lanes):
        left, right = min(ends) < i <= max(ends), min(ends) <= i < max(ends)
        lane = _LANES[8 * above[i] + 4 * (wanted is not None) + 2 * left + right]
        line += ("○" if node.cut else "●") if i == here else lane
        line += "─" if right else " "
    while lanes and lanes[-1] is None:
        lanes.pop()
    return line.rstrip()


def _free(lanes: list[CommitId | None], first: int) -> int:
    """The first free lane from `first` on."""
    for at in range(first, len(lanes)):
        if lanes[at] is None:
            return at
    lanes.append(None)
    return len(lanes) - 1
