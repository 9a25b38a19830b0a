"""How is a state copied so that training can go on? Plan the copies, then run them on threads.

Each byte is copied once, even if several leaves share it (tied weights, views). Flattening encodes
values, and small leaves become `bytes`; the rest goes to one staging buffer. Leaves that exceed the
buffer, the first of the state, are *borrowed*: they stay in place, and the caller waits until they
are written.

From a CUDA device bytes come through a side stream, ordered after what training launched before the
call, into pinned memory. Each copying thread waits for its piece without the GIL; several threads
keep the copy engine busy.
"""

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import finalize

import torch

from ckptstore.core import forks
from ckptstore.core.model import INLINE_BYTES
from ckptstore.core.process import uncollected
from ckptstore.objects.pack import align
from ckptstore.state import tensors
from ckptstore.state.leaf_sources import BytesSource, FlatState, HeldLeaf, Source, numbered
from ckptstore.state.staging_buffers import Buffer, BufferSource, Copy, CopyProgress, Hashed
from ckptstore.state.tensors import TensorSource

logger = logging.getLogger("ckptstore")

T = TypeVar("T")

PIECE_BYTES = 8 << 20
"""Bytes a thread copies at a time; a multiple of every element width."""

TASK_COPIES = 256


class Spread(Protocol):
    """Calls a task for every item, on several threads, and returns when all are done."""

    def __call__(self, task: Callable[[T], object], items: Sequence[T], /) -> object: ...


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """What to copy into an arena of `nbytes`.

    Leaves are numbered through all keys: `offsets` says where a leaf will lie, `small` are those
    that become `bytes`, `borrowed` those that stay where they are. `later` is what may be copied
    while training goes on.
    """

    nbytes: int
    offsets: dict[int, int]
    small: tuple[int, ...]
    borrowed: tuple[int, ...]
    tasks: tuple[tuple[Copy, ...], ...]
    later: tuple[tuple[Copy, ...], ...]


def paths_of(flats: Mapping[str, FlatState]) -> list[str]:
    """The path of each source of `leaves_of`."""
    return [
        flat.schema.paths[n]
        for flat in flats.values()
        for n in chain(
            range(len(flat.leaves)), *([n] * len(held.parts) for n, held in flat.held.items())
        )
    ]


def leaves_away(sources: Sequence[Source]) -> frozenset[int]:
    """The numbers of those that lie on a device, whose bytes may be hashed while others are on
    their way from there."""
    return frozenset(
        n
        for n, source in enumerate(sources)
        if isinstance(source, TensorSource) and source.tensor.device.type in AWAY
    )


@uncollected()
def with_leaves(flats: Mapping[str, FlatState], sources: Sequence[Source]) -> dict[str, FlatState]:
    """The same keys with other sources, which have the same numbers."""
    made = {}
    for key, flat, first in numbered(flats):
        stop = first + len(flat.leaves)
        leaves = list(sources[first:stop])
        held: dict[int, HeldLeaf] = {}
        for n, each in flat.held.items():
            parts = ((box, sources[stop + k]) for k, (box, _) in enumerate(each.parts))
            held[n] = each._replace(parts=tuple(parts))
            stop += len(each.parts)
        made[key] = FlatState(flat.schema, leaves, held, flat.marks, flat.keys)
    return made


@uncollected()
def plan_staging(
    sources: Sequence[Source], room_bytes: int, lazy: frozenset[int] = frozenset()
) -> StagingPlan:
    """Where the bytes of `sources` go, and which leaves do not fit `room_bytes`. Reads no bytes.

    Those of the leaves `lazy` that nothing else shares memory with may be copied later. Leaves
    whose chunks are known stay where they are.
    """
    small: list[int] = []
    large: dict[int, TensorSource] = {}
    for n, source in enumerate(sources):
        if isinstance(source, TensorSource) and source.known_ids is None:
            if source.nbytes > INLINE_BYTES:
                large[n] = source
            else:
                small.append(n)
    offsets: dict[int, int] = {}
    copies: list[Copy] = []
    later: list[list[Copy]] = []
    borrowed: list[int] = []
    end = 0
    for group in sorted(_groups(large), reverse=True):
        # aligned as in a pack, so that it can go to the disk from where it lies
        offset = align(end, group.nbytes)
        if borrowed or offset + group.nbytes > room_bytes:
            borrowed += [n for n, _ in group.leaves]
            continue
        is_late = True
        for n, at in group.leaves:
            offsets[n] = offset + at
            is_late &= n in lazy
        if is_late:
            later.append(group.copies(offset))
        else:
            copies += group.copies(offset)
        end = offset + group.nbytes
    in_order = chain.from_iterable(
        reversed(later)
    )  # the first leaf first: it is the first to be hashed, perhaps meanwhile
    return StagingPlan(
        end,
        offsets,
        tuple(small),
        tuple(sorted(borrowed)),
        tuple(_tasks(copies)),
        tuple(_tasks(in_order)),
    )


