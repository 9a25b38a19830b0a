"""Checkpoints of the log: the folded state in one file, so that opening a store need not read its
whole log (docs/format.md §9).

A checkpoint is a cache of the log. One that is damaged, of another store, of another fold version
or not at the log's own entry is ignored. Packs, commits and sessions are rows that are decoded when
they are asked for (`log.rows`): 100,000 commits are there in a tenth of a second.
"""

import json
import logging
import struct
from pathlib import Path
from typing import Any

from rpds import HashTrieMap

from ckptstore.core.ids import CommitId, SessionId, StoreId, checkpoint_key
from ckptstore.core.paths import make_index_directory, read_plain, replace_file
from ckptstore.errors import Corrupt, NotFound
from ckptstore.log.entries import Position, decode_entry, origin
from ckptstore.log.log_backend import LogBackend
from ckptstore.log.rows import Form, Rows, Table, read_table, table_of
from ckptstore.log.state import FOLD_VERSION, CommitRow, Pack, State
from ckptstore.objects.canonical import decode, encode
from ckptstore.objects.frames import compress, decompress, seal, unseal
from ckptstore.storage.contract import CHECKPOINT_BYTES_MAX, Storage

CHECKPOINTS_KEPT = 2

_TIMES = ("time_ns", "forgotten_ns")

_CHECKPOINT_PREFIX = "log/checkpoint-"

_logger = logging.getLogger("ckptstore")

_HEAD = struct.Struct("<I")

_loads = json.JSONDecoder().decode


def _of_session(_: bool) -> bytes:
    return b""


def _session(data: bytes) -> bool:
    if data:
        raise ValueError("a session has a row")
    return True


def _of_pack(pack: Pack) -> bytes:
    return encode(pack)


def _pack(data: bytes) -> Pack:
    return Pack(*_loads(data.decode()))


def _of_commit(row: CommitRow) -> bytes:
    metrics = [(name, repr(x)) for name, x in row.metrics]
    times = {name: str(getattr(row, name)) for name in _TIMES}
    return encode(row._replace(metrics=metrics, **times))  # type: ignore[arg-type]  # as JSON


def _commit(data: bytes) -> CommitRow:
    row = CommitRow(*_loads(data.decode()))
    return row._replace(
        time_ns=int(row.time_ns),
        parents=tuple(row.parents),
        metrics=tuple((name, float(text)) for name, text in row.metrics),
        thinned=tuple(row.thinned),
        forgotten_ns=int(row.forgotten_ns),
    )


