"""Files of JAX, Keras, ONNX and NeMo are adopted as tensors, and come back byte for byte."""

import io
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore.errors import InvalidInput
from ckptstore.interop.formats import export, import_path
from ckptstore.snapshot import Snapshot
from ckptstore.store import Store
from tests.golden.foreign_files import LAYERS, PLACE, weights
from tests.interop.adopt.trees import raw, tree_of

pytestmark = pytest.mark.pickles  # torch.save, for NeMo's files

Array = np.ndarray[Any, Any]


def adopted(store: Store, root: Path) -> Snapshot:
    """The commit of a directory, which comes back as it was."""
    made = store.adopt(root)
    back = root.parent / f"{root.name}-back"
    made.materialize(back)
    assert tree_of(back) == tree_of(root)
    shutil.rmtree(back)
    return made


def golden(name: str, folder: Path) -> Path:
    """A directory with a golden file, or with those of a golden directory."""
    root = folder / f"of-{name}"
    if (PLACE / name).is_dir():
        shutil.copytree(PLACE / name, root)
    else:
        root.mkdir()
        shutil.copy(PLACE / name, root)
    return root


def square(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype("f4"))


def same(made: Snapshot, path: str, wanted: Array) -> bool:
    found = made.read(path)
    return found.shape == wanted.shape and np.array_equal(found.numpy(), wanted)


# -- Orbax --


def test_the_chunks_of_orbax_are_leaves_and_decode_to_the_weights(
    store: Store, tmp_path: Path
) -> None:
    made = adopted(store, golden("orbax-0", tmp_path))
    found = {leaf.path for leaf in made.leaves() if leaf.kind == "tensor"}
    assert found >= {f"model/layer{i}.kernel%2F0.0" for i in range(LAYERS)}
    for i in range(LAYERS):
        stored = raw(made.read(f"model/layer{i}.kernel%2F0.0"))
        decoded = zstandard.ZstdDecompressor().decompressobj().decompress(stored)
        assert decoded == weights(0)[f"layer{i}.kernel"].tobytes()


def test_a_step_of_orbax_stores_what_changed(store: Store, tmp_path: Path) -> None:
    def leaves(made: Snapshot) -> dict[str, Any]:
        return {leaf.path: made.read(leaf.path) for leaf in made.leaves() if leaf.kind == "tensor"}

    first, second = (adopted(store, golden(f"orbax-{step}", tmp_path)) for step in range(2))
    before, after = leaves(first), leaves(second)
    other = {path for path in before if not torch.equal(before[path], after[path])}
    assert other == {f"model/layer{LAYERS - 1}.kernel%2F0.0"}


@pytest.mark.parametrize("step", range(2))
def test_a_database_without_its_data_is_kept_as_bytes(
    step: int, store: Store, tmp_path: Path
) -> None:
    root = golden(f"orbax-{step}", tmp_path)
    shutil.rmtree(root / "ocdbt.process_0")
    assert not [leaf for leaf in adopted(store, root).leaves() if leaf.kind == "tensor"]


# -- HDF5 and Keras --


def test_the_datasets_of_hdf5_are_leaves(store: Store, tmp_path: Path) -> None:
    made = adopted(store, golden("earliest.h5", tmp_path))
    wanted: dict[str, Array] = {
        **weights(0),
        **{f"many.{i}": np.full(3, i, np.int16) for i in range(20)},
        "mask": np.array([True, False, True]),
        "odd.scalar": np.array(2.5),
        "odd.unsigned": np.arange(5, dtype=np.uint8),
    }
    tensors = {leaf.path for leaf in made.leaves() if leaf.kind == "tensor"}
    assert tensors == {f"model/{name}" for name in wanted}
    assert all(same(made, f"model/{name}", value) for name, value in wanted.items())


def test_the_datasets_of_newer_hdf5_are_leaves(store: Store, tmp_path: Path) -> None:
    made = adopted(store, golden("latest.h5", tmp_path))
    tensors = {leaf.path for leaf in made.leaves() if leaf.kind == "tensor"}
    layers = {f"layer{i}.kernel" for i in range(4)}
    assert tensors == {
        f"model/{name}" for name in layers | {"mask", "odd.scalar", "odd.unsigned"}
    }, "a link to another file is not followed, and a group that has an index is not looked into"
    assert all(same(made, f"model/{name}", weights(0)[name]) for name in layers)


