"""Checkpoints of the log: the folded state in one file, so that opening a store need not read its
whole log (docs/format.md §9).

A checkpoint is a cache of the log. One that is damaged, of another store, of another fold version
or not at the log's own entry is ignored. It is stored by columns, with ids of one length
concatenated: 10,000 commits are read in a tenth of a second.
"""

import logging
import struct
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import zstandard
from rpds import HashTrieMap, HashTrieSet

from ckptstore.core.ids import StoreId, checkpoint_key, digest
from ckptstore.core.paths import make_directories, replace_file
from ckptstore.errors import Corrupt, NotFound
from ckptstore.log.entries import Position, decode_entry, origin
from ckptstore.log.fold import FOLD_VERSION, CommitRow, Pack, State
from ckptstore.log.log_backend import LogBackend
from ckptstore.log.state import Commits, Packs
from ckptstore.objects.canonical import decode, encode
from ckptstore.storage.contract import Storage
from ckptstore.storage.limits import CHECKPOINT_BYTES_MAX

CHECKPOINTS_KEPT = 2

_CHECKPOINT_PREFIX = "log/checkpoint-"
_HASH_DIGITS = 64
_SESSION_DIGITS = 24
_ZSTD_LEVEL = 3

_logger = logging.getLogger("ckptstore")

T = TypeVar("T")


def encode_state(state: State) -> bytes:
    """The bytes of the file `log/checkpoint-<n>`."""
    document = {
        "fold": FOLD_VERSION,
        "n": state.n,
        "entry": [state.hash, state.bytes],
        "store": state.store,
        "state": {
            "moved": list(state.moved) if state.moved else None,
            "packs": _packs_to_columns(state.packs),
            "next_pack": state.next_pack,
            "commits": _commits_to_columns(state.commits),
            "tags": dict(state.tags),
            "over": "".join(sorted(state.over)),
            "ended": "".join(sorted(state.ended)),
            "fence": state.fence,
            "settings": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in state.settings.items()
            },
            "runs": {run: list(newest) for run, newest in state.runs.items()},
        },
    }
    frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(encode(document))
    return digest(frame).hex().encode() + b"\n" + frame


def decode_state(data: bytes, store: StoreId, generation: int) -> State:
    """Decode what `encode_state` encoded of `store`, for a log opened as `generation`. Raises
    `Corrupt` for anything else."""
    frame = memoryview(data)[_HASH_DIGITS + 1 :]
    if data[: _HASH_DIGITS + 1] != digest(frame).hex().encode() + b"\n":
        raise Corrupt(
            "a checkpoint of the log's state does not match its hash; it is ignored and may be "
            "deleted"
        )
    try:
        document = decode(_decompress(frame))
        if (document["fold"], document["store"]) != (FOLD_VERSION, store):
            raise ValueError(
                f"wanted fold {FOLD_VERSION} of store {store}, got fold {document['fold']} of "
                f"store {document['store']}"
            )
        return _state(document, store, generation)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        struct.error,
        zstandard.ZstdError,
    ) as error:
        raise Corrupt(
            f"a checkpoint of the log's state is malformed: {error}; it is ignored and may be "
            "deleted"
        ) from error


def _decompress(frame: memoryview) -> bytes:
    size = zstandard.get_frame_parameters(frame).content_size
    if size > CHECKPOINT_BYTES_MAX:
        raise ValueError(f"wanted at most {CHECKPOINT_BYTES_MAX} bytes, got {size}")
    return zstandard.ZstdDecompressor().decompress(frame, max_output_size=CHECKPOINT_BYTES_MAX)


def _state(document: dict[str, Any], store: StoreId, generation: int) -> State:
    fields, (entry_hash, entry_bytes) = document["state"], document["entry"]
    return State(
        document["n"],
        entry_hash,
        entry_bytes,
        store,
        generation,
        moved=(fields["moved"][0], fields["moved"][1]) if fields["moved"] else None,
        packs=_packs_from_columns(fields["packs"]),
        next_pack=fields["next_pack"],
        commits=_commits_from_columns(fields["commits"]),
        tags=HashTrieMap(fields["tags"]),
        over=HashTrieSet(_cut(fields["over"], _SESSION_DIGITS)),
        ended=HashTrieSet(_cut(fields["ended"], _SESSION_DIGITS)),
        fence=fields["fence"],
        settings=HashTrieMap(
            (name, tuple(v) if isinstance(v, list) else v) for name, v in fields["settings"].items()
        ),
        runs=HashTrieMap((run, tuple(newest)) for run, newest in fields["runs"].items()),
    )


def _packs_to_columns(packs: Packs) -> dict[str, list[Any]]:
    numbers = sorted(packs)
    rows = [packs[number] for number in numbers]
    return {
        "number": numbers,
        "id": [p.id for p in rows],
        "bytes": [p.bytes for p in rows],
        "chunks": [p.chunks for p in rows],
        "metadata": [p.metadata for p in rows],
        "live": [p.live for p in rows],
        "stamp": [p.stamp for p in rows],
    }


def _packs_from_columns(columns: dict[str, Any]) -> Packs:
    rows = (columns[name] for name in ("id", "bytes", "chunks", "metadata", "live", "stamp"))
    return HashTrieMap(zip(columns["number"], map(Pack, *rows), strict=True))


def _commits_to_columns(commits: Commits) -> dict[str, Any]:
    items = sorted(commits.items(), key=lambda item: item[1].n)
    rows = [row for _, row in items]
    values = [value for row in rows for _, value in row.metrics]
    return {
        "id": "".join(commit for commit, _ in items),
        "n": [row.n for row in rows],
        "session": "".join(row.session for row in rows),
        "content": "".join(row.content for row in rows),
        "run": [row.run for row in rows],
        "step": [row.step for row in rows],
        "time_ns": [str(row.time_ns) for row in rows],
        "parents": [len(row.parents) for row in rows],
        "parent": "".join(parent for row in rows for parent in row.parents),
        "metrics": [len(row.metrics) for row in rows],
        "metric": [name for row in rows for name, _ in row.metrics],
        "value": struct.pack(f">{len(values)}d", *values).hex(),
        "soft": [row.soft for row in rows],
    }


def _commits_from_columns(columns: dict[str, Any]) -> Commits:
    ids, sessions = _cut(columns["id"], _HASH_DIGITS), _cut(columns["session"], _SESSION_DIGITS)
    bits = bytes.fromhex(columns["value"])
    metrics = list(zip(columns["metric"], struct.unpack(f">{len(bits) // 8}d", bits), strict=True))
    rows = map(
        CommitRow,
        columns["n"],
        sessions,
        _cut(columns["content"], _HASH_DIGITS),
        columns["run"],
        columns["step"],
        map(int, columns["time_ns"]),
        _group(_cut(columns["parent"], _HASH_DIGITS), columns["parents"]),
        _group(metrics, columns["metrics"]),
        columns["soft"],
    )
    return HashTrieMap(zip(ids, rows, strict=True))


def _cut(text: str, digits: int) -> Sequence[Any]:
    """Split `text`, a concatenation of ids, into ids of this many digits."""
    return [text[i : i + digits] for i in range(0, len(text), digits)]


def _group(items: Sequence[T], counts: Iterable[int]) -> Iterable[tuple[T, ...]]:
    """Split `items` into groups of `counts[0]`, `counts[1]` … items."""
    rest = iter(items)
    return (tuple(islice(rest, count)) for count in counts)


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
            make_directories(self._memory.parent)
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
            state = self._decode(self._memory.read_bytes())
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
