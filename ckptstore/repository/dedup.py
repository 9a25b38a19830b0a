"""Which chunks of a commit are new, and which does the store hold already?

`GcPin` protects the chunks that were found from gc, for a reader that commits nothing.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ckptstore.core.ids import CHECKSUM_BYTES, CHUNK_ID_BYTES, ChunkId
from ckptstore.errors import Conflict, NotFound
from ckptstore.log.log import Log
from ckptstore.log.sessions import open_session
from ckptstore.log.state import State
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.pack_writer import NewPatch


class Known(NamedTuple):
    """A chunk of a commit, and the number of the live pack that held it before (0: none)."""

    id: ChunkId
    checksum: bytes
    pack: int


class ChunkTable:
    """The chunks of a plan in one commit, leaf by leaf in grid order. Takes 56 bytes per chunk.

    In the next commit of the same plan, a chunk whose checksum is unchanged at its place keeps its
    id. It is not looked up while its pack lives.
    """

    def __init__(self, numbers: Mapping[int, range]) -> None:
        """`numbers` has the numbers of the chunks of each leaf."""
        self._places: dict[int, slice] = {}
        self._firsts: dict[int, int] = {}
        """By leaf, what a chunk's number is less than its place in the table."""
        stop = 0
        for leaf, chunks in numbers.items():
            start, stop = stop, stop + len(chunks)
            self._places[leaf] = slice(start, stop)
            self._firsts[leaf] = start - chunks.start
        self._ids = memoryview(bytearray(CHUNK_ID_BYTES * stop))
        self.checksums = memoryview(bytearray(CHECKSUM_BYTES * stop))
        self._packs = memoryview(array("Q", bytes(8 * stop)))

    def place(self, leaf: int, first: int, count: int) -> slice:
        """The rows of `count` chunks of a leaf, from the chunk number `first` on."""
        start = self._firsts[leaf] + first
        return slice(start, start + count)

    def record(self, at: slice, chunks: Sequence[Known]) -> None:
        """Write the chunks `at` a place."""
        self._ids[_items(at, CHUNK_ID_BYTES)] = b"".join([known.id for known in chunks])
        self.checksums[_items(at, CHECKSUM_BYTES)] = b"".join([known.checksum for known in chunks])
        self._packs[at] = array("Q", [known.pack for known in chunks])

    def take(self, at: slice, last: "ChunkTable") -> None:
        """Copy the chunks `at` a place from `last`, a table of the same plan."""
        ids, checksums = _items(at, CHUNK_ID_BYTES), _items(at, CHECKSUM_BYTES)
        self._ids[ids], self.checksums[checksums] = last._ids[ids], last.checksums[checksums]
        self._packs[at] = last._packs[at]

    def carry(self, leaf: int, numbers: range, last: "ChunkTable") -> None:
        """Copy chunks of a leaf, by number, from `last`, a table of another plan. What was carried
        for none is zeros, which match no chunk."""
        at = self.place(leaf, numbers.start, len(numbers))
        of = last.place(leaf, numbers.start, len(numbers))
        ids, checksums = _items(at, CHUNK_ID_BYTES), _items(at, CHECKSUM_BYTES)
        self._ids[ids] = last._ids[_items(of, CHUNK_ID_BYTES)]
        self.checksums[checksums] = last.checksums[_items(of, CHECKSUM_BYTES)]
        self._packs[at] = last._packs[of]

    def packs(self, at: slice) -> Sequence[int]:
        """The numbers of the packs of the chunks `at` a place."""
        return self._packs[at]

    def known(self, leaf: int, number: int) -> Known:
        """A chunk, by its number in the leaf."""
        i = self._firsts[leaf] + number
        return Known(
            ChunkId(bytes(self._ids[i * CHUNK_ID_BYTES : (i + 1) * CHUNK_ID_BYTES])),
            bytes(self.checksums[i * CHECKSUM_BYTES : (i + 1) * CHECKSUM_BYTES]),
            self._packs[i],
        )

    def rows(self) -> bytes:
        """The checksum and the id of each chunk, row by row."""
        return b"".join(
            bytes(self.checksums[_items(at, CHECKSUM_BYTES)])
            + bytes(self._ids[_items(at, CHUNK_ID_BYTES)])
            for at in (slice(i, i + 1) for i in range(len(self._packs)))
        )

    def ids_by_leaf(self) -> dict[int, bytes]:
        """All ids."""
        places = self._places.items()
        return {leaf: bytes(self._ids[_items(at, CHUNK_ID_BYTES)]) for leaf, at in places}


def _items(at: slice, nbytes: int) -> slice:
    """`at` in a table with items of `nbytes` each."""
    return slice(at.start * nbytes, at.stop * nbytes)


def items_of(joined: bytes, nbytes: int = CHUNK_ID_BYTES) -> list[bytes]:
    """The items of `nbytes` each, or chunk ids, that make up `joined`."""
    return [joined[at : at + nbytes] for at in range(0, len(joined), nbytes)]


