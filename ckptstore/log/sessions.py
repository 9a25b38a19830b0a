"""Sessions of writers: files with a counter that increases while the writer is alive.

A session file is a hint for gc, never a lock: the log alone decides whether a session may still
append. So session files are not fsynced, a failed heartbeat is repeated by the next one, and an
absent file means the same as a counter that stands still. One thread per process writes the
heartbeats of all its sessions. It starts with the first session and sleeps while there is none. If
it cannot be started, or has ended, the next session starts it again for all of them.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from ckptstore.core.forks import Condition, survives_forks
from ckptstore.core.ids import SessionId, new_session_id, parse_session_id, session_key
from ckptstore.core.process import boot_id
from ckptstore.errors import CkptStoreError, Corrupt, NotFound
from ckptstore.objects.canonical import decode, encode
from ckptstore.storage.contract import Storage

HEARTBEAT_S = 30.0

_PREFIX = "sessions/"
_logger = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """The content of a session's file. `start` is the process's start in clock ticks since the host
    booted, as in /proc/<pid>/stat.

    `boot`, `pid_namespace` and `start` are empty or 0 where the host does not report them, and in
    an unreadable file.
    """

    id: SessionId
    what: str = ""
    host: str = ""
    boot: str = ""
    pid_namespace: str = ""
    pid: int = 0
    start: int = 0
    time_ns: int = 0
    counter: int = 0


class Session:
    """The writer of one commit or one repack. As a context manager it ends if the block succeeds,
    and is abandoned if the block raises."""

    def __init__(self, storage: Storage, info: SessionInfo) -> None:
        self._storage = storage
        self._info = info
        survives_forks(self)
        self._beating = True

    def forked(self) -> None:
        """After a fork the parent writes its heartbeats and ends it."""
        self._lock = threading.Lock()
        self._beating = False

    @property
    def id(self) -> SessionId:
        return self._info.id

    def end(self) -> None:
        """Stop and remove the file: the session's entry is in the log. Idempotent; does nothing in
        a child after a fork.

        A file that cannot be removed is left to gc, since an acknowledged commit must not fail for
        it.
        """
        if self._stop():
            try:
                self._storage.delete(session_key(self.id))
            except CkptStoreError as error:
                _logger.warning(
                    "session %s has ended, but its file remains until the next gc: %s",
                    self.id,
                    error,
                )

    def abandon(self) -> None:
        """Stop after a failure or an unknown outcome. The file is left to gc, which declares the
        session over first."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.end()
        else:
            self.abandon()

    def beat(self) -> None:
        """Increment the counter, unless the session has stopped."""
        with self._lock:
            if self._beating:
                self._info = replace(
                    self._info, counter=self._info.counter + 1, time_ns=time.time_ns()
                )
                self._storage.put(session_key(self.id), encode_session(self._info), durable=False)

    def _stop(self) -> bool:
        """Whether this call, in the process that opened the session, stopped it."""
        with self._lock:
            stopped, self._beating = self._beating, False
        _heart.drop(self)
        return stopped


class _Heart:
    """The sessions of this process and the thread that writes their heartbeats."""

    def __init__(self) -> None:
        survives_forks(self)

    def forked(self) -> None:
        """A child has no thread, and the parent's sessions are the parent's."""
        self._sessions: set[Session] = set()
        self._changed = Condition()
        self._thread: threading.Thread | None = None

    def add(self, session: Session) -> None:
        with self._changed:
            self._sessions.add(session)
            if self._thread is None or not self._thread.is_alive():
                self._thread = self._begun()
            self._changed.notify()

    def drop(self, session: Session) -> None:
        with self._changed:
            self._sessions.discard(session)

    def _begun(self) -> threading.Thread | None:
        """Start the thread; None if none can be started. A session without heartbeats is only taken
        for dead sooner."""
        thread = threading.Thread(target=self._run, name="ckptstore-heartbeat", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _logger.warning(
                "no heartbeats are written for sessions (%s); the next session tries again", error
            )
            return None
        return thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._sessions:
                    self._changed.wait()
            time.sleep(HEARTBEAT_S)
            with self._changed:
                sessions = tuple(self._sessions)
            for session in sessions:
                # Catch everything: the heartbeats of the other sessions must go on.
                try:
                    session.beat()
                except Exception as error:
                    _logger.warning(
                        "a heartbeat of session %s failed; it is retried: %s",
                        session.id,
                        error,
                    )


_heart = _Heart()


def open_session(storage: Storage, what: str) -> Session:
    """Open a new session with heartbeats until `end` or `abandon`. `what` describes its work to
    people."""
    pid = os.getpid()
    host = os.uname().nodename
    info = SessionInfo(
        new_session_id(),
        what,
        host,
        boot_id(),
        _pid_namespace(),
        pid,
        _start_of(pid) or 0,
        time.time_ns(),
    )
    storage.put(session_key(info.id), encode_session(info), durable=False)
    session = Session(storage, info)
    try:
        _heart.add(session)
    except BaseException:
        session.end()
        raise
    return session


def read_sessions(storage: Storage) -> Iterator[SessionInfo]:
    """The sessions that have a file; a damaged file yields the id alone. A session that ends
    meanwhile may be left out."""
    for key, _ in storage.list(_PREFIX):
        try:
            session = parse_session_id(key.removeprefix(_PREFIX))
        except Corrupt as error:
            _logger.warning("%s is no session: %s", key, error)
            continue
        try:
            yield decode_session(session, storage.read(key))
        except NotFound:
            continue
        except Corrupt as error:
            _logger.warning("only the id of session %s is known: %s", session, error)
            yield SessionInfo(session)


def is_gone(info: SessionInfo) -> bool:
    """Whether the session's process has certainly ended: it ran on this boot of this host, in this
    pid namespace, and no longer exists."""
    if not info.boot or (info.boot, info.pid_namespace) != (boot_id(), _pid_namespace()):
        return False
    try:
        os.kill(info.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    start = _start_of(info.pid)
    return start is not None and start != info.start


_TEXTS = ("what", "host", "boot", "pid_namespace")
_NUMBERS = ("pid", "start", "time_ns", "counter")


def encode_session(info: SessionInfo) -> bytes:
    fields = {name: getattr(info, name) for name in _TEXTS + _NUMBERS}
    return encode({**fields, "time_ns": str(info.time_ns)})


def decode_session(session: SessionId, data: bytes) -> SessionInfo:
    """Decode the file of `session`. A damaged file, possible since files are not fsynced, yields
    the id alone."""
    try:
        fields: dict[str, Any] = decode(data)
        what, host, boot, namespace = (str(fields[name]) for name in _TEXTS)
        pid, start, time_ns, counter = (int(fields[name]) for name in _NUMBERS)
    except (KeyError, TypeError, ValueError, Corrupt):
        return SessionInfo(session)
    if pid <= 0:
        return SessionInfo(session)
    return SessionInfo(session, what, host, boot, namespace, pid, start, time_ns, counter)


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may hold anything; the start time
    # is the 22nd.
    return int(stat[stat.rindex(b")") + 2 :].split()[19])
