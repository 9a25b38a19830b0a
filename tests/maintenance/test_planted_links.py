"""Links planted at every name of a store, by another user of its folder or by an archive that it
was unpacked from: no operation and no command writes or deletes anything through one."""

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

import ckptstore
from ckptstore import CompactPolicy, KeepLast
from ckptstore.core.ids import new_session_id, session_key
from ckptstore.errors import CkptStoreError
from ckptstore.maintenance.check import Level
from ckptstore.store import Store
from tests.cli.running import call
from tests.maintenance.stores import copy_of, make_store, state

NOT_ALWAYS_THERE = [
    "tmp",
    "quarantine",
    "quarantine/packs",
    f"sessions/{'7' * 24}",
    "log/00",
    "index/state",
    "index/read",
    "index/distrusted",
    "index/distrusted.new",
    "index/distrusted.lock",
    "index/catalog.sqlite-wal",
    "index/catalog.sqlite-shm",
    "index/catalog.sqlite-journal",
    "index/catalog.sqlite.new",
    "index/catalog.sqlite.new-journal",
    "index/catalog.sqlite.lock",
    "index/chunks.lmdb.lock",
    "index/growth.json",
]
"""Names that a store has now and then, besides those that the one of this test has."""

OPERATIONS: dict[str, Callable[[Store, Path], object]] = {
    "commit": lambda store, out: store.commit(state(9), step=9, tag="nine"),
    "commit in the background": lambda store, out: store.commit_async(state(10), step=10).wait(),
    "tag": lambda store, out: store.tag("more"),
    "untag": lambda store, out: store.untag("first"),
    "read": lambda store, out: [store.checkout(i.id).state_dict() for i in store.log()],
    "resume": lambda store, out: store.resume(state(0)),
    "distrust": lambda store, out: [
        store._handle.objects.suspect_packs.add(pack.id)
        for pack in store._handle.log.replay().packs.values()
    ],
    "usage": lambda store, out: store.usage(),
    "sessions": lambda store, out: store.sessions(),
    "adopt": lambda store, out: store.adopt(out / "adopted", step=11),
    "forget": lambda store, out: store.forget([KeepLast(2).thin("optimizer/**")]),
    "compact": lambda store, out: store.compact(CompactPolicy()),
    "gc": lambda store, out: store.gc(grace_s=0, max_unused=0.0),
    "fsck": lambda store, out: store.fsck(Level.DATA),
    "push": lambda store, out: store.push(out / "mirror", create=True),
    "pull": lambda store, out: store.pull(out / "other"),
    "reindex": lambda store, out: store.reindex(),
    "doctor": lambda store, out: store.doctor(),
    "repair": lambda store, out: store.repair(apply=True, read_data="100%"),
}

