"""Python's cycle collector runs as often for many tensors as for few.

Each automatic collection looks at what the process has kept since the last ones, and in the end at
all of it: one for every 700 new objects makes a call on 100,000 tensors cost more than ten times
one on 10,000 (decision 039).
"""

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ckptstore

FEW, MANY = 300, 1500
CALLS: dict[str, Callable[[ckptstore.Store, dict[str, torch.Tensor]], Any]] = {
    "state_dict": lambda store, state: store.checkout(1).state_dict(),
    "restore": lambda store, state: store.checkout(1).restore(state),
    "diff": lambda store, state: store.diff(0, 1),
    "commit_async": lambda store, state: store.commit_async(state),
}
MORE = {"state_dict": 40, "restore": 40, "diff": 8, "commit_async": 8}
"""How many more may begin with `MANY`: the end of each block without collections may begin one, and
so does the verification of what was just read, which is I/O."""


def collections(folder: Path, count: int) -> dict[str, int]:
    """How many collections each of `CALLS` begins on its own thread, with `count` tensors."""
    began: list[int] = []

    def watch(phase: str, info: object) -> None:
        if phase == "start" and threading.current_thread() is threading.main_thread():
            began.append(1)

    states = [{f"{i}": torch.full((40, 4), step + i) for i in range(count)} for step in range(3)]
    found: dict[str, int] = {}
    with ckptstore.open(folder) as store:
        for step in range(2):
            store.commit(states[step], step=step)
        gc.callbacks.append(watch)
        try:
            for name, act in CALLS.items():
                gc.collect()
                began.clear()
                act(store, states[2])
                found[name] = len(began)
        finally:
            gc.callbacks.remove(watch)
    return found


def test_collections_do_not_grow_with_tensors(tmp_path: Path) -> None:
    usual = gc.get_threshold()
    gc.set_threshold(50, *usual[1:])
    try:
        few, many = (collections(tmp_path / str(count), count) for count in (FEW, MANY))
    finally:
        gc.set_threshold(*usual)
    grown = {name: (few[name], many[name]) for name in CALLS if many[name] > few[name] + MORE[name]}
    assert not grown, f"collections with {FEW} and with {MANY} tensors: {grown}"
