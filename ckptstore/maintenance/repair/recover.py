"""Recovering the exact bytes of damaged or lost log entries and commit documents, and a lost
`ckptstore.json` from the log, packs and commits. Objects that `repair` removes or replaces move to
`quarantine/`, under unique names.

A document's hash is its commit's id. An entry's hash and length are attested by the next entry, by
a checkpoint, by the catalog, or by the entry's own first line. Only bytes that match are written.
"""

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from ckptstore.core.config import CHUNK_BYTES, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, MIB, StoreConfig
from ckptstore.core.ids import CommitId, StoreId, digest, log_key, new_session_id, segment_key
from ckptstore.core.paths import make_directories
from ckptstore.errors import CkptStoreError
from ckptstore.log.entries import Entry, decode_entry, encode_entry
from ckptstore.log.log_backend import decode_segment, segment_end
from ckptstore.maintenance.check.log import BadEntry, decode_at, list_log, read_chain, read_small
from ckptstore.maintenance.check.trees import Contents
from ckptstore.objects.codecs import RAW
from ckptstore.objects.documents import decode_document
from ckptstore.objects.pack import TENSOR
from ckptstore.restore.reader import Tree
from ckptstore.storage.contract import Storage

FLIP_BYTES_MAX = 16384
"""Larger objects are not tried bit by bit: it would take minutes."""

_HASH_DIGITS = 64
_WRONG_DIGITS = 2
"""Digits of an entry's first line that may differ from its body's hash and still attest it: no
other body comes that near."""

_ONE_BIT = "its own bytes, one bit flipped back"


def recover_entry(
    bad: BadEntry, store: StoreId, own: Storage, mirrors: Sequence[Storage], kept: bytes | None
) -> tuple[str, bytes] | None:
    """The entry `bad.n`, and whether it is from its own bytes, from `kept` (the catalog's copy),
    from a segment of the store's `own` or from a mirror; None if all fail."""
    for origin, data in _versions(bad, store, own, mirrors, kept):
        if _is_the_one(bad, data, store):
            return origin, data
    return None


def recover_document(
    storage: Storage, key: str, commit: CommitId, mirrors: Sequence[Storage]
) -> tuple[str, bytes] | None:
    """The document of a commit, and whether it is from its own bytes or from a mirror; None if
    both fail."""
    for mirror in mirrors:
        for place in _document_keys(mirror, key, commit):
            data = read_small(mirror, place)
            if data is not None and _is_document(data, commit):
                return mirror.url, data
    for data in flipped(read_small(storage, key)):
        if _is_document(data, commit):
            return _ONE_BIT, data
    return None


def recover_config(storage: Storage, damaged: bytes) -> StoreConfig | None:
    """What `ckptstore.json` must say so that every commit is read right; None if the store's
    identity is lost: it is what most entries of the log name. What the `damaged` file says counts
    where several values would do."""
    files = (read_small(storage, log_key(n)) for n in list_log(storage).entries)
    entries = [entry for data in files if (entry := _decoded(decode_entry, data or b""))]
    if not entries:
        return None
    store = Counter(entry.store for entry in entries).most_common(1)[0][0]
    generation = max(entry.generation for entry in entries if entry.store == store)
    contents = Contents(storage, read_chain(storage, store, generation).state)
    compressed = any(
        ((table["kind"] == TENSOR) & (table["codec"] != RAW)).any()
        for table in contents.tables.values()
    )
    said = re.search(rb'"chunk_bytes": ([0-9]{1,9})', damaged)
    fitting = _chunk_sizes(contents)
    likely = (int(said[1]) if said else 0, CHUNK_BYTES, *sorted(fitting))
    chunk_bytes = next((n for n in likely if n in fitting), CHUNK_BYTES)
    codec = "zstd" if compressed or b'"codec": "zstd"' in damaged else "raw"
    return StoreConfig(store, chunk_bytes, codec, generation=generation)


