"""Small stores to forget in and collect, the objects that lie in them, and a storage that stops after its n-th change."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ckptstore.access import open
from ckptstore.core.ids import CommitId, pack_key, twin_key
from ckptstore.engine.opening import Opening
from ckptstore.history.log import Log
from ckptstore.upkeep.gc import GcOptions, GcReport, collect

NOT_COUNTED = ("index/", "log/", "reserve")
ALL = GcOptions(max_unused=0.0)


def state_of(step: int, *, own: int = 40_000, shared: int = 60_000) -> dict[str, Any]:
    """A state with a tensor of its own and one that all steps share."""
    random = torch.Generator().manual_seed(step)
    return {
        "model": {"shared": torch.arange(shared, dtype=torch.float32), "own": torch.randn(own, generator=random)},
        "step": step,
    }


def make(place: Path, steps: int, *, forget: Sequence[int] = (), codec: str = "raw") -> list[CommitId]:
    """A store of `steps` commits, of which those at `forget` are forgotten."""
    with open(place, chunk_bytes=65536, codec=codec) as store:
        commits = [store.commit(state_of(step), step=step).id for step in range(steps)]
        if forget:
            store.forget([commits[i] for i in forget])
    return commits


def verify(place: Path, steps: Sequence[int]) -> None:
    """Every one of these steps is there, bit for bit."""
    with open(place) as store:
        for step in steps:
            restored = store.checkout(step).state_dict()
            for name, tensor in state_of(step)["model"].items():
                assert torch.equal(restored["model"][name], tensor), (step, name)


def size_of(place: Path) -> int:
    """Bytes of everything that gc answers for."""
    return sum(size for _, size in objects(place))


def objects(place: Path) -> list[tuple[str, int]]:
    found = [(path.relative_to(place).as_posix(), path.stat().st_size) for path in sorted(place.rglob("*")) if path.is_file()]
    return [(key, size) for key, size in found if not key.startswith((*NOT_COUNTED, "ckptstore.json"))]


def garbage(place: Path) -> set[str]:
    """Packs, documents and temporaries that the log does not list, and condemned packs."""
    with opened(place) as opening:
        state = opening.log.replay()
        live = [pack for pack in state.packs.values() if pack.live]
        listed = {pack_key(pack.id) for pack in live} | {twin_key(pack.id) for pack in live if pack.metadata}
        listed |= {f"commits/{row.session}-{commit}" for commit, row in state.commits.items()}
    return {key for key, _ in objects(place)} - listed


@contextmanager
def opened(place: Path) -> Iterator[Opening]:
    opening = Opening(place)
    try:
        yield opening
    finally:
        opening.close()


def collected(place: Path, options: GcOptions = ALL, **kwargs: Any) -> GcReport:
    """One gc by a process that has just opened the store."""
    with opened(place) as opening:
        return collect(opening, options, **kwargs)


class Stopped(BaseException):
    """The process ended here, as far as the store can tell. No handler of errors may see it."""


class StoppingBackend:
    """A backend on which the change after the first `changes` ends the process; `changed` counts them."""

    def __init__(self, backend: Any, changes: int) -> None:
        self._backend = backend
        self._left = changes
        self.changed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def put(self, *args: Any, **kwargs: Any) -> None:
        self._change()
        self._backend.put(*args, **kwargs)

    def put_new(self, *args: Any) -> bool:
        self._change()
        created: bool = self._backend.put_new(*args)
        return created

    def delete(self, key: str) -> None:
        self._change()
        self._backend.delete(key)

    def create(self, *args: Any, **kwargs: Any) -> Any:
        self._change()
        return _StoppingWriter(self, self._backend.create(*args, **kwargs))

    def _change(self) -> None:
        if not self._left:
            raise Stopped
        self._left -= 1
        self.changed += 1


class _StoppingWriter:
    def __init__(self, stopping: StoppingBackend, writer: Any) -> None:
        self._stopping, self._writer = stopping, writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def append(self, *args: Any) -> None:
        self._stopping._change()
        self._writer.append(*args)

    def finish(self) -> None:
        self._stopping._change()
        self._writer.finish()

    def discard(self) -> None:
        """A process that has ended discards nothing."""
        if self._stopping._left:
            self._writer.discard()


def opened_stopping(place: Path, changes: int) -> tuple[Opening, StoppingBackend]:
    """A store whose process ends after so many changes to it."""
    opening = Opening(place)
    stopping = StoppingBackend(opening.backend, changes)
    opening.backend = stopping
    opening.log = Log(stopping, opening.config.store, opening.config.generation)
    return opening, stopping
