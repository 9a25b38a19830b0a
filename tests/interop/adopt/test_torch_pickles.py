"""What the pickles of torch.save say, without a call, and in bounded memory and time."""

import io
import logging
import pickle
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore.interop.formats import import_path
from ckptstore.plugins.parsers import pickle_ops
from ckptstore.plugins.parsers.pickle_ops import walk
from ckptstore.store import Store
from tests.interop.adopt.trees import gguf, tree_of

pytestmark = pytest.mark.pickles


def archive(path: Path, pickled: bytes) -> None:
    """A file of torch.save with another pickle in it."""
    plain = io.BytesIO()
    torch.save({"w": torch.zeros(4)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, pickled if name.endswith("data.pkl") else source.read(name))


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def deep_list(count: int) -> bytes:
    """A list of many tuples, at the end of a long way of long names."""
    key = text("k" * 1000) + b"q\x01"
    keys = 90
    return (
        b"\x80\x02"
        + b"}"
        + key
        + b"}h\x01" * (keys - 1)
        + b"]("
        + b"]" * count
        + b"e"
        + b"s" * keys
        + b"."
    )


def doubled(times: int) -> bytes:
    """A tuple of a tuple twice, and so on: its text has 2^times parts."""
    return b"K\x01" + b"2\x86" * times


ENDLESS = {
    "shape": b"\x80\x02ctorch\nSize\n" + doubled(60) + b"\x85R.",
    "name": b"\x80\x04" + doubled(60) + text("x") + b"\x93.",
    "storage": b"\x80\x02("
    + text("storage")
    + b"ctorch\nFloatStorage\n"
    + doubled(60)
    + text("cpu")
    + b"K\x04tQ.",
    "rebuilt": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(("
    + text("storage")
    + b"ctorch\nFloatStorage\n"
    + text("0")
    + text("cpu")
    + b"K\x04tQK\x00"
    + doubled(60)
    + b"\x85K\x01\x85\x89NtR.",
}


@pytest.mark.parametrize("pickled", ENDLESS.values(), ids=list(ENDLESS))
def test_no_pickle_takes_endless_time(store: Store, tmp_path: Path, pickled: bytes) -> None:
    (tmp_path / "d").mkdir()
    archive(tmp_path / "d" / "m.pt", pickled)
    store.adopt(tmp_path / "d").materialize(tmp_path / "again")
    assert tree_of(tmp_path / "again") == tree_of(tmp_path / "d")


def test_a_small_file_takes_little_memory(store: Store, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    archive(tmp_path / "d" / "m.pt", deep_list(20_000))
    store.adopt(tmp_path / "d")
    tracemalloc.start()
    try:
        store.adopt(tmp_path / "d")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20, f"{peak >> 20} MiB"


def test_what_is_too_large_to_look_into_is_kept_as_bytes_and_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "d").mkdir()
    torch.save({"w": torch.zeros(4)}, tmp_path / "d" / "m.pt")
    monkeypatch.setattr(pickle_ops, "OPCODES_MAX", 10)
    with caplog.at_level(logging.WARNING):
        made = store.adopt(tmp_path / "d")
    assert [leaf.path for leaf in made.leaves()] == ["files/m.pt", "manifest"]
    (told,) = (record.getMessage() for record in caplog.records)
    assert told == (
        "m.pt is kept as bytes, without tensors: a pickle in it has more than 10 operations"
    )


def test_a_length_that_a_pickle_says_allocates_nothing() -> None:
    with pytest.raises(pickle_ops.TooLarge, match="a value of 1099511627776 bytes"):
        walk(io.BytesIO(b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"x."))


@pytest.mark.parametrize("dims", [[0, 1 << 63], [0, (1 << 53) + 1], [0, 1 << 40, 1 << 40]])
def test_an_empty_tensor_of_impossible_shape_stays_bytes(
    store: Store, tmp_path: Path, dims: list[int]
) -> None:
    (tmp_path / "d").mkdir()
    data = gguf({"empty": torch.zeros([3] * len(dims))})
    at = data.index(b"empty") + 9
    shape = b"".join(n.to_bytes(8, "little") for n in dims)
    (tmp_path / "d" / "m.gguf").write_bytes(data[:at] + shape + data[at + len(shape) :])
    made = store.adopt(tmp_path / "d")
    assert [leaf.path for leaf in made.leaves()] == ["files/m.gguf", "manifest"]
    made.materialize(tmp_path / "again")
    assert tree_of(tmp_path / "again") == tree_of(tmp_path / "d")


class Python2(OrderedDict[str, Any]):
    """Pickled as Python 2 did: a call with a list of pairs."""

    def __reduce__(self) -> Any:
        return OrderedDict, ([[key, value] for key, value in self.items()],)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", [dict, OrderedDict, Python2])
def test_adopted_names_are_those_of_an_import(
    store: Store, tmp_path: Path, kind: Any, legacy: bool
) -> None:
    state = kind((f"lin{i}.model.1.weight", torch.full((1, 4, 1, 1), float(i))) for i in range(3))
    path = tmp_path / "d" / "alex.pth"
    path.parent.mkdir()
    torch.save(state, path, pickle_protocol=2, _use_new_zipfile_serialization=not legacy)
    adopted, imported = store.adopt(path.parent), import_path(store, path)
    wanted = {leaf.path: leaf.shape for leaf in imported.leaves() if leaf.kind == "tensor"}
    assert wanted == {leaf.path: leaf.shape for leaf in adopted.leaves() if leaf.kind == "tensor"}
    for leaf in wanted:
        assert torch.equal(adopted.read(leaf), imported.read(leaf))


def test_a_pickle_of_python_2_is_read_as_written() -> None:
    found = walk(io.BytesIO(pickle.dumps(Python2(a=1, b=2), protocol=2)))
    assert pickle_ops.items_of(found) == [("a", 1), ("b", 2)]
