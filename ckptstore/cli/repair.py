"""`ckptstore repair`: say what can be done about damage, and with --apply do it."""

from argparse import Namespace
from contextlib import ExitStack, closing
from typing import Any

from ckptstore.cli.exits import Exit
from ckptstore.cli.fsck import exit_for, finding_document
from ckptstore.cli.progress import progress
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import standing
from ckptstore.maintenance.check.report import parse_share
from ckptstore.maintenance.repair.repair import Repaired, repair
from ckptstore.storage.contract import Storage
from ckptstore.storage.registry import open_storage


def run(args: Namespace, screen: Screen) -> Exit:
    share = parse_share(args.read_data) if args.read_data else None
    with standing(args) as offline_store, ExitStack() as stack:
        mirrors: list[Storage] = [
            stack.enter_context(closing(open_storage(place, read_only=True)))
            for place in args.mirrors
        ]
        with progress(screen) as shown:
            done = repair(
                offline_store, mirrors=mirrors, apply=args.apply, share=share, progress=shown
            )
        if screen.json:
            screen.document({"store": offline_store.storage.url, **_document(done)})
        else:
            _show(done, screen)
    return exit_for(done.after)


def _show(done: Repaired, screen: Screen) -> None:
    for line in str(done).splitlines():
        screen.line(line)


def _document(done: Repaired) -> dict[str, Any]:
    return {
        "applied": not done.dry_run,
        "actions": [
            {"action": type(action).__name__, "what": str(action)} for action in done.actions
        ],
        "hopeless": [finding_document(finding) for finding in done.plan.unrepairable],
        "findings": [finding_document(finding) for finding in done.after.findings],
        "damaged_commits": sorted(done.after.damaged_commits),
    }
