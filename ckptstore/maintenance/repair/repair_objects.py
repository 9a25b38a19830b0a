"""Recovering the exact bytes of damaged or lost log entries and commit documents.

A document's hash is its commit's id. An entry's hash and length are attested by the next entry, by
a checkpoint, by the catalog, or by the entry's own first line. Only bytes that match are written.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckptstore.core.ids import CommitId, StoreId, digest, document_key, log_key, segment_key
from ckptstore.errors import CkptStoreError, Unavailable
from ckptstore.log.entries import Entry, encode_entry
from ckptstore.log.fold import CommitRow
from ckptstore.log.log_backend import decode_segment, segment_end
from ckptstore.maintenance.check.log_audit import BadEntry, decode_at, read_small
from ckptstore.maintenance.repair.repair_config import flipped_back
from ckptstore.objects.documents import decode_document
from ckptstore.storage.contract import Storage

_HASH_DIGITS = 64
_WRONG_DIGITS = 2
"""Digits of an entry's first line that may differ from its body's hash and still attest it: no
other body comes that near."""


@dataclass(frozen=True, slots=True)
class RecoveredObject:
    """The exact bytes of an object, and their source; `commit` if it is a document."""

    key: str
    data: bytes
    origin: str
    commit: CommitId | None = None


def recover_entry(
    bad: BadEntry, store: StoreId, own: Storage, mirrors: Sequence[Storage], kept: bytes | None
) -> RecoveredObject | None:
    """Recover the entry `bad.n` from its own bytes, from `kept` (the catalog's copy), from a
    segment of the store's `own` or from a mirror; None if all fail."""
    key = log_key(bad.n)
    for origin, data in _versions(bad, store, own, mirrors, kept):
        if _is_the_one(bad, data, store):
            return RecoveredObject(key, data, origin)
    if bad.data is not None and (
        found := flipped_back(bad.data, lambda candidate: _accepted(bad, candidate, store))
    ):
        return RecoveredObject(key, found, "its own bytes, one bit flipped back")
    return None


def recover_document(
    storage: Storage, commit: CommitId, row: CommitRow, mirrors: Sequence[Storage]
) -> RecoveredObject | None:
    """Recover the document of a commit from its own bytes or a mirror; None if all fail."""
    key = document_key(row.session, commit)
    for mirror in mirrors:
        for place in _document_keys(mirror, key, commit):
            data = read_small(mirror, place)
            if data is not None and _is_document(data, commit):
                return RecoveredObject(key, data, mirror.url, commit)
    own = read_small(storage, key)
    if own is not None and (
        found := flipped_back(
            own, lambda candidate: candidate if _is_document(candidate, commit) else None
        )
    ):
        return RecoveredObject(key, found, "its own bytes, one bit flipped back", commit)
    return None


def _document_keys(mirror: Storage, key: str, commit: CommitId) -> Iterator[str]:
    """The keys of the document in a mirror: the same key in a copy of the store, another
    session's in a push target."""
    yield key
    with suppress(Unavailable):
        yield from (
            other
            for other, _ in mirror.list("commits/")
            if other.endswith(f"-{commit}") and other != key
        )


def _versions(
    bad: BadEntry, store: StoreId, own: Storage, mirrors: Sequence[Storage], kept: bytes | None
) -> Iterator[tuple[str, bytes]]:
    if bad.data is not None:
        yield "its own body, under a new first line", _with_own_hash(bad.data)
    if kept is not None:
        yield "the catalog's copy", kept
    yield from (
        ("a segment of the log", encode_entry(entry)) for entry in _in_segment(own, bad.n, store)
    )
    for mirror in mirrors:
        if (data := read_small(mirror, log_key(bad.n))) is not None:
            yield mirror.url, data


def _in_segment(storage: Storage, n: int, store: StoreId) -> Iterator[Entry]:
    """Entry `n` of a segment, if there is one."""
    last = segment_end(n)
    with suppress(CkptStoreError):
        yield from (
            entry
            for entry in decode_segment(read_small(storage, segment_key(last)) or b"", last, store)
            if entry.n == n
        )


def _with_own_hash(data: bytes) -> bytes:
    body = data[_HASH_DIGITS + 1 :]
    return digest(body).hex().encode() + b"\n" + body


def _accepted(bad: BadEntry, data: bytes, store: StoreId) -> bytes | None:
    return data if _is_the_one(bad, data, store) else None


def _is_the_one(bad: BadEntry, data: bytes, store: StoreId) -> bool:
    """Whether `data` is the attested entry."""
    entry = _decoded(bad.n, data, store)
    if entry is None:
        return False
    if bad.wanted is not None:
        return entry.position == bad.wanted
    return (
        bad.data is not None
        and len(bad.data) == entry.bytes
        and _first_line_attests(bad.data, entry)
    )


def _first_line_attests(data: bytes, entry: Entry) -> bool:
    line = entry.hash.encode() + b"\n"
    return sum(a != b for a, b in zip(data[: len(line)], line, strict=True)) <= _WRONG_DIGITS


def _decoded(n: int, data: bytes, store: StoreId) -> Entry | None:
    try:
        return decode_at(n, data, store)
    except CkptStoreError:
        return None


def _is_document(data: bytes, commit: CommitId) -> bool:
    try:
        decode_document(data, commit)
    except CkptStoreError:
        return False
    return True
