"""Formats with pickles: .pt files, DCP and TorchSnapshot. Objects that could run code are refused
unless allowed.
"""

import json
import os
import pickle
import sys
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path, PosixPath
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptstore.errors import InvalidInput
from ckptstore.interop.formats import export, import_path
from ckptstore.store import Store
from tests.interop.dcp_states import NO_DIST
from tests.maintenance.stores import assert_equal

FLAG = "CKPTSTORE_TEST_CODE_RAN"


class Bomb:
    def __reduce__(self) -> Any:
        return os.putenv, (FLAG, "1")


def training() -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Linear(300, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 20)).sum().backward()
    optimizer.step()
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "half": torch.ones(3).bfloat16(),
    }


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silences DCP's warnings about a missing process group, and TorchSnapshot's about torch's
    deprecations.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- .pt --


@pytest.mark.pickles
@pytest.mark.parametrize("legacy", [False, True])
def test_a_pt_file_comes_in_and_goes_out(legacy: bool, store: Store, tmp_path: Path) -> None:
    torch.save(training(), tmp_path / "last.pt", _use_new_zipfile_serialization=not legacy)
    made = import_path(store, tmp_path / "last.pt")
    assert_equal(made.state_dict(), training())
    export(made, tmp_path / "again.pt")
    assert_equal(torch.load(tmp_path / "again.pt", weights_only=True), training())
    export(made, tmp_path / "model.pt", select="model")
    assert_equal(torch.load(tmp_path / "model.pt", weights_only=True), training()["model"])


