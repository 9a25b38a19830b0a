"""Shards of DCP's Hugging Face writer, a safetensors file per rank, become one tensor again or are
refused with a reason.
"""

import json
from collections.abc import Callable, Mapping
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptstore.core.model import Box
from ckptstore.errors import InvalidInput
from ckptstore.interop.formats import export, import_path
from ckptstore.plugins.foreign.sources import Joined, check_tiling
from ckptstore.state.leaf_sources import BytesSource
from ckptstore.store import Store
from tests.interop.test_directories import contents

Pieces = Mapping[str, tuple[torch.Tensor, tuple[int, ...]]]


def write_shard(
    root: Path, rank: int, pieces: Pieces, *, part: int = 1, parts: int = 1, info: Any = None
) -> Path:
    """The file of one rank, as `HuggingFaceStorageWriter(save_distributed=True)` writes it: tensors
    and their offsets by name.
    """
    root.mkdir(exist_ok=True)
    path = root / f"shard-{rank:05}-model-{part:05}-of-{parts:05}.safetensors"
    said = (
        {name: {"saved_offsets": list(offsets)} for name, (_, offsets) in pieces.items()}
        if info is None
        else info
    )
    metadata = {
        "DCP_SHARDING_INFO": said if isinstance(said, str) else json.dumps(said),
        "DCP_VERSION": "1.0",
        "format": "pt",
    }
    save_file({name: tensor.contiguous() for name, (tensor, _) in pieces.items()}, path, metadata)
    return path


def rows(tensor: torch.Tensor, start: int, stop: int) -> Any:
    return tensor[start:stop], (start, *(0 for _ in tensor.shape[1:]))


W = torch.arange(60.0).reshape(10, 6)
B = torch.arange(9, dtype=torch.bfloat16)


def test_shards_become_the_tensors_that_the_ranks_had_together_and_the_same_files_again(
    store: Store, tmp_path: Path
) -> None:
    write_shard(tmp_path / "hf", 1, {"w": rows(W, 0, 4), "b": rows(B, 0, 5)})
    write_shard(tmp_path / "hf", 2, {"w": rows(W, 4, 8), "b": rows(B, 5, 9)})
    write_shard(
        tmp_path / "hf", 3, {"w": rows(W, 8, 10), "b": rows(B, 9, 9), "step": (torch.tensor(7), ())}
    )
    (tmp_path / "hf" / "config.json").write_text("{}")
    made = import_path(store, tmp_path / "hf")
    assert made.keys() == ["model", "files", "manifest"]
    state = made.state_dict("model")
    assert (
        state.keys() == {"w", "b", "step"}
        and torch.equal(state["w"], W)
        and torch.equal(state["b"], B)
        and state["step"] == 7
    )
    export(made, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "hf")
    assert store.commit({"model": {"w": W, "b": B, "step": torch.tensor(7)}}).new_bytes < 2_000, (
        "its chunks were there already"
    )


def test_what_was_consolidated_beside_its_shards_is_a_model_of_its_own(
    store: Store, tmp_path: Path
) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"w": W}, tmp_path / "hf" / "model-00001-of-00001.safetensors")
    write_shard(tmp_path / "hf" / "sharded", 1, {"w": rows(W, 0, 4)})
    write_shard(tmp_path / "hf" / "sharded", 2, {"w": rows(W, 4, 10)})
    made = import_path(store, tmp_path / "hf")
    assert made.keys() == ["model", "sharded/model", "files", "manifest"]
    assert torch.equal(made.state_dict("sharded/model")["w"], made.state_dict("model")["w"])
    export(made, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "hf")


def test_a_tensor_of_another_shape_is_not_cut_into_the_shards_of_before(
    store: Store, tmp_path: Path
) -> None:
    for i in range(2):
        write_shard(tmp_path / "hf", i + 1, {"w": rows(W, 5 * i, 5 * i + 5)})
    state = import_path(store, tmp_path / "hf").state_dict()
    state["model"]["w"] = torch.cat([W, W])
    with pytest.raises(InvalidInput, match=r"model/w is not what its file says, float32\[10, 6\]"):
        export(store.commit(state), tmp_path / "out")


def overlapping(root: Path) -> None:
    write_shard(root, 1, {"w": rows(W, 0, 6)})
    write_shard(root, 2, {"w": rows(W, 5, 10)})


def replicated(root: Path) -> None:
    write_shard(root, 1, {"w": rows(W, 0, 10)})
    write_shard(root, 2, {"w": rows(W, 0, 10)})


def without_the_middle(root: Path) -> None:
    write_shard(root, 1, {"w": rows(W, 0, 4)})
    write_shard(root, 3, {"w": rows(W, 8, 10)})


def without_the_first(root: Path) -> None:
    write_shard(root, 2, {"w": rows(W, 4, 10)})


def without_a_part(root: Path) -> None:
    write_shard(root, 1, {"w": rows(W, 0, 10)}, part=1, parts=3)
    write_shard(root, 1, {"b": rows(B, 0, 9)}, part=3, parts=3)


def of_two_saves(root: Path) -> None:
    write_shard(root, 1, {"w": rows(W, 0, 10)}, part=1, parts=1)
    write_shard(root, 1, {"b": rows(B, 0, 9)}, part=1, parts=2)


def of_two_dtypes(root: Path) -> None:
    write_shard(root, 1, {"w": rows(W, 0, 5)})
    write_shard(root, 2, {"w": rows(W.double(), 5, 10)})


def of_two_ranks(root: Path) -> None:
    write_shard(root, 1, {"w": rows(W, 0, 5)})
    write_shard(root, 2, {"w": (torch.ones(5), (5,))})


