"""Trainings in processes of their own, which are killed at random moments of their saves.

A training is a module of this folder with `train(folder, tell)`: it trains to the end with a real
trainer, goes on from what `folder` has, and returns JSON that says what came out, bit by bit. It
tells what happens: `tell("saving", step)` when a save begins, `tell("saved", step)` when it is
durable, `tell("resumed", step)` where it goes on. Each rank runs it.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeAlias

import torch

from tests.support.servers.ports import free_port

WITH_OPTIMIZERS = ("torch._dynamo", "torch._dynamo.convert_frame", "torch._inductor.compile_fx")
"""What torch imports when a process makes its first optimizer: seconds, in each process."""

Tell: TypeAlias = Callable[[str, int], None]

TIMEOUT_S = 240
AFTER_S = 0.3
"""A kill comes up to so long after a save began."""


def digest(*values: Any) -> str:
    """Equal for equal tensors and values, in any nesting, bit by bit."""
    hashed = blake2b(digest_size=16)

    def add(value: Any) -> None:
        hashed.update(type(value).__name__.encode())
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            hashed.update(f"{value.dtype}{list(value.shape)}".encode())
            hashed.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        elif isinstance(value, dict):
            for key, inner in value.items():
                hashed.update(repr(key).encode())
                add(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                add(inner)
        else:
            hashed.update(repr(value).encode())

    add(values)
    return hashed.hexdigest()


@dataclass
class Fate:
    """What became of a training that was killed now and then."""

    result: Any = None
    kills: int = 0
    resumed: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class Run:
    """One start of a training, on `ranks` processes."""

    def __init__(self, training: str, folder: Path, ranks: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for name in ("told", "result"):
            for path in folder.glob(f"{name}-*"):
                path.unlink()
        processes = fork_server_of(training)
        port = free_port()
        self._processes = [
            processes.Process(target=_live, args=(training, folder, rank, ranks, port))
            for rank in range(ranks)
        ]
        for process in self._processes:
            process.start()

    def told(self, what: str) -> list[int]:
        """The steps that rank 0 told of this kind."""
        path = self._folder / "told-0"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [int(line.split()[1]) for line in lines if line.split()[0] == what]

    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def wait_for_saves(self, count: int) -> bool:
        """Whether so many saves have begun, before the training ended."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.told("saving")) < count:
            if not self.alive():
                return False
            assert time.monotonic() < deadline, f"no save in {TIMEOUT_S} s: {self.output()}"
            time.sleep(0.002)
        return True

    def kill(self) -> bool:
        """Whether some rank was still there to be killed."""
        there = [process for process in self._processes if process.is_alive()]
        for process in there:
            process.kill()
        for process in self._processes:
            process.join()
        return any(process.exitcode == -signal.SIGKILL for process in there)

    def result(self) -> Any:
        """What each rank returned, in order. Raises `AssertionError` if one failed."""
        for process in self._processes:
            process.join(TIMEOUT_S)
        codes = [process.exitcode for process in self._processes]
        assert codes == [0] * len(codes), f"exit codes {codes}: {self.output()}"
        return [
            json.loads((self._folder / f"result-{rank}").read_text())
            for rank in range(len(self._processes))
        ]

    def output(self) -> str:
        """What the ranks printed, in all runs in this folder."""
        paths = sorted(self._folder.glob("output-*"))
        return "\n".join(path.read_text(errors="replace")[-8_000:] for path in paths)


def fork_server_of(training: str) -> ForkServerContext:
    """A fork server that has imported this training, and the others of its library, which takes
    seconds. That of the library before ends: nothing of it runs."""
    return _fork_server(training.rpartition(".")[2].partition("_")[0])


@lru_cache(maxsize=1)
def _fork_server(library: str) -> ForkServerContext:
    forkserver._forkserver._stop()
    context = multiprocessing.get_context("forkserver")
    parts = sorted(Path(__file__).parent.glob(f"{library}_*.py"))
    trainings = [
        f"{__package__}.{each.stem}" for each in parts if "\ndef train(" in each.read_text()
    ]
    assert trainings, f"no training of {library} in {Path(__file__).parent}"
    context.set_forkserver_preload([*trainings, *WITH_OPTIMIZERS])
    return context


def trained(training: str, folder: Path, ranks: int = 1) -> Any:
    """What a training that nobody kills returns."""
    return Run(training, folder, ranks).result()


def killed(
    training: str,
    folder: Path,
    kills: int,
    draw: random.Random,
    ranks: int = 1,
    *,
    saves: tuple[int, int] = (1, 2),
) -> Fate:
    """The fate of a training that is killed, all ranks at once, `kills` times soon after a save
    began, one of the first `saves`. `lost` has a line for each start that began before the last
    save that was durable."""
    fate, saved = Fate(), -1
    while True:
        run = Run(training, folder, ranks)
        dies = fate.kills < kills and run.wait_for_saves(draw.randint(*saves))
        if dies:
            time.sleep(draw.uniform(0, AFTER_S))
            dies = run.kill()
        if dies:
            fate.kills += 1
        else:
            fate.result = run.result()
        resumed = run.told("resumed")
        fate.resumed += resumed
        if saved > (begin := resumed[0] if resumed else -1) and (resumed or run.told("saving")):
            fate.lost.append(f"step {saved} was durable, and the next run began at {begin}")
        saved = max([saved, *run.told("saved")])
        if not dies:
            return fate


def ended_bit_equal(
    training: str,
    folder: Path,
    kills: int,
    draw: random.Random,
    ranks: int = 1,
    *,
    saves: tuple[int, int] = (1, 2),
    **settings: str,
) -> Fate:
    """The fate of a training that is killed `kills` times, having asserted that it lost nothing and
    ended bit-equal to one that nobody kills. Both find `settings` as files in their folders."""
    places = [folder / name for name in ("whole", "killed")]
    for place in places:
        place.mkdir()
        for name, text in settings.items():
            (place / name).write_text(text)
    wanted = trained(training, places[0], ranks)
    fate = killed(training, places[1], kills, draw, ranks, saves=saves)
    wrong = [rank for rank in range(ranks) if fate.result[rank] != wanted[rank]]
    print(
        f"{training} {settings}, {ranks} ranks: {fate.kills} kills, {len(fate.lost)} saves lost, "
        f"{len(wrong)} wrong results, resumed at {fate.resumed}"
    )
    assert (fate.kills, fate.lost, wrong) == (kills, [], []), f"{fate}, wanted {wanted}"
    return fate


def _live(training: str, folder: Path, rank: int, ranks: int, port: int) -> None:
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    told = os.open(folder / f"told-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(what: str, step: int) -> None:
        os.write(told, f"{what} {step}\n".encode())

    try:
        result = import_module(training).train(folder, tell)
        (folder / f"result-{rank}").write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
