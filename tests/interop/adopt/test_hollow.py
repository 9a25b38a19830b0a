"""A hollow directory has a pointer in place of its large files, and comes back whole in place."""

import os
import random
import shutil
import signal
import socket
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptstore
from ckptstore.adoption import Holds, make_hollow
from ckptstore.cli.call import Exit
from ckptstore.errors import Conflict, Corrupt, InvalidInput, Unavailable
from ckptstore.objects.pointer_files import HOLLOW_POINTER
from ckptstore.store import Store, internals_of
from tests.cli.running import call
from tests.interop.adopt.trees import Tree, hugging_face, tree_of

pytestmark = pytest.mark.pickles  # the tests write pickles, and reach none from ckptstore

GONE = {
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "training_args.bin",
    "adapters/a.safetensors",
    "events.log",
}


def checkpoint(root: Path, seed: int = 0) -> Path:
    """A checkpoint directory with folders, a link, a large JSON file and a large log."""
    hugging_face(root, root.parent / "ran", seed=seed)
    (root / "adapters").mkdir()
    save_file({"w": torch.full((400,), float(seed))}, root / "adapters" / "a.safetensors")
    (root / "adapters" / "a.json").write_text("{}")
    (root / "latest").symlink_to("model.safetensors")
    (root / "tokenizer.json").write_text("[" + "1," * (1 << 20) + "1]")
    (root / "events.log").write_bytes(random.Random(seed).randbytes(1 << 20))
    os.chmod(root / "model.safetensors", 0o640)
    for number, path in enumerate((root / "adapters", root)):
        os.utime(path, ns=(10**18 + number, 10**18 + number))
    return root


def rewrite(root: Path) -> None:
    """Save another state into the directory, as a trainer does."""
    other = checkpoint(root.parent / "other", seed=7)
    (root / "latest").unlink()
    shutil.copytree(other, root, dirs_exist_ok=True, symlinks=True)
    shutil.rmtree(other)


def test_a_hollow_directory_keeps_small_files_and_gets_the_others_back(
    store: Store, tmp_path: Path
) -> None:
    root = checkpoint(tmp_path / "checkpoint-5")
    before = tree_of(root)
    made = store.adopt(root, step=5, hollow=True)
    hollow = tree_of(root)
    assert before.keys() - hollow.keys() == GONE
    assert hollow.keys() - before.keys() == {HOLLOW_POINTER}
    assert all(hollow[name] == before[name] for name in before.keys() & hollow.keys())
    assert store.checkout(root).id == made.id and made.id in store.tags().values()
    with ckptstore.open_pointer(root) as pointed:
        assert pointed.id == made.id
    done = store.checkout(root).materialize(root)
    assert tree_of(root) == before and done.path == root


def test_only_the_pointer_and_leftovers_are_no_content(store: Store, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "checkpoint-5")
    (root / f"{HOLLOW_POINTER}.bak").write_text("mine")
    (root / "adapters" / HOLLOW_POINTER).write_text("mine, too")
    before = tree_of(root)
    left = root / f".{HOLLOW_POINTER}-0123456789ab"
    left.mkdir()
    (left / "0").write_text("of a process that was killed")
    made = store.adopt(root)
    made.materialize(tmp_path / "again")
    assert {name: each[2] for name, each in tree_of(tmp_path / "again").items()} == {
        name: each[2] for name, each in before.items()
    }


def test_some_files_come_back_and_the_directory_stays_hollow(store: Store, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "checkpoint-5")
    before = tree_of(root)
    made = store.adopt(root, hollow=True)
    made.materialize(root, select="model*")
    found = tree_of(root)
    assert before.keys() - found.keys() == GONE - {"model.safetensors"}
    assert found[HOLLOW_POINTER] and found["model.safetensors"] == before["model.safetensors"]
    made.materialize(root)
    assert tree_of(root) == before


def test_a_hollow_directory_is_not_adopted_as_it_is(store: Store, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "checkpoint-5")
    made = store.adopt(root, hollow=True)
    with pytest.raises(InvalidInput, match=r"is hollow: commit .* `ckptstore materialize"):
        store.adopt(root)
    assert store.adopt(root, hollow=True).id == made.id
    assert len(store.log()) == 1


