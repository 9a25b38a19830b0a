"""Which chunks of a commit are new, and which does the store hold already?

`GcPin` keeps those that were found from gc, for a reader that commits nothing.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from ckptstore.core.ids import CHECKSUM_BYTES, CHUNK_ID_BYTES, ChunkId
from ckptstore.errors import Conflict, NotFound
from ckptstore.log.log import Log
from ckptstore.log.sessions import open_session
from ckptstore.log.state import Pack, State
from ckptstore.repository.chunk_store import ObjectStore


class ChunkTable:
    """The chunks of a plan in one commit, leaf by leaf in grid order: ids, checksums, and the
    number of the live pack that held each chunk before (0: none). Takes 56 bytes per chunk.

    In the next commit of the same plan, a chunk with the checksum that it had at this place has the
    id that it had, and is not looked up while its pack lives.
    """

    def __init__(self, counts: Mapping[int, int]) -> None:
        """`counts` has the number of chunks of each leaf."""
        stops = list(accumulate(counts.values(), initial=0))
        self._spans = dict(zip(counts, pairwise(stops), strict=True))
        self.ids = memoryview(bytearray(CHUNK_ID_BYTES * stops[-1]))
        self.checksums = memoryview(bytearray(CHECKSUM_BYTES * stops[-1]))
        self.packs = memoryview(array("Q", bytes(8 * stops[-1])))

    def place(self, leaf: int, first: int, count: int) -> slice:
        """Where `count` chunks of a leaf are, from its number `first` on."""
        start = self._spans[leaf][0] + first
        return slice(start, start + count)

    def record(
        self, at: slice, ids: Iterable[bytes], checksums: Iterable[bytes], packs: Sequence[int]
    ) -> None:
        """Write the chunks `at` a place."""
        self.ids[_items(at, CHUNK_ID_BYTES)] = b"".join(ids)
        self.checksums[_items(at, CHECKSUM_BYTES)] = b"".join(checksums)
        self.packs[at] = array("Q", packs)

    def ids_at(self, at: slice) -> list[ChunkId]:
        """The ids of the chunks `at` a place."""
        return list(map(ChunkId, items_of(bytes(self.ids[_items(at, CHUNK_ID_BYTES)]))))

    def checksums_at(self, at: slice) -> list[bytes]:
        """The checksums of the chunks `at` a place."""
        found = bytes(self.checksums[_items(at, CHECKSUM_BYTES)])
        return items_of(found, CHECKSUM_BYTES)

    def rows(self) -> bytes:
        """The checksum and the id of each chunk, row by row."""
        every = slice(0, len(self.packs))
        columns = zip(self.checksums_at(every), self.ids_at(every), strict=True)
        return b"".join(map(b"".join, columns))

    def ids_by_leaf(self) -> dict[int, bytes]:
        """All ids."""
        spans = self._spans.items()
        return {leaf: bytes(self.ids[_items(slice(*span), CHUNK_ID_BYTES)]) for leaf, span in spans}


def _items(at: slice, nbytes: int) -> slice:
    """`at` in a table with items of `nbytes` each."""
    return slice(at.start * nbytes, at.stop * nbytes)


def items_of(joined: bytes, nbytes: int = CHUNK_ID_BYTES) -> list[bytes]:
    """The items of `nbytes` each that make up `joined`."""
    return [joined[at : at + nbytes] for at in range(0, len(joined), nbytes)]


class DedupHints:
    """What one commit of a plan leaves for the next."""

    last: ChunkTable | None = None


class Dedup:
    """Decides which chunks a commit writes: those that no reliable live pack holds, each once.

    Thread-safe.
    """

    def __init__(self, objects: ObjectStore, state: State) -> None:
        self._objects = objects
        self._state = state
        self._suspected = objects.suspect_packs.packs()
        self._live: dict[int, bool] = {}
        self._taken: dict[ChunkId, object] = {}
        self.reused: set[int] = set()

    def fresh(self, ids: Sequence[ChunkId]) -> list[bool]:
        """For each chunk, whether the caller must write it. Adds the packs of the others to
        `reused`."""
        return self.look_up(ids)[0]

    def look_up(self, ids: Sequence[ChunkId]) -> tuple[list[bool], list[int]]:
        """As `fresh`, and for each chunk the number of the live pack that holds it, or 0."""
        numbers = self._numbers(b"".join(ids))
        is_fresh = [self._is_fresh(*each) for each in zip(ids, numbers, strict=True)]
        return is_fresh, [number if self._is_live(number) else 0 for number in numbers]

    def are_live(self, packs: Iterable[int]) -> bool:
        """Whether all of `packs`, by number, can be relied on for their chunks; 0 cannot."""
        return all(map(self._is_live, packs))

    def live(self, ids: bytes) -> list[bool]:
        """For each of `ids`, whether a live pack holds it. Changes nothing."""
        return [self._is_live(number) for number in self._numbers(ids)]

    def read_back(self, chunk: ChunkId, nbytes: int) -> memoryview:
        """The bytes of a chunk that a live pack held when the state was staged.

        A pack condemned since is readable until it is deleted; then this raises `Conflict`, because
        no copy of the bytes is left.
        """
        data = memoryview(bytearray(nbytes))
        try:
            self._objects.read_into(chunk, [data], verify_ids=True)
        except NotFound as error:
            raise Conflict(
                f"gc has deleted chunk {chunk.hex()[:12]} since the state was staged, before its "
                "bytes were copied; repeat the commit, without a forced gc beside it"
            ) from error
        return data

    def _numbers(self, ids: bytes) -> list[int]:
        """The number of the pack that holds each chunk; 0 for none. Packs count from 1."""
        if not self._state.packs:
            return [0] * (len(ids) // CHUNK_ID_BYTES)
        where = self._objects.locate(ids)
        # numpy's tolist is untyped
        return np.where(where["found"] == 1, where["pack"], 0).tolist()  # type: ignore[no-any-return]

    def _is_fresh(self, chunk: ChunkId, number: int) -> bool:
        if self._is_live(number):
            self.reused.add(number)
            return False
        me = object()
        return self._taken.setdefault(chunk, me) is me

    def _is_live(self, number: int) -> bool:
        live = self._live.get(number)
        if live is None:
            pack = self._state.packs.get(number)
            live = self._live[number] = pack is not None and self._is_reliable(pack)
        return live

    def _is_reliable(self, pack: Pack) -> bool:
        return pack.live and pack.id not in self._suspected and self._objects.is_there(pack)


class GcPin:
    """A session that protects chunks found in the store from gc (unless forced) until `end`."""

    def __init__(self, objects: ObjectStore, log: Log, what: str) -> None:
        """Raises the storage error if the session cannot be opened."""
        self.objects = objects
        self._session = open_session(objects.storage, what)
        # Replay after opening the session: a gc that condemned packs earlier has not seen it.
        state = log.replay(refresh=True)
        objects.sync(state)
        self._dedup = Dedup(objects, state)

    def held(self, ids: bytes) -> dict[bytes, int]:
        """The raw size of each of `ids` that a live pack holds."""
        if not ids:
            return {}
        sizes = self.objects.locate(ids)["raw"].tolist()
        live = self._dedup.live(ids)
        return {
            ids[i * CHUNK_ID_BYTES : (i + 1) * CHUNK_ID_BYTES]: sizes[i]
            for i in range(len(sizes))
            if live[i]
        }

    def end(self) -> None:
        """Stop protecting the chunks. Idempotent."""
        self._session.end()