def _packed_again(path: Path, method: int, only: str = "") -> None:
    """The same archive, with the entries whose names contain `only` compressed."""
    with zipfile.ZipFile(path) as archive:
        entries = [(each.filename, archive.read(each)) for each in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries:
            archive.writestr(name, data, method if only in name else zipfile.ZIP_STORED)


@pytest.mark.pickles
@pytest.mark.parametrize("only", ["", "/data/", "data/1"])
def test_a_pt_file_that_was_packed_again_with_compression_comes_in_whole(
    only: str, store: Store, tmp_path: Path
) -> None:
    state = {"a": torch.arange(100_000), "b": torch.zeros(50_000), "c": torch.randn(1000)}
    torch.save(state, tmp_path / "ours.pt")
    _packed_again(tmp_path / "ours.pt", zipfile.ZIP_DEFLATED, only)
    assert_equal(import_path(store, tmp_path / "ours.pt").state_dict("model"), state)


@pytest.mark.pickles
def test_a_compressed_pt_file_whose_bytes_do_not_match_their_checksum_is_refused(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "ours.pt"
    torch.save({"a": torch.arange(100_000), "b": torch.randn(1000)}, path)
    _packed_again(path, zipfile.ZIP_DEFLATED, "data/0")
    with zipfile.ZipFile(path) as archive:
        stored = next(each for each in archive.infolist() if each.filename.endswith("data/1"))
    data = bytearray(path.read_bytes())
    data[stored.header_offset + 30 + len(stored.filename) + 500] ^= 1
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=r"data/1' does not match its checksum"):
        import_path(store, path)
    assert store.log() == []


@pytest.mark.pickles
def test_a_plain_state_dict_is_the_key_model(store: Store, tmp_path: Path) -> None:
    torch.save(training()["model"], tmp_path / "model.pth")
    assert_equal(
        import_path(store, tmp_path / "model.pth").state_dict(), {"model": training()["model"]}
    )


@pytest.mark.pickles
@pytest.mark.parametrize("named", ["gone_package", "torch"])
def test_a_pickled_class_that_cannot_be_imported_is_named_with_the_way_out(
    store: Store, tmp_path: Path, named: str
) -> None:
    gone = type("Gone", (), {"__module__": named})
    module = sys.modules.setdefault(named, ModuleType(named))
    module.Gone = gone  # type: ignore[attr-defined]
    torch.save({"model": gone()}, tmp_path / "model.pt")
    made = store.commit({"model": {"gone": gone()}}, step=1, allow_pickle=True)
    delattr(module, "Gone")
    if named != "torch":
        del sys.modules[named]
    with pytest.raises(InvalidInput, match=r"model\.pt holds objects of a class .*PYTHONPATH"):
        import_path(store, tmp_path / "model.pt", allow_pickle=True)
    with pytest.raises(InvalidInput, match=r"class cannot be imported here .*PYTHONPATH"):
        made.state_dict("model", allow_pickle=True)


@pytest.mark.pickles
def test_a_pt_file_that_would_run_code_is_refused_unless_allowed(
    store: Store, tmp_path: Path
) -> None:
    torch.save({"model": {"w": torch.ones(3)}, "args": Namespace(lr=1)}, tmp_path / "args.pt")
    torch.save(Bomb(), tmp_path / "bomb.pt")
    for name in ("args.pt", "bomb.pt"):
        with pytest.raises(InvalidInput, match="--allow-pickle"):
            import_path(store, tmp_path / name)
    made = import_path(store, tmp_path / "args.pt", allow_pickle=True)
    assert made.state_dict(allow_pickle=True)["args"] == Namespace(lr=1)


@pytest.mark.parametrize(
    "data", [b"", b"no file of torch", b"PK\x03\x04" + bytes(100), b"\x80\x02" + bytes(30)]
)
def test_a_pt_file_that_is_none_is_refused(data: bytes, store: Store, tmp_path: Path) -> None:
    (tmp_path / "bad.pt").write_bytes(data)
    with pytest.raises(InvalidInput, match=r"bad\.pt"):
        import_path(store, tmp_path / "bad.pt")


# -- DCP --


def test_a_dcp_directory_comes_in_and_goes_out(store: Store, tmp_path: Path) -> None:
    dcp_save(training(), checkpoint_id=tmp_path / "dcp", **NO_DIST)
    made = import_path(store, tmp_path / "dcp")
    got = made.state_dict()
    assert_equal(got["model"], training()["model"])
    assert (got["epoch"], got["optimizer"]["param_groups"][0]["betas"]) == (3, (0.9, 0.999))
    assert torch.equal(
        got["optimizer"]["state"][0]["exp_avg"], training()["optimizer"]["state"][0]["exp_avg"]
    )
    export(made, tmp_path / "again", format="dcp")
    assert import_path(store, tmp_path / "again").content_id == made.content_id


@pytest.mark.pickles
def test_a_dcp_directory_of_python_3_13_comes_in(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its paths are of a module that other versions do not have, or use otherwise."""
    local = ModuleType("pathlib._local")
    local.PosixPath = PosixPath  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, local.__name__, local)
        patch.setattr(PosixPath, "__module__", local.__name__)
        dcp_save(training(), checkpoint_id=tmp_path / "dcp", **NO_DIST)
    assert b"pathlib._local" in (tmp_path / "dcp" / ".metadata").read_bytes()
    assert_equal(import_path(store, tmp_path / "dcp").state_dict("model"), training()["model"])


def _metadata(place: Path) -> Any:
    with (place / ".metadata").open("rb") as file:
        return pickle.load(file)


def _write_metadata(place: Path, metadata: Any) -> None:
    with (place / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


@pytest.mark.pickles
def test_a_sharded_dcp_tensor_is_put_together(store: Store, tmp_path: Path) -> None:
    """The pieces of `w` are in two files, as two ranks would have written them."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    whole = torch.randn(10, 6)
    dcp_save({"w": whole[:4].clone()}, checkpoint_id=tmp_path / "a", **NO_DIST)
    dcp_save({"w": whole[4:].clone()}, checkpoint_id=tmp_path / "b", **NO_DIST)
    metadata, other = _metadata(tmp_path / "a"), _metadata(tmp_path / "b")
    os.rename(tmp_path / "b" / "__0_0.distcp", tmp_path / "a" / "__1_0.distcp")
    item = metadata.state_dict_metadata["w"]
    item.size = torch.Size([10, 6])
    item.chunks.append(ChunkStorageMetadata(torch.Size([4, 0]), torch.Size([6, 6])))
    (info,) = other.storage_data.values()
    info.relative_path = "__1_0.distcp"
    metadata.storage_data[MetadataIndex("w", torch.Size([4, 0]))] = info
    _write_metadata(tmp_path / "a", metadata)
    assert torch.equal(import_path(store, tmp_path / "a").state_dict()["model"]["w"], whole)
    item.chunks[1].offsets = torch.Size([2, 0])
    _write_metadata(tmp_path / "a", metadata)
    with pytest.raises(InvalidInput, match="make up"):
        import_path(store, tmp_path / "a")


@pytest.mark.pickles
def test_dcp_metadata_that_would_run_code_is_refused_and_runs_nothing(
    store: Store, tmp_path: Path
) -> None:
    dcp_save(training(), checkpoint_id=tmp_path / "dcp", **NO_DIST)
    metadata = _metadata(tmp_path / "dcp")
    metadata.planner_data = Bomb()
    _write_metadata(tmp_path / "dcp", metadata)
    for allow in (False, True):
        with pytest.raises(InvalidInput, match="putenv"):
            import_path(store, tmp_path / "dcp", allow_pickle=allow)


@pytest.mark.pickles
@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "absent"])
def test_a_dcp_directory_that_names_other_files_is_refused(
    name: str, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(bytes(100_000))
    dcp_save(training(), checkpoint_id=tmp_path / "dcp", **NO_DIST)
    metadata = _metadata(tmp_path / "dcp")
    for info in metadata.storage_data.values():
        info.relative_path = name
    _write_metadata(tmp_path / "dcp", metadata)
    with pytest.raises(InvalidInput, match=r"not the name|no file"):
        import_path(store, tmp_path / "dcp")


@pytest.mark.pickles
def test_objects_in_a_dcp_directory_need_leave(store: Store, tmp_path: Path) -> None:
    dcp_save(
        {"model": {"w": torch.ones(2)}, "args": Namespace(lr=2)},
        checkpoint_id=tmp_path / "dcp",
        **NO_DIST,
    )
    with pytest.raises(InvalidInput, match="--allow-pickle"):
        import_path(store, tmp_path / "dcp")
    assert import_path(store, tmp_path / "dcp", allow_pickle=True).state_dict(allow_pickle=True)[
        "args"
    ] == Namespace(lr=2)


@pytest.mark.parametrize("data", [b"", b"\x80\x04N.", b"\x80\x04]" + b"(" * 1000, bytes(50)])
def test_dcp_metadata_that_is_none_is_refused(data: bytes, store: Store, tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(data)
    with pytest.raises(InvalidInput, match="metadata"):
        import_path(store, tmp_path / "dcp")


# -- TorchSnapshot --


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    from torchsnapshot import Snapshot, StateDict

    progress = {
        "step": 3,
        "text": "ä",
        "flag": True,
        "raw": b"\x00\xff",
        "pair": (1, 2),
        "deep": {1: {"x/y": torch.ones(4)}},
        "none": None,
    }
    state = {
        "model": training()["model"],
        "optimizer": training()["optimizer"],
        "progress": progress,
    }
    Snapshot.take(str(tmp_path / "snap"), {key: StateDict(**value) for key, value in state.items()})
    return tmp_path / "snap"


def _manifest(place: Path) -> Any:
    return json.loads((place / ".snapshot_metadata").read_text())


def test_a_torchsnapshot_directory_comes_in(snapshot: Path, store: Store) -> None:
    got = import_path(store, snapshot).state_dict()
    assert_equal(got["model"], training()["model"])
    assert torch.equal(
        got["optimizer"]["state"][0]["exp_avg"], training()["optimizer"]["state"][0]["exp_avg"]
    )
    progress = got["progress"]
    assert torch.equal(progress.pop("deep")[1]["x/y"], torch.ones(4))
    assert progress == {
        "step": 3,
        "text": "ä",
        "flag": True,
        "raw": b"\x00\xff",
        "pair": (1, 2),
        "none": None,
    }


def test_chunks_and_shards_of_several_ranks_are_put_together(snapshot: Path, store: Store) -> None:
    document = _manifest(snapshot)
    manifest, data = document["manifest"], torch.arange(24, dtype=torch.float32)
    (snapshot / "w").write_bytes(bytes(data.numpy().tobytes()))

    def piece(first: int, rows: int) -> dict[str, Any]:
        tensor = {
            "type": "Tensor",
            "location": "w",
            "serializer": "buffer_protocol",
            "dtype": "torch.float32",
            "shape": [rows, 4],
        }
        tensor |= {"replicated": False, "byte_range": [first * 16, (first + rows) * 16]}
        return {"offsets": [first, 0], "sizes": [rows, 4], "tensor": tensor}

    for rank, first in ((0, 0), (1, 2)):
        manifest[f"{rank}/sharded"] = {"type": "dict", "keys": ["w", "c"]}
        manifest[f"{rank}/sharded/w"] = {
            "type": "ShardedTensor",
            "shards": [piece(first, 2 + 2 * rank)],
        }
    chunks = {
        "type": "ChunkedTensor",
        "dtype": "torch.float32",
        "shape": [6, 4],
        "chunks": [piece(0, 5), piece(5, 1)],
        "replicated": True,
    }
    manifest["0/sharded/c"] = manifest["1/sharded/c"] = chunks
    document["world_size"] = 2
    (snapshot / ".snapshot_metadata").write_text(json.dumps(document))
    got = import_path(store, snapshot).state_dict("sharded")
    assert torch.equal(got["w"], data.view(6, 4)) and torch.equal(got["c"], data.view(6, 4))
    manifest["1/progress/step"] = {
        "type": "int",
        "serialized_value": "4",
        "replicated": False,
        "readable": None,
    }
    (snapshot / ".snapshot_metadata").write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match="for itself"):
        import_path(store, snapshot)


@pytest.mark.parametrize(
    "change",
    [
        {"location": "../../secret"},
        {"location": "/etc/passwd"},
        {"location": "absent"},
        {"byte_range": [0, 10**12]},
        {"byte_range": [-4, 0]},
        {"shape": [2**50, 2**50]},
        {"shape": [-1]},
        {"dtype": "torch.load"},
        {"serializer": "pickle"},
        {"type": "unheard"},
    ],
)
def test_a_manifest_that_lies_is_refused(
    change: dict[str, Any], snapshot: Path, store: Store
) -> None:
    document = _manifest(snapshot)
    document["manifest"]["0/model/0.weight"] |= change
    (snapshot / ".snapshot_metadata").write_text(json.dumps(document))
    with pytest.raises(InvalidInput):
        import_path(store, snapshot)
    assert store.log() == []


@pytest.mark.parametrize("path", ["model/0.weight", "model", "progress/deep/1", "progress/text"])
def test_a_manifest_that_lacks_an_entry_is_refused(path: str, snapshot: Path, store: Store) -> None:
    document = _manifest(snapshot)
    del document["manifest"][f"0/{path}"]
    (snapshot / ".snapshot_metadata").write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match=path):
        import_path(store, snapshot)
    assert store.log() == []


def test_an_entry_that_its_dict_does_not_name_is_refused(snapshot: Path, store: Store) -> None:
    document = _manifest(snapshot)
    document["manifest"]["0/model"]["keys"].remove("0.weight")
    (snapshot / ".snapshot_metadata").write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match=r"model/0\.weight"):
        import_path(store, snapshot)
    assert store.log() == []


@pytest.mark.pickles
def test_objects_in_a_torchsnapshot_directory_need_leave(snapshot: Path, store: Store) -> None:
    torch.save(Namespace(lr=3), snapshot / "0" / "progress" / "pair")
    with pytest.raises(InvalidInput, match="--allow-pickle"):
        import_path(store, snapshot)
    got = import_path(store, snapshot, allow_pickle=True).state_dict("progress", allow_pickle=True)
    assert got["pair"] == Namespace(lr=3)


def test_no_code_ran() -> None:
    assert FLAG not in os.environ
