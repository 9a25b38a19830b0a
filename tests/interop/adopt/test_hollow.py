"""A hollow directory has a pointer in place of its large files, and comes back whole in place."""

import json
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptstore
from ckptstore.cli.call import Exit
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from ckptstore.interop.dcp.names import Name
from ckptstore.objects.pointer_files import HOLLOW_POINTER, Pointer
from ckptstore.plugins.adopt import holds
from ckptstore.plugins.adopt import hollow as hollowing
from ckptstore.plugins.adopt.adoption import make_hollow
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
    assert set(store.tags().values()) == {first.id, second.id}, "a copy may need the first"
    second.materialize(root)
    assert tree_of(root) == again


def only_hold(store: Store, commit: str) -> str:
    (hold,) = (tag for tag, named in store.tags().items() if named == commit)
    return hold


def several(store: Store, parent: Path, *numbers: int) -> list[ckptstore.Snapshot]:
    """Hollow directories beside each other."""
    return [
        store.adopt(checkpoint(parent / f"checkpoint-{i}", i), step=i, hollow=True) for i in numbers
    ]


def test_a_deleted_directory_keeps_its_commit_until_it_is_released(
    store: Store, tmp_path: Path
) -> None:
    made = several(store, tmp_path / "out", 0, 1, 2, 3)
    for number in (0, 1):
        shutil.rmtree(tmp_path / "out" / f"checkpoint-{number}")
    store.forget(ckptstore.KeepLast(1))
    assert {info.id for info in store.log()} == {each.id for each in made}
    first = only_hold(store, made[0].id)
    assert store.release(first) == {first: made[0].id}
    with pytest.raises(NotFound, match="nothing was released"):
        store.release(first)
    wanted = {only_hold(store, made[1].id): made[1].id}
    assert store.release(except_in=tmp_path, dry_run=True) == wanted
    assert store.release(except_in=[tmp_path / "out"]) == wanted
    assert store.release(except_in=tmp_path / "out") == {}
    store.forget(ckptstore.KeepLast(1))
    assert {info.id for info in store.log()} == {each.id for each in made[2:]}


def test_a_directory_that_is_about_to_go_is_released_unless_it_has_a_copy(
    store: Store, tmp_path: Path
) -> None:
    (made,) = several(store, tmp_path / "out", 1)
    root, best = tmp_path / "out" / "checkpoint-1", tmp_path / "out" / "best"
    shutil.copytree(root, best, symlinks=True)
    with pytest.raises(Conflict, match=r"best is a copy of .* nothing was released"):
        store.release(root)
    shutil.rmtree(root)
    assert list(store.release(best).values()) == [made.id]
    assert store.adopt(best, hollow=True).id == made.id
    assert list(store.tags().values()) == [made.id], "a directory that stays is held again"


def test_what_cannot_be_looked_at_counts_as_there(store: Store, tmp_path: Path) -> None:
    several(store, tmp_path / "out", 1, 2)
    before = store.tags()
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match="file system may be away; nothing was released"):
        store.release(except_in=[tmp_path / "out", tmp_path / "empty"])
    with pytest.raises(Unavailable, match="nothing was released"):
        store.release(except_in=[tmp_path / "out", tmp_path / "nowhere"])
    (tmp_path / "out" / "checkpoint-1" / HOLLOW_POINTER).write_text("{")
    with pytest.raises(InvalidInput, match="is no pointer file"):
        store.release(except_in=tmp_path / "out")
    for wrong in ({}, {"except_in": []}):
        with pytest.raises(InvalidInput, match="one or the other"):
            store.release(**wrong)
    assert store.tags() == before


def test_a_release_finds_directories_behind_links(store: Store, tmp_path: Path) -> None:
    several(store, tmp_path / "elsewhere", 1)
    several(store, tmp_path / "out", 2)
    (tmp_path / "out" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "around").symlink_to(tmp_path / "out")
    assert store.release(except_in=tmp_path / "out") == {}


