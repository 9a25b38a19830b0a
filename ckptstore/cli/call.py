"""One run of a command: its arguments, the store that it opens, its answer and its exit code."""

import os
import sqlite3
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ckptstore.cli.screen import Hint, Part, Screen
from ckptstore.errors import Busy, CkptStoreError, Corrupt, InvalidInput, NotFound
from ckptstore.plugin.files import base_of, distrust, search
from ckptstore.plugin.handles import Commit, StoreHandle, is_path
from ckptstore.plugin.model import CONFIG_KEY, CommitId
from ckptstore.plugin.pointers import is_pointer, read_pointer
from ckptstore.plugin.text import redact

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckptstore import Store
    from ckptstore.plugin.checks import OfflineStore
    from ckptstore.plugin.upkeep import Spread, Stores
    from ckptstore.plugin.work import ThreadPool

T = TypeVar("T")

VARIABLE = "CKPTSTORE"


class Exit(IntEnum):
    """Exit codes; scripts may rely on them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DAMAGED = 3
    NO_STORE = 10
    BUSY = 11
    INTERRUPTED = 130


class UsageError(CkptStoreError):
    """The command line cannot be understood. `command` is the part of it whose `--help` helps: that
    of the operation, where it runs."""

    def __init__(self, message: str, command: str = "ckptstore") -> None:
        super().__init__(message)
        self.command = command

    def __str__(self) -> str:
        return f"{super().__str__()}; see `{self.command} --help`"


class NoStore(NotFound):
    """No store at the place that the command line names, or no place."""


class UnusableStore(CkptStoreError):
    """The place of the store holds something else, or a store of a newer format."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a command: the document that `--json` prints, and the page that is printed
    otherwise. `problems` go to standard error. `then` is what the command does after it has
    answered."""

    document: Mapping[str, object]
    page: Iterable[Part] = ()
    problems: Iterable[str] = ()
    code: Exit = Exit.OK
    then: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Call:
    """One run of a command. `stack` closes what it opened; `url` is its store's, and `found` says
    what led there: `-s`, `$CKPTSTORE`, or a search that ended `here` or `above`."""

    args: Namespace
    screen: Screen
    stack: ExitStack = field(default_factory=ExitStack)
    url: str = ""
    found: str = ""
    _handles: list[StoreHandle] = field(default_factory=list)

    def made(self) -> CommitId | None:
        """The commit that this run of the command has made; None if it has made none."""
        entries = (handle.log.appended for handle in self._handles)
        bodies = [entry.body for entry in entries if entry is not None]
        return next((body.commit for body in bodies if isinstance(body, Commit)), None)

    def open(self, *refs: str) -> StoreHandle:
        """Open the store that the command line names, or the one of a pointer file among `refs`:
        `./its/path` names the store unless `-s` does, and any path if nothing else names one.

        Raises `NoStore`, or `UnusableStore` for anything else in its place.
        """
        if not self.args.store and (path := next(filter(is_path, refs), None)):
            place = read_pointer(path).store
        else:
            place = self._place_or_pointer(refs)
        return self._open(place)

    def open_all(self) -> list[StoreHandle]:
        """Open each store that the command line names, of a command that takes several: `--index`
        is for those whose log is in a database. Raises as `open` does."""
        places = [self.place(), *self.args.more_stores]
        return [self._open(place, of_several=len(places) > 1) for place in places]

    def _open(self, place: str, *, of_several: bool = False) -> StoreHandle:
        # A terminal is told what it waits for: a bucket that does not answer takes a minute.
        remote = "://" in place
        waiting = self.screen.progress(f"asking {redact(place)}") if remote else nullcontext()
        with _opening(), waiting:
            handle = StoreHandle(place, index=self.args.index, of_several=of_several)
            self.stack.enter_context(closing(handle))
        self.url = handle.url
        self._handles.append(handle)
        return handle

    def carry_out(
        self,
        method: Callable[..., T],
        handle: StoreHandle,
        doing: str = "",
        threads: int = 1,
        **more: object,
    ) -> T:
        """Call a method of `Maintenance` for an open store, and show its progress.

        The values of the command line, and `more`, go to the parameters of their names. What it
        does not give has the default of the method.
        """
        from ckptstore.plugin.maintenance import Maintenance

        # Refs that name no run are resolved in the one that the command line names.
        run = getattr(self.args, "run", None)
        store = Maintenance(handle, self.threads(threads), run, self.spread())
        words: Sequence[object] = ()
        with self.screen.progress(doing) as shown:
            given, named = {**vars(self.args), "progress": shown, **more}, {}
            for name, parameter in signature(method).parameters.items():
                if parameter.kind is Parameter.VAR_POSITIONAL:
                    words = given[name]
                elif given.get(name) not in (None, []):
                    named[name] = given[name]
            return method(store, *words, **named)

    def training_store(self, handle: StoreHandle, run: str | None = None) -> "Store":
        """An open store with all its methods, which import torch."""
        from ckptstore import Store
        from ckptstore.plugin.snapshots import Settings

        return self.stack.enter_context(Store(handle, Settings.of(run=run)))

    def open_offline(self) -> "OfflineStore":
        """The store that the command line names, however damaged. Raises as `open` does."""
        from ckptstore.plugin.checks import open_offline_store

        place = self.place()
        with _opening():
            store = self.stack.enter_context(open_offline_store(place, index=self.args.index))
        self.url = store.storage.url
        return store

    def threads(self, count: int = 1) -> "ThreadPool":
        """Threads for the rest of the call."""
        from ckptstore.plugin.work import ThreadPool

        return self.stack.enter_context(closing(ThreadPool(count)))

    def spread(self) -> "Callable[..., Spread[Stores]] | None":
        """What makes what carries out jobs on some stores, on the engine that `--on` names; None
        without one."""
        if not getattr(self.args, "on", None):
            return None
        from ckptstore.plugins.engine.work import stores_on

        return partial(stores_on, self.engine())

    def engine(self) -> "Executor":
        """The engine that `--on` names, for the rest of the call."""
        from ckptstore.plugins.engine.ray_executor import RayExecutor

        return self.stack.enter_context(RayExecutor(self.args.on))

    def place(self, *, quiet: bool = False) -> str:
        """The path or URL of the store: `-s`, else `$CKPTSTORE`, else the nearest enclosing
        directory that is a store, which a terminal is told unless `quiet`.

        Raises `NoStore`, also for an enclosing store that others could have put there.
        """
        if place := self.args.store or os.environ.get(VARIABLE):
            self.found = "-s" if self.args.store else f"${VARIABLE}"
            return str(place)
        directory = Path.cwd()
        try:
            found = search(directory)
        except InvalidInput as error:
            raise NoStore(str(error)) from error
        if found.store is not None:
            is_here = base_of(found.store) == Path(os.path.realpath(directory))
            self.found = "here" if is_here else "above"
            if not (is_here or quiet):
                self.screen.print([Hint(f"store: {found.store}, found above")])
            return str(found.store)
        end = f" (the search ended there: {found.end})" if found.end else ""
        raise NoStore(f"no store in {directory} or above it{end}; {_advice(directory)}")

    def _place_or_pointer(self, refs: Sequence[str]) -> str:
        try:
            return self.place()
        except NoStore:
            pointer = next(filter(is_pointer, refs), None)
            if pointer is None:
                raise
        place = Path(os.path.abspath(pointer))
        if reason := distrust(place.parent) or distrust(place):
            raise NoStore(
                f"{pointer} is a pointer file, but does not name the store because {reason}; to "
                f"use it, write ./{pointer}"
            )
        return read_pointer(place).store


@contextmanager
def _opening() -> Iterator[None]:
    """The errors of opening a store, as the ones of a command."""
    try:
        yield
    except NotFound as error:
        raise NoStore(str(error)) from error
    except InvalidInput as error:
        raise UnusableStore(str(error)) from error


def _advice(directory: Path) -> str:
    below = sorted(path.parent.name for path in directory.glob(f"*/{CONFIG_KEY}"))
    if below:
        return f"there is one in {' and in '.join(below[:3])}: name it with -s {below[0]}"
    return f"name one with -s or ${VARIABLE}, or make one with `ckptstore init PATH`"


def exit_of(error: BaseException) -> Exit:
    """The exit code for an error that ended a command."""
    match error:
        case UsageError() | InvalidInput():
            return Exit.USAGE
        case NoStore():
            return Exit.NO_STORE
        case Corrupt():
            return Exit.DAMAGED
        case KeyboardInterrupt():
            return Exit.INTERRUPTED
    return Exit.BUSY if _busy(error) else Exit.FAILED


def _busy(error: BaseException) -> bool:
    """Whether others kept changing or locking the store, so that the command may be repeated."""
    from ckptstore.plugin.handles import Refused

    cause = error.__cause__ or error
    locked = getattr(cause, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )
    return locked or isinstance(error, Refused | Busy)
