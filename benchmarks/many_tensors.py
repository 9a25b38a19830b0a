"""What many small tensors cost, flat at the top and nested under one key: `python -m
benchmarks.many_tensors --tensors 10000`.

The state has tensors of 64 float32 each, and all of them change from commit to commit. Beside are
torch.save with fsync, torch.load and safetensors' save_file of the same tensors. Figures are
seconds by the clock, seconds of processor time, and the highest memory: of calls beyond what was in
use before, of commands that of their process. Each row is the fastest of several rounds, in which
flat and nested take turns.
"""

import argparse
import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import ckptstore
from benchmarks.many_commits import Row, command, timed
from benchmarks.progress import note
from benchmarks.status import status_bytes

State = dict[str, Any]
SHAPES: dict[str, Callable[[State], State]] = {
    "flat": lambda state: state,
    "nested": lambda state: {"model": state},
}
COMMANDS = {
    "`diff`": ("diff", "0", "1"),
    "`show`": ("show", "2"),
    "`ls`": ("ls", "2"),
    "`log`": ("log",),
    "`stats`": ("stats",),
    "`fsck`": ("fsck",),
}


HISTORY = tuple(word for step in "012" for word in ("--ref", step))


def tensors(count: int, step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    values = torch.randn((count, 64), generator=random)
    return {f"layer.{i}.weight": values[i].clone() for i in range(count)}


def call(act: Callable[[], object]) -> Row:
    """A call of this process."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    return *timed(act), status_bytes("VmHWM") - before


def saved(state: State, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def peers(folder: Path, count: int) -> dict[str, Row]:
    """What each row is compared with."""
    state, path = tensors(count, 0), folder / "state.pt"
    exported = str(folder / "state.safetensors")
    return {
        "first commit": call(lambda: saved(state, path)),
        "restore in place": call(lambda: torch.load(path)),
        "export safetensors": call(lambda: save_file(state, exported)),
    }


def held(store: ckptstore.Store, state: State, step: int) -> Row:
    """How long an asynchronous commit holds its caller."""
    pending = []
    took = call(lambda: pending.append(store.commit_async(state, step=step)))
    pending[0].wait()
    return took


def calls(folder: Path, states: list[State]) -> dict[str, Row]:
    """The rows of an open process; leaves a store of three commits."""
    found: dict[str, Row] = {}
    with ckptstore.open(folder / "store") as store:
        found["first commit"] = call(lambda: store.commit(states[0], step=0))
        found["commit, all changed"] = call(lambda: store.commit(states[1], step=1))
        store.commit(states[2], step=2)
        found["commit, none changed"] = call(lambda: store.commit(states[2], step=3))
        target = states[0]
        found["restore in place"] = call(lambda: store.checkout(1).restore(target))
        found["`state_dict`"] = call(lambda: store.checkout(1).state_dict())
        found["diff"] = call(lambda: store.diff(0, 1))
        found["commit_async, held"] = held(store, states[2], 4)
    return found


def commands(folder: Path) -> dict[str, Row]:
    """The rows of processes of their own."""
    place = folder / "store"
    found = {name: command(place, *words) for name, words in COMMANDS.items()}
    found["`push`"] = command(place, "push", str(folder / "mirror"), "--create")
    exported = str(folder / "out.safetensors")
    found["export safetensors"] = command(place, "export", "2", exported)
    found["`history` of three"] = command(place, "history", *HISTORY)
    return found


def measure(
    folder: Path, count: int, rounds: int, *, only_calls: bool = False
) -> dict[str, dict[str, Row]]:
    """All rows, or those of calls, by the shape of the state; under `peer` what they are compared
    with."""
    found: dict[str, dict[str, Row]] = {}
    for number in range(rounds):
        for name, wrap in SHAPES.items():
            note(f"round {number + 1}: {name}")
            folder.mkdir()
            rows = calls(folder, [wrap(tensors(count, step)) for step in range(3)])
            rows |= {} if only_calls else commands(folder)
            found[name] = _best(rows, found.get(name, rows))
            shutil.rmtree(folder)
        folder.mkdir()
        rows = peers(folder, count)
        found["peer"] = _best(rows, found.get("peer", rows))
        shutil.rmtree(folder)
    return found


def _best(rows: dict[str, Row], before: dict[str, Row]) -> dict[str, Row]:
    """The least of each figure."""
    return {
        name: (min(a, before[name][0]), min(b, before[name][1]), min(c, before[name][2]))
        for name, (a, b, c) in rows.items()
    }


def _text(row: Row | None) -> str:
    return f"{row[0]:7.3f} {row[1]:7.3f} {int(row[2]) >> 20:5}" if row else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", action="store_true", help="leave out commands")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name, "place"), args.tensors, args.rounds, only_calls=args.calls)
    head = "  ".join(f"{each + ', s, cpu s, MiB':>21}" for each in found)
    print(f"{args.tensors:<20,} {head}  flat / nested, of the processor")
    for row in found["nested"]:
        texts = "  ".join(f"{_text(each.get(row)):>21}" for each in found.values())
        print(f"{row:20} {texts}  {found['flat'][row][1] / found['nested'][row][1]:.2f}")


if __name__ == "__main__":
    main()