def stage(
    plan: StagingPlan,
    flats: Mapping[str, FlatState],
    sources: Sequence[Source],
    arena: Buffer | None,
    spread: Spread,
    arrivals: CopyProgress | None = None,
) -> dict[str, FlatState]:
    """Carry out `plan` of `sources` but for what may be copied later: the same keys with sources
    that do not change any more once that is copied, too, and what is borrowed given back. Who reads
    what is copied later waits for its arrival."""
    sources = list(sources)
    with uncollected():
        for n in plan.small:
            sources[n] = BytesSource(sources[n].read_all(), sources[n].width)
    if arena is not None:
        prepare(sources, arena)
        hashed = arena.refill(plan.offsets)
        spread(lambda task: copy_task(task, arena, hashed), plan.tasks)
        with uncollected():
            for n, offset in plan.offsets.items():
                sources[n] = BufferSource(
                    arena.memory, offset, sources[n].nbytes, sources[n].width, arrivals, hashed
                )
    return with_leaves(flats, sources)


class _Group(NamedTuple):
    """Leaves that are copied together, each at its offset: those whose memory overlaps, from
    `start` on, or one that must be gathered, whose `source` that is. In the order of the `last` of
    the leaves."""

    last: int
    nbytes: int
    start: int
    leaves: list[tuple[int, int]]
    source: TensorSource | None = None

    def copies(self, offset: int) -> list[Copy]:
        """Its copies to `offset`, in pieces."""
        _, nbytes, start, _, source = self
        if nbytes <= PIECE_BYTES:
            return [Copy(offset, nbytes, start, source)]
        return [
            Copy(offset + at, min(PIECE_BYTES, nbytes - at), start + at, source)
            for at in range(0, nbytes, PIECE_BYTES)
        ]


def _groups(sources: Mapping[int, TensorSource]) -> Iterator[_Group]:
    plain: list[tuple[int, int, int]] = []
    for n, source in sources.items():
        if source.is_plain:
            plain.append((source.tensor.data_ptr(), n, source.nbytes))
        else:
            yield _Group(n, source.nbytes, 0, [(n, 0)], source)
    leaves: list[tuple[int, int]] = []
    start = stop = last = 0
    for address, n, nbytes in sorted(plain):
        if address >= stop:
            if leaves:
                yield _Group(last, stop - start, start, leaves)
            leaves, start, stop, last = [], address, address, n
        leaves.append((n, address - start))
        stop, last = max(stop, address + nbytes), max(last, n)
    if leaves:
        yield _Group(last, stop - start, start, leaves)


def _tasks(copies: Iterable[Copy]) -> Iterator[tuple[Copy, ...]]:
    """Tasks of copies; small copies share a task, since a hand-over costs more than a few KB."""
    task: list[Copy] = []
    size = 0
    for copy in copies:
        task.append(copy)
        size += copy.nbytes
        if size >= PIECE_BYTES // 2 or len(task) == TASK_COPIES:
            yield tuple(task)
            task, size = [], 0
    if task:
        yield tuple(task)


def copy_task(task: Sequence[Copy], arena: Buffer, hashed: Hashed | None = None) -> None:
    """Make the copies of one task. What `hashed` finds to be there stays, and is noted there."""
    for offset, nbytes, start, source in task:
        if source is None:
            same = hashed.note_same(arena, offset, nbytes, start) if hashed else 0
            # without the GIL
            ctypes.memmove(arena.address + offset + same, start + same, nbytes - same)
            continue
        out = arena.memory[offset : offset + nbytes]
        with beside_training(source.tensor.device):
            tensors.read_range(source.tensor, start, start + nbytes, out)


AWAY = frozenset(["cuda"])
"""Kinds of devices whose bytes arrive by themselves, while the processor hashes others."""

_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for every device, not only the current one."""


def devices_of(sources: Iterable[Source]) -> frozenset[torch.device]:
    """The CUDA devices that some of these lie on."""
    found = (source.tensor for source in sources if isinstance(source, TensorSource))
    return frozenset(tensor.device for tensor in found if tensor.is_cuda)


def prepare(sources: Iterable[Source], arena: Buffer) -> None:
    """What is copied from `sources` to `arena` from here on was written by what the caller's
    streams have been given so far, and by nothing later that waits for the copy."""
    for device in devices_of(sources):
        _stream(device).wait_stream(torch.cuda.current_stream(device))
        _pin(arena, device)


def beside_training(device: torch.device) -> AbstractContextManager[Any]:
    """Within it, copies from `device` do not wait for what training launches meanwhile, nor
    training for them."""
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()


_streams: dict[torch.device, torch.cuda.Stream] = {}
_making_streams = forks.lock()


def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for the device. Of two, made by threads that commit at once, the one that waits could be
    another than the one that copies."""
    with _making_streams:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        return _streams[device]


def _pin(arena: Buffer, device: torch.device) -> None:
    """Once per arena, for every device, by way of `device`: one that is not used would be set up
    for it, which takes memory. Where the host allows no more locked memory, copies go through the
    driver's own buffers: slower, not wrong."""
    if arena.pinned:
        return
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        error = int(cudart.cudaHostRegister(arena.address, arena.nbytes, _PORTABLE))
    arena.pinned = True  # or not to be asked again
    if error:
        # CUDA reports it once more, to whoever launches a kernel next: that must not be training.
        with suppress(RuntimeError):
            torch.ones(1, dtype=torch.uint8, device=device)
        logger.warning(
            "%d bytes of staging memory could not be pinned (CUDA error %d): copies from the "
            "device are slower",
            arena.nbytes,
            error,
        )
    else:
        finalize(arena, cudart.cudaHostUnregister, arena.address)
