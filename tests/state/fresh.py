"""A process of its own that runs functions by name, many in a row: what it knows of a state it has
read from a store.

`python -m tests.state.fresh` takes lines of JSON, `[module:function, arguments…]`, and answers each
with one: `[true, result]`, or `[false, traceback]`. Arguments and results are JSON, so that nothing
but a store carries a state across.
"""

import importlib
import json
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


class Fresh:
    """The process, seen from a test. Started with the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def call(self, function: str, *arguments: Any) -> Any:
        """The result of `function` (`module:name`) there. An exception there is an AssertionError
        here, with its traceback."""
        with self._lock:
            process = self._process = self._process or _start()
            assert process.stdin and process.stdout
            process.stdin.write(json.dumps([function, *arguments]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        assert answer, f"the fresh process ended with {process.wait()}"
        worked, result = json.loads(answer)
        assert worked, result
        return result

    def close(self) -> None:
        if self._process:
            self._process.communicate()


def _start() -> "subprocess.Popen[str]":
    warnings = ["error", "ignore:Guards may run slower on Python 3.13.0"]
    options = [option for warning in warnings for option in ("-W", warning)]
    command = [sys.executable, *options, "-m", "tests.state.fresh"]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def main() -> None:
    # What a function prints must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    for line in sys.stdin:
        function, *arguments = json.loads(line)
        try:
            module, name = function.split(":")
            answer = [True, getattr(importlib.import_module(module), name)(*arguments)]
        except Exception:
            answer = [False, traceback.format_exc()]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
