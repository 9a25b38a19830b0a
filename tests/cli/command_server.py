"""Runs `ckptstore` commands in children of a process that has imported what commands need.

A new interpreter imports for a third of a second, or for two where the command needs torch; most
commands of tests take less than a tenth. The child has its own streams, variables and directory,
and ends as the command does. What a command imports, and how its process starts and ends, is shown
by `test_imports`, by `test_failures` and by the pages of the docs, which start interpreters.
"""

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
REQUEST_BYTES = 1 << 20


class CommandServer:
    """The process, seen from a test."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cli.command_server", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        ours.settimeout(PATIENCE_S)
        self._socket, self._count = ours, 0

    def start(
        self, words: Sequence[str], streams: Sequence[int], cwd: Path | None, env: Mapping[str, str]
    ) -> int:
        """Let a child run the command on copies of `streams`: its input, output and errors.
        Returns the child's number."""
        self._count += 1
        request = [self._count, list(words), str(cwd or Path.cwd()), dict(env)]
        socket.send_fds(self._socket, [json.dumps(request).encode()], list(streams))
        return self._count

    def wait(self, number: int) -> int:
        """The exit code of a child. A test that gave up may have left answers of earlier ones."""
        while True:
            child, code = json.loads(self._socket.recv(REQUEST_BYTES))
            if child == number:
                return int(code)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@cache
def command_server() -> CommandServer:
    """One for all tests of this process."""
    server = CommandServer()
    atexit.register(server.close)
    return server


def _serve(requests: socket.socket) -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as `ckptstore.__main__` does
    from ckptstore.cli.commands import COMMANDS

    for name in ("torch", "ckptstore.__main__", "ckptstore.store", *_modules(COMMANDS)):
        import_module(name)
    gc.freeze()  # a collection in a child would copy every page of what is imported
    while True:
        data, streams, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 3)
        if not data:
            return
        number, *command = json.loads(data)
        child = os.fork()
        if not child:
            requests.close()
            _live(*command, streams)
        for fd in streams:
            os.close(fd)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        requests.send(json.dumps([number, code]).encode())


def _modules(commands: Any) -> set[str]:
    return {f"ckptstore.{each.run.rpartition('.')[0]}" for each in commands if each.run}


def _live(words: list[str], cwd: str, env: dict[str, str], streams: list[int]) -> NoReturn:
    code = 1
    try:
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        time.tzset()
        sys.argv = ["ckptstore", *words]
        encoding = env.get("PYTHONIOENCODING", "utf-8")
        sys.stdin = os.fdopen(0, encoding=encoding)
        sys.stdout = os.fdopen(1, "w", encoding=encoding)  # by lines on a terminal only
        sys.stderr = os.fdopen(2, "w", 1, encoding=encoding, errors="backslashreplace")
        from ckptstore.__main__ import main

        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _serve(socket.socket(fileno=int(sys.argv[1])))
