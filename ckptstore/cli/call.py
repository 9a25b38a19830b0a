"""One run of a command: its arguments, the store that it opens, and its answer."""

import os
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckptstore.cli.exits import Exit, NoStore, UnusableStore
from ckptstore.cli.screen import Part, Screen
from ckptstore.core.discovery import distrust, search
from ckptstore.core.ids import CONFIG_KEY
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.objects.pointer_files import is_pointer, read_pointer
from ckptstore.repository.resolve_ref import is_path
from ckptstore.repository.store_handle import StoreHandle

if TYPE_CHECKING:
    from ckptstore.maintenance.check.offline_store import OfflineStore

VARIABLE = "CKPTSTORE"


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a command: the document that `--json` prints, and the page that is printed
    otherwise. `problems` go to standard error."""

    document: Mapping[str, object]
    page: Iterable[Part] = ()
    problems: Iterable[str] = ()
    code: Exit = Exit.OK


@dataclass(slots=True)
class Call:
    """One run of a command. `stack` closes what it opened; `url` is its store's."""

    args: Namespace
    screen: Screen
    stack: ExitStack = field(default_factory=ExitStack)
    url: str = ""

    def open(self, *refs: str) -> StoreHandle:
        """Open the store that the command line names, or the one of a pointer file among `refs`:
        `./its/path` names the store unless `-s` does, and any path if nothing else names one.

        Raises `NoStore`, or `UnusableStore` for anything else in its place.
        """
        if not self.args.store and (path := next(filter(is_path, refs), None)):
            place = read_pointer(path).store
        else:
            place = self._place_or_pointer(refs)
        with _opening():
            handle = self.stack.enter_context(closing(StoreHandle(place, index=self.args.index)))
        self.url = handle.url
        return handle

    def open_offline(self) -> "OfflineStore":
        """The store that the command line names, however damaged. Raises as `open` does."""
        from ckptstore.maintenance.check.offline_store import open_offline_store

        place = self.place()
        with _opening():
            store = self.stack.enter_context(open_offline_store(place, index=self.args.index))
        self.url = store.storage.url
        return store

    def place(self) -> str:
        """The path or URL of the store: `-s`, else `$CKPTSTORE`, else the nearest enclosing
        directory that is a store. Raises `NoStore`, also for an enclosing store that others could
        have put there."""
        if place := self.args.store or os.environ.get(VARIABLE):
            return str(place)
        directory = Path.cwd()
        try:
            found = search(directory)
        except InvalidInput as error:
            raise NoStore(str(error)) from error
        if found.store is not None:
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
