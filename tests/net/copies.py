"""Directories of a training, hollow or not, that are copied, moved, linked, deleted and written to
on two file systems, of which one is mounted twice; and a store that is copied, moved, replaced by
its copy, opened by another path, and gets older copies of its index and caches.

Directories lie as trainers write them: outputs with checkpoints in them. Whatever a directory that
is there needs, its commit has.
"""

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

import ckptstore
from ckptstore.objects.pointer_files import HOLLOW_POINTER, read_pointer
from ckptstore.plugins.adopt.hashed_files import FileChanged
from tests.net.registry import Operation
from tests.support.mounts import (
    second_mount,
    shared_directory_problem,
    small_disk,
    small_disk_problem,
)

OUTPUTS = ("out", "old run")
NAMES = ("checkpoint-1", "checkpoint-2", "checkpoint-3")
FILES = ("w.safetensors", "optimizer.safetensors", "state.json")
STORES = ("store", "moved/store")

Content = dict[str, bytes]


@dataclass(frozen=True)
class Disks:
    """Folders, and other paths that lead to the same: each is a file system of its own, mounted
    once more, where disks can be mounted, and else a folder."""

    folders: tuple[Path, ...]
    again: dict[Path, Path]

    def inside(self, name: str) -> "Disks":
        """A folder of that name in each."""
        for folder in self.folders:
            (folder / name).mkdir()
        return Disks(
            tuple(folder / name for folder in self.folders),
            {folder / name: other / name for folder, other in self.again.items()},
        )

    def alias(self, path: Path) -> Path:
        """Another path of `path`, or itself."""
        for folder, other in self.again.items():
            if path.is_relative_to(folder):
                return other / path.relative_to(folder)
        return path


@contextmanager
def mounted(scratch: Path) -> Iterator[Disks]:
    """Three disks: two of directories, the first of them mounted twice, and one of the store, which
    is mounted a second time as a network file system."""
    names = [scratch / name for name in ("a", "b", "c")]
    if small_disk_problem():
        for name in names:
            name.mkdir()
        yield Disks(tuple(names), {})
        return
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(small_disk(name, size_bytes=128 << 20))
        again = {names[0]: stack.enter_context(second_mount(names[0]))}
        if not shared_directory_problem():
            again[names[2]] = stack.enter_context(second_mount(names[2], network=True))
        yield Disks(tuple(names), again)


