"""Chunk liveness: the packs that hold each chunk, and the one pack that each live chunk is assigned
to. Sorted arrays, no I/O.

A chunk is *live* if a commit needs it. Needed chunks are identified by the first 8 bytes of their
ids, so a collision keeps a chunk too many and never one too few. A live chunk in several packs is
*assigned* to one of them, so that the duplicates can be deleted; here whole ids are compared,
because a collision would lose a chunk. Before duplicates are deleted, the caller reads the copies
to keep (`contested`) and reports damaged ones (`reject`). Then another copy is assigned; if none is
sound, all of them stay.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.objects.pack import FOOTER_DTYPE, FooterTable

Keys = npt.NDArray[np.uint64]

_ID_WORDS = CHUNK_ID_BYTES // 8
_RECORD_WORDS = FOOTER_DTYPE.itemsize // 8


def keys_of(ids: bytes | memoryview) -> Keys:
    """The first 8 bytes of each of `ids`, which are 32 bytes each."""
    return np.ascontiguousarray(np.frombuffer(ids, "<u8").reshape(-1, _ID_WORDS)[:, 0])


class Holdings:
    """The chunks of packs that have `counts` chunks each: 45 bytes per chunk. Several threads
    may call `put`."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._starts = np.concatenate(([0], np.cumsum(np.array(counts, np.int64))))
        self._ids = np.zeros((int(self._starts[-1]), _ID_WORDS), "<u8")
        self._stored = np.zeros(len(self._ids), np.uint32)
        self._put = np.zeros(len(counts), np.bool_)
        self._order = np.empty(0, np.int64)
        self._groups: Keys = np.empty(0, np.uint64)
        self._sizes = np.empty(0, np.int64)
        self._live = np.empty(0, np.bool_)
        self._contested: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._told: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._rejected: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]

    def put(self, pack: int, table: FooterTable) -> None:
        """Add the footer of the pack at position `pack`. Chunks of a pack that is never put
        count as absent."""
        rows = slice(int(self._starts[pack]), int(self._starts[pack + 1]))
        self._ids[rows] = np.frombuffer(table, "<u8").reshape(-1, _RECORD_WORDS)[:, :_ID_WORDS]
        self._stored[rows] = table["stored"]
        self._put[pack] = True

    def sort(self) -> None:
        """Prepare for `need`, once every footer has been put."""
        keys = np.ascontiguousarray(self._ids[:, 0])
        self._order = np.argsort(keys)
        if not self._put.all():
            self._order = self._order[self._put[self._pack_of(self._order)]]
        keys = keys[self._order]
        first = np.flatnonzero(_first_of_each(keys))
        self._groups = keys[first]
        self._sizes = np.diff(first, append=len(keys))
        self._live = np.zeros(len(first), np.bool_)

    def need(self, keys: Keys) -> Keys:
        """Mark chunks with these keys as live. Returns the keys that no pack holds."""
        # Sorted here: np.unique hashes, which takes four times as long, and a sorted search is
        # cache-friendly.
        keys = np.sort(keys)
        keys = keys[_first_of_each(keys)]
        if not len(self._groups):
            return keys
        at = np.minimum(np.searchsorted(self._groups, keys), len(self._groups) - 1)
        held = self._groups[at] == keys
        self._live[at[held]] = True
        missing: Keys = keys[~held]
        return missing

    def assign(self) -> npt.NDArray[np.bool_]:
        """For each chunk of each pack, whether it is live and assigned to that pack.

        A chunk in several packs is assigned to the one with the most bytes of other live chunks, so
        that the others empty, unless rejected there; if all copies were rejected, it stays in each.
        """
        assigned = np.zeros(len(self._ids), np.bool_)
        assigned[self._order[np.repeat(self._live & (self._sizes == 1), self._sizes)]] = True
        several = self._order[np.repeat(self._live & (self._sizes > 1), self._sizes)]
        if len(several):
            rank = self._preference(assigned)[self._pack_of(several)]
            words, rejected = self._ids[several], np.isin(several, np.concatenate(self._rejected))
            order = np.lexsort((rank, rejected, *(words[:, i] for i in range(_ID_WORDS))))
            several, words, rejected = several[order], words[order], rejected[order]
            first = np.concatenate(([True], (words[1:] != words[:-1]).any(axis=1)))
            all_rejected = rejected[first][np.cumsum(first) - 1]
            assigned[several[first | all_rejected]] = True
            alone = np.append(first[1:], True)
            self._contested = several[first & ~alone & ~rejected]
        return assigned

    def contested(self) -> dict[int, npt.NDArray[np.int64]]:
        """The assigned chunks that other packs hold too, by pack and in order of offset, each
        reported once."""
        rows = np.setdiff1d(self._contested, self._told)
        self._told = np.concatenate((self._told, rows))
        packs = self._pack_of(rows)
        return {int(pack): rows[packs == pack] - self._starts[pack] for pack in np.unique(packs)}

    def reject(self, pack: int, rows: Sequence[int]) -> None:
        """Mark these chunks of the pack at position `pack` as damaged. Several threads may call
        it."""
        self._rejected.append(self._starts[pack] + np.array(rows, np.int64))

    def live_chunks(self, assigned: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """The number of chunks assigned to each pack."""
        return np.bincount(self._pack_of(np.flatnonzero(assigned)), minlength=len(self._starts) - 1)

    def live_bytes(self, assigned: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Stored bytes of the chunks assigned to each pack."""
        rows = np.flatnonzero(assigned)
        # Sums of weights are doubles: exact up to 2^53 bytes.
        return np.bincount(self._pack_of(rows), self._stored[rows], len(self._starts) - 1).astype(
            np.int64
        )

    def of_pack(self, pack: int, assigned: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """The part of `assigned` for the pack at position `pack`, in order of offset."""
        return assigned[self._starts[pack] : self._starts[pack + 1]]

    def _pack_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.searchsorted(self._starts, rows, side="right") - 1

    def _preference(self, assigned: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """The rank of each pack: lower is better."""
        rank = np.empty(len(self._starts) - 1, np.int64)
        rank[np.argsort(-self.live_bytes(assigned), kind="stable")] = np.arange(len(rank))
        return rank


def _first_of_each(keys: Keys) -> npt.NDArray[np.bool_]:
    """Flags the first of each run of equal sorted `keys`."""
    first = np.ones(len(keys), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    return first
