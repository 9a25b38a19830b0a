"""`ckptstore plot`: metrics, sizes, tensors and differences as charts."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from ckptstore.cli.call import Answer, Call, UsageError
from ckptstore.cli.screen import Part
from ckptstore.errors import NotFound
from ckptstore.plugin.handles import StoreHandle
from ckptstore.plugin.maintenance import Maintenance
from ckptstore.plugin.model import CommitInfo
from ckptstore.plugins.analysis.charts import BARS, LINES, Chart, Series, check_file, draw, text_of
from ckptstore.plugins.analysis.history_command import THREADS

if TYPE_CHECKING:
    from ckptstore.plugins.analysis.history import History

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def plot(call: Call) -> Answer:
    args = call.args
    if args.output is not None:
        check_file(args.output)
    elif call.screen.terminal is None and not call.screen.json:
        raise UsageError("-o FILE is missing: standard output is no terminal")
    chart = _KINDS[args.kind](call, call.open())
    document = {
        "title": chart.title,
        "x": chart.x,
        "y": chart.y,
        "lines": chart.lines,
        "bars": [{"name": name, "value": value} for name, value in chart.bars],
    }
    page: list[Part] = []
    if args.output is not None:
        draw(chart, args.output)
        page.append(f"{chart.title}: {args.output}")
    elif call.screen.terminal is not None:
        page.append(text_of(chart, call.screen.terminal.width))
    return Answer(document, page)


def _metrics(call: Call, store: StoreHandle) -> Chart:
    names = call.args.words
    found: dict[str, list[tuple[float, float]]] = {}
    commits = _commits(call, store)
    several = len({info.run for info in commits}) > 1
    for info in commits:
        for name, value in info.metrics.items():
            if info.step is not None and math.isfinite(value) and (not names or name in names):
                label = f"{info.run}: {name}" if several else name
                found.setdefault(label, []).append((info.step, value))
    return Chart(f"metrics {_of_runs(commits)}", "step", "", _lines(found, call), log=call.args.log)


def _size(call: Call, store: StoreHandle) -> Chart:
    if words := call.args.words:
        given = " ".join(map(repr, words))
        raise UsageError(f"plot size takes no further words, not {given}")
    commits = _commits(call, store)
    columns = {
        "logical": list(accumulate(info.logical_bytes for info in commits)),
        "written": list(accumulate(info.new_bytes for info in commits)),
    }
    most = max((column[-1] for column in columns.values() if column), default=0)
    unit, nbytes = next((each for each in UNITS if most >= each[1]), UNITS[-1])
    found = {
        name: [(number, size / nbytes) for number, size in enumerate(column, 1)]
        for name, column in columns.items()
    }
    title = f"size of all commits {_of_runs(commits)}"
    return Chart(title, "commit", unit, _lines(found, call), log=call.args.log)


def _tensor(call: Call, store: StoreHandle) -> Chart:
    args = call.args
    found: dict[str, list[tuple[float, float]]] = {}
    history = _measured(call, store, select=args.words)
    run = history[0].run
    for row in history:
        value = getattr(row, args.of)
        if row.step is not None and value is not None and math.isfinite(value):
            found.setdefault(row.leaf, []).append((row.step, value))
    leaf = next(iter(found)) if len(found) == 1 else "tensors"
    lines = _lines(found, call, f"of run {run}")
    return Chart(f"{args.of} of {leaf} of run {run}", "step", args.of, lines, log=args.log)


def _diff(call: Call, store: StoreHandle) -> Chart:
    args = call.args
    if len(args.words) != 2:
        raise UsageError("plot diff takes two commits: plot diff A B")
    rows = _measured(call, store, refs=args.words)
    ends = list(dict.fromkeys(row.commit for row in rows))
    norms = {row.leaf: row.norm for row in rows if row.commit == ends[0]}
    moved = [
        (row.leaf, row.drift / norms[row.leaf])
        for row in rows
        if row.commit == ends[-1] and row.drift and norms.get(row.leaf)
    ]
    bars = sorted((bar for bar in moved if math.isfinite(bar[1])), key=lambda bar: -bar[1])
    if not bars:
        raise NotFound("no tensor differs in its numbers between the two commits")
    runs = " and ".join(dict.fromkeys(row.run for row in rows))
    title = f"largest changes from {args.words[0]} to {args.words[1]} of run {runs}"
    return Chart(title, "norm of the change / norm", "", bars=bars[:BARS], log=args.log)


def _measured(call: Call, store: StoreHandle, **what: object) -> "History":
    run = call.args.runs[0] if call.args.runs else None
    doing = "measuring tensors"
    return call.carry_out(Maintenance.history, store, doing, THREADS, run=run, **what)


_KINDS: dict[str, Callable[[Call, StoreHandle], Chart]] = {
    "metrics": _metrics,
    "size": _size,
    "tensor": _tensor,
    "diff": _diff,
}


def _commits(call: Call, store: StoreHandle) -> list[CommitInfo]:
    """The commits of the chosen runs, oldest first."""
    infos = store.queries().log()[::-1]
    return [info for info in infos if not call.args.runs or info.run in call.args.runs]


def _of_runs(commits: Iterable[CommitInfo]) -> str:
    runs = {info.run for info in commits}
    return f"of run {runs.pop()}" if len(runs) == 1 else f"of {len(runs)} runs"


def _lines(
    found: Mapping[str, Sequence[tuple[float, float]]], call: Call, where: str = "in this store"
) -> list[Series]:
    """Lines without what the axis does not have, at most as many as people can tell apart."""
    lines = [
        Series(name, *_columns(sorted(points)))
        for name, all_points in found.items()
        if (points := [point for point in all_points if point[1] > 0 or not call.args.log])
    ]
    if not lines:
        raise NotFound(
            f"there is nothing to plot: no {call.args.kind} of these names with a step {where}"
        )
    if len(lines) > LINES:
        call.screen.complain(f"the first {LINES} of {len(lines)} lines are drawn; name fewer")
    return lines[:LINES]


def _columns(points: Iterable[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    x, y = zip(*points, strict=True)
    return x, y
