"""The lines that a commit's page offers run as they are: of whole, thinned and forgotten commits,
with keys of any name."""

import contextlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptstore
from ckptstore.maintenance.retention import KeepLast
from ckptstore.repository.store_handle import StoreHandle
from tests.cli.running import call
from tests.support.servers.postgres import PASSWORD, ROLE, PostgresServer
from tests.ui.asking import browsing


def _tensor() -> torch.Tensor:
    return torch.ones(3)


@dataclass
class Custom:
    """Is pickled."""

    number: int


STATES: Mapping[str, dict[str, Any]] = {
    "plain": {"model": {"w": _tensor()}, "optimizer": {"m": _tensor(), "lr": 1.0}},
    "names": {"it's [a] * key": {"w": _tensor()}, "class": {"w": _tensor()}},
    "values": {"progress": {"step": 3}},
    "pickled": {"model": {"w": _tensor()}, "extra": Custom(3)},
}
CASES = {
    **{name: (state, ()) for name, state in STATES.items()},
    "thinned": (STATES["plain"], ("optimizer/**",)),
    "thinned in part": (STATES["plain"], ("optimizer/m",)),
    "thinned names": (STATES["names"], ("class/**",)),
    "thinned model": (STATES["plain"], ("model/**",)),
    "thinned wholly": (STATES["plain"], ("*",)),
}


def _commit_of(place: Path, state: dict[str, Any], globs: tuple[str, ...]) -> str:
    with ckptstore.open(place) as store:
        for step in range(3):
            store.commit(state, step=step, allow_pickle=True)
        if globs:
            store.forget(KeepLast(2).thin(*globs))
        return store.checkout(0).id


def _run(text: str, state: dict[str, Any], directory: Path) -> None:
    """Run a line, with the objects of the state as the variables that it names."""
    if text.startswith("ckptstore "):
        with contextlib.chdir(directory):
            result = call(*shlex.split(text)[1:])
        assert result.code == 0, result.err
        return
    for key, value in state.items():
        if f"{key!r}: …" in text:
            text = text.replace("…", repr({"w": 0}) if not value else "dict(fresh)", 1)
    exec(text, {**state, "fresh": {"w": _tensor()}})


@pytest.mark.parametrize("name", CASES)
def test_each_line_runs(name: str, tmp_path: Path) -> None:
    state, globs = CASES[name]
    place = tmp_path / "a store"
    id_ = _commit_of(place, state, globs)
    with browsing(place) as browser:
        found = browser.view(f"commit/{id_}.json")
    for line in found["lines"]:
        _run(line["text"], state, tmp_path)
    lost = {"optimizer/**": ["optimizer"], "optimizer/m": ["optimizer"], "class/**": ["class"]}
    lost |= {"model/**": ["model"], "*": ["model", "optimizer"]}
    assert found["incomplete"] == (lost[globs[0]] if globs else [])
    offered = {line["what"] for line in found["lines"]}
    assert ("Load the weights" in offered) == (name != "thinned wholly")
    assert ("Export" in offered) == (name not in ("thinned wholly", "values"))


def test_a_forgotten_commit_has_the_line_that_brings_it_back(tmp_path: Path) -> None:
    id_ = _commit_of(tmp_path / "s", STATES["plain"], ())
    with ckptstore.open(tmp_path / "s") as store:
        store.forget([id_])
    with browsing(tmp_path / "s") as browser:
        (line,) = browser.view(f"commit/{id_}.json")["lines"]
        _run(line["text"], {}, tmp_path)
        assert not browser.view(f"commit/{id_}.json")["forgotten"]


def test_an_adopted_commit_has_the_line_that_writes_its_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": _tensor()}, source / "model.safetensors")
    with ckptstore.open(tmp_path / "s") as store:
        id_ = store.adopt(source, step=1).id
    with browsing(tmp_path / "s") as browser:
        lines = browser.view(f"commit/{id_}.json")["lines"]
    assert [line["what"] for line in lines] == ["Load the weights", "Write its files"]
    for line in lines:
        _run(line["text"], {}, tmp_path)
    written = tmp_path / "directory" / "model.safetensors"
    assert written.read_bytes() == (source / "model.safetensors").read_bytes()


def test_lines_of_a_store_with_a_database_name_it_without_credentials(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, state = postgres.new_url(), STATES["plain"]
    with ckptstore.open(tmp_path / "s", storage=ckptstore.Storage(index=index)) as store:
        id_ = store.commit(state, step=1).id
    with browsing(StoreHandle(tmp_path / "s", index=index)) as browser:
        lines = browser.view(f"commit/{id_}.json")["lines"]
    monkeypatch.setenv("PGUSER", ROLE)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    monkeypatch.delenv("CKPTSTORE_INDEX", raising=False)
    assert {line["what"] for line in lines} == {"Restore in place", "Load the weights", "Export"}
    for line in lines:
        assert "postgresql://" in line["text"]
        assert ROLE not in line["text"] and PASSWORD not in line["text"]
        _run(line["text"], state, tmp_path)


def test_a_damaged_commit_has_no_line(tmp_path: Path) -> None:
    id_ = _commit_of(tmp_path / "s", STATES["plain"], ())
    for document in (tmp_path / "s" / "commits").rglob("*"):
        if document.is_file():
            os.chmod(document, 0o600)
            document.write_bytes(b"damage")
    with browsing(tmp_path / "s") as browser:
        assert browser.view(f"commit/{id_}.json")["lines"] == []
