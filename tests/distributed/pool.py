"""Rank processes that live for the whole test session and run tasks: importing torch takes longer
than most tests.

The first rank of a pool is forked from a process that has imported torch alone. The others are
forked from one that has imported what ranks need. Both are shared by all pools. So the
coordinator's imports and its set iteration order differ from the others', as in a real job.
"""

import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 240
"""Longer than any task: three imports of torch and a failed save took 96 s on two cores with thirty
other processes.
"""

IMPORTED = [
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torchsnapshot",
    "ckptstore.distributed.worker_client",
    "ckptstore.index.catalog",
    "ckptstore.interop.dcp",
    "ckptstore.storage.local",
    "ckptstore.store",
    "s3fs",
    "tests.distributed.layouts",
]
"""Modules imported before ranks are forked."""


class RankFailed(Exception):
    """A task raised on some ranks: `errors` are their tracebacks by rank."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items()))


class Pool:
    """`size` processes of one gloo group. A task is a function of a test module; its first argument
    is the rank.

    If ranks do not answer in time, their stacks go to stderr and all ranks are ended. Later tasks
    get new ranks, so that late answers are never mixed up.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ckptstore-ranks-")
        forked = multiprocessing.get_context("forkserver")
        # The fork server passes over a module that it does not find.
        assert all(map(find_spec, IMPORTED)), IMPORTED
        forked.set_forkserver_preload(IMPORTED)
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        for rank in range(self.size):
            ours, theirs = forked.Pipe()
            process: Any = forked.Process(
                target=_serve,
                args=(theirs, rank, self.size, Path(self._folder) / "store"),
                daemon=True,
            )
            if rank:
                process.start()
            else:
                with _server_of_coordinators():
                    process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def run(
        self, task: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Run `task(rank, *args)` on every rank (or on `ranks`); returns the results, an `EOFError`
        for a rank that died.
        """
        if not self.processes:
            self._start()
        chosen = list(range(self.size)) if ranks is None else list(ranks)
        for rank in chosen:
            self._pipes[rank].send((task, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = {self._pipes[rank]: rank for rank in chosen}
        while waiting:
            ready = wait(list(waiting), TIMEOUT_S)
            if not ready:
                self._give_up(list(waiting.values()))
                told = "".join(f"; rank {rank}: {error}" for rank, error in errors.items())
                raise TimeoutError(
                    f"ranks {sorted(waiting.values())} did not answer within {TIMEOUT_S} s{told}"
                )
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    good, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError) as error:
                    results[rank] = EOFError(str(error))
                    continue
                (results if good else errors)[rank] = value
        if errors:
            raise RankFailed(errors)
        return [results[rank] for rank in chosen]

    def _give_up(self, silent: Sequence[int]) -> None:
        for rank in silent:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
            self.processes[rank].join(1)  # time to write its stacks
        for process in self.processes:
            process.kill()
        self.close()
        self.processes = []

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


@cache
def _coordinators() -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["torch.distributed"])
    return server


@contextmanager
def _server_of_coordinators() -> Iterator[None]:
    """A process that starts within is forked from the server of first ranks. multiprocessing has
    one server, which it asks by this function."""
    connect = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = _coordinators().connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = connect


def _serve(pipe: Connection, rank: int, size: int, store: Path) -> None:
    import warnings

    faulthandler.register(signal.SIGUSR1)
    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    # torch 2.6 says so of the first DTensor on CPUs
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
    os.environ["CKPTSTORE_THREADS"] = "2"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    gc.freeze()  # what is imported: a task that collects looks through its own objects
    while True:
        try:
            task, args = pipe.recv()
        except EOFError:
            os._exit(0)  # skips torch's exit handlers, which wait for peers
        try:
            pipe.send((True, task(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
