"""The chunks of the packs that one state of the log lists, by their footers, and the trees read
from them.

Another process may collect meanwhile. A missing object counts only if nothing was removed in
between. The log tells, because the entry that deletes a pack or purges a commit precedes the
removal of its objects (docs/gc.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ckptstore.core.ids import PackId, twin_key
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.log.fold import State
from ckptstore.maintenance.check.metadata_reader import Trees
from ckptstore.objects.pack import FooterTable
from ckptstore.repository.chunk_reader import Problem
from ckptstore.repository.footers import Inventory, Strays, load_tables, read_table_at
from ckptstore.storage.contract import Storage


@dataclass(frozen=True, slots=True)
class Contents:
    """`tables` are the footers of the listed packs, `problems` the reasons why others could not
    be read."""

    state: State
    tables: Mapping[PackId, FooterTable]
    problems: Mapping[PackId, Problem]
    inventory: Inventory
    trees: Trees


def contents_of(
    storage: Storage, state: State, before: Contents | None = None, *, twins: bool = False
) -> Contents:
    """Read the footers of the packs that `state` lists, except those in `before`. With `twins`,
    read those of twins too: an exchanged pack hides what its twin holds."""
    known = before.tables if before else {}
    listed = [pack for _, pack in sorted(state.packs.items())]
    tables: dict[PackId, FooterTable] = {}
    problems: dict[PackId, Problem] = {}
    for name, table in load_tables(storage, [pack for pack in listed if pack.id not in known]):
        if isinstance(table, Corrupt | NotFound | Unavailable):
            problems[name] = table
        else:
            tables[name] = table
    tables |= {pack.id: known[pack.id] for pack in listed if pack.id in known}
    inventory = Inventory(tables, _strays(storage, state, tables) if twins else None)
    return Contents(state, tables, problems, inventory, Trees(storage, inventory))


def taken(before: State, now: State) -> bool:
    """Whether packs or commits that `before` lists are no longer listed `now`. Pure."""
    names = {pack.id for pack in now.packs.values()}
    return any(pack.id not in names for pack in before.packs.values()) or any(
        commit not in now.commits for commit in before.commits
    )


def _strays(storage: Storage, state: State, tables: Mapping[PackId, FooterTable]) -> Strays:
    found: dict[str, tuple[PackId, FooterTable]] = {}
    for pack in state.packs.values():
        if not pack.metadata or pack.id not in tables:
            continue
        key = twin_key(pack.id)
        try:
            table = read_table_at(storage, key)
        except (Corrupt, NotFound, Unavailable):
            continue
        if table.tobytes() != tables[pack.id].tobytes():
            found[key] = pack.id, table
    return found
