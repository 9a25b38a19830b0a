"""What a directory has is listed at any depth, and what is read is what was listed."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptstore.errors import NotFound, Unavailable
from ckptstore.plugins.adopt import adopting
from ckptstore.plugins.adopt.directory import list_directory
from ckptstore.store import Store
from tests.interop.adopt.trees import tree_of

DEPTH = 1100


def test_folders_may_lie_in_each_other_at_any_depth(store: Store, tmp_path: Path) -> None:
    place = tmp_path / "d"
    place.mkdir()
    here = os.open(place, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("a", dir_fd=here)
        below = os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    with open(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=here), "w") as file:
        file.write("deep")
    os.close(here)
    try:
        done = store.adopt(place).materialize(tmp_path / "again")
        assert (done.files, done.folders) == (1, DEPTH)
        assert "deep" in (tmp_path / "again" / "/".join("a" * DEPTH) / "f").read_text()
    finally:  # which Python itself cannot remove at this depth
        subprocess.run(["rm", "-r", place, tmp_path / "again"], check=True)


def replaced(path: Path) -> None:
    """Put a link to something of another person in the place of a file or a directory."""
    path.rename(path.with_name("moved"))
    path.symlink_to(path.parent.parent / "secret" / path.name)


def twin(path: Path) -> None:
    """Put another file or directory in the place of one."""
    path.rename(path.with_name("moved"))
    (path.parent.parent / "secret" / path.name).rename(path)


@pytest.mark.parametrize("change", [replaced, twin])
@pytest.mark.parametrize("name", ["a.bin", "sub"])
@pytest.mark.parametrize("hollow", [False, True])
def test_nothing_is_read_through_what_takes_the_place_of_what_was_listed(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    name: str,
    hollow: bool,
) -> None:
    place = tmp_path / "d"
    for root, text in ((tmp_path / "secret", "secret"), (place, "listed")):
        (root / "sub").mkdir(parents=True)
        for file in ("a.bin", "sub/b.bin"):
            (root / file).write_text(text)
    listed: list[Any] = []

    def listing(root: Path) -> Any:
        found = list_directory(root)
        if not listed:
            change(place / name)
        listed.append(found)
        return found

    monkeypatch.setattr(adopting, "list_directory", listing)
    made = store.adopt(place, hollow=hollow)
    assert len(listed) == 2, "the first listing was of other things"
    made.materialize(tmp_path / "again")
    found = {key: each[2] for key, each in tree_of(tmp_path / "again").items()}
    if change is replaced:
        assert found[name] == tmp_path / "secret" / name
        assert b"secret" not in found.values()
    assert (place / "moved").exists()


def test_a_directory_that_becomes_a_link_while_it_is_listed_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret" / "sub").mkdir(parents=True)
    (tmp_path / "secret" / "sub" / "b").write_text("secret")
    (tmp_path / "d" / "sub").mkdir(parents=True)
    opened = os.open

    def opening(path: Any, *given: Any, **named: Any) -> int:
        if str(path).endswith("d/sub") and not (tmp_path / "d" / "sub").is_symlink():
            replaced(tmp_path / "d" / "sub")
        return opened(path, *given, **named)

    monkeypatch.setattr(os, "open", opening)
    with pytest.raises(Unavailable, match=r"cannot read .*sub"):
        store.adopt(tmp_path / "d")
    assert store.log() == []


def test_a_link_to_a_directory_is_adopted_as_that(store: Store, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    (tmp_path / "latest").symlink_to("d")
    assert [leaf.path for leaf in store.adopt(tmp_path / "latest").leaves()] == [
        "files/f",
        "manifest",
    ]
    with pytest.raises(NotFound, match="there is no directory"):
        store.adopt(tmp_path / "nowhere")
