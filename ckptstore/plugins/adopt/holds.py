"""Release the holds of hollow directories: the tags under which a store keeps their commits.

A hold is named by the random id of a directory and its copies (`plugins.adopt.adoption`). A store
cannot know that the last of them is gone, so a hold goes only at the word of somebody: a directory
that is about to go, the name of a hold, or the folders that have every hollow directory which is
left.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckptstore.errors import Conflict, InvalidInput, NotFound, Unavailable
from ckptstore.plugin.handles import StoreHandle, Tag, resolved
from ckptstore.plugin.model import CommitId, HoldId, hold_tag, is_hold, new_hold_id
from ckptstore.plugin.pointers import HOLLOW_POINTER, read_pointer
from ckptstore.plugin.reading import Reader
from ckptstore.plugin.text import near
from ckptstore.plugin.upkeep import set_tag

Released = dict[str, CommitId]
"""The holds that were released, and the commit that each kept."""


def release_named(
    handle: StoreHandle, wanted: Iterable[str | os.PathLike[str]], *, dry_run: bool = False
) -> Released:
    """Release holds by their names, or those of hollow directories by their paths.

    Raises `Conflict` if another directory beside one of `wanted` has its hold, as a copy does;
    `NotFound` for what has no hold.
    """
    tags = handle.log.replay(refresh=True).tags
    names = [each if _is_name(each) else _hold_at(Path(each)) for each in wanted]
    for name in names:
        if name not in tags:
            raise NotFound(
                f"{handle.url} has no hold {name}{near(str(name), filter(is_hold, tags))}; nothing "
                "was released, `ckptstore tag` lists the holds"
            )
    return _remove(handle, {str(name): tags[str(name)] for name in names}, dry_run)


def _is_name(wanted: str | os.PathLike[str]) -> bool:
    return isinstance(wanted, str) and is_hold(wanted)


def _hold_at(directory: Path) -> str:
    place = Path(os.path.realpath(directory))
    hold = _hold_of(place / HOLLOW_POINTER)
    if hold is None:
        raise NotFound(f"{directory} has no hold: its pointer has no id; nothing was released")
    for other in sorted(place.parent.iterdir()):
        if other != place and _hold_of(other / HOLLOW_POINTER, lax=True) == hold:
            raise Conflict(
                f"{other} is a copy of {directory} and needs the same hold; nothing was released: "
                f"materialize or delete it first, or name the hold, {hold_tag(hold)}"
            )
    return hold_tag(hold)


def release_others(
    handle: StoreHandle,
    reader: Reader,
    except_in: Sequence[str | os.PathLike[str]],
    *,
    dry_run: bool = False,
) -> Released:
    """Release every hold but those of the hollow directories in the folders `except_in`, at any
    depth. Links to directories are followed.

    Raises `NotFound` for a folder without any, which may be a mount point whose file system is
    away; `Unavailable` for what cannot be read. Then nothing was released.
    """
    tags = handle.log.replay(refresh=True).tags
    found = _holds_in(except_in)
    gone = {tag: tags[tag] for tag in sorted(tags) if is_hold(tag) and tag not in found}
    if dry_run or not gone:
        return gone
    # A directory that became hollow during the walk had a hold before it had a pointer, and looks
    # for that hold again afterwards. Its commit has another hold until a second walk ends: one that
    # a killed process leaves is of no directory, and the next release removes it.
    state, back = handle.log.replay(), set(gone)
    meanwhile = {hold_tag(new_hold_id()): commit for commit in set(gone.values())}
    for tag, commit in meanwhile.items():
        set_tag(handle, reader, tag, resolved(state, commit))
    try:
        _remove(handle, gone, dry_run)
        back &= _holds_in(except_in)
    finally:
        for tag in back:
            set_tag(handle, reader, tag, resolved(state, gone[tag]), move=False)
        _remove(handle, meanwhile, dry_run)
    return {tag: commit for tag, commit in gone.items() if tag not in back}


def _holds_in(roots: Sequence[str | os.PathLike[str]]) -> set[str]:
    """The holds of all hollow directories in `roots`."""
    if not roots:
        raise InvalidInput("no folder is named; name all that have hollow directories")
    found = set[str]()
    for root in roots:
        here = {hold_tag(hold) for path in _pointers(Path(root)) if (hold := _hold_of(path))}
        if not here:
            raise NotFound(
                f"{os.fspath(root)} has no hollow directory, so its file system may be away; "
                "nothing was released: leave it out, or release holds by their names"
            )
        found |= here
    return found


def _pointers(root: Path) -> Iterable[Path]:
    """The pointers of hollow directories in `root`, each directory once, however links lead
    there."""
    seen, todo = set[str](), [os.path.realpath(root)]
    while todo:
        here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    if entry.name == HOLLOW_POINTER:
                        yield Path(entry.path)
                    elif entry.is_dir():
                        todo.append(os.path.realpath(entry.path))
        except OSError as error:
            raise Unavailable(
                f"cannot look for hollow directories in {here}: {error.strerror}; nothing was "
                "released"
            ) from error


def _hold_of(pointer: Path, *, lax: bool = False) -> HoldId | None:
    """The id in a pointer; with `lax`, None for what is no pointer."""
    try:
        return read_pointer(pointer).hold
    except (InvalidInput, NotFound):
        if lax:
            return None
        raise


def _remove(handle: StoreHandle, holds: Released, dry_run: bool) -> Released:
    if holds and not dry_run:
        handle.check_writable()
        for tag in holds:
            handle.log.append(Tag(tag, None, frozenset()))
        handle.follow()
    return holds
