"""The log entry of a commit, and what the log says of its packs. Pure."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ckptstore.core.ids import CommitId, PackId
from ckptstore.core.model import CommitDocument, PackRecord
from ckptstore.log import entries


def new_packs(entry: entries.Entry) -> list[tuple[int, PackId]]:
    """The numbers and names of the packs that an entry registers."""
    assert isinstance(entry.body, entries.Commit | entries.Register)
    return [(record.number, record.id) for record in entry.body.packs]


def new_bytes_of(entry: entries.Entry) -> int:
    """What the store grew by when a commit was made, by its entry."""
    assert isinstance(entry.body, entries.Commit)
    return entry.body.new_bytes


def entry_of(
    document: CommitDocument,
    commit: CommitId,
    document_bytes: int,
    records: Sequence[PackRecord],
    reused: Iterable[int],
    *,
    replaces: CommitId | None = None,
) -> entries.Commit:
    """The log entry of a commit that registers the packs `records` and reuses the packs numbered
    `reused`. It may take the place of another commit."""
    thinned, cast = document.thinned, document.cast
    kind: Callable[..., entries.Commit] = entries.Commit
    if thinned or cast or replaces:
        kind = partial(
            entries.Reduced,
            replaces=replaces,
            thinned=thinned.globs if thinned else (),
            cast=cast.globs if cast else (),
        )
    return kind(
        session=document.session,
        commit=commit,
        content=document.content,
        run=document.run,
        step=document.step,
        parents=document.parents,
        message=document.message,
        metrics=document.metrics,
        tags=document.tags,
        packs=tuple(records),
        reused=frozenset(reused),
        schemas=tuple((key, ref.schema.hex()) for key, ref in document.trees),
        logical_bytes=document.logical_bytes,
        new_bytes=document.new_bytes,
        leaves=document.leaves,
        document_bytes=document_bytes,
    )
