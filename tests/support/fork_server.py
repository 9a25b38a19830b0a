"""Processes to be killed: a server that has imported torch once forks a child for each piece of
work (`tests.support.scenarios`).

A child waits at its gate until it is let go, so that a tracer can be attached first. What it has
achieved it writes line by line to a file, which is there however it ends.
"""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Child:
    """A forked process; `go` lets it begin and `wait` waits for its end."""

    nursery: "Nursery"
    pid: int
    gate: Path
    lines: Path

    def go(self) -> Self:
        os.close(os.open(self.gate, os.O_WRONLY))
        return self

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return _state(Path(f"/proc/{self.pid}/stat")) not in "ZX"

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Within, none of its threads does anything."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            while {_state(stat) for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")} != {"T"}:
                time.sleep(0.001)
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def wait(self) -> int:
        """The exit code; negative for the signal that ended it."""
        return self._code

    @cached_property
    def _code(self) -> int:
        return int(self.nursery.ask({"wait": self.pid}))

    def reports(self, kind: str) -> list[list[str]]:
        """What it has written so far of one kind, without the kind; a last line that was cut short
        does not count."""
        whole = self.lines.read_text().rpartition("\n")[0]
        return [line.split("\t")[1:] for line in whole.split("\n") if line.split("\t")[0] == kind]


def _state(stat: Path) -> str:
    """One letter (proc_pid_stat(5))."""
    return stat.read_text().rpartition(")")[2].split()[0]


class Nursery:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ckptstore-nursery-"))
        self._count = 0
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(self.folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ask({})

    @property
    def pid(self) -> int:
        return self._server.pid

    def close(self) -> None:
        """Let the server end, which removes the folder; children that are still there do not."""
        self._server.communicate()

    def start(self, scenario: str, **given: Any) -> Child:
        """A child that will do `scenario` once it is let go."""
        self._count += 1
        gate, lines = (Path(self.folder, f"{kind}-{self._count}") for kind in ("gate", "lines"))
        os.mkfifo(gate)
        lines.touch()
        pid = int(
            self.ask({"scenario": scenario, "given": given, "gate": str(gate), "lines": str(lines)})
        )
        return Child(self, pid, gate, lines)

    def run(self, scenario: str, **given: Any) -> Child:
        """A child that has done `scenario` and ended."""
        child = self.start(scenario, **given).go()
        child.wait()
        return child

    def ask(self, request: dict[str, Any]) -> str:
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, f"the nursery ended with {self._server.wait()}"
        return answer.strip()


def _serve(folder: Path) -> None:
    """Until the tests end, in whatever way: then nobody else is there to remove the folder."""
    from tests.support import scenarios

    ends = {
        number: signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    gc.freeze()  # a collection in a child would copy every page of what is imported
    for line in requests:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        elif "scenario" in request:
            answer = os.fork()
            if not answer:
                for number, handler in ends.items():
                    signal.signal(number, handler)
                scenarios.live(request)
        else:
            answer = os.getpid()
        print(answer, file=answers, flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
