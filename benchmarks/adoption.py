"""`python -m benchmarks.adoption [FOLDER]` compares `adopt` and `materialize` with `cp` and a hash
of the same files, all of them durable.

The checkpoint is one of Hugging Face's Trainer: weights, an optimizer twice as large, and small
files. `cp` copies and each file is synced; then as many threads as there are processors read the
copies and hash them with the BLAKE3 that ckptstore uses, one file each.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from blake3 import blake3
from safetensors.torch import save_file

import ckptstore
from benchmarks.measure import Entrant, Result, alternate, ratio

ROUNDS = 11
WIDTH, LAYERS = 1024, 24
READ_BYTES = 4 << 20


def checkpoint(folder: Path) -> int:
    """A directory as the Trainer writes it; returns its bytes."""
    folder.mkdir()
    draws = torch.Generator().manual_seed(0)
    weights = {
        f"model.layers.{layer}.{name}.weight": torch.randn(rows, WIDTH, generator=draws)
        for layer in range(LAYERS)
        for name, rows in (("attn", 2 * WIDTH), ("mlp", WIDTH), ("norm", 1))
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    moments = {
        number: {
            "step": torch.tensor(10.0),
            "exp_avg": torch.randn(weight.shape, generator=draws),
            "exp_avg_sq": torch.randn(weight.shape, generator=draws),
        }
        for number, weight in enumerate(weights.values())
    }
    torch.save({"state": moments, "param_groups": []}, folder / "optimizer.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"loss": 1.0}] * 500}))
    return sum(path.stat().st_size for path in folder.iterdir())


def copy(source: Path, target: Path) -> None:
    """`cp`, and every file and the directories are durable."""
    subprocess.run(["cp", "-a", "--reflink=never", source, target], check=True)
    for path in (*target.iterdir(), target, target.parent):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


def hash_all(folder: Path) -> list[str]:
    threads = os.cpu_count() or 1

    def hashed(path: Path) -> str:
        found = blake3()
        buffer = memoryview(bytearray(READ_BYTES))
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                found.update(buffer[:size])
        return found.hexdigest()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(hashed, sorted(folder.iterdir())))


def measure(folder: Path, rounds: int) -> None:
    source, target = folder / "source", folder / "target"
    nbytes = checkpoint(source)

    def remove(path: Path) -> None:
        if path.exists():
            shutil.rmtree(path)

    def copy_and_hash() -> None:
        copy(source, target)
        hash_all(target)

    def adopt() -> None:
        with ckptstore.open(folder / "store") as store:
            store.adopt(source)

    with ckptstore.open(folder / "kept") as kept:
        snapshot = kept.adopt(source)

        def materialize() -> None:
            snapshot.materialize(target)

        entrants = [
            Entrant("cp + hash", copy_and_hash, after=lambda: remove(target)),
            Entrant("adopt", adopt, after=lambda: remove(folder / "store")),
            Entrant("materialize", materialize, after=lambda: remove(target)),
        ]
        series = alternate("adoption", entrants, rounds)
    result = Result("adoption", "", "s", nbytes, series)
    for name, its in series.items():
        print(
            f"{name}: {its.median:.3f} s, {nbytes / its.median / 1e9:.2f} GB/s, "
            f"{ratio(result, 'cp + hash', name):.2f} of cp + hash, "
            f"CPU {sorted(its.cpu_seconds)[rounds // 2]:.2f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.adoption", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="where; default: the temporary folder")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        measure(Path(scratch), chosen.rounds)


if __name__ == "__main__":
    main()
