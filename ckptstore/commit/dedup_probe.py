"""Which bytes of a state the store has already, asked before the state is copied: hash it where it
lies, look up its chunks.

What the store has need not be copied, but its bytes are then nobody's when it is collected. So a
session is open from before the look until the commit has ended: a patient gc that condemns a pack
meanwhile does not delete it before, and what was condemned is read back (docs/decisions/023-…).
"""

from collections.abc import Iterator, Mapping
from itertools import compress

from ckptstore.commit.commit import extent_of
from ckptstore.commit.hashing import hash_chunks
from ckptstore.commit.plan import Part, plan_commit
from ckptstore.commit.write import Dedup, DedupHints
from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.core.model import INLINE_BYTES
from ckptstore.log.log import Log
from ckptstore.log.sessions import Session, open_session
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import FlatState, Source
from ckptstore.state.leaves import TensorSource
from ckptstore.state.staging import LookedUp, merged


class DedupProbe:
    """Looks for the chunks of states in one store."""

    def __init__(self, config: StoreConfig, objects: ObjectStore, log: Log) -> None:
        self._config, self._objects, self._log = config, objects, log

    def open_session(self) -> Session:
        """To be had before `find`, and ended once the commit has: as long as it lives, what was
        found can be read."""
        return open_session(self._objects.storage, "stage")

    def find(self, flats: Mapping[str, FlatState], threads: ThreadPool) -> dict[int, LookedUp]:
        """What is missing of each tensor that would have to be copied, by its leaf's number through
        all keys."""
        wanted, extents, sources = [], [], []
        for n, (flat, i, source) in enumerate(_leaves(flats)):
            if (
                isinstance(source, TensorSource)
                and source.known_ids is None
                and source.nbytes > INLINE_BYTES
            ):
                wanted.append(n)
                extents.append(extent_of(flat, i))
                sources.append(source)
        plan = plan_commit(extents, self._config.chunk_bytes)
        ids = hash_chunks(
            plan,
            sources,
            threads,
            threads.count,
            self._objects.hash,
            copied=self._objects.second_names is not None,
        )
        live = self._live(b"".join(ids[part.leaf] for part in plan.parts))
        return {
            wanted[part.leaf]: LookedUp(ids[part.leaf], _missing(part, live)) for part in plan.parts
        }

    def _live(self, ids: bytes) -> Iterator[bool]:
        state = self._log.replay()
        self._objects.sync(state)
        return iter(Dedup(self._objects, state, DedupHints()).live(ids) if ids else ())


class GcPin:
    """A session that keeps what was found in the store from a patient gc, until `end`: for chunks
    that are handed out and not written."""

    def __init__(self, objects: ObjectStore, log: Log, what: str) -> None:
        """Raises what storage does if the session cannot be written down."""
        self.objects = objects
        self._session = open_session(objects.storage, what)
        state = log.replay(
            refresh=True
        )  # not before the session is there: a gc that has condemned by now has not seen it
        objects.sync(state)
        self._dedup = Dedup(objects, state, DedupHints())

    def held(self, ids: bytes) -> dict[bytes, int]:
        """The raw bytes of those of `ids` that live packs hold."""
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
        """Nobody asks for what was found any more. Idempotent."""
        self._session.end()


def _leaves(flats: Mapping[str, FlatState]) -> Iterator[tuple[FlatState, int, Source]]:
    for flat in flats.values():
        yield from ((flat, i, source) for i, source in enumerate(flat.leaves))


def _missing(part: Part, live: Iterator[bool]) -> tuple[tuple[int, int], ...]:
    lacks = [not next(live) for _ in range(len(part))]
    return tuple(merged(compress(part.grid.spans(), lacks)))
