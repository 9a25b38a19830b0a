"""Our own exports are read by our own import without trust in them, whatever the state has."""

import datetime as dt
import random
import shutil
import subprocess
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._weights_only_unpickler import _get_allowed_globals

import ckptstore
from ckptstore.errors import InvalidInput, Unavailable
from ckptstore.interop.formats import export, import_path, new_files
from ckptstore.interop.formats.new_files import Format
from ckptstore.store import Store
from tests.state.describing import describe
from tests.state.drawing import states, tensors
from tests.state.test_attributes import Point

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # torch, of quantized tensors
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]


READS_NESTED = "torch._utils._rebuild_nested_tensor" in _get_allowed_globals()
"""Whether torch reads nested tensors without trust in the file; torch 2.15 no longer does."""

TORCH_FAILS = ("cannot be written by torch.save", "torch.load does not read what")
"""Of what torch cannot write (dtypes of less than a byte, memory formats), or not read again (a
nested tensor without tensors)."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with ckptstore.open(tmp_path_factory.mktemp("back") / "store") as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


def readme() -> dict[str, Any]:
    """README's state, after a step."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "random": ckptstore.RNGState(),
        "at": {"step": 3},
    }


@given(state=states)
@settings(max_examples=40, deadline=None)
def test_an_export_for_torch_comes_back_by_import_bit_for_bit(
    store: Store, folder: Path, state: Any
) -> None:
    made = store.commit({"s": {"x": state, "n": 1}}, step=1)
    path = folder / f"{made.id}.pt"
    path.unlink(missing_ok=True)
    try:
        export(made, path)
    except InvalidInput as error:
        if any(reason in str(error) for reason in TORCH_FAILS):
            return
        raise
    again = import_path(store, path)
    assert describe(again.state_dict("s")) == describe(made.state_dict("s"))


def test_a_tuple_with_attributes_and_a_value_that_torch_does_not_read_comes_back_whole(
    store: Store, folder: Path
) -> None:
    point: Any = Point(None, slice(None))
    point.name = 5
    point.when = dt.date(2026, 1, 2)
    made = store.commit({"s": point}, step=1)
    export(made, folder / "point.pt")
    again = import_path(store, folder / "point.pt").state_dict("s")
    assert type(again) is Point
    assert again == point
    assert vars(again) == vars(point)


@given(state=states)
@settings(max_examples=20, deadline=None)
def test_what_a_dcp_export_holds_comes_back_by_import(
    store: Store, folder: Path, state: Any
) -> None:
    """DCP makes dicts of all mappings, text of their keys, and tensors of parameters."""
    made = store.commit({"s": {"x": state, "n": 1}}, step=1)
    path = folder / f"{made.id}.dcp"
    shutil.rmtree(path, ignore_errors=True)
    try:
        export(made, path, format="dcp")
    except InvalidInput as error:
        reasons = (*TORCH_FAILS, "for DCP", "which DCP cannot write")
        if any(reason in str(error) for reason in reasons):
            return
        raise
    again = import_path(store, path)

    def values(snapshot: ckptstore.Snapshot) -> Counter[str]:
        return Counter(describe(snapshot.read(leaf.path)) for leaf in snapshot.leaves())

    assert values(again) == values(made)


