"""Log entries: atomic changes of the store, each chained to the one before (docs/format.md §8).

A body describes the change; an entry is a body at its position in the chain. The tables below drive
both the encoder and the decoder.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from ckptstore.core.ids import (
    CommitId,
    PackId,
    SessionId,
    StoreId,
    check_run,
    digest,
    parse_commit_id,
    parse_session_id,
    parse_store_id,
    parse_tag,
)
from ckptstore.core.model import CommitDocument, PackRecord
from ckptstore.errors import Conflict, Corrupt
from ckptstore.objects.canonical import bits_float, decode, encode, float_bits
from ckptstore.objects.fields import (
    COMMITS,
    COUNT,
    NUMBERS,
    PACKS,
    SESSION,
    TEXT,
    Field,
    Setting,
    as_it_is,
    optional,
    pairs_of,
    parse_attempt,
    parse_hash,
    parse_integer,
    parse_link,
    parse_setting,
    parse_text,
    parse_time,
    setting_to_json,
    tuple_of,
)
from ckptstore.objects.frames import seal, unseal
from ckptstore.storage.contract import ENTRY_BYTES_MAX

_HASH_DIGITS = 64


class NewerEntry(Conflict):
    """The entry was written by a newer ckptstore and is unknown here. Upgrade; nothing beyond it
    may be read or appended."""


@dataclass(frozen=True, slots=True)
class Commit:
    """`packs` are new, written by `session`; `reused` are numbers of listed packs that hold the
    commit's other chunks."""

    session: SessionId
    commit: CommitId
    content: str
    run: str
    step: int | None
    parents: tuple[CommitId, ...]
    message: str
    metrics: tuple[tuple[str, float], ...]
    tags: tuple[str, ...]
    packs: tuple[PackRecord, ...]
    reused: frozenset[int]
    schemas: tuple[tuple[str, str], ...]
    logical_bytes: int
    new_bytes: int
    leaves: int
    document_bytes: int


@dataclass(frozen=True, slots=True)
class Reduced(Commit):
    """A commit that says what it has less of than the state that was committed.

    It takes the place of `replaces`, which is forgotten. `thinned` are globs of the leaves that
    are gone, `cast` globs of those of lower precision, each with its dtype.
    """

    replaces: CommitId | None
    thinned: tuple[str, ...]
    cast: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Tag:
    """`name` points at `commit` from now on, or is removed if that is None; `reused` are the packs
    of the commit."""

    name: str
    commit: CommitId | None
    reused: frozenset[int]


