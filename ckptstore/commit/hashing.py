"""What are the ids of chunks, without writing them? Worker processes hash too: no torch here."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from ckptstore.commit.plan import CommitPlan, Run
from ckptstore.commit.write import PARALLEL_BYTES
from ckptstore.core.ids import CHUNK_ID_BYTES, digest
from ckptstore.repository.thread_pool import ThreadPool, shared
from ckptstore.state.leaf_sources import Source


def hash_chunks(
    plan: CommitPlan,
    sources: Sequence[Source],
    threads: ThreadPool,
    max_workers: int,
    name: Callable[[memoryview], bytes] | None = None,
    *,
    copied: bool = False,
) -> list[bytes]:
    """The chunk ids of each part of the plan, computed by at most `max_workers` threads. Writes
    nothing.

    `name` replaces the digest. One that reads its bytes twice needs `copied`: memory that others
    may write to is then copied first.
    """
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
