"""`ckptstore history`: how tensors moved over the commits of a run."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptstore.cli.call import Answer, Call
from ckptstore.cli.screen import Part, columns
from ckptstore.plugin.maintenance import Maintenance
from ckptstore.plugin.text import Column, Table, count_text

if TYPE_CHECKING:
    from ckptstore.plugins.analysis.history import HistoryRow

THREADS = 2

_NUMBERS = ("norm", "mean", "std", "min", "max")
_COUNTS = ("zeros", "nan", "inf")


def history(call: Call) -> Answer:
    args = call.args
    found = call.carry_out(Maintenance.history, call.open(*args.refs), "measuring tensors", THREADS)
    commits = list(dict.fromkeys(row.commit for row in found))
    where = f"of run {', '.join(dict.fromkeys(row.run for row in found))}"
    if args.nan:
        bad = found.first_bad()
        text = f"{count_text(len(commits), 'commit')} {where}"
        page: list[Part] = [_table(bad), text] if bad else [f"no NaN and no infinity in {text}"]
        return Answer({"commits": len(commits), "rows": bad}, page)
    last = set(commits[-args.limit :] if args.limit else commits)
    rows = [row for row in found if row.commit in last]
    text = f"{count_text(len(last), 'commit')} {where}"
    return Answer({"commits": len(last), "rows": rows}, [_table(rows), text])


def _table(rows: Iterable["HistoryRow"]) -> Table:
    drifts = (Column("drift"), Column("from first"))
    counts = (Column(name, "count") for name in _COUNTS)
    head = columns("step", "commit", "path")
    return Table(
        (*head, *map(Column, _NUMBERS), *counts, *drifts),
        [
            (
                row.step,
                row.commit,
                row.leaf,
                *(f"{getattr(row, name):.4g}" for name in _NUMBERS),
                *(getattr(row, name) for name in _COUNTS),
                *("" if x is None else f"{x:.3g}" for x in (row.drift, row.drift_first)),
            )
            for row in rows
        ],
    )
