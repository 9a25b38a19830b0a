"""A commit records links, such as the run of a tracker: they come back, and are shown."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.objects import canonical
from ckptstore.objects.documents import decode_document, encode_document
from ckptstore.objects.frames import compress, decompress
from ckptstore.snapshot import contents_of
from ckptstore.store import Store

LINKS = {"wandb": "https://wandb.ai/a/b/runs/c", "git": "4f1e"}


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with ckptstore.open(tmp_path / "store") as opened:
        yield opened


def printed(place: Path, *words: str) -> str:
    command = [sys.executable, "-m", "ckptstore", "-s", str(place), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("how", ["commit", "commit_async", "process", "adopt"])
def test_links_come_back_from_every_kind_of_commit(tmp_path: Path, how: str) -> None:
    background = ckptstore.Async(executor="process") if how == "process" else None
    with ckptstore.open(tmp_path / "store", background=background) as store:
        state = {"model": {"w": torch.ones(3)}}
        if how == "commit":
            made = store.commit(state, step=1, links=LINKS)
        elif how == "adopt":
            (tmp_path / "out").mkdir()
            made = store.adopt(tmp_path / "out", step=1, links=LINKS)
        else:
            made = store.commit_async(state, step=1, links=LINKS).wait()
        assert made.links == LINKS
    with ckptstore.open(tmp_path / "store") as store:
        assert store.checkout(1).links == LINKS
        assert store.commit({"a": 1}, step=2).links == {}


def test_commands_show_links(store: Store, tmp_path: Path) -> None:
    place = tmp_path / "store"
    store.commit({"a": 1}, step=1, links=LINKS)
    store.commit({"a": 2}, step=2)
    shown = printed(place, "show", "1")
    assert all(name in shown and link in shown for name, link in LINKS.items())
    assert "Links" not in printed(place, "show", "2")
    assert json.loads(printed(place, "show", "1", "--json"))["commit"]["links"] == LINKS
    commits = json.loads(printed(place, "log", "--json"))["commits"]
    assert [commit["links"] for commit in commits] == [{}, LINKS]
    assert "wandb" in str(store.checkout(1))


def test_the_command_that_adopts_takes_links(store: Store, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    words = [f"--link={name}={link}" for name, link in LINKS.items()]
    printed(tmp_path / "store", "adopt", str(tmp_path / "out"), "--step", "1", *words)
    assert store.checkout(1).links == LINKS
    for wrong in (["--link", "x"], ["--link", "a=1", "--link", "a=2"]):
        with pytest.raises(subprocess.CalledProcessError) as caught:
            printed(tmp_path / "store", "adopt", str(tmp_path / "out"), *wrong)
        assert caught.value.returncode == 2


def test_damage_hides_links_and_nothing_else(store: Store, tmp_path: Path) -> None:
    snapshot = store.commit({"a": 1}, step=1, links=LINKS)
    [document] = (tmp_path / "store" / "commits").glob(f"*{snapshot.id}")
    document.chmod(0o600)
    document.write_bytes(document.read_bytes()[:-3])
    [commit] = json.loads(printed(tmp_path / "store", "log", "--json"))["commits"]
    assert commit["links"] is None and commit["step"] == 1


@pytest.mark.parametrize(
    "links",
    [
        "https://x",
        {"": "x"},
        {"x": ""},
        {"x": 1},
        {1: "x"},
        {"x": "\ud800"},
        {"x" * 201: "y"},
        {"x": "y" * 4097},
        {str(i): "x" for i in range(65)},
    ],
)
def test_what_is_no_link_is_refused_and_nothing_is_committed(store: Store, links: Any) -> None:
    with pytest.raises(InvalidInput, match="link"):
        store.commit({"a": 1}, step=1, links=links)
    assert store.log() == []


def test_a_document_without_links_has_no_such_key(store: Store) -> None:
    """Its bytes, and so its id, are those of versions that knew no links."""
    document = contents_of(store.commit({"a": 1}, step=1)).document
    _, stored = encode_document(document)
    assert "links" not in canonical.decode(decompress(stored, 1 << 20))
    id, stored = encode_document(replace(document, links=tuple(LINKS.items())))
    assert decode_document(stored, id).links == tuple(sorted(LINKS.items()))


def test_damaged_links_in_a_document_are_found(store: Store) -> None:
    document = contents_of(store.commit({"a": 1}, step=1)).document
    fields = canonical.decode(decompress(encode_document(document)[1], 1 << 20))
    for wrong in ([], {"a": 1}, "x", None):
        with pytest.raises(Corrupt, match="links"):
            decode_document(compress(canonical.encode({**fields, "links": wrong})), None)


def test_a_mirror_has_the_links(store: Store, tmp_path: Path) -> None:
    store.commit({"a": 1}, step=1, links=LINKS)
    with ckptstore.clone(tmp_path / "store", tmp_path / "copy") as copy:
        assert copy.checkout(1).links == LINKS
