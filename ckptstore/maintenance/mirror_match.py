"""Which of two stores has leaves of a commit that the other lacks? Read from the documents and
pages of commits that were thinned, before a mirror run is planned."""

from collections.abc import Iterator, Mapping
from enum import Enum

from ckptstore.core.ids import CommitId
from ckptstore.errors import Corrupt, NotFound
from ckptstore.log.state import CommitRow, State
from ckptstore.maintenance.check.trees import read_document
from ckptstore.objects.pages import decode_page
from ckptstore.repository.store_handle import StoreHandle


class Leaves(Enum):
    """What a commit has, compared with the one that has its place in the other store."""

    NO_MORE = "nothing that the other lacks"
    MORE = "all that the other has, and more"
    OTHERS = "leaves that the other lacks, and the other has some that it lacks"


_compared: dict[tuple[CommitId, CommitId], Leaves] = {}
"""What `compare_leaves` found: a commit's id is the hash of its document, so it holds in every
store."""


def compare_leaves(
    source: StoreHandle,
    target: StoreHandle,
    ours: State,
    theirs: State,
    there: Mapping[CommitId, CommitId],
) -> dict[CommitId, Leaves]:
    """Compare each commit of `there` with the one in the target; without those that cannot be
    read.

    What globs say is not enough: one may cover another, and tied leaves go together.
    """
    found = {}
    for commit, other in there.items():
        row, its = ours.commits.get(commit), theirs.commits[other]
        if commit == other or row is None:
            continue
        if not row.thinned or not its.thinned:
            found[commit] = Leaves.MORE if its.thinned else Leaves.NO_MORE
        elif (known := _compared.get((commit, other))) is not None:
            found[commit] = known
        else:
            try:
                lost = frozenset(_lost(source, commit, row))
                found[commit] = _compare(lost, frozenset(_lost(target, other, its)))
            except (Corrupt, NotFound):
                continue
            _compared[commit, other] = found[commit]
    return found


def _compare(lost: frozenset[tuple[str, int]], lost_there: frozenset[tuple[str, int]]) -> Leaves:
    if lost_there <= lost:
        return Leaves.NO_MORE
    return Leaves.MORE if lost <= lost_there else Leaves.OTHERS


def _lost(handle: StoreHandle, commit: CommitId, row: CommitRow) -> Iterator[tuple[str, int]]:
    """The leaves that were thinned away, by key and number."""
    for key, ref in read_document(handle.storage, row.session, commit).trees:
        for data in handle.objects.read_metadata_many(ref.pages).values():
            page = decode_page(data)
            yield from (
                (key, number)
                for number, leaf in enumerate(page.leaves, page.first_leaf)
                if leaf.gone
            )
