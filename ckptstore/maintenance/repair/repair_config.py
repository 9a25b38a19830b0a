"""Recovering `ckptstore.json`: by flipping one bit back, or else from log, packs and commits."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from ckptstore.core.config import CHUNK_BYTES, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, StoreConfig
from ckptstore.core.ids import CHUNK_ID_BYTES, StoreId, log_key
from ckptstore.errors import CkptStoreError
from ckptstore.log.entries import Entry, decode_entry
from ckptstore.log.fold import State
from ckptstore.maintenance.check.log_audit import list_log, read_chain, read_small
from ckptstore.maintenance.check.metadata_reader import Trees, cells_of
from ckptstore.objects.codecs import RAW
from ckptstore.objects.documents import decode_config
from ckptstore.objects.pack import TENSOR, FooterTable
from ckptstore.repository.footers import Inventory, load_tables
from ckptstore.storage.contract import Storage

FLIP_BYTES_MAX = 16384
"""Larger objects are not tried bit by bit: it would take minutes."""

T = TypeVar("T")


def flipped_back(data: bytes, accept: Callable[[bytes], T | None]) -> T | None:
    """The first result that `accept` returns for `data` with one bit flipped; None if there is
    none."""
    if len(data) > FLIP_BYTES_MAX:
        return None
    candidate = bytearray(data)
    for i in range(len(candidate)):
        for bit in range(8):
            candidate[i] ^= 1 << bit
            if (found := accept(bytes(candidate))) is not None:
                return found
            candidate[i] ^= 1 << bit
    return None


def recover_config(storage: Storage, data: bytes | None) -> tuple[StoreConfig, bool] | None:
    """The original config and True; or an inferred one that is right for every existing commit
    and False; None if the store's identity is lost. `data` is what is left of the file."""
    if data is not None and (
        config := flipped_back(data, lambda candidate: _decoded(candidate, storage.url))
    ):
        return config, True
    store, generation = _identity(storage)
    if store is None:
        return None
    state = read_chain(storage, store, generation).state
    tables = {
        pack: table
        for pack, table in load_tables(storage, list(state.packs.values()))
        if not isinstance(table, CkptStoreError)
    }
    config = StoreConfig(store, codec=_codec(tables.values()), generation=generation)
    return replace(
        config, chunk_bytes=_chunk_bytes(Trees(storage, Inventory(tables)), state)
    ), False


def _decoded(data: bytes, where: str) -> StoreConfig | None:
    try:
        return decode_config(data, where)
    except CkptStoreError:
        return None


def _identity(storage: Storage) -> tuple[StoreId | None, int]:
    """The store that most entries of the log name, and the newest generation."""
    entries = [
        entry
        for n in list_log(storage).entries
        if (entry := _entry(read_small(storage, log_key(n))))
    ]
    if not entries:
        return None, 1
    store = Counter(entry.store for entry in entries).most_common(1)[0][0]
    return store, max(entry.generation for entry in entries if entry.store == store)


def _entry(data: bytes | None) -> Entry | None:
    try:
        return decode_entry(data or b"")
    except CkptStoreError:
        return None


def _codec(tables: Iterable[FooterTable]) -> str:
    """`zstd` if any tensor was compressed: the codec only applies to new chunks."""
    compressed = any(
        ((table["kind"] == TENSOR) & (table["codec"] != RAW)).any() for table in tables
    )
    return "zstd" if compressed else "raw"


def _chunk_bytes(trees: Trees, state: State) -> int:
    """The chunk size that explains the chunk count of every leaf; the default one if several do."""
    fitting = [
        CHUNK_BYTES_MIN << i for i in range((CHUNK_BYTES_MAX // CHUNK_BYTES_MIN).bit_length())
    ]
    for _, _, document in trees.documents(state):
        for _, ref in document.trees:
            try:
                schema, contents = trees.contents(ref)
            except CkptStoreError:
                continue
            held = [
                (i, content)
                for i, content in enumerate(contents)
                if content.ids and schema.aliases[i] < 0
            ]
            fitting = [
                n
                for n in fitting
                if all(cells_of(schema, i, c, n) * CHUNK_ID_BYTES == len(c.ids) for i, c in held)
            ]
    return CHUNK_BYTES if CHUNK_BYTES in fitting or not fitting else fitting[0]
