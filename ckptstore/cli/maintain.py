"""`ckptstore forget`, `undelete`, `release`, `gc`, `compact`, `sessions`, `reindex`: maintain a
store."""

from dataclasses import asdict, fields

from ckptstore import CompactPolicy
from ckptstore.cli.call import Answer, Call, Exit, UsageError
from ckptstore.cli.commits import commit_text, reader_of, short, tell_run
from ckptstore.cli.policies import policies_of
from ckptstore.cli.screen import Hint, Part, columns, fields_of
from ckptstore.plugin.maintenance import Maintenance
from ckptstore.plugin.text import Table, count_text
from ckptstore.plugin.upkeep import GcPlan, all_forgotten, carry_out


def forget(call: Call) -> Answer:
    args = call.args
    policies = policies_of(args)
    handle = call.open(*args.refs)
    for ref in args.refs:
        tell_run(call, handle.queries(), ref)
    asks = bool(
        (policies or args.all_commits) and call.screen.terminal and not (args.yes or args.dry_run)
    )
    plan = call.carry_out(
        Maintenance.forget,
        handle,
        what=[*policies, *args.refs],
        all_runs=bool(policies) and args.run is None,
        dry_run=args.dry_run or asks,
    )
    page: list[Part] = [plan.table(), plan.summary] if plan.decisions else [plan.summary]
    done, problems, changes = not args.dry_run, plan.notes, plan.forgotten or plan.thinned
    if asks and changes:
        call.screen.print(page)
        page.clear()
        for note in plan.notes:
            call.screen.complain(note)
        done = call.screen.ask(plan.question)
        problems = ("nothing was forgotten; --yes forgets without asking",)
        if done:
            # What was shown, and nothing else, whatever others did meanwhile.
            handle.check_writable()
            carry_out(handle, plan, reader_of(call, handle), all_commits=args.all_commits)
            handle.follow()
    if done:
        page.append(plan.done)
        if changes:
            page.append(
                Hint(
                    "`ckptstore gc` deletes what is gone after an hour; until then `ckptstore log "
                    "--forgotten` lists it, and `ckptstore undelete` restores it"
                )
            )
    commits = [
        {
            "commit": commit,
            **fields_of(row, "run", "step"),
            "kept": bool(reasons),
            "reasons": reasons,
            "thin": thin,
        }
        for commit, row, reasons, thin in plan.decisions
    ]
    said = fields_of(plan, "reason", "notes")
    document = {"dry_run": not done, "entry": plan.n, **said, "commits": commits}
    code = Exit.OK if done or args.dry_run else Exit.FAILED
    return Answer(document, page, () if done else problems, code)


def undelete(call: Call) -> Answer:
    args = call.args
    if bool(args.refs) == args.all:
        raise UsageError("undelete takes commits, or --all")
    handle = call.open(*args.refs)
    refs = tuple(args.refs or all_forgotten(handle, args.run))
    restored = call.carry_out(Maintenance.undelete, handle, refs=refs)
    infos = handle.queries().commits(restored)
    lines = [f"{commit_text(info)} is restored" for info in infos]
    where = "" if args.run is None else f" of run {args.run}"
    return Answer({"undeleted": restored}, lines or [f"no commit{where} is forgotten"])


def release(call: Call) -> Answer:
    released = call.carry_out(Maintenance.release, call.open())
    word = "would release" if call.args.dry_run else "released"
    lines = [f"{word} {hold}, which keeps {short(commit)}" for hold, commit in released.items()]
    document = {"dry_run": call.args.dry_run, "released": released}
    return Answer(document, lines or [Hint("every hold has a hollow directory")])


def gc(call: Call) -> Answer:
    report = call.carry_out(Maintenance.gc, call.open())
    document = {"dry_run": report.dry_run, "plan": _plan_document(report.plan)}
    if not report.dry_run:
        names = [field.name for field in fields(report) if field.name not in ("plan", "dry_run")]
        document["done"] = fields_of(report, *names) | {"stopped": report.stopped or None}
    plan = report.plan
    damaged = plan.missing or plan.unreadable or report.damaged or report.not_compacted
    code = Exit.DAMAGED if damaged else Exit.OK
    return Answer(document, [report], report.problems, code)


def compact_store(call: Call) -> Answer:
    policy = CompactPolicy(call.args.newest, call.args.every)
    report = call.carry_out(Maintenance.compact, call.open(), policy=policy)
    sizes = ("raw_bytes", "stored_bytes", "coded_bytes", "freed_bytes", "deleted_bytes")
    document = {
        "groups": [fields_of(group, "run", "commits") for group in report.groups],
        **fields_of(report, "dry_run", "newest", "finished", "chunks", "deltas", *sizes),
        **fields_of(report, "written_bytes", "left_bytes", "problems"),
        "freed_later_bytes": sum(report.freed_later_bytes.values()),
    }
    code = Exit.DAMAGED if report.problems else Exit.OK
    return Answer(document, [report], report.problems, code)


def _plan_document(plan: GcPlan) -> dict[str, object]:
    packs = [
        {"pack": p.id, "bytes": p.bytes, "condemned": p.condemned, "waits": p.waits}
        for p in plan.doomed
    ]
    copies = [
        {"from": [use.pack.id for use in c.sources], "bytes": c.bytes, "freed_bytes": c.freed_bytes}
        for c in plan.copies
    ]
    later = [
        {"sessions": sessions, "bytes": size} for sessions, size in plan.freed_later_bytes.items()
    ]
    return {
        **fields_of(plan, "mark", "over", "purge", "recent"),
        "packs": packs,
        "orphans": plan.orphans,
        "copies": copies,
        "rewrites": plan.rewrites,
        "freed_later": later,
        "missing_chunks": plan.missing,
        **fields_of(plan, "freed_now_bytes", "copied_bytes", "left_bytes", "unreadable", "full"),
    }


def sessions(call: Call) -> Answer:
    found = call.carry_out(Maintenance.sessions, call.open())
    documents = [
        {
            "session": each.info.id,
            "status": each.status,
            **fields_of(each.info, "what", "host", "pid", "time_ns"),
            "still_s": each.still_s,
            "waiting_packs": each.packs,
            "waiting_bytes": each.bytes,
        }
        for each in found
    ]
    names = ("session", "status", "what", "host", "pid", "time", "still", "waiting packs", "bytes")
    page = (
        Table(columns(*names), [[*each.values()] for each in documents])
        if found
        else "no process writes"
    )
    return Answer({"sessions": documents}, [page])


def reindex(call: Call) -> Answer:
    handle = call.open()
    done = call.carry_out(Maintenance.reindex, handle)
    place = handle.index_directory
    counts = f"{count_text(done.commits, 'commit')}, {count_text(done.packs, 'pack')}"
    lost = f"{count_text(done.unreadable, 'pack')} cannot be read; run `ckptstore fsck`"
    return Answer(
        {"index": str(place), **asdict(done)},
        [f"{place}: {counts}, up to log entry {done.entries}"],
        [lost] if done.unreadable else [],
        Exit.DAMAGED if done.unreadable else Exit.OK,
    )
