"""Messages of transports survive a round trip, and any other bytes are refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import digest
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.interop.chunk_transfer import protocol
from ckptstore.interop.chunk_transfer.protocol import (
    Description,
    Head,
    Invitation,
    MeshName,
    Near,
    Placed,
)
from ckptstore.objects import canonical

ids = st.binary(min_size=32, max_size=32)
sized = st.tuples(ids, st.integers(0, 1 << 20))
sizes = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)
meshes = st.builds(
    MeshName, sizes, sizes, st.lists(st.sampled_from(["dp", "tp", "a b"]), max_size=2).map(tuple)
)
places = st.builds(
    Placed,
    meshes,
    st.lists(st.sampled_from(["R", "S(0)", "_S(0, 2)"]), max_size=3).map(tuple),
    sizes,
)
descriptions = st.builds(
    Description,
    st.integers(-1, 1 << 50),
    st.sampled_from([64 << 10, 1 << 20, 64 << 20]),
    sized,
    st.lists(sized, max_size=5).map(tuple),
    st.dictionaries(st.integers(0, 100), places, max_size=4),
    st.booleans(),
    st.sampled_from(["blake3", "xxh3"]),
)


@given(descriptions)
def test_a_description_is_read_as_it_was_written(description: Description) -> None:
    assert protocol.decode_description(protocol.encode_description(description)) == description


@given(descriptions, st.data())
def test_a_description_that_was_changed_in_any_byte_is_refused(
    description: Description, data: st.DataObject
) -> None:
    encoded = bytearray(protocol.encode_description(description))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Corrupt):
        protocol.decode_description(bytes(encoded))


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_bytes": 12345},
        {"chunk_bytes": 1 << 40},
        {"metadata": []},
        {"metadata": [["00", 5]]},
        {"metadata": [["0" * 64, -5]]},
        {"metadata": [["0" * 64, 1 << 30]]},
        {"step": "next"},
        {"meshes": [[[1], [0]]]},
        {"placed": [[0, 3, [], []]]},
        {"placed": [[0, 0, ["S(0)" * 100], []]]},
        {"placed": 7},
        {"names": "md5"},
        {"names": 7},
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
    assert protocol.decode_description(good + digest(good)).step == 1
    bad = canonical.encode(said | change)
    with pytest.raises(Corrupt):
        protocol.decode_description(bad + digest(bad))


@given(st.binary(max_size=200))
def test_what_is_no_description_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        protocol.decode_description(data + digest(data))


def test_an_invitation_is_read_as_it_was_written() -> None:
    invitation = Invitation("a" * 32, "b" * 64, (("10.0.0.1", 80), ("fd00::1", 65535)))
    assert protocol.decode_invitation(protocol.encode_invitation(invitation)) == invitation
    near = replace(invitation, names="xxh3", near=Near("c" * 32, 77, (1 << 47) + 1))
    assert protocol.decode_invitation(protocol.encode_invitation(near)) == near


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
        'ckptstore-transport:{"id":"i","token":"t","at":[],"names":"md5"}',
        'ckptstore-transport:{"id":"i","token":"t","at":[],"near":["here",-1,0]}',
        'ckptstore-transport:{"id":"i","token":"t","at":[],"near":[1]}',
        "ckptstore-transport:" + json.dumps({"id": "i", "token": "t" * 10_000, "at": []}),
    ],
)
def test_what_is_no_invitation_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        protocol.decode_invitation(text)


@given(st.lists(st.none() | st.integers(0, (1 << 63) - 1), max_size=50))
def test_sizes_are_read_as_they_were_written(sizes: list[int | None]) -> None:
    encoded = protocol.encode_sizes(sizes)
    assert len(encoded) == protocol.sizes_bytes(len(sizes))
    assert protocol.decode_sizes(encoded) == sizes


@given(st.lists(ids, min_size=1, max_size=5))
def test_a_request_names_its_chunks(chunks: list[bytes]) -> None:
    body = b"".join(chunks)
    assert protocol.split_ids(body) == chunks
    assert protocol.split_ids(body[:-1]) is None
    assert protocol.split_ids(b"") is None
    assert protocol.split_ids(bytes(32 * (protocol.IDS_PER_REQUEST + 1))) is None


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (protocol.state_path(5), ("state", 5)),
        (protocol.chunks_path(-1), ("chunks", -1)),
        (protocol.HELLO_PATH, None),
        ("/ckptstore/1/state/", None),
        ("/ckptstore/1/state/5/..", None),
        ("/ckptstore/1/state/" + "9" * 30, None),
        ("/ckptstore/1/state/٣", None),
    ],
)
def test_a_path_names_a_step_or_nothing(path: str, named: tuple[str, int] | None) -> None:
    assert protocol.parse_path(path) == named


def test_a_head_is_read() -> None:
    head = protocol.decode_head(
        b"HTTP/1.1 409 Conflict\r\nContent-Length: 12\r\nCkptstore-Step: 7\r\n\r\n"
    )
    assert head == Head(409, 12, {"content-length": "12", "ckptstore-step": "7"})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"HTTP/2 200 OK\r\nContent-Length: 1\r\n\r\n",
        b"HTTP/1.1 abc OK\r\nContent-Length: 1\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
    ],
)
def test_what_is_no_head_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        protocol.decode_head(data)
