"""`ckptstore fsck`, `repair`: find damage and mend it."""

from contextlib import closing
from dataclasses import fields

from ckptstore.cli.call import Answer, Call, Exit, NoStore
from ckptstore.cli.screen import fields_of
from ckptstore.errors import NotFound
from ckptstore.plugin.checks import (
    Finding,
    Report,
    Severity,
    check_source,
    fsck,
    parse_level,
    parse_shard,
    parse_share,
    repair,
)
from ckptstore.plugin.storage import Storage, open_storage


def fsck_store(call: Call) -> Answer:
    args = call.args
    share, shard = parse_share(args.read_data), parse_shard(args.shard)
    store = call.open_offline()
    spread = None
    if args.on:
        from ckptstore.plugins.engine.work import Place, spread_on

        spread = spread_on(call.engine(), Place.of(store))
    with call.screen.progress() as shown:
        report = fsck(
            store,
            level=parse_level(args.level),
            share=share,
            shard=shard,
            spread=spread,
            progress=shown,
        )
    document = {
        "level": report.level.name.lower(),
        "damaged": report.damaged,
        "findings": _findings(report.findings),
        "damaged_commits": sorted(report.damaged_commits),
        **fields_of(report.looked, "entries", "commits", "packs", "chunks", "stored_bytes"),
        "read_bytes": report.looked.data_bytes,
    }
    return Answer(document, [report], code=_code(report))


def repair_store(call: Call) -> Answer:
    args = call.args
    share = parse_share(args.read_data)
    store = call.open_offline()
    mirrors = [_source(call, place) for place in args.mirrors]
    with call.screen.progress() as shown:
        done = repair(store, mirrors=mirrors, apply=args.apply, share=share, progress=shown)
    document = {
        "applied": args.apply,
        "actions": [{"action": type(each).__name__, "what": str(each)} for each in done.actions],
        "unrepairable": _findings(done.plan.unrepairable),
        "findings": _findings(done.after.findings),
        "damaged_commits": sorted(done.after.damaged_commits),
    }
    return Answer(document, [done], code=_code(done.after))


def _source(call: Call, place: str) -> Storage:
    """A store to repair from, open for the rest of the call."""
    storage = call.stack.enter_context(closing(open_storage(place, read_only=True)))
    try:
        check_source(storage)
    except NotFound as error:
        raise NoStore(str(error)) from error
    return storage


def _findings(findings: tuple[Finding, ...]) -> list[dict[str, object]]:
    """Findings with None for what they lack."""
    names = [field.name for field in fields(Finding)]
    return [
        {name: getattr(finding, name) or None for name in names} | {"commits": finding.commits}
        for finding in findings
    ]


def _code(report: Report) -> Exit:
    notes = all(finding.severity is Severity.NOTE for finding in report.findings)
    return Exit.OK if notes else Exit.DAMAGED
