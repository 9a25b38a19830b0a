"""The process of the `ckptstore` command, also as `python -m ckptstore`.

A command of a second is mostly its start, so this module imports nothing but the standard library's
smallest modules before it has set up the process.
"""

import gc
import os
import sys

OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Imports make a hundred thousand objects that stay. Python's default, 700, has the collector of
cycles look through them a hundred times and find nothing: a tenth of what a command takes."""


def main() -> int:
    """Run the command that the process was started for and return its exit code."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    # numpy loads OpenBLAS, whose threads, one per processor, would spin before they sleep. Where a
    # command adds up many numbers, it has threads of its own.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from ckptstore.cli.main import main as run

    try:
        return run()
    finally:
        gc.freeze()  # the interpreter's last collections find nothing to look through


if __name__ == "__main__":
    sys.exit(main())
