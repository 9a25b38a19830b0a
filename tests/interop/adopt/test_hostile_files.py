"""Files that are damaged, forged or changing are adopted byte for byte or refused. No manifest
makes a file outside the directory.
"""

import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptstore.errors import Corrupt, InvalidInput, Unavailable
from ckptstore.plugins.adopt import adopting, hashed_files
from ckptstore.plugins.adopt.directory import Identity
from ckptstore.plugins.adopt.hashed_files import (
    BLOCK_BYTES,
    FileChanged,
    FileParts,
    HashedFile,
    hash_file,
)
from ckptstore.plugins.foreign.sources import Window
from ckptstore.plugins.parsers.entries import entries_of
from ckptstore.plugins.parsers.pickle_ops import walk
from ckptstore.store import Store
from tests.golden.foreign_files import PLACE
from tests.interop.adopt.trees import Bomb, gguf, hugging_face, tree_of
from tests.interop.dcp_states import NO_DIST

pytestmark = [
    pytest.mark.pickles,
    pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage"),
]


def parsed(path: Path) -> int:
    return len(entries_of(Window(hash_file(path).read, 0, path.stat().st_size), path.name))


# -- forged files --


def zip_of(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def pickled_tensor(key: str, numel: int, offset: int, shape: str, stride: str) -> bytes:
    """A pickle of one float32 tensor, with shapes as pickle opcodes of protocol 0."""
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n((Vstorage\nctorch\nFloatStorage\n"
        + f"V{key}\nVcpu\nI{numel}\ntQI{offset}\n{shape}{stride}I00\n".encode()
        + b"ccollections\nOrderedDict\n)RtR."
    )


FORGED: dict[str, Callable[[], bytes]] = {
    "a zip bomb": lambda: zip_of({"a/data.pkl": b"N." + b"\0" * 10_000_000}, zipfile.ZIP_DEFLATED),
    "a member twice": lambda: doubled(),
    "a shape beyond its storage": lambda: zip_of(
        {
            "a/data.pkl": b"(" + pickled_tensor("0", 4, 0, "(I9\nt", "(I1\nt")[:-1] + b"t.",
            "a/data/0": bytes(16),
        }
    ),
    "a negative shape": lambda: zip_of(
        {"a/data.pkl": pickled_tensor("0", 4, 0, "(I-4\nt", "(I1\nt"), "a/data/0": bytes(16)}
    ),
    "a huge shape": lambda: zip_of(
        {"a/data.pkl": pickled_tensor("0", 4, 0, f"(I{1 << 62}\nt", "(I1\nt"), "a/data/0": b""}
    ),
    "a memo of 64 GiB": lambda: zip_of({"a/data.pkl": b"\x80\x02Nr\xff\xff\xff\x7f."}),
    "bytes that are not there": lambda: zip_of(
        {"a/data.pkl": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x00."}
    ),
    "a dict in a dict in a dict": lambda: zip_of({"a/data.pkl": b"}" * 50_000 + b"s" * 9 + b"."}),
    "tuples that double": lambda: zip_of({"a/data.pkl": b"N" + b"2\x86" * 200 + b"}N\x86."}),
    "a pickle that is its own item": lambda: zip_of({"a/data.pkl": b"]q\x00h\x00a."}),
    "names by number": lambda: zip_of({"a/data.pkl": b"\x80\x02\x82\x01."}),
    "a numpy header of code": lambda: (
        b"\x93NUMPY\x01\x00\x20\x00" + b"__import__('os').system('true') "
    ),
    "a numpy shape beyond the file": lambda: npy_of(
        "{'descr': '<f8', 'fortran_order': False, 'shape': (9,)}"
    ),
    "gguf with many keys": lambda: b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60),
    "gguf with a large array": lambda: (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 62)
    ),
    "gguf of tensors that overlap": lambda: overlapping_gguf(),
    "safetensors that overlap": lambda: safetensors_of(
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        },
        12,
    ),
    "safetensors with a deep header": lambda: struct.pack("<Q", 60_000) + b'{"a":' * 12_000,
}


def doubled() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a/data.pkl", b"N.")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a/data.pkl", b"N.")
    return out.getvalue()


def npy_of(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(64)


def overlapping_gguf() -> bytes:
    data = gguf({"a": torch.ones(64), "b": torch.ones(64)})
    at = data.index(struct.pack("<IQ", 0, 256))
    return data[: at + 4] + struct.pack("<Q", 64) + data[at + 12 :]


def safetensors_of(header: Any, nbytes: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(nbytes)


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_file_is_kept_as_bytes(name: str, store: Store, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "file").write_bytes(FORGED[name]())
    found = parsed(tmp_path / "d" / "file")
    assert found == (name == "a shape beyond its storage"), "that storage is a vector"
    store.adopt(tmp_path / "d").materialize(tmp_path / "out")
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "d")


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps([Bomb(marker), {1: (2.5, "x", b"y")}], protocol)
        found = walk(io.BytesIO(data))
        assert found[1].items == [(1, (2.5, "x", b"y"))] or protocol < 3
    assert not marker.exists()


# -- mutated files --


def originals(root: Path) -> dict[str, bytes]:
    """A small file of each format, by name."""
    hugging_face(root / "hf", root / "ran")
    weights = {"w": torch.randn(30, 40), "b": torch.randn(9).double()}
    torch.save(weights, root / "old.pt", _use_new_zipfile_serialization=False)
    dcp.save(weights, checkpoint_id=root / "dcp", **NO_DIST)
    np.savez(root / "a.npz", x=np.ones((40, 5)), y=np.arange(9))
    (root / "m.gguf").write_bytes(gguf(weights | {"b": torch.ones(3)}, os.urandom(18)))
    shutil.copytree(PLACE, root / "foreign")
    files = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".json"]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(files)}


