"""A commit that holds pickles says so, and a query neither reads them nor fails because of them."""

import shutil
from pathlib import Path

import pytest
import torch

import ckptstore
from tests.cli.running import call, run
from tests.support.guard import sitecustomize as guard


class Odd:
    """Nothing that the registry knows."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Made with leave to pickle; the tests are without it."""
    place = tmp_path_factory.mktemp("pickles") / "store"
    with pytest.MonkeyPatch.context() as patch, ckptstore.open(place) as opened:
        patch.setenv(guard.PERMIT, "1")
        opened.commit(
            {"model": {"w": torch.ones(3), "odd": [Odd(), b"x"]}, "none": {"data": b"x"}},
            step=1,
            allow_pickle=True,
        )
        opened.commit({"model": {"w": torch.ones(3)}}, step=2)
    return str(place)


def test_show_counts_and_names_the_pickles(store: str) -> None:
    result = run("show", "1", "-s", store)
    assert result.code == 0
    assert "Pickled, so restored with allow_pickle=True only: model/odd/0\n" in result.out
    assert "1 pickle" in result.out and "1 float32" in result.out
    trees = {
        tree["keys"][0]: tree for tree in call("show", "1", "-s", store, "--json").document["trees"]
    }
    assert (trees["model"]["pickles"], trees["none"]["pickles"]) == (["model/odd/0"], [])
    assert trees["model"]["dtypes"] == {"float32": 1, "pickle": 1, "bytes": 1}
    assert "ickle" not in run("show", "2", "-s", store).out


def test_ls_shows_a_pickle_as_one(store: str) -> None:
    kinds = {
        leaf["path"]: leaf["kind"]
        for leaf in call("ls", "1", "-s", store, "--json").document["leaves"]
    }
    assert kinds == {
        "model/w": "tensor",
        "model/odd/0": "pickle",
        "model/odd/1": "bytes",
        "none/data": "bytes",
    }
    assert "pickle" in call("ls", "1", "-s", store).out


def test_the_catalog_tells_of_pickles_whose_schema_the_packs_have_lost(
    store: str, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "copy"))
    assert call("log", "-s", str(copy)).code == 0
    for pack in copy.glob("packs/*/*"):
        pack.write_bytes(bytes(pack.stat().st_size))
    result = call("show", "1", "-s", str(copy))
    assert (result.code, result.err) == (0, "")
    assert "Pickled" in result.out
    assert "model/odd/0" in result.out
