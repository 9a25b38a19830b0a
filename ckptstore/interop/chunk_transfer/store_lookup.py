"""Which chunks of a state does the store already have? Looked up by quick names where known, by ids
while that pays.

A quick name is known if this process has hashed the chunk both ways, as its commits do beside a
transport (docs/decisions/040-…). A failed lookup costs more than a copy, so lookups stop when most
of them fail.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ckptstore.commit.plan import CommitPlan, Run
from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.errors import Unavailable
from ckptstore.interop.chunk_transfer.chunk_names import is_named, quick_name
from ckptstore.interop.chunk_transfer.staging import Part, blank_names, read_chunks
from ckptstore.repository.gc_pin import GcPin
from ckptstore.repository.lru import SecondNames
from ckptstore.repository.thread_pool import ThreadPool

PROBE_CHUNKS = 64
"""Failed lookups before giving up; each success adds two."""

_STRIDE = 8
"""Batches are spread over the state, so that early results represent the rest."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Chunks that the store keeps until `guard` ends: their ids by quick name, and their raw bytes
    by either. `second_names` of the store are quick names.
    """

    guard: GcPin
    second_names: SecondNames
    ids: dict[bytes, bytes] = field(default_factory=dict)
    sizes: dict[bytes, int] = field(default_factory=dict)

    def add(self, ids: Mapping[bytes, bytes]) -> int:
        """Add those of the chunks, given by quick names, that live packs hold; returns their
        number.
        """
        held = self.guard.held(b"".join(ids.values()))
        found = {name: chunk for name, chunk in ids.items() if chunk in held}
        self.sizes.update(held)
        self.sizes.update((name, held[chunk]) for name, chunk in found.items())
        self.ids.update(found)
        return len(found)

    def check(self, names: Sequence[bytes], data: Sequence[memoryview]) -> None:
        """Raise `Unavailable` if one of these chunks does not match its quick name, and forget that
        name.
        """
        for name, each in zip(names, data, strict=True):
            if not is_named(each, name):
                self.second_names.forget(name)
                raise Unavailable(
                    f"chunk {self.ids[name].hex()[:12]} of the store is not the one that "
                    f"{name.hex()[:12]} is; send it again"
                )


class AdaptiveProbe:
    """Whether further lookups pay; with `patience`, always. Thread-safe."""

    def __init__(self, *, patience: bool = False) -> None:
        self._patience, self._lock = patience, threading.Lock()
        self._left = PROBE_CHUNKS

    def add(self, looked: int, found: int) -> None:
        with self._lock:
            self._left += 3 * found - looked

    def __bool__(self) -> bool:
        return self._patience or self._left > 0


def find_stored(
    plan: CommitPlan,
    parts: Sequence[Part],
    threads: ThreadPool,
    guard: GcPin,
    *,
    patience: bool = False,
) -> tuple[list[bytearray], Stored]:
    """The chunks that the store has, and the names of each part's chunks as far as they were looked
    up; with `patience`, all.
    """
    second_names = guard.objects.second_names
    assert second_names is not None, "a transport has asked for them"
    names, stored, known = blank_names(plan), Stored(guard, second_names), dict[bytes, bytes]()
    by_name, by_id = AdaptiveProbe(patience=patience), AdaptiveProbe(patience=patience)
    scratches = threading.local()

    def learn(data: memoryview) -> tuple[bytes, bytes]:
        """Record both names of a chunk, from one copy: they name the same bytes even if the tensor
        changes.
        """
        if len(getattr(scratches, "memory", b"")) < len(data):
            scratches.memory = memoryview(bytearray(len(data)))
        copy = scratches.memory[: len(data)]
        copy[:] = data
        return second_names.learn(copy)

    def task(batch: Sequence[Run]) -> None:
        if not by_name:
            return
        learned, looked, found = dict[bytes, bytes](), 0, 0
        for run in batch:
            for number, (_, _, data) in enumerate(
                read_chunks(parts[run.part.leaf].source, run), run.first
            ):
                name, looked = quick_name(data), looked + 1
                if (chunk := second_names.id_of(name)) is not None:
                    known[name], found = chunk, found + 1
                elif by_id:
                    made, name = learn(data)
                    learned[name] = made
                names[run.part.leaf][number * CHUNK_ID_BYTES : (number + 1) * CHUNK_ID_BYTES] = name
        found_by_id = stored.add(learned)
        by_id.add(len(learned), found_by_id)
        by_name.add(looked, found + found_by_id)

    threads.spread(task, list(_strided(plan.batches)))
    stored.add(known)
    return names, stored


def _strided(batches: Sequence[tuple[Run, ...]]) -> Iterator[tuple[Run, ...]]:
    return chain.from_iterable(batches[first::_STRIDE] for first in range(_STRIDE))
