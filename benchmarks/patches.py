"""`python -m benchmarks.patches FOLDER` measures commits between which few elements change, with
patches and without, beside `torch.save` with fsync, in random order of each step.

`--case sparse` changes `--changed` of the elements of bfloat16 weights by one in the last place, as
a step of reinforcement learning does; `rows` some rows of a table; `dense` all of fp32 weights with
two moments, where no patch is made and none may cost anything; `mixed` all of bfloat16 weights,
their masters and two moments. Figures are medians of the steps, processor time beside the time by
the clock; `restore` is of the first, the middle and the last commit, warm, and of weights alone.
"""

import argparse
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

import ckptstore

RESTORES = 6
"""Of each commit and store; the first does not count."""

State = dict[str, torch.Tensor]


def sparse(state: State, share: float) -> None:
    """A share of the elements moves by one in the last place."""
    words = state["w"].view(torch.int16)
    at = torch.randint(len(words), (int(len(words) * share),))
    words[at] += torch.where(torch.rand(len(at)) < 0.5, 1, -1).to(torch.int16)


def rows(state: State, share: float) -> None:
    """A share of the rows is trained."""
    table = state["table"]
    at = torch.randint(len(table), (int(len(table) * share),))
    table[at] += torch.randn(len(at), table.shape[1]) * 1e-3


def dense(state: State, share: float) -> None:
    """Every element is trained."""
    for tensor in state.values():
        tensor.mul_(1.0001).add_(1e-5)


def mixed(state: State, share: float) -> None:
    """Every element is trained, and weights are rounded from their masters."""
    dense(state, share)
    state["w"].copy_(state["masters"])


def state_of(case: str, megabytes: int) -> tuple[State, Callable[[State, float], None]]:
    nbytes = megabytes << 20
    match case:
        case "sparse":
            return {"w": torch.randn(nbytes // 2).to(torch.bfloat16)}, sparse
        case "rows":
            return {"table": torch.randn(nbytes // 512, 128)}, rows
        case "mixed":
            masters, m, v = torch.randn(3, nbytes // 14)
            return {"w": masters.to(torch.bfloat16), "masters": masters, "m": m, "v": v}, mixed
    return {name: torch.randn(nbytes // 12) for name in ("w", "m", "v")}, dense


class Timed:
    """Seconds of a step, by the clock and of the processor, and the bytes that it stored."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.processor: list[float] = []
        self.stored: list[float] = []

    def run(self, act: Callable[[], float]) -> None:
        clock, processor = time.perf_counter(), time.process_time()
        self.stored.append(act())
        self.clock.append(time.perf_counter() - clock)
        self.processor.append(time.process_time() - processor)

    def line(self, name: str, nbytes: int) -> str:
        """Medians without the first step, which stores all."""
        clock, processor = (statistics.median(each[1:]) for each in (self.clock, self.processor))
        stored = sum(self.stored[1:]) / max(len(self.stored) - 1, 1) / nbytes
        return f"{name:12} {clock:8.3f} s {processor:8.3f} s of CPU {stored:8.4f} of the bytes"


def saved(state: State, place: Path) -> float:
    with open(place, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return place.stat().st_size


def committed(store: ckptstore.Store, state: State, step: int) -> float:
    return store.commit({"state": state}, step=step).new_bytes


def restores(stores: dict[str, ckptstore.Store], state: State, step: int) -> dict[str, Timed]:
    """Warm restores of a commit, of all stores in turns."""
    found = {name: Timed() for name in stores}
    target = {"state": {name: torch.zeros_like(tensor) for name, tensor in state.items()}}

    def restored(store: ckptstore.Store) -> float:
        store.checkout(step).restore(target, select=[f"state/{name}" for name in state])
        return 0

    for _ in range(RESTORES):
        for name in random.sample(list(stores), len(stores)):
            found[name].run(partial(restored, stores[name]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", choices=("sparse", "rows", "dense", "mixed"), default="sparse")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--commits", type=int, default=16)
    asked = parser.parse_args()
    torch.manual_seed(0)
    state, change = state_of(asked.case, asked.megabytes)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    shutil.rmtree(asked.folder, ignore_errors=True)
    asked.folder.mkdir(parents=True)
    with ExitStack() as stack:

        def opened(name: str, memory: int | None) -> ckptstore.Store:
            storage = ckptstore.Storage(patch_memory_bytes=memory)
            return stack.enter_context(ckptstore.open(asked.folder / name, storage=storage))

        patched, whole = opened("patched", None), opened("whole", 0)
        acts: dict[str, Callable[[int], float]] = {
            "patches": lambda step: committed(patched, state, step),
            "whole": lambda step: committed(whole, state, step),
            "torch.save": lambda step: saved(state, asked.folder / "saved.pt"),
        }
        timed = {name: Timed() for name in acts}
        for step in range(asked.commits):
            if step:
                change(state, asked.changed)
            for name in random.sample(list(acts), len(acts)):
                timed[name].run(partial(acts[name], step))
        print(f"{asked.case}: {nbytes / 1e6:.0f} MB, {asked.changed:.1%}, {asked.commits} commits")
        for name, each in timed.items():
            print(each.line(name, nbytes))
        steps = [0, asked.commits // 2, asked.commits - 1]
        stores = {"patched": patched, "whole": whole}
        parts = (
            {"all": state, "weights": {"w": state["w"]}}
            if asked.case == "mixed"
            else {"all": state}
        )
        for part, step in ((part, step) for part in parts for step in steps):
            print(f"restore of {part} of {step}")
            for name, each in restores(stores, parts[part], step).items():
                print(each.line(name, nbytes))
    shutil.rmtree(asked.folder)


if __name__ == "__main__":
    main()
