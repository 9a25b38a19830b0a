"""A storage that fails or hangs when it is told to: at what a commit creates."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from ckptstore.errors import Busy, CkptStoreError, NoSpace, ReadOnly, Unavailable
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
