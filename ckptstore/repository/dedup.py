"""Which chunks of a commit are new, and which does the store hold already?

`GcPin` keeps those that were found from gc, for a reader that commits nothing.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np

from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId
from ckptstore.errors import Conflict, NotFound
from ckptstore.log.log import Log
from ckptstore.log.sessions import open_session
from ckptstore.log.state import Pack, State
from ckptstore.repository.chunk_store import ObjectStore

RunKey: TypeAlias = tuple[int, int]
"""A run of consecutive chunks of a planned state: its leaf's number and its first chunk."""


class KnownRun(NamedTuple):
    """A run in the last commit of a plan: ids and checksums of its chunks, joined, and the packs
    that held them; None if that is unknown."""

    ids: bytes
    checksums: bytes
    packs: frozenset[int] | None


class DedupHints:
    """For each run, its chunks in the last commit of the same plan.

    A chunk with the checksum that it had at this place has the id that it had, and an unchanged
    run needs no index look-up either. Costs 48 bytes per chunk.
    """

    def __init__(self) -> None:
        self._found: dict[RunKey, KnownRun] = {}

    def get(self, run: RunKey) -> KnownRun | None:
        return self._found.get(run)

    def packs_of(self, run: RunKey, ids: bytes) -> frozenset[int] | None:
        """The packs that held the run's chunks if their ids were `ids`, else None."""
        known = self._found.get(run)
        return known.packs if known and known.ids == ids else None

    def hashed(self, run: RunKey, ids: bytes, checksums: bytes) -> None:
        """Record the ids and checksums of a run's chunks, both of the same bytes."""
        self._found[run] = KnownRun(ids, checksums, self.packs_of(run, ids))

    def found(self, run: RunKey, ids: bytes, packs: frozenset[int]) -> None:
        """Record the packs that hold the run's chunks, if their ids are still `ids`."""
        known = self._found.get(run)
        if known and known.ids == ids:
            self._found[run] = known._replace(packs=packs)

    def checksums(self) -> bytes:
        """The checksums of all chunks, in the plan's order."""
        return b"".join(known.checksums for _, known in sorted(self._found.items()))


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
        return [
            self._is_fresh(chunk, number)
            for chunk, number in zip(ids, self._numbers(b"".join(ids)), strict=True)
        ]

    def fresh_runs(
        self, runs: Sequence[tuple[RunKey, Sequence[ChunkId]]], hints: DedupHints
    ) -> list[list[bool]]:
        """`fresh` for each run, without a look-up for unchanged runs."""
        unknown = [
            (run, ids, joined)
            for run, ids in runs
            if not self._known(hints.packs_of(run, joined := b"".join(ids)))
        ]
        numbers = iter(
            self._numbers(b"".join(joined for _, _, joined in unknown)) if unknown else ()
        )
        found = {}
        for run, ids, joined in unknown:
            held = list(islice(numbers, len(ids)))
            found[run] = [self._is_fresh(*each) for each in zip(ids, held, strict=True)]
            if all(map(self._is_live, held)):
                hints.found(run, joined, frozenset(held))
        return [found.get(run) or [False] * len(ids) for run, ids in runs]

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

    def _known(self, packs: frozenset[int] | None) -> bool:
        if packs is None or not all(map(self._is_live, packs)):
            return False
        self.reused |= packs
        return True

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
