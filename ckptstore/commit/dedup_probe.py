"""Which bytes of a state the store has already, asked before the state is copied: hash it where it
lies, look up its chunks.

What the store has need not be copied, but its bytes are then nobody's when it is collected. So a
session is open from before the look until the commit has ended: a patient gc that condemns a pack
meanwhile does not delete it before, and what was condemned is read back (docs/decisions/023-…).

The ids of chunks where they are: nothing is written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress, pairwise

from ckptstore.commit.commit import extent_of
from ckptstore.commit.plan import CommitPlan, Part, Run, plan_commit
from ckptstore.commit.write import PARALLEL_BYTES
from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import CHUNK_ID_BYTES, digest
from ckptstore.core.model import INLINE_BYTES
from ckptstore.log.log import Log
from ckptstore.log.sessions import Session, open_session
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import Dedup, DedupHints
from ckptstore.repository.thread_pool import ThreadPool, shared
from ckptstore.state.leaf_sources import FlatState, Source
from ckptstore.state.leaves import TensorSource
from ckptstore.state.staging import LookedUp, merged


def hash_chunks(
    plan: CommitPlan,
    sources: Sequence[Source],
    threads: ThreadPool,
    max_workers: int,
    name: Callable[[memoryview], bytes] | None = None,
    *,
    copied: bool = False,
) -> list[bytes]:
    """Per part of the plan the ids of its chunks, in order, as `name` gives them if there is one;
    found by at most `max_workers` threads. If `copied`, what others may write to is copied first,
    for a `name` that reads its bytes twice."""
    ids = [bytearray(CHUNK_ID_BYTES * len(part)) for part in plan.parts]

    def work() -> None:
        for batch in batches:
            for run in batch:
                at = (run.first - run.part.first) * CHUNK_ID_BYTES
                found = b"".join(map(name or digest, _views(run, sources[run.part.leaf], copied)))
                ids[run.part.leaf][at : at + len(found)] = found

    batches = shared(plan.batches)
    if plan.logical_bytes <= PARALLEL_BYTES or max_workers == 1:
        work()
    else:
        threads.together([work] * min(max_workers, len(plan.batches)), batches.stop)
    return [bytes(each) for each in ids]


def _views(run: Run, source: Source, copied: bool) -> list[memoryview]:
    base, end = run.cuts[0], run.cuts[-1]
    memory = None if copied and not source.still else source.view(base, end)
    if memory is None:
        memory = memoryview(bytearray(run.raw_bytes))
        source.stage(base, end, memory)
    return [memory[start - base : stop - base] for start, stop in pairwise(run.cuts)]


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
