"""How does a command commit a directory? Without the objects of a training, so that a process which
adopts one directory imports neither torch nor what restores tensors.

`adoption` does it for an open `Store`, and for directories that become hollow.
"""

import time
from dataclasses import replace
from pathlib import Path

from ckptstore.errors import NoSpace
from ckptstore.plugin.handles import StoreHandle
from ckptstore.plugin.text import unicode_text
from ckptstore.plugin.work import ThreadPool
from ckptstore.plugin.writing import (
    CommitMetadata,
    CommitRequest,
    Committed,
    Destination,
    Prepared,
    WholeCommitter,
)
from ckptstore.plugins.adopt.adopting import adopted_state, read_twice


def message_of(place: Path) -> str:
    """The message of the commit of a directory, if no other is given."""
    return f"adopted from {unicode_text(place.name)}"


def commit_directory(
    handle: StoreHandle, threads: ThreadPool, place: Path, label: CommitMetadata
) -> Committed:
    """Commit the directory at `place`, which is not hollow; it stays as it is. The commit follows
    the newest of its run, and is in the catalog on return.

    Raises `ReadOnly` if the store cannot be written, `NoSpace` with what would free some, and as
    `Store.adopt` does.
    """
    handle.check_writable()
    committer = WholeCommitter(Destination(handle, threads))
    label = replace(label, message=label.message or message_of(place))

    def make() -> Committed:
        started = time.perf_counter()
        what = Prepared(label, adopted_state(place, threads, handle.url))
        try:
            return committer.commit(CommitRequest(what, started))
        except NoSpace as full:
            from ckptstore.plugin.upkeep import DiskWatch

            DiskWatch(handle, label.run, "raise").relieve(full, what.nbytes, None, collect=False)
            raise

    committed = read_twice(make)
    handle.follow()
    return committed