@given(state=st.dictionaries(st.text(max_size=6), tensors, min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_a_safetensors_export_comes_back_by_import_under_its_names(
    store: Store, folder: Path, state: dict[str, torch.Tensor]
) -> None:
    made = store.commit({"model": state, "at": 3}, step=1)
    path = folder / f"{made.id}.safetensors"
    path.unlink(missing_ok=True)
    try:
        export(made, path)
    except InvalidInput as error:
        if "which safetensors files cannot hold" in str(error):
            return
        raise
    again = import_path(store, path)
    wanted = tensors_of(made)
    assert Counter(tensors_of(again).values()) == Counter(wanted.values())
    if all(name.count("/") == 1 for name in wanted):  # names of parts of composites get dots
        assert tensors_of(again) == wanted


def tensors_of(snapshot: ckptstore.Snapshot) -> dict[str, str]:
    """What each tensor of a commit is, by its path."""
    tensors = [leaf.path for leaf in snapshot.leaves() if leaf.kind == "tensor"]
    return {path: describe(snapshot.read(path)) for path in tensors}


@given(
    files=st.dictionaries(st.sampled_from(["a", "b.json", "c/d", "c/e.txt"]), st.binary(max_size=9))
)
@settings(max_examples=10, deadline=None)
def test_an_export_of_files_comes_back_by_import(
    store: Store, folder: Path, files: dict[str, bytes]
) -> None:
    root = folder / "written"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, data in {"always": b"", **files}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(data)
    made = import_path(store, root)
    if (folder / "again").exists():
        shutil.rmtree(folder / "again")
    export(made, folder / "again")
    again = import_path(store, folder / "again")
    assert describe(again.state_dict("files")) == describe(made.state_dict("files"))


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_readmes_state_comes_back_by_import(store: Store, tmp_path: Path, format: Format) -> None:
    made = store.commit(readme(), step=3)
    path = tmp_path / {"torch": "state.pt", "dcp": "state"}[format]
    done = export(made, path, format=format)
    again = import_path(store, path)
    for leaf in made.leaves():
        assert describe(again.read(leaf.path)) == describe(made.read(leaf.path)), leaf.path
    assert describe(again.state_dict("random")) == describe(made.state_dict("random"))
    state = readme()
    again.restore({"random": state["random"]})
    assert done.refused == (
        (("random/numpy/state/key", "numpy.ndarray"),) if format == "torch" else ()
    )


def test_the_refused_objects_of_an_export_are_those_that_torch_refuses(
    store: Store, tmp_path: Path
) -> None:
    values = {
        "empty": b"",
        "bytes": b"x",
        "set": {1, 2},
        "at": dt.datetime(2026, 1, 1, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
        "recent": deque([1, 2], maxlen=3),
        "counts": defaultdict(list, {"a": [1]}),
        "big": 2**3000,
        "generator": np.random.default_rng(3),
        "random": random.Random(3),
        "ellipsis": ...,
        "complex": 1j,
        "shape": torch.Size([2]),
    }
    made = store.commit({"s": values}, step=1)
    for name, value in values.items():
        path = tmp_path / f"{name}.pt"
        try:
            done = export(made, path, select=f"s/{name}", allow_pickle=name == "big")
        except ckptstore.NotFound:  # it has several leaves
            continue
        try:
            torch.load(path, weights_only=True)
            refused = False
        except Exception:  # of several classes
            refused = True
        assert bool(done.refused) == refused, (name, value)


def test_an_integer_that_no_safe_reader_takes_is_refused_with_its_path(
    store: Store, tmp_path: Path
) -> None:
    made = store.commit({"s": {"w": torch.ones(2), "big": 2**3000}}, step=1)
    for format, name in (("torch", "s/big"), ("dcp", r"s\.big")):
        with pytest.raises(InvalidInput, match=rf"would not read {name} .*--allow-pickle"):
            export(made, tmp_path / "x.pt", format=format)  # type: ignore[arg-type]
        assert not (tmp_path / "x.pt").exists()
    export(made, tmp_path / "x.pt", allow_pickle=True)
    with pytest.raises(InvalidInput, match="--allow-pickle"):
        import_path(store, tmp_path / "x.pt")


def test_a_value_that_torch_cannot_write_is_named(store: Store, tmp_path: Path) -> None:
    made = store.commit({"s": {"w": torch.ones(2), "deep": [torch.channels_last]}}, step=1)
    for format, name in (("torch", "s/deep/0"), ("dcp", r"s\.deep/0")):
        why = rf"{name} cannot be written by torch\.save"
        if sys.version_info >= (3, 14):  # which pickles a dotted name, by getattr
            why = rf"`ckptstore import` would not read {name}"
        with pytest.raises(InvalidInput, match=why):
            export(made, tmp_path / "x", format=format)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_that_torch_does_not_read_again_is_named(store: Store, tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "none": torch.nested.nested_tensor([])}
    made = store.commit({"s": state}, step=1)
    if READS_NESTED:
        with pytest.raises(InvalidInput, match=r"s/none cannot be written: torch\.load does not"):
            export(made, tmp_path / "x.pt")
        return
    export(made, tmp_path / "x.pt")  # torch reads none of them, so it is read here
    again = import_path(store, tmp_path / "x.pt").state_dict()
    assert again["s"]["none"].is_nested and not again["s"]["none"].unbind()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_come_back_whatever_torch_reads(store: Store, tmp_path: Path) -> None:
    parts = [torch.rand(2, 3), torch.rand(1, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    holes = torch.nested.narrow(
        torch.rand(2, 5), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged
    )
    named = torch.nested.nested_tensor(parts)
    named.note = 3
    kinds = {"strided": torch.nested.nested_tensor(parts), "jagged": jagged, "holes": holes}
    made = store.commit({"s": {**kinds, "named": named}}, step=1)
    export(made, tmp_path / "x.pt", select="s")
    again = import_path(store, tmp_path / "x.pt")
    found = again.state_dict("model")
    assert found["jagged"].requires_grad and found["named"].note == 3
    for name, wanted in kinds.items():
        assert found[name].layout == wanted.layout
        assert all(map(torch.equal, found[name].unbind(), wanted.unbind())), name
    store.commit({"s": found}, step=2)  # though torch has noted their sizes on them meanwhile


def test_a_dtype_that_dcp_cannot_write_is_named(store: Store, tmp_path: Path) -> None:
    bits = torch.zeros(4, dtype=torch.uint8).view(torch.bits8)
    made = store.commit({"s": {"w": torch.ones(2), "bits": bits}}, step=1)
    with pytest.raises(InvalidInput, match=r"s/bits is torch\.bits8, which DCP cannot write"):
        export(made, tmp_path / "x", format="dcp")
    with pytest.raises(InvalidInput, match=r"DCP cannot write this state"):
        export(made, tmp_path / "x", format="dcp", select="s/bits")
    assert not list(tmp_path.iterdir())


def test_a_jagged_tensor_comes_back_in_a_new_process(store: Store, tmp_path: Path) -> None:
    """torch reads one only if it has imported what few programs import."""
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    export(store.commit({"s": {"x": jagged, "n": 1}}, step=1), tmp_path / "x.pt")
    words = ("-s", str(tmp_path / "other"), "import", str(tmp_path / "x.pt"))
    ckptstore.open(tmp_path / "other").close()
    done = subprocess.run(
        [sys.executable, "-m", "ckptstore", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("format", ["files", "torch", "dcp", "safetensors"])
def test_an_export_that_the_file_system_loses_is_no_success(
    format: Format, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    made = (
        store.adopt(tmp_path / "run", step=1)
        if format == "files"
        else store.commit({"s": {"w": torch.ones(2)}}, step=1)
    )
    rename = new_files._rename_new

    def lost(new: Path, target: Path) -> None:
        rename(new, target)
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    monkeypatch.setattr(new_files, "_rename_new", lost)
    with pytest.raises(Unavailable, match="is not there as it was written"):
        export(made, tmp_path / "out", format=format)


def test_names_that_others_gave_to_torch_are_left_as_they_were(
    store: Store, tmp_path: Path
) -> None:
    """transformers gives torch numpy's names, without the dtypes of most arrays."""
    from numpy._core.multiarray import _reconstruct

    theirs = [_reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    made = store.commit(readme(), step=3)
    export(made, tmp_path / "state.pt")
    before = torch.serialization.get_safe_globals()
    for names in ([], theirs):
        with torch.serialization.safe_globals(names):
            inside = torch.serialization.get_safe_globals()
            again = import_path(store, tmp_path / "state.pt")
            assert set(torch.serialization.get_safe_globals()) == set(inside)
        assert describe(again.state_dict("random")) == describe(made.state_dict("random"))
    assert set(torch.serialization.get_safe_globals()) == set(before)
