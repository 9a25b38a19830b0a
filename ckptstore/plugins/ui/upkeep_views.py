"""Views of a store's upkeep as JSON: writers, health, space, and what a retention policy would
cost. They list objects or read pages, so they run as jobs."""

from collections.abc import Sequence

from ckptstore.errors import CkptStoreError
from ckptstore.plugin.checks import load_record
from ckptstore.plugin.policies import Policy
from ckptstore.plugin.upkeep import (
    DISTRUST_NAME,
    GcOptions,
    SuspectPacks,
    activities,
    collect,
    expected_bytes,
    forget_by_policy,
    gained_by,
    look,
    warning,
)
from ckptstore.plugins.reports.usage import usage
from ckptstore.plugins.ui.history_views import brief
from ckptstore.plugins.ui.jobs import Job
from ckptstore.plugins.ui.opened import OpenStore
from ckptstore.plugins.ui.values import Json, clip

HEAVIEST = 8
SESSIONS_SHOWN = 100
REASONS_SHOWN = 6


def health(store: OpenStore, job: Job) -> Json:
    """Who writes now, the disk, damage that this host has seen, and when data was verified."""
    job.progress("listing objects", 0, 1)
    handle = store.handle
    sessions = activities(handle)
    room = look(handle)
    packs = {pack.id for pack in store.history().packs if not pack.condemned}
    checked = load_record(handle.index_directory, handle.config.store)
    times = sorted(when for pack, when in checked.items() if pack in packs)
    suspects = SuspectPacks(handle.index_directory / DISTRUST_NAME).packs()
    return {
        "sessions": [
            {
                "status": each.status,
                "what": clip(each.info.what),
                "host": clip(each.info.host),
                "pid": each.info.pid,
                "time": each.info.time_ns // 1_000_000,
                "still_s": each.still_s,
            }
            for each in sessions[:SESSIONS_SHOWN]
        ],
        "free_bytes": room.free,
        "next_bytes": expected_bytes(room),
        "warning": warning(room),
        "packs": len(packs),
        "verified": len(times),
        "verified_oldest": times[0] * 1_000 if times else None,
        "verified_newest": times[-1] * 1_000 if times else None,
        "damaged_packs": sorted(suspects)[:SESSIONS_SHOWN],
    }


def space(store: OpenStore, job: Job) -> Json:
    """Stored and unreferenced bytes, the commits with most bytes of their own, and what a gc would
    free now."""
    found = usage(store.handle, progress=job.progress)
    heaviest = sorted(found.commits, key=lambda each: each.exclusive_bytes, reverse=True)
    by_id = store.history().by_id
    plan = collect(store.handle, GcOptions(), dry_run=True, progress=job.progress).plan
    return {
        "stored_bytes": found.stored_bytes,
        "logical_bytes": found.logical_bytes,
        "unreferenced_bytes": found.unreferenced_bytes,
        "chunks": found.chunks,
        "freed_bytes": plan.gained_bytes,
        "later_bytes": sum(plan.freed_later_bytes.values()),
        "purge": len(plan.purge),
        "heaviest": [
            {**brief(by_id[each.commit]), "exclusive_bytes": each.exclusive_bytes}
            for each in heaviest[:HEAVIEST]
            if each.commit in by_id
        ],
    }


def retention(store: OpenStore, key: str, policies: Sequence[Policy], job: Job) -> Json:
    """What `forget --dry-run` says of these policies in a run, and the bytes that a gc would free
    then."""
    run = store.history().run(key)[0].run
    plan = forget_by_policy(store.handle, policies, store.reader, run=run, dry_run=True)
    job.partial = {
        "n": plan.n,
        "summary": plan.summary,
        "notes": [clip(note) for note in plan.notes],
        "commits": [
            [each.commit, [clip(reason) for reason in each.reasons[:REASONS_SHOWN]]]
            for each in plan.decisions
        ],
    }
    try:
        now, later = gained_by(store.handle, plan, job.progress)
    except CkptStoreError as error:
        return {**job.partial, "freed_bytes": None, "problem": str(error)}
    return {**job.partial, "freed_bytes": max(later - now, 0), "unused_bytes": now}
