"""How much smaller does `compact` make real trainings, and how fast? `python -m
benchmarks.compaction FOLDER` trains the demo's model twice and fine-tunes it, commits every state,
compacts, and writes a table for docs/compact.md. With `--llama` a model of transformers, too.

The states are kept in FOLDER, so that a second run measures without training.
"""

import argparse
import lzma
import math
import resource
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import zstandard

import ckptstore
from ckptstore.maintenance.compact import CompactReport
from ckptstore.maintenance.retention import Policy
from ckptstore.objects import codecs
from demo.model import CharacterModel, add_adapters, loss_of
from demo.text import CONTEXT, VOCABULARY, batch, library

BATCH = 8
WARM_UP = 100
TABLE = (400_000, 128)
TOUCHED = 0.005
THINNED = ckptstore.KeepLast(5).thin("optimizer/**")
TUNED, BEFORE = 60, 20
"""Commits of a fine-tune, and of the training of the Llama before it."""

SAMPLED = 12
"""Files of a training that the slow compressors are given."""

Sample: TypeAlias = tuple[str, bytes, bytes, int]
"""A name, the bytes at one commit and at the next, and an element's width."""


def train(folder: Path, kind: str, commits: int, every: int) -> None:
    """Write the states of a training: weights and AdamW's moments, with `bf16` the weights in
    bfloat16 and float32 masters of them. The learning rate falls along a cosine. Arithmetic is
    float32's on weights and gradients rounded to bfloat16: many processors have no other."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, text, rate = starts(folder, kind)
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = trained
    if kind == "bf16":
        masters = [p.detach().clone().requires_grad_() for p in trained]
        round_to(trained, masters)
    steps = commits * every
    optimizer = torch.optim.AdamW(masters, lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min(1, (s + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * min(1, s / steps))),
    )
    for step in range(1, steps + 1):
        model.zero_grad()
        loss_of(model, *batch(text, BATCH)).backward()
        for weight, master in zip(trained, masters, strict=True):
            master.grad = rounded(weight.grad) if kind == "bf16" else weight.grad
        optimizer.step()
        schedule.step()
        if kind == "bf16":
            round_to(trained, masters)
        if step % every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if kind == "bf16":
                state["model"] = {k: v.to(torch.bfloat16) for k, v in state["model"].items()}
                state["masters"] = [master.detach() for master in masters]
            torch.save(state, folder / f"{kind}-{step // every:04d}.pt")
            print(kind, step, flush=True)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """The same in float32, rounded to bfloat16."""
    return values.to(torch.bfloat16).to(values.dtype)


def round_to(weights: Iterable[torch.Tensor], masters: Iterable[torch.Tensor]) -> None:
    """Make each weight its master, rounded to bfloat16."""
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(rounded(master))


def starts(folder: Path, kind: str) -> tuple[Any, torch.Tensor, float]:
    """The model of a training, the text, and the learning rate. `lora` puts adapters around the
    last weights of `fp32`; `llama` goes on from the last weights of `llama-base`, both with another
    text."""
    model: Any = Llama() if kind.startswith("llama") else CharacterModel()
    if kind in ("fp32", "bf16", "llama-base"):
        return model, library(), 1e-3
    base = {"lora": "fp32", "llama": "llama-base"}[kind]
    [last] = states(folder, base, slice(-1, None))
    model.load_state_dict(last["model"])
    if kind == "lora":
        add_adapters(model)
    return model, library("email"), 2e-4


class Llama(torch.nn.Module):
    """A Llama of 0.9 million parameters, by transformers, which the figures of it need."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=128,
                intermediate_size=352,
                num_hidden_layers=4,
                num_attention_heads=4,
                max_position_embeddings=CONTEXT,
            )
        )

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(batch, length) of character numbers to (batch, length, VOCABULARY) of logits."""
        logits: torch.Tensor = self.llama(input_ids=text, use_cache=False).logits
        return logits


def states(folder: Path, kind: str, which: slice = slice(None)) -> Iterator[dict[str, Any]]:
    """The states of a training, one at a time, oldest first."""
    for path in sorted(folder.glob(f"{kind}-[0-9]*.pt"))[which]:
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


def stored(
    place: Path,
    found: Iterator[dict[str, Any]],
    policy: ckptstore.CompactPolicy,
    thin: Policy | None = None,
) -> str:
    """Commit every state, thin what `thin` says, compact, and say what each took."""
    shutil.rmtree(place, ignore_errors=True)
    logical = 0
    with ckptstore.open(place) as store:
        for step, state in enumerate(found):
            logical += store.commit(state, step=step).logical_bytes
        before = packs_bytes(place)
        if thin:
            store.forget(thin)
            store.gc(grace_s=0)
        thinned = packs_bytes(place)
        estimate = store.compact(policy, dry_run=True)
        began, cpu = time.perf_counter(), time.process_time()
        report = store.compact(policy)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        if store.fsck("data").findings:
            raise AssertionError("the compacted store is damaged")
        rates = "" if thin else restore_rates(store, place.with_name("raw"), policy)
    shares = " | ".join(f"{n / logical:.3f}" for n in (before, thinned, packs_bytes(place)))
    speed = f"{report.raw_bytes / cpu / 1e9:.2f} GB/s of CPU, {took:.1f} s"
    return f"{shares} | {near(estimate, report):.3f} | {speed} | {rates}"


def near(estimate: CompactReport, report: CompactReport) -> float:
    """What a dry run said, of what followed."""
    return estimate.coded_bytes / max(report.coded_bytes, 1)


def restore_rates(store: ckptstore.Store, place: Path, policy: ckptstore.CompactPolicy) -> str:
    """GB/s of CPU time of reading a raw commit, one of bases and one of differences, in turns."""
    base = store.checkout(policy.every // 2)
    shutil.rmtree(place, ignore_errors=True)
    with ckptstore.open(place) as raw_store:
        raw_store.commit(base.state_dict(), step=0)
        snapshots = raw_store.checkout(0), base, store.checkout(policy.every // 2 - 1)
        seconds = [math.inf] * len(snapshots)
        for _ in range(9):
            for i, snapshot in enumerate(snapshots):
                began = time.process_time()
                snapshot.state_dict()
                seconds[i] = min(seconds[i], time.process_time() - began)
    return " / ".join(f"{base.logical_bytes / each / 1e9:.2f}" for each in seconds)


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


def numbers_alone(data: bytes, width: int) -> int:
    """The bytes under pcodec, a library for columns of numbers."""
    from pcodec import ChunkConfig, standalone

    numbers = np.frombuffer(data, "<f4" if width == 4 else f"<u{width}")
    return len(standalone.simple_compress(numbers, ChunkConfig(compression_level=8)))


def zipped_network(data: bytes, width: int) -> int:
    """The bytes under ZipNN, a library for weights."""
    from zipnn import ZipNN

    dtype = "bfloat16" if width == 2 else "float32"
    return len(ZipNN(bytearray_dtype=dtype, input_format="byte").compress(bytearray(data)))


OTHERS: dict[str, Callable[[bytes, int], int]] = {
    "zstd -3": lambda data, _: len(zstandard.compress(data, 3)),
    "zstd -19": lambda data, _: len(zstandard.compress(data, 19)),
    "xz -6": lambda data, _: len(lzma.compress(data)),
    "bytes grouped, LZ4": grouped_lz4,
}
OTHERS |= {
    library: way
    for library, way in (("pcodec", numbers_alone), ("zipnn", zipped_network))
    if find_spec(library)
}
"""Each is given every tensor alone; the last ones if they are installed."""


def others(found: Iterator[dict[str, Any]]) -> list[str]:
    """The share that other ways leave of the states' bytes."""
    total, sums = 0, dict.fromkeys(OTHERS, 0)
    for state in found:
        for part in bytes_of(state):
            total += len(part[0])
            for name, way in OTHERS.items():
                sums[name] += way(*part)
    return [f"{nbytes / total:.3f}" for nbytes in sums.values()]