def test_a_directory_that_becomes_hollow_during_a_release_is_held(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several(store, tmp_path / "out", 1)
    late = checkpoint(tmp_path / "out" / "checkpoint-2", 2)
    write = hollowing.write_pointer

    def releasing(path: Path, pointer: Pointer) -> None:
        store.release(except_in=tmp_path / "out")
        write(path, pointer)

    monkeypatch.setattr(hollowing, "write_pointer", releasing)
    made = store.adopt(late, hollow=True)
    assert made.id in store.tags().values()


def fails(out: Path) -> None:
    out.rename(out.with_name("away"))


def collects(out: Path) -> None:
    with ckptstore.open(out.parent / "store") as store:
        for step in (8, 9):
            store.commit({"other": step}, step=step)
        store.forget(ckptstore.KeepLast(1))
        store.gc(grace_s=0)


@pytest.mark.parametrize("meanwhile", [lambda out: os._exit(0), fails, collects])
def test_a_release_that_does_not_end_well_takes_no_hold_of_a_directory_that_is_there(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[Path], None],
) -> None:
    """The directory becomes hollow between the two looks of a release by another process, which
    ends at the second, does not find the folder, or looks while a gc runs."""
    out, write, looked = tmp_path / "out", hollowing.write_pointer, os.pipe()
    hollow, ended = os.pipe(), list[int]()

    def looking(roots: list[Path]) -> set[str]:
        found = look(roots)
        monkeypatch.setattr(holds, "_holds_in", lambda roots: meanwhile(out) or look(roots))
        os.write(looked[1], b"1")
        os.read(hollow[0], 1)
        return found

    def releasing(path: Path, pointer: Pointer) -> None:
        monkeypatch.undo()
        if not (child := os.fork()):
            try:
                monkeypatch.setattr(holds, "_holds_in", looking)
                with ckptstore.open(tmp_path / "store") as other:
                    other.release(except_in=out)
            finally:
                os._exit(0)
        ended.append(child)
        os.read(looked[0], 1)
        write(path, pointer)

    several(store, out, 1)
    late = checkpoint(out / "checkpoint-2", 2)
    look = holds._holds_in
    monkeypatch.setattr(hollowing, "write_pointer", releasing)
    made = store.adopt(late, step=2, hollow=True)
    os.write(hollow[1], b"1")
    os.waitpid(ended[0], 0)
    if not out.exists():
        out.with_name("away").rename(out)
    assert made.id in store.tags().values()
    made.materialize(out / "checkpoint-2")


def test_a_pointer_of_an_older_form_is_given_an_id_and_never_released(
    store: Store, tmp_path: Path
) -> None:
    root = checkpoint(tmp_path / "out" / "checkpoint-1")
    made = store.adopt(root, hollow=True)
    pointer = json.loads((root / HOLLOW_POINTER).read_text())
    hold = pointer.pop("hold")
    (root / HOLLOW_POINTER).write_text(json.dumps(pointer))
    with pytest.raises(NotFound, match="has no id; nothing was released"):
        store.release(root)
    assert store.adopt(root, hollow=True).id == made.id
    again = json.loads((root / HOLLOW_POINTER).read_text())["hold"]
    assert again != hold and set(store.tags()) == {f"held/{hold}", f"held/{again}"}


def test_a_pointer_that_is_written_again_keeps_the_hold(store: Store, tmp_path: Path) -> None:
    first, other = several(store, tmp_path / "out", 1, 2)
    root = tmp_path / "out" / "checkpoint-1"
    before = (root / HOLLOW_POINTER).read_text()
    ckptstore.write_pointer(root, store, first)
    assert (root / HOLLOW_POINTER).read_text() == before
    with pytest.raises(Conflict, match="is a hollow directory of commit"):
        ckptstore.write_pointer(root, store, other)


def test_a_whole_directory_never_keeps_the_pointer_of_an_older_commit(
    store: Store, tmp_path: Path
) -> None:
    root = checkpoint(tmp_path / "checkpoint-5")
    store.adopt(root, hollow=True)
    rewrite(root)
    second = store.adopt(root)
    assert store.checkout(root).id == second.id and (root / "optimizer.pt").exists()