def test_the_variables_of_keras_are_leaves(store: Store, tmp_path: Path) -> None:
    made = adopted(store, golden("model.keras", tmp_path))
    found = {leaf.path: leaf.shape for leaf in made.leaves() if leaf.kind == "tensor"}
    assert len(found) == 4 and all(path.startswith("model/layers.dense") for path in found)
    for i, shape in enumerate([(16, 16), (16,)] * 2):
        name = f"model/layers.dense{'_1' * (i > 1)}.vars.{i % 2}"
        assert torch.equal(made.read(name), square(i, shape))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_files_of_h5py_come_back(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed here")
    import ckptstore

    folder = tmp_path_factory.mktemp("h5")
    shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
    names = st.lists(st.text("ab/", min_size=1, max_size=5), max_size=5)
    (folder / "d").mkdir()
    wanted: dict[str, Array] = {}
    with h5py.File(folder / "d" / "f", "w", libver=data.draw(st.sampled_from(LIBVERS))) as file:
        for i, name in enumerate(data.draw(names)):
            value = np.full(
                data.draw(shapes), i, data.draw(st.sampled_from(["f2", "f4", "f8", "i8", "u1"]))
            )
            path = "/".join([*name.strip("/").split("/"), str(i)])
            try:
                file[path] = value
            except (OSError, ValueError):  # a dataset stands where a group should be
                continue
            wanted[".".join(part for part in path.split("/") if part)] = value
    with ckptstore.open(folder / "store", create=True) as store:
        made = adopted(store, folder / "d")
        assert all(same(made, f"model/{name}", value) for name, value in wanted.items())
    shutil.rmtree(folder)


LIBVERS = ("earliest", "latest")


# -- ONNX --


@pytest.mark.parametrize("where", ["inline", "external"])
def test_the_weights_of_onnx_are_leaves(where: str, store: Store, tmp_path: Path) -> None:
    made = adopted(store, golden(where, tmp_path))
    shapes = {"0.weight": (40, 16), "0.bias": (40,), "1.weight": (16, 40), "1.bias": (16,)}
    for i, (name, shape) in enumerate(shapes.items()):
        assert torch.equal(made.read(f"model/{name}"), square(i, shape))


def test_a_model_brings_the_file_of_its_weights(store: Store, tmp_path: Path) -> None:
    root = golden("external", tmp_path)
    made = import_path(store, root / "model.onnx")
    assert torch.equal(made.read("model/0.weight"), square(0, (40, 16)))
    export(made, tmp_path / "again")
    for name in ("model.onnx", "model.onnx.data"):
        assert (tmp_path / "again" / name).read_bytes() == (root / name).read_bytes()
    (root / "model.onnx.data").unlink()
    with pytest.raises(InvalidInput, match=r"has weights in 'model\.onnx\.data'"):
        import_path(store, root / "model.onnx")
    (root / "model.onnx").write_bytes(b"text")
    with pytest.raises(InvalidInput, match="is not an ONNX model, or is damaged"):
        import_path(store, root / "model.onnx")


def field(number: int, value: bytes | int) -> bytes:
    """A field of a message of protocol buffers."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def onnx_of(tensors: list[bytes]) -> bytes:
    graph = b"".join(field(5, tensor) for tensor in tensors)
    return field(1, 8) + field(2, b"test") + field(7, field(2, b"graph") + graph)


def tensor_of(name: str, value: Array, *, packed: bool, place: dict[str, str] | None) -> bytes:
    dtypes = {"float32": 1, "uint8": 2, "int64": 7, "float16": 10}
    dims = b"".join(map(varint, value.shape))
    head = field(1, dims) if packed else b"".join(field(1, n) for n in value.shape)
    head += field(2, dtypes[str(value.dtype)]) + field(8, name.encode())
    if place is None:
        return head + field(9, value.tobytes())
    pairs = [field(13, field(1, k.encode()) + field(2, v.encode())) for k, v in place.items()]
    return head + b"".join(pairs) + field(14, 1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_models_come_back_and_their_weights_are_leaves(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import ckptstore

    folder = tmp_path_factory.mktemp("onnx")
    (folder / "d" / "sub").mkdir(parents=True)
    wanted: dict[str, Array] = {}
    tensors, beside = [], b""
    for i in range(data.draw(st.integers(0, 5))):
        shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
        dtype = data.draw(st.sampled_from(["float32", "uint8", "int64", "float16"]))
        value, place = np.full(shape, i, dtype), None
        if data.draw(st.booleans()):
            beside += b"\0" * data.draw(st.integers(0, 40))
            place = {
                "location": "sub/weights",
                "offset": str(len(beside)),
                "length": str(value.nbytes),
            }
            beside += value.tobytes()
        packed = data.draw(st.booleans())
        tensors.append(tensor_of(f"w{i}", value, packed=packed, place=place))
        wanted[f"w{i}"] = value
    (folder / "d" / "m.onnx").write_bytes(onnx_of(tensors))
    (folder / "d" / "sub" / "weights").write_bytes(beside)
    with ckptstore.open(folder / "store", create=True) as store:
        made = adopted(store, folder / "d")
        assert all(same(made, f"model/{name}", value) for name, value in wanted.items())
    shutil.rmtree(folder)


# -- archives --


def torch_bytes(state: object) -> bytes:
    data = io.BytesIO()
    torch.save(state, data)
    return data.getvalue()


def tar_of(members: dict[str, bytes], format: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=format) as archive:
        archive.addfile(tarfile.TarInfo("./"))
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_the_weights_in_a_file_of_nemo_are_leaves(
    format: int, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "d").mkdir()
    weight = square(1, (30, 40))
    members = {
        "./model_config.yaml": b"a: 1\n",
        "./model_weights.ckpt": torch_bytes({"encoder.weight": weight, "bias": square(2, (9,))}),
    }
    (tmp_path / "d" / "m.nemo").write_bytes(tar_of(members, format))
    made = adopted(store, tmp_path / "d")
    assert torch.equal(made.read("model/encoder.weight"), weight)
    imported = import_path(store, tmp_path / "d" / "m.nemo")
    assert torch.equal(imported.read("model/encoder.weight"), weight)


def test_names_beyond_the_header_of_a_tar_are_read(store: Store, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    name = f"{'folder/' * 30}é.ckpt"
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        members = {
            name: torch_bytes({"w": square(1, (3, 4))}),
            "b": torch_bytes({"w": square(2, (5,))}),
        }
        (tmp_path / "d" / f"{format}.tar").write_bytes(tar_of(members, format))
    found = {leaf.path for leaf in adopted(store, tmp_path / "d").leaves() if leaf.kind == "tensor"}
    wanted = {f"{n.replace('/', '%2F')}.w" for n in (name, "b")}
    assert found == {f"{format}.tar/{n}" for n in wanted for format in (1, 2)}


def test_files_of_torch_in_a_zip_are_looked_into(store: Store, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with zipfile.ZipFile(tmp_path / "d" / "policy.zip", "w") as archive:
        archive.writestr("data", "{}")
        for i, name in enumerate(("policy.pth", "policy.optimizer.pth")):
            archive.writestr(name, torch_bytes({"w": square(i, (30, 40))}))
    made = adopted(store, tmp_path / "d")
    assert torch.equal(made.read("model/policy.pth.w"), square(0, (30, 40)))
    assert torch.equal(made.read("model/policy.optimizer.pth.w"), square(1, (30, 40)))


def test_an_archive_in_an_archive_is_bytes(store: Store, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    inner = tar_of({"w": torch_bytes({"w": square(1, (3, 4))})}, tarfile.PAX_FORMAT)
    (tmp_path / "d" / "a.tar").write_bytes(tar_of({"inner.tar": inner}, tarfile.PAX_FORMAT))
    assert not [x for x in adopted(store, tmp_path / "d").leaves() if x.kind == "tensor"]


# -- forged files --


def hdf5(change: Callable[[bytearray], None]) -> bytes:
    data = bytearray((PLACE / "earliest.h5").read_bytes())
    change(data)
    return bytes(data)


def _put(at: int, value: bytes) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at : at + len(value)] = value

    return change


def _tree_of_itself(data: bytearray) -> None:
    """The tree of the outermost group has itself as its child."""
    at = data.index(b"TREE")
    data[at + 5] = 1
    data[at + 32 : at + 40] = struct.pack("<Q", at)


def _header(size: bytes, kind: bytes = b"0") -> bytes:
    head = bytearray(512)
    head[:1], head[124:136], head[156:157], head[257:262] = b"a", size, kind, b"ustar"
    return bytes(head)


FORGED: dict[str, Callable[[], bytes]] = {
    "hdf5 whose root is not there": lambda: hdf5(_put(64, b"\xff" * 8)),
    "hdf5 whose root is its superblock": lambda: hdf5(_put(64, bytes(8))),
    "hdf5 with a tree in a circle": lambda: hdf5(_tree_of_itself),
    "hdf5 of no version": lambda: hdf5(_put(8, b"\x09")),
    "hdf5 that ends": lambda: (PLACE / "latest.h5").read_bytes()[:200],
    "onnx with a tensor beyond the file": lambda: onnx_of(
        [field(1, 9) + field(2, 1) + field(8, b"w") + varint(9 << 3 | 2) + varint(1 << 62)]
    ),
    "onnx with a negative offset": lambda: onnx_of(
        [
            tensor_of(
                "w",
                np.ones(1, "f4"),
                packed=False,
                place={"location": "x", "offset": "-4", "length": "4"},
            )
        ]
    ),
    "onnx with a number without end": lambda: b"\x08" + b"\xff" * 90,
    "onnx with a huge shape": lambda: onnx_of(
        [field(1, (1 << 63) - 1) * 9 + field(2, 1) + field(8, b"w") + field(9, bytes(4))]
    ),
    "tar with a negative size": lambda: _header(b"\xff" * 12) + bytes(2048),
    "tar with a size beyond the file": lambda: _header(b"77777777777\0") + bytes(2048),
    "tar with a negative size in its pax": lambda: (
        _header(b"00000000021\0", b"x")
        + b"17 size=-1024000\n".ljust(512, b"\0")
        + _header(b"0" * 12)
    ),
    "tar in a circle": lambda: _header(b"-0000001000\0", b"5") + bytes(2048),
    "tar with a large name": lambda: _header(b"00040000000\0", b"L") + bytes(9_000_000),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_file_is_kept_as_bytes(name: str, store: Store, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "file.onnx").write_bytes(FORGED[name]())
    made = adopted(store, tmp_path / "d")
    assert not [leaf for leaf in made.leaves() if leaf.kind == "tensor"]


def varints(*numbers: int) -> bytes:
    return b"".join(map(varint, numbers))


def node(magic: bytes, body: bytes) -> bytes:
    """A manifest or a node of OCDBT that is not compressed; no checksum is compared."""
    return magic + struct.pack("<Q", 18 + len(body)) + b"\0\0" + body + bytes(4)


def manifest(root: tuple[int, int], height: int, path: bytes = b"d/x") -> bytes:
    config = bytes(16) + varints(0, 9, 9) + b"\4" + varints(0)
    table = varints(1, len(path), 0) + path
    version = varints(1, 1) + bytes([height]) + varints(0, *root)
    return node(b"\x0c\xdb\x3a\x2a", config + table + version)


def leaf_node(offset: int, nbytes: int) -> bytes:
    table = varints(1, 3, 0) + b"d/x"
    body = b"\0" + table + varints(1, 1) + b"k" + varints(nbytes, 1, 0, offset)
    return node(b"\x0c\xdb\x20\xde", body)


def circle(nbytes: int) -> bytes:
    table = varints(1, 3, 0) + b"d/x"
    return node(
        b"\x0c\xdb\x20\xde", b"\1" + table + varints(1, 1, 0) + b"k" + varints(0, 0, nbytes)
    )


LEAF = leaf_node(64, 32)
DATABASES = {
    "as it should be": (manifest((0, len(LEAF)), 0), LEAF.ljust(64, b"\0") + bytes(32)),
    "a value beyond the file": (manifest((0, len(LEAF)), 0), LEAF.ljust(64, b"\0") + bytes(31)),
    "a root beyond the file": (manifest((1 << 62, len(LEAF)), 0), LEAF),
    "a root of 2^60 bytes": (manifest((0, 1 << 60), 0), LEAF),
    "a file above": (manifest((0, len(LEAF)), 0, b"../../etc"), LEAF),
    "a node that is its own child": (manifest((0, len(circle(40))), 1), circle(len(circle(40)))),
    "a height of 255": (manifest((0, len(circle(40))), 255), circle(40)),
    "text": (b"text", LEAF),
    "no bytes": (b"", b""),
}


@pytest.mark.parametrize("name", DATABASES)
def test_a_forged_database_is_kept_as_bytes(name: str, store: Store, tmp_path: Path) -> None:
    (tmp_path / "d" / "d").mkdir(parents=True)
    for file, data in zip(("manifest.ocdbt", "d/x"), DATABASES[name], strict=True):
        (tmp_path / "d" / file).write_bytes(data)
    made = adopted(store, tmp_path / "d")
    found = [leaf for leaf in made.leaves() if leaf.kind == "tensor"]
    assert len(found) == (name == "as it should be")
