"""Random machines of forks, interrupts and `close`: a program, as its children end as they like.

    python -m tests.net.forks SEED SECONDS

One store, some threads of work, forked children that read, commit, close and end in every way, and
commits of the parent that are in flight meanwhile. What was acknowledged has exactly its bytes, no
child changes its parent's memory or commits, nothing waits for what never comes, and a child's use
of an inherited store works or is refused.
"""

import faulthandler
import multiprocessing.process
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import Any
from zlib import crc32

import numpy as np
import torch

import ckptstore
from tests.commit.states import Gate

HANGS_S = 40
"""Nothing that a child does takes a tenth of this. Then it tells its stacks, and ends."""
MEMORY = Path("/dev/shm")
CHUNK_BYTES = 1 << 16
SIZES = (0, 9, 1 << 14, 400_000)
REFUSED = "forked from"

State = dict[str, Any]


def contents(seed: int, name: str) -> State:
    """What the commit `name` has: blocks that other commits have too, in other places, and some of
    its own. Without torch's threads, which a forked child lacks."""
    random = Random(crc32(f"{seed} {name}".encode()))
    shared = np.random.default_rng(seed).random((4, CHUNK_BYTES // 4), dtype=np.float32)
    own = np.random.default_rng(random.getrandbits(32)).random(
        random.choice(SIZES), dtype=np.float32
    )
    mixed = np.concatenate([shared[random.randrange(4)], own])
    a, b = torch.from_numpy(own), torch.from_numpy(mixed)
    return {"t": {"own": a, "tie": a, "mixed": b}, "name": name}


def differing(state: State, wanted: State) -> list[str]:
    """The leaves of `state` that are not those of `wanted`."""
    tensors = wanted["t"]
    wrong = [key for key in tensors if not np.array_equal(state["t"][key], tensors[key])]
    return wrong + ["name"] * (state["name"] != wanted["name"])


class Told:
    """A file to which all processes of a machine append: what was acknowledged, and what failed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def acknowledged(self, name: str) -> None:
        self._append(f"ack {name}")

    def failed(self, who: str) -> None:
        self._append("".join(f"error {who}: {line}\n" for line in _stack()).rstrip())

    def names(self) -> list[str]:
        return [line[4:] for line in self._path.read_text().splitlines() if line[:4] == "ack "]

    def errors(self) -> list[str]:
        return [line[6:] for line in self._path.read_text().splitlines() if line[:6] == "error "]

    def _append(self, text: str) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        os.write(file, f"{text}\n".encode())
        os.close(file)


def _stack() -> list[str]:
    return traceback.format_exc().splitlines()


class Actor:
    """One thread of work on a store, of the process that opened it or of a child."""

    def __init__(self, machine: "Machine", name: str, *, child: bool) -> None:
        self.machine, self.store, self.name, self.child = machine, machine.store, name, child
        self.random = Random(crc32(f"{machine.seed} {name}".encode()))
        self.count = 0
        self.mapped: list[tuple[str, Any]] = []
        self.closed = False

    def act(self) -> None:
        table: dict[Callable[[], None], int] = {
            self.commit: 6,
            self.commit_async: 2,
            self.read: 4,
            self.map: 2,
            self.restore: 2,
            self.look: 2,
            self.collect: 1,
        }
        if self.child:
            table |= {self.touch_pendings: 2, self.spoil: 2, self.close: 1, self.enter: 1}
        action = self.random.choices(list(table), list(table.values()))[0]
        self.machine.counts[action.__name__] += 1
        try:
            action()
        except ckptstore.InvalidInput as error:
            if not (self.child and (REFUSED in str(error) or self.closed)):
                raise
        for name, tensor in self.mapped:
            wanted = contents(self.machine.seed, name)["t"]["mixed"]
            assert np.array_equal(tensor, wanted), f"what is mapped of {name} has changed"

    def new(self) -> str:
        self.count += 1
        return f"{self.name}-{self.count}"

    def known(self) -> str:
        return self.random.choice(self.machine.told.names())

    def check(self, state: State, name: str) -> None:
        wrong = differing(state, contents(self.machine.seed, name))
        assert not wrong, f"{self.name} read {wrong} of {name}: not what was committed"

    def commit(self) -> None:
        name = self.new()
        snapshot = self.store.commit(contents(self.machine.seed, name), tag=name)
        self.machine.told.acknowledged(name)
        if self.random.random() < 0.3:
            self.check(snapshot.state_dict(), name)

    def commit_async(self) -> None:
        name = self.new()
        state = contents(self.machine.seed, name)
        lazy = self.random.random() < 0.3
        how = ckptstore.Async(staging="lazy" if lazy else "eager")
        pending = self.store.commit_async(state, tag=name, background=how)
        pending.wait_staged()
        for tensor in state["t"].values():
            tensor.fill_(-1.0)
        pending.wait()
        self.machine.told.acknowledged(name)

    def read(self) -> None:
        name = self.known()
        self.check(self.store.checkout(name).state_dict(), name)

    def map(self) -> None:
        name = self.known()
        self.mapped.append((name, self.store.checkout(name).open("t/mixed")))
        del self.mapped[:-3]

    def restore(self) -> None:
        name = self.known()
        target = contents(self.machine.seed, name)
        for tensor in target["t"].values():
            tensor.fill_(-1.0)
        self.store.checkout(name).restore(target)
        self.check(target, name)

    def look(self) -> None:
        name = self.known()
        assert name in self.store.tags()
        assert any(name in info.tags for info in self.store.log())
        self.store.flush_mirror(0)

    def collect(self) -> None:
        with suppress(ckptstore.Conflict):  # threads and children that collect at once
            self.store.gc(grace_s=0)

    # -- of a child alone --

    def touch_pendings(self) -> None:
        """Those of the parent: they are answered or refused, and go on there."""
        for pending in self.machine.pendings:
            uses = (pending.wait_staged, pending.exception, pending.wait, pending.cancel)
            self.random.choice(uses)()
            assert pending.done()

    def spoil(self) -> None:
        for tensor in self.machine.live["t"].values():
            tensor.fill_(-2.0)

    def close(self) -> None:
        self.closed = True
        self.store.close()

    def enter(self) -> None:
        self.closed = True
        with self.store:
            assert self.store.worker_pid is None


class Machine:
    """A store, its threads and its children."""

    def __init__(self, folder: Path, seed: int, counts: Counter[str]) -> None:
        self.folder, self.seed, self.counts = folder, seed, counts
        self.random = Random(seed)
        self.told = Told(folder / "told")
        self.pendings: list[Any] = []
        self.live = contents(seed, "live")
        self.forks = 0
        self.processes: list[tuple[str, int | multiprocessing.process.BaseProcess, str]] = []

    def run(self) -> None:
        mirror = self.folder / "mirror" if self.random.random() < 0.2 else None
        executor = "process" if self.random.random() < 0.15 else "thread"
        self.store = ckptstore.open(
            self.folder / "store",
            threads=self.random.randint(1, 3),
            storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES),
            background=ckptstore.Async(executor=executor),  # type: ignore[arg-type]
            mirror=mirror,
        )
        with self.store:
            self.main = Actor(self, "main", child=False)
            self.main.commit()
            over = threading.Event()
            threads = [
                threading.Thread(target=self.work, args=(f"thread{n}", over))
                for n in range(self.random.randint(0, 2))
            ]
            for thread in threads:
                thread.start()
            try:
                for _ in range(self.random.randint(2, 5)):
                    self.random.choice((self.fork, self.fork, self.interrupt, self.main.act))()
            finally:
                if not self.is_child():
                    over.set()
                    for thread in threads:
                        thread.join()
            if self.random.random() < 0.3:
                self.interrupted(self.store.close)
        self.end(mirror)

    def is_child(self) -> bool:
        return os.getpid() != OWNER

    def work(self, name: str, over: threading.Event) -> None:
        """What a thread does until it is over."""
        actor = Actor(self, name, child=False)
        try:
            while not over.is_set():
                actor.act()
        except BaseException:
            self.told.failed(name)

    def interrupt(self) -> None:
        self.interrupted(self.main.act)

    def interrupted(self, action: Callable[[], None]) -> None:
        """A signal raises KeyboardInterrupt at any point of it."""
        due = [True]

        def handler(number: int, frame: Any) -> None:
            if due:
                due.clear()
                raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 10 ** self.random.uniform(-4, -1))
        try:
            action()
            due.clear()
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1
        signal.setitimer(signal.ITIMER_REAL, 0)

    def fork(self) -> None:
        """Children at once, and perhaps a commit of the parent that is in flight until they end."""
        gate, held = None, ""
        if self.random.random() < 0.4:
            gate, held = Gate(self.random.choice(("hashed", "written"))), self.main.new()
            state = contents(self.seed, held)
            pending = self.store.commit_async(
                state, tag=held, background=ckptstore.Async(on_progress=gate)
            )
            gate.there.wait(HANGS_S)
            self.pendings = [pending]
        try:
            for _ in range(self.random.randint(1, 3)):
                self.begin()
            if gate is None:
                for _ in range(self.random.randint(0, 2)):
                    self.main.act()
            self.reap()
        finally:
            if gate is not None and not self.is_child():
                gate.opened.set()
        assert not differing(self.live, contents(self.seed, "live")), "a child wrote to its parent"
        if gate is not None:
            self.main.check(pending.wait().state_dict(), held)
            self.told.acknowledged(held)
            self.pendings = []

    def begin(self) -> None:
        self.forks += 1
        name, how = f"child{self.forks}", self.random.choice(("_exit", "exit", "process", "killed"))
        self.counts[f"child: {how}"] += 1
        if how == "process":
            process = multiprocessing.get_context("fork").Process(
                target=self.as_child, args=(name,)
            )
            process.start()
            self.processes.append((name, process, how))
            return
        pid = os.fork()
        if pid:
            self.processes.append((name, pid, how))
            return
        code = self.as_child(name)
        if how == "exit":
            sys.exit(code)
        os._exit(code)

    def as_child(self, name: str) -> int:
        """What a child does; the exit code."""
        multiprocessing.process._children.clear()  # type: ignore[attr-defined]  # not to be joined
        # faulthandler's own timer would wait for a thread that only the parent has.
        self.stacks = (self.folder / f"{name}.stacks").open("w")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, self.stacks, chain=True)
        signal.alarm(HANGS_S)
        actor = Actor(self, name, child=True)
        try:
            for _ in range(actor.random.randint(1, 6)):
                actor.act()
        except BaseException:
            self.told.failed(name)
            return 1
        return 0

    def reap(self) -> None:
        for name, process, how in self.processes:
            if isinstance(process, int):
                if how == "killed":
                    time.sleep(self.random.uniform(0, 0.05))
                    os.kill(process, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                fine = code in (0, -signal.SIGKILL) if how == "killed" else code == 0
            else:
                process.join()
                fine = process.exitcode == 0
                code = process.exitcode or 0
            stacks = (self.folder / f"{name}.stacks").read_text() if not fine else ""
            assert fine, f"{name} ({how}) ended with {code}\n{stacks}{self.failures()}"
        self.processes = []

    def failures(self) -> str:
        return "\n".join(self.told.errors())

    def end(self, mirror: Path | None) -> None:
        """What was acknowledged is there, and everything that is there is what was committed."""
        assert not self.told.errors(), self.failures()
        self.pendings = []
        acknowledged = set(self.told.names())
        for place in (self.folder / "store", mirror):
            if place is None:
                continue
            with ckptstore.open(place, create=False, threads=1) as store:
                names = set(store.tags())
                assert place == mirror or acknowledged <= names, acknowledged - names
                for name in names:
                    state = store.checkout(name).state_dict()
                    wrong = differing(state, contents(self.seed, name))
                    assert not wrong, f"{name} has {wrong} that were not committed"
                found = store.fsck(read_data="100%").findings
                # Those that were killed or interrupted leave packs that no entry names.
                assert not [each for each in found if each.severity != "note"], found


OWNER = os.getpid()


def walk(seed: int, counts: Counter[str]) -> None:
    """One machine."""
    folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    machine = Machine(folder, seed, counts)
    try:
        machine.run()
    except SystemExit:
        raise
    except BaseException as error:
        error.add_note(f"machine of seed {seed}: python -m tests.net.forks {seed} 0")
        raise
    finally:
        if not machine.is_child():
            for _, process, _ in machine.processes:
                with suppress(ProcessLookupError):
                    os.kill(
                        process if isinstance(process, int) else process.pid or 0, signal.SIGKILL
                    )
            rmtree(folder, ignore_errors=True)
    counts["machines"] += 1


def main(arguments: Iterable[str]) -> None:
    seed, seconds = (float(argument) for argument in arguments)
    torch.set_num_threads(1)
    faulthandler.enable()  # a test that waited too long ends it by SIGABRT, to see where it is
    begun, counts = time.monotonic(), Counter[str]()
    while not counts["machines"] or time.monotonic() - begun < seconds:
        walk(int(seed) + counts["machines"], counts)
    print(f"{counts['machines']} machines from seed {seed:.0f}: {dict(counts)}")


if __name__ == "__main__":
    main(sys.argv[1:])
