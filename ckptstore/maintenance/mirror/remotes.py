"""The two ends of a mirror run: the other store, opened or created, and the selected commits."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ckptstore.core.ids import CommitId
from ckptstore.errors import Conflict, InvalidInput, NotFound
from ckptstore.maintenance.mirror.plan import all_commits, with_ancestors
from ckptstore.repository.init_store import init_store
from ckptstore.repository.resolve_ref import AnyRef, find_commit
from ckptstore.repository.store_handle import StoreHandle


@contextmanager
def other_end(
    place: str | os.PathLike[str],
    *,
    read_only: bool = False,
    like: StoreHandle | None = None,
    storage_options: Mapping[str, Any] | None = None,
    index: str | None = None,
) -> Iterator[StoreHandle]:
    """Open the store at `place`. With `like`, create a missing one with its chunk size and codec,
    and in a directory at least as private. `index` is the database that has, or will have, its log.

    Raises `NotFound` if there is none.
    """
    options = dict(storage_options or {})
    try:
        handle = StoreHandle(place, read_only=read_only, storage_options=options, index=index)
    except NotFound:
        if like is None:
            raise
        # Another process created it at the same time.
        with suppress(Conflict):
            config, root = like.config, like.storage.capabilities.local_root
            init_store(
                place,
                chunk_bytes=config.chunk_bytes,
                codec=config.codec,
                as_private_as=root,
                storage_options=options,
                index=index,
            )
        handle = StoreHandle(place, storage_options=options, index=index)
    try:
        yield handle
    finally:
        handle.close()


def choose(
    source: StoreHandle, refs: Sequence[AnyRef], *, run: str | None, ancestors: bool = False
) -> frozenset[CommitId]:
    """The commits that `refs` name, with `ancestors` also all their ancestors; without refs all
    commits of `run`, or of all runs.

    Raises `NotFound` and `InvalidInput` for refs as `checkout` does.
    """
    if not refs:
        if ancestors:
            raise InvalidInput(
                "ancestors needs a commit; name one, or omit it: without a ref every commit is "
                "meant"
            )
        return all_commits(source.log.replay(), run)
    named = frozenset(find_commit(source, ref, run).id for ref in refs)
    return with_ancestors(source.log.replay(), named) if ancestors else named
