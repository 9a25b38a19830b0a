"""Ways in which a script ends with a commit in flight. Run with a folder and the names of ways,
`KIND: WAY`: prints how each ended.

Each way is a fork of this script that imports nothing more and then ends as any interpreter ends.
The kind says who makes the commit: a `thread`, a `process`, or a thread while the state is still
being copied (`lazy`).
"""

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import ckptstore
from ckptstore.commit import pending as in_flight
from ckptstore.index import catalog, chunks
from ckptstore.repository import chunk_store as objects

IMPORTED = (
    ckptstore.open,
    catalog,
    chunks,
    objects,
    torch.compiler.disable(len),
    torch.optim.SGD([torch.zeros(1)]).state_dict(),
)
"""Once, before the forks: optimizers import torch's compiler."""

LONGEST_S = 60.0
"""So long a commit is held at most until the wait for it has been told."""

WAITS_AT = {"thread": "hashed", "process": "hashed", "lazy": "staged"}
"""The milestone at which each kind of commit is in flight when the script ends."""

_kind = "thread"
_said = Path()
"""Where this process's stderr goes."""
_called = threading.Event()
"""Set when `commit_async` has returned: who is interrupted in it calls the commit off."""


def _until_told() -> None:
    ends = time.monotonic() + LONGEST_S
    while b"waiting for" not in _said.read_bytes() and time.monotonic() < ends:
        time.sleep(0.01)


def _slowly(progress: ckptstore.CommitProgress) -> None:
    """A disk that takes its time, and so does what copies lazily."""
    if progress.milestone == WAITS_AT[_kind]:
        _until_told()


def _interrupting(progress: ckptstore.CommitProgress) -> None:
    if progress.milestone == WAITS_AT[_kind]:
        _called.wait(LONGEST_S)
        os.kill(os.getpid(), signal.SIGINT)
        _until_told()


def _live(kind: str, way: str, place: Path) -> None:
    global _kind, _said
    _kind, _said, in_flight.NOTICE_S = kind, place.with_name(f"{place.name}.err"), 0.2
    model = torch.nn.Linear(300, 300)
    store = ckptstore.open(
        place,
        threads=1,
        background=ckptstore.Async(executor="process" if kind == "process" else "thread"),
    )
    if way == "a failure":
        Path(store.url, "sessions").touch()
    store.commit_async(
        {"model": model, "optimizer": torch.optim.SGD(model.parameters())},
        step=1,
        background=ckptstore.Async(
            staging="lazy" if kind == "lazy" else "eager",
            on_progress=_interrupting if way == "Ctrl-C" else _slowly,
        ),
    )
    _called.set()
    if way == "an exception":
        raise ZeroDivisionError("in the training loop")
    if way == "sys.exit":
        sys.exit(3)
    if way == "Ctrl-C":
        while True:
            time.sleep(0.01)


def _main() -> str:
    folder, *ways = sys.argv[1:]
    children = {}
    gc.freeze()  # so that the forks' last collection does not copy every page of what is imported
    for way in ways:
        children[way] = os.fork()
        if not children[way]:
            log = os.open(Path(folder, f"{way}.err"), os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 2)
            return way
    for way, child in children.items():
        print(way, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep="\t", flush=True)
    return ""


if __name__ == "__main__":
    way = _main()
    if way:
        _live(*way.split(": "), Path(sys.argv[1], way))
