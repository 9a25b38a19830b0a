"""Ways to run the command: with pipes for output and on a terminal, as users do, and within the
test's process."""

import fcntl
import io
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptstore.cli.main import main
from tests.cli.command_server import command_server


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a command inherits: nothing that the machine of the test has set by chance."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CKPTSTORE", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
    }
    return {**ours, "TZ": "UTC", "LC_ALL": "C.UTF-8", "TERM": "xterm-256color", **(extra or {})}


def run(*words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Result:
    """Run `ckptstore words…` with pipes for output."""
    (out, their_out), (err, their_err) = os.pipe(), os.pipe()
    given = os.open(os.devnull, os.O_RDONLY)
    streams = (given, their_out, their_err)
    number = command_server().start(words, streams, cwd, environment(env))
    for fd in streams:
        os.close(fd)
    with ThreadPoolExecutor(1) as beside, open(out, "rb") as seen, open(err, "rb") as told:
        errors = beside.submit(told.read)
        output = seen.read()
        return Result(command_server().wait(number), output.decode(), errors.result().decode())


def call(*words: str) -> Result:
    """Run `ckptstore words…` in this process, which saves its start: for tables of many lines."""
    with (
        io.TextIOWrapper(io.BytesIO(), "utf-8") as out,
        io.TextIOWrapper(io.BytesIO(), "utf-8") as err,
    ):
        with redirect_stdout(out), redirect_stderr(err):
            code = main(words)
        return Result(code, _written(out), _written(err))


def _written(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


def run_without_privileges(*commands: Sequence[str], home: Path) -> list[Result]:
    """Run command lines in one new process, for which the modes of files mean something, root's as
    well."""
    drop = (
        ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if not os.geteuid() else ()
    )
    if drop and not shutil.which(drop[0]):
        pytest.skip("root needs setpriv (util-linux) to run without its privileges")
    env = {
        name: value
        for name, value in environment().items()
        if name not in ("XDG_CACHE_HOME", "CKPTSTORE_CACHE")
    }
    script = (
        "import dataclasses, json, sys; from tests.cli.running import call; "
        "results = [call(*words) for words in json.loads(sys.argv[1])]; "
        "print(json.dumps([dataclasses.astuple(result) for result in results]))"
    )
    done = subprocess.run(
        [*drop, sys.executable, "-c", script, json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**env, "HOME": str(home)},
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return [Result(*result) for result in json.loads(done.stdout)]


def run_on_terminal(
    *words: str, columns: int = 100, env: Mapping[str, str] | None = None, typed: str | None = None
) -> Result:
    """Run `ckptstore words…` with a terminal for output; `err` is empty, since a terminal shows
    both. With `typed`, the terminal is its input, too, where that was typed ahead."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    given = os.open(os.devnull, os.O_RDONLY) if typed is None else os.dup(theirs)
    number = command_server().start(words, (given, theirs, theirs), None, environment(env))
    os.close(given)
    os.close(theirs)
    os.write(ours, (typed or "").encode())
    with open(ours, "rb", buffering=0) as screen:
        seen = b"".join(_chunks(screen))
    return Result(command_server().wait(number), seen.decode().replace("\r\n", "\n"), "")


def _chunks(screen: Any) -> Iterator[bytes]:
    while True:
        try:
            data = screen.read(65_536)
        except OSError:  # how Linux says that the other side of a terminal is closed
            return
        if not data:
            return
        yield data