COMMANDS = [
    ["log", "--all"],
    ["show", "latest"],
    ["ls", "latest", "-l"],
    ["stats"],
    ["tag", "t", "latest"],
    ["sessions"],
    ["doctor"],
    ["forget", "--keep-last", "1"],
    ["compact"],
    ["gc", "--grace", "0s"],
    ["fsck", "--read-data"],
    ["reindex"],
    ["repair", "--apply"],
    ["materialize", "latest", "{out}/tree"],
    ["export", "latest", "{out}/x.safetensors"],
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("whole")
    store = make_store(base / "store", steps=2)
    (store / session_key(new_session_id())).write_bytes(b"left by a killed writer")
    make_store(base / "other", steps=1)
    (base / "adopted").mkdir()
    (base / "adopted" / "notes.txt").write_text("notes")
    return base


def names(store: Path) -> list[str]:
    """One folder and one file of each kind that a store has, and all of `index`."""
    found = sorted(path.relative_to(store).as_posix() for path in store.rglob("*"))
    kinds = {re.sub(r"[0-9a-f]{2,}", "0", name): name for name in found}
    return list(kinds.values())


def seen(folder: Path) -> dict[str, tuple[int, ...] | bytes]:
    """All that lies in `folder`: names, contents, permissions and times of change."""
    found: dict[str, tuple[int, ...] | bytes] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        name = path.relative_to(folder).as_posix()
        found[name] = (status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns)
        if path.is_file() and not path.is_symlink():
            found[f"{name}: bytes"] = path.read_bytes()
    return found


def to_what_was_there(path: Path, outside: Path) -> None:
    path.rename(outside / "moved")
    path.symlink_to(outside / "moved")


def to_another(path: Path, outside: Path) -> None:
    """To a folder for a folder, to a file for a file."""
    if path.is_dir():
        shutil.rmtree(path)
        to_a_folder(path, outside)
    else:
        path.unlink(missing_ok=True)
        to_a_file(path, outside)


def to_a_folder(path: Path, outside: Path) -> None:
    (outside / "home" / "sub").mkdir(parents=True)
    (outside / "home" / "thesis.txt").write_text("precious")
    path.symlink_to(outside / "home")


def to_a_file(path: Path, outside: Path) -> None:
    (outside / "thesis.txt").write_text("precious")
    path.symlink_to(outside / "thesis.txt")


def to_nothing(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "nothing")


def plants(store: Path) -> Iterator[tuple[str, Callable[[Path, Path], None]]]:
    """What is planted, one at a time: a name of the store, and where it leads."""
    yield from itertools.product(names(store), (to_what_was_there, to_another))
    absent = [name for name in NOT_ALWAYS_THERE if not (store / name).exists()]
    yield from zip(absent, itertools.cycle((to_a_folder, to_a_file, to_nothing)), strict=False)


def use(store: Path, out: Path, *, commands: bool) -> Iterator[str]:
    """Everything, each with the store opened anew. Each may refuse, in our words."""
    for name, act in OPERATIONS.items():
        with suppress(CkptStoreError), ckptstore.open(store) as opened:
            act(opened, out)
        yield name
    for words in COMMANDS if commands else ():
        result = call("-s", str(store), *(word.replace("{out}", str(out)) for word in words))
        assert "this should not have happened" not in result.out + result.err, words
        yield words[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_nothing_is_written_or_deleted_through_a_link_in_a_store(
    whole: Path, tmp_path: Path, seed: int, part: int
) -> None:
    """One of five links, other ones in each run, since each costs all operations: the long test
    plants them all."""
    every = list(plants(whole / "store"))
    for number, (name, link) in enumerate(Random(seed).sample(every, len(every) // part)):
        base = tmp_path / str(number)
        shutil.copytree(whole, base)
        outside = base / "outside"
        outside.mkdir()
        (base / "store" / name).parent.mkdir(exist_ok=True)
        link(base / "store" / name, outside)
        before = seen(outside)
        for what in use(base / "store", base, commands=number % 3 == 0):
            assert seen(outside) == before, f"{what} followed {name}"
        shutil.rmtree(base)


def test_a_store_behind_a_link_is_a_store(whole: Path, tmp_path: Path) -> None:
    """Links at and above the store's own folder are its owner's choice."""
    copy_of(whole / "store", tmp_path / "disk" / "a" / "store")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "a")
    (tmp_path / "other").symlink_to("link/store")
    for place in (tmp_path / "link" / "store", tmp_path / "other"):
        with ckptstore.open(place) as store, ckptstore.open(tmp_path / "disk/a/store") as direct:
            commit = store.commit(state(9), step=9)
            assert direct.checkout(commit.id).state_dict().keys() == state(9).keys()
            direct.commit(state(10), step=10)
            assert not store.fsck(Level.DATA).findings


def test_a_linked_folder_is_told_apart_from_an_empty_one(whole: Path, tmp_path: Path) -> None:
    """A log that cannot be seen is no empty log: nothing is appended, and the reason is named."""
    for folder in ("log", "packs", "commits", "sessions"):
        store = copy_of(whole / "store", tmp_path / folder)
        (store / folder).rename(tmp_path / f"{folder} elsewhere")
        (store / folder).symlink_to(tmp_path / f"{folder} elsewhere")
        with (
            pytest.raises(CkptStoreError, match=f"{folder}.*link"),
            ckptstore.open(store) as opened,
        ):
            opened.commit(state(9), step=9)
