"""`ckptstore push`, `pull` and `clone`: what travels between two stores, and what arrived."""

from argparse import Namespace
from contextlib import ExitStack
from typing import Any

from ckptstore.cli.exits import Exit, NoStore
from ckptstore.cli.format import short
from ckptstore.cli.progress import progress
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.core.config import default_threads
from ckptstore.core.text import bytes_text, count_text
from ckptstore.errors import NotFound
from ckptstore.maintenance.mirror.mirror import Mirrored, MirrorOptions, mirror
from ckptstore.maintenance.mirror.plan import MirrorPlan, choose, other_end
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool


def run(args: Namespace, screen: Screen) -> Exit:
    with ExitStack() as stack:
        source, target = _ends(args, stack)
        threads = ThreadPool(default_threads())
        stack.callback(threads.close)
        wanted = choose(source, args.refs, run=args.run, ancestors=args.ancestors)
        options = MirrorOptions(args.tags, args.force, args.verify)
        with progress(screen) as shown:
            done = mirror(
                source, target, wanted, options, threads, dry_run=args.dry_run, progress=shown
            )
        if screen.json:
            screen.document(
                {
                    "source": source.url,
                    "target": target.url,
                    "dry_run": args.dry_run,
                    **_document(done),
                }
            )
        else:
            _show(done, source.url, target.url, screen)
    return Exit.DAMAGED if done.damaged else Exit.OK


def _ends(args: Namespace, stack: ExitStack) -> tuple[StoreHandle, StoreHandle]:
    """Source and target. Only `clone`, and `push --create`, make a store."""
    try:
        if args.command == "push":
            source = stack.enter_context(opened(args, *args.refs))
            return source, stack.enter_context(
                other_end(args.other, like=source if args.create else None, index=args.to_index)
            )
        source = stack.enter_context(other_end(args.other, read_only=True, index=args.from_index))
        if args.command == "pull":
            return source, stack.enter_context(opened(args))
        return source, stack.enter_context(other_end(args.to, like=source, index=args.to_index))
    except NoStore:
        raise
    except NotFound as error:
        raise NoStore(
            f"{error}{'; --create makes it' if args.command == 'push' else ''}"
        ) from error


def _show(done: Mirrored, source: str, target: str, screen: Screen) -> None:
    plan = done.plan
    if done.load is not None:
        size = bytes_text(done.load.raw_bytes + done.load.metadata_bytes)
        chunks = count_text(done.load.chunks, "chunk")
        screen.line(
            f"would bring {count_text(len(plan.commits), 'commit')} to {target}: {chunks}, {size} "
            "before they are encoded"
        )
    else:
        size = f"{count_text(done.chunks, 'chunk')}, {bytes_text(done.stored_bytes)} stored"
        screen.line(
            f"brought {count_text(len(done.sent), 'commit')} from {source} to {target}: {size}"
        )
    if plan.present:
        screen.line(
            f"{count_text(plan.present, 'commit')} {'was' if plan.present == 1 else 'were'} there "
            "already"
        )
    for move in plan.tags:
        screen.line(
            f"tag {move.name} is "
            f"{short(move.commit)}{f', was {short(move.previous)}' if move.previous else ''}"
        )
    for move in plan.rejected:
        screen.complain(
            f"tag {move.name} is {str(move.previous)[:12]} there, {short(move.commit)} here: it "
            "moves by --force only"
        )
    if plan.forgotten:
        screen.complain(
            f"{count_text(len(plan.forgotten), 'commit')} forgotten in {target} stay so; "
            "`ckptstore undelete` brings them back"
        )
    for commit, why in done.damaged:
        screen.complain(f"commit {short(commit)} was not sent: {why}")


def _document(done: Mirrored) -> dict[str, Any]:
    load = done.load and {
        "chunks": done.load.chunks,
        "raw_bytes": done.load.raw_bytes,
        "metadata_bytes": done.load.metadata_bytes,
    }
    return {
        "plan": _plan_document(done.plan) | {"load": load},
        "sent": list(done.sent),
        "chunks": done.chunks,
        "raw_bytes": done.raw_bytes,
        "stored_bytes": done.stored_bytes,
        "damaged": [{"commit": commit, "why": why} for commit, why in done.damaged],
    }


def _plan_document(plan: MirrorPlan) -> dict[str, Any]:
    def moves(tags: Any) -> list[dict[str, Any]]:
        return [
            {"tag": move.name, "commit": move.commit, "previous": move.previous} for move in tags
        ]

    return {
        "commits": [
            {"commit": t.commit, "run": t.run, "step": t.step, "tags": list(t.tags)}
            for t in plan.commits
        ],
        "tags": moves(plan.tags),
        "rejected": moves(plan.rejected),
        "forgotten": list(plan.forgotten),
        "present": plan.present,
    }
