"""Messages of transports survive a round trip, and any other bytes are refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import CHUNK_ID_BYTES, checksum, digest
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.interop.torchft import wire
from ckptstore.interop.torchft.fetch import Wanted
from ckptstore.interop.torchft.invitation import HELLO_PATH, Invitation
from ckptstore.interop.torchft.wire import (
    Description,
    MeshName,
    MeshPlacement,
    ServedPatch,
)
from ckptstore.objects import canonical

ids = st.binary(min_size=32, max_size=32)
sized = st.tuples(ids, st.integers(0, 1 << 20))
sizes = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)
meshes = st.builds(
    MeshName, sizes, sizes, st.lists(st.sampled_from(["dp", "tp", "a b"]), max_size=2).map(tuple)
)
places = st.builds(
    MeshPlacement,
    meshes,
    st.lists(st.sampled_from(["R", "S(0)", "_S(0, 2)"]), max_size=3).map(tuple),
    sizes,
)
descriptions = st.builds(
    Description,
    st.integers(-1, 1 << 50),
    st.sampled_from([64 << 10, 1 << 20, 64 << 20]),
    st.lists(sized, min_size=1, max_size=5).map(tuple),
    st.dictionaries(st.integers(0, 100), places, max_size=4),
    st.none() | sized,
)


@given(descriptions)
def test_a_description_is_read_as_it_was_written(description: Description) -> None:
    assert wire.decode_description(wire.encode_description(description)) == description


@given(descriptions, st.data())
def test_a_description_that_was_changed_in_any_byte_is_refused(
    description: Description, data: st.DataObject
) -> None:
    encoded = bytearray(wire.encode_description(description))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Corrupt):
        wire.decode_description(bytes(encoded))


@given(st.lists(st.builds(ServedPatch, ids, ids, ids, st.integers(0, (1 << 32) - 1)), max_size=3))
def test_a_list_of_patches_is_read_as_it_was_written(patches: list[ServedPatch]) -> None:
    encoded = wire.encode_patches(patches)
    assert wire.decode_patches(encoded) == patches
    with pytest.raises(Corrupt, match="no whole number"):
        wire.decode_patches(encoded + b"x")


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_bytes": 12345},
        {"chunk_bytes": 1 << 40},
        {"metadata": []},
        {"metadata": [["00", 5]]},
        {"metadata": [["0" * 64, -5]]},
        {"metadata": [["0" * 64, 1 << 30]]},
        {"patches": ["00", 5]},
        {"patches": ["0" * 64, 1 << 30]},
        {"patches": 7},
        {"step": "next"},
        {"meshes": [[[1], [0]]]},
        {"placed": [[0, 3, [], [], "cpu"]]},
        {"placed": [[0, 0, ["S(0)" * 100], [], "cpu"]]},
        {"placed": [[0, 0, [], [], 7]]},
        {"placed": 7},
    ],
)
def test_a_description_that_says_what_cannot_be_is_refused_though_its_hash_is_right(
    change: dict[str, object],
) -> None:
    said = {
        "step": 1,
        "chunk_bytes": 1 << 20,
        "metadata": [["0" * 64, 10]],
        "meshes": [[[1], [0], []]],
        "placed": [],
    }
    good = canonical.encode(said)
    assert wire.decode_description(good + digest(good)).step == 1
    bad = canonical.encode(said | change)
    with pytest.raises(Corrupt):
        wire.decode_description(bad + digest(bad))


@given(st.binary(max_size=200))
def test_what_is_no_description_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        wire.decode_description(data + digest(data))


def test_an_invitation_is_read_as_it_was_written() -> None:
    invitation = Invitation("a" * 32, "b" * 64, (("10.0.0.1", 80), ("fd00::1", 65535)))
    assert wire.decode_invitation(wire.encode_invitation(invitation)) == invitation


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://host:29500/checkpoint/",
        "ckptstore-transport:",
        "ckptstore-transport:[]",
        'ckptstore-transport:{"id":1,"token":"t","at":[]}',
        'ckptstore-transport:{"id":"i","token":"t","at":[["h"]]}',
        'ckptstore-transport:{"id":"i","token":"a\\r\\nb","at":[]}',
        "ckptstore-transport:" + json.dumps({"id": "i", "token": "t" * 10_000, "at": []}),
    ],
)
def test_what_is_no_invitation_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        wire.decode_invitation(text)


def test_a_token_is_not_in_the_error_for_metadata_that_are_refused() -> None:
    fields = {"instance": "a" * 32, "token": "secret\n", "addresses": []}
    with pytest.raises(InvalidInput) as refused:
        wire.decode_invitation("ckptstore-transport:" + json.dumps(fields))
    assert "secret" not in f"{refused.value} {refused.value.__cause__}"


@given(st.lists(ids, min_size=1, max_size=5))
def test_a_request_names_its_chunks(chunks: list[bytes]) -> None:
    body = b"".join(chunks)
    assert wire.decode_names(body) == chunks
    assert wire.decode_names(body[:-1]) is None
    assert wire.decode_names(b"") is None
    assert wire.decode_names(bytes(32 * (wire.CHUNKS_PER_REQUEST + 1))) is None


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (wire.path_of("state", 5), ("state", 5)),
        (wire.path_of("chunks", -1), ("chunks", -1)),
        (HELLO_PATH, None),
        ("/ckptstore/1/state/", None),
        ("/ckptstore/1/state/5/..", None),
        ("/ckptstore/1/state/" + "9" * 30, None),
        ("/ckptstore/1/state/٣", None),
    ],
)
def test_a_path_names_a_step_or_nothing(path: str, named: tuple[str, int] | None) -> None:
    assert wire.parse_path(path) == named


@given(st.binary(max_size=2000), st.data())
def test_a_name_is_as_long_as_an_id_and_is_that_of_no_other_bytes(
    some: bytes, data: st.DataObject
) -> None:
    name = wire.name_of(some)
    at = data.draw(st.integers(0, len(some)))
    assert wire.name_of_pieces([some[:at], some[at:]]) == name
    assert len(name) == CHUNK_ID_BYTES
    assert name != digest(some)
    changed = bytearray(some or b"\0")
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert wire.name_of(changed) != name


def test_a_name_is_the_checksum_of_a_store_and_chunks_land_only_under_whole_names() -> None:
    data = b"some bytes"
    name = wire.name_of(data)
    assert wire.checksum_of(name) == checksum(data)
    assert Wanted(name, len(data)).land(memoryview(data))
    assert not Wanted(checksum(data) + bytes(16), len(data)).land(memoryview(data))
    assert not Wanted(name, len(data)).land(memoryview(b"some byteS"))
