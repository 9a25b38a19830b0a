"""What is a checkpoint called in a store? Its tag is `files/` and its path; the digits at the end
of the path are its step."""

import errno
import os
import re
from pathlib import PurePosixPath
from typing import TypedDict

_TAG = "files/"
_PLAIN = re.compile(r"[^A-Za-z0-9_.\-/]")
_ESCAPED = re.compile(r"\+([0-9a-f]+)\.")
_STEP = re.compile(r"(\d{1,15})$")


class Label(TypedDict):
    """What the commit of a checkpoint is called: arguments of `Store.commit`."""

    step: int | None
    tag: str
    message: str


def label_of(name: str) -> Label:
    """The label of the checkpoint `name`."""
    step = _STEP.search(name)
    return Label(
        step=int(step[1]) if step else None,
        tag=tag_of(name),
        message=f"saved as {PurePosixPath(name).name}",
    )


def name_of(path: str | os.PathLike[str]) -> str:
    """A path as the name of a checkpoint, or of a file in one: absolute, without its first `/`."""
    return os.path.abspath(path).lstrip("/")


def tag_of(name: str) -> str:
    """The tag of a checkpoint; what a tag cannot have is written `+HEX.`."""
    tag = _TAG + _PLAIN.sub(lambda found: f"+{ord(found[0]):x}.", name)
    if len(tag) > 200:
        raise OSError(errno.ENAMETOOLONG, "the path makes a tag of over 200 characters", name)
    return tag


def name_of_tag(tag: str) -> str | None:
    """The checkpoint that `tag` names; None if it names none."""
    if not tag.startswith(_TAG):
        return None
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), tag.removeprefix(_TAG))
