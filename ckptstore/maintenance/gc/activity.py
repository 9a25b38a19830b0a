"""Who is writing to the store, and which condemned packs are still there because of whom."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ckptstore.log.sessions import SessionInfo, is_gone, read_sessions
from ckptstore.maintenance.gc.plan import total_bytes
from ckptstore.maintenance.gc.session_monitor import WATCH_NAME, load_watch, observe, save_watch
from ckptstore.repository.store_handle import StoreHandle

Status: TypeAlias = Literal["active", "gone", "closed"]
"""`gone`: its process runs no more, the next gc declares it over. `closed`: the log says that it
can append nothing any more."""


@dataclass(frozen=True, slots=True)
class Activity:
    """A session that has a file. Its counter has not moved for `still_s` while this host looked;
    the next gc that finds it still for `watch.STALE_S` declares it over. `packs` condemned packs of
    `bytes` in all, twins included, are not deleted before it has ended."""

    info: SessionInfo
    status: Status
    still_s: float
    packs: int
    bytes: int


def activities(
    handle: StoreHandle, *, clock: Callable[[], float] = time.monotonic
) -> tuple[Activity, ...]:
    """Every session that has a file, the oldest first. Looking counts as an observation for gc."""
    infos = tuple(read_sessions(handle.storage))
    state = handle.log.replay()
    path = handle.index_directory / WATCH_NAME
    now_s = clock()
    before = load_watch(path)
    watch = observe(
        before, before.counters() | {info.id: info.counter for info in infos}, before.sizes(), now_s
    )
    save_watch(path, watch)
    condemned = [pack for pack in state.packs.values() if not pack.live]
    found = []
    for info in sorted(infos, key=lambda info: (info.time_ns, info.id)):
        waiting = [pack for pack in condemned if info.id in watch.waits.get(pack.id, frozenset())]
        status: Status = (
            "closed" if state.closed(info.id) else "gone" if is_gone(info) else "active"
        )
        found.append(
            Activity(
                info, status, now_s - watch.sessions[info.id][1], len(waiting), total_bytes(waiting)
            )
        )
    return tuple(found)
