"""Which commit does a ref, a pointer file or a snapshot name?

For restores and changes the log decides, because it is verified; listings ask the catalog.
"""

import logging
import os
from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar

from ckptstore.core.config import DEFAULT_RUN
from ckptstore.core.ids import CommitId
from ckptstore.core.refs import AmbiguousRef, find, parse_ref
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.index.queries import Queries
from ckptstore.log.resolve import Resolved, resolve
from ckptstore.objects.pointer_files import is_pointer, read_pointer
from ckptstore.repository.init_store import near_stores
from ckptstore.repository.store_handle import StoreHandle

logger = logging.getLogger("ckptstore")

T = TypeVar("T")


class Handle(Protocol):
    """An object about one commit, such as a snapshot or a pointer."""

    @property
    def id(self) -> CommitId: ...


AnyRef: TypeAlias = str | int | os.PathLike[str] | Handle
"""A ref, the path of a pointer file, or what is about a commit."""


def find_commit(handle: StoreHandle, ref: AnyRef, run: str | None) -> Resolved:
    """The commit that `ref` names. A ref without a run is resolved in `run`, or in all runs if
    that is None.

    Raises `NotFound` with similar names, `InvalidInput` for text that is no ref, for an
    ambiguous id prefix, and for a path without a pointer file.
    """
    state = handle.log.replay()
    try:
        return through_pointers(ref, lambda plain: resolve(state, plain, run))
    except NotFound as error:
        if not state.commits:
            near = near_stores(handle.storage.capabilities.local_root)
            error.add_note(f"{handle.url} has no commits{near}")
        raise


def log_resumed(
    handle: StoreHandle, run: str, where: str, found: tuple[CommitId, int | None] | None
) -> None:
    """Log the commit from which `run` continues (`found`), or what the store has in place of one. A
    likely mistake is logged as a warning."""
    if found:
        logger.info(
            "resumed commit %s (step %s) of run %s of %s", found[0][:12], *found[1:], run, where
        )
    else:
        there, is_odd = _nothing_to_resume(handle, run)
        level = logging.WARNING if is_odd else logging.INFO
        logger.log(level, "nothing to resume in run %s of %s: %s", run, where, there)


def _nothing_to_resume(handle: StoreHandle, run: str) -> tuple[str, bool]:
    """A description of what the store has in place of commits of `run`, and whether that suggests a
    mistake: commits in another run, or in a store with a similar path."""
    newest = sorted(handle.log.state.commits.values(), key=lambda row: row.age, reverse=True)
    if runs := list(dict.fromkeys(row.run for row in newest if not row.soft)):
        from difflib import get_close_matches

        alike = get_close_matches(run, runs)
        advice = f"open(…, run={(alike or runs)[0]!r}) continues one"
        mistaken = bool(alike) or run == DEFAULT_RUN
        return f"runs with commits: {', '.join(runs[:10])}; {advice}", mistaken
    near = near_stores(handle.storage.capabilities.local_root)
    return f"the store has no commits{near}", bool(near)


def find_id(handle: StoreHandle, queries: Queries, ref: AnyRef, run: str | None) -> CommitId:
    """Like `find_commit`, by the catalog: for listings."""

    def look(plain: str | int) -> CommitId:
        found = find(queries, parse_ref(plain), run)
        return found or resolve(handle.log.replay(), plain, run).id

    return through_pointers(ref, look)


def trained_last(queries: Queries) -> str | None:
    """The default run where one is needed and none was named: the run of the newest commit. Runs
    whose newest commit has several parents, as averages have, count only if there is no other. None
    without commits."""
    runs = queries.runs()
    trained = (info.run for info in runs if len(queries.commit(info.latest).parents) < 2)
    return next(trained, runs[0].run if runs else None)


def through_pointers(ref: AnyRef, find: Callable[[str | int], T]) -> T:
    """Apply `find` to `ref`, or to the id in the pointer file at that path. Text that could be a
    tag counts as a path only if `find` knows no such tag."""
    plain = _plain(ref)
    try:
        return find(plain)
    except AmbiguousRef:
        raise
    except (NotFound, InvalidInput) as error:
        if plain is not ref:
            error.add_note(f"{ref!s} points to it")
        if not isinstance(plain, str) or not is_pointer(plain):
            raise
    return find(read_pointer(plain).id)


def is_path(ref: AnyRef) -> bool:
    """Whether `ref` can only be the path of a pointer file."""
    return isinstance(ref, os.PathLike) or (
        isinstance(ref, str) and ref.startswith(("/", "./", "../"))
    )


def _plain(ref: AnyRef) -> str | int:
    if is_path(ref):
        return read_pointer(ref).id  # type: ignore[arg-type]  # a path, as has just been seen
    # What is no ref at all is refused by parse_ref.
    return ref.id if hasattr(ref, "id") else ref  # type: ignore[return-value]
