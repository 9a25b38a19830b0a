"""`ckptstore repair`: say what can be done about damage, and with --apply do it."""

from argparse import Namespace
from contextlib import ExitStack, closing
from typing import Any

from ckptstore.cli.exits import Exit
from ckptstore.cli.fsck import exit_for, finding_document
from ckptstore.cli.progress import progress
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import standing
from ckptstore.core.text import count_text
from ckptstore.maintenance.check.report import parse_share
from ckptstore.maintenance.repair.repair import (
    Action,
    Mark,
    PutBack,
    Rebuild,
    Repaired,
    SetAside,
    WriteConfig,
    repair,
)
from ckptstore.maintenance.repair.rescue import CopyTwin, SavePacks
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
            screen.document(
                {"store": offline_store.storage.url, **_document(done, apply=args.apply)}
            )
        else:
            _show(done, screen, apply=args.apply)
    return exit_for(done.after)


def _show(done: Repaired, screen: Screen, *, apply: bool) -> None:
    for action in done.applied if apply else done.plan.actions:
        screen.line(f"{'done' if apply else 'would'}: {text_of(action)}")
    if done.plan.more and not apply:
        screen.line("then: what the whole log lists is looked at, and repaired as well")
    for finding in done.after.findings if apply else done.plan.unrepairable:
        screen.line(f"{finding.severity}: {finding.what}")
        screen.line(f"    next: {finding.next}")
    if not done.plan.actions and not done.applied:
        screen.line(
            "there is nothing that could be done"
            if done.after.damaged
            else "there is nothing to repair"
        )
    elif not apply:
        screen.line("nothing was changed: add --apply to do it")


def text_of(action: Action) -> str:
    """An action in words, with what is certain about it."""
    match action:
        case WriteConfig(config, certain):
            if certain:
                return "write ckptstore.json as it was"
            return (
                f"write ckptstore.json anew: store {config.store}, chunk size "
                f"{config.chunk_bytes}, codec {config.codec}; "
                f"certain is the store's id, and that every commit can be read so"
            )
        case PutBack(mended):
            return (
                f"put back {mended.key} from {mended.origin}; certain: its hash is the one "
                "that "
                "others name"
            )
        case SetAside(key, why):
            return f"move {key} to quarantine/: {why}"
        case CopyTwin(source, target):
            return f"copy {source} to {target}"
        case SavePacks(damaged, sources, lost):
            aside = (
                f", and move {', '.join(name for _, name in damaged)} to quarantine/"
                if damaged
                else ""
            )
            gone = (
                f"; {count_text(len(lost), 'chunk')} that commits need could not be found"
                if lost
                else ""
            )
            return f"write {count_text(len(sources), 'verified chunk')} into new packs{aside}{gone}"
        case Mark(commits):
            named = ", ".join(commit[:12] for commit in commits)
            return (
                f"mark as damaged: {named}" if commits else "take back the marks of damaged commits"
            )
        case Rebuild(why):
            return f"make this host's indexes anew: {why}"


def _document(done: Repaired, *, apply: bool) -> dict[str, Any]:
    actions = done.applied if apply else done.plan.actions
    return {
        "applied": apply,
        "actions": [
            {"action": type(action).__name__, "what": text_of(action)} for action in actions
        ],
        "hopeless": [finding_document(finding) for finding in done.plan.unrepairable],
        "findings": [finding_document(finding) for finding in done.after.findings],
        "damaged_commits": sorted(done.after.damaged_commits),
    }
