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
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from ckptstore.commit.transaction import ATTEMPTS, Transaction
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import ChunkId
from ckptstore.core.model import PackRecord
from ckptstore.log.entries import Register, new_packs
from ckptstore.log.log import Log, Refused
from ckptstore.repository.chunk_reader import NO_BASES
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import Scratch


class Movable(Protocol):
    """A chunk to read, and the bytes that it has."""

    @property
    def id(self) -> ChunkId: ...

    @property
    def raw_bytes(self) -> int: ...


C = TypeVar("C", bound=Movable)
T = TypeVar("T")


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
