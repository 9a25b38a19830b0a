"""Ways in which a script ends with a commit in flight. Run with a folder and the names of ways: prints how each ended.

Each way is a fork of this script that imports nothing more and then ends as any interpreter ends.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import ckptstore
from ckptstore.engine import background
from ckptstore.index import catalog, chunks
from ckptstore.objects import store as objects

IMPORTED = (ckptstore.open, catalog, chunks, objects)
"""Once, before the forks."""

SLOW_S = 0.6


def _slowly(progress: ckptstore.CommitProgress) -> None:
    """A disk that takes its time."""
    if progress.milestone == "hashed":
        time.sleep(SLOW_S)


def _interrupting(progress: ckptstore.CommitProgress) -> None:
    if progress.milestone == "hashed":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(SLOW_S)


def _live(way: str, place: Path) -> None:
    background.NOTICE_S = 0.2
    state = {"t": torch.arange(100_000)}
    store = ckptstore.open(place, threads=1)
    if way == "a failure":
        Path(store.url, "sessions").touch()
    store.commit_async(state, step=1, on_progress=_interrupting if way == "Ctrl-C" else _slowly)
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
        _live(way, Path(sys.argv[1], way))
