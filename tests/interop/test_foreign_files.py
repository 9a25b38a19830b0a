"""An import looks at the bytes of a file: it reads what it knows under any name, and says of the
rest what it is and which command works."""

import io
import pickle
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save as safetensors_bytes

from ckptstore.cli.call import Exit
from ckptstore.errors import InvalidInput
from ckptstore.interop.formats import export, import_path
from ckptstore.store import Store
from tests.cli.running import call

pytestmark = pytest.mark.pickles

WEIGHT = torch.arange(6.0).reshape(2, 3)


def _torch(state: object) -> bytes:
    data = io.BytesIO()
    torch.save(state, data)
    return data.getvalue()


def _npz() -> bytes:
    data = io.BytesIO()
    np.savez(data, w=WEIGHT.numpy())
    return data.getvalue()


def _npy() -> bytes:
    data = io.BytesIO()
    np.save(data, WEIGHT.numpy())
    return data.getvalue()


def _script() -> bytes:
    module = torch.nn.Linear(3, 2)
    module.weight.data[:] = WEIGHT
    data = io.BytesIO()
    torch.jit.save(torch.jit.script(module), data)
    return data.getvalue()


def _zip(*names: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return data.getvalue()


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*is (deprecated|not supported)", "ignore:.*TypedStorage"
)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("weight.bin", lambda: safetensors_bytes({"w": WEIGHT})),
        ("arrays.npz", _npz),
        ("array.npy", _npy),
        ("arrays.ckpt", _npz),
        ("model.jit", _script),
        ("model.pt", _script),
    ],
)
def test_a_file_is_read_by_its_bytes_whatever_its_name(
    name: str, make: Callable[[], bytes], store: Store, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(make())
    made = import_path(store, tmp_path / name)
    found = [leaf.path for leaf in made.leaves() if leaf.kind == "tensor" and leaf.shape == (2, 3)]
    assert [made.read(path).tolist() for path in found] == [WEIGHT.tolist()]
    export(made, tmp_path / f"again{Path(name).suffix}", format="files")
    assert (tmp_path / f"again{Path(name).suffix}").read_bytes() == (tmp_path / name).read_bytes()


def test_a_file_without_tensors_is_kept_and_told(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.savez_compressed(tmp_path / "small.npz", w=WEIGHT.numpy())
    made = import_path(store, tmp_path / "small.npz")
    assert not any(leaf.kind == "tensor" for leaf in made.leaves())
    assert any("no tensors were found in it" in each.getMessage() for each in caplog.records)


def test_a_file_of_torch_is_read_under_any_name(store: Store, tmp_path: Path) -> None:
    (tmp_path / "weights.v3").write_bytes(_torch({"w": WEIGHT}))
    assert torch.equal(import_path(store, tmp_path / "weights.v3").read("model/w"), WEIGHT)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("counter.ckpt", b"steps: 500\n", r"a text file \(it begins with 'steps: 500'\)"),
        ("weight.bin", b"\x04\0\0\0\x02\0\0\0" * 40, "a format that import does not know"),
        ("policy.zip", _zip("policy.pth", "data"), r"a zip archive of other files \(policy\.pth"),
        ("model.pt", b"", "is empty"),
        ("model.pt", b"PK\x03\x04" + bytes(100), "a zip archive.*damaged or cut off"),
    ],
)
def test_what_is_not_read_is_named_with_the_command_that_works(
    name: str, data: bytes, said: str, store: Store, tmp_path: Path
) -> None:
    folder = tmp_path / "found"
    folder.mkdir()
    (folder / name).write_bytes(data)
    with pytest.raises(InvalidInput, match=said) as caught:
        import_path(store, folder / name)
    assert "pickle" not in str(caught.value), "no advice to trust what is no pickle"
    if "cut off" not in said:
        assert f"`ckptstore adopt {folder}`" in str(caught.value)
    made = store.adopt(folder, step=1)
    made.materialize(tmp_path / "again")
    assert (tmp_path / "again" / name).read_bytes() == data


def test_a_damaged_safetensors_file_of_another_name_is_refused(
    store: Store, tmp_path: Path
) -> None:
    (tmp_path / "weight.bin").write_bytes(safetensors_bytes({"w": WEIGHT})[:-4])
    with pytest.raises(InvalidInput, match=r"weight\.bin"):
        import_path(store, tmp_path / "weight.bin")


def test_a_pickled_class_is_named_whole_with_the_safe_way(store: Store, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "args.pt"
    path.write_bytes(_torch({"w": WEIGHT, "args": Namespace(lr=1)}))
    with pytest.raises(InvalidInput, match=r"holds a argparse\.Namespace, and") as caught:
        import_path(store, path)
    message = str(caught.value)
    assert f"`ckptstore adopt {path.parent}`" in message and "--allow-pickle" in message
    assert message.isprintable(), "no escape codes, no lines of torch's"
    shutil.rmtree(path.parent)


def test_a_bare_pickle_is_refused_as_such(store: Store, tmp_path: Path) -> None:
    for protocol in (2, 4):
        (tmp_path / "state.pkl").write_bytes(pickle.dumps({"a": 1}, protocol=protocol))
        for allow_pickle in (False, True):
            with pytest.raises(InvalidInput, match=r"state\.pkl is a pickle that torch\.save did"):
                import_path(store, tmp_path / "state.pkl", allow_pickle=allow_pickle)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_another_protocol_of_pickle_is_known_as_torchs(
    zipped: bool, store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": WEIGHT}, path, pickle_protocol=4, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InvalidInput, match=r"read by Python's own unpickler alone.*allow-pickle"):
        import_path(store, path)
    made = import_path(store, path, allow_pickle=True)
    assert torch.equal(made.read("model/w"), WEIGHT)


def test_an_object_that_becomes_its_state_dict_is_told(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"nets": [torch.nn.Linear(2, 1)], "step": 3}, tmp_path / "whole.pt")
    made = import_path(store, tmp_path / "whole.pt", allow_pickle=True)
    (told,) = [each.getMessage() for each in caplog.records if "state_dict()" in each.getMessage()]
    assert told.startswith("nets/0 in ") and "a torch.nn.modules.linear.Linear: its" in told
    assert sorted(made.state_dict("nets")[0]) == ["bias", "weight"]


def test_a_directory_is_not_exported_under_the_name_of_one_file(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(safetensors_bytes({"w": WEIGHT}))
    (folder / "config.json").write_text("{}")
    store.adopt(folder, step=1, tag="a")
    store.close()
    monkeypatch.setenv("CKPTSTORE", str(tmp_path / "store"))
    for name in ("w.safetensors", "w.pt"):
        refused = call("export", "a", str(tmp_path / name))
        assert refused.code == Exit.USAGE and not (tmp_path / name).exists()
        assert "--format" in refused.err and "--select" in refused.err
    words = ("--format", "safetensors", "--select", "model")
    assert call("export", "a", str(tmp_path / "w.safetensors"), *words).code == 0
    assert (tmp_path / "w.safetensors").is_file()
    assert call("export", "a", str(tmp_path / "again")).code == 0
    assert (tmp_path / "again" / "config.json").is_file()
