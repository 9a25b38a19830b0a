"""How much smaller does `compact` make real trainings, and how fast? `python -m
benchmarks.compaction FOLDER` trains the demo's model twice, commits every state, compacts, and
writes a table for docs/compact.md.

The states are kept in FOLDER, so that a second run measures without training.
"""

import argparse
import lzma
import math
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

import ckptstore
from ckptstore.maintenance.compact import CompactReport
from ckptstore.objects import codecs
from demo.model import CharacterModel, loss_of
from demo.text import batch, library

BATCH = 8
WARM_UP = 100
TABLE = (400_000, 128)
TOUCHED = 0.005
SAMPLED = 12
"""Files of a training that the slow compressors are given."""


def train(folder: Path, kind: str, commits: int, every: int) -> None:
    """Write the states of a training: weights and AdamW's moments, with `bf16` the weights in
    bfloat16 and float32 masters of them. The learning rate falls along a cosine."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: Any = CharacterModel()
    masters = list(model.parameters())
    if kind == "bf16":
        masters = [p.detach().clone().requires_grad_() for p in masters]
        model = model.to(torch.bfloat16)
    weights, steps = list(model.parameters()), commits * every
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min(1, (s + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * min(1, s / steps))),
    )
    for step in range(1, steps + 1):
        model.zero_grad()
        loss_of(model, *batch(library(), BATCH)).backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad = weight.grad.to(master.dtype)
        optimizer.step()
        schedule.step()
        if kind == "bf16":
            with torch.no_grad():
                for weight, master in zip(weights, masters, strict=True):
                    weight.copy_(master)
        if step % every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if kind == "bf16":
                state["masters"] = [master.detach() for master in masters]
            torch.save(state, folder / f"{kind}-{step // every:04d}.pt")
            print(kind, step, flush=True)


def states(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(f"{kind}-*.pt")):
        yield torch.load(path)


def table_states(commits: int = 10) -> Iterator[dict[str, Any]]:
    """An embedding table of which some rows, drawn at random, change per commit."""
    random = torch.Generator().manual_seed(0)
    table = torch.randn(TABLE, generator=random)
    for _ in range(commits):
        yield {"table": table}
        rows = torch.randperm(TABLE[0], generator=random)[: int(TOUCHED * TABLE[0])]
        table[rows] += 1e-3 * torch.randn(len(rows), TABLE[1], generator=random)


def packs_bytes(place: Path) -> int:
    return sum(path.stat().st_size for path in place.glob("packs/*/*"))


def stored(place: Path, found: Iterator[dict[str, Any]], policy: ckptstore.CompactPolicy) -> str:
    """Commit every state, compact, and say what both took."""
    shutil.rmtree(place, ignore_errors=True)
    logical = 0
    with ckptstore.open(place) as store:
        for step, state in enumerate(found):
            logical += store.commit(state, step=step).logical_bytes
        before = packs_bytes(place)
        estimate = store.compact(policy, dry_run=True)
        began, cpu = time.perf_counter(), time.process_time()
        report = store.compact(policy)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        if store.fsck("data").findings:
            raise AssertionError("the compacted store is damaged")
        rates = [f"{restore_rate(store, step):.2f}" for step in (-1, len(store.log()) // 2)]
    shares = f"{before / logical:.3f} | {packs_bytes(place) / logical:.3f}"
    speed = f"{report.raw_bytes / cpu / 1e9:.2f} GB/s of CPU, {took:.1f} s"
    return f"{shares} | {near(estimate, report):.3f} | {speed} | {' / '.join(rates)} GB/s"


def near(estimate: CompactReport, report: CompactReport) -> float:
    """What a dry run said, of what followed."""
    return estimate.coded_bytes / max(report.coded_bytes, 1)


def restore_rate(store: ckptstore.Store, step: int) -> float:
    """Raw bytes per CPU second of reading all tensors of a commit, the newest for -1."""
    snapshot = store.checkout("latest" if step < 0 else step)
    best = 0.0
    for _ in range(5):
        began = time.process_time()
        snapshot.state_dict()
        best = max(best, snapshot.logical_bytes / (time.process_time() - began) / 1e9)
    return best


def bytes_of(state: Any) -> Iterator[tuple[bytes, int]]:
    """The tensors of a state, and their elements' widths."""
    if isinstance(state, torch.Tensor):
        if state.dim():
            flat = state.detach().contiguous().flatten()
            yield flat.view(torch.uint8).numpy().tobytes(), state.itemsize
    elif isinstance(state, dict | list):
        for item in state.values() if isinstance(state, dict) else state:
            yield from bytes_of(item)


