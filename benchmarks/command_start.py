"""`python -m benchmarks.command_start` measures single commands, each a process of its own, beside
restic (which must be installed) on the same checkpoint file of 137 MB.

A command of a second is mostly its start: what it imports. All take turns in random order. The
figures are seconds of processor time, with the time by the clock beside them.
"""

import argparse
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {
    "RESTIC_PASSWORD": "benchmark"
}
"""Modules are compiled, as in an installed package."""


def timed(command: list[str], folder: Path) -> tuple[float, float]:
    """Seconds of processor time and by the clock that a command takes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=ENVIRONMENT)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime), took


def commands(files: Path) -> dict[str, list[str]]:
    """Each measured command, in a folder with a store and a repository."""
    ours = [sys.executable, "-m", "ckptstore", "-s", "store"]
    restic = ["restic", "-r", "repository"]
    return {
        "ckptstore adopt": [*ours, "adopt", str(files), "--step", "1"],
        "restic backup": [*restic, "backup", str(files)],
        "ckptstore materialize": [*ours, "materialize", "1", "out"],
        "restic restore": [*restic, "restore", "latest", "--target", "restored"],
        "ckptstore log": [*ours, "log"],
        "ckptstore show": [*ours, "show", "1"],
    }


def one_round(files: Path) -> dict[str, tuple[float, float]]:
    """Both add the files to an empty place, and bring them back, in random order."""
    with tempfile.TemporaryDirectory(dir=files.parent) as name:
        folder = Path(name)
        store = [sys.executable, "-m", "ckptstore", "init", "store"]
        timed(store, folder)
        timed(["restic", "init", "-r", "repository"], folder)
        named = commands(files)
        adding = ["ckptstore adopt", "restic backup"]
        reading = [each for each in named if each not in adding]
        order = random.sample(adding, len(adding)) + random.sample(reading, len(reading))
        return {each: timed(named[each], folder) for each in order}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=None, help="a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    if shutil.which("restic") is None:
        sys.exit("restic is not installed: apt-get install restic")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        files = Path(name, "source")
        files.mkdir()
        torch.manual_seed(0)
        weights = {f"layer.{i}.weight": torch.randn(1024, 1024) for i in range(34)}
        save_file(weights, files / "model.safetensors")
        rounds = [one_round(files) for _ in range(args.rounds)]
    cpu = {each: statistics.median(run[each][0] for run in rounds) for each in rounds[0]}
    clock = {each: statistics.median(run[each][1] for run in rounds) for each in rounds[0]}
    for each in rounds[0]:
        print(f"{each:24} {cpu[each]:6.3f} s of processor time, {clock[each]:6.3f} s by the clock")
    for ours, peer in (("adopt", "backup"), ("materialize", "restore")):
        ratio = cpu[f"ckptstore {ours}"] / cpu[f"restic {peer}"]
        print(f"{ours} / restic {peer}: {ratio:.2f} of the processor time")


if __name__ == "__main__":
    main()
