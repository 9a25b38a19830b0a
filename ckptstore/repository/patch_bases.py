"""Which packs does a pack need, since it has patches of chunks that lie there?

Who refers to a pack in the log refers to these packs, too: a chunk that is stored as a patch lies
in all of them (docs/decisions/057-…).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckptstore.core.ids import PackId
from ckptstore.errors import Corrupt, NotFound
from ckptstore.log.log import Log
from ckptstore.log.state import Pack
from ckptstore.objects import codecs
from ckptstore.objects.pack import PATCHED_DTYPE, FooterTable, bases_named
from ckptstore.repository.footers import read_table
from ckptstore.storage.contract import Storage

if TYPE_CHECKING:
    from numpy.typing import NDArray


class NeededPacks(NamedTuple):
    """Packs by number. With `complete`, every base lies in one of them; that of a patch which no
    commit needs may be gone."""

    packs: frozenset[int]
    complete: bool


NOTHING_NEEDED = NeededPacks(frozenset(), complete=True)
UNKNOWN = NeededPacks(frozenset(), complete=False)


class PatchBases:
    """What this process knows of the packs in which it found patches. Threads may share it."""

    def __init__(
        self,
        storage: Storage,
        log: Log,
        locate: "Callable[[bytes], NDArray[np.void]]",
        listed: Callable[[set[int]], dict[int, Pack]],
    ) -> None:
        self._storage, self._log, self._locate, self._listed = storage, log, locate, listed
        self._bases: dict[PackId, bytes | None] = {}
        """By pack with patches, the ids of their bases; None if its footer cannot be read."""
        self._direct: dict[int, frozenset[int]] = {}
        """By pack with patches, the packs that held their bases when they were last looked up."""

    @property
    def known(self) -> int:
        """How many packs with patches are known; what `needed` says is of these."""
        return len(self._bases)

    def note(self, where: "NDArray[np.void]") -> None:
        """Remember in which packs patches were found, by rows of `LOCATED_DTYPE`. Reads their
        footers, once each."""
        patched = where[(where["codec"] == codecs.PATCH) & (where["found"] == 1)]
        if not len(patched):
            return
        for pack in self._listed(set(np.unique(patched["pack"]).tolist())).values():
            if pack.id not in self._bases:
                self._bases[pack.id] = self._read(pack)

    def written(self, pack: PackId, table: FooterTable) -> None:
        """Remember a pack of this process."""
        if table.dtype == PATCHED_DTYPE:
            self._bases[pack] = bases_named(table).tobytes()

    def needed(self, number: int) -> NeededPacks:
        """The packs that hold the bases of the patches in a pack, their bases, and so on; none for
        a pack in which no patch was found (`note`)."""
        if not self._bases:
            return NOTHING_NEEDED
        found, left, complete = set[int](), {number}, True
        while left:
            direct = self._needed_directly(left.pop())
            complete &= direct.complete
            left |= direct.packs - found
            found |= direct.packs
        return NeededPacks(frozenset(found), complete)

    def _needed_directly(self, number: int) -> NeededPacks:
        packs = self._log.state.packs
        pack = packs.get(number)
        if pack is None or pack.id not in self._bases:
            return NOTHING_NEEDED
        known = self._direct.get(number)
        if known is None or not all(n in packs and packs[n].live for n in known):
            bases = self._bases[pack.id]
            if bases is None:
                return UNKNOWN
            where = self._locate(bases)
            there = where[where["found"] == 1]
            self.note(there)
            known = frozenset(there["pack"].tolist())
            if len(there) < len(where):
                return NeededPacks(known, complete=False)
            self._direct[number] = known
        return NeededPacks(known, complete=True)

    def _read(self, pack: Pack) -> bytes | None:
        try:
            return bases_named(read_table(self._storage, pack)).tobytes()
        except (Corrupt, NotFound):
            return None  # nobody relies on such a pack, and fsck reports it
