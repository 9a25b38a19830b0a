"""Commit documents: what was committed comes back, named by its hash."""

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.core.ids import ChunkId, CommitId, SessionId, StoreId, digest
from ckptstore.core.model import SHARED, CommitDocument, TreeRef
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.objects import canonical
from ckptstore.objects.documents import content_id, decode_document, encode_document
from ckptstore.objects.frames import compress, decompress
from tests.support.mutations import damaged

HEX = st.sampled_from("0123456789abcdef")
CHUNKS = st.binary(min_size=32, max_size=32).map(ChunkId)
COMMITS = CHUNKS.map(lambda chunk: CommitId(chunk.hex()))
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
COUNTS = st.integers(0, 2**53)
TREE = st.builds(TreeRef, CHUNKS, st.lists(CHUNKS, max_size=3).map(tuple))
TREES = st.dictionaries(NAMES.filter(bool), TREE, max_size=4)


@st.composite
def documents(draw: st.DrawFn) -> CommitDocument:
    own = draw(TREES)
    sharing = draw(st.sets(NAMES, max_size=4)) - own.keys()
    keys = tuple(draw(st.permutations([*own, *sharing])))
    trees = tuple(sorted({**own, **({SHARED: draw(TREE)} if sharing else {})}.items()))
    return CommitDocument(
        store=StoreId(draw(st.text(HEX, min_size=32, max_size=32))),
        session=SessionId(draw(st.text(HEX, min_size=24, max_size=24))),
        run=draw(NAMES),
        step=draw(st.none() | st.integers(-5, 2**53)),
        message=draw(NAMES),
        time_ns=draw(st.integers(-(2**63), 2**63 - 1)),
        parents=tuple(draw(st.lists(COMMITS, max_size=2))),
        metrics=tuple(
            sorted(draw(st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=3)).items())
        ),
        tags=tuple(draw(st.lists(NAMES, max_size=2))),
        keys=keys,
        trees=trees,
        layout=draw(st.none() | CHUNKS),
        content=content_id(trees),
        logical_bytes=draw(COUNTS),
        new_bytes=draw(COUNTS),
        leaves=draw(COUNTS),
    )


@given(documents())
def test_a_document_comes_back_under_its_id(document: CommitDocument) -> None:
    commit, stored = encode_document(document)
    assert commit == digest(decompress(stored, 1 << 20)).hex()
    assert decode_document(stored, commit) == document
    assert decode_document(stored, None) == document


@given(documents(), st.data())
def test_a_damaged_document_is_corrupt(document: CommitDocument, data: st.DataObject) -> None:
    commit, stored = encode_document(document)
    bad = data.draw(damaged(stored))
    try:
        # zstd has spare bits in its frame headers: only what decompresses to the same bytes may
        # pass.
        assert decode_document(bad, commit) == document
    except Corrupt:
        return


@given(documents(), st.data())
def test_a_document_without_a_known_id_is_checked_field_by_field(
    document: CommitDocument, data: st.DataObject
) -> None:
    obj = canonical.decode(decompress(encode_document(document)[1], 1 << 20))
    key = data.draw(st.sampled_from(sorted(set(obj) - {"step", "layout", "run", "message"})))
    obj[key] = data.draw(st.sampled_from([None, True, -1, "x", ["x", 1], {"": 1}, [[]]]))
    with pytest.raises(Corrupt):
        decode_document(compress(canonical.encode(obj)), None)


@given(documents(), st.data())
def test_a_document_that_lacks_a_key_is_corrupt(
    document: CommitDocument, data: st.DataObject
) -> None:
    obj = canonical.decode(decompress(encode_document(document)[1], 1 << 20))
    del obj[data.draw(st.sampled_from(sorted(obj)))]
    with pytest.raises(Corrupt):
        decode_document(compress(canonical.encode(obj)), None)


@given(documents(), st.data())
def test_the_keys_of_a_document_are_those_of_its_trees(
    document: CommitDocument, data: st.DataObject
) -> None:
    obj = canonical.decode(decompress(encode_document(document)[1], 1 << 20))
    own, sharing = set(obj["trees"]) - {SHARED}, document.sharing
    assert sharing == tuple(sorted(set(document.keys) - own))
    wrong = [[*document.keys, key] for key in document.keys]  # twice
    wrong += [[each for each in document.keys if each != key] for key in own]
    wrong += [[*own]] if sharing else [[*document.keys, "a key that no tree has"]]
    obj["keys"] = data.draw(st.sampled_from(wrong))
    with pytest.raises(Corrupt, match="'keys' are damaged"):
        decode_document(compress(canonical.encode(obj)), None)


@given(TREES)
def test_the_content_id_does_not_depend_on_the_order_of_keys(trees: dict[str, TreeRef]) -> None:
    assert content_id(trees.items()) == content_id(reversed(trees.items()))


def test_the_content_id_is_that_of_the_format() -> None:
    tree = TreeRef(ChunkId(bytes(32)), (ChunkId(b"\xff" * 32),))
    expected = b'{"model":["' + b"0" * 64 + b'","//////////////////////////////////////////8="]}'
    assert content_id([("model", tree)]) == digest(expected).hex()


@settings(max_examples=5)
@given(documents())
def test_another_id_than_asked_for_is_corrupt(document: CommitDocument) -> None:
    with pytest.raises(Corrupt, match="does not match its id"):
        decode_document(encode_document(document)[1], CommitId("0" * 64))


def test_a_newer_version_says_so() -> None:
    with pytest.raises(Corrupt, match="newer ckptstore"):
        decode_document(compress(b'{"ckptstore":2}'), None)


def test_a_document_that_claims_to_be_huge_costs_nothing() -> None:
    bomb = compress(bytes(257 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            decode_document(bomb, None)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=5)
@given(documents())
def test_half_a_character_is_refused_before_it_is_committed(document: CommitDocument) -> None:
    with pytest.raises(InvalidInput):
        encode_document(replace(document, message="\ud800"))
