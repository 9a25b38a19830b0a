"""What cannot be read is not damage, and a source of a repair that is not there ends it before
anything is done."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import ckptstore
from ckptstore.cli.call import Exit
from ckptstore.core.ids import log_key
from ckptstore.errors import NotFound
from tests.cli.running import Result, call, run_without_privileges
from tests.maintenance.stores import copy_of, files, flip, large_state, make_store


@pytest.fixture(scope="module")
def large_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("large") / "store", states=large_state)


@pytest.fixture
def damaged(large_template: Path, tmp_path: Path) -> Path:
    """A store whose largest pack has one flipped bit that nobody has read yet, and its mirror."""
    store = copy_of(large_template, tmp_path / "store")
    copy_of(store, tmp_path / "mirror")
    flip(largest(store), 1000)
    return store


def largest(store: Path) -> Path:
    return max(files(store, "packs"), key=lambda path: (path.stat().st_size, path.name))


def listing(store: Path) -> list[str]:
    """Every object but the indexes."""
    return [
        str(path.relative_to(store))
        for path in sorted(store.rglob("*"))
        if path.is_file() and "index" not in path.relative_to(store).parts
    ]


@pytest.mark.parametrize("name", ["mirrorr", "empty"])
def test_nothing_is_done_before_every_named_source_was_found(damaged: Path, name: str) -> None:
    wrong, right = damaged.parent / name, damaged.parent / "mirror"
    if name == "empty":
        wrong.mkdir()
    before = listing(damaged)
    sources = ("--from", str(right), "--from", str(wrong))
    for words in (("repair",), ("repair", "--read-data", "--apply")):
        done = call("-s", str(damaged), *words, *sources)
        assert done.code == Exit.NO_STORE
        assert str(wrong) in done.err
        assert "nothing was done" in done.err
    assert (f"did you mean {right}?" in done.err) == (name == "mirrorr")
    with (
        ckptstore.open(damaged) as store,
        pytest.raises(NotFound, match=f"{name}.*nothing was done"),
    ):
        store.repair(right, wrong, apply=True, read_data="100%")
    assert listing(damaged) == before
    assert call("-s", str(damaged), "repair", "--read-data", "--apply", *sources[:2]).code == 0


def test_packs_alone_are_a_source(damaged: Path) -> None:
    (damaged.parent / "mirror" / "ckptstore.json").unlink()
    words = ("repair", "--read-data", "--apply", "--from", str(damaged.parent / "mirror"))
    assert call("-s", str(damaged), *words).code == 0


def test_a_repair_that_has_read_no_data_says_so(damaged: Path) -> None:
    done = call("-s", str(damaged), "repair")
    assert done.code == 0
    assert "there is nothing to repair in what was looked at" in done.out
    assert "no data was read: `ckptstore repair --read-data` reads " in done.out
    some = call("-s", str(damaged), "repair", "--read-data=1K")
    assert "no data was read" not in some.out
    shutil.rmtree(damaged)
    shutil.copytree(damaged.parent / "mirror", damaged)
    whole = call("-s", str(damaged), "repair", "--read-data")
    assert whole.out == "there is nothing to repair\n"


def as_somebody(store: Path, *lines: Sequence[str]) -> list[Result]:
    """Command lines on the store, one after the other, in one process."""
    return run_without_privileges(
        *(["-s", str(store), *words] for words in lines), home=store.parent
    )


@pytest.mark.parametrize("of", ["tensors", "metadata", "document"])
def test_what_somebody_may_not_read_is_no_damage(
    large_template: Path, tmp_path: Path, of: str
) -> None:
    """One pack of another user is not readable in a shared store: no commit is marked."""
    store = copy_of(large_template, tmp_path / "store")
    shut = {
        "tensors": [largest(store)],
        "metadata": [p for path in files(store, "packs", ".2")[-1:] for p in twins(path)],
        "document": files(store, "commits")[-1:],
    }[of]
    assert call("-s", str(store), "fsck", "--read-data").code == 0
    before = listing(store)
    for path in shut:
        path.chmod(0)
    lines = (("fsck",), ("fsck", "--read-data"), ("repair",), ("repair", "--apply"))
    *all_seen, told = as_somebody(store, *lines, ("--json", "fsck"))
    for words, seen in zip(lines, all_seen, strict=True):
        assert seen.code == Exit.DAMAGED, (words, seen)  # partial
        assert "unread: " in seen.out
        assert "damage: " not in seen.out
        assert "cannot be restored whole" not in seen.out
        assert "Permission denied" in seen.out
    assert not told.document["damaged"]
    assert told.document["damaged_commits"] == []
    assert {each["severity"] for each in told.document["findings"]} == {"unread"}
    assert listing(store) == before
    for path in shut:
        path.chmod(0o644)
    assert call("-s", str(store), "fsck", "--read-data").code == 0


def twins(path: Path) -> list[Path]:
    return [path, path.with_name(path.name.removesuffix(".2"))]


def test_marks_stay_while_something_is_unread(large_template: Path, tmp_path: Path) -> None:
    """A commit that is damaged stays marked when the damaged object cannot be read."""
    store = copy_of(large_template, tmp_path / "store")
    flip(largest(store), 1000)
    assert call("-s", str(store), "repair", "--read-data", "--apply").code == Exit.DAMAGED
    marked = call("-s", str(store), "--json", "fsck").document["damaged_commits"]
    entries = len(files(store, "log"))
    sound = max(files(store, "packs"), key=lambda path: path.stat().st_size)
    sound.chmod(0)
    (seen,) = as_somebody(store, ("repair", "--apply"))
    assert "unread: " in seen.out
    assert "marks of damaged commits" not in seen.out
    assert len(marked) == 1
    assert len(files(store, "log")) == entries


def test_an_entry_of_the_log_that_cannot_be_read_is_not_written_anew(
    large_template: Path, tmp_path: Path
) -> None:
    store = copy_of(large_template, tmp_path / "store")
    mirror = copy_of(store, tmp_path / "mirror")
    before = listing(store)
    (store / log_key(2)).chmod(0)
    lines = (("fsck",), ("repair", "--apply", "--from", str(mirror)))
    for seen in as_somebody(store, *lines):
        assert seen.code == Exit.FAILED
        assert "Permission denied" in seen.err
    assert listing(store) == before


def test_a_source_that_may_not_be_read_keeps_the_pack_here(damaged: Path) -> None:
    mirror, before = damaged.parent / "mirror", listing(damaged)
    (mirror / largest(damaged).relative_to(damaged)).chmod(0)
    (done,) = as_somebody(damaged, ("repair", "--read-data", "--apply", "--from", str(mirror)))
    assert "quarantine" not in done.out
    assert done.code == Exit.DAMAGED
    packs = [key for key in listing(damaged) if key.startswith(("packs/", "quarantine/"))]
    assert packs == [key for key in before if key.startswith(("packs/", "quarantine/"))]
