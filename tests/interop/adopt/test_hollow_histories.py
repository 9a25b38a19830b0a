"""Random histories of hollow directories: they are renamed, moved, copied, deleted, written to and
released, on two file systems, beside forget and gc. Whatever a directory that is there needs, its
commit has.

The file systems are two tmpfs, whose roots have one inode number, where the tests run as root.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import ckptstore
from ckptstore.adopt.hashed_files import FileChanged
from ckptstore.errors import CkptStoreError, Conflict
from ckptstore.objects.pointer_files import HOLLOW_POINTER, read_pointer
from ckptstore.store import Store
from tests.support.mounts import small_disk

HISTORIES = int(os.environ.get("CKPTSTORE_TEST_HISTORIES", "12"))
STEPS = 40
NAMES = ("ckpt-1", "ckpt-2", "ckpt-3", "best", "latest")
FILES = ("w.safetensors", "optimizer.safetensors", "state.json")

Content = dict[str, bytes]


class World:
    """Directories, and the bytes that each should have or get back, by name."""

    def __init__(self, seed: int, store: Store, disks: list[Path], scratch: Path) -> None:
        self.random, self.store, self.disks, self.scratch = (
            random.Random(seed),
            store,
            disks,
            scratch,
        )
        self.wanted: dict[Path, Content] = {}
        self.told: list[str] = []
        self.step = 0

    def act(self) -> None:
        weights: dict[Callable[[], None], int] = {
            self.save: 6,
            self.adopt: 8,
            self.move: 4,
            self.copy: 4,
            self.delete: 2,
            self.write_alike: 3,
            self.write_again: 2,
            self.materialize: 2,
            self.release: 2,
            self.collect: 5,
        }
        acting = self.random.choices(list(weights), list(weights.values()))[0]
        self.told.append(acting.__name__)
        acting()

    def place(self) -> Path:
        return self.random.choice(self.disks) / self.random.choice(NAMES)

    def some(self) -> Path | None:
        return self.random.choice(sorted(self.wanted)) if self.wanted else None

    def tell(self, *paths: Path) -> None:
        self.told[-1] += " " + " ".join(str(path.relative_to(self.scratch)) for path in paths)

    def bytes_of(self, name: str) -> bytes:
        value = self.random.getrandbits(31)
        if name.endswith(".json"):
            return f"{value:010}".encode()
        return save({"w": torch.full((40,), value, dtype=torch.int64)})

    def save(self) -> None:
        if (root := self.place()) not in self.wanted:
            self.tell(root)
            root.mkdir()
            self._write(root)

    def _write(self, root: Path) -> None:
        self.wanted[root] = {name: self.bytes_of(name) for name in FILES}
        for name, data in self.wanted[root].items():
            (root / name).write_bytes(data)

    def adopt(self) -> None:
        if root := self.some():
            self.tell(root)
            self.step += 1
            with suppress(FileChanged):  # one that was written to a hollow directory
                self.store.adopt(root, hollow=True, step=self.step)

    def move(self) -> None:
        if (root := self.some()) and root != (target := self.place()):
            self.tell(root, target)
            self._remove(target)
            shutil.move(root, target)
            self.wanted[target] = self.wanted.pop(root)

    def copy(self) -> None:
        """As cp -a does, which keeps all times."""
        if (root := self.some()) and root != (target := self.place()):
            self.tell(root, target)
            self._remove(target)
            shutil.copytree(root, target, symlinks=True)
            self.wanted[target] = dict(self.wanted[root])

    def delete(self) -> None:
        if root := self.some():
            self.tell(root)
            self._remove(root)

    def _remove(self, root: Path) -> None:
        if self.wanted.pop(root, None) is not None:
            shutil.rmtree(root)

    def write_alike(self) -> None:
        """Write other bytes to a file, and give it the size and the time of its commit, if the
        directory is hollow, else those that it had."""
        if root := self.some():
            name = self.random.choice(FILES)
            self.tell(root / name)
            time = 10**18
            if (root / name).exists():
                time = (root / name).stat().st_mtime_ns
            else:
                again = self.again(root)
                time = (again / name).stat().st_mtime_ns
                shutil.rmtree(again)
            self.wanted[root][name] = self.bytes_of(name)
            (root / name).write_bytes(self.wanted[root][name])
            os.utime(root / name, ns=(time, time))

    def write_again(self) -> None:
        if root := self.some():
            self.tell(root)
            self._write(root)

    def materialize(self) -> None:
        root = self.some()
        if root and (root / HOLLOW_POINTER).exists():
            self.tell(root)
            with suppress(Conflict):  # a file was written to it
                self.store.checkout(root).materialize(root)

    def release(self) -> None:
        if not hasattr(self.store, "release"):
            return
        folders = [disk for disk in self.disks if any(disk.glob(f"*/{HOLLOW_POINTER}"))]
        if folders:
            self.store.release(except_in=folders)
        root = self.some()
        if root and (root / HOLLOW_POINTER).exists() and self.random.random() < 0.3:
            hold = read_pointer(root).hold
            others = [path for path in self.wanted if path != root]
            if all(not is_hollow(path) or read_pointer(path).hold != hold for path in others):
                self.tell(root)
                self.store.release(root)
                self._remove(root)

    def collect(self) -> None:
        for _ in range(2):
            self.step += 1
            self.store.commit({"other": self.step}, step=self.step)
        self.store.forget(ckptstore.KeepLast(2))
        self.store.gc(grace_s=0)
        self.check()

    def again(self, root: Path) -> Path:
        """What the commit of a hollow directory has, as a directory."""
        target = self.scratch / "again"
        self.store.checkout(root).materialize(target)
        return target

    def check(self) -> None:
        for root, wanted in self.wanted.items():
            lacking = {name for name in wanted if not (root / name).exists()}
            for name in wanted.keys() - lacking:
                assert (root / name).read_bytes() == wanted[name], f"{root / name} differs"
            if lacking:
                again = self.again(root)
                for name in lacking:
                    assert (again / name).read_bytes() == wanted[name], f"{root / name} differs"
                shutil.rmtree(again)


def is_hollow(root: Path) -> bool:
    return (root / HOLLOW_POINTER).exists()


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Path]]:
    places = [tmp_path / "a", tmp_path / "b"]
    with ExitStack() as stack:
        for place in places:
            if os.geteuid() == 0:
                stack.enter_context(small_disk(place, size_bytes=16 << 20))
            else:
                place.mkdir()
        yield places


@pytest.mark.parametrize("number", range(HISTORIES))
def test_no_history_loses_what_a_directory_needs(
    tmp_path: Path, disks: list[Path], seed: int, number: int
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        world = World(seed + number, store, disks, tmp_path)
        try:
            for _ in range(STEPS):
                world.act()
            world.collect()
        except (AssertionError, CkptStoreError) as error:
            raise AssertionError(f"{error}, after\n  " + "\n  ".join(world.told)) from error
