"""A checkpoint is the folded state in one file, so that opening a store need not read its whole log
(docs/format.md §9).

It is a cache of the log: one that is damaged, of another store, of another fold or not of the log's
own entry is `Corrupt` here and ignored by `log.log`. Columns instead of rows, ids of one length one
behind the other: 10,000 commits are read in a tenth of a second.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

import zstandard
from rpds import HashTrieMap, HashTrieSet

from ckptstore.core.ids import StoreId, digest
from ckptstore.errors import Corrupt
from ckptstore.log.fold import FOLD_VERSION, CommitRow, Pack, State
from ckptstore.log.state import Commits, Packs
from ckptstore.objects.canonical import decode, encode
from ckptstore.storage.limits import CHECKPOINT_BYTES_MAX

_HASH_DIGITS = 64
_SESSION_DIGITS = 24
_ZSTD_LEVEL = 3

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
    """What `encode_state` encoded of `store`, for a log opened as `generation`. Raises `Corrupt`
    for anything else."""
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
    """The ids of so many digits each that lie in `text` one behind the other."""
    return [text[i : i + digits] for i in range(0, len(text), digits)]


def _group(items: Sequence[T], counts: Iterable[int]) -> Iterable[tuple[T, ...]]:
    """The first `counts[0]` of `items`, the next `counts[1]`, and so on."""
    rest = iter(items)
    return (tuple(islice(rest, count)) for count in counts)