def grouped_lz4(data: bytes, width: int) -> int:
    """The bytes of the elements' planes under LZ4, or those of the data."""
    from lz4.frame import compress  # of the extra `bench`

    planes = np.frombuffer(data, np.uint8).reshape(-1, width).T.tobytes()
    return min(len(compress(planes)), len(data))


OTHERS: dict[str, Callable[[bytes, int], int]] = {
    "zstd -3": lambda data, _: len(zstandard.compress(data, 3)),
    "zstd -19": lambda data, _: len(zstandard.compress(data, 19)),
    "xz -6": lambda data, _: len(lzma.compress(data)),
    "bytes grouped, LZ4": grouped_lz4,
}
"""Each is given every tensor alone."""


def others(found: Sequence[dict[str, Any]]) -> list[str]:
    """The share that other ways leave of the states' bytes."""
    parts = [part for state in found for part in bytes_of(state)]
    total = sum(len(data) for data, _ in parts)
    return [f"{sum(way(*part) for part in parts) / total:.3f}" for way in OTHERS.values()]


def speeds(states_of: Sequence[tuple[str, bytes, bytes, int]]) -> Iterator[str]:
    """Ratio and speed per kind of tensor, of planes and of differences."""
    for name, base, raw, width in states_of:
        base_view, raw_view = memoryview(base), memoryview(raw)
        at = codecs.Base(0, len(base), codecs.RAW)
        out = memoryview(bytearray(len(raw)))
        codec, planes = codecs.encode(codecs.SPLIT_ZSTD, raw_view, width)
        delta = codecs.encode_delta(raw_view, base_view, at, width)
        rates = [
            rate(len(raw), work)
            for work in (
                lambda r=raw_view, w=width: codecs.encode(codecs.SPLIT_ZSTD, r, w),
                lambda c=codec, p=planes, o=out, w=width: codecs.decode_into(c, p, o, w),
                lambda r=raw_view, b=base_view, a=at, w=width: codecs.encode_delta(r, b, a, w),
                lambda d=delta, b=base_view, o=out, w=width: codecs.decode_delta(d, b, o, w),
            )
        ]
        shares = len(planes) / len(raw), len(delta) / len(raw)
        yield (
            f"| {name} | {shares[0]:.2f} | {rates[0]:.2f} / {rates[1]:.2f} | {shares[1]:.2f} | "
            f"{rates[2]:.2f} / {rates[3]:.2f} |"
        )


def rate(nbytes: int, work: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(9):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return nbytes / best / 1e9


def chunks_of(found: Sequence[dict[str, Any]], kind: str) -> list[tuple[str, bytes, bytes, int]]:
    """A MiB of weights and of each moment, late in a training and one commit before."""

    def joined(state: dict[str, Any], name: str) -> bytes:
        return b"".join(data for data, _ in bytes_of(state[name]))[: 1 << 20]

    def moments(state: dict[str, Any], name: str) -> bytes:
        rows = state["optimizer"]["state"].values()
        return b"".join(data for row in rows for data, _ in bytes_of(row[name]))[: 1 << 20]

    before, after = found[-2:]
    width = 2 if kind == "bf16" else 4
    return [
        (f"{kind}: weights", joined(before, "model"), joined(after, "model"), width),
        *(
            (f"{kind}: {name}", moments(before, name), moments(after, name), 4)
            for name in ("exp_avg", "exp_avg_sq")
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commits", type=int, default=60)
    parser.add_argument("--steps", type=int, default=50, help="between two commits")
    parser.add_argument("--every", type=int, default=8, help="commits with one base")
    parser.add_argument("--only-train", choices=("fp32", "bf16"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for kind in (args.only_train,) if args.only_train else ("fp32", "bf16"):
        if len(list(args.folder.glob(f"{kind}-*.pt"))) < args.commits:
            train(args.folder, kind, args.commits, args.steps)
    if args.only_train:
        return
    policy, place = ckptstore.CompactPolicy(newest=0, every=args.every), args.folder / "store"
    print("| training | stored | compacted | estimate | speed | restore: newest / middle |")
    for kind in ("fp32", "bf16"):
        print(f"| {kind} |", stored(place, states(args.folder, kind), policy))
    weights = ({"model": state["model"]} for state in list(states(args.folder, "bf16"))[-20:])
    print("| late bf16 weights |", stored(place, weights, policy))
    print("| table |", stored(place, table_states(), policy))
    print("| files |", " | ".join(OTHERS), "|")
    for kind in ("fp32", "bf16"):
        found = list(states(args.folder, kind))
        sampled = found[:: -(-len(found) // SAMPLED)]
        print(f"| {kind} |", " | ".join(others(sampled)), "|")
        print("\n".join(speeds(chunks_of(found, kind))))
    print("peak memory, MiB:", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)


if __name__ == "__main__":
    main()
