"""What does a host know of the others, and which job may change it? Files in a directory beside the
store have it, and the token of each host's agent, so only their owner reads them.

A host is in one job at a time. What a job changes on a host it changes within `in_job`, so that
processes of a job that was given up change nothing once the host has entered another one.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptstore.errors import (
    CkptStoreError,
    Conflict,
    Corrupt,
    InvalidInput,
    NoSpace,
    NotFound,
    Unavailable,
)
from ckptstore.interop.torchft.invitation import Invitation, invitation_of
from ckptstore.plugin.files import distrust
from ckptstore.plugin.storage import RESERVE_KEY, open_storage

MEMBERS_NAME = "hosts.json"
AGENT_NAME = "agent.json"
_LOCK_NAME, _IN_USE_NAME = "lock", "in-use"


@dataclass(frozen=True, slots=True)
class Members:
    """The hosts of the job that `me` takes part in, by number, with the way to their agents;
    `takers` are those that get copies of what this host writes."""

    job: str
    me: int
    names: tuple[str, ...]
    agents: tuple[Invitation, ...]
    takers: tuple[int, ...]
    lineage: tuple[str, ...] = ()
    """The jobs in which this host's log took part, from old to new."""
    head: int = 0
    """All hosts of the job had the entries up to this one when it began."""
    given_up: tuple[str, ...] = ()
    """The jobs that this host entered and left before it had joined: nothing was acknowledged in
    them."""
    joined: bool = False
    """Whether all hosts have joined. Nobody opens the store before."""


Before = tuple[str, tuple[str, ...]]
"""The job that a host has entered, and its lineage."""


def beside(root: Path, name: str) -> Path:
    """The file `name` of the host that has its part of a store at `root`. Raises `InvalidInput` if
    others could have written it: it says who is asked for the store."""
    directory = root.with_name(f"{root.name}.hosts")
    if why := distrust(directory):
        raise InvalidInput(
            f"{why}; wanted a directory of {directory.name} that this user alone may write to: "
            "remove it, or name another place than one that all users share"
        )
    return directory / name


def write_members(root: Path, members: Members) -> None:
    """Replace the file, atomically and durably. Raises as `Storage.put`."""
    _write(root, MEMBERS_NAME, asdict(members))


def before(root: Path) -> Before:
    """What `enter` compares."""
    try:
        members = read_members(root)
    except CkptStoreError:
        return "", ()
    return members.job, members.lineage


def enter(root: Path, told: Before, members: Members) -> None:
    """Enter a job: from now on, no other one changes this host. Raises `Conflict` if the host has
    gone on in another job since it `told` what it has."""
    with _locked(root, fcntl.LOCK_EX):
        if before(root) != told:
            raise Conflict(f"another job has begun in {root} meanwhile; start one of the two again")
        write_members(root, members)


def go_on(root: Path, members: Members) -> None:
    """Replace what this host knows of the job that it is in. Raises as `in_job`."""
    with _locked(root, fcntl.LOCK_EX):
        _check_job(root, members.job)
        write_members(root, members)


@contextmanager
def in_job(root: Path, job: str) -> Iterator[None]:
    """Change this host within the block. Raises `Unavailable` unless it is in `job`."""
    with _locked(root, fcntl.LOCK_SH):
        _check_job(root, job)
        yield


def _check_job(root: Path, job: str) -> None:
    if before(root)[0] != job:
        raise Unavailable(f"{root} has joined another job; this one changes nothing there any more")


@contextmanager
def _locked(root: Path, kind: int) -> Iterator[None]:
    path = beside(root, _LOCK_NAME)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "ab") as file:
        fcntl.flock(file, kind)
        yield


class InUse:
    """Held open, it says to this host's agent that a process needs it. Ends with the process."""

    def __init__(self, root: Path) -> None:
        self._file = beside(root, _IN_USE_NAME).open("ab")
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def close(self) -> None:
        self._file.close()


def is_in_use(root: Path) -> bool:
    """Whether a process of this host holds an `InUse`."""
    try:
        with open(beside(root, _IN_USE_NAME), "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def read_members(root: Path) -> Members:
    """What `write_members` wrote. Raises `NotFound` and `Corrupt`."""
    said = read_json(beside(root, MEMBERS_NAME))
    try:
        agents = tuple(invitation(each) for each in said["agents"])
        tuples = {name: tuple(said[name]) for name in ("names", "takers", "lineage", "given_up")}
        return Members(**{**said, **tuples, "agents": agents, "head": int(said["head"])})
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(
            f"{beside(root, MEMBERS_NAME)} cannot be read: {error!r}; join again"
        ) from error


def invitation(said: Any) -> Invitation:
    """An invitation from JSON. Raises `Corrupt`."""
    try:
        return invitation_of(said)
    except ValueError as error:
        raise Corrupt(f"this is no way to an agent: {error}; join again") from error


def write_agent(root: Path, agent: Invitation) -> None:
    _write(root, AGENT_NAME, asdict(agent))


def read_agent(root: Path) -> Invitation:
    """What `write_agent` wrote. Raises `NotFound` and `Corrupt`."""
    return invitation(read_json(beside(root, AGENT_NAME)))


def read_json(path: Path) -> Any:
    """Raises `NotFound` and `Corrupt`."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFound(f"there is no {path}: its host has joined no job") from error
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} cannot be read: {error}") from error


def _write(root: Path, name: str, what: Any) -> None:
    path = beside(root, name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = json.dumps(what).encode()
    with closing(open_storage(path.parent)) as place:
        try:
            place.put(name, data)
        except NoSpace:  # a training starts in the room that its store keeps back
            (root / RESERVE_KEY).unlink(missing_ok=True)
            place.put(name, data)
