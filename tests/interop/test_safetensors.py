"""safetensors files match the official library byte for byte, and invalid ones are refused
cheaply.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckptstore
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NotFound
from ckptstore.interop.formats import Labels, export, import_path, new_files
from ckptstore.plugins.parsers.safetensors_header import encode_header, parse_header, read_header
from ckptstore.store import Store
from tests.maintenance.stores import files, flip
from tests.support.torch_release import FLOAT4


def tensors() -> dict[str, torch.Tensor]:
    dtypes = (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
    )
    dtypes += (
        torch.uint8,
        torch.bool,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
    )
    made = {
        f"of.{str(dtype).removeprefix('torch.')}": torch.randn(33, 7).mul(9).to(dtype)
        for dtype in dtypes
    }
    return made | {
        "big": torch.randn(300, 400),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 5),
        "é/ %": torch.ones(3),
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    return a.keys() == b.keys() and all(
        (x.dtype, x.shape) == (b[name].dtype, b[name].shape) and torch.equal(raw(x), raw(b[name]))
        for name, x in a.items()
    )


def test_a_file_comes_in_whole_and_out_byte_for_byte(store: Store, tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors", metadata={"format": "pt", "note": "ä"})
    made = import_path(
        store, tmp_path / "model.safetensors", Labels(step=5, tags=("base",), metrics={"loss": 1.5})
    )
    assert (made.step, made.tags, made.metrics, made.message) == (
        5,
        ("base",),
        {"loss": 1.5},
        "imported from model.safetensors",
    )
    assert same(made.state_dict("model"), load_file(tmp_path / "model.safetensors"))
    done = export(store.checkout("base"), tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (
        tmp_path / "model.safetensors"
    ).read_bytes()
    assert (done.format, done.left_out, [file.name for file in done.files]) == (
        "files",
        0,
        ["again.safetensors"],
    )


def test_what_the_store_has_is_not_written_again(store: Store, tmp_path: Path) -> None:
    base = {f"layer.{i}": torch.randn(100, 200) for i in range(20)}
    first = store.commit({"model": base})
    save_file(base, tmp_path / "model.safetensors")
    imported = import_path(store, tmp_path / "model.safetensors")
    assert imported.new_bytes < first.new_bytes / 50


def test_any_commit_is_exported_as_the_formats_library_reads_it(
    store: Store, tmp_path: Path
) -> None:
    state = {
        "model": tensors(),
        "optimizer": {"state": {0: {"exp_avg": torch.randn(50, 50)}}, "lr": 0.1},
    }
    made = store.commit(state)
    done = export(made, tmp_path / "model.safetensors", select="model")
    assert same(load_file(tmp_path / "model.safetensors"), state["model"])
    assert done.left_out == 2
    export(made, tmp_path / "all.safetensors")
    assert set(load_file(tmp_path / "all.safetensors")) == {
        f"model.{name}" for name in state["model"]
    } | {"optimizer.state.0.exp_avg"}
    export(made, tmp_path / "part.safetensors", select="*of.uint*")
    assert set(load_file(tmp_path / "part.safetensors")) == {
        f"of.uint{bits}" for bits in (8, 16, 32, 64)
    }


def test_names_are_exported_as_they_were_committed(store: Store, tmp_path: Path) -> None:
    names = ["", "%empty", "%2F", "é\n", "a/b", date(2026, 1, 2)]
    made = store.commit({"model": {name: torch.full((3,), n) for n, name in enumerate(names)}})
    export(made, tmp_path / "model.safetensors")
    wanted = {str(name): n for n, name in enumerate(names[:-1])} | {'%date:["2026-01-02"]': 5}
    found = load_file(tmp_path / "model.safetensors")
    assert {name: int(tensor[0]) for name, tensor in found.items()} == wanted


def test_tied_tensors_are_written_under_each_name(store: Store, tmp_path: Path) -> None:
    weight = torch.randn(80, 80)
    made = store.commit({"model": {"in": weight, "out": weight}})
    export(made, tmp_path / "tied.safetensors")
    assert same(load_file(tmp_path / "tied.safetensors"), {"in": weight, "out": weight})


def test_what_cannot_be_exported_says_why_and_leaves_nothing(store: Store, tmp_path: Path) -> None:
    made = store.commit(
        {"model": {"w": torch.randn(300, 300), "c": torch.zeros(2, dtype=torch.complex128)}}
    )
    out = tmp_path / "out"
    out.mkdir()
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: export(made, out / "x.safetensors"), InvalidInput, "complex128"),
        (lambda: export(made, out / "x"), InvalidInput, "--format"),
        (lambda: export(made, out / "x", format="files"), InvalidInput, "not imported"),
        (lambda: export(made, out / "x.safetensors", select="nothing*"), NotFound, "no leaves"),
        (lambda: export(made, out), Conflict, "exists"),
    ]
    for attempt, error, words in cases:
        with pytest.raises(error, match=words):
            attempt()
        assert list(out.iterdir()) == []
    flip(max(files(tmp_path / "store", "packs"), key=lambda path: path.stat().st_size), 9000)
    with pytest.raises(Corrupt):
        export(made, out / "w.safetensors", select="*/w")
    assert list(out.iterdir()) == []


def _file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def _of(name: str, dtype: Any, shape: Any, offsets: Any) -> dict[str, Any]:
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


HOSTILE: dict[str, tuple[Any, bytes, int | None]] = {
    "an absurd length": ({}, b"", 2**63),
    "a length beyond the file": ({}, b"", 1000),
    "a header that is no JSON": (b"{nope", b"", None),
    "a header that is no object": ([], b"", None),
    "a header nested without end": (b"[" * 100_000, b"", None),
    "a number without end": (
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}',
        b"",
        None,
    ),
    "tensors that overlap": (
        _of("a", "U8", [4], [0, 4]) | _of("b", "U8", [4], [2, 6]),
        bytes(6),
        None,
    ),
    "a gap": (_of("a", "U8", [4], [0, 4]) | _of("b", "U8", [4], [6, 10]), bytes(10), None),
    "data without tensors": ({}, bytes(10), None),
    "too little data": (_of("a", "U8", [4], [0, 4]), bytes(3), None),
    "offsets behind each other": (_of("a", "U8", [4], [4, 0]), bytes(4), None),
    "a negative shape": (_of("a", "U8", [-4], [0, 4]), bytes(4), None),
    "a shape of booleans": (_of("a", "U8", [True], [0, 1]), bytes(1), None),
    "a size that does not fit": (_of("a", "F32", [4], [0, 4]), bytes(4), None),
    "a shape beyond all memory": (_of("a", "F32", [2**40, 2**40], [0, 4]), bytes(4), None),
    "an unknown dtype": (_of("a", "F3", [4], [0, 4]), bytes(4), None),
    "a dtype that is no string": (_of("a", ["U8"], [4], [0, 4]), bytes(4), None),
    "a name given twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
        None,
    ),
    "no offsets": ({"a": {"dtype": "U8", "shape": [0]}}, b"", None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_not_sound_is_refused(case: str, store: Store, tmp_path: Path) -> None:
    header, data, length = HOSTILE[case]
    place = _file(tmp_path / "bad.safetensors", header, data, length)
    with pytest.raises(InvalidInput, match="safetensors"):
        import_path(store, place)
    assert store.log() == []


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_are_refused(data: bytes) -> None:
    with suppress(InvalidInput):
        parse_header(len(data).to_bytes(8, "little") + data, "x")


names = st.text(max_size=8)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


dtypes = st.sampled_from(("float32", "bool", "bfloat16", "float8_e5m2", "int64"))


@given(st.lists(st.tuples(names, dtypes, shapes), unique_by=lambda t: t[0]))
def test_a_header_that_is_written_is_read_back(
    listed: list[tuple[str, str, tuple[int, ...]]],
) -> None:
    header = encode_header(listed, {"format": "pt"})
    assert parse_header(header.raw, "x") == header
    assert sorted((e.name, e.dtype, e.shape) for e in header.entries) == sorted(listed)
    assert len(header.raw) % 8 == 0


def test_elements_narrower_than_a_byte_keep_their_bytes(tmp_path: Path, store: Store) -> None:
    place = _file(tmp_path / "f4.safetensors", _of("a", "F4", [2, 6], [0, 6]), bytes(range(6)))
    made = import_path(store, place)
    assert [(leaf.dtype, leaf.shape) for leaf in made.leaves("model/*")] == [
        ("float4_e2m1fn_x2", (2, 3))
    ]
    export(made, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == place.read_bytes()
    assert read_header(place).entries[0].shape == (2, 3)


@FLOAT4
def test_a_scalar_of_two_elements_in_a_byte_has_no_shape_in_a_file(
    tmp_path: Path, store: Store
) -> None:
    scalar = torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    made = store.commit({"model": {"scale": scalar}})
    message = "scale is a scalar of float4_e2m1fn_x2, which safetensors files cannot hold"
    with pytest.raises(InvalidInput, match=message):
        export(made, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_file_that_shrinks_meanwhile_makes_no_commit(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.randn(300, 300)}, tmp_path / "model.safetensors")
    from ckptstore.interop.formats import imports

    flats = imports.flats_of

    def shrinking(*args: Any) -> Any:
        made = flats(*args)
        with open(tmp_path / "model.safetensors", "r+b") as file:
            file.truncate(1000)
        return made

    monkeypatch.setattr(imports, "flats_of", shrinking)
    with pytest.raises(ckptstore.Unavailable, match="changed while"):
        import_path(store, tmp_path / "model.safetensors")
    assert store.log() == []


def test_an_export_replaces_no_file_that_appeared_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "w.safetensors"
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit({"model": {"w": torch.ones(3)}}, step=1)
        real = new_files.sync_path

        def somebody_writes(path: Path) -> None:
            real(path)
            target.write_text("mine")

        monkeypatch.setattr(new_files, "sync_path", somebody_writes)
        with pytest.raises(Conflict, match="appeared meanwhile"):
            export(snapshot, target)
    assert target.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "w.safetensors"]
