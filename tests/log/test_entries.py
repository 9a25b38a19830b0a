"""An entry reads back as it was written, and nothing else reads at all."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import CommitId, SessionId, digest, pack_id
from ckptstore.core.model import PackRecord
from ckptstore.errors import Corrupt
from ckptstore.log.entries import (
    Body,
    Commit,
    Condemn,
    Delete,
    Forget,
    Moved,
    NewerEntry,
    Over,
    Reduced,
    Register,
    Settings,
    Tag,
    Undelete,
    check_follows,
    decode_entry,
    origin,
)
from tests.log.builders import STORE, commit, encoded

HEADER: dict[str, Any] = {
    "n": 7,
    "attempt": "b" * 32,
    "time_ns": 1_700_000_000_123_456_789,
    "store": STORE,
    "generation": 1,
    "prev_hash": "c" * 64,
    "prev_bytes": 321,
}


def hexes(digits: int) -> st.SearchStrategy[str]:
    return st.text("0123456789abcdef", min_size=digits, max_size=digits)


sessions = hexes(24).map(SessionId)
commits = st.lists(hexes(64).map(CommitId), max_size=3).map(tuple)
counts = st.integers(0, 2**53)
numbers = st.frozensets(st.integers(1, 3000) | st.integers(1, 2**53 - 8), max_size=40)
words = st.text(max_size=20).filter(lambda text: text.isprintable())
labels = st.from_regex(r"[A-Za-z0-9_][A-Za-z_]{0,8}x", fullmatch=True)


def pairs(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(words, values, max_size=3).map(
        lambda found: tuple(sorted(found.items()))
    )


records = st.builds(
    PackRecord,
    st.builds(pack_id, sessions, st.integers(0, 99), st.integers(0, 99)),
    counts,
    counts,
    st.booleans(),
    counts,
)
record_lists = st.lists(records, max_size=3).map(tuple)
of_commit: dict[str, st.SearchStrategy[Any]] = {
    "session": sessions,
    "commit": hexes(64).map(CommitId),
    "content": hexes(64),
    "run": labels,
    "step": st.none() | st.integers(-(2**53), 2**53),
    "parents": commits,
    "message": words,
    "metrics": pairs(st.floats(allow_nan=False)),
    "tags": st.lists(labels, max_size=2).map(tuple),
    "packs": record_lists,
    "reused": numbers,
    "schemas": pairs(hexes(64)),
    "logical_bytes": counts,
    "new_bytes": counts,
    "leaves": counts,
    "document_bytes": counts,
}
bodies: st.SearchStrategy[Body] = st.one_of(
    st.builds(Commit, **of_commit),
    st.builds(
        Reduced,
        **of_commit,
        replaces=st.none() | hexes(64).map(CommitId),
        thinned=st.lists(words, max_size=3).map(tuple),
        cast=pairs(words),
    ),
    st.builds(Tag, labels, st.none() | hexes(64).map(CommitId), numbers),
    st.builds(Forget, commits, words),
    st.builds(Undelete, commits, numbers),
    st.builds(Condemn, counts, counts, numbers, commits),
    st.builds(Register, sessions, counts, counts, record_lists, numbers),
    st.builds(Delete, numbers),
    st.builds(Over, st.lists(sessions, max_size=3).map(tuple)),
    st.builds(Settings, pairs(st.none() | words | counts | st.lists(words, max_size=3).map(tuple))),
    st.builds(Moved, words, counts),
)


@given(body=bodies)
def test_every_body_reads_back_as_it_was_written(body: Body) -> None:
    data = encoded(body, **HEADER)
    entry = decode_entry(data)
    assert entry.body == body
    assert {name: getattr(entry, name) for name in HEADER} == HEADER
    assert (entry.hash, entry.bytes) == (digest(data[65:]).hex(), len(data))


def test_the_bytes_of_an_entry_are_those_of_the_format() -> None:
    data = encoded(Delete(frozenset({9, 12})), **HEADER)
    head, body = data.split(b"\n")
    assert head == digest(body).hex().encode()
    assert body == (
        b'{"attempt":"'
        + b"b" * 32
        + b'","generation":1,"kind":"delete","n":7,"packs":[9,"AAEJ"],"prev":["'
        + b"c" * 64
        + b'",321],'
        b'"store":"' + b"5" * 32 + b'","time_ns":"1700000000123456789"}'
    )


def test_an_entry_takes_what_the_number_of_its_packs_takes_however_far_apart_they_lie() -> None:
    near, far = frozenset({1, *range(50, 90, 2)}), frozenset({1, *range(5_000_000, 5_000_040, 2)})
    sizes = [len(encoded(Delete(packs), **HEADER)) for packs in (near, far)]
    assert sizes[1] <= sizes[0] + 4


def test_a_set_of_numbers_beyond_all_memory_is_read() -> None:
    far = frozenset({1, 2**53 - 1_000})
    assert decode_entry(encoded(Delete(far), **HEADER)).body == Delete(far)


@pytest.mark.parametrize("damage", [0x01, 0x80])
def test_any_flipped_byte_is_found(damage: int) -> None:
    data = encoded(commit(1), **HEADER)
    for i in range(len(data)):
        damaged = bytearray(data)
        damaged[i] ^= damage
        with pytest.raises(Corrupt):
            decode_entry(bytes(damaged))


def test_a_truncated_entry_is_found_at_every_length() -> None:
    data = encoded(commit(1), **HEADER)
    for size in range(len(data)):
        with pytest.raises(Corrupt):
            decode_entry(data[:size])


def sealed(**changes: Any) -> bytes:
    """A well-hashed entry with some keys replaced; `...` removes one."""
    document = json.loads(encoded(commit(1), **HEADER)[65:])
    document = {key: value for key, value in {**document, **changes}.items() if value is not ...}
    body = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return digest(body).hex().encode() + b"\n" + body


@pytest.mark.parametrize(
    "changes",
    [
        {"n": -1},
        {"n": True},
        {"n": "7"},
        {"n": ...},
        {"kind": ...},
        {"kind": ["commit"]},
        {"attempt": "x"},
        {"time_ns": "1e9"},
        {"time_ns": 1},
        {"time_ns": str(2**63)},
        {"time_ns": str(-(2**63) - 1)},
        {"prev": ["c" * 64]},
        {"prev": ["C" * 64, 1]},
        {"store": "../../etc"},
        {"session": "../../../../../../etc"},
        {"commit": "0" * 63},
        {"run": "a/../b"},
        {"tags": ["latest"]},
        {"packs": [[1, "../../x", 1, 1, 0]]},
        {"packs": [[1, "0" * 24 + "-0-0", 1, 1, 2]]},
        {"packs": [[1, "0" * 24 + "-0-0", -1, 1, 0]]},
        {"packs": {}},
        {"reused": [0, "!"]},
        {"reused": [-1, "AAEB"]},
        {"reused": [0]},
        {"reused": [5, "AAEC"]},
        {"reused": [5, "AAIBAA=="]},
        {"reused": [5, "AAEBAAEB"]},
        {"reused": [5, "AAE="]},
        {"reused": [5, "gICAgICAgICAgIA="]},
        {"reused": [2**53, "AAEB"]},
        {"metrics": {"loss": 1}},
        {"metrics": []},
        {"schemas": {"model": "x"}},
        {"leaves": None},
        {"more": 1},
        {"message": ...},
    ],
    ids=str,
)
def test_a_well_hashed_entry_with_wrong_content_is_corrupt(changes: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        decode_entry(sealed(**changes))


def test_an_unknown_kind_of_entry_stops_the_reader_without_calling_it_damage() -> None:
    with pytest.raises(NewerEntry, match="upgrade"):
        decode_entry(sealed(kind="teleport"))


@pytest.mark.parametrize(
    "changes", [{"n": 2}, {"store": "6" * 32}, {"prev_hash": "d" * 64}, {"prev_bytes": 1}], ids=str
)
def test_an_entry_follows_only_the_one_that_it_names(changes: dict[str, Any]) -> None:
    start = origin(STORE)
    right = {**HEADER, "n": 1, "prev_hash": start.hash, "prev_bytes": start.bytes}
    check_follows(decode_entry(encoded(commit(1), **right)), start, STORE)
    with pytest.raises(Corrupt):
        check_follows(decode_entry(encoded(commit(1), **{**right, **changes})), start, STORE)