def _chunk_sizes(contents: Contents) -> set[int]:
    """The chunk sizes that explain the chunk count of every leaf."""
    fitting = {
        CHUNK_BYTES_MIN << i for i in range((CHUNK_BYTES_MAX // CHUNK_BYTES_MIN).bit_length())
    }
    for _, document in contents.documents():
        for key, ref in document.trees:
            with suppress(CkptStoreError):
                fitting -= {n for n in fitting if not _fits(contents.tree(key, ref, n))}
    return fitting


def _fits(tree: Tree) -> bool:
    try:
        for i, alias in enumerate(tree.schema.aliases):
            if alias < 0:
                tree.check(i)
    except (CkptStoreError, KeyError, ValueError):
        return False
    return True


def _document_keys(mirror: Storage, key: str, commit: CommitId) -> Iterator[str]:
    """The keys of the document in a mirror: the same key in a copy of the store, another
    session's in a push target."""
    yield key
    with suppress(CkptStoreError):
        for other, _ in mirror.list("commits/"):
            if other.endswith(f"-{commit}") and other != key:
                yield other


def _versions(
    bad: BadEntry, store: StoreId, own: Storage, mirrors: Sequence[Storage], kept: bytes | None
) -> Iterator[tuple[str, bytes]]:
    """Bytes that may be those of an entry."""
    if bad.data is not None:
        body = bad.data[_HASH_DIGITS + 1 :]
        whole = digest(body).hex().encode() + b"\n" + body
        yield "its own body, under a new first line", whole
    if kept is not None:
        yield "the catalog's copy", kept
    last = segment_end(bad.n)
    with suppress(CkptStoreError):
        for entry in decode_segment(read_small(own, segment_key(last)) or b"", last, store):
            if entry.n == bad.n:
                yield "a segment of the log", encode_entry(entry)
    for mirror in mirrors:
        if (data := read_small(mirror, log_key(bad.n))) is not None:
            yield mirror.url, data
    yield from ((_ONE_BIT, data) for data in flipped(bad.data))


def flipped(data: bytes | None) -> Iterator[bytes]:
    """`data` with each of its bits flipped; nothing for more than `FLIP_BYTES_MAX`."""
    candidate = bytearray(data if data is not None and len(data) <= FLIP_BYTES_MAX else b"")
    for i in range(len(candidate)):
        for bit in range(8):
            candidate[i] ^= 1 << bit
            yield bytes(candidate)
            candidate[i] ^= 1 << bit


def _is_the_one(bad: BadEntry, data: bytes, store: StoreId) -> bool:
    """Whether `data` is the attested entry."""
    entry = _decoded(lambda data: decode_at(bad.n, data, store), data)
    if entry is None:
        return False
    if bad.wanted is not None:
        return entry.position == bad.wanted
    line = entry.hash.encode() + b"\n"
    return (
        bad.data is not None
        and len(bad.data) == entry.bytes
        and sum(a != b for a, b in zip(bad.data, line, strict=False)) <= _WRONG_DIGITS
    )


def _decoded(decode: Callable[[bytes], Entry], data: bytes) -> Entry | None:
    try:
        return decode(data)
    except CkptStoreError:
        return None


def _is_document(data: bytes, commit: CommitId) -> bool:
    try:
        decode_document(data, commit)
    except CkptStoreError:
        return False
    return True


def quarantine(storage: Storage, key: str) -> None:
    """Move an object to `quarantine/`, where it is durable before the original is removed; an
    absent one is ignored."""
    if storage.size(key) is None:
        return
    kept = _keep(storage, key)
    storage.sync_dirs([kept])
    storage.delete(key)
    storage.sync_dirs([key])


def replace_small(storage: Storage, key: str, data: bytes) -> None:
    """Write a small object after copying the old one to `quarantine/`: its name is never free in
    between."""
    old = read_small(storage, key)
    if old is not None:
        storage.put(next(_free_names(storage, key)), old)
    storage.put(key, data)


def copy_object(storage: Storage, source: str, target: str) -> None:
    """Copy an object in pieces to an unused name, and put it in place atomically."""
    size = storage.size(source) or 0
    writer = storage.create(target, session=new_session_id())
    try:
        for start in range(0, size, 8 * MIB):
            writer.append([memoryview(storage.read(source, start, min(start + 8 * MIB, size)))])
        writer.finish()
    except (CkptStoreError, OSError):
        writer.discard()
        raise
    storage.sync_dirs([target])


def _keep(storage: Storage, key: str) -> str:
    """Give an object a second name in `quarantine/`, or copy it if storage has no second names."""
    names = _free_names(storage, key)
    if (root := storage.capabilities.local_root) is None:
        copy_object(storage, key, name := next(names))
        return name
    for name in names:
        make_directories((root / name).parent)
        try:
            os.link(root / key, root / name)
        except FileExistsError:
            continue
        except OSError:
            copy_object(storage, key, name)
        return name
    raise AssertionError("an unused name always exists")


def _free_names(storage: Storage, key: str) -> Iterator[str]:
    for n in itertools.count():
        name = f"quarantine/{key}~{n}" if n else f"quarantine/{key}"
        if storage.size(name) is None:
            yield name
