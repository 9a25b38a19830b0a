"""`ckptstore fsck`: look for damage as far as asked, and say what is hit and what to do."""

from argparse import Namespace
from typing import Any

from ckptstore.cli.exits import Exit
from ckptstore.cli.progress import progress
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import standing
from ckptstore.maintenance.check.fsck import fsck
from ckptstore.maintenance.check.report import Finding, Level, Report, Severity, parse_share

LEVELS = {level.name.lower(): level for level in Level}


def run(args: Namespace, screen: Screen) -> Exit:
    share = parse_share(args.read_data) if args.read_data else None
    with standing(args) as offline_store:
        with progress(screen) as shown:
            report = fsck(offline_store, level=LEVELS[args.level], share=share, progress=shown)
        if screen.json:
            screen.document({"store": offline_store.storage.url, **document(report)})
        else:
            show(report, screen)
    return exit_for(report)


def exit_for(report: Report) -> Exit:
    """Damage, and an index that lies, are for somebody to look at; notes are not."""
    return (
        Exit.OK
        if all(finding.severity is Severity.NOTE for finding in report.findings)
        else Exit.DAMAGED
    )


def show(report: Report, screen: Screen) -> None:
    """The findings, the commits they hit, and how far this looked."""
    for line in str(report).splitlines():
        screen.line(line)


def document(report: Report) -> dict[str, Any]:
    """The report for a program."""
    looked = report.looked
    return {
        "level": report.level.name.lower(),
        "damaged": report.damaged,
        "findings": [finding_document(finding) for finding in report.findings],
        "damaged_commits": sorted(report.damaged_commits),
        "entries": looked.entries,
        "commits": looked.commits,
        "packs": looked.packs,
        "chunks": looked.chunks,
        "read_bytes": looked.data_bytes,
        "stored_bytes": looked.stored_bytes,
    }


def finding_document(finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity.value,
        "kind": finding.kind.value,
        "what": finding.what,
        "next": finding.next,
        "key": finding.key or None,
        "entry": finding.entry or None,
        "pack": finding.pack,
        "chunk": finding.chunk.hex() if finding.chunk else None,
        "leaf": finding.leaf or None,
        "commits": list(finding.commits),
    }
