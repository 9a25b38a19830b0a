"""Whatever rows lie in an index, it answers rightly or is rebuilt, and nothing else is raised."""

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.index.chunks import ChunkIndex
from ckptstore.index.chunks.lmdb_env import DATABASES
from ckptstore.index.chunks.records import NUMBER_BYTES, RECORD_BYTES
from tests.index.building import STORE, footer, pack_name
from tests.index.test_chunks import assert_found, ids

PACKS = range(1, 6)
HELD = [chunk for number in PACKS for chunk in footer(40, number // 2)["chunk"].tolist()]

CHUNK = st.sampled_from(HELD) | st.binary(min_size=32, max_size=32)
NUMBER = (st.sampled_from(PACKS) | st.integers(0, 2**32 - 1)).map(
    lambda n: n.to_bytes(NUMBER_BYTES)
)
KEY = NUMBER | CHUNK | st.tuples(CHUNK, NUMBER).map(b"".join) | st.binary(min_size=1, max_size=511)
VALUE = (
    st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES)
    | st.binary(max_size=80)
    | st.sampled_from([b"", bytes(RECORD_BYTES), b"\xff" * 2000])
)
ROWS = st.lists(st.tuples(st.sampled_from(sorted(DATABASES)), KEY, VALUE), min_size=1, max_size=8)


def put(index: ChunkIndex, rows: list[tuple[bytes, bytes, bytes]]) -> None:
    """Write rows as a foreign or a faulty process would that has the file open as well."""
    env = index._env
    assert env
    databases = {b"chunks": env.chunks, b"others": env.others, b"packs": env.packs}
    with env.lmdb.begin(write=True) as txn:
        for name, key, value in rows:
            txn.put(key, value, db=databases[name])


def assert_right_or_missing(index: ChunkIndex) -> None:
    assert index.indexed() <= {*PACKS, 9}
    assert index.pack_ids([*PACKS, 2**32 - 1]).items() <= {n: pack_name(n) for n in PACKS}.items()
    for number in PACKS:
        table = footer(40, number // 2)
        rows = index.get_many(ids(table))
        found = rows["found"] == 1
        assert (rows["offset"][found] == table["offset"][found]).all()
        assert (rows["pack"][found] // 2 == number // 2).all()


@pytest.mark.parametrize("opened_again", [False, True])
@settings(max_examples=settings().max_examples * 2 // 5)  # each makes an index
@given(rows=ROWS)
def test_any_rows_of_the_chunk_index_are_passed_over_or_rebuilt(
    rows: list[tuple[bytes, bytes, bytes]], opened_again: bool
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "chunks.lmdb")
        index = ChunkIndex.open(path, STORE)
        for number in PACKS:
            index.add_pack(number, pack_name(number), footer(40, number // 2))
        put(index, rows)
        if opened_again:
            index.close()
            index = ChunkIndex.open(path, STORE)
        with closing(index):
            assert_right_or_missing(index)
            put(index, rows)
            index.drop_packs([2, 3])
            put(index, rows)
            index.add_pack(9, pack_name(9), footer(40, 9))
            assert_found(index, 9, footer(40, 9))
            for _ in range(3):  # as the caller does: what turns out to be damaged begins again
                for number in sorted(set(PACKS) - index.indexed()):
                    index.add_pack(number, pack_name(number), footer(40, number // 2))
            assert index.indexed() >= set(PACKS)
            assert_right_or_missing(index)
            index.reset()
            assert index.indexed() == set()
