"""What one run of the benchmarks is asked to do, and the folders it does it in."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import PEERS, Peer


@dataclass(slots=True)
class Context:
    """`dir` is this run's own folder on a disk; `scale` shrinks the states to try the harness.
    `link` is the rate between hosts, as `tc` writes it."""

    dir: Path
    rounds: int
    scale: float = 1.0
    peers: tuple[Peer, ...] = PEERS
    link: str = "10gbit"
    _folders: int = field(default=0, init=False)

    def folder(self) -> Path:
        """A new empty folder."""
        self._folders += 1
        path = self.dir / f"{self._folders}"
        path.mkdir()
        return path


@dataclass(slots=True)
class Slot:
    """A folder that is new for every act, and deleted after it, outside the timed part."""

    context: Context
    path: Path = field(init=False)

    def fresh(self) -> None:
        self.path = self.context.folder()

    def clear(self) -> None:
        shutil.rmtree(self.path)
