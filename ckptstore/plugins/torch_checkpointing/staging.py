"""Where do files lie while a checkpoint is being written? Each writer has a folder of its own, with
a lock that ends with its process: files of a writer that is gone are nobody's, and are removed.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptstore.plugin.model import random_digits

_LOCK = ".lock"


class Staging:
    """The folders of the writers of one store, in `root`. A process may have several."""

    def __init__(self, root: Path) -> None:
        self._writers, self._exclusive = root / "writers", root / "lock"
        self._own: Path | None = None
        self._lock, self._pid = -1, os.getpid()

    def own(self) -> Path:
        """This writer's folder, made when it is first asked for."""
        if self._own is None:
            self._writers.mkdir(parents=True, exist_ok=True)
            with self.exclusive():  # nobody may take it for one without a process
                own = self._writers / random_digits(32)
                own.mkdir()
                self._lock = os.open(own / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._own = own
        return self._own

    def places(self, name: str) -> list[Path]:
        """The files or folders `name` of all writers that live, this one's first."""
        if not self._writers.is_dir():
            return []
        folders = sorted(self._writers.iterdir(), key=lambda folder: folder != self._own)
        return [
            folder / name for folder in folders if (folder / name).exists() and self._lives(folder)
        ]

    def gather(self, name: str) -> Path:
        """Make the folders `name` of all writers that live this writer's one.

        Raises `FileExistsError` if two of them wrote the same file: two managers save under one
        name.
        """
        own = self.own() / name
        own.mkdir(parents=True, exist_ok=True)
        found: dict[str, Path] = {}
        for place in self.places(name):
            for file in (path for path in place.rglob("*") if not path.is_dir()):
                below = file.relative_to(place).as_posix()
                if below in found:
                    raise FileExistsError(
                        f"two writers have {name}/{below}: another manager saves under this name, "
                        "or two ranks write one file"
                    )
                found[below] = file
        for below, file in found.items():
            (own / below).parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, own / below)
        return own

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """No other writer of this store makes a checkpoint, or removes a writer's folder. Ask for
        `own` before."""
        self._exclusive.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._exclusive, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def sweep(self) -> None:
        """Remove the folders of writers that are gone. Call it while `exclusive`."""
        for folder in list(self._writers.iterdir()) if self._writers.is_dir() else ():
            if not self._lives(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove this writer's folder, but for a forked child. Idempotent."""
        if self._own is not None and self._pid == os.getpid():
            shutil.rmtree(self._own, ignore_errors=True)
            os.close(self._lock)
            self._own = None

    def _lives(self, folder: Path) -> bool:
        if folder == self._own:
            return True
        with suppress(FileNotFoundError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # who asks is no writer
            except BlockingIOError:
                return True
            finally:
                os.close(lock)
        return False