class Dedup:
    """Decides which chunks a commit writes: those that no reliable live pack holds, each once.

    Thread-safe.
    """

    def __init__(self, objects: ObjectStore, state: State) -> None:
        self._objects = objects
        self._state = state
        self._suspected = objects.suspect_packs.packs()
        # A look-up may find patches in a pack that had none before, so both are of so many
        # packs with patches known (`PatchBases.known`).
        self._live: dict[int, tuple[int, bool]] = {}
        self._relied: dict[int, int] = {}
        self._reliable: dict[int, bool] = {}
        self._taken: dict[ChunkId, object] = {}
        self._distrusted: set[ChunkId] = set()
        self.reused: set[int] = set()
        """The packs that the commit relies on, by number; `reuse` adds to them."""

    def fresh(self, ids: Iterable[ChunkId]) -> list[ChunkId]:
        """The chunks that the caller must write, each once. Adds the packs of the others to
        `reused`."""
        return [
            chunk for chunk, number in self.look_up(ids).items() if not number and self.take(chunk)
        ]

    def look_up(self, ids: Iterable[ChunkId]) -> dict[ChunkId, int]:
        """For each chunk, the number of the live pack that holds it, which is then reused, or 0."""
        found = self._numbers(b"".join(ids))
        live = {chunk: number if self._is_live(number) else 0 for chunk, number in found.items()}
        self._distrusted.update(c for c, number in found.items() if number and not live[c])
        self.reuse(live.values())
        return live

    def allowed(self, patches: Iterable[NewPatch]) -> dict[ChunkId, NewPatch]:
        """Those of `patches` that may be written, by chunk: their bases lie in live packs, which
        are reused then, and no pack has the chunk itself, also now that the bases were read. One
        that has is written whole: a patch of what has a patch of it would need itself."""
        made = {patch.id: patch for patch in patches}
        ids = {*made, *(base for patch in made.values() for base in patch.bases)}
        live = self.look_up(ids) if made else {}
        return {
            c: patch
            for c, patch in made.items()
            if not (live[c] or c in self._distrusted) and all(live[b] for b in patch.bases)
        }

    def is_distrusted(self, chunk: ChunkId) -> bool:
        """Whether a look-up found a chunk in a pack that cannot be relied on."""
        return chunk in self._distrusted

    def reuse(self, packs: Iterable[int]) -> None:
        """Rely on chunks of `packs`, by number, and so on the packs that hold the bases of patches
        there; 0 is none."""
        bases = self._objects.patch_bases
        known = bases.known
        for number in set(packs):
            if number and self._relied.get(number) != known:
                self.reused.update({number}, bases.needed(number).packs)
                self._relied[number] = known

    def take(self, chunk: ChunkId) -> bool:
        """Whether the caller is the first to write a chunk that no live pack holds."""
        me = object()
        return self._taken.setdefault(chunk, me) is me

    def are_live(self, packs: Iterable[int]) -> bool:
        """Whether all of `packs`, by number, can be relied on for their chunks; 0 cannot."""
        return all(map(self._is_live, packs))

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

    def held(self, ids: bytes) -> dict[ChunkId, int]:
        """The raw size of each of `ids` that a live pack holds. Changes nothing."""
        where = self._objects.locate(ids)
        self._objects.patch_bases.note(where)
        return {
            ChunkId(chunk): raw
            for chunk, pack, raw, found in where[["chunk", "pack", "raw", "found"]].tolist()
            if found and self._is_live(pack)
        }

    def _numbers(self, ids: bytes) -> dict[ChunkId, int]:
        """The number of the pack that holds each chunk; 0 for none. Packs count from 1."""
        if not self._state.packs:
            return dict.fromkeys(map(ChunkId, items_of(ids)), 0)
        where = self._objects.locate(ids)
        self._objects.patch_bases.note(where)
        rows = where[["chunk", "pack", "found"]].tolist()
        return {ChunkId(chunk): pack if found else 0 for chunk, pack, found in rows}

    def _is_live(self, number: int) -> bool:
        bases = self._objects.patch_bases
        known = bases.known
        of, live = self._live.get(number, (-1, False))
        if of != known:
            needed = bases.needed(number)
            live = needed.complete and all(map(self._is_reliable, {number, *needed.packs}))
            self._live[number] = known, live
        return live

    def _is_reliable(self, number: int) -> bool:
        if number not in self._reliable:
            pack = self._state.packs.get(number)
            self._reliable[number] = (
                pack is not None
                and pack.live
                and pack.id not in self._suspected
                and self._objects.is_there(pack)
            )
        return self._reliable[number]


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

    def held(self, ids: bytes) -> dict[ChunkId, int]:
        """The raw size of each of `ids` that a live pack holds."""
        return self._dedup.held(ids) if ids else {}

    def end(self) -> None:
        """Stop protecting the chunks. Idempotent."""
        self._session.end()