def test_a_program_may_save_into_a_hollow_directory_again(store: Store, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "checkpoint-5")
    first = store.adopt(root, hollow=True)
    rewrite(root)
    again = tree_of(root)
    del again[HOLLOW_POINTER]
    second = store.adopt(root, hollow=True)
    assert second.id != first.id and store.checkout(root).id == second.id
    assert list(store.tags().values()) == [second.id]
    second.materialize(root)
    assert tree_of(root) == again


def test_the_commit_of_a_directory_that_was_deleted_can_be_forgotten(
    store: Store, tmp_path: Path
) -> None:
    made = [
        store.adopt(checkpoint(tmp_path / f"checkpoint-{i}", i), step=i, hollow=True)
        for i in range(4)
    ]
    odd = store.adopt(checkpoint(tmp_path / "epoch=1 (best)", 8), step=4, hollow=True)
    shutil.rmtree(tmp_path / "checkpoint-0")
    shutil.rmtree(tmp_path / "checkpoint-1")
    last = store.adopt(checkpoint(tmp_path / "checkpoint-5", 9), step=5, hollow=True)
    held = {snapshot.id for snapshot in (*made[2:], odd, last)}
    assert set(store.tags().values()) == held
    store.forget(ckptstore.KeepLast(1))
    assert {info.id for info in store.log()} == held
    for name in ("checkpoint-2", "epoch=1 (best)"):
        store.checkout(tmp_path / name).materialize(tmp_path / name)


def lose_what_may_go(store: Store) -> None:
    for step in range(100, 102):
        store.commit({"other": torch.tensor([step])}, step=step)
    store.forget(ckptstore.KeepLast(1))
    store.gc(grace_s=0)


