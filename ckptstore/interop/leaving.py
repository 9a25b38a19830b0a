"""Which commits have lost their place among a trainer's checkpoints, and stay for now, because
something protects them? A file lists them, so that a later process of the training forgets them."""

from collections.abc import Sequence
from pathlib import Path

from ckptstore.plugin.files import scratch_for, sync_path, write_file
from ckptstore.plugin.model import CommitId


def read_leaving(file: Path) -> list[CommitId]:
    """The commits that `file` lists; none if there is no such file."""
    return [CommitId(line) for line in file.read_text().split()] if file.is_file() else []


def write_leaving(file: Path, commits: Sequence[CommitId]) -> None:
    """Make `file` list `commits`, durably. A file of none is removed."""
    if list(commits) == read_leaving(file):
        return
    if not commits:
        file.unlink(missing_ok=True)
        return
    replace_durably(file, "".join(f"{commit}\n" for commit in commits).encode())


def replace_durably(file: Path, data: bytes) -> None:
    """Make `file` have `data`: the old bytes or the new after a crash, the new on return."""
    with scratch_for(file) as new:
        write_file(new, data)
        sync_path(new)
        new.replace(file)
    sync_path(file.parent)
