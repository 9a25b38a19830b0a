"""Which chunks of a commit does a target lack that holds another commit? Plans only; no I/O.

A chunk is left out only if the same chunk already lies at the same place: the same memory, filled
from the same byte on, by the same conversion. What holds memory alive is kept with the plan, so an
address never means two things. Where torch counted a write to a tensor since, or counts none, all
of it is read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptstore.plugin.model import Box, ChunkId
from ckptstore.plugin.reading import ChunkRead, ChunkTarget, ReadRequest

if TYPE_CHECKING:
    import torch


class TensorMemory(NamedTuple):
    """The memory of one tensor of the target, the box of the leaf that it takes, and the leaf's
    dtype."""

    device: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    box: Box | None
    committed: str


class ChunkSpot(NamedTuple):
    """Where one chunk lands: from byte `at` of a place on, or else in a region of it."""

    place: TensorMemory
    at: int | None
    region: object


@dataclass(frozen=True, slots=True)
class TargetContent:
    """What a target holds: the chunk at each spot, and how often torch saw each place written."""

    chunks: Mapping[ChunkSpot, ChunkId] = field(default_factory=dict)
    versions: Mapping[TensorMemory, int | None] = field(default_factory=dict)
    alive: Sequence["torch.Tensor"] = ()


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """The tensor that takes one request, its place, and the chunks that it lacks."""

    want: ReadRequest
    tensor: "torch.Tensor"
    place: TensorMemory
    lacking: tuple[ChunkRead, ...]
    count: int
    """How many chunks it has in all."""


@dataclass(frozen=True, slots=True)
class FollowPlan:
    """The chunks that each tensor of a target lacks, and what all spots hold when these have
    landed."""

    targets: tuple[TargetTensor, ...]
    chunks: Mapping[ChunkSpot, ChunkId]
    bases: Mapping[ChunkId, memoryview]
    """What lies now where chunks are lacking: often they are patches of it."""

    @property
    def lacking(self) -> Iterator[ChunkRead]:
        """What to read. A chunk that lands at several spots is in it several times."""
        return (job for target in self.targets for job in target.lacking)

    @property
    def missing(self) -> frozenset[tuple[ChunkSpot, ChunkId]]:
        """What is lacking, and where."""
        return frozenset(
            (ChunkSpot(target.place, job.piece.at, job.piece.region), job.piece.chunk)
            for target in self.targets
            for job in target.lacking
        )

    @property
    def devices(self) -> frozenset["torch.device"]:
        """The devices other than this host's memory."""
        devices = (target.tensor.device for target in self.targets)
        return frozenset(device for device in devices if device.type != "cpu")

    def held(self) -> TargetContent:
        """What the target holds now that everything has landed."""
        versions = {target.place: _version(target.tensor) for target in self.targets}
        return TargetContent(self.chunks, versions, tuple(target.tensor for target in self.targets))


def plan(held: TargetContent, wanted: Iterable[ReadRequest]) -> FollowPlan:
    """What to read so that a target that holds `held` gets all of `wanted`. Leaves that lie in
    pages are left out, since the pages have been read."""
    chunks: dict[ChunkSpot, ChunkId] = {}
    bases: dict[ChunkId, memoryview] = {}
    targets = []
    for want in wanted:
        destination: Any = want.destination  # of a tensor, as a restore has
        place = _place(want, destination.tensor)
        version = _version(destination.tensor)
        is_known = version is not None and held.versions.get(place) == version
        lacking, memory = list[ChunkRead](), destination.memory()
        pieces = _pieces(want)
        for piece in pieces:
            spot = ChunkSpot(place, piece.at, piece.region)
            chunks[spot] = piece.chunk
            before = held.chunks.get(spot) if is_known else None
            if before != piece.chunk:
                lacking.append(job := ChunkRead(piece, want, memory))
                if before is not None and job.place is not None:
                    bases[before] = job.place
        targets.append(TargetTensor(want, destination.tensor, place, tuple(lacking), len(pieces)))
    return FollowPlan(tuple(targets), chunks, bases)


def _pieces(want: ReadRequest) -> list[ChunkTarget]:
    is_inline = want.tree.content(want.number).inline is not None
    return [] if is_inline else list(want.tree.pieces(want.number, want.box))


def _place(want: ReadRequest, tensor: "torch.Tensor") -> TensorMemory:
    return TensorMemory(
        str(tensor.device),
        tensor.data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        str(tensor.dtype),
        want.box,
        want.tree.schema.dtypes[want.number],
    )


def _version(tensor: "torch.Tensor") -> int | None:
    """torch's count of writes to the memory; None where it does not count."""
    return None if tensor.is_inference() else tensor._version
