"""`ckptstore import` and `ckptstore export`."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptstore
from ckptstore.cli.call import Exit
from tests.cli.running import call
from tests.interop.dcp_states import NO_DIST


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    ckptstore.open(tmp_path / "store").close()
    monkeypatch.setenv("CKPTSTORE", str(tmp_path / "store"))
    save_file({"w": torch.arange(1000.0)}, tmp_path / "model.safetensors")
    return tmp_path


def test_import_then_export(place: Path) -> None:
    words = (
        "--run",
        "base",
        "--step",
        "7",
        "--tag",
        "a",
        "--tag",
        "b",
        "--metric",
        "loss=0.5",
        "--message",
        "from the hub",
    )
    made = call("import", str(place / "model.safetensors"), *words, "--json").document
    assert (made["run"], made["step"], made["tags"], made["leaves"]) == ("base", 7, ["a", "b"], 3)
    shown = call("show", "a", "--json").document["commit"]
    assert (shown["message"], shown["metrics"], shown["id"]) == (
        "from the hub",
        {"loss": 0.5},
        made["commit"],
    )
    done = call("export", "base@7", str(place / "out.safetensors"), "--json").document
    assert (done["format"], done["files"]) == ("files", [str(place / "out.safetensors")])
    assert (place / "out.safetensors").read_bytes() == (place / "model.safetensors").read_bytes()
    assert (
        "2 other leaves are not in it"
        in call("export", "a", str(place / "x"), "--format", "safetensors", "--select", "model").out
    )
    assert torch.equal(load_file(place / "x")["w"], torch.arange(1000.0))


def test_what_goes_wrong_is_told(place: Path) -> None:
    (place / "bad.safetensors").write_bytes((1 << 62).to_bytes(8, "little"))
    assert call("import", str(place / "bad.safetensors")).code == Exit.USAGE
    assert call("import", str(place / "model.safetensors"), "--metric", "loss").code == Exit.USAGE
    call("import", str(place / "model.safetensors"))
    assert call("export", "latest", str(place / "model.safetensors")).code == Exit.FAILED
    assert "--format" in call("export", "latest", str(place / "out.bin2")).err
    assert (
        json.loads(call("export", "nosuch", str(place / "y.pt"), "--json").out)["error"]["kind"]
        == "NotFound"
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_several_selects_add_up_in_every_format(place: Path) -> None:
    with ckptstore.open(place / "store") as store:
        store.commit(
            {"model": {"w": torch.ones(3)}, "ema": {"w": torch.zeros(3)}, "step": 7}, tag="state"
        )
    for format, suffix in (("torch", "pt"), ("dcp", "d"), ("safetensors", "safetensors")):
        words = ("--select", "model", "--select", "ema", "--format", format)
        assert call("export", "state", str(place / f"out.{suffix}"), *words).code == 0
    wanted = {"model": {"w": torch.ones(3)}, "ema": {"w": torch.zeros(3)}}
    assert str(torch.load(place / "out.pt", weights_only=True)) == str(wanted)
    empty = {key: {"w": torch.full((3,), 5.0)} for key in wanted}
    dcp.load(empty, checkpoint_id=place / "out.d", **NO_DIST)
    assert str(empty) == str(wanted)
    assert load_file(place / "out.safetensors").keys() == {"model.w", "ema.w"}
    assert (
        call(
            "export", "state", str(place / "mixed.pt"), "--select", "model", "--select", "st*"
        ).code
        == 0
    )
    assert torch.load(place / "mixed.pt", weights_only=True).keys() == {"model/w", "step"}


def test_an_export_says_what_torch_refuses_and_what_leaves_it_out(place: Path) -> None:
    with ckptstore.open(place / "store") as store:
        state = {"model": {"w": torch.ones(3)}, "random": ckptstore.RNGState(), "at": {"step": 0}}
        store.commit(state, tag="state")
    done = call("export", "state", str(place / "all.pt"))
    assert "weights_only=False because of random/numpy/state/key, a numpy.ndarray" in done.out
    assert "`ckptstore import` reads all of it" in done.out
    without = done.out.partition("without it: ")[2].split()
    assert without == ["--select", "model", "--select", "at"]
    assert call("import", str(place / "all.pt"), "--tag", "back").code == 0
    rest = call("export", "state", str(place / "rest.pt"), *without, "--json").document
    assert rest["refused"] == []
    assert torch.load(place / "rest.pt", weights_only=True).keys() == {"model", "at"}


def test_an_export_for_torch_takes_any_name(place: Path) -> None:
    call("import", str(place / "model.safetensors"), "--tag", "a")
    assert call("export", "a", str(place / "plain"), "--format", "torch").code == 0
    assert torch.load(place / "plain", weights_only=True)["model"]["w"].shape == (1000,)


def test_damage_that_dcp_meets_is_told_as_damage(place: Path) -> None:
    call("import", str(place / "model.safetensors"), "--tag", "a")
    for pack in (place / "store" / "packs").rglob("*"):
        if pack.is_file():
            data = bytearray(pack.read_bytes())
            data[100] ^= 1
            pack.write_bytes(data)
    result = call("export", "a", str(place / "d"), "--format", "dcp")
    assert (result.code, (place / "d").exists()) == (Exit.DAMAGED, False)
    assert "run `ckptstore fsck --read-data`" in result.err and result.err.count("\n") == 1


def test_a_directory_whose_name_is_no_unicode_is_imported_and_a_file_in_one_is_refused(
    place: Path,
) -> None:
    folder = place / os.fsdecode(b"\xff")
    folder.mkdir()
    (folder / "file").write_text("x")
    made = call("import", str(folder), "--json")
    assert made.code == 0, made.err
    assert call("log", "--json").document["commits"][0]["message"] == "imported from \\udcff"
    (folder / os.fsdecode(b"\xfe")).write_text("x")
    refused = call("import", str(folder))
    assert (
        refused.code == Exit.USAGE
        and "is not Unicode, as names in a commit must be; rename it" in refused.err
    )