class World:
    """Directories, and the bytes that each should have or get back, by name; pointer files, and the
    step that each means."""

    def __init__(self, seed: int, disks: Disks) -> None:
        self.random, self.disks = random.Random(seed), disks
        self.wanted: dict[Path, Content] = {}
        self.pointers: dict[Path, int] = {}
        self.kept: list[tuple[Path, Path]] = []
        self.told: list[str] = []
        self.step = self.copies = 0
        self.scratch = disks.folders[2]
        self.place = self.scratch / STORES[0]
        self.store = ckptstore.open(self.place, threads=1)

    def act(self) -> None:
        actions, weights = zip(*ACTIONS, strict=True)
        action = self.random.choices(actions, weights)[0]
        self.told.append(action.name)
        action.act(self)

    def tell(self, *what: object) -> None:
        parent = f"{self.scratch.parent.parent}/"
        self.told[-1] += " " + " ".join(str(each).replace(parent, "") for each in what)

    # -- the directories --

    def some(self) -> Path | None:
        return self.random.choice(sorted(self.wanted)) if self.wanted else None

    def some_hollow(self) -> Path | None:
        hollow = [root for root in sorted(self.wanted) if is_hollow(root)]
        return self.random.choice(hollow) if hollow else None

    def new_place(self) -> Path:
        disk = self.random.choice(self.disks.folders[:2])
        return disk / self.random.choice(OUTPUTS) / self.random.choice(NAMES)

    def seen(self, path: Path) -> Path:
        """The path, or another that leads there."""
        return self.disks.alias(path) if self.random.random() < 0.3 else path

    def moving(self) -> tuple[Path, Path] | None:
        """A checkpoint or a whole output, and where it goes."""
        root, target = self.some(), self.new_place()
        if root is None:
            return None
        if self.random.random() < 0.4:
            root, target = root.parent, target.parent
        if root in (target, *target.parents) or target in root.parents:
            return None
        self.tell(root, target)
        self.remove(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        return root, target

    def under(self, place: Path) -> dict[Path, Content]:
        return {path: c for path, c in self.wanted.items() if path.is_relative_to(place)}

    def remove(self, place: Path) -> None:
        for root in self.under(place):
            del self.wanted[root]
        if place.exists():
            shutil.rmtree(place)

    def write(self, root: Path, name: str, data: bytes) -> None:
        """As a new file, which a hard link elsewhere does not see."""
        (root / "new").write_bytes(data)
        (root / "new").rename(root / name)
        self.wanted[root][name] = data

    def bytes_of(self, name: str) -> bytes:
        value = self.random.getrandbits(31)
        if name.endswith(".json"):
            return f"{value:010}".encode()
        return save({"w": torch.full((40,), value, dtype=torch.int64)})

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
                again = self.again(self.seen(root))
                for name in lacking:
                    assert (again / name).read_bytes() == wanted[name], f"{root / name} differs"
                shutil.rmtree(again)
        for pointer, step in self.pointers.items():
            assert self.store.checkout(pointer).read("other").item() == step

    def end(self) -> None:
        collect(self)
        assert not self.store.fsck(read_data="100%").findings

    def close(self) -> None:
        """Close the store, and leave nothing on the disks."""
        self.store.close()
        for folder in self.disks.folders:
            shutil.rmtree(folder)


def is_hollow(root: Path) -> bool:
    return (root / HOLLOW_POINTER).exists()


# -- directories --


def save_checkpoint(w: World) -> None:
    if (root := w.new_place()) not in w.wanted:
        w.tell(root)
        root.mkdir(parents=True)
        w.wanted[root] = {}
        for name in FILES:
            w.write(root, name, w.bytes_of(name))


def adopt(w: World) -> None:
    if root := w.some():
        w.step += 1
        hollow = is_hollow(root) or w.random.random() < 0.8
        w.tell(root, f"hollow={hollow}")
        with suppress(FileChanged):  # one that was written to a hollow directory
            made = w.store.adopt(w.seen(root), hollow=hollow, step=w.step)
            if not hollow:
                made.materialize(w.scratch / "again")
                for name, data in w.wanted[root].items():
                    assert (w.scratch / "again" / name).read_bytes() == data
                shutil.rmtree(w.scratch / "again")


def move(w: World) -> None:
    if ends := w.moving():
        root, target = ends
        moved = w.under(root)
        shutil.move(root, target)
        for path, content in moved.items():
            del w.wanted[path]
            w.wanted[target / path.relative_to(root)] = content


def copy(w: World) -> None:
    """With all times, or none, or as hard links."""
    if ends := w.moving():
        root, target = ends
        way = w.random.choice(("-a", "-r", "-al"))
        if way == "-al" and root.stat().st_dev != target.parent.stat().st_dev:
            way = "-a"
        w.tell(way)
        subprocess.run(["cp", way, root, target], check=True)
        for path, content in w.under(root).items():
            w.wanted[target / path.relative_to(root)] = dict(content)


def delete(w: World) -> None:
    if root := w.some():
        w.tell(root)
        w.remove(root)


def write_alike(w: World) -> None:
    """Write other bytes to a file, and give it the size and the time of its commit, if the
    directory is hollow, else those that it had."""
    if root := w.some():
        name = w.random.choice(FILES)
        w.tell(root / name)
        if (root / name).exists():
            time = (root / name).stat().st_mtime_ns
        else:
            again = w.again(root)
            time = (again / name).stat().st_mtime_ns
            shutil.rmtree(again)
        w.write(root, name, w.bytes_of(name))
        os.utime(root / name, ns=(time, time))


def write_again(w: World) -> None:
    if root := w.some():
        w.tell(root)
        for name in FILES:
            w.write(root, name, w.bytes_of(name))


def materialize(w: World) -> None:
    if root := w.some_hollow():
        w.tell(root)
        with suppress(ckptstore.Conflict):  # a file was written to it
            w.store.checkout(root).materialize(w.seen(root))


def release(w: World) -> None:
    """All but what is there, or a directory that has no copy, which goes then."""
    folders = [disk for disk in w.disks.folders[:2] if any(disk.rglob(HOLLOW_POINTER))]
    if folders:
        w.store.release(except_in=[w.seen(folder) for folder in folders])
    root = w.some_hollow()
    if root and w.random.random() < 0.3:
        hold = read_pointer(root).hold
        others = [path for path in w.wanted if path != root and is_hollow(path)]
        if all(read_pointer(path).hold != hold for path in others):
            w.tell(root)
            w.store.release(root)
            w.remove(root)


def collect(w: World) -> None:
    for _ in range(2):
        w.step += 1
        w.store.commit({"other": torch.tensor(w.step)}, step=w.step)
    w.store.forget(ckptstore.KeepLast(2))
    w.store.gc(grace_s=0)
    w.check()


# -- the store --


def point(w: World) -> None:
    """A pointer file, which is copied or moved later; its commit has a tag."""
    w.step += 1
    w.store.commit({"other": torch.tensor(w.step)}, step=w.step, tag=f"pointed-{w.step}")
    pointer = w.random.choice(w.disks.folders[:2]) / f"pointer-{w.step}"
    ckptstore.write_pointer(pointer, w.store, w.step)
    w.pointers[pointer] = w.step
    with ckptstore.open_pointer(pointer) as snapshot:
        assert snapshot.read("other").item() == w.step


def move_pointer(w: World) -> None:
    if w.pointers:
        pointer = w.random.choice(sorted(w.pointers))
        target = w.random.choice(w.disks.folders[:2]) / f"{pointer.name}x"
        moves = w.random.random() < 0.5
        (shutil.move if moves else shutil.copy2)(pointer, target)
        w.pointers[target] = w.pointers[pointer]
        if moves:
            del w.pointers[pointer]


def reopened(w: World, place: Path) -> None:
    """By its path, or by another."""
    w.place = place
    way = w.seen(place)
    w.tell("opened at", way)
    w.store = ckptstore.open(way, threads=1, create=False)


def move_store(w: World) -> None:
    w.store.close()
    target = w.scratch / STORES[w.place == w.scratch / STORES[0]]
    target.parent.mkdir(exist_ok=True)
    shutil.move(w.place, target)
    w.kept.clear()
    reopened(w, target)


def replace_store(w: World) -> None:
    """By its own copy or clone, after this one went on, forgot and collected: both are whole."""
    w.store.close()
    twin = w.scratch / "twin"
    if w.random.random() < 0.3:
        ckptstore.clone(w.place, twin, run=None).close()
    else:
        subprocess.run(["cp", "-a", w.place, twin], check=True)
    place = w.place
    for each in w.random.sample((place, twin), 2):
        with ckptstore.open(each, threads=1) as store:
            w.store, w.place = store, each
            collect(w)
    shutil.rmtree(place)
    if w.random.random() < 0.5:
        shutil.move(twin, place)
    else:
        subprocess.run(["cp", "-a", twin, place], check=True)
        shutil.rmtree(twin)
    w.kept.clear()
    reopened(w, place)


def reopen(w: World) -> None:
    w.store.close()
    reopened(w, w.place)


def keep_index(w: World) -> None:
    """A copy of the index of the store, or of the user's caches, such as a backup has."""
    w.store.close()
    for folder in (w.place / "index", Path(os.environ["CKPTSTORE_CACHE"])):
        if folder.is_dir():
            w.copies += 1
            copied = w.scratch / f"kept-{w.copies}"
            subprocess.run(["cp", "-a", folder, copied], check=True)
            w.kept.append((folder, copied))
    reopened(w, w.place)


def restore_index(w: World) -> None:
    """An older one, or none."""
    w.store.close()
    if w.kept:
        folder, copied = w.random.choice(w.kept)
        w.tell(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if w.random.random() < 0.8:
            subprocess.run(["cp", "-a", copied, folder], check=True)
    reopened(w, w.place)


def push(w: World) -> None:
    """To a mirror, which holds of directories do not reach, and back."""
    w.store.mirror(w.scratch / "mirror")
    w.store.pull(w.scratch / "mirror", force=True)


ACTIONS: tuple[tuple[Operation, int], ...] = (
    (Operation("save", (), save_checkpoint), 8),
    (Operation("adopt", ("Store.adopt", "$ adopt"), adopt), 10),
    (Operation("move", (), move), 4),
    (Operation("copy", (), copy), 5),
    (Operation("delete", (), delete), 2),
    (Operation("write alike", (), write_alike), 3),
    (Operation("write again", (), write_again), 2),
    (Operation("materialize", ("Snapshot.materialize", "$ materialize"), materialize), 2),
    (Operation("release", ("Store.release", "$ release"), release), 2),
    (Operation("collect", ("Store.forget", "Store.gc"), collect), 5),
    (Operation("point", ("write_pointer", "open_pointer"), point), 1),
    (Operation("move pointer", ("Store.checkout",), move_pointer), 1),
    (Operation("move store", ("open",), move_store), 1),
    (Operation("replace store", ("clone", "$ clone"), replace_store), 1),
    (Operation("reopen", ("open",), reopen), 1),
    (Operation("keep index", (), keep_index), 1),
    (Operation("restore index", (), restore_index), 2),
    (Operation("push", ("Store.mirror", "Store.pull"), push), 1),
)