def test_directories_of_one_path_on_two_machines_lose_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers have the same paths. Each sees only its own directories."""
    there, here = tmp_path / "out", {}
    for host, names in (("one", (1, 2)), ("two", (2, 3)), ("one", (4,))):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        if host in here:
            (tmp_path / host).rename(there)
        for number in names:
            root = checkpoint(there / f"checkpoint-{number}", number + 10 * (host == "two"))
            here.setdefault(host, {})[root.name] = tree_of(root)
            store.adopt(root, hollow=True)
        there.rename(tmp_path / host)
    lose_what_may_go(store)
    for host, trees in here.items():
        for name, before in trees.items():
            store.checkout(tmp_path / host / name).materialize(tmp_path / host / name)
            assert tree_of(tmp_path / host / name) == before


def test_directories_that_were_moved_together_are_held_as_before(
    store: Store, tmp_path: Path
) -> None:
    made = [
        store.adopt(checkpoint(tmp_path / "out" / f"checkpoint-{i}", i), hollow=True)
        for i in range(3)
    ]
    moved = (tmp_path / "out").rename(tmp_path / "kept")
    again = store.adopt(checkpoint(tmp_path / "out" / "checkpoint-0", 5), hollow=True)
    assert set(store.tags().values()) == {again.id, *(each.id for each in made)}
    shutil.rmtree(moved / "checkpoint-1")
    last = store.adopt(checkpoint(moved / "checkpoint-3", 6), hollow=True)
    assert set(store.tags().values()) == {again.id, made[0].id, made[2].id, last.id}


def test_directories_that_a_moving_link_names_are_held_while_they_are_there(
    store: Store, tmp_path: Path
) -> None:
    """A link such as `latest` leads to another directory when the next is adopted."""
    latest, before = tmp_path / "latest", {}
    for number in range(3):
        root = checkpoint(tmp_path / "out" / f"checkpoint-{number}", number)
        before[root] = tree_of(root)
        latest.unlink(missing_ok=True)
        latest.symlink_to(root)
        store.adopt(latest, hollow=True)
    lose_what_may_go(store)
    for root, tree in before.items():
        store.checkout(root).materialize(root)
        assert tree_of(root) == tree


def test_a_training_that_begins_with_a_copy_takes_no_tags_from_the_first(
    store: Store, tmp_path: Path
) -> None:
    before = {}
    for number in range(4):
        root = checkpoint(tmp_path / "out" / f"checkpoint-{number}", number)
        before[root] = tree_of(root)
        store.adopt(root, hollow=True)
    (tmp_path / "fork").mkdir()
    subprocess.run(["cp", "-r", tmp_path / "out" / "checkpoint-2", tmp_path / "fork"], check=True)
    store.adopt(checkpoint(tmp_path / "fork" / "checkpoint-3", 5), hollow=True)
    lose_what_may_go(store)
    for root, tree in before.items():
        store.checkout(root).materialize(root)
        assert tree_of(root) == tree


def test_a_training_and_its_copy_that_both_go_on_keep_their_directories(
    store: Store, tmp_path: Path
) -> None:
    """A copy has the times of the original. The first training then deletes what both had."""
    first, fork = tmp_path / "out", tmp_path / "fork"
    for number in range(3):
        store.adopt(checkpoint(first / f"checkpoint-{number}", number), hollow=True)
    subprocess.run(["cp", "-a", first, fork], check=True)
    for number, place in ((3, fork), (3, first), (4, fork)):
        root = checkpoint(place / f"checkpoint-{number}", number + 10 * (place == first))
        store.adopt(root, hollow=True)
    for number in range(2):
        shutil.rmtree(first / f"checkpoint-{number}")
    store.adopt(checkpoint(first / "checkpoint-4", 20), hollow=True)
    lose_what_may_go(store)
    for place, numbers in ((first, (2, 3, 4)), (fork, range(5))):
        for number in numbers:
            root = place / f"checkpoint-{number}"
            store.checkout(root).materialize(root)
            seed = number + 10 * (place == first) * (number == 3)
            if (place, number) != (first, 4):
                assert (root / "events.log").read_bytes() == random.Random(seed).randbytes(1 << 20)


def test_the_hold_of_a_path_is_another_on_another_machine(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "out" / "checkpoint-1"
    mine = Holds(internals_of(store), root.parent).tag(root)
    assert mine == Holds(internals_of(store), root.parent).tag(root)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert Holds(internals_of(store), root.parent).tag(root) != mine


def test_nothing_is_gone_while_the_file_system_is_away(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = store.adopt(checkpoint(out / "checkpoint-1"), hollow=True)
    holds = Holds(internals_of(store), out)
    out.rename(tmp_path / "away")
    for mount_point in (lambda: None, out.mkdir):
        mount_point()
        holds.renew()
        Holds(internals_of(store), out).renew()
        assert list(store.tags().values()) == [made.id]


def test_files_that_changed_are_never_lost(store: Store, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "checkpoint-5")
    made = store.adopt(root, hollow=True)
    (root / "config.json").write_text("mine")
    with pytest.raises(Conflict, match=r"config\.json .* changed after it was adopted"):
        made.materialize(root)
    assert (root / "config.json").read_text() == "mine" and not (root / "optimizer.pt").exists()
    with pytest.raises(Unavailable, match="changed"):
        store.adopt(root, hollow=True)
    other = store.adopt(checkpoint(tmp_path / "checkpoint-6", 1))
    with pytest.raises(Conflict, match="is a hollow directory of commit"):
        other.materialize(root)


def test_what_has_taken_the_place_of_a_link_is_never_lost(store: Store, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "checkpoint-5")
    made = store.adopt(root, hollow=True)
    (root / "latest").unlink()
    (root / "latest").write_text("mine")
    with pytest.raises(Conflict, match=r"latest in .* changed after it was adopted"):
        made.materialize(root)
    assert (root / "latest").read_text() == "mine" and not (root / "optimizer.pt").exists()
    (root / "latest").unlink()
    made.materialize(root)
    assert (root / "latest").readlink() == Path("model.safetensors")


def test_a_file_that_changes_while_the_directory_becomes_hollow_stays(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = checkpoint(tmp_path / "checkpoint-5")
    rename, late = os.rename, root / "optimizer.pt"

    def renaming(source: Any, target: Any) -> None:
        if source == late:
            late.write_text("written at the last moment")
        rename(source, target)

    monkeypatch.setattr(os, "rename", renaming)
    with pytest.raises(Unavailable, match=r"optimizer\.pt changed"):
        store.adopt(root, hollow=True)
    assert late.read_text() == "written at the last moment"


def test_a_damaged_commit_leaves_the_directory_whole(store: Store, tmp_path: Path) -> None:
    store.adopt(checkpoint(tmp_path / "checkpoint-5"))
    for pack in (tmp_path / "store" / "packs").rglob("*"):
        if pack.is_file() and pack.stat().st_size > 100_000:
            pack.chmod(0o600)
            data = bytearray(pack.read_bytes())
            data[1000] ^= 1
            pack.write_bytes(data)
    root = checkpoint(tmp_path / "checkpoint-6")
    before = tree_of(root)
    with pytest.raises(Corrupt):
        store.adopt(root, hollow=True)
    assert tree_of(root) == before
    made = store.adopt(root, hollow=True)  # what was seen damaged was written again
    made.materialize(root)
    assert tree_of(root) == before


def test_a_pointer_to_another_store_is_told(store: Store, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "checkpoint-5")
    store.adopt(root, hollow=True)
    with (
        ckptstore.open(tmp_path / "elsewhere") as other,
        pytest.raises(InvalidInput, match="which is not in"),
    ):
        other.adopt(root)


CHANGES = ("rename", "replace", "unlink", "mkdir", "rmdir", "utime", "chmod", "symlink", "fsync")


@contextmanager
def killed_at(number: int) -> Iterator[None]:
    """Die by SIGKILL just before the change of a file or directory that has this number."""
    left = [number]

    def deadly(change: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*args, **options)

        return wrapped

    for name in CHANGES:
        setattr(os, name, deadly(getattr(os, name)))
    yield


def survives(place: Path, root: Path, number: int, act: Callable[[Store, Path], object]) -> bool:
    """Whether a process of its own that acts on the directory outlives so many changes."""
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        return code == 0
    code = 1
    try:
        with ckptstore.open(place) as store, killed_at(number):
            act(store, root)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


@pytest.mark.parametrize("becomes", ["hollow", "whole"])
def test_a_directory_is_whole_or_has_a_durable_commit_wherever_it_is_killed(
    tmp_path: Path, becomes: str
) -> None:
    root, place, copy = tmp_path / "checkpoint-5", tmp_path / "store", tmp_path / "copy"
    before = tree_of(checkpoint(root))
    with ckptstore.open(place) as store:
        made = store.adopt(root).id

    def hollow(store: Store, directory: Path) -> None:
        holds = Holds(internals_of(store), directory.parent)
        make_hollow(internals_of(store), directory, store.checkout(made), holds)

    def fill(store: Store, directory: Path) -> None:
        store.checkout(directory).materialize(directory)

    if becomes == "whole":
        assert survives(place, root, 10_000, hollow)
    shutil.copytree(root, copy, symlinks=True)
    number, in_between = random.Random(os.environ["CKPTSTORE_TEST_SEED"]).randrange(3), 0
    while not survives(place, root, number, hollow if becomes == "hollow" else fill):
        found = {name: each for name, each in tree_of(root).items() if HOLLOW_POINTER not in name}
        assert all(found[name][2] == before[name][2] for name in found)
        if (root / HOLLOW_POINTER).exists():
            in_between += 1
            assert survives(place, root, 10_000, fill)
            assert tree_of(root) == before
        else:
            assert found.keys() == before.keys()
        shutil.rmtree(root)
        shutil.copytree(copy, root, symlinks=True)
        number += 3  # and the other places in other runs
    assert in_between > 5, f"killed at {number // 3} places, {in_between} with a pointer"


def test_hollow_and_whole_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptstore.open(tmp_path / "store").close()
    root = checkpoint(tmp_path / "out" / "checkpoint-5")
    before: Tree = tree_of(root)
    monkeypatch.setenv("CKPTSTORE", str(tmp_path / "store"))
    made = call("adopt", str(root), "--hollow", "--step", "5", "--json").document
    assert made["hollow"] and set(before) - set(tree_of(root)) == GONE
    done = call("materialize", str(root), "--json").document
    assert done["commit"] == made["commit"] and tree_of(root) == before
    wrong = call("materialize", "latest")
    assert wrong.code == Exit.USAGE and "name the directory" in wrong.err
