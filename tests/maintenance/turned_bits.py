"""What does a trainer make of an index in which one bit has turned? Asked in a process of its own,
which SQLite could end.

The library is asked first. If it finds nothing wrong with the file, reads every row or record as it
was, and can write them anew, then whoever asks it goes on as before. Otherwise, for the bytes that
say what file it is, and once in `SAMPLED` anyway, a store is opened over the file, asked, restored,
and committed to.
"""

import shutil
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ckptstore
from tests.maintenance.stores import assert_equal

SAMPLED = 200
PAGE_BYTES = 4096
STEPS = (1, 2)
REFS = {"t": 2, "1": 1, "2": 2, "latest": 2, "latest~1": 1, "best:loss": 1}
"""What may be asked for, and the step that it is."""

Found = Any
"""What a library gave; None if it found fault with its file."""


@dataclass(frozen=True)
class Index:
    """The pattern `path` of files below the folder of the indexes. The first `head` bytes of the
    first `pages` of each say what kind of file it is."""

    path: str
    head: int
    pages: int
    look: Callable[[Path], Found]

    def file(self, store: Path) -> Path:
        """The largest of the files."""
        return max((store / "index").glob(self.path), key=lambda path: path.stat().st_size)

    def says_what_it_is(self, offset: int) -> bool:
        return offset < self.pages * PAGE_BYTES and offset % PAGE_BYTES < self.head


def tiny(step: int) -> dict[str, Any]:
    """As few bytes as have everything in them: `w` is a chunk that both commits share, `b` lies in
    a page."""
    return {"m": {"w": torch.arange(65, dtype=torch.float64), "b": step}}


def rows(path: Path) -> Found:
    """Every row of a SQLite file, of tables that agree with their indexes, as do the lists of its
    pages."""
    try:
        with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as connection:
            connection.text_factory = bytes
            if connection.execute("PRAGMA integrity_check").fetchall() != [(b"ok",)]:
                return None
            schema = connection.execute("SELECT * FROM sqlite_master").fetchall()
            tables = [row[1].decode() for row in schema if row[0] == b"table"]
            return repr(
                [
                    schema,
                    *(
                        connection.execute(f'SELECT * FROM "{table}"').fetchall()
                        for table in tables
                    ),
                ]
            )
    except (sqlite3.Error, UnicodeDecodeError):
        return None


def records(path: Path) -> Found:
    """A run of the chunk index has no byte that means nothing."""
    return path.read_bytes()


INDEXES = {
    "catalog": Index("catalog.sqlite", 100, 1, rows),
    "chunk index": Index("chunks/*", 0, 0, records),
}
"""A SQLite file begins with a header of 100 bytes."""


class Trials:
    """The same store again and again, with another bit turned in one of its indexes."""

    def __init__(self, index: Index, whole: Path, scratch: Path) -> None:
        self._index, self._whole, self._place = index, whole, scratch / "store"
        self._bytes = index.file(whole).read_bytes()
        self._looked_at = scratch / "looked-at" / "file"
        self._looked_at.parent.mkdir()
        with ckptstore.open(shutil.copytree(whole, scratch / "asked")) as store:
            self._ids = {info.step: info.id for info in store.log()}
        self._wanted = self._look(self._bytes)
        assert self._wanted, "the library finds fault with the whole file"

    def run(self, n: int, offset: int, bit: int) -> str:
        """Who was asked in the end."""
        turned = bytearray(self._bytes)
        turned[offset] ^= 1 << bit
        if (
            not self._index.says_what_it_is(offset)
            and n % SAMPLED
            and self._look(turned) == self._wanted
        ):
            return "library"
        self._try(turned)
        return "store"

    def _look(self, data: bytes) -> Found:
        self._looked_at.write_bytes(data)
        return self._index.look(self._looked_at)

    def _try(self, turned: bytes) -> None:
        """Whatever else may follow from it, each name is that of the right commit, that is whole,
        and the next one can be made."""
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.copytree(self._whole, self._place)
        self._index.file(self._place).write_bytes(turned)
        with ckptstore.open(self._place) as store:
            assert len(store.log()) <= len(STEPS)
            store.runs(), store.tags()
            for ref, step in REFS.items():
                snapshot = store.checkout(int(ref) if ref.isdecimal() else ref)
                assert snapshot.id == self._ids[step], f"{ref} is {snapshot.id}"
                if ref.isdecimal():
                    assert_equal(snapshot.state_dict(), tiny(step))
            store.commit(tiny(3), step=3)
            assert_equal(store.checkout(3).state_dict(), tiny(3))


def main(name: str, whole: str, scratch: str, file: str) -> None:
    """Prints each trial of `file`, an offset and a bit a line, before it is made, and in the end
    how many there were of each kind."""
    trials, counts = Trials(INDEXES[name], Path(whole), Path(scratch)), Counter[str]()
    for n, trial in enumerate(Path(file).read_text().splitlines()):
        print(trial, flush=True)
        counts[trials.run(n, *map(int, trial.split()))] += 1
    print(counts["library"], counts["store"])


if __name__ == "__main__":
    main(*sys.argv[1:])
