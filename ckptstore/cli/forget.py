"""`ckptstore forget`: which commits go, which stay, and why."""

from argparse import Namespace
from typing import TYPE_CHECKING

from ckptstore.cli import timestamps
from ckptstore.cli.exits import Exit, UsageError
from ckptstore.cli.format import short, step_text
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.cli.table import Column, Table
from ckptstore.core.text import count_text
from ckptstore.maintenance.retention import (
    KeepBest,
    KeepEverySteps,
    KeepLast,
    KeepPeriods,
    KeepWithin,
    Period,
    Policy,
    forget_by_policy,
    forget_commits,
)
from ckptstore.repository.resolve_ref import find_id

if TYPE_CHECKING:
    from ckptstore.maintenance.retention import ForgetPlan

COMMAND = "ckptstore forget"
PERIODS: tuple[Period, ...] = ("hourly", "daily", "weekly", "monthly")


def run(args: Namespace, screen: Screen) -> Exit:
    policies = _policies(args)
    if policies and args.refs:
        raise UsageError(
            "--keep options say what stays, REFs what goes: give one or the other", COMMAND
        )
    with opened(args, *args.refs) as store:
        if not args.dry_run:
            store.check_writable()
        if args.refs:
            queries = store.queries()
            plan = forget_commits(
                store, [find_id(queries, ref, args.run) for ref in args.refs], dry_run=args.dry_run
            )
        else:
            plan = forget_by_policy(store, policies, run=args.run, dry_run=args.dry_run)
        if not args.dry_run:
            store.follow()
        if screen.json:
            screen.document({"store": store.url, "dry_run": args.dry_run, **_document(plan)})
            return Exit.OK
    _print(plan, screen, dry_run=args.dry_run)
    return Exit.OK


def _policies(args: Namespace) -> list[Policy]:
    policies: list[Policy] = []
    if args.keep_last is not None:
        policies.append(KeepLast(args.keep_last))
    if args.keep_every_steps is not None:
        policies.append(KeepEverySteps(args.keep_every_steps))
    policies.extend(_best(words) for words in args.keep_best)
    if args.keep_within is not None:
        policies.append(KeepWithin(_span_s(args.keep_within)))
    for period in PERIODS:
        if (n := getattr(args, f"keep_{period}")) is not None:
            policies.append(KeepPeriods(period, n))
    return policies


def _best(words: list[str]) -> KeepBest:
    metric, *count = words
    if len(count) > 1 or not all(n.isdecimal() for n in count):
        raise UsageError(
            f"--keep-best takes METRIC or METRIC:max and a count, not {' '.join(words)!r}", COMMAND
        )
    name, _, order = metric.rpartition(":")
    known = bool(name) and order in ("min", "max")
    return KeepBest(
        name if known else metric,
        maximize=known and order == "max",
        n=int(count[0]) if count else 1,
    )


def _span_s(text: str) -> int:
    # A span is read as a moment so long before now; seen from 0 it is the span itself.
    seconds = -timestamps.parse_moment(text, 0) // timestamps.SECOND_NS
    if seconds <= 0:
        raise UsageError(
            f"--keep-within takes a span such as 90min, 12h, 7d, not {text!r}", COMMAND
        )
    return seconds


def _print(plan: "ForgetPlan", screen: Screen, *, dry_run: bool) -> None:
    columns = (
        Column("", style="bold"),
        Column("commit", style="yellow"),
        Column("step", right=True),
        Column("run"),
        Column("time"),
        Column("because", fit="cut"),
    )
    rows = tuple(
        (
            "keep" if reasons else "forget",
            short(commit),
            step_text(row.step),
            row.run,
            timestamps.utc_text(row.time_ns),
            ", ".join(reasons),
        )
        for commit, row, reasons in plan.decisions
    )
    if rows:
        screen.table(Table(columns, rows))
    verb = "would forget" if dry_run else "forgot"
    kept = f", {count_text(len(plan.kept), 'commit')} kept" if plan.kept else ""
    screen.line(f"{verb} {count_text(len(plan.forgotten), 'commit')}{kept}")
    if plan.forgotten and not dry_run:
        screen.hint(
            "`ckptstore gc` frees their bytes; until then `ckptstore undelete` brings them back"
        )


def _document(plan: "ForgetPlan") -> dict[str, object]:
    return {
        "entry": plan.n,
        "reason": plan.reason,
        "commits": [
            {
                "commit": commit,
                "run": row.run,
                "step": row.step,
                "kept": bool(reasons),
                "reasons": list(reasons),
            }
            for commit, row, reasons in plan.decisions
        ],
    }
