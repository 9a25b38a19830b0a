"""Rows that a checkpoint has are as those of a map, and only those that are asked for are
decoded."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rpds import HashTrieMap

from ckptstore.errors import Corrupt
from ckptstore.log import log_snapshots
from ckptstore.log.admission import check, one_left
from ckptstore.log.entries import Forget
from ckptstore.log.log_snapshots import decode_state, encode_state
from ckptstore.log.resolve import forgotten_alone
from ckptstore.log.rows import Form, Rows, Table, read_table, table_of
from ckptstore.log.state import CommitRow, State, apply, by_age, number
from tests.log.builders import STORE, commit, commit_id, entry, folded

FORM: Form[int, str] = Form(
    2,
    lambda key: key.to_bytes(2, "big"),
    lambda key: int.from_bytes(key, "big"),
    str.encode,
    bytes.decode,
)

KEYS = st.integers(0, 30)
CHANGES = st.lists(st.tuples(KEYS, st.none() | st.text(max_size=3)), max_size=30)


def changed(
    rows: Rows[int, str], wanted: dict[int, str], key: int, row: str | None
) -> Rows[int, str]:
    """`rows` with one change, which is made in `wanted` too."""
    if row is None:
        wanted.pop(key, None)
        return rows.discard(key)
    wanted[key] = row
    return rows.insert(key, row)


def read_back(table: Table[int, str]) -> Table[int, str]:
    return read_table(FORM, memoryview(table.stored()), len(table.keys))


@given(st.dictionaries(KEYS, st.text(max_size=3)), CHANGES, CHANGES)
def test_rows_are_as_a_map_before_and_after_they_are_stored(
    first: dict[int, str],
    changes: list[tuple[int, str | None]],
    later: list[tuple[int, str | None]],
) -> None:
    rows, wanted = Rows(read_back(table_of(FORM, HashTrieMap(first)))), dict(first)
    for stored in (False, True):
        for key, row in later if stored else changes:
            before, was = rows, dict(wanted)
            rows = changed(rows, wanted, key, row)
            assert dict(before.items()) == was
        assert rows == wanted
        assert len(rows) == len(list(rows)) == len(wanted)
        assert sorted(rows) == sorted(wanted)
        assert sorted(rows.values()) == sorted(wanted.values())
        for key in range(32):
            assert rows.get(key, "none") == wanted.get(key, "none")
            assert (key in rows) == (key in wanted)
        rows = Rows(read_back(rows.table()))


@pytest.mark.parametrize("data", [b"\0\2\0\1", b"\0\1\0\1"], ids=["not ascending", "twice"])
def test_keys_that_do_not_ascend_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="ascend"):
        read_table(FORM, memoryview(data + struct.pack("<2I", 0, 0)), 2)


@given(st.binary(max_size=40), st.integers(0, 5))
def test_bytes_that_are_no_table_are_refused_or_read(data: bytes, count: int) -> None:
    try:
        table = read_table(FORM, memoryview(data), count)
    except (ValueError, struct.error):
        return
    assert read_table(FORM, memoryview(table.stored()), count).stored() == data


def test_a_row_that_cannot_be_decoded_is_corrupt() -> None:
    rows = Rows(Table(FORM, [b"\0\1"], [1], memoryview(b"\xff")))
    assert 1 in rows
    with pytest.raises(Corrupt, match="checkpoint"):
        rows[1]


def many(count: int) -> State:
    """The state after `count` commits, as it is read from a checkpoint."""
    state = folded(*(commit(i) for i in range(1, count + 1)))
    return decode_state(encode_state(state), STORE, 1)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The rows of commits, packs and sessions that are decoded."""
    rows: list[bytes] = []
    for name in ("COMMITS", "PACKS", "SESSIONS"):
        form = getattr(log_snapshots, name)

        def decode(data: bytes, form: Form[object, object] = form) -> object:
            rows.append(data)
            return form.decode(data)

        monkeypatch.setattr(log_snapshots, name, replace(form, decode=decode))
    return rows


def test_a_commit_decodes_no_row_but_those_of_its_run_and_its_packs(decoded: list[bytes]) -> None:
    counts = []
    for count in (50, 500):
        state = many(count)
        assert not decoded
        body = number(state, commit(count + 1, reused=frozenset({1, 2, 3})))
        assert check(state, body) is None
        after = apply(state, entry(state, body))
        assert after.newest("main") == after.newest(None) == commit_id(count + 1)
        assert after.beginning(commit_id(7)) == [commit_id(7)]
        counts.append(len(decoded))
        decoded.clear()
    assert counts[0] == counts[1] <= 10


def test_the_next_checkpoint_copies_what_did_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    coded: list[CommitRow] = []

    def encode(row: CommitRow) -> bytes:
        coded.append(row)
        return form.encode(row)

    form = log_snapshots.COMMITS
    monkeypatch.setattr(log_snapshots, "COMMITS", replace(form, encode=encode))
    state = many(200)
    after = apply(state, entry(state, number(state, commit(201))))
    coded.clear()
    stored = encode_state(after)
    assert [row.n for row in coded] == [201]
    assert stored == encode_state(folded(*(commit(i) for i in range(1, 202))))


def test_latest_is_the_first_by_age_also_among_forgotten_commits() -> None:
    runs = {3: "other", 6: "other"}
    state = folded(
        *(commit(i, run=runs.get(i, "main")) for i in range(1, 9)),
        Forget(tuple(commit_id(i) for i in (2, 4, 5, 6, 8)), "old"),
    )
    for each in (state, decode_state(encode_state(state), STORE, 1), forgotten_alone(state)):
        for run in ("main", "other", None):
            assert each.newest(run) == by_age(each, run)[0][0]
        assert each.newest("none") is None


class Compared(str):
    """An id that counts how often it is compared."""

    count = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return str.__eq__(self, other)


def test_a_forget_of_many_commits_compares_each_with_few() -> None:
    tags = {i: (f"t{i}",) for i in range(391, 401)}
    state = folded(*(commit(i, tags=tags.get(i, ())) for i in range(1, 401)))
    going = tuple(Compared(commit_id(i)) for i in range(1, 201))
    Compared.count = 0
    assert check(state, Forget(going, "old")) is None
    assert one_left(going)(state) is None
    assert Compared.count < 20 * len(going)
