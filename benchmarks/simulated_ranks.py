"""`python -m benchmarks.simulated_ranks --ranks 1024` measures what rank 0 does for a new plan of
so many ranks: it decodes their descriptions, merges them, plans and encodes a task for each.

The code is the coordinator's own, and so are the bytes that ranks would send. The ranks are
stand-ins without tensors: a mixture of experts of 423 billion parameters, bfloat16, with two
moments in float32, all of it divided among all ranks as FSDP2 does (1,923 leaves; experts by
number, then by rows). Nothing is sent, so what a network takes comes on top. A plan is kept while
the state keeps its structure: later commits only put together what the ranks have written
(*a commit*).

`--restore` measures instead what rank 0 does for a restore of that state on so many ranks: it
decodes what each needs (*needs*), finds what several need (*groups*), decides who reads what
(*shares*), and makes a task for each (*tasks*). Chunks of a commit are numbered on every rank
(*numbers*).
"""

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from ckptstore.core.geometry import grid, nbytes_of, width_of
from ckptstore.core.ids import CHUNK_ID_BYTES, digest
from ckptstore.core.model import Box, Node, Schema, Shape
from ckptstore.core.process import uncollected
from ckptstore.distributed.assemble import Assembler, Decided, Written, layout_of
from ckptstore.distributed.framing import numbered
from ckptstore.distributed.merge import (
    Described,
    decode_description,
    encode_description,
    merge,
)
from ckptstore.distributed.plan import plan_ranks
from ckptstore.distributed.rank_worker import encode_tasks
from ckptstore.distributed.read_assignment import (
    decode_edges,
    encode_edges,
    plan_shares,
    shared_by,
    tasks_of,
)
from ckptstore.distributed.shared_reads import Numbering
from ckptstore.objects.schema import LastSchemas
from ckptstore.state.leaf_sources import FlatState, HeldLeaf, Holding, Mesh

T = TypeVar("T")

CHUNK_BYTES = 1 << 20
WINDOW_BYTES = 1 << 25
EXPERTS, WIDTH, HIDDEN = 128, 8192, 2048
LAYER: dict[str, Shape] = {
    "query": (WIDTH, WIDTH),
    "key": (1024, WIDTH),
    "value": (1024, WIDTH),
    "out": (WIDTH, WIDTH),
    "norm1": (WIDTH,),
    "norm2": (WIDTH,),
    "router": (EXPERTS, WIDTH),
    "up": (EXPERTS, WIDTH, HIDDEN),
    "gate": (EXPERTS, WIDTH, HIDDEN),
    "down": (EXPERTS, HIDDEN, WIDTH),
}


class Row(NamedTuple):
    """A tensor of the state."""

    path: str
    dtype: str
    shape: Shape


def rows(layers: int) -> list[Row]:
    """The tensors of the model and its optimizer."""
    shapes = {"embedding": (131_072, WIDTH)} | {
        f"{layer}.{name}": shape for layer in range(layers) for name, shape in LAYER.items()
    }
    return [
        Row(f"app/{kind}/{name}", "bfloat16" if kind == "weight" else "float32", shape)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    ]


def descriptions(ranks: int, layers: int) -> Iterator[bytes]:
    """What each rank sends."""
    found = rows(layers)
    names = tuple(row.path for row in found)
    schema = Schema(
        Node("dict", tuple(range(len(found))), names),
        names,
        tuple("tensor" for _ in found),
        tuple(row.dtype for row in found),
        tuple(row.shape for row in found),
        (-1,) * len(found),
    )
    mesh, schemas = Mesh((ranks,), tuple(range(ranks))), LastSchemas()
    for rank in range(ranks):
        held = {
            row.shape: HeldLeaf(Holding(mesh, ("Shard(0)",), _boxes(row.shape, rank, ranks)), ())
            for row in found
        }
        parts = {number: held[row.shape] for number, row in enumerate(found)}
        yield encode_description({"app": FlatState(schema, [], parts, {})}, schemas)


