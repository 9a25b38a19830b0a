"""What it costs to read plain values back: `python -m benchmarks.plain_values`.

Each row is a process of its own: a log history of 30,000 dicts, or a dict of 100,000 strings, is
read as a new state, restored into a target that has as many other values, or read by torch.load.
Figures are seconds of processor time, and the memory that the highest point took beyond what was in
use before.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import ckptstore

SHAPES: dict[str, Any] = {
    "30,000 dicts": lambda of: [
        {"step": i + of, "loss": i * 0.5, "lr": 1e-3, "epoch": i / 7} for i in range(30_000)
    ],
    "100,000 strings": lambda of: {f"key{i}": f"value {i + of}" for i in range(100_000)},
}
WAYS = "state_dict", "restore", "torch.load"


def peak_mib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


def read(folder: Path, shape: str, way: str) -> None:
    """Read one of `SHAPES` in one way, and print what it took."""
    target = {"log": {"h": SHAPES[shape](1)}}
    with ckptstore.open(folder / "store") as store:
        snapshot = store.checkout(0)
        Path("/proc/self/clear_refs").write_text("5")
        before, started = peak_mib(), time.process_time()
        if way == "torch.load":
            found = torch.load(folder / "state.pt", weights_only=False)
        elif way == "restore":
            snapshot.restore(target)
            found = target
        else:
            found = snapshot.state_dict()
        took = time.process_time() - started
        print(f"{shape:16} {way:12} {took:6.3f} s {peak_mib() - before:5} MiB", flush=True)
    assert found == {"log": {"h": SHAPES[shape](0)}}


def main() -> None:
    if len(sys.argv) > 1:
        read(Path(sys.argv[1]), *sys.argv[2:])
        return
    for shape, make in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            state = {"log": {"h": make(0)}}
            with ckptstore.open(Path(folder, "store")) as store:
                store.commit(state, step=0)
            torch.save(state, Path(folder, "state.pt"))
            for way in WAYS:
                command = [sys.executable, "-m", "benchmarks.plain_values", folder, shape, way]
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