def of_other_columns(root: Path) -> None:
    write_shard(root, 1, {"w": rows(W, 0, 5)})
    write_shard(root, 2, {"w": rows(W[:, :5], 5, 10)})


def with_an_unsharded_file(root: Path) -> None:
    write_shard(root, 1, {"w": rows(W, 0, 5)})
    save_file({"w": W}, root / "model-00001-of-00001.safetensors")


def saying(info: Any) -> Callable[[Path], None]:
    return lambda root: write_shard(root, 1, {"w": rows(W, 0, 10)}, info=info) and None


REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (
        overlapping,
        r"'w' in .*hf, of 2 shards: .* \[0:6, 0:6\] and \[5:10, 0:6\] overlap",
    ),
    (replicated, "overlap"),
    (
        without_the_middle,
        r"'w' in .*hf, of 2 shards: .* \[10, 6\], each element once: the boxes hold 36 of 60 "
        "elements",
    ),
    (without_the_first, "the boxes hold 36 of 60 elements"),
    (without_a_part, r"shards of 'model' are missing: wanted files 1 to 3 of some rank, got 1, 3"),
    (of_two_saves, "the shards of 'model' are of several saves, divided into 1 and 2 files"),
    (
        of_two_dtypes,
        r"the shards of 'w' are not of one tensor: float32\[5, 6\] in shard-00001-.*, float64\[5, "
        r"6\] in shard-00002",
    ),
    (of_two_ranks, "are not of one tensor"),
    (of_other_columns, "the boxes hold 55 of 60 elements"),
    (with_an_unsharded_file, "two files that belong together .* do not say which part of it"),
    (saying("{"), "DCP_SHARDING_INFO has no saved_offsets by names"),
    (saying([]), "DCP_SHARDING_INFO has no saved_offsets by names"),
    (saying({"w": 3}), "DCP_SHARDING_INFO has no saved_offsets by names"),
    (saying("[" * 100_000), "DCP_SHARDING_INFO has no saved_offsets by names"),
    (
        saying({}),
        "its DCP_SHARDING_INFO has None for 'w', of shape .*; wanted an offset in each dimension",
    ),
    (saying({"w": {"saved_offsets": [0]}}), r"its DCP_SHARDING_INFO has \[0\] for 'w'"),
    (saying({"w": {"saved_offsets": [0, -1]}}), r"has \[0, -1\] for 'w'"),
    (saying({"w": {"saved_offsets": [0, True]}}), r"has \[0, True\] for 'w'"),
]


@pytest.mark.parametrize(("write", "told"), REFUSED)
def test_shards_that_do_not_make_up_a_whole_are_refused(
    write: Callable[[Path], None], told: str, store: Store, tmp_path: Path
) -> None:
    write(tmp_path / "hf")
    with pytest.raises(InvalidInput, match=told):
        import_path(store, tmp_path / "hf")
    assert store.log() == []


def test_one_shard_of_several_is_no_checkpoint(store: Store, tmp_path: Path) -> None:
    paths = [
        write_shard(tmp_path / "hf", i + 1, {"w": rows(W, 5 * i, 5 * i + 5)}) for i in range(2)
    ]
    with pytest.raises(InvalidInput, match=r"is one of several shards, .*; import their directory"):
        import_path(store, paths[0])
    paths[1].unlink()
    write_shard(tmp_path / "hf", 1, {"w": rows(W, 0, 10)})
    assert torch.equal(import_path(store, paths[0]).state_dict("model")["w"], W)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and the boxes of a grid that tile it, with cuts drawn in each dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    lines = [sorted({0, n, *draw(st.sets(st.integers(0, n), max_size=3))}) for n in shape]
    cells = product(*(pairwise(each) for each in lines))
    return shape, [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]


@given(tilings(), st.sampled_from(["uint8", "float32", "float64"]), st.data())
def test_any_range_of_a_joined_tensor_is_what_the_tensor_has_there(
    tiling: tuple[tuple[int, ...], list[Box]], dtype: str, data: st.DataObject
) -> None:
    shape, boxes = tiling
    tensor = torch.arange(prod(shape)).reshape(shape).to(getattr(torch, dtype))
    width = tensor.element_size()
    parts = [tensor[box.slices].contiguous().numpy().tobytes() for box in boxes]
    joined = Joined(
        shape, width, [(box, BytesSource(part)) for box, part in zip(boxes, parts, strict=True)]
    )
    start, stop = sorted(
        data.draw(st.lists(st.integers(0, prod(shape)), min_size=2, max_size=2, unique=True))
    )
    out = bytearray((stop - start) * width)
    joined.stage(start * width, stop * width, memoryview(out))
    assert bytes(out) == tensor.numpy().tobytes()[start * width : stop * width]


def test_shards_of_a_tensor_without_elements_are_one_again(store: Store, tmp_path: Path) -> None:
    empty = torch.zeros(10, 0)
    for rank in range(2):
        write_shard(tmp_path / "hf", rank, {"w": rows(empty, 5 * rank, 5 * rank + 5)})
    assert import_path(store, tmp_path / "hf").read("model/w").shape == (10, 0)


@given(tilings(), st.data())
def test_a_tiling_is_one_until_a_box_is_missing_or_there_twice(
    tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = tiling
    boxes = data.draw(st.permutations(boxes))
    check_tiling("here", shape, boxes)
    with pytest.raises(InvalidInput, match="the boxes hold"):
        check_tiling("here", shape, boxes[1:])
    with pytest.raises(InvalidInput, match="overlap"):
        check_tiling("here", shape, [*boxes, boxes[0]])
    with pytest.raises(InvalidInput, match="overlap"):
        check_tiling("here", shape, [boxes[0], *boxes[:1], *boxes[2:]])
