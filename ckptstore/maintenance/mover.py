"""How do chunks move into new packs? gc, `compact`, mirrors and `repair` plan what moves where;
the steps that they share are here.

The order is always the same, and it makes a move safe: what was read is verified, the new packs are
durable before an entry lists them, and what they replace is condemned by that entry at the
earliest.

| who | plans | reads | compares with | writes | entry | after a refusal |
|---|---|---|---|---|---|---|
| gc | `gc.plan` | packs, by footer | ids | as stored | register, condemns | less, or a new mark |
| compact | `compact.plan` | by id | checksums | planes, deltas | register | fails; a gc follows |
| mirror | `mirror_plan` | by id | ids | as committed, patches | register; commit | again, 5 times |
| thin | `retention` | metadata | ids | pages | commit | again, 5 times |
| repair | `rescue` | any pack anywhere | ids | same codec | register, condemns | a new plan |

gc, compact and mirror let tasks read and write (`each_written`), here or on other hosts. A task
writes packs under a session of the host that asks, which alone appends the entry: so a task may
end anywhere, and begin again. What it left is deleted as the orphans of that session.
"""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ckptstore.commit.transaction import ATTEMPTS, Destination, Transaction
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import ChunkId, SessionId
from ckptstore.core.model import PackRecord
from ckptstore.log.entries import Register, new_packs
from ckptstore.log.log import Log, Refused
from ckptstore.maintenance import Spread, Stores
from ckptstore.objects.codecs import codec_id
from ckptstore.repository.chunk_reader import NO_BASES
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.pack_writer import ClosedPack, PackSet
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import Scratch, ThreadPool


class Movable(Protocol):
    """A chunk to read, and the bytes that it has."""

    @property
    def id(self) -> ChunkId: ...

    @property
    def raw_bytes(self) -> int: ...


C = TypeVar("C", bound=Movable)
T = TypeVar("T")
R = TypeVar("R")

WORKER_THREADS = 2
"""The threads of a worker that moves chunks: one waits for storage while the other computes."""


def raw_bytes_of(chunks: Iterable[Movable]) -> int:
    """The raw bytes of chunks together."""
    return sum(chunk.raw_bytes for chunk in chunks)


@contextmanager
def memory_for(chunks: Sequence[C], scratch: Scratch) -> Iterator[list[tuple[C, memoryview]]]:
    """Each chunk with memory for its raw bytes, for the duration of a block."""
    # Lent in one size, so that it fits the next chunks as well.
    with scratch.lend(max(raw_bytes_of(chunks), RUN_BYTES)) as memory:
        rows, end = [], 0
        for chunk in chunks:
            rows.append((chunk, memory[end : end + chunk.raw_bytes]))
            end += chunk.raw_bytes
        yield rows


def fill(
    objects: ObjectStore,
    rows: Sequence[tuple[Movable, memoryview]],
    why: str,
    *,
    verify_ids: bool = False,
    bases: Mapping[ChunkId, memoryview] = NO_BASES,
) -> None:
    """Read each chunk into its memory, and verify it. Raises as `ObjectStore.read_into`, which says
    what `bases` are; `why` is for errors."""
    objects.read_into(
        b"".join(chunk.id for chunk, _ in rows),
        [memory for _, memory in rows],
        describe=lambda i: why,
        verify_ids=verify_ids,
        bases=bases,
    )


def persist(handle: StoreHandle, attempt: Callable[[], T]) -> T:
    """What `attempt` returns, which appends an entry. It is repeated while others change what the
    entry refers to (`Refusal.again`); then raises the last `Refused`."""
    for left in reversed(range(ATTEMPTS)):
        try:
            return attempt()
        except Refused as error:
            if not left or not error.refusal.again:
                raise
            handle.objects.sync(handle.log.replay(), thorough=True)
    raise AssertionError("the last attempt returns or raises")


def list_packs(log: Log, transaction: Transaction) -> tuple[PackRecord, ...]:
    """List the packs of a transaction, which are durable, and condemn none; their records in the
    log."""
    state = log.replay()
    records = tuple(pack.record for pack in transaction.packs.closed)
    body = Register(transaction.session, state.n, state.fence, records, frozenset())
    entry = transaction.append(body)
    transaction.index(new_packs(entry))
    assert isinstance(entry.body, Register)
    return entry.body.packs


@dataclass(frozen=True, slots=True)
class Writing(Generic[T]):
    """An item whose new packs have the name of `session`."""

    session: SessionId
    item: T


@dataclass(frozen=True, slots=True)
class Written(Generic[R]):
    """What a task has made of its item, with the durable packs that no entry lists yet."""

    packs: tuple[ClosedPack, ...]
    result: R


@contextmanager
def packs_of(store: StoreHandle, threads: ThreadPool, session: SessionId) -> Iterator[PackSet]:
    """The packs that a task writes: durable after the block, or deleted if that raises. A task that
    begins again, while the one before may still write, gives them other names."""
    attempt = int.from_bytes(os.urandom(4), "little") % 10**7
    codec = codec_id(store.config.codec)
    packs = PackSet(store.storage, session, threads, codec=codec, rank=attempt)
    try:
        yield packs
        packs.wait()
    except BaseException:
        packs.drop()
        raise


def each_written(
    to: Destination,
    what: str,
    spread: Spread[Stores],
    task: Callable[[Stores, ThreadPool, Writing[T]], Written[R]],
    items: Iterable[T],
) -> Generator[tuple[T, R, Transaction], None, None]:
    """Let `task` write the packs of each item. Yields each item with its result, and with the
    transaction that has its packs: the caller enters that and appends the entry. The session is
    open from before the task until then, so gcs spare what that reads. Use it within
    `contextlib.closing`."""
    begun = dict[SessionId, Transaction]()

    def writings() -> Iterator[Writing[T]]:
        for item in items:
            transaction = Transaction.begin(to, what=what)
            begun[transaction.session] = transaction
            yield Writing(transaction.session, item)

    try:
        with closing(spread(task, writings())) as done:
            for writing, written in done:
                transaction = begun.pop(writing.session)
                transaction.packs.closed += written.packs
                yield writing.item, written.result, transaction
    except BaseException as error:
        for transaction in begun.values():
            transaction.__exit__(type(error), error, error.__traceback__)
        raise
