"""Which directories are checkpoints: those named by a script, and the numbered ones."""

import os
import re
from pathlib import Path

from accelerate import Accelerator

from ckptstore.errors import Corrupt, InvalidInput, NotFound
from ckptstore.plugin.model import CommitId
from ckptstore.plugin.pointers import DIRECTORY_POINTERS, read_pointer

POINTER = DIRECTORY_POINTERS[0]
_NAME = re.compile(r"checkpoint_(\d+)")
_STEP = re.compile(r"(\d+)$")


def commit_at(directory: Path) -> CommitId:
    """The commit of a directory. Raises `Corrupt` if its pointer file is damaged."""
    try:
        return read_pointer(directory / POINTER).id
    except InvalidInput as error:
        raise Corrupt(str(error)) from error


def existing(asked: str | int | os.PathLike[str]) -> str | int | Path:
    """The directory that is asked for, or a ref."""
    if isinstance(asked, int):
        return asked
    path = Path(asked).expanduser()
    if path.is_dir():
        return path.absolute()
    if isinstance(asked, str) and os.sep not in asked:
        return asked
    raise NotFound(f"{path} is no directory, so that nothing can be loaded from it")


def numbered_folder(accelerator: Accelerator) -> Path | None:
    """Where automatic naming puts its checkpoints; None without it."""
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        return None
    return Path(accelerator.project_dir).absolute() / "checkpoints"


def numbered(folder: Path) -> list[Path]:
    """The numbered directories, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((each for each in found if _NAME.fullmatch(each.name)), key=number_of)


def number_of(directory: Path) -> int:
    found = _NAME.fullmatch(directory.name)
    return int(found[1]) if found else -1


def is_checkpoint(directory: Path) -> bool:
    """Whether a save into `directory` has ended: a pointer is there, or Accelerate's last file."""
    return os.path.lexists(directory / POINTER) or any(directory.glob("random_states_*.pkl"))


def step_of(directory: Path) -> int | None:
    found = _STEP.search(directory.name)
    return int(found[1]) if found else None


def leaving_file(folder: Path) -> Path:
    """The list of commits whose directories were removed (`interop.leaving`). It lies beside the
    folder: Accelerate takes everything in it for a checkpoint."""
    return folder.with_name(f".{folder.name}.leaving")
