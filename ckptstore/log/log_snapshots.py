"""Checkpoints of the log: the folded state in one file, so that opening a store need not read its
whole log (docs/format.md §9).

A checkpoint is a cache of the log. One that is damaged, of another store, of another fold version
or not at the log's own entry is ignored. It is stored by columns: 10,000 commits are
read in a tenth of a second.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rpds import HashTrieMap, HashTrieSet

from ckptstore.core.ids import StoreId, checkpoint_key
from ckptstore.core.paths import make_index_directory, read_plain, replace_file
from ckptstore.errors import Corrupt, NotFound
from ckptstore.log.entries import Position, decode_entry, origin
from ckptstore.log.log_backend import LogBackend
from ckptstore.log.state import FOLD_VERSION, CommitRow, Pack, State
from ckptstore.objects.canonical import decode, encode
from ckptstore.objects.frames import compress, decompress, seal, unseal
from ckptstore.storage.contract import CHECKPOINT_BYTES_MAX, Storage

CHECKPOINTS_KEPT = 2

_TIMES = ("time_ns", "forgotten_ns")

_CHECKPOINT_PREFIX = "log/checkpoint-"

_logger = logging.getLogger("ckptstore")

R = TypeVar("R", Pack, CommitRow)


def encode_state(state: State) -> bytes:
    """The bytes of the file `log/checkpoint-<n>`."""
    numbers = sorted(state.packs)
    commits = sorted(state.commits.items(), key=lambda item: item[1].n)
    rows = [row for _, row in commits]
    columns = {
        **_to_columns(CommitRow, [commit for commit, _ in commits], rows),
        **{name: [str(getattr(row, name)) for row in rows] for name in _TIMES},
        "metrics": [[(name, repr(x)) for name, x in row.metrics] for row in rows],
    }
    document = {
        "fold": FOLD_VERSION,
        "n": state.n,
        "entry": [state.hash, state.bytes],
        "store": state.store,
        "state": {
            "moved": state.moved,
            "packs": _to_columns(Pack, numbers, [state.packs[number] for number in numbers]),
            "next_pack": state.next_pack,
            "commits": columns,
            "tags": dict(state.tags),
            "over": sorted(state.over),
            "ended": sorted(state.ended),
            "fence": state.fence,
            "settings": dict(state.settings),
            "runs": dict(state.runs),
            "replaced": dict(state.replaced),
        },
    }
    return seal(compress(encode(document)))


def decode_state(data: bytes, store: StoreId, generation: int) -> State:
    """Decode what `encode_state` encoded of `store`, for a log opened as `generation`. Raises
    `Corrupt` for anything else."""
    frame = unseal(data, "a checkpoint of the log's state")
    try:
        document = decode(decompress(frame, CHECKPOINT_BYTES_MAX))
        if (document["fold"], document["store"]) != (FOLD_VERSION, store):
            raise ValueError(
                f"wanted fold {FOLD_VERSION} of store {store}, got fold {document['fold']} of "
                f"store {document['store']}"
            )
        return _state(document, store, generation)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(
            f"a checkpoint of the log's state is malformed: {error}; it is ignored and may be "
            "deleted"
        ) from error


def _state(document: dict[str, Any], store: StoreId, generation: int) -> State:
    fields, (entry_hash, entry_bytes) = document["state"], document["entry"]
    columns = fields["commits"]
    columns |= {name: map(int, columns[name]) for name in _TIMES}
    columns |= {name: map(tuple, columns[name]) for name in ("parents", "thinned")}
    columns["metrics"] = (
        tuple((name, float(text)) for name, text in metrics) for metrics in columns["metrics"]
    )
    return State(
        document["n"],
        entry_hash,
        entry_bytes,
        store,
        generation,
        moved=(fields["moved"][0], fields["moved"][1]) if fields["moved"] else None,
        packs=HashTrieMap(_from_columns(Pack, fields["packs"])),
        next_pack=fields["next_pack"],
        commits=HashTrieMap(_from_columns(CommitRow, columns)),
        tags=HashTrieMap(fields["tags"]),
        over=HashTrieSet(fields["over"]),
        ended=HashTrieSet(fields["ended"]),
        fence=fields["fence"],
        settings=HashTrieMap(
            (name, tuple(v) if isinstance(v, list) else v) for name, v in fields["settings"].items()
        ),
        runs=HashTrieMap((run, tuple(newest)) for run, newest in fields["runs"].items()),
        replaced=HashTrieMap(fields["replaced"]),
    )


def _to_columns(of: type[R], keys: Sequence[Any], rows: Sequence[R]) -> dict[str, list[Any]]:
    columns = {name: [getattr(row, name) for row in rows] for name in of._fields}
    return {"key": list(keys), **columns}


def _from_columns(of: type[R], columns: dict[str, Any]) -> Iterator[tuple[Any, R]]:
    fields: tuple[str, ...] = of._fields
    for key, *values in zip(*(columns[name] for name in ("key", *fields)), strict=True):
        yield key, of(*values)


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
