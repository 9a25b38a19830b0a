"""Commit directories of other programs, and make them small."""

import logging
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptstore.adopt.adopting import adopted_state, read_twice
from ckptstore.adopt.hollow import Hollowed, abandoned, hold_of, hollow_out, is_hollow
from ckptstore.adopt.materializing import manifest_of
from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.core.options import Ranks
from ckptstore.core.text import bytes_text, count_text, unicode_text
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.internals import MakeMetadata, StoreInternals
from ckptstore.maintenance.forget import remove_tag, set_tag
from ckptstore.objects.pointer_files import HOLLOW_POINTER, Pointer, read_pointer
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
    if found := _hollow_commit(internals, place):
        if not hollow:
            raise InvalidInput(
                f"{place} is hollow: commit {found.id[:12]} has its files already; to adopt it "
                f"anew, run `ckptstore materialize {place}` first"
            )
        make_hollow(internals, place, found)
        return found

    def metadata() -> CommitMetadata:
        given = label()
        message = given.message or f"adopted from {unicode_text(place.name)}"
        holds = (hold_of(place),) if hollow else ()
        return replace(given, message=message, tags=(*given.tags, *holds))

    flats = partial(adopted_state, place, internals.threads, internals.handle.url)

    def make() -> Snapshot:
        request = internals.request(flats, metadata, Ranks())
        return internals.committed(internals.commit(request, None))

    snapshot = read_twice(make)
    if hollow:
        make_hollow(internals, place, snapshot)
    return snapshot


def make_hollow(internals: StoreInternals, place: Path, snapshot: Snapshot) -> Hollowed:
    """Make the directory that `snapshot` was adopted from small, after every chunk was read back,
    and let the commits of its neighbours go that are no longer there.

    Raises `Corrupt` if the commit is damaged, `FileChanged` if the directory is not what was
    adopted; then it is whole.
    """
    snapshot.verify()
    handle, hold = internals.handle, hold_of(place)
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
    release(internals, place.parent)
    return done


def release(internals: StoreInternals, parent: Path) -> None:
    """Remove the holds of hollow directories in `parent` that somebody deleted. Their commits stay
    until a policy forgets them."""
    tags = internals.handle.log.replay(refresh=True).tags
    for hold in abandoned(tags, parent):
        with suppress(NotFound):  # another process has removed it
            remove_tag(internals.handle, hold)


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
