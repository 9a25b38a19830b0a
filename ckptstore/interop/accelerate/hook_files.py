"""How do the files that save hooks write get into a commit, and back for load hooks?

They are leaves of the commit, by name and byte for byte. So they verify and fall back with it, and
a file of the directory that is not as it was saved is written again before a hook reads it.
"""

import logging
import os
from pathlib import Path, PurePosixPath

import torch

from ckptstore.errors import InvalidInput
from ckptstore.interop.accelerate.folders import POINTER
from ckptstore.plugin.files import scratch_for, write_file
from ckptstore.plugin.snapshots import Snapshot

logger = logging.getLogger("ckptstore")

KEY = "hook_files"

Listing = dict[str, tuple[int, ...]]
"""What tells whether a file was written: by its name below the directory."""


def files_in(directory: Path) -> Listing:
    """The files below `directory`, without its pointer."""
    found: Listing = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and path != directory / POINTER:
                status = path.stat()
                found[path.relative_to(directory).as_posix()] = (
                    status.st_size,
                    status.st_ino,
                    status.st_mtime_ns,
                    status.st_ctime_ns,
                )
    return found


def written_since(before: Listing, directory: Path) -> dict[str, torch.Tensor]:
    """The files below `directory` that are new or were written since `before`, and their bytes."""
    now = files_in(directory)
    return {
        name: _as_tensor((directory / name).read_bytes())
        for name in sorted(now)
        if before.get(name) != now[name]
    }


def _as_tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)  # a copy: the tensor is writable


def fill(directory: Path, snapshot: Snapshot, rank: int) -> None:
    """Make the files of the hooks in `directory` those of the commit: of `rank`, or of the first
    rank if `rank` has saved none.

    Raises `Corrupt` if the commit is damaged.
    """
    own = snapshot.of_rank(rank)
    if KEY not in own.keys():  # noqa: SIM118  # a snapshot is no mapping
        own = snapshot.of_rank(0)
    for name, content in own.state_dict(KEY).items():
        place, data = directory / _checked(name, snapshot), content.numpy().tobytes()
        if place.is_file():
            if place.read_bytes() == data:
                continue
            logger.warning(
                "%s was not as it was saved: written again from commit %s", place, snapshot.id[:12]
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        with scratch_for(place) as new:
            write_file(new, data)
            new.replace(place)


def _checked(name: str, snapshot: Snapshot) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise InvalidInput(
            f"commit {snapshot.id[:12]} has a file of a hook named {name!r}, which lies outside "
            "its directory; save_state makes no such commit"
        )
    return name
