"""Entries, states and logs for tests of the history."""

import secrets
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from ckptstore.core.ids import CommitId, SessionId, StoreId, new_session_id, pack_id
from ckptstore.core.model import PackRecord
from ckptstore.log.admission import check
from ckptstore.log.entries import (
    Body,
    Commit,
    Condemn,
    Entry,
    Forget,
    Reduced,
    Register,
    encode_entry,
)
from ckptstore.log.log import Log
from ckptstore.log.state import State, apply, genesis, number
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage

STORE = StoreId("5" * 32)


def session(i: int) -> SessionId:
    return SessionId(f"{i:024x}")


def commit_id(i: int) -> CommitId:
    return CommitId(f"{i:064x}")


def packs(i: int, count: int = 1) -> tuple[PackRecord, ...]:
    return tuple(
        PackRecord(pack_id(session(i), 0, k), 1000 + k, 10, metadata=bool(k)) for k in range(count)
    )


def commit(i: int, **changes: Any) -> Commit:
    """Commit `i` of run `main` by session `i`, with one new pack."""
    fields: dict[str, Any] = {
        "session": session(i),
        "commit": commit_id(i),
        "content": f"{i:064x}",
        "run": "main",
        "step": i,
        "parents": (),
        "message": "",
        "metrics": (),
        "tags": (),
        "packs": packs(i),
        "reused": frozenset(),
        "schemas": (("model", "a" * 64),),
        "logical_bytes": 4096,
        "new_bytes": 1000,
        "leaves": 3,
        "document_bytes": 300,
    }
    return Commit(**{**fields, **changes})


def reduced(
    i: int,
    *,
    replaces: CommitId | None = None,
    thinned: tuple[str, ...] = (),
    cast: tuple[tuple[str, str], ...] = (),
    **changes: Any,
) -> Reduced:
    """Commit `i`, thinned or of lower precision."""
    plain = commit(i, **changes)
    columns = {field.name: getattr(plain, field.name) for field in fields(Commit)}
    return Reduced(**columns, replaces=replaces, thinned=thinned, cast=cast)


def fresh_commit(**changes: Any) -> Commit:
    """A commit that no other process makes."""
    writer = new_session_id()
    pack = PackRecord(pack_id(writer, 0, 0), 1000, 10, metadata=False)
    return commit(
        0, session=writer, commit=CommitId(secrets.token_hex(32)), packs=(pack,), **changes
    )


def entry(state: State, body: Body, time_ns: int = 0) -> Entry:
    return Entry(
        state.n + 1,
        "",
        time_ns,
        STORE,
        1,
        state.hash,
        state.bytes,
        body,
        f"{state.n + 1:064x}",
        500,
    )


def step(state: State, body: Body) -> State:
    """`state` after `body`, which it must admit."""
    numbered = number(state, body)
    assert check(state, numbered) is None
    return apply(state, entry(state, numbered))


def folded(*bodies: Body) -> State:
    state = genesis(STORE, 1)
    for body in bodies:
        state = step(state, body)
    return state


def open_log(place: Path | Storage) -> Log:
    storage = open_storage(place, fsync=False) if isinstance(place, Path) else place
    return Log(storage, STORE, 1)


class Wrapped:
    """A backend whose `put_new` a test replaces; everything else is the real one's."""

    def __init__(
        self, storage: Storage, put_new: Callable[[Callable[[str, bytes], bool], str, bytes], bool]
    ) -> None:
        self._storage = storage
        self._put_new = put_new

    def put_new(self, key: str, data: bytes) -> bool:
        return self._put_new(self._storage.put_new, key, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def encoded(body: Body, **header: Any) -> bytes:
    """The bytes of the entry with this body and header."""
    return encode_entry(Entry(body=body, **header))


def just(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


THREE = (commit(1), commit(2), commit(3))
"""Entries 1 to 3: three commits of one run with the packs 1 to 3; commit 1 is the only one that may
be forgotten."""


FORGOTTEN = (*THREE, Forget((commit_id(1),), "old"))


CONDEMNED = (*FORGOTTEN, Condemn(4, 0, just(1), ()))


def register(i: int = 9, **changes: Any) -> Register:
    fields: dict[str, Any] = {
        "session": session(i),
        "mark": 4,
        "fence": 0,
        "packs": packs(i),
        "condemn": just(1),
    }
    return Register(**{**fields, **changes})


def thin(i: int, of: int, **changes: Any) -> Reduced:
    """Commit `i`, which takes the place of commit `of`."""
    return reduced(i, replaces=commit_id(of), thinned=("optimizer/**",), step=of, **changes)


THINNED = (*THREE, thin(4, 1))
