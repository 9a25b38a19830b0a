"""`ckptstore adopt` and `ckptstore materialize`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptstore
from ckptstore.cli.call import Exit
from tests.cli.running import call
from tests.interop.adopt.trees import tree_of


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    ckptstore.open(tmp_path / "store").close()
    monkeypatch.setenv("CKPTSTORE", str(tmp_path / "store"))
    (tmp_path / "source").mkdir()
    save_file({"w": torch.arange(1000.0)}, tmp_path / "source" / "adapter.safetensors")
    (tmp_path / "source" / "config.json").write_text("{}")
    (tmp_path / "source" / "link").symlink_to("config.json")
    return tmp_path


def test_adopt_then_materialize(place: Path) -> None:
    words = ("--run", "hf", "--step", "7", "--tag", "a", "--metric", "loss=0.5", "--message", "m")
    made = call("adopt", str(place / "source"), *words, "--json").document
    assert (made["run"], made["step"], made["tags"], made["tensors"]) == ("hf", 7, ["a"], 1)
    shown = call("show", "a", "--json").document["commit"]
    assert (shown["id"], shown["message"], shown["metrics"]) == (made["commit"], "m", {"loss": 0.5})
    done = call("materialize", "hf@7", str(place / "out"), "--json").document
    assert (done["commit"], done["files"], done["links"]) == (made["commit"], 2, 1)
    assert tree_of(place / "out") == tree_of(place / "source")
    some = call("materialize", "a", str(place / "some"), "--select", "adapter*")
    assert some.code == 0 and "1 file, 4.0" in some.out
    assert [path.name for path in (place / "some").iterdir()] == ["adapter.safetensors"]


def test_mistakes_are_told(place: Path) -> None:
    assert call("adopt", str(place / "absent")).code == Exit.FAILED
    wrong = call("adopt", str(place / "source"), "--metric", "loss")
    assert wrong.code == Exit.USAGE and "ckptstore adopt" in wrong.err
    call("adopt", str(place / "source"))
    assert call("materialize", "latest", str(place / "source")).code == Exit.FAILED
    assert (
        "no files that 'x' matches"
        in call("materialize", "latest", str(place / "out"), "--select", "x").err
    )
    assert not (place / "out").exists()
