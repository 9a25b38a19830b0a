"""Which bytes of a state does the store have already? Hash the state in place, look up its chunks.

Those bytes are not copied, so the store must keep them: a session is open from before the look-up
until the commit has ended. gc does not delete a pack it condemns meanwhile, unless forced, and the
commit reads condemned chunks back (docs/decisions/023-…).
"""

from collections.abc import Iterator, Mapping
from itertools import compress

from ckptstore.commit.commit import extent_of
from ckptstore.commit.hashing import hash_chunks
from ckptstore.commit.plan import Part, plan_commit
from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.core.model import INLINE_BYTES
from ckptstore.log.log import Log
from ckptstore.log.sessions import Session, open_session
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import Dedup, DedupHints
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import FlatState, Source
from ckptstore.state.leaves import TensorSource
from ckptstore.state.staging import LookedUp, merged


class DedupProbe:
    """Looks up the chunks of states in one store."""

    def __init__(self, config: StoreConfig, objects: ObjectStore, log: Log) -> None:
        self._config, self._objects, self._log = config, objects, log

    def open_session(self) -> Session:
        """Open before `find` and end after the commit: keeps the chunks found readable."""
        return open_session(self._objects.storage, "stage")

    def find(self, flats: Mapping[str, FlatState], threads: ThreadPool) -> dict[int, LookedUp]:
        """The chunk ids and missing byte ranges of each tensor to be copied, by leaf number."""
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
    """A session that protects chunks found in the store from gc (unless forced) until `end`."""

    def __init__(self, objects: ObjectStore, log: Log, what: str) -> None:
        """Raises the storage error if the session cannot be opened."""
        self.objects = objects
        self._session = open_session(objects.storage, what)
        # Replay after opening the session: a gc that condemned packs earlier has not seen it.
        state = log.replay(refresh=True)
        objects.sync(state)
        self._dedup = Dedup(objects, state, DedupHints())

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


def _leaves(flats: Mapping[str, FlatState]) -> Iterator[tuple[FlatState, int, Source]]:
    for flat in flats.values():
        yield from ((flat, i, source) for i, source in enumerate(flat.leaves))


def _missing(part: Part, live: Iterator[bool]) -> tuple[tuple[int, int], ...]:
    lacks = [not next(live) for _ in range(len(part))]
    return tuple(merged(compress(part.grid.spans(), lacks)))