def _of_number(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _number(key: bytes) -> int:
    return int.from_bytes(key, "big")


SESSIONS: Form[SessionId, bool] = Form(
    12, bytes.fromhex, lambda key: SessionId(key.hex()), _of_session, _session
)
PACKS: Form[int, Pack] = Form(8, _of_number, _number, _of_pack, _pack)
COMMITS: Form[CommitId, CommitRow] = Form(
    32, bytes.fromhex, lambda key: CommitId(key.hex()), _of_commit, _commit
)


def encode_state(state: State) -> bytes:
    """The bytes of the file `log/checkpoint-<n>`."""
    tables: list[Table[Any, Any]] = [
        table_of(PACKS, state.packs),
        table_of(COMMITS, state.commits),
        table_of(SESSIONS, state.over),
        table_of(SESSIONS, state.ended),
    ]
    stored = [(len(table.keys), table.stored()) for table in tables]
    document = {
        "fold": FOLD_VERSION,
        "n": state.n,
        "entry": [state.hash, state.bytes],
        "store": state.store,
        "state": {
            "moved": state.moved,
            "next_pack": state.next_pack,
            "tags": dict(state.tags),
            "fence": state.fence,
            "settings": dict(state.settings),
            "runs": dict(state.runs),
            "replaced": dict(state.replaced),
        },
        "tables": [[count, len(rows)] for count, rows in stored],
    }
    head = encode(document)
    return seal(compress(b"".join((_HEAD.pack(len(head)), head, *(rows for _, rows in stored)))))


def decode_state(data: bytes, store: StoreId, generation: int) -> State:
    """Decode what `encode_state` encoded of `store`, for a log opened as `generation`. Raises
    `Corrupt` for anything else. A row that is malformed although the hash is right raises it when
    it is asked for."""
    frame = unseal(data, "a checkpoint of the log's state")
    try:
        content = memoryview(decompress(frame, CHECKPOINT_BYTES_MAX))
        (head_bytes,) = _HEAD.unpack_from(content)
        rows_at = _HEAD.size + head_bytes
        document = decode(content[_HEAD.size : rows_at])
        if (document["fold"], document["store"]) != (FOLD_VERSION, store):
            raise ValueError(
                f"wanted fold {FOLD_VERSION} of store {store}, got fold {document['fold']} of "
                f"store {document['store']}"
            )
        return _state(document, content[rows_at:], store, generation)
    except (LookupError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise Corrupt(
            f"a checkpoint of the log's state is malformed: {error}; it is ignored and may be "
            "deleted"
        ) from error


def _state(document: dict[str, Any], rows: memoryview, store: StoreId, generation: int) -> State:
    fields, (entry_hash, entry_bytes) = document["state"], document["entry"]
    packs, commits, over, ended = document["tables"]
    packs_end = packs[1]
    commits_end = packs_end + commits[1]
    over_end = commits_end + over[1]
    if over_end + ended[1] != len(rows):
        raise ValueError(f"{len(rows)} bytes of rows; wanted {over_end + ended[1]}")
    return State(
        document["n"],
        entry_hash,
        entry_bytes,
        store,
        generation,
        moved=(fields["moved"][0], fields["moved"][1]) if fields["moved"] else None,
        packs=Rows(read_table(PACKS, rows[:packs_end], packs[0])),
        next_pack=fields["next_pack"],
        commits=Rows(read_table(COMMITS, rows[packs_end:commits_end], commits[0])),
        tags=HashTrieMap(fields["tags"]),
        over=Rows(read_table(SESSIONS, rows[commits_end:over_end], over[0])),
        ended=Rows(read_table(SESSIONS, rows[over_end:], ended[0])),
        fence=fields["fence"],
        settings=HashTrieMap(
            (name, tuple(v) if isinstance(v, list) else v) for name, v in fields["settings"].items()
        ),
        runs=HashTrieMap((run, tuple(newest)) for run, newest in fields["runs"].items()),
        replaced=HashTrieMap(fields["replaced"]),
    )


class SavedStates:
    """Saved states of one log: checkpoints in the store, and one file in this host's `memory`."""

    def __init__(
        self, storage: Storage, place: LogBackend, genesis: State, memory: Path | None
    ) -> None:
        self._storage = storage
        self._backend = place
        self._genesis = genesis
        self._memory = memory
        self._remembered = 0

    def newest(self, every: int) -> State | None:
        """The state that this host saved, or the newest checkpoint, of one in `every` entries."""
        if (state := self._recall()) is not None:
            return state
        last = self._last_multiple(every) * every
        for n in range(last, max(last - CHECKPOINTS_KEPT * every, 0), -every):
            if (state := self._read_checkpoint(n)) is not None:
                return state
        return None

    def remember(self, state: State, least: int) -> None:
        """Save `state` on this host if it is at least `least` entries ahead of the saved one."""
        if self._memory is None or state.n - self._remembered < least:
            return
        try:
            make_index_directory(self._memory.parent)
            replace_file(self._memory, encode_state(state))
        except OSError as error:
            _logger.debug("the state is not saved at %s: %s", self._memory, error)
            return
        self._remembered = state.n

    def write_checkpoint(self, state: State) -> None:
        """Write the checkpoint at `state`, and delete old ones."""
        self._storage.put(checkpoint_key(state.n), encode_state(state))
        keys = [key for key, _ in self._storage.list(_CHECKPOINT_PREFIX)]
        for key in keys[:-CHECKPOINTS_KEPT]:
            self._storage.delete(key)

    def _decode(self, data: bytes) -> State:
        return decode_state(data, self._genesis.store, self._genesis.generation)

    def _recall(self) -> State | None:
        """The state that this host saved, if it belongs to this log."""
        if self._memory is None:
            return None
        try:
            state = self._decode(read_plain(self._memory))
            if not has_position(self._backend, self._genesis.store, state.position):
                return None
        except (OSError, Corrupt):
            return None
        self._remembered = state.n
        return state

    def _last_multiple(self, every: int) -> int:
        """The largest k such that the log has an entry k * every: double k, then bisect."""
        low, high = 0, 1
        while self._backend.has(high * every):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self._backend.has(middle * every):
                low = middle
            else:
                high = middle
        return low

    def _read_checkpoint(self, n: int) -> State | None:
        """The checkpoint at `n`, if it exists and belongs to this log's own entry `n`."""
        try:
            state = self._decode(self._storage.read(checkpoint_key(n)))
            entry = decode_entry(self._backend.read(n) or b"")
        except (NotFound, Corrupt) as error:
            _logger.debug("no usable checkpoint at entry %d: %s", n, error)
            return None
        return state if state.position == entry.position and n == entry.n else None


def has_position(place: LogBackend, store: StoreId, position: Position) -> bool:
    """Whether `position` is the store's origin or an entry of the log in `place`."""
    if not position.n:
        return position == origin(store)
    data = place.read(position.n)
    return data is not None and decode_entry(data).position == position
