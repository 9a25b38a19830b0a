"""Active sessions, as seen from this host: a session is over if its process is gone, or if nothing
has moved for long.

Counters are only compared with themselves and times only with this host's monotonic clock, so
clocks need not agree. Observations are kept in this host's cache, so that short gc runs add up;
after a boot they start anew. A mistake costs a slow writer a repeated commit and never a chunk:
`log.admission.check` refuses an entry of a session that was declared over.

`activities` lists the writers and the condemned packs that remain because of each.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from ckptstore.core.ids import PackId, SessionId
from ckptstore.core.paths import make_directories, replace_file
from ckptstore.log.sessions import SessionInfo, is_gone, read_sessions
from ckptstore.log.state import State
from ckptstore.maintenance.gc.plan import total_bytes
from ckptstore.repository.store_handle import StoreHandle

STALE_S = 600.0
NO_FILE = -1
"""The counter of a session that has no file."""

WATCH_NAME = "watch.json"
Name = TypeVar("Name", bound=str)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Watch:
    """This host's observations. `sessions` and `files` (names in `tmp/`) map to a counter or
    size and the time of its last change. `waits` are the sessions that were in flight when a
    pack was condemned, by pack."""

    boot: str
    sessions: Mapping[SessionId, tuple[int, float]] = field(default_factory=dict)
    files: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    waits: Mapping[PackId, frozenset[SessionId]] = field(default_factory=dict)

    def counters(self) -> dict[SessionId, int]:
        """The last seen counters."""
        return {session: counter for session, (counter, _) in self.sessions.items()}

    def sizes(self) -> dict[str, int]:
        """The last seen sizes of files in `tmp/`."""
        return {name: size for name, (size, _) in self.files.items()}


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions that the log has not closed: those `active`, and those to be declared `over`."""

    active: tuple[SessionInfo, ...]
    over: tuple[SessionId, ...]

    @property
    def active_ids(self) -> frozenset[SessionId]:
        return frozenset(info.id for info in self.active)


def observe(
    watch: Watch, counters: Mapping[SessionId, int], files: Mapping[str, int], now_s: float
) -> Watch:
    """The observations at `now_s`: the time of the last change of each counter and each file."""
    return Watch(
        watch.boot,
        _since(watch.sessions, counters, now_s),
        _since(watch.files, files, now_s),
        watch.waits,
    )


def judge(
    watch: Watch,
    infos: Iterable[SessionInfo],
    named: Iterable[SessionId],
    state: State,
    now_s: float,
) -> Sessions:
    """Separate active sessions from those that are over. `infos` are those with a file, `named`
    those that only objects in the store name."""
    active, over = [], []
    for info in infos:
        if state.closed(info.id):
            continue
        if is_gone(info) or _stale(watch.sessions, info.id, now_s):
            over.append(info.id)
        else:
            active.append(info)
    with_file = {info.id for info in infos}
    over.extend(
        s
        for s in named
        if s not in with_file and not state.closed(s) and _stale(watch.sessions, s, now_s)
    )
    return Sessions(tuple(active), tuple(sorted(over)))


def stale_files(watch: Watch, now_s: float) -> frozenset[str]:
    """Names in `tmp/` that have not changed for long."""
    return frozenset(name for name in watch.files if _stale(watch.files, name, now_s))


def load_watch(path: Path) -> Watch:
    """The observations since the last boot; empty if they cannot be read."""
    boot = ""
    with suppress(OSError):
        boot = _BOOT_ID.read_text().strip()
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        if found["boot"] != boot:
            return Watch(boot)
        waits = {
            PackId(pack): frozenset(map(SessionId, sessions))
            for pack, sessions in found["waits"].items()
        }
        return Watch(
            boot,
            {SessionId(session): seen for session, seen in _pairs(found["sessions"]).items()},
            _pairs(found["files"]),
            waits,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Watch(boot)


def save_watch(path: Path, watch: Watch) -> None:
    """Save `watch`. A full disk may prevent that; then sessions get more time."""
    found = {
        "boot": watch.boot,
        "sessions": dict(watch.sessions),
        "files": dict(watch.files),
        "waits": {pack: sorted(sessions) for pack, sessions in watch.waits.items()},
    }
    with suppress(OSError):
        make_directories(path.parent)
        replace_file(path, json.dumps(found).encode())


def _since(
    before: Mapping[Name, tuple[int, float]], values: Mapping[Name, int], now_s: float
) -> dict[Name, tuple[int, float]]:
    return {
        name: before[name] if name in before and before[name][0] == value else (value, now_s)
        for name, value in values.items()
    }


def _stale(seen: Mapping[Name, tuple[int, float]], name: Name, now_s: float) -> bool:
    return name in seen and now_s - seen[name][1] >= STALE_S


def _pairs(found: dict[str, Any]) -> dict[str, tuple[int, float]]:
    return {name: (int(value), float(since_s)) for name, (value, since_s) in found.items()}


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
