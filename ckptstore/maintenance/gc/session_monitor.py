"""Active sessions, as seen from this host: a session is over if its process is gone, or if nothing
has moved for long.

Counters are only compared with themselves and times only with this host's monotonic clock, so
clocks need not agree. Observations are kept in this host's cache, so that short gc runs add up;
after a boot they start anew. A mistake costs a slow writer a repeated commit and never a chunk:
`log.admission.check` refuses an entry of a session that was declared over.

`activities` lists the writers and the condemned packs that remain because of each.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ckptstore.core.ids import PackId, SessionId
from ckptstore.core.process import boot_id
from ckptstore.log.sessions import SessionInfo, is_gone, read_sessions
from ckptstore.log.state import Pack, State
from ckptstore.maintenance import load_note, save_note
from ckptstore.maintenance.gc.plan import Listing, list_objects, owned
from ckptstore.repository.store_handle import StoreHandle

STALE_S = 600.0
NO_FILE = -1
"""The counter of a session that has no file."""

WATCH_NAME = "watch.json"

Seen: TypeAlias = dict[str, tuple[int, float]]
"""Sessions and files in `tmp/` with a counter or size, and the time of its last change."""

Waits: TypeAlias = dict[PackId, frozenset[SessionId]]
"""The sessions that were in flight when a pack was condemned, by pack."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions that the log has not closed: those `active`, and those to be declared `over`.
    `stale` are names in `tmp/` without a writer."""

    active_ids: frozenset[SessionId]
    over: tuple[SessionId, ...]
    stale: frozenset[str]


class SessionMonitor:
    """Observes the sessions of one store; `seen` and `waits` are what this host has observed since
    its last boot. `objects` are those of sessions that the log has not closed: what it lists is of
    closed ones, so after the first look nearly all of a store is left out."""

    def __init__(self, handle: StoreHandle, clock: Callable[[], float], listing: Listing) -> None:
        self.objects = owned(listing)
        self._storage, self._clock = handle.storage, clock
        self._path = handle.index_directory / WATCH_NAME
        self.seen: Seen
        self.waits: Waits
        self.seen, self.waits = load_note(
            self._path, boot_id(), _observations, _observations(({}, {}))
        )

    def look(self, state: State) -> Sessions:
        """Observe the sessions that have a file, or that objects of the listing name. `state` is no
        older than that of the look before."""
        infos = {info.id: info for info in read_sessions(self._storage)}
        self.objects = objects = {
            key: of for key, of in self.objects.items() if not state.closed(of[0])
        }
        named = {by for key, (by, _) in objects.items() if key.startswith(("packs/", "commits/"))}
        files = {
            key.removeprefix("tmp/"): size
            for key, (_, size) in objects.items()
            if key.startswith("tmp/")
        }
        values: dict[str, int] = files | dict.fromkeys(named, NO_FILE)
        values |= {session: info.counter for session, info in infos.items()}
        now_s, before = self._clock(), self.seen
        self.seen = {
            name: before[name] if name in before and before[name][0] == value else (value, now_s)
            for name, value in values.items()
        }
        self._save()
        stale = frozenset(
            name for name, (_, since_s) in self.seen.items() if now_s - since_s >= STALE_S
        )
        opened = {session for session in {*infos, *named} if not state.closed(session)}
        over = {s for s in opened if s in stale or (s in infos and is_gone(infos[s]))}
        active = frozenset(opened & infos.keys() - over)
        idle = frozenset(name for name in stale & files.keys() if name[:24] not in active)
        return Sessions(active, tuple(sorted(over)), idle)

    def wait_for(
        self, condemned: Iterable[Pack], active: frozenset[SessionId], state: State
    ) -> Mapping[PackId, frozenset[SessionId]]:
        """The sessions in `active` that each of the packs `condemned` waits for: those that were
        in flight when this host first saw it condemned."""
        waits = {pack.id: self.waits.get(pack.id, active) & active for pack in condemned}
        if self.waits.keys() - waits:
            listed = {pack.id for pack in state.packs.values()}
            self.waits = {pack: waited for pack, waited in self.waits.items() if pack in listed}
        self.waits |= waits
        self._save()
        return waits

    def _save(self) -> None:
        waits = {pack: sorted(sessions) for pack, sessions in self.waits.items()}
        save_note(self._path, boot_id(), [self.seen, waits])


def _observations(content: Any) -> tuple[Seen, Waits]:
    seen, waits = content
    return (
        {name: (int(value), float(s)) for name, (value, s) in seen.items()},
        {PackId(pack): frozenset(map(SessionId, sessions)) for pack, sessions in waits.items()},
    )


Status: TypeAlias = Literal["active", "gone", "closed"]
"""`gone`: its process has ended, and the next gc declares it over. `closed`: by the log, it can
append no more."""


@dataclass(frozen=True, slots=True)
class Activity:
    """A session that has a file. Its counter has not moved for `still_s` while this host looked;
    after `session_monitor.STALE_S` the next gc declares it over. `packs` condemned packs of
    `bytes` in all, twins included, are kept until it has ended."""

    info: SessionInfo
    status: Status
    still_s: float
    packs: int
    bytes: int


def activities(
    handle: StoreHandle, *, clock: Callable[[], float] = time.monotonic
) -> tuple[Activity, ...]:
    """Every session that has a file, oldest first. Counts as an observation for gc."""
    monitor = SessionMonitor(handle, clock, list_objects(handle.storage))
    infos = sorted(read_sessions(handle.storage), key=lambda info: (info.time_ns, info.id))
    state = handle.log.replay()
    monitor.look(state)
    found = []
    for info in infos:
        waiting = [
            pack
            for pack in state.packs.values()
            if not pack.live and info.id in monitor.waits.get(pack.id, frozenset())
        ]
        status: Status = (
            "closed" if state.closed(info.id) else "gone" if is_gone(info) else "active"
        )
        _, since_s = monitor.seen.get(info.id, (0, clock()))
        nbytes = sum(pack.stored_bytes for pack in waiting)
        found.append(Activity(info, status, clock() - since_s, len(waiting), nbytes))
    return tuple(found)