@pytest.mark.parametrize("name", ["held/mine", "held/0123456789abcdef0123456789abcdef"])
def test_no_user_gives_or_takes_the_name_of_a_hold(
    store: Store, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSTORE", store.url)
    made = store.commit({"w": torch.zeros(1)}, step=1, tag="mine")
    for giving in (
        lambda: store.tag(name, made),
        lambda: store.commit({"w": torch.zeros(1)}, tag=name),
        lambda: Name.of(name),
    ):
        with pytest.raises(InvalidInput, match="'held/' keep the commits of hollow directories"):
            giving()
    (hold,) = store.adopt(checkpoint(tmp_path / "checkpoint-5"), hollow=True).tags
    with pytest.raises(Conflict, match=rf"`ckptstore release {hold}`"):
        store.untag(hold)
    assert call("tag", "-d", "mine", hold).code != 0
    assert call("tag", "--rename", hold, "other").code != 0
    assert call("tag", "--rename", "mine", name).code != 0
    assert set(store.tags()) == {"mine", hold}


def lose_what_may_go(store: Store) -> None:
    for step in range(100, 102):
        store.commit({"other": torch.tensor([step])}, step=step)
    store.forget(ckptstore.KeepLast(1))
    store.gc(grace_s=0)


def test_directories_that_a_moving_link_names_are_held(store: Store, tmp_path: Path) -> None:
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


def test_other_bytes_of_the_same_size_and_time_are_never_lost(store: Store, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "checkpoint-5")
    late = root / "adapters" / "a.safetensors"
    before = late.stat()
    made = store.adopt(root, hollow=True)
    other = random.Random(1).randbytes(before.st_size)
    late.write_bytes(other)
    os.utime(late, ns=(before.st_mtime_ns, before.st_mtime_ns))
    with pytest.raises(Unavailable, match=rf"its bytes are not those of commit {made.id[:12]}"):
        store.adopt(root, hollow=True)
    assert late.read_bytes() == other


def test_what_lies_behind_a_link_is_never_removed(store: Store, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "checkpoint-5")
    made = store.adopt(root, step=5)
    (root / "adapters").rename(tmp_path / "mine")
    (root / "adapters").symlink_to(tmp_path / "mine")
    with pytest.raises(Unavailable, match="is a link by now"):
        make_hollow(internals_of(store), root, made)
    assert (tmp_path / "mine" / "a.safetensors").exists() and (root / "optimizer.pt").exists()


def test_a_thinned_commit_takes_no_files(store: Store, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "checkpoint-5")
    store.adopt(root, step=5)
    for step in range(6, 9):
        store.commit({"other": torch.tensor([step])}, step=step)
    store.forget(ckptstore.KeepLast(1).thin("optimizer.pt/**"))
    with pytest.raises(NotFound):
        make_hollow(internals_of(store), root, store.checkout(5))
    assert (root / "optimizer.pt").exists() and not (root / HOLLOW_POINTER).exists()


def test_files_that_changed_are_never_lost(store: Store, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "checkpoint-5")
    made = store.adopt(root, hollow=True)
    (root / "config.json").write_text("mine")
    with pytest.raises(Conflict, match=r"config\.json .* changed after it was adopted"):
        made.materialize(root)
    assert (root / "config.json").read_text() == "mine" and not (root / "optimizer.pt").exists()
    with pytest.raises(Unavailable, match="changed after it was adopted"):
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

    def renaming(source: Any, target: Any, **folders: int) -> None:
        if source == late:
            late.write_text("written at the last moment")
        rename(source, target, **folders)

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
        make_hollow(internals_of(store), directory, store.checkout(made))

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


def test_holds_are_released_by_the_command_line(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSTORE", store.url)
    made = several(store, tmp_path / "out", 1, 2, 3)
    first, second, third = (only_hold(store, each.id) for each in made)
    shutil.rmtree(tmp_path / "out" / "checkpoint-1")
    tried = call("release", "--except-in", str(tmp_path / "out"), "--dry-run", "--json").document
    assert tried["dry_run"] and tried["released"] == {first: made[0].id}
    done = call("release", "--except-in", str(tmp_path / "out"))
    assert done.code == 0 and f"released {first}" in done.out
    again = call("release", "--except-in", str(tmp_path / "out"))
    assert again.code == 0 and again.out == "", "nothing is left to release"
    assert call("release", str(tmp_path / "out" / "checkpoint-2")).code == 0
    assert call("release", third, "--except-in", "x").code == Exit.USAGE
    assert call("release").code == Exit.USAGE
    assert set(store.tags()) == {third} and second != third


def test_a_directory_becomes_hollow_only_in_a_store_that_its_pointer_can_name(
    tmp_path: Path,
) -> None:
    root = checkpoint(tmp_path / "checkpoint")
    with ckptstore.open(f"memory://{tmp_path.name}") as store:
        with pytest.raises(InvalidInput, match="cannot stand in a pointer file"):
            store.adopt(root, hollow=True)
        assert store.log() == []
        assert store.tags() == {}
        assert {str(path.relative_to(root)) for path in root.rglob("*")} >= GONE