def mutated(data: bytes, random_: random.Random) -> bytes:
    """`data` with some bytes changed, cut, repeated or put elsewhere."""
    found = bytearray(data)
    for _ in range(random_.choice((1, 1, 1, 2, 5))):
        at = random_.choice(
            (random_.randrange(len(found) + 1), random_.randrange(min(len(found), 400) + 1))
        )
        match random_.randrange(6):
            case 0:
                del found[at:]
            case 1:
                found[at : at + 1] = random_.randbytes(1)
            case 2:
                width = random_.choice((4, 8))
                value = random_.choice((0, 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, len(found)))
                found[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
            case 3:
                found[at:at] = found[at : at + random_.randrange(300)]
            case 4:
                del found[at : at + random_.randrange(60)]
            case 5:
                other = random_.randrange(len(found) + 1)
                found[at : at + 100] = found[other : other + 100]
        if not found:
            break
    return bytes(found)


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def check_mutations(store: Store, tmp_path: Path, count: int, seed: int) -> None:
    files = originals(tmp_path / "originals")
    random_ = random.Random(seed)
    batch = 50
    for first in range(0, count, batch):
        root = tmp_path / f"mutated-{first}"
        for i in range(batch):
            for name in random_.sample(sorted(files), 1):
                for index in ("dcp/", "foreign/orbax-0/", "foreign/external/"):
                    for beside in files:  # files that are read through another one
                        if beside.startswith(index) and name.startswith(index):
                            write(root / str(i) / beside, files[beside])
                write(root / str(i) / name, mutated(files[name], random_))
        store.adopt(root).materialize(tmp_path / "out" / str(first))
        assert tree_of(tmp_path / "out" / str(first)) == tree_of(root), f"seed {seed}, from {first}"
    assert not (tmp_path / "originals" / "ran").exists(), "nothing was executed"


def test_mutated_files_come_back_as_they_were(store: Store, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    check_mutations(store, tmp_path, 300, seed)


@pytest.mark.soak
def test_a_thousand_mutated_files_come_back_as_they_were(store: Store, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    check_mutations(store, tmp_path, 1000, seed)


# -- files that change --


@given(st.data())
def test_ranges_of_a_file_are_its_bytes_or_the_change_is_noticed(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 3 * BLOCK_BYTES))
    path = Path("/dev/shm" if sys.platform == "linux" else ".") / f"ckptstore-{os.getpid()}"
    content = random.Random(size).randbytes(size)
    try:
        path.write_bytes(content)
        file = hash_file(path)
        edges = data.draw(st.lists(st.integers(0, size), max_size=6).map(sorted))
        ranges = list(zip(edges[::2], edges[1::2], strict=False))
        wanted = b"".join(content[start:stop] for start, stop in ranges)
        source = FileParts(file, ranges)
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(wanted))] * 2)))
        out = bytearray(stop - start)
        source.stage(start, stop, memoryview(out))
        assert bytes(out) == wanted[start:stop]
        if out and size:
            at = data.draw(st.integers(0, size - 1))
            with path.open("r+b") as changed:
                changed.seek(at)
                changed.write(bytes([content[at] ^ 1]))
            whole = bytearray(size)
            with pytest.raises(FileChanged):
                FileParts(file, [(0, size)]).stage(0, size, memoryview(whole))
    finally:
        path.unlink()


def changing(
    monkeypatch: pytest.MonkeyPatch, times: int, change: Callable[[Path], None]
) -> list[Path]:
    """Change each file after it was hashed, the first `times` times; returns what was hashed."""
    hashed: list[Path] = []

    def hash_and_change(path: Path, identity: Identity) -> HashedFile:
        found = hash_file(path, identity)
        hashed.append(path)
        if len(hashed) <= times:
            change(path)
        return found

    monkeypatch.setattr(adopting, "hash_file", hash_and_change)
    return hashed


