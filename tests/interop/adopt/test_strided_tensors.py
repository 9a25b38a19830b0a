"""Tensors that do not lie row by row in their file: the leaf is the tensor, and the file comes
back byte for byte."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptstore.core.model import Box
from ckptstore.errors import InvalidInput
from ckptstore.interop.formats import export, import_path
from ckptstore.plugins.adopt.commit_files import CommitFiles
from ckptstore.plugins.adopt.directory import Folder
from ckptstore.plugins.adopt.manifest import (
    FileRecipe,
    LeafPart,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from ckptstore.plugins.foreign import strides
from ckptstore.plugins.foreign.strides import can_be_strided, gaps, gather, scatter, span_bytes
from ckptstore.snapshot import Snapshot, contents_of
from ckptstore.store import Store
from tests.interop.adopt.trees import tree_of

pytestmark = pytest.mark.pickles


def base(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(np.prod(shape))
    return torch.arange(count, dtype=torch.int64).remainder(119).reshape(shape).to(dtype)


def tensors() -> dict[str, torch.Tensor]:
    fused = base(6, 12)
    return {
        "channels_last": base(8, 3, 3, 3).to(memory_format=torch.channels_last),
        "transposed": base(3, 5).T,
        "permuted": base(2, 3, 4, 5).permute(2, 0, 3, 1),
        "every_second": base(8)[::2],
        "some_columns": base(5, 7, dtype=torch.bfloat16)[1:4, 2:5],
        "diagonal": base(6, 6).diagonal(),
        "flipped_dims": base(1, 4, 1, 3, dtype=torch.int8).transpose(1, 3),
        "bools": (base(9) > 4)[::4],
        "fused_query": fused[:, :4],
    }


def adopted(store: Store, root: Path, state: Any, *, legacy: bool = False) -> Snapshot:
    root.mkdir()
    torch.save(state, root / "m.pt", _use_new_zipfile_serialization=not legacy)
    return store.adopt(root)


def assert_comes_back(made: Snapshot, root: Path, tmp_path: Path) -> None:
    made.verify()
    made.materialize(tmp_path / "again")
    assert tree_of(tmp_path / "again") == tree_of(root)
    files = CommitFiles(contents_of(made), made.id, 0)
    data = (root / "m.pt").read_bytes()
    assert files.read("m.pt", 0, len(data)) == data
    draw = random.Random(len(data))
    for _ in range(20):
        start, stop = sorted(draw.choices(range(len(data) + 1), k=2))
        assert files.read("m.pt", start, stop) == data[start:stop]


@pytest.mark.parametrize("legacy", [False, True])
def test_the_leaf_is_the_tensor(store: Store, tmp_path: Path, legacy: bool) -> None:
    wanted = tensors()
    made = adopted(store, tmp_path / "d", wanted, legacy=legacy)
    state = made.state_dict("model")
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor) and state[name].dtype == tensor.dtype
    native = store.commit({"model": {name: each.contiguous() for name, each in wanted.items()}})
    assert store.diff(made, native).unchanged == len(wanted)
    assert_comes_back(made, tmp_path / "d", tmp_path)


def test_a_model_in_channels_last_is_loaded(store: Store, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(4, 5)).to(
        memory_format=torch.channels_last
    )
    made = adopted(store, tmp_path / "d", model.state_dict())
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(4, 5))
    other.load_state_dict(made.state_dict("model"))
    assert torch.equal(other[0].weight, model[0].weight)


def test_of_tensors_in_one_storage_the_largest_are_leaves(store: Store, tmp_path: Path) -> None:
    whole, halves = base(4, 6), base(2, 8)
    state = {
        "part": whole[1],
        "whole": whole,
        "columns": whole[:, :2],
        "left": halves[:, ::2],
        "right": halves[:, 1::2],
        "apart": base(10)[2:4],
    }
    made = adopted(store, tmp_path / "d", state)
    found = {leaf.path.removeprefix("model/") for leaf in made.leaves() if leaf.kind == "tensor"}
    assert found == {"whole", "left", "apart"}
    for name in found:
        assert torch.equal(made.read(f"model/{name}"), state[name])
    assert_comes_back(made, tmp_path / "d", tmp_path)


@pytest.mark.parametrize(
    "tensor",
    [
        base(1, 4).expand(3, 4),
        base(9).as_strided((3, 4), (2, 1)),
        base(4).unfold(0, 2, 1),
    ],
    ids=["expanded", "overlapping", "unfolded"],
)
def test_a_tensor_that_has_an_element_twice_is_its_storage_under_another_name(
    store: Store, tmp_path: Path, tensor: torch.Tensor
) -> None:
    made = adopted(store, tmp_path / "d", {"w": tensor})
    (leaf,) = (leaf for leaf in made.leaves() if leaf.kind == "tensor")
    assert leaf.path == "model/w.storage"
    flat = torch.tensor(tensor.untyped_storage().tolist(), dtype=torch.uint8).view(tensor.dtype)
    assert torch.equal(made.read(leaf.path), flat)
    assert_comes_back(made, tmp_path / "d", tmp_path)


@pytest.mark.parametrize("limit", ["SPAN_BYTES_MAX", "RUNS_MAX"])
def test_what_would_take_much_memory_or_many_reads_is_a_storage(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(strides, limit, 3)
    made = adopted(store, tmp_path / "d", {"w": base(20)[::2]})
    assert [leaf.path for leaf in made.leaves() if leaf.kind == "tensor"] == ["model/w.storage"]
    assert_comes_back(made, tmp_path / "d", tmp_path)


def test_a_storage_that_was_saved_as_such_has_its_own_name(store: Store, tmp_path: Path) -> None:
    made = adopted(store, tmp_path / "d", {"w": [torch.UntypedStorage(8)], "v": base(2)})
    assert {leaf.path for leaf in made.leaves() if leaf.kind == "tensor"} == {
        "model/w.0",
        "model/v",
    }
    assert_comes_back(made, tmp_path / "d", tmp_path)


def test_changed_tensors_are_exported_in_their_places(store: Store, tmp_path: Path) -> None:
    wanted = tensors()
    (tmp_path / "d").mkdir()
    torch.save(wanted, tmp_path / "d" / "m.pt")
    state = import_path(store, tmp_path / "d").state_dict()
    for tensor in state["model"].values():
        tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)
    export(store.commit(state), tmp_path / "out")
    found = torch.load(tmp_path / "out" / "m.pt")
    for name, tensor in wanted.items():
        assert torch.equal(found[name], state["model"][name])
        assert found[name].stride() == tensor.stride()


def drawn(draw: random.Random) -> torch.Tensor:
    """A view of a storage: sliced, permuted and begun anywhere."""
    shape = [draw.randint(1, 6) for _ in range(draw.randint(1, 5))]
    dtype = draw.choice([torch.float32, torch.float16, torch.int8, torch.complex64])
    found = base(*shape, dtype=dtype)
    for dim, length in enumerate(shape):
        if draw.random() < 0.5:
            first = draw.randrange(length)
            step = draw.randint(1, 3)
            found = found[(slice(None),) * dim + (slice(first, None, step),)]
    return found.permute(draw.sample(range(found.dim()), found.dim()))


def test_random_views_come_back(store: Store, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    wanted = {f"t{i}": drawn(draw) for i in range(200)}
    made = adopted(store, tmp_path / "d", wanted)
    state = made.state_dict("model")
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    assert_comes_back(made, tmp_path / "d", tmp_path)


def test_gather_and_scatter_are_inverses(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        tensor = drawn(draw)
        place = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride()
        assert can_be_strided(*place)
        span = memoryview(bytearray(draw.randbytes(span_bytes(*place))))
        between = b"".join(span[first:stop] for first, stop in gaps(*place))
        values = gather(*place, span)
        assert len(values) == tensor.nbytes and len(values) + len(between) == len(span)
        out = memoryview(bytearray(len(span)))
        scatter(*place, values, memoryview(between), out)
        assert out == span


@pytest.mark.parametrize(
    ("shape", "forged"),
    [
        ((4,), (0,)),
        ((4, 4), (1, 1)),
        ((4,), (1 << 40,)),
        ((4,), (1, 1)),
        ((0,), (1,)),
    ],
    ids=["expanded", "overlapping", "far", "dimensions", "empty"],
)
def test_a_forged_manifest_reaches_no_other_memory(
    shape: tuple[int, ...], forged: tuple[int, ...]
) -> None:
    part = LeafPart("model/w", "float32", shape, None, forged)
    recipe = FileRecipe(64, 0o644, 0, "0" * 64, (part,))
    manifest = Manifest({"": Folder(0o755, 0)}, {}, {"f": recipe})
    with pytest.raises(InvalidInput, match="has strides that no part of a file has"):
        decode_manifest(encode_manifest(manifest))


def test_a_manifest_keeps_strides() -> None:
    parts = (
        LeafPart("model/w", "float32", (3, 5), None, (1, 3)),
        7,
        LeafPart("model/v", "int8", (4, 2), Box((0, 0), (4, 1)), (2, 1)),
        LeafPart("model/v", "int8", (4, 2), Box((0, 1), (4, 1))),
    )
    recipe = FileRecipe(64, 0o644, 0, "0" * 64, parts)
    manifest = Manifest({"": Folder(0o755, 0)}, {}, {"f": recipe})
    assert decode_manifest(encode_manifest(manifest)) == manifest
