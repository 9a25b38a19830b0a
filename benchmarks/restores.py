"""The cases that restore: the whole state in place, warm and cold, and one tensor of it.

Every restore goes into wiped memory and is compared with what was saved, outside the timed part.
"""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import cycle
from pathlib import Path
from unittest import mock

import torch

import ckptstore
from benchmarks import limits, states
from benchmarks.context import Context
from benchmarks.disk import drop_cache, settle
from benchmarks.measure import Entrant, Result, alternate
from benchmarks.saves import OURS, limit_hashes
from benchmarks.states import State
from ckptstore.repository import chunk_reader

LIMIT_READ = "limit: read"
LIMIT_READ_CHECKSUM = "limit: read, then XXH3"
UNVERIFIED = "ckptstore, not verified"
LIMIT_COPY = "limit: memcpy"


class Restores:
    """One state, saved once by everybody, and the memory that all restore into."""

    def __init__(self, context: Context) -> None:
        self.state = states.gpt(context.scale)
        self.into = states.blank(self.state)
        self.store_folder = context.folder()
        self.store = ckptstore.open(self.store_folder)
        self.store.commit(self.state.app, step=0)
        self.peers = [(peer, context.folder()) for peer in context.peers]
        for peer, folder in self.peers:
            peer.write(self.state, folder)
            settle(folder)
        self.raw_folder = context.folder()
        self.extents = limits.write(self.state, self.raw_folder)

    def restore(self) -> None:
        self.store.checkout(0).restore(self.into.app)

    def restore_unverified(self) -> None:
        """What nobody can ask for: the chunk reader takes every chunk for right."""
        name = chunk_reader._verified.__name__  # mypy notices when it is called otherwise
        with mock.patch.object(chunk_reader, name, lambda key, found, verify_ids: found):
            self.restore()

    def acts(self) -> list[tuple[str, Path, Callable[[], object]]]:
        """Name, folder and restore of all who have files."""
        peers = [
            (peer.name, folder, partial(peer.load, folder, self.into))
            for peer, folder in self.peers
        ]
        raw = (LIMIT_READ, self.raw_folder, partial(limits.read, self.extents, self.into))
        verified = (
            LIMIT_READ_CHECKSUM,
            self.raw_folder,
            partial(limits.read, self.extents, self.into, hashed=limits.xxh3),
        )
        ours = (OURS, self.store_folder, self.restore)
        unverified = (UNVERIFIED, self.store_folder, self.restore_unverified)
        return [ours, unverified, *peers, raw, verified]

    def entrant(
        self, name: str, act: Callable[[], object], prepare: Callable[[], object] = lambda: None
    ) -> Entrant:
        def before() -> None:
            states.wipe(self.into)
            prepare()

        return Entrant(name, act, before, lambda: states.require_equal(self.state, self.into, name))

    def close(self) -> None:
        self.store.close()


def restore_warm(context: Context) -> Result:
    with closing(Restores(context)) as restores:
        entrants = [restores.entrant(name, act) for name, _, act in restores.acts()]
        entrants.append(
            restores.entrant(LIMIT_COPY, partial(limits.copy, restores.state, restores.into))
        )
        entrants += limit_hashes(restores.state)
        series = alternate("restore-warm", entrants, context.rounds)
        return Result(
            "restore-warm",
            "restore in place, files in the page cache",
            "s",
            restores.state.nbytes,
            series,
        )


def restore_cold(context: Context) -> Result:
    """Everybody's files are evicted before each restore, so that all find the same memory free."""
    with closing(Restores(context)) as restores:
        folders = [folder for _, folder, _ in restores.acts()]

        def evict() -> None:
            for folder in folders:
                drop_cache(folder)

        entrants = [restores.entrant(name, act, evict) for name, _, act in restores.acts()]
        series = alternate("restore-cold", entrants, context.rounds)
        return Result(
            "restore-cold",
            "restore in place, files evicted from the page cache",
            "s",
            restores.state.nbytes,
            series,
        )


def one_tensor(context: Context) -> Result:
    """ckptstore's store stays open; its checkout is timed. The peers have nothing that could stay
    open."""
    with closing(Restores(context)) as restores:
        entrants = [
            _reading(OURS, lambda path: restores.store.checkout(0).read(path), restores.state)
        ]
        for peer, folder in restores.peers:
            if peer.read is not None:
                entrants.append(_reading(peer.name, partial(peer.read, folder), restores.state))
        series = alternate("one-tensor", entrants, context.rounds)
        return Result("one-tensor", "one tensor of 4 MiB", "s", 0, series)


def _reading(name: str, read: Callable[[str], torch.Tensor], state: State) -> Entrant:
    """Each act reads the next of the tensors."""
    paths = cycle(states.four_mib_tensors())
    got: list[tuple[str, torch.Tensor]] = []

    def act() -> None:
        path = next(paths)
        got.append((path, read(path)))

    def after() -> None:
        path, tensor = got.pop()
        if not torch.equal(tensor, state.tensors[path]):
            raise RuntimeError(f"{name} read something else for {path}")

    return Entrant(name, act, after=after)
