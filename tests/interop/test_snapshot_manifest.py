"""A snapshot's manifest equals TorchSnapshot's, and every path in it can be read."""

from collections import Counter, OrderedDict, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore.interop.torchsnapshot import Snapshot, StateDict
from ckptstore.interop.torchsnapshot.manifest import DictEntry, PrimitiveEntry, TensorEntry
from tests.interop.test_snapshots import equal, peer, trained

OBJECTS = StateDict(
    number=42,
    real=0.1,
    text="ä/%",
    flag=True,
    raw=b"\x00\xff",
    none=None,
    pair=(1, torch.ones(2)),
    items=[1, {"x": 2}],
    numbers=[1, 2.5],
    nested={1: torch.ones(2), "a/b%": OrderedDict(z=1, y=2)},
    sparse=torch.eye(3).to_sparse(),
    empty=torch.zeros(0, 3),
    small=torch.tensor(3),
    lists=[[1, 2], [], [3, [4.5, "x"]]],
    counted=Counter(a=2),
    default=defaultdict(int, a=1),
    **{
        "": {"": []},
        "x/y": {"%a/b": 10},
        "mixed": {0: {"0": "a", 1: "b"}, "1": "c"},
        "colliding": {"0": {"1": "a", 1: "b"}, 0: "c"},
    },
)
"""Values from TorchSnapshot's own flattening tests: empty keys, keys to be escaped, numbers and
text that look alike.
"""


def test_every_path_of_the_manifest_can_be_read(tmp_path: Path) -> None:
    snapshot = Snapshot.take(str(tmp_path / "s"), {"s": OBJECTS})
    manifest = snapshot.get_manifest()
    read = {path: snapshot.read_object(path) for path in manifest}
    assert read["0/s"].keys() == OBJECTS.keys()
    assert (
        read["0/s/pair"][0],
        read["0/s/items/1/x"],
        read["0/s/numbers/1"],
        read["0/s/nested/a%2Fb%25/z"],
    ) == (1, 2, 2.5, 1)
    assert (
        read["0/s/lists/2"],
        read["0/s/lists/2/1"],
        read["0/s/lists/2/1/0"],
        read["0/s/lists/0/1"],
    ) == (
        [3, [4.5, "x"]],
        [4.5, "x"],
        4.5,
        2,
    )
    assert (
        read["0/s//"],
        read["0/s/x%2Fy/%25a%2Fb"],
        read["0/s/mixed/0/1"],
        read["0/s/colliding"],
    ) == ([], 10, "b", OBJECTS["colliding"])
    assert torch.equal(read["0/s/pair"][1], torch.ones(2)) and torch.equal(
        read["0/s/nested/1"], torch.ones(2)
    )
    assert torch.equal(read["0/s/sparse"].to_dense(), torch.eye(3)) and read["0/s/empty"].shape == (
        0,
        3,
    )
    for path, entry in manifest.items():
        if isinstance(entry, PrimitiveEntry):
            assert entry.get_value() == read[path] and type(entry.get_value()) is type(read[path])
    state = snapshot.get_state_dict_for_key("s")
    assert all(
        equal(state[key], value) and type(state[key]) is type(value)
        for key, value in OBJECTS.items()
        if key not in ("sparse", "pair")
    )
    for path in ("0/s/lists/2/1/2", "0/s/lists/3", "0/s/lists/0/1/0", "0/s/numbers/2"):
        with pytest.raises(KeyError, match="has nothing at"):
            snapshot.read_object(path)
    with pytest.raises(KeyError, match="the snapshot has the keys s"):
        snapshot.get_state_dict_for_key("t")
    assert snapshot.read_object("0/s/number", 777) == 42


def test_an_object_lands_in_place_where_it_can(tmp_path: Path) -> None:
    snapshot = Snapshot.take(
        str(tmp_path / "s"),
        {"s": StateDict(w=torch.arange(6.0).view(2, 3), sparse=torch.eye(3).to_sparse())},
    )
    transposed = torch.zeros(3, 2).t()
    assert snapshot.read_object("0/s/w", transposed) is transposed and transposed[1, 2] == 5
    other = torch.zeros(7)
    got = snapshot.read_object("0/s/w", other)
    assert got is not other and got.shape == (2, 3) and not other.any()
    sparse = torch.zeros(3, 3).to_sparse()
    assert snapshot.read_object("0/s/sparse", sparse) is sparse and torch.equal(
        sparse.to_dense(), torch.eye(3)
    )
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    assert snapshot.read_object("0/s/w", parameter) is parameter and parameter[1, 2] == 5


def test_the_manifest_is_that_of_torchsnapshot(tmp_path: Path) -> None:
    model, optimizer = trained()
    plain = {key: value for key, value in OBJECTS.items() if key not in ("sparse", "empty")}
    with peer() as torchsnapshot:
        state = {"model": model, "optim": optimizer, "s": torchsnapshot.StateDict(**plain)}
        theirs = torchsnapshot.Snapshot.take(str(tmp_path / "theirs"), state).get_manifest()
    ours = Snapshot.take(
        str(tmp_path / "ours"), {"model": model, "optim": optimizer, "s": StateDict(**plain)}
    ).get_manifest()

    def comparable(entry: Any) -> dict[str, Any]:
        return {
            name: value
            for name, value in asdict(entry).items()
            if name not in ("location", "serializer", "byte_range")
        }

    assert {path: comparable(entry) for path, entry in ours.items()} == {
        path: comparable(entry) for path, entry in theirs.items()
    }
    assert {type(entry).__name__ for entry in ours.values()} == {
        type(entry).__name__ for entry in theirs.values()
    }


def test_entries_are_views_that_cannot_be_changed(tmp_path: Path) -> None:
    snapshot = Snapshot.take(str(tmp_path / "s"), {"s": StateDict(w=torch.zeros(4, 2))})
    entry = snapshot.get_manifest()["0/s/w"]
    assert isinstance(entry, TensorEntry) and (entry.dtype, entry.shape, entry.location) == (
        "torch.float32",
        [4, 2],
        "s/w",
    )
    with pytest.raises(AttributeError):
        entry.shape = [1]  # type: ignore[misc]  # it is frozen
    root = snapshot.metadata.manifest["0/s"]
    assert isinstance(root, DictEntry)
    root.keys.clear()
    assert snapshot.get_manifest()["0/s"] == DictEntry(keys=["w"])
    assert '"world_size": 1' in snapshot.metadata.to_yaml()
