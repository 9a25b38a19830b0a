"""What messages say to somebody who is wrong, or only finds nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import Store
from ckptstore.errors import Conflict, InvalidInput, NotFound
from tests.cli.running import call, run_without_privileges


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Steps 5 to 8; step 5 is forgotten."""
    store = ckptstore.open(tmp_path / "store")
    for step in (5, 6, 7, 8):
        store.commit({"w": torch.ones(3), "step": step}, step=step)
    store.forget(5)
    return store


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda store: store.gc(grace_s="1h"), "grace_s is '1h'; wanted a number of seconds"),
        (lambda store: store.gc(grace_s=True), "grace_s is True"),
        (lambda store: store.gc(grace_s=float("nan")), "grace_s is nan"),
        (lambda store: store.gc(max_unused="5%"), "max_unused is '5%'; wanted a share from 0 to 1"),
        (lambda store: store.gc(max_repack_bytes="1G"), "max_repack_bytes is '1G'"),
        (lambda store: store.compact(threads="2"), "threads is '2'"),
        (lambda store: ckptstore.CompactPolicy(newest="2"), "newest is '2'"),  # type: ignore[arg-type]
        (lambda store: ckptstore.CompactPolicy(every=1.5), "every is 1.5"),  # type: ignore[arg-type]
        (lambda store: ckptstore.KeepLast("3"), "keep-last is '3'; wanted at least 1"),  # type: ignore[arg-type]
        (lambda store: ckptstore.KeepWithin("7d"), "keep-within is '7d'"),  # type: ignore[arg-type]
        (lambda store: store.fsck(read_data=-5), "'-5' is no amount|-5 is no amount"),
        (
            lambda store: store.commit({"w": torch.ones(1)}, step=9, metrics={"loss": "0.5"}),
            "metric 'loss' is '0.5'; wanted a number",
        ),
    ],
)
def test_a_number_is_a_number(store: Store, act: Callable[[Any], object], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        act(store)


def test_a_step_of_numpy_names_a_commit_as_it_made_one(store: Store) -> None:
    store.commit({"w": torch.ones(3)}, step=np.int64(9))  # type: ignore[arg-type]
    for ref in (np.int64(9), np.int32(9), torch.tensor(9)):
        assert store.checkout(ref).step == 9  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="is no ref"):
        store.checkout(True)
    with pytest.raises(InvalidInput, match="is no ref"):
        store.checkout(9.0)  # type: ignore[arg-type]


def test_a_forgotten_step_is_told_from_one_that_never_was(store: Store) -> None:
    with pytest.raises(
        NotFound, match=r"step 5 .*is forgotten: `ckptstore undelete main@5` brings"
    ):
        store.checkout(5)
    with pytest.raises(NotFound, match="no commit of step 4 in run 'main'; the nearest"):
        store.checkout(4)
    with pytest.raises(Conflict, match=r"\(step 6 of run main\) is not forgotten: `ckptstore log`"):
        store.undelete(6)


def test_the_name_of_a_run_is_refused_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="'a b' cannot be a run") as caught:
        ckptstore.open(tmp_path / "store", run="a b")
    assert str(caught.value).count("'a b'") == 1
    assert "Value error" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_place_below_a_file_cannot_be_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="a part of that path is a file; choose another path"):
        ckptstore.open(tmp_path / "file" / "store")


def test_a_model_without_memory_is_told_to_get_some(store: Store) -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    store.commit({"model": torch.nn.Linear(2, 2)}, step=10)
    with pytest.raises(InvalidInput, match="materialize it first") as caught:
        store.checkout(10).restore({"model": model})
    assert "fill it" not in str(caught.value)


@pytest.mark.parametrize("words", [("import", "nothing.pt"), ("adopt", "nothing")])
def test_what_is_not_there_is_no_matter_of_usage(store: Store, words: tuple[str, ...]) -> None:
    done = call("-s", store.url, *words)
    assert done.code == 1
    assert "nothing" in done.err


def test_a_push_says_that_a_tag_is_new_there(store: Store, tmp_path: Path) -> None:
    mirror = str(tmp_path / "mirror")
    call("-s", store.url, "push", mirror, "--create")
    store.tag("good", 6)
    commit = store.checkout("good").id[:12]
    assert f"tag good is new there: {commit}" in call("-s", store.url, "push", mirror).out
    store.tag("good", 7)
    other = store.checkout("good").id[:12]
    moved = call("-s", store.url, "push", mirror, "--force").out
    assert f"tag good is {commit} there and {other} here" in moved


def test_a_command_without_the_right_to_write_is_told_of_the_right(
    store: Store, tmp_path: Path
) -> None:
    for folder in (tmp_path / "store").rglob("*"):
        if folder.is_dir() and "index" not in folder.parts:
            folder.chmod(0o555)
    (done,) = run_without_privileges(["-s", store.url, "tag", "good", "6"], home=tmp_path)
    assert done.code == 1
    assert "get the right to write there" in done.err
    for folder in (tmp_path / "store").rglob("*"):
        if folder.is_dir():
            folder.chmod(0o755)
