"""`python -m benchmarks.torch_checkpointing` measures torch_checkpointing's manager with its own
storage (`files`) and with a store (`store`), and ckptstore's manager (`manager`), in turns.

`hold` is how long `save` and its staging keep the training, `done` is when the future has a result,
`durable` when the files are synced: of a store it is the same moment, of files it is after an
`fsync` of each, which the manager does not do. Direct I/O is off, since it fails on ext4.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from ckptstore.plugins.torch_checkpointing import CheckpointManager as StoreManager
from ckptstore.plugins.torch_checkpointing import StoreStorageConfig

TENSORS = 25


def sync(folder: Path) -> None:
    """Make the files of a checkpoint durable."""
    for path in (*folder.iterdir(), folder, folder.parent):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def timed(
    manager: CheckpointManager, place: Path, state: Any, finish: Callable[[Path], None]
) -> tuple[float, float, float]:
    """Seconds of a save: held, done, durable."""
    began = time.perf_counter()
    future = manager.save(str(place), state)
    with manager.lock():
        hold = time.perf_counter() - began
    future.result()
    done = time.perf_counter() - began
    finish(place)
    return hold, done, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=None, help="a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=300, help="the size of the state")
    parser.add_argument("--kinds", nargs="+", default=["files", "store", "manager"])
    args = parser.parse_args()
    items = {"model": ItemSpec(requires_copy=True)}
    figures: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        root = Path(name)
        stores = [StoreStorageConfig(str(root / f"{kind}.store")) for kind in ("store", "manager")]
        kinds: dict[str, tuple[Any, Any, Callable[[Path], None]]] = {
            "files": (CheckpointManager, LocalFileSystemStorageConfig(use_direct_io=False), sync),
            "store": (CheckpointManager, stores[0], lambda place: None),
            "manager": (StoreManager, stores[1], lambda place: None),
        }
        managers = {
            kind: kinds[kind][0].Config(items=items, storage_config=kinds[kind][1]).build()
            for kind in args.kinds
        }
        elements = args.megabytes * 1_000_000 // 4 // TENSORS
        state = {"model": {f"w{i}": torch.randn(elements) for i in range(TENSORS)}}
        for number in range(args.rounds + 1):  # the first round warms up, and is left out
            for change in ("changed", "unchanged"):
                if change == "changed":
                    for tensor in state["model"].values():
                        tensor.add_(1)
                for kind in sorted(managers, reverse=bool(number % 2)):
                    place = root / kind / f"{change}_{number}"
                    took = timed(managers[kind], place, state, kinds[kind][2])
                    if number:
                        figures.setdefault(f"{kind}, {change}", []).append(took)
        for manager in managers.values():
            manager.close()
    print(f"{'':<18} {'hold':>8} {'done':>8} {'durable':>8}   medians of {args.rounds}, s")
    for each, rows in figures.items():
        columns = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{each:<18}" + "".join(f" {column:8.3f}" for column in columns))


if __name__ == "__main__":
    main()
