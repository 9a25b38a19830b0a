"""Which store a command is about: `-s`, else `$CKPTSTORE`, else the nearest enclosing directory
that is one (`core.discovery`).

Where a pointer file stands for a commit, `./its/path` says the store too, and any path of one does
where nothing else says it.
"""

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckptstore.cli.exits import NoStore, UnusableStore
from ckptstore.core.discovery import distrust, search
from ckptstore.core.ids import CONFIG_KEY
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.objects.pointer_files import is_pointer, read_pointer
from ckptstore.repository.resolve_ref import is_path
from ckptstore.repository.store_handle import StoreHandle

if TYPE_CHECKING:
    from ckptstore.maintenance.check.offline_store import OfflineStore

VARIABLE = "CKPTSTORE"


@contextmanager
def opened(args: Namespace, *refs: str) -> Iterator[StoreHandle]:
    """The store that the command line means, of whose commits `refs` speak.

    Raises `NoStore`, or `UnusableStore` for something else in its place.
    """
    place = _place(args, refs)
    try:
        handle = StoreHandle(place, index=args.index)
    except NotFound as error:
        raise NoStore(str(error)) from error
    except InvalidInput as error:
        raise UnusableStore(str(error)) from error
    try:
        yield handle
    finally:
        handle.close()


@contextmanager
def standing(args: Namespace) -> Iterator["OfflineStore"]:
    """The store that the command line means, damaged as it may be. Raises as `opened` does."""
    from ckptstore.maintenance.check.offline_store import open_offline_store

    place = find(args.store, os.environ, Path.cwd())
    with ExitStack() as stack:
        try:
            offline_store = stack.enter_context(open_offline_store(place, index=args.index))
        except NotFound as error:
            raise NoStore(str(error)) from error
        except InvalidInput as error:
            raise UnusableStore(str(error)) from error
        yield offline_store


def _place(args: Namespace, refs: Sequence[str]) -> str:
    if not args.store and (path := next(filter(is_path, refs), None)):
        return read_pointer(path).store
    try:
        return find(args.store, os.environ, Path.cwd())
    except NoStore:
        if path := next(filter(is_pointer, refs), None):
            return _store_of_found(Path(path))
        raise


def _store_of_found(pointer: Path) -> str:
    """The store of a pointer file that a ref happened to be the name of. Raises `NoStore` for one
    that others could have put there."""
    place = Path(os.path.abspath(pointer))
    if reason := distrust(place.parent) or distrust(place):
        raise NoStore(
            f"{pointer} is a pointer file, which does not say the store because {reason}; if you "
            f"mean it, write ./{pointer}"
        )
    return read_pointer(place).store


def find(named: str | None, environment: Mapping[str, str], directory: Path) -> str:
    """The store's path or URL. Raises `NoStore` where neither a name nor a directory around says
    one, and for one around that others could have put there."""
    if place := named or environment.get(VARIABLE):
        return place
    try:
        found = search(directory)
    except InvalidInput as error:
        raise NoStore(str(error)) from error
    if found.store is not None:
        return str(found.store)
    end = f" (the search ended there: {found.end})" if found.end else ""
    raise NoStore(f"no store in {directory} or above it{end}; {_advice(directory)}")


def _advice(directory: Path) -> str:
    below = sorted(path.parent.name for path in directory.glob(f"*/{CONFIG_KEY}"))
    if below:
        return f"there is one in {' and in '.join(below[:3])}: name it with -s {below[0]}"
    return f"name one with -s or ${VARIABLE}, or make one with `ckptstore init PATH`"