@dataclass(frozen=True, slots=True)
class Forget:
    """`commits` are soft-deleted: they are no longer roots for gc, but `undelete` can restore them
    until then."""

    commits: tuple[CommitId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Undelete:
    """`commits` are roots again; `reused` are the packs that hold their chunks. A commit that took
    the place of one of them is forgotten."""

    commits: tuple[CommitId, ...]
    reused: frozenset[int]


@dataclass(frozen=True, slots=True)
class Condemn:
    """The packs and commits that gc found dead at position `mark`: `packs` stop being dedup
    targets, and the commits of `purge` are gone for good.

    `fence` is the last condemning entry that the mark, or this gc since, has seen.
    """

    mark: int
    fence: int
    packs: frozenset[int]
    purge: tuple[CommitId, ...]


@dataclass(frozen=True, slots=True)
class Register:
    """`packs`, written by `session`, are copies of live chunks of the packs `condemn` at position
    `mark`. If `condemn` is empty, they hold chunks that a mirror received for a commit in transfer.
    """

    session: SessionId
    mark: int
    fence: int
    packs: tuple[PackRecord, ...]
    condemn: frozenset[int]


@dataclass(frozen=True, slots=True)
class Delete:
    """Condemned packs that are no longer listed: their objects may be deleted from now on."""

    packs: frozenset[int]


@dataclass(frozen=True, slots=True)
class Over:
    """Sessions that may no longer append: what they wrote and the log does not list is garbage."""

    sessions: tuple[SessionId, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings with their new values; None removes one."""

    values: tuple[tuple[str, Setting], ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """The log continues at `place` as `next_generation`; nothing may be appended here any more."""

    place: str
    next_generation: int


Body: TypeAlias = (
    Commit | Tag | Forget | Undelete | Condemn | Register | Delete | Over | Settings | Moved
)


class Position(NamedTuple):
    """A position in the chain: number, hash and file length of the last entry read."""

    n: int
    hash: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """`hash` is the hash of the encoded body, `bytes` the length of the file; the next entry names
    both."""

    n: int
    attempt: str
    time_ns: int
    store: StoreId
    generation: int
    prev_hash: str
    prev_bytes: int
    body: Body
    hash: str = ""
    bytes: int = 0

    @property
    def position(self) -> Position:
        return Position(self.n, self.hash, self.bytes)


def origin(store: StoreId) -> Position:
    """The position before entry 1."""
    return Position(0, digest(store.encode()).hex(), 0)


def encode_entry(entry: Entry) -> bytes:
    """The bytes of the file `log/<n>`. Its hash and length are not read from `entry`."""
    kind = kind_of(entry.body)
    document: dict[str, Any] = {
        "n": entry.n,
        "store": entry.store,
        "generation": entry.generation,
        "attempt": entry.attempt,
        "time_ns": str(entry.time_ns),
        "prev": [entry.prev_hash, entry.prev_bytes],
        "kind": kind,
    }
    for name, field in _FIELDS[kind].items():
        document[name] = field.encode(getattr(entry.body, name))
    return seal(encode(document))


def decode_entry(data: bytes) -> Entry:
    """Decode the file `log/<n>`. Raises `Corrupt` for invalid bytes and `NewerEntry` for an unknown
    kind."""
    if len(data) > ENTRY_BYTES_MAX:
        raise Corrupt(
            f"an entry of the log has {len(data)} bytes; wanted at most {ENTRY_BYTES_MAX}; run "
            "`ckptstore fsck`"
        )
    body = unseal(data, "an entry of the log")
    data_hash = data[:_HASH_DIGITS].decode()
    document = decode(body)
    try:
        return _entry(document, data_hash, len(data))
    except (KeyError, TypeError, ValueError, AttributeError, Corrupt) as error:
        raise Corrupt(
            f"an entry of the log, hash {data_hash}, is malformed: {error}; run `ckptstore fsck`"
        ) from error


def check_follows(entry: Entry, position: Position, store: StoreId) -> None:
    """Raise `Corrupt` unless `entry` follows `position` in the log of `store`."""
    wanted = (position.n + 1, store, position.hash, position.bytes)
    got = (entry.n, entry.store, entry.prev_hash, entry.prev_bytes)
    if wanted != got:
        raise Corrupt(
            f"the log's chain is broken behind entry {position.n}: wanted (n, store, hash and "
            f"bytes of the entry before) = {wanted}, "
            f"got {got}; an entry was lost, exchanged or comes from another store; run `ckptstore "
            "fsck`"
        )


def _entry(document: Any, data_hash: str, data_bytes: int) -> Entry:
    kind = document["kind"]
    fields = _FIELDS.get(kind)
    if fields is None:
        raise NewerEntry(
            f"entry {document['n']} of the log is of kind {kind!r}, which this version does not "
            "know; upgrade ckptstore"
        )
    if document.keys() - _HEADER.keys() != fields.keys():
        raise ValueError(
            f"wanted the keys {sorted(fields)}, got {sorted(document.keys() - _HEADER.keys())}"
        )
    header = {name: field.decode(document[name]) for name, field in _HEADER.items()}
    body = _BODY_OF[kind](**{name: field.decode(document[name]) for name, field in fields.items()})
    prev_hash, prev_bytes = header["prev"]
    return Entry(
        header["n"],
        header["attempt"],
        header["time_ns"],
        header["store"],
        header["generation"],
        prev_hash,
        prev_bytes,
        body,
        data_hash,
        data_bytes,
    )


_HEADER: dict[str, Field] = {
    "n": COUNT,
    "store": Field(as_it_is, parse_store_id),
    "generation": COUNT,
    "attempt": Field(as_it_is, parse_attempt),
    "time_ns": Field(str, parse_time),
    "prev": Field(list, parse_link),
    "kind": TEXT,
}

_COMMIT: dict[str, Field] = {
    "session": SESSION,
    "commit": Field(as_it_is, parse_commit_id),
    "content": Field(as_it_is, parse_hash),
    "run": Field(as_it_is, check_run),
    "step": optional(parse_integer),
    "parents": COMMITS,
    "message": TEXT,
    "metrics": pairs_of(float_bits, bits_float),
    "tags": tuple_of(parse_tag),
    "packs": PACKS,
    "reused": NUMBERS,
    "schemas": pairs_of(as_it_is, parse_hash),
    "logical_bytes": COUNT,
    "new_bytes": COUNT,
    "leaves": COUNT,
    "document_bytes": COUNT,
}
_REDUCED: dict[str, Field] = {
    "replaces": optional(parse_commit_id),
    "thinned": tuple_of(parse_text),
    "cast": pairs_of(as_it_is, parse_text),
}

_KINDS: dict[type[Body], tuple[str, dict[str, Field]]] = {
    Commit: ("commit", _COMMIT),
    Reduced: ("reduced", _COMMIT | _REDUCED),
    Tag: (
        "tag",
        {
            "name": Field(as_it_is, parse_tag),
            "commit": optional(parse_commit_id),
            "reused": NUMBERS,
        },
    ),
    Forget: ("forget", {"commits": COMMITS, "reason": TEXT}),
    Undelete: ("undelete", {"commits": COMMITS, "reused": NUMBERS}),
    Condemn: ("condemn", {"mark": COUNT, "fence": COUNT, "packs": NUMBERS, "purge": COMMITS}),
    Register: (
        "register",
        {"session": SESSION, "mark": COUNT, "fence": COUNT, "packs": PACKS, "condemn": NUMBERS},
    ),
    Delete: ("delete", {"packs": NUMBERS}),
    Over: ("over", {"sessions": tuple_of(parse_session_id)}),
    Settings: ("settings", {"values": pairs_of(setting_to_json, parse_setting)}),
    Moved: ("moved", {"place": TEXT, "next_generation": COUNT}),
}
_KIND_OF = {cls: kind for cls, (kind, _) in _KINDS.items()}
_BODY_OF: dict[str, Callable[..., Body]] = {kind: cls for cls, (kind, _) in _KINDS.items()}
_FIELDS = dict(_KINDS.values())


def kind_of(body: Body) -> str:
    """The log's word for this kind of body."""
    return _KIND_OF[type(body)]


def new_packs(entry: Entry) -> list[tuple[int, PackId]]:
    """The numbers and names of the packs that an entry registers."""
    assert isinstance(entry.body, Commit | Register)
    return [(record.number, record.id) for record in entry.body.packs]


def new_bytes_of(entry: Entry) -> int:
    """The growth of the store in bytes by a commit, from its entry."""
    assert isinstance(entry.body, Commit)
    return entry.body.new_bytes


def entry_of(
    document: CommitDocument,
    commit: CommitId,
    document_bytes: int,
    records: Sequence[PackRecord],
    reused: Iterable[int],
    *,
    replaces: CommitId | None = None,
) -> Commit:
    """The log entry of a commit that registers the packs `records` and reuses the packs numbered
    `reused`. It may take the place of another commit."""
    thinned, cast = document.thinned, document.cast
    kind: Callable[..., Commit] = Commit
    if thinned or cast or replaces:
        kind = partial(
            Reduced,
            replaces=replaces,
            thinned=thinned.globs if thinned else (),
            cast=cast.globs if cast else (),
        )
    return kind(
        session=document.session,
        commit=commit,
        content=document.content,
        run=document.run,
        step=document.step,
        parents=document.parents,
        message=document.message,
        metrics=document.metrics,
        tags=document.tags,
        packs=tuple(records),
        reused=frozenset(reused),
        schemas=tuple((key, ref.schema.hex()) for key, ref in document.trees),
        logical_bytes=document.logical_bytes,
        new_bytes=document.new_bytes,
        leaves=document.leaves,
        document_bytes=document_bytes,
    )
