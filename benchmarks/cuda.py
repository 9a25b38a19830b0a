"""`python -m benchmarks.cuda`: what commits of a state on a CUDA device cost, beside what its bus
can do. Without a device it says so.

Figures are medians of the rounds' own values; the state is the GPT of the other cases, 1.45 GB with
its moments.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

import ckptstore
from benchmarks import states
from benchmarks.disk import work_dir
from benchmarks.held import trained
from benchmarks.states import State

ROUNDS = 11
STEPS = 20


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.cuda", description=__doc__)
    parser.add_argument(
        "--dir",
        type=Path,
        help="a folder on a disk with 15 GB free (default: the temporary folder)",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device here: nothing was measured")
        return 0
    folder = work_dir(chosen.dir)
    try:
        measure(folder, chosen.rounds)
    finally:
        shutil.rmtree(folder)
    return 0


def measure(folder: Path, rounds: int) -> None:
    host = states.gpt()
    state = states.nest({path: tensor.cuda() for path, tensor in host.tensors.items()})
    model, optimizer = trained(state)
    app = {"model": model, "optimizer": optimizer}
    # of floats, all
    bus_s, held_s, lazy_s, alone_s, beside_s, restore_s = ([] for _ in range(6))  # type: ignore[var-annotated]
    pinned = torch.empty(state.nbytes, dtype=torch.uint8, pin_memory=True)
    with ckptstore.open(folder / "store") as store:
        for round_ in range(rounds + 1):
            copied = seconds(lambda: to_host(state, pinned))
            eager = store.commit_async(app)
            snapshot = eager.wait()
            alone = steps(optimizer, lambda step: step < STEPS)
            lazy = store.commit_async(app, background=ckptstore.Async(staging="lazy"))
            # it is called before the next round
            beside = steps(optimizer, lambda step: not lazy.done())  # noqa: B023
            lazy.wait()
            restored = seconds(lambda: snapshot.restore(app))  # noqa: B023  # likewise
            if round_:
                values = (
                    copied,
                    eager.timings.held_s,
                    lazy.timings.held_s,
                    alone,
                    beside,
                    restored,
                )
                for found, value in zip(
                    (bus_s, held_s, lazy_s, alone_s, beside_s, restore_s), values, strict=True
                ):
                    found.append(value)
    share = median(bus / held for bus, held in zip(bus_s, held_s, strict=True))
    slower = median(beside / alone for beside, alone in zip(beside_s, alone_s, strict=True))
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {state.nbytes / 1e9:.2f} GB, "
        f"{rounds} rounds"
    )
    print(f"device to pinned memory       {state.nbytes / median(bus_s) / 1e9:8.2f} GB/s")
    print(f"share of that, eager staging  {share:8.0%}")
    print(f"stall, eager                  {median(held_s) * 1e3:8.1f} ms")
    print(f"stall, lazy                   {median(lazy_s) * 1e3:8.1f} ms")
    print(f"a step beside a lazy commit   {slower:8.2f} times one alone")
    print(f"restore to the device         {state.nbytes / median(restore_s) / 1e9:8.2f} GB/s")


def to_host(state: State, pinned: torch.Tensor) -> None:
    at = 0
    for tensor in state.tensors.values():
        pinned[at : at + tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
        at += tensor.nbytes


def steps(optimizer: torch.optim.Optimizer, goes_on: Callable[[int], bool]) -> float:
    """The mean time of a step: some matrix products, then the optimizer's."""
    left = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    started, step = perf_counter(), 0
    while goes_on(step):
        for _ in range(50):
            left @ left
        optimizer.step()
        torch.cuda.synchronize()
        step += 1
    return (perf_counter() - started) / max(step, 1)


def seconds(act: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = perf_counter()
    act()
    torch.cuda.synchronize()
    return perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
