"""How much of the package one operation enters: files, changes of room, calls of ours.
`python -m tests.support.entered` prints it for the operations below.

A change is a call or a return that leads from a file of one room to a file of another (a room is a
folder of `ckptstore/`). A call is one of a function of ours; comprehensions and a generator's
resumptions do not count. Other threads of the store count as well, each with its own changes.
"""

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import ckptstore

_ROOT = f"{Path(ckptstore.__file__).parent}/"
_TENSORS = 12


@dataclass(frozen=True, slots=True)
class Entered:
    """What ran; `files` are below the package."""

    files: frozenset[str]
    changes: int
    calls: int

    def __str__(self) -> str:
        return f"{len(self.files)} files, {self.changes} changes, {self.calls} calls"


class _Trace:
    def __init__(self) -> None:
        self.files: set[str] = set()
        self.changes = self.calls = 0
        self._room = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(_ROOT) or event not in ("call", "return"):
            return
        file = code.co_filename.removeprefix(_ROOT)
        self.files.add(file)
        room = file.rpartition("/")[0]
        if event == "call":
            # A lambda is a call; a generator begins before its first line has been left.
            begins = not code.co_flags & CO_GENERATOR or frame.f_lasti < 10
            self.calls += begins and code.co_name not in ("<genexpr>", "<listcomp>", "<dictcomp>")
            self._enter(room)
            return
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename.startswith(_ROOT):
            self._enter(caller.f_code.co_filename.removeprefix(_ROOT).rpartition("/")[0])

    def _enter(self, room: str) -> None:
        self.changes += getattr(self._room, "now", None) not in (None, room)
        self._room.now = room


def trace(act: Callable[[], Any]) -> Entered:
    """What `act` enters, on this thread and on those that it starts."""
    found = _Trace()
    threading.setprofile(found)
    sys.setprofile(found)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # None ends it
    return Entered(frozenset(found.files), found.changes, found.calls)


@contextmanager
def operations() -> Iterator[dict[str, Callable[[], Any]]]:
    """Operations on a warm store of a dozen small tensors, in the order in which to call them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ckptstore.open(Path(folder) / "store", threads=1) as store,
    ):
        states = [
            {"model": {f"w{i}": torch.full((100,), float(i + n)) for i in range(_TENSORS)}}
            for n in range(4)
        ]
        target = {"model": {f"w{i}": torch.zeros(100) for i in range(_TENSORS)}}
        store.commit(states[0], step=0)
        store.commit(states[1], step=1)
        store.checkout(1).restore(target)
        yield {
            "commit": lambda: store.commit(states[2], step=2),
            "restore": lambda: store.checkout(2).restore(target),
            "gc": lambda: store.gc(grace_s=0),
        }


def main() -> None:
    with operations() as found:
        for name, act in found.items():
            print(f"{name:<8} {trace(act)}")


if __name__ == "__main__":
    main()