def speeds(samples: Iterable[Sample]) -> Iterator[str]:
    """Ratio and speed per kind of tensor, of planes and of differences."""
    for name, base, raw, width in samples:
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


def chunks_of(before: Any, after: Any, kind: str) -> Iterator[Sample]:
    """A MiB of weights and of each moment, late in a training and one commit before."""
    for name, part in (
        ("weights", lambda state: state["model"]),
        ("exp_avg", lambda state: moments(state, "exp_avg")),
        ("exp_avg_sq", lambda state: moments(state, "exp_avg_sq")),
    ):
        width = 2 if kind == "bf16" and name == "weights" else 4
        yield f"{kind}: {name}", first_mib(part(before)), first_mib(part(after)), width


def moments(state: Any, name: str) -> list[torch.Tensor]:
    return [row[name] for row in state["optimizer"]["state"].values()]


def first_mib(state: Any) -> bytes:
    return b"".join(data for data, _ in bytes_of(state))[: 1 << 20]


def dtypes_of(before: Any, after: Any) -> Iterator[Sample]:
    """The weights of two commits in other dtypes, and integers that a training has."""
    weights = [torch.cat([w.flatten() for w in s["model"].values()]) for s in (before, after)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        yield sample(f"{dtype}: weights", [w.to(dtype) for w in weights])
    for dtype, largest in (
        (torch.float8_e4m3fn, 448),
        (torch.float8_e5m2, 57344),
        (torch.int8, 127),
    ):
        scaled = [w * (largest / weights[0].abs().max()) for w in weights]
        scaled = [w.clamp(-largest, largest) for w in scaled]
        if dtype == torch.int8:
            scaled = [w.round() for w in scaled]
        yield sample(f"{dtype}: scaled weights", [w.to(dtype) for w in scaled])
    tokens = torch.cat([batch(library(), 512)[0].flatten() for _ in range(16)])
    counts = [torch.bincount(torch.randint(1 << 17, (n << 20,))) for n in (20, 21)]
    orders = [torch.randperm(1 << 17) for _ in range(2)]
    halves = tokens.to(torch.int32).chunk(2)
    yield sample("torch.int32: token ids of a buffer, refilled", halves)
    yield sample("torch.int64: order of a sampler, of the next epoch", orders)
    yield sample("torch.int64: how often each row was used", counts)


def sample(name: str, tensors: Sequence[torch.Tensor]) -> Sample:
    before, after = map(first_mib, tensors)
    return name.removeprefix("torch."), before, after, tensors[0].itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commits", type=int, default=60)
    parser.add_argument("--steps", type=int, default=50, help="between two commits")
    parser.add_argument("--every", type=int, default=8, help="commits with one base")
    parser.add_argument("--only-train", choices=("fp32", "bf16"))
    parser.add_argument("--llama", action="store_true", help="needs transformers")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    wanted = {"fp32": args.commits, "bf16": args.commits, "lora": TUNED}
    if args.llama:
        wanted |= {"llama-base": BEFORE, "llama": TUNED}
    if args.only_train:
        wanted = {args.only_train: args.commits}
    for kind, commits in wanted.items():
        if len(list(args.folder.glob(f"{kind}-[0-9]*.pt"))) < commits:
            train(args.folder, kind, commits, args.steps)
    if args.only_train:
        return
    policy, place = ckptstore.CompactPolicy(newest=0, every=args.every), args.folder / "store"
    print("| training | stored | thinned | compacted | estimate | speed | raw / base / delta |")
    for kind in [kind for kind in wanted if kind != "llama-base"]:
        print(f"| {kind} |", stored(place, states(args.folder, kind), policy))
    print("| fp32, thinned |", stored(place, states(args.folder, "fp32"), policy, THINNED))
    weights = ({"model": s["model"]} for s in states(args.folder, "bf16", slice(-20, None)))
    print("| late bf16 weights |", stored(place, weights, policy))
    print("| table |", stored(place, table_states(), policy))
    print("peak memory, MiB:", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
    print("| tensor | planes | encode / decode | difference | encode / decode |")
    for kind in ("fp32", "bf16"):
        before, after = states(args.folder, kind, slice(-2, None))
        print("\n".join(speeds(chunks_of(before, after, kind))))
        if kind == "fp32":
            print("\n".join(speeds(dtypes_of(before, after))))
    print("| files |", " | ".join(OTHERS), "|")
    for kind in ("fp32", "bf16"):
        step = -(-args.commits // SAMPLED)
        print(f"| {kind} |", " | ".join(others(states(args.folder, kind, slice(0, None, step)))))


if __name__ == "__main__":
    main()