def _boxes(shape: Shape, rank: int, ranks: int) -> tuple[Box, ...]:
    first, *others = shape
    if len(shape) == 3 and ranks > first:
        expert, part = divmod(rank, ranks // first)
        length = shape[1] // (ranks // first)
        return (Box((expert, part * length, 0), (1, length, shape[2])),)
    length = -(-first // ranks)
    start, stop = min(rank * length, first), min((rank + 1) * length, first)
    offsets = (start, *(0 for _ in others))
    return (Box(offsets, (stop - start, *others)),) if stop > start else ()


class Steps:
    """Runs and reports steps: seconds of the processor, and the peak of memory above the first."""

    def __init__(self) -> None:
        self._base = _peak_mib()
        self.seconds = 0.0

    def run(self, name: str, step: Callable[[], T]) -> T:
        """The result of `step`, whose cost is printed."""
        started = time.process_time()
        with uncollected():
            result = step()
        took = time.process_time() - started
        self.seconds += took
        print(f"{name:9} {took:7.2f} s   {_peak_mib() - self._base:6,} MiB")
        return result


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def measure(ranks: int, layers: int) -> dict[str, int]:
    """Plan for `ranks` ranks, print what each step costs, and return the bytes that are sent."""
    sent = list(descriptions(ranks, layers))
    steps, known = Steps(), Described()
    described = steps.run("decode", lambda: [decode_description(each, known) for each in sent])
    trees = steps.run("merge", lambda: merge(described))
    plan = steps.run("plan", lambda: plan_ranks(trees, ranks, CHUNK_BYTES, canonical=True))
    layout = steps.run("layout", lambda: layout_of(plan, ranks))
    keys = [[tree.key for tree in own] for own in described]
    tasks = steps.run("tasks", lambda: encode_tasks(plan, keys, trust_replicated=True))
    assembler = steps.run("assembler", lambda: Assembler(plan))
    print(f"{'all':9} {steps.seconds:7.2f} s")
    written = written_by(assembler, ranks)
    decided, observed = Decided(checksums=[[] for _ in written]), [numbered({})] * ranks
    steps.run("a commit", lambda: assembler.assemble(decided, written, observed))
    return {
        "descriptions": sum(map(len, sent)),
        "tasks": sum(map(len, tasks)),
        "layout": len(layout),
    }


def edges_in(dtype: str, shape: Shape, rank: int, ranks: int) -> tuple[int, int]:
    """The chunks of a tensor that a rank needs, the first and the one behind the last."""
    width = width_of(dtype)
    chunks = len(grid(shape, width, CHUNK_BYTES))
    nbytes = -(-nbytes_of(dtype, shape) // chunks)
    for box in _boxes(shape, rank, ranks):  # one at most, which lies in one piece
        begin = int(np.ravel_multi_index(box.offsets, shape)) * width
        return begin // nbytes, -(-(begin + int(np.prod(box.lengths)) * width) // nbytes)
    return 0, 0


def measure_restore(ranks: int, layers: int) -> dict[str, int]:
    """Plan a restore for `ranks` ranks, as `measure`."""
    firsts: dict[tuple[str, Shape], list[int]] = {}
    count = 0
    for row in rows(layers):
        firsts.setdefault((row.dtype, row.shape), []).append(count)
        count += len(grid(row.shape, width_of(row.dtype), CHUNK_BYTES))

    def needs(rank: int) -> bytes:
        runs = np.concatenate(
            [np.add.outer(at, edges_in(*kind, rank, ranks)) for kind, at in firsts.items()]
        )
        runs = np.sort(runs[runs[:, 0] < runs[:, 1]], axis=0)
        edges, times = np.unique(runs, return_counts=True)
        return encode_edges(edges[times == 1])  # runs side by side are one

    sent = [needs(rank) for rank in range(ranks)]
    ids = np.random.default_rng(0).bytes(count * CHUNK_ID_BYTES)
    steps = Steps()
    edges = steps.run("needs", lambda: list(map(decode_edges, sent)))
    shared = steps.run("groups", lambda: shared_by(edges, count))
    sizes = np.full(len(shared.chunks.numbers), CHUNK_BYTES, np.int64)
    assigned = steps.run("shares", lambda: plan_shares(shared, ranks, sizes, WINDOW_BYTES))
    tasks = steps.run("tasks", lambda: tasks_of(shared, assigned, ranks))
    print(f"{'all':9} {steps.seconds:7.2f} s")
    steps.run("numbers", lambda: Numbering(ids).digest)
    lengths = [sum(map(len, task or ())) for task in tasks]
    print(f"{count:,} chunks, {len(sizes):,} shared by {len(shared.chunks):,} sets of ranks")
    return {
        "needs": sum(map(len, sent)),
        "tasks": sum(lengths),
        "the longest task": max(lengths),
    }


def written_by(assembler: Assembler, ranks: int) -> list[Written]:
    """What each rank hands in when its chunks are written."""
    chunk = digest(b"")
    asked = (assembler.asked(rank).tolist() for rank in range(ranks))
    return [Written(numbered(dict.fromkeys(numbers, chunk)), b"") for numbers in asked]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulated_ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--restore", action="store_true")
    asked = parser.parse_args()
    found = rows(asked.layers)
    parameters = sum(float(np.prod(row.shape)) for row in found) / 3
    print(f"{asked.ranks:,} ranks, {parameters / 1e9:.0f}e9 parameters, {len(found):,} leaves")
    act = measure_restore if asked.restore else measure
    for what, nbytes in act(asked.ranks, asked.layers).items():
        print(f"{what}: {nbytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
