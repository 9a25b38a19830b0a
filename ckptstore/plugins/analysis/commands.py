"""`parted`, `bisect` and `average`: where two runs part, which commit was the first bad one, and
commits made of others."""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptstore.cli.call import VARIABLE, Answer, Call, UsageError
from ckptstore.cli.commits import commit_document, commit_text, find_in_one_run, short, size_text
from ckptstore.cli.labels import metrics_of
from ckptstore.cli.screen import Part, columns, fields_of
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.plugin.files import check_path, replace_file
from ckptstore.plugin.model import CommitId
from ckptstore.plugin.text import Column, Table, count_text
from ckptstore.plugins.reports.difference import MARKS

if TYPE_CHECKING:
    from ckptstore.plugin.snapshots import Snapshot
    from ckptstore.plugins.analysis.averages import Factors
    from ckptstore.plugins.analysis.runs import NotCompared

REF = "CKPTSTORE_REF"
"""Where a command of `bisect --command` finds the commit to look at."""

STDERR = 2
"""Its descriptor."""

VERDICTS = range(125)
"""The exit codes by which a command says good or bad; beyond, a shell says that it failed."""


def parted(call: Call) -> Answer:
    args = call.args
    store = call.training_store(call.open())
    from ckptstore.plugins.analysis.runs import distance, parting

    with call.screen.progress("comparing commits"):
        found = parting(store, args.a, args.b, select=args.select or "*")
    equal = found.equal_steps
    text = f"equal at {count_text(len(equal), 'step')}" if equal else "equal at no step"
    if len(equal) > 1:
        text += f", {equal[0]} to {equal[-1]}"
    left = [_left_out(each) for each in found.thinned]
    thinned = [
        fields_of(each, "paths", "run", "steps", "nearest", "nearest_step")
        for each in found.thinned
    ]
    if found.a is None or found.b is None:
        none = {"equal_steps": equal, "step": None, "thinned": thinned}
        return Answer(none, [f"{args.a} and {args.b} are {text}", *left])
    ends = store.checkout(found.a.id), store.checkout(found.b.id)
    rows, changes = [], []
    for number, change in enumerate(found.difference.changes):
        measured = number < args.limit and change.change == "changed"
        far = distance(*ends, change.path) if measured else None
        numbers = {name: getattr(far, name, None) for name in ("largest", "relative")}
        said = fields_of(change, "path", "change", "raw_bytes", "changed_bytes")
        changes.append({**said, **numbers})
        if number < args.limit:
            written = ("" if value is None else f"{value:.3g}" for value in numbers.values())
            rows.append((MARKS[change.change], change.path, str(change), *written))
    page: list[Part] = [f"{args.a} and {args.b} are {text}, and differ from step {found.a.step} on"]
    page.append(Table((*columns("", "path", "what"), Column("largest"), Column("relative")), rows))
    if len(changes) > len(rows):
        page.append(f"and {count_text(len(changes) - len(rows), 'leaf', 'leaves')} more, in order")
    page += left
    page.append(f"ckptstore diff {short(found.a.id)} {short(found.b.id)}")
    document = {
        "equal_steps": equal,
        "step": found.a.step,
        "a": commit_document(found.a),
        "b": commit_document(found.b),
        "changes": changes,
        "thinned": thinned,
    }
    return Answer(document, page)


def _left_out(found: "NotCompared") -> str:
    """What of the runs could not be compared, and where it is."""
    first, *others = found.paths
    leaves = f"{first} and {count_text(len(others), 'other')}" if others else first
    at = f"step {found.steps[0]}"
    if len(found.steps) > 1:
        at = f"{len(found.steps)} steps, {found.steps[0]} to {found.steps[-1]}"
    where = "no other commit of the run has it"
    if found.nearest:
        nearest = f"{short(found.nearest)} (step {found.nearest_step})"
        where = f"the nearest commit that has it is {nearest}"
    return f"not comparable at {at}: {leaves}, thinned away in run {found.run}; {where}"


