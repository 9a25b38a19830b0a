"""Commit directories of other programs, and make them small."""

import logging
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptstore.adopt.adopting import adopted_state, read_twice
from ckptstore.adopt.hollow import (
    Held,
    Hollowed,
    Place,
    abandoned,
    copied,
    held_in,
    hold_of,
    hollow_out,
    is_hollow,
    is_unchanged,
    label_of,
    was_not_copied,
)
from ckptstore.adopt.materializing import is_adopted, manifest_of
from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.core.ids import CommitId
from ckptstore.core.options import Ranks
from ckptstore.core.text import bytes_text, count_text, unicode_text
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from ckptstore.internals import MakeMetadata, StoreInternals
from ckptstore.maintenance.forget import remove_tag, set_tag
from ckptstore.objects.pointer_files import HOLLOW_POINTER, Pointer, is_pointer, read_pointer
from ckptstore.repository.resolve_ref import find_commit
from ckptstore.snapshot import Snapshot, contents_of

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
    # A link may lead elsewhere later, while the directory stays.
    holds = Holds(internals, Path(os.path.realpath(place)).parent) if hollow else None
    if found := _hollow_commit(internals, place):
        if holds is None:
            raise InvalidInput(
                f"{place} is hollow: commit {found.id[:12]} has its files already; to adopt it "
                f"anew, run `ckptstore materialize {place}` first"
            )
        make_hollow(internals, place, found, holds)
        return found

    def metadata() -> CommitMetadata:
        given = label()
        message = given.message or f"adopted from {unicode_text(place.name)}"
        held = (holds.tag(place),) if holds else ()
        return replace(given, message=message, tags=(*given.tags, *held))

    flats = partial(adopted_state, place, internals.threads, internals.handle.url)

    def make() -> Snapshot:
        request = internals.request(flats, metadata, Ranks())
        return internals.committed(internals.commit(request, None))

    snapshot = read_twice(make)
    if holds:
        make_hollow(internals, place, snapshot, holds)
    return internals.after_failure(snapshot)


class Holds:
    """The tags that keep the commits of the directories in `parent`.

    They name a place: the machine, run and path that `parent` had, and its number in its file
    system. That is the place by which a directory there is held already, if the path or the number
    is that of `parent`, as after a move; otherwise a new one, as for a copy.
    """

    def __init__(self, internals: StoreInternals, parent: Path) -> None:
        self._internals, self._parent, self._identity = internals, parent, _identity(parent)
        path = label_of(socket.gethostname(), internals.run, os.path.realpath(parent))
        self._place = Place(path, f"{self._identity[-1]:x}")
        found = (each.place for each in held_in(parent, self._tags()) if self._is_its_own(each))
        self._place = next(found, self._place)

    def tag(self, root: Path) -> str:
        """The hold of the directory `root`."""
        return hold_of(self._place, root)

    def renew(self) -> None:
        """Hold the hollow directories that have no hold, such as copies, and remove the holds of
        directories that somebody deleted. Their commits stay until a policy forgets them.

        Where another directory has taken the place of `parent`, such as a mount point whose file
        system is away, nothing was deleted."""
        if _identity(self._parent) != self._identity:
            return
        for hold, commit in copied(self._tags(), self._place, self._parent):
            with suppress(NotFound, Conflict):  # of another store, or forgotten
                handle = self._internals.handle
                set_tag(handle, self._internals.reader, hold, find_commit(handle, commit, None))
        for hold in abandoned(self._tags(), self._place, self._parent):
            with suppress(NotFound):  # another process has removed it
                remove_tag(self._internals.handle, hold)

    def _tags(self) -> Mapping[str, CommitId]:
        return self._internals.handle.log.replay(refresh=True).tags

    def _is_its_own(self, held: Held) -> bool:
        """Whether the commit is that of the directory, not of another with its name, nor of one
        that it was copied from: that one needs its holds."""
        if held.place.path != self._place.path and held.place.number != self._place.number:
            return False
        hollow = is_pointer(held.root / HOLLOW_POINTER)
        if hollow and read_pointer(held.root / HOLLOW_POINTER).id != held.commit:
            return False
        try:
            reader, found = self._internals.find(held.commit)
            contents = contents_of(self._internals.snapshot(found, reader))
            is_own = was_not_copied if hollow else is_unchanged
            return is_adopted(contents) and is_own(held.root, manifest_of(contents, held.commit))
        except (Corrupt, NotFound):
            return False


def _identity(directory: Path) -> tuple[int, int]:
    """The file system and the number of a directory; zeros if there is none."""
    try:
        found = directory.stat()
    except FileNotFoundError:
        return 0, 0
    except OSError as error:
        raise Unavailable(f"cannot look at {directory}: {error.strerror}") from error
    return found.st_dev, found.st_ino


def make_hollow(
    internals: StoreInternals, place: Path, snapshot: Snapshot, holds: Holds
) -> Hollowed:
    """Make the directory that `snapshot` was adopted from small, after every chunk was read back,
    and let the commits of its neighbours go that are no longer there.

    Raises `Corrupt` if the commit is damaged, `FileChanged` if the directory is not what was
    adopted; then it is whole.
    """
    snapshot.verify()
    handle, hold = internals.handle, holds.tag(place)
    if hold not in snapshot.tags:
        set_tag(handle, internals.reader, hold, find_commit(handle, snapshot, None))
    manifest = manifest_of(contents_of(snapshot), snapshot.id)
    done = hollow_out(place, manifest, Pointer(handle.url, snapshot.id))
    logger.info(
        "%s is hollow: commit %s has %s, %s",
        place,
        snapshot.id[:12],
        count_text(done.files, "file"),
        bytes_text(done.bytes),
    )
    holds.renew()
    return done


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
