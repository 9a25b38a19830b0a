"""A store that the page shows, and its history as of one position of the log."""

import threading
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ckptstore.errors import NotFound
from ckptstore.plugin.handles import PackInfo, Point, StoreHandle, TagInfo, Totals
from ckptstore.plugin.model import CommitId, CommitInfo
from ckptstore.plugin.text import redact
from ckptstore.plugin.work import ThreadPool, cached_property
from ckptstore.plugins.ui.values import run_key

if TYPE_CHECKING:
    from ckptstore.plugin.reading import CommitContents, Reader

OfRun = TypeVar("OfRun", CommitInfo, Point)

COMMITS_SHOWN = 20_000
"""The newest commits, which the page knows; older ones are counted."""
THREADS = 2
PATIENCE_S = 15
"""Somebody looks at the page: a server that does not answer for so long is said to be away."""


def by_run(newest_first: Iterable[OfRun]) -> dict[str, tuple[OfRun, ...]]:
    """Commits of each run, oldest first; the run with the newest commit first."""
    found: dict[str, list[OfRun]] = {}
    for each in newest_first:
        found.setdefault(each.run, []).append(each)
    return {run: tuple(reversed(commits)) for run, commits in found.items()}


@dataclass(frozen=True)
class History:
    """The newest commits, newest first, with all tags, as of log entry `n`."""

    n: int
    commits: tuple[CommitInfo, ...]
    tags: tuple[TagInfo, ...]
    totals: Totals
    packs: tuple[PackInfo, ...]

    @cached_property
    def by_id(self) -> Mapping[CommitId, CommitInfo]:
        return {info.id: info for info in self.commits}

    @cached_property
    def runs(self) -> Mapping[str, tuple[CommitInfo, ...]]:
        return by_run(self.commits)

    def run(self, key: str) -> tuple[CommitInfo, ...]:
        """The commits of the run with this key in URLs, oldest first. Raises `NotFound`."""
        for run, infos in self.runs.items():
            if run_key(run) == key:
                return infos
        raise NotFound(f"no run {key}: it has no commits any more; go back to the store's page")


class OpenStore:
    """A store with its number in URLs. Threads may share it. `index` is the database with its log,
    without credentials; None if the log is in the store."""

    def __init__(self, number: int, handle: StoreHandle) -> None:
        handle.wait_at_most(PATIENCE_S)
        self.number, self.handle = number, handle
        self.name = redact(handle.url)
        self.index = None if handle.database is None else handle.database.database.name
        self.threads = ThreadPool(THREADS)
        self._lock = threading.Lock()
        self._known: History | None = None

    @cached_property
    def reader(self) -> "Reader":
        from ckptstore.plugin.reading import Reader

        return Reader(self.handle.config, self.handle.objects, self.threads)

    def position(self) -> int:
        """The number of the log's last entry: one cheap look-up while nothing has changed."""
        with closing(self.handle.queries()) as queries:
            return queries.position().n

    def history(self) -> History:
        """The history as of now; read again only after the log has grown."""
        with self._lock, closing(self.handle.queries()) as queries:
            n = queries.position().n
            if self._known is None or self._known.n != n:
                self._known = History(
                    n,
                    tuple(queries.log(limit=COMMITS_SHOWN)),
                    tuple(queries.tags()),
                    queries.totals(),
                    tuple(queries.packs()),
                )
            return self._known

    def commit(self, beginning: str) -> CommitInfo:
        """The commit whose id begins with `beginning`. Raises `NotFound`."""
        with closing(self.handle.queries()) as queries:
            found = queries.beginning(beginning)
            if len(found) != 1:
                raise NotFound(
                    f"no commit {beginning[:12]}: never made here, or deleted by gc; go back to "
                    "the store's page"
                )
            return queries.commit(found[0])

    def contents(self, info: CommitInfo) -> "CommitContents":
        """Document, schemas and leaves of a commit."""
        from ckptstore.plugin.reading import CommitContents

        return CommitContents(self.reader, info.id, self.reader.document(info.session, info.id))

    def close(self) -> None:
        self.threads.close()
        self.handle.close()