def bisect(call: Call) -> Answer:
    args = call.args
    if args.good is None:
        raise UsageError("--good REF is missing")
    if (args.above is None) != (args.leaf is None):
        raise UsageError("--leaf and --above go together")
    if sum((args.command_line is not None, args.nan, args.leaf is not None)) != 1:
        raise UsageError("give one of --command, --nan, --leaf")
    handle = call.open()
    store = call.training_store(handle)
    from ckptstore.plugin.model import parse_commit_id
    from ckptstore.plugins.analysis.runs import bisect as search

    good, bad = find_in_one_run(call, handle, (args.good, args.bad))
    kept = Path(args.verdicts) if args.verdicts else None
    if kept:
        check_path(kept)
    known: dict[CommitId, bool] = {}
    if kept and kept.exists():
        known = {parse_commit_id(commit): bool(bad) for commit, bad in _read(kept).items()}
    is_bad, said = _question(call), []

    def ask(snapshot: "Snapshot") -> bool:
        with call.screen.progress(f"looking at {_named(snapshot)}"):
            bad = is_bad(snapshot)
        said.append(f"{_named(snapshot)} is {'bad' if bad else 'good'}")
        if kept:
            _keep(kept, {**known, snapshot.id: bad})
        return bad

    found = search(store, good.id, bad.id, ask, known=known)
    first, last = (store.checkout(commit) for commit in (found.first_bad, found.last_good))
    page = [*said, f"the first bad commit is {_named(first)}; the last good one {_named(last)}"]
    document = {
        "first_bad": first.id,
        "last_good": last.id,
        "looked_at": found.looked_at,
        "verdicts": {commit: "bad" if bad else "good" for commit, bad in known.items()},
    }
    return Answer(document, page)


def average(call: Call) -> Answer:
    args = call.args
    metrics = metrics_of(args.metric)
    handle = call.open(*args.refs)
    store = call.training_store(handle)
    from ckptstore.plugins.analysis.averages import RUN, combine, mean, moving, spherical, weighted

    summands = find_in_one_run(call, handle, args.refs)
    refs = [info.id for info in summands]
    factors: Sequence[float] | Factors = mean(max(len(refs), 1))
    if args.weights is not None:
        factors = weighted(_numbers(args.weights, "--weights"))
    elif args.factors is not None:
        factors = _numbers(args.factors, "--factors")
    elif args.ema is not None:
        factors = moving(len(refs), *_numbers(args.ema, "--ema", 1))
    elif args.slerp is not None:
        factors = spherical(*_numbers(args.slerp, "--slerp", 1))
    with call.screen.progress(f"adding {len(refs)} commits"):
        made = combine(
            store,
            refs,
            factors,
            select=args.select or "*",
            step=args.step,
            tag=args.tag,
            message=args.message,
            metrics=metrics,
            run=args.into or RUN,
        )
    document = {
        "commit": made.id,
        **fields_of(made, "run", "step", "tags", "parents", "logical_bytes", "new_bytes"),
    }
    parents = ", ".join(map(commit_text, summands))
    return Answer(
        document, [f"{short(made.id)} of run {made.run}, from {parents}: {size_text(made)}"]
    )


def _numbers(text: str, option: str, count: int | None = None) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or (count is not None and len(found) != count):
        wanted = "a number" if count == 1 else "numbers with commas between them, such as 1,2,1"
        raise UsageError(f"{option} {text!r}: wanted {wanted}")
    return found


def _read(path: Path) -> dict[str, bool]:
    try:
        found = json.loads(path.read_bytes())
        return dict(found)
    except (OSError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"{path} has no verdicts of an earlier bisection ({error}); name another file"
        ) from error


def _keep(path: Path, verdicts: dict[CommitId, bool]) -> None:
    try:
        replace_file(path, json.dumps(verdicts).encode())
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot take the verdicts ({error.strerror}); name another file"
        ) from error


def _named(snapshot: "Snapshot") -> str:
    step = "" if snapshot.step is None else f" (step {snapshot.step})"
    return f"{short(snapshot.id)}{step} of run {snapshot.run}"


def _question(call: Call) -> "Callable[[Snapshot], bool]":
    from ckptstore.plugin.writing import is_floating
    from ckptstore.plugins.analysis.runs import bad_number, norm

    args, place = call.args, call.url

    def command_fails(snapshot: "Snapshot") -> bool:
        environment = {**os.environ, VARIABLE: place, REF: snapshot.id}
        out = STDERR if call.screen.json else None  # standard output has the document alone
        with call.screen.left_to_others():
            done = subprocess.run(
                args.command_line, shell=True, env=environment, stdout=out, check=False
            )
        if done.returncode not in VERDICTS:
            raise InvalidInput(
                f"the command ended with {done.returncode} for {_named(snapshot)}, which is no "
                "verdict: 0 means good, 1 to 124 bad; --verdicts FILE keeps those so far"
            )
        return done.returncode != 0

    if args.command_line is not None:
        return command_fails
    if args.nan:
        return lambda snapshot: bad_number(snapshot) is not None

    def is_larger(snapshot: "Snapshot") -> bool:
        leaves = [leaf for leaf in snapshot.leaves(args.leaf) if is_floating(leaf.dtype)]
        if not leaves:
            raise NotFound(
                f"{_named(snapshot)} has no tensor of floats that matches {args.leaf!r}, so no "
                f"verdict; `ckptstore ls {short(snapshot.id)}` lists its leaves"
            )
        for leaf in leaves:
            if leaf.gone:
                snapshot.read(leaf.path)  # raises Thinned, with the nearest commit that has it
        return not norm(snapshot, args.leaf) <= args.above

    return is_larger
