"""A storage that fails or hangs when it is told to: at what a commit creates. Answers of the log
that are lost."""

import threading
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from random import Random
from typing import Any

import pytest

from ckptstore.errors import Busy, CkptStoreError, NoSpace, ReadOnly, Unavailable
from ckptstore.log import log
from ckptstore.log.entries import Entry
from ckptstore.store import Store

KINDS: tuple[type[CkptStoreError], ...] = (NoSpace, Unavailable, ReadOnly, Busy)
HANGS_S = 120


class Faults:
    """Makes the creates of `store` fail with `error`, or wait while `held`. Of an attempt, only the
    creates from number `after` on fail."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: CkptStoreError | None = None
        self.after = 0
        self.failed = 0
        self.there, self._free = threading.Event(), threading.Event()
        self._free.set()
        self._create = store._handle.storage.create
        monkeypatch.setattr(store._handle.storage, "create", self._made)

    def draw(self, random: Random, share: float) -> None:
        """Whether and how the next commit fails."""
        failing = random.random() < share
        self.error = random.choice(KINDS)("the storage had a bad moment") if failing else None
        self.after = random.randrange(3)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Creates hang within the block; `there` is set once one does."""
        self.there.clear()
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()

    def _made(self, *args: Any, **options: Any) -> Any:
        if not self._free.is_set():
            self.there.set()
            assert self._free.wait(HANGS_S)
        if self.error is not None:
            if self.after <= 0:
                self.failed += 1
                raise type(self.error)(*self.error.args)
            self.after -= 1
        return self._create(*args, **options)


class Fate(Enum):
    """What becomes of an entry whose answer is lost."""

    MADE = "made"
    LATE = "late"
    """It is made when the next entry is sent, just before that one."""
    NEVER = "never"


class LostAnswers:
    """Appends to the log of `store` whose answer is lost: `left` has the fates of those to come."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: list[Fate] = []
        self.error: type[BaseException] = Unavailable
        self._late: list[tuple[Entry, bytes]] = []
        backend = store._handle.log._backend
        self._create = backend.create
        monkeypatch.setattr(backend, "create", self._answered)
        monkeypatch.setattr(log, "LOCAL_PATIENCE_S", 0)

    def arrive(self) -> None:
        """Create what is late, unless another entry has its number."""
        late, self._late = self._late, []
        for each in late:
            self._create(*each)

    def _answered(self, entry: Entry, data: bytes) -> bool:
        self.arrive()
        if not self.left:
            return self._create(entry, data)
        fate = self.left.pop(0)
        if fate is Fate.LATE:
            self._late.append((entry, data))
        elif fate is Fate.MADE:
            self._create(entry, data)
        raise self.error("the answer was lost")


def assert_one_line(store: Store, steps: Set[int | None]) -> None:
    """Each commit follows the one before, and `steps` are among them."""
    found = store.log()
    made = [info.step or 0 for info in reversed(found)]
    assert made == sorted(set(made)) and steps <= set(made)
    assert [info.parents for info in found] == [*((info.id,) for info in found[1:]), ()]


def assert_made_once(store: Store, steps: Sequence[int]) -> None:
    """The commits are those of `steps`, and each follows the one before."""
    assert len(store.log()) == len(steps)
    assert_one_line(store, set(steps))
