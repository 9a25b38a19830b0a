"""The boxes of placements, held against the index lists that torch itself makes by cutting a
tensor."""

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptstore.core.model import Box
from ckptstore.state.shards import Cut, RankPart, rank_part


@st.composite
def layouts(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], tuple[int, ...], list[Replicate | Shard | _StridedShard]]:
    """A shape, a mesh and a placement per mesh dimension."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    strided = st.builds(
        lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 5)
    )
    placement = st.one_of(st.just(Replicate()), dims.map(Shard), strided)
    return shape, mesh, [draw(placement) for _ in mesh]


def by_torch(
    tensor: torch.Tensor, mesh: tuple[int, ...], at: tuple[int, ...], placements: list
) -> torch.Tensor:
    """What torch leaves of `tensor` to the rank at `at`. torch 2.6 cuts no uneven
    strides."""
    for parts, index, placement in zip(mesh, at, placements, strict=True):
        if not isinstance(placement, Replicate):
            try:
                pieces, _ = placement._split_tensor(
                    tensor, parts, with_padding=False, contiguous=False
                )
            except AssertionError as error:
                if "only allows even sharding" not in str(error):
                    raise
                reject()
            tensor = pieces[index]
    return tensor


def cuts_of(mesh: tuple[int, ...], at: tuple[int, ...], placements: list) -> list[Cut]:
    return [
        Cut(placement.dim, parts, index, getattr(placement, "split_factor", 1))
        for parts, index, placement in zip(mesh, at, placements, strict=True)
        if not isinstance(placement, Replicate)
    ]


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))


def local_of(tensor: torch.Tensor, shape: tuple[int, ...], part: RankPart) -> torch.Tensor:
    """The rank's own tensor, put together from the global one by the boxes."""
    local = torch.full(shape, -1)
    for box, place in zip(part.boxes, part.local, strict=True):
        assert (local[slices(place)] == -1).all(), "two boxes lie in one place"
        local[slices(place)] = tensor[slices(box)]
    return local


@given(layouts())
def test_the_boxes_of_every_rank_are_the_indices_that_torch_leaves_to_it(layout: tuple) -> None:
    shape, mesh, placements = layout
    tensor = torch.arange(prod(shape)).view(shape)
    for at in product(*(range(n) for n in mesh)):
        cuts = cuts_of(mesh, at, placements)
        wanted = by_torch(tensor, mesh, at, placements)
        part = rank_part(shape, cuts)
        assert part.shape == tuple(wanted.shape)
        assert torch.equal(local_of(tensor, tuple(wanted.shape), part), wanted)


@given(layouts())
def test_the_boxes_of_a_mesh_tile_the_tensor_once_for_each_replica(layout: tuple) -> None:
    shape, mesh, placements = layout
    seen = torch.zeros(shape, dtype=torch.int64)
    for at in product(*(range(n) for n in mesh)):
        for box in rank_part(shape, cuts_of(mesh, at, placements)).boxes:
            seen[slices(box)] += 1
    replicas = prod(
        n for n, placement in zip(mesh, placements, strict=True) if isinstance(placement, Replicate)
    )
    assert (seen == replicas).all()


def test_neighbouring_runs_are_one_box() -> None:
    whole = Box((0, 0), (8, 3))
    part = rank_part((8, 3), [Cut(0, 1, 0, split_factor=4)])
    assert (part.boxes, part.local) == ((whole,), (whole,))


def test_fused_projections_are_held_in_as_many_boxes_as_there_are_projections() -> None:
    """Query, key and value rows in one matrix, each divided among two ranks."""
    part = rank_part((12, 5), [Cut(0, 2, 1, split_factor=3)])
    assert [(a.offsets[0], b.offsets[0]) for a, b in zip(part.boxes, part.local, strict=True)] == [
        (2, 0),
        (6, 2),
        (10, 4),
    ]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 4)])
def test_a_rank_without_elements_holds_no_box(shape: tuple[int, ...]) -> None:
    assert rank_part(shape, [Cut(0, 2, 1)]).boxes == ()


def test_a_number_is_held_whole() -> None:
    assert rank_part((), []) == RankPart((), (Box((), ()),), (Box((), ()),))
