"""Commit directories of other programs, and make them small.

A hollow directory has a random id in its pointer, and its commit the tag `held/ID`, the *hold*. A
rename and a move keep the id, and a copy shares it, so the hold says nothing of where a directory
lies. Since a copy may lie anywhere, on a disk that is not mounted or in another's home, nothing
here ever finds out that the last directory of an id is gone: only somebody who knows says so, by
`plugins.adopt.holds.release` (docs/decisions/052-…).
"""

import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptstore.errors import InvalidInput, NotFound
from ckptstore.plugin.handles import find_commit
from ckptstore.plugin.model import HoldId, hold_tag, new_hold_id
from ckptstore.plugin.pointers import (
    HOLLOW_POINTER,
    Pointer,
    check_nameable,
    read_pointer,
    write_pointer,
)
from ckptstore.plugin.snapshots import MakeMetadata, Snapshot, StoreInternals, contents_of
from ckptstore.plugin.text import bytes_text, count_text
from ckptstore.plugin.upkeep import set_tag
from ckptstore.plugin.writing import CommitMetadata, Ranks
from ckptstore.plugins.adopt.adopting import adopted_state, read_twice
from ckptstore.plugins.adopt.commit_directory import message_of
from ckptstore.plugins.adopt.hollow import Hollowed, hollow_out, is_hollow
from ckptstore.plugins.adopt.materializing import manifest_of, parts_of

logger = logging.getLogger("ckptstore")


def adopt(
    internals: StoreInternals,
    directory: str | os.PathLike[str],
    label: MakeMetadata,
    *,
    hollow: bool,
) -> Snapshot:
    """Commit `directory`; see `Store.adopt`. A hollow directory stays so, and its commit is
    returned."""
    place = Path(directory).absolute()
    if found := _hollow_commit(internals, place):
        if not hollow:
            raise InvalidInput(
                f"{place} is hollow: commit {found.id[:12]} has its files already; to adopt it "
                f"anew, run `ckptstore materialize {place}` first"
            )
        make_hollow(internals, place, found)
        return found
    # The pointer in a whole directory is of an older commit. It never stays behind: a ref to the
    # directory would mean that commit.
    hold = new_hold_id() if hollow or os.path.lexists(place / HOLLOW_POINTER) else None
    if hold:
        check_nameable(internals.handle.url)

    def metadata() -> CommitMetadata:
        given = label()
        held = (hold_tag(hold),) if hold else ()
        return replace(given, message=given.message or message_of(place), tags=(*given.tags, *held))

    flats = partial(adopted_state, place, internals.threads, internals.handle.url)

    snapshot = read_twice(partial(internals.commit, flats, metadata, Ranks()))
    if hollow:
        make_hollow(internals, place, snapshot, hold)
    elif hold:
        write_pointer(place / HOLLOW_POINTER, Pointer(internals.handle.url, snapshot.id, hold))
    return internals.after_failure(snapshot)


def make_hollow(
    internals: StoreInternals, place: Path, snapshot: Snapshot, hold: HoldId | None = None
) -> Hollowed:
    """Make the directory that `snapshot` was adopted from small, after every chunk was read back
    and everything in the directory was compared with the commit.

    `hold` is the id for the directory; default: the one that it has, or a new one. Raises `Corrupt`
    if the commit is damaged, `NotFound` if it was thinned, `FileChanged` if the directory is not
    what was adopted: then nothing of it is lost.
    """
    snapshot.verify()
    contents = contents_of(snapshot)
    manifest = manifest_of(contents, snapshot.id)
    for name, recipe in manifest.files.items():
        parts_of(contents, name, recipe)  # a thinned commit lacks some
    hold = _held(internals, snapshot, hold or _hold_in(place, snapshot) or new_hold_id())
    pointer = Pointer(internals.handle.url, snapshot.id, hold)
    done = hollow_out(place, manifest, pointer, partial(_held, internals, snapshot, hold))
    logger.info(
        "%s is hollow: commit %s has %s, %s",
        place,
        snapshot.id[:12],
        count_text(done.files, "file"),
        bytes_text(done.bytes),
    )
    return done


def _held(internals: StoreInternals, snapshot: Snapshot, hold: HoldId) -> HoldId:
    """Hold the commit by `hold`, or by a new id if another commit has that one, as after somebody
    wrote a pointer by hand. Returns the id."""
    tags = internals.handle.log.replay(refresh=True).tags
    if tags.get(hold_tag(hold), snapshot.id) != snapshot.id:
        hold = new_hold_id()
    if hold_tag(hold) not in tags:
        handle = internals.handle
        set_tag(handle, internals.reader, hold_tag(hold), find_commit(handle, snapshot, None))
    return hold


def _hold_in(place: Path, snapshot: Snapshot) -> HoldId | None:
    """The id of a hollow directory of `snapshot`."""
    if not os.path.lexists(place / HOLLOW_POINTER):
        return None
    pointer = read_pointer(place / HOLLOW_POINTER)
    return pointer.hold if pointer.id == snapshot.id else None


def _hollow_commit(internals: StoreInternals, place: Path) -> Snapshot | None:
    """The commit of a hollow directory; None for any other. A directory whose program has written
    all of its files again is not hollow any more."""
    if not os.path.lexists(place / HOLLOW_POINTER):
        return None
    pointer = read_pointer(place / HOLLOW_POINTER)
    try:
        reader, found = internals.find(pointer.id)
    except NotFound as error:
        raise InvalidInput(
            f"{place} has a pointer to commit {pointer.id[:12]} of {pointer.store}, which is not "
            f"in {internals.handle.url}: adopt it there, or remove {HOLLOW_POINTER} if the "
            "directory is whole"
        ) from error
    snapshot = internals.snapshot(found, reader)
    manifest = manifest_of(contents_of(snapshot), snapshot.id)
    return snapshot if is_hollow(place, manifest) else None
