"""What does a crash leave on a disk? A model of names and bytes, as programs see them and as they
are durable.

A *kill* ends the process: every change made so far is there. A *power cut* also takes what was not
made durable: bytes that no fsync of their file followed, and names (created, linked, renamed,
removed) that no fsync of their directory followed. POSIX promises no more, so here a file without
an fsync comes back empty, and a rename may leave both names.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

INDEX = "index"
"""The folder of the indexes, which nothing depends on; not part of the model."""


@dataclass(eq=False, slots=True)
class File:
    """The bytes of a file, and those that are safe from a power cut. One that was there at the
    start is `unchanged` at that place."""

    now: bytearray = field(default_factory=bytearray)
    safe: bytes = b""
    unchanged: Path | None = None

    def torn(self, random: Random) -> bytes:
        """What a power cut may leave of a file that was on its way: the old bytes, a beginning of
        the new ones, or zeros in their place."""
        kept = bytes(self.now[: random.randint(0, len(self.now))])
        return random.choice((self.safe, kept, kept + bytes(len(self.now) - len(kept))))


Names = dict[str, File | None]
"""Files by their path, and None for a directory."""


class Disk:
    """Everything below `root`, which is durable at the start, and the changes made to it since."""

    def __init__(self, root: Path) -> None:
        found = [(str(path.relative_to(root)), path) for path in sorted(root.rglob("*"))]
        self.now: Names = {
            name: None if path.is_dir() else File(unchanged=path)
            for name, path in found
            if INDEX not in name.split("/")
        }
        self.safe = dict(self.now)

    def create(self, path: str) -> None:
        self.now[path] = File()

    def make_directory(self, path: str) -> None:
        self.now[path] = None

    def write(self, path: str, offset: int, data: bytes) -> None:
        now = self._file(path).now
        now.extend(bytes(max(offset - len(now), 0)))
        now[offset : offset + len(data)] = data

    def sync(self, path: str) -> None:
        file = self._file(path)
        file.safe = bytes(file.now)

    def sync_directory(self, directory: str) -> None:
        for path in {*self.now, *self.safe}:
            if os.path.dirname(path) == directory:
                _copy_name(self.now, self.safe, path)

    def rename(self, old: str, new: str) -> None:
        self.now[new] = self.now.pop(old)

    def link(self, old: str, new: str) -> None:
        self.now[new] = self.now[old]

    def unlink(self, path: str) -> None:
        del self.now[path]

    def kill(self) -> "Left":
        """What a killed process leaves."""
        return _left(self.now, {file: bytes(file.now) for file in self.now.values() if file})

    def cut(self, random: Random | None = None) -> "Left":
        """What a power cut leaves: only what is durable, or with `random` also some of what is
        not."""
        names = dict(self.safe)
        if random:
            for path in sorted({*self.now, *self.safe}):
                if random.random() < 0.5:
                    _copy_name(self.now, names, path)
        files = dict.fromkeys(file for file in names.values() if file)
        return _left(
            names,
            {
                file: file.torn(random) if random and file.safe != file.now else file.safe
                for file in files
            },
        )

    def _file(self, path: str) -> File:
        file = self.now[path]
        assert file
        return file


@dataclass(frozen=True, slots=True)
class Left:
    """What is left after a crash: bytes, the place of an unchanged file, or None for a directory,
    by path, each after its directory."""

    nodes: Mapping[str, bytes | Path | None]

    def lay_out(self, to: Path) -> None:
        """Make `to` so. Unchanged files are linked: nobody changes a file in its place."""
        to.mkdir()
        for path, node in self.nodes.items():
            if node is None:
                (to / path).mkdir()
            elif isinstance(node, Path):
                os.link(node, to / path)
            else:
                (to / path).write_bytes(node)


def _left(names: Names, contents: Mapping[File, bytes]) -> Left:
    """Of `names`, those whose directories are all there."""
    nodes: dict[str, bytes | Path | None] = {}
    for path in sorted(names):
        directory = os.path.dirname(path)
        if not directory or (directory in nodes and nodes[directory] is None):
            file = names[path]
            nodes[path] = file and (file.unchanged or contents[file])
    return Left(nodes)


def _copy_name(source: Names, target: Names, path: str) -> None:
    if path in source:
        target[path] = source[path]
    else:
        target.pop(path, None)
