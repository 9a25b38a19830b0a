"""`ckptstore gc`: what dies, what moves together, what is freed now and what later."""

from argparse import Namespace
from typing import Any

from ckptstore.cli.exits import Exit
from ckptstore.cli.progress import progress
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.cli.table import Column, Table
from ckptstore.core.text import bytes_text, count_text
from ckptstore.maintenance.gc.collect import GcOptions, GcReport, collect
from ckptstore.maintenance.gc.plan import GcPlan


def run(args: Namespace, screen: Screen) -> Exit:
    options = GcOptions(args.max_unused, args.max_repack, args.force)
    with opened(args) as store:
        with progress(screen) as shown:
            report = collect(store, options, dry_run=args.dry_run, progress=shown)
        if not args.dry_run:
            store.follow()
        if screen.json:
            document: dict[str, Any] = {
                "store": store.url,
                "dry_run": args.dry_run,
                "plan": _plan_document(report.plan),
            }
            screen.document(
                document if args.dry_run else document | {"done": _done_document(report)}
            )
    if not screen.json:
        _print_plan(report.plan, screen)
        if not args.dry_run:
            _print_done(report, screen)
    damaged = report.plan.missing or report.plan.unreadable or report.damaged
    return Exit.DAMAGED if damaged else Exit.OK


def _print_plan(plan: GcPlan, screen: Screen) -> None:
    now = [pack for pack in plan.doomed if not pack.waits]
    sources = [source for copy in plan.copies for source in copy.sources]
    steps = [
        ("declare over", len(plan.over), "session", None, "their writers are gone"),
        ("purge", len(plan.purge), "commit", None, "forgotten"),
        ("condemn", len(plan.condemn), "pack", None, "no commit needs them"),
        ("delete", len(now), "pack", sum(pack.bytes for pack in now), ""),
        (
            "delete",
            len(plan.orphans),
            "orphan",
            sum(orphan.bytes for orphan in plan.orphans),
            "no log entry lists them",
        ),
        (
            "copy from",
            len(sources),
            "pack",
            sum(source.stored_bytes for source in sources),
            "sparse or small",
        ),
        ("copy to", len(plan.copies), "new pack", plan.copied_bytes, ""),
    ]
    columns = (
        Column("step", style="bold"),
        Column("how many", right=True),
        Column("bytes", right=True),
        Column("why", fit="cut"),
    )
    rows = tuple(
        (step, count_text(n, noun), "" if size is None else bytes_text(size), why)
        for step, n, noun, size, why in steps
        if n
    )
    if rows:
        screen.table(Table(columns, rows))
    screen.line(
        f"frees {bytes_text(plan.freed_now_bytes)} now, writes {bytes_text(plan.copied_bytes)}"
    )
    for sessions, size in plan.freed_later_bytes.items():
        screen.line(
            f"frees {bytes_text(size)} when {_sessions_text(sessions)} (`ckptstore sessions`)"
        )
    if plan.full:
        screen.line("the disk is full, so commits in flight are not waited for")
    if plan.missing:
        screen.complain(
            f"{count_text(plan.missing, 'needed chunk')} in no live pack; condemned packs stay, "
            "run `ckptstore fsck`"
        )
    for pack in plan.unreadable:
        screen.complain(
            f"the footer of pack {pack} cannot be read; it stays as it is, run `ckptstore fsck`"
        )


def _print_done(report: GcReport, screen: Screen) -> None:
    deleted = (
        f"{count_text(len(report.deleted), 'pack')} and {count_text(report.orphans, 'orphan')}"
    )
    screen.line(
        f"freed {bytes_text(report.freed_bytes)} ({deleted}), wrote "
        f"{bytes_text(report.copied_bytes)}"
    )
    for pack in report.damaged:
        screen.complain(
            f"pack {pack} is damaged and was not copied; run `ckptstore fsck --read-data`"
        )
    if report.stopped:
        screen.complain(f"stopped copying: {report.stopped}")


def _sessions_text(sessions: tuple[str, ...]) -> str:
    if len(sessions) == 1:
        return f"session {sessions[0]} ends"
    return f"sessions {', '.join(sessions)} end"


def _plan_document(plan: GcPlan) -> dict[str, Any]:
    return {
        "mark": plan.mark,
        "over": list(plan.over),
        "purge": list(plan.purge),
        "packs": [
            {
                "pack": pack.id,
                "bytes": pack.bytes,
                "condemned": pack.condemned,
                "waits": list(pack.waits),
            }
            for pack in plan.doomed
        ],
        "orphans": [orphan._asdict() for orphan in plan.orphans],
        "copies": [
            {
                "from": [source.id for source in copy.sources],
                "bytes": copy.bytes,
                "freed_bytes": copy.freed_bytes,
            }
            for copy in plan.copies
        ],
        "freed_now_bytes": plan.freed_now_bytes,
        "freed_later": [
            {"sessions": list(sessions), "bytes": size}
            for sessions, size in plan.freed_later_bytes.items()
        ],
        "copied_bytes": plan.copied_bytes,
        "missing_chunks": plan.missing,
        "unreadable": list(plan.unreadable),
        "full": plan.full,
    }


def _done_document(report: GcReport) -> dict[str, Any]:
    return {
        "freed_bytes": report.freed_bytes,
        "copied_bytes": report.copied_bytes,
        "condemned_packs": report.condemned,
        "deleted": list(report.deleted),
        "deleted_orphans": report.orphans,
        "purged": list(report.purged),
        "over": list(report.over),
        "damaged": list(report.damaged),
        "stopped": report.stopped or None,
    }