def flip(path: Path) -> None:
    """Change a byte, and leave size and time as they were."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [flip, cut])
def test_a_file_that_changes_once_is_read_again(
    change: Callable[[Path], None], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d").mkdir()
    save_file({"w": torch.randn(300, 300)}, tmp_path / "d" / "model.safetensors")
    hashed = changing(monkeypatch, 1, change)
    made = store.adopt(tmp_path / "d")
    assert len(hashed) == 2 and len(store.log()) == 1
    made.materialize(tmp_path / "out")
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "d")


@pytest.mark.parametrize("change", [flip, cut, remove])
def test_a_file_that_keeps_changing_is_refused(
    change: Callable[[Path], None], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d").mkdir()
    save_file({"w": torch.randn(300, 300)}, tmp_path / "d" / "model.safetensors")
    changing(monkeypatch, 9, change)
    with pytest.raises(Unavailable, match=r"model\.safetensors.*(changed|cannot read)|cannot read"):
        store.adopt(tmp_path / "d")
    assert store.log() == []


def test_a_file_that_changes_while_it_is_hashed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    transfer = hashed_files.transfer

    def growing(*args: Any) -> int:
        with path.open("ab") as file:
            file.write(b"x")
        return transfer(*args)

    monkeypatch.setattr(hashed_files, "transfer", growing)
    with pytest.raises(FileChanged, match="changed while it was read; nothing was committed"):
        hash_file(path)


# -- forged manifests --


def forge(state: dict[str, Any], change: Callable[[Any], object]) -> dict[str, Any]:
    document = json.loads(state["manifest"])
    change(document)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {**state, "manifest": text.encode()}


def renamed(name: str) -> Callable[[Any], object]:
    def change(document: Any) -> None:
        document["files"][name] = document["files"].pop("config.json")

    return change


def through_a_link(document: Any) -> None:
    document["links"]["sub"] = ["/tmp", "0"]
    renamed("sub/config.json")(document)


def parts(*found: Any) -> Callable[[Any], object]:
    return lambda document: document["files"]["model.safetensors"].update(parts=list(found))


W = ("model/w", "float32", [300, 300])

FORGERIES: dict[str, tuple[Callable[[Any], object], str]] = {
    "above": (renamed("../config.json"), "is not the name of a file"),
    "absolute": (renamed("/tmp/config.json"), "is not the name of a file"),
    "dots": (renamed("a/../../config.json"), "is not the name of a file"),
    "nul": (renamed("a\0b"), "is not the name of a file"),
    "no folder": (renamed("sub/config.json"), "is not a directory"),
    "through a link": (through_a_link, "is not a directory"),
    "through a file": (renamed("model.safetensors/x"), "is not a directory"),
    "link and file": (lambda d: d["links"].update({"config.json": ["x", "0"]}), "there twice"),
    "no root": (lambda d: d["folders"].pop(""), "lacks the directory itself"),
    "a large mode": (lambda d: d["folders"].update({"": [1 << 20, "0"]}), "not the mode"),
    "a time": (lambda d: d["folders"].update({"": [0, "x"]}), "not a time"),
    "a version": (lambda d: d.update(version=2), "of version 2"),
    "a list": (lambda d: d.update(files=[]), "damaged"),
    "too short": (parts(7), "literal has not the 7 bytes"),
    "negative": (parts(-1), "damaged|not a part"),
    "an unknown leaf": (parts(["model/none", "float32", [300, 300]]), "has no leaf"),
    "a box outside": (parts([*W, [200, 0], [200, 300]]), "lies outside the shape"),
    "a box of other dimensions": (parts([*W, [0], [1]]), "has other dimensions"),
    "a leaf twice": (parts([*W], [*W]), "overlap"),
    "half of a leaf": (parts([*W, [0, 0], [150, 300]]), "the boxes hold"),
    "boxes that overlap": (
        parts([*W, [0, 0], [200, 300]], [*W, [100, 0], [200, 300]]),
        "overlap",
    ),
    "two shapes": (parts([*W], ["model/w", "float32", [90_000]]), "two shapes"),
    "another dtype": (parts(["model/w", "int32", [300, 300]]), r"not what its file says, int32"),
    "an unknown dtype": (parts(["model/w", "x", [300, 300]]), "not a part"),
    "a size": (lambda d: d["files"]["config.json"].update(size=9), "wanted 9"),
    "no hash": (lambda d: d["files"]["config.json"].update(blake3="x"), "has no hash|no size"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_writes_nothing(name: str, store: Store, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    save_file({"w": torch.randn(300, 300)}, tmp_path / "d" / "model.safetensors")
    (tmp_path / "d" / "config.json").write_text("{}")
    state = store.adopt(tmp_path / "d").state_dict()
    change, told = FORGERIES[name]
    made = store.commit(forge(state, change))
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(InvalidInput, match=told):
        made.materialize(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_file_with_other_bytes_than_its_hash_says_is_damage(store: Store, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    save_file({"w": torch.randn(300, 300)}, tmp_path / "d" / "model.safetensors")
    state = store.adopt(tmp_path / "d").state_dict()
    state["model"]["w"] += 1
    with pytest.raises(Corrupt, match="is not the file that was adopted"):
        store.commit(state).materialize(tmp_path / "out")
    assert not (tmp_path / "out").exists()
