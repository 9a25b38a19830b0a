"""What many small tensors cost, nested under one key and flat at the top: `python -m
benchmarks.many_tensors --tensors 10000`.

The state has tensors of 64 float32 each, and all of them change from commit to commit. Beside are
torch.save with fsync, torch.load and safetensors' save_file of the same tensors. Figures are
seconds by the clock and, of what runs in this process, of processor time; the fastest of several.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import ckptstore
from benchmarks.many_commits import Took, command, timed

ROUNDS = 3


def tensors(count: int, step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    values = torch.randn((count, 64), generator=random)
    return {f"layer.{i}.weight": values[i].clone() for i in range(count)}


def best(times: list[Took]) -> Took:
    return min(times)


def saved(state: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def peers(folder: Path, count: int) -> dict[str, Took]:
    """What each row is compared with."""
    state, path = tensors(count, 0), folder / "state.pt"
    exported = str(folder / "state.safetensors")
    rounds = range(ROUNDS)
    return {
        "first commit": best([timed(lambda: saved(state, path)) for _ in rounds]),
        "restore in place": best([timed(lambda: torch.load(path)) for _ in rounds]),
        "export safetensors": best([timed(lambda: save_file(state, exported)) for _ in rounds]),
    }


def held(store: ckptstore.Store, state: dict[str, Any], step: int) -> Took:
    """How long an asynchronous commit holds its caller."""
    pending = []
    took = timed(lambda: pending.append(store.commit_async(state, step=step)))
    pending[0].wait()
    return took


def measure(
    folder: Path, count: int, wrap: Callable[[dict[str, torch.Tensor]], dict[str, Any]]
) -> dict[str, Took]:
    """The rows of one shape of the state."""
    found: dict[str, list[Took]] = {}
    states = [wrap(tensors(count, step)) for step in range(4)]
    for number in range(ROUNDS):
        place = folder / f"first{number}"
        with ckptstore.open(place) as store:
            found.setdefault("first commit", []).append(
                timed(lambda: store.commit(states[0], step=0))
            )
    place = folder / "store"
    with ckptstore.open(place) as store:
        for step in range(3):
            store.commit(states[step], step=step)
        target = wrap(tensors(count, 9))
        for _ in range(ROUNDS):
            found.setdefault("restore in place", []).append(
                timed(lambda: store.checkout(2).restore(target))
            )
        for step in (3, 4, 5):
            found.setdefault("commit_async, held", []).append(held(store, states[step % 2], step))
        for _ in range(ROUNDS):
            found.setdefault("diff", []).append(timed(lambda: store.diff(0, 1)))
    for words in (("diff", "0", "1"), ("show", "2"), ("ls", "2"), ("log",), ("fsck",)):
        for _ in range(2):
            clock_s, cpu_s, _ = command(place, *words)
            found.setdefault(f"`{words[0]}`", []).append((clock_s, cpu_s))
    for number in range(2):
        target_place = folder / f"mirror{number}"
        clock_s, cpu_s, _ = command(place, "push", str(target_place), "--create")
        found.setdefault("`push`", []).append((clock_s, cpu_s))
    for number in range(2):
        file = folder / f"out{number}.safetensors"
        clock_s, cpu_s, _ = command(place, "export", "2", str(file))
        found.setdefault("export safetensors", []).append((clock_s, cpu_s))
    shutil.rmtree(folder / "first0")
    with ckptstore.open(folder / "first1") as store:
        for step in (1, 2):
            store.commit(states[step], step=step)
    clock_s, cpu_s, _ = command(folder / "first1", "history")
    found["`history` of three"] = [(clock_s, cpu_s)]
    return {name: best(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=10_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        flat = measure(Path(name, "flat"), args.tensors, lambda state: state)
        nested = measure(Path(name, "nested"), args.tensors, lambda state: {"model": state})
        beside = peers(Path(name), args.tensors)
    print(f"{'':22} {'flat':>16} {'nested':>16} {'peer':>16}  flat / nested, of the processor")
    for row in nested:
        texts = [
            " ".join(f"{seconds:7.3f}" for seconds in found.get(row, ()))
            for found in (flat, nested, beside)
        ]
        ratio = flat[row][1] / nested[row][1]
        print(f"{row:22} {texts[0]:>16} {texts[1]:>16} {texts[2]:>16}  {ratio:.2f}")


if __name__ == "__main__":
    main()
