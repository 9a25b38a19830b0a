"""A store is untrusted input: names cannot escape it, links are not followed, numbers are
checked."""

import json
import os
from pathlib import Path

import pytest
import zstandard

import ckptstore
from ckptstore.core.ids import (
    ChunkId,
    SessionId,
    StoreId,
    checkpoint_key,
    checksum,
    digest,
    log_key,
    pack_id,
    pack_key,
    twin_key,
)
from ckptstore.core.model import CommitDocument, PackEntry, PackRecord, TreeRef
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput
from ckptstore.log import entries
from ckptstore.maintenance.check import Level
from ckptstore.objects import canonical, codecs, pack
from ckptstore.objects.documents import content_id, encode_document
from ckptstore.repository.store_handle import StoreHandle
from tests.maintenance.stores import check, files, heal, make_store, state
from tests.support.fork_server import Nursery

MEMORY_BYTES = 600 << 20
SESSION = SessionId("ab" * 12)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../../x",
        "/etc/passwd",
        "a//b",
        "",
        ".",
        "..",
        "a\0b",
        "-rf",
        "x" * 300,
        "a\nb",
        "latest",
        "12",
    ],
)
def test_a_tag_is_a_tag(store: Path, name: str) -> None:
    with ckptstore.open(store) as opened:
        with pytest.raises(InvalidInput):
            opened.tag(name, 1)
        with pytest.raises(InvalidInput):
            opened.commit(state(1), tag=name)
        assert len(opened.log(run="main")) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("packs", [[9, "../../../etc/passwd", 1, 1, 0]]),
        ("packs", [[9, "/etc/passwd", 1, 1, 0]]),
        ("packs", [[9, "ab" * 12 + "-0-0/../../x", 1, 1, 0]]),
        ("session", "../" * 8),
        ("commit", "/" * 64),
        ("tags", ["../../x"]),
        ("run", "../x"),
        ("reused", [1 << 60, "AA=="]),
        ("reused", [0, "not base64"]),
        ("schemas", {"m": "../x"}),
        ("document_bytes", -1),
        ("step", 1.5),
    ],
)
def test_an_entry_with_a_name_that_leads_elsewhere_is_corrupt(
    store: Path, field: str, value: object
) -> None:
    path = store / log_key(4)
    document = json.loads(path.read_bytes()[65:])
    document[field] = value
    data = json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
    path.write_bytes(digest(data).hex().encode() + b"\n" + data)
    (store / "index" / "catalog.sqlite").unlink()
    with pytest.raises(CkptStoreError), ckptstore.open(store) as opened:
        opened.commit(state(1))
    report = check(store)
    assert report.damaged or field == "reused"
    heal(store, apply=False)


@pytest.mark.parametrize("target", ["packs", "commits", "log", "ckptstore.json"])
def test_a_symbolic_link_in_place_of_an_object_is_not_followed(
    store: Path, tmp_path: Path, target: str
) -> None:
    outside = tmp_path / "outside"
    for path in files(store, target) if (store / target).is_dir() else [store / target]:
        path.rename(outside)
        path.symlink_to(outside)
        try:
            restore_all(store)
            assert path.name.endswith(".2") or is_metadata(path), "followed"
        except CkptStoreError:
            pass
        if target != "ckptstore.json":
            report = check(store, Level.PACKS)
            assert report.findings, path
        path.unlink()
        outside.rename(path)


def restore_all(store: Path) -> None:
    with ckptstore.open(store, create=False) as opened:
        for info in opened.log():
            opened.checkout(info.id).state_dict()


def is_metadata(path: Path) -> bool:
    return path.with_name(path.name + ".2").exists()


def test_repair_moves_nothing_out_of_the_store_through_a_link(store: Path, tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_bytes(b"mine")
    path = files(store, "packs")[0]
    path.unlink()
    path.symlink_to(treasure)
    heal(store)
    assert treasure.read_bytes() == b"mine"


def read_with_little_memory(store: Path, nursery: Nursery) -> list[str]:
    """What a process says of the store that has little memory above what it takes by itself: how
    many commits are damaged, if any is."""
    child = nursery.run("read_with_little_memory", place=str(store), more_bytes=MEMORY_BYTES)
    assert child.wait() == 0, "see what it wrote to stderr"
    assert child.reports("limited"), "an allocation above the limit really fails there"
    return child.reports("checked")[0]


def append_commit(
    store: Path,
    trees: tuple[tuple[str, TreeRef], ...],
    chunks: list[tuple[ChunkId, bytes, int, int, int]],
) -> None:
    """A commit made by hand: `chunks` are (id, stored bytes, claimed raw bytes, codec, kind), all
    in one metadata pack."""
    handle = StoreHandle(store)
    data, table = b"", []
    for chunk, stored, raw_bytes, codec, kind in chunks:
        place = len(data), len(stored), raw_bytes
        table.append(PackEntry(chunk, checksum(stored), *place, codec, 1, kind))
        data += stored
    name = pack_id(SESSION, 0, 0)
    whole = data + pack.encode_tail(table, len(data), True)[0]
    for key in (pack_key(name), twin_key(name)):
        handle.storage.put(key, whole)
    document = CommitDocument(
        StoreId(handle.config.store),
        SESSION,
        "main",
        50,
        "",
        1,
        (),
        (),
        (),
        tuple(name for name, _ in trees),
        trees,
        None,
        content_id(trees),
        1,
        1,
        1,
    )
    commit, stored_document = encode_document(document)
    handle.storage.put(f"commits/{SESSION}-{commit}", stored_document)
    record = PackRecord(name, len(whole), len(table), True)
    body = entries.Commit(
        SESSION,
        commit,
        document.content,
        "main",
        50,
        (),
        "",
        (),
        (),
        (record,),
        frozenset(),
        (),
        1,
        1,
        1,
        len(stored_document),
    )
    handle.log.append(body)
    handle.close()


def test_a_schema_that_says_it_is_huge_is_refused_before_it_is_decoded(
    store: Path, nursery: Nursery
) -> None:
    """A zstd frame of some kilobytes that holds 3 GiB of zeros, under its right id or not: nobody
    may unpack it."""
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 20)) * 1
    chunk = ChunkId(digest(b"whatever"))
    append_commit(
        store, (("m", TreeRef(chunk, ())),), [(chunk, bomb, 3 << 30, codecs.ZSTD, pack.SCHEMA)]
    )
    assert read_with_little_memory(store, nursery) == ["1", "True"]


def test_a_value_that_says_it_is_huge_is_refused_before_memory_is_taken(
    store: Path, nursery: Nursery
) -> None:
    """A page whose extent says that a `bytes` leaf has 2^50 bytes, with a single id."""
    from ckptstore.core.model import LeafContent, Node, Schema
    from ckptstore.objects.pages import split_pages
    from ckptstore.objects.schema import encode_schema

    schema = encode_schema(
        Schema(Node("dict", (0,), ("b",)), ("m/b",), ("bytes",), ("",), ((),), (-1,))
    )
    (page,) = split_pages(("bytes",), [LeafContent(ids=digest(b"x"), raw_bytes=1 << 50)])
    chunks = [
        (ChunkId(digest(data)), data, len(data), codecs.RAW, kind)
        for data, kind in ((schema, pack.SCHEMA), (page, pack.PAGE))
    ]
    append_commit(store, (("m", TreeRef(chunks[0][0], (chunks[1][0],))),), chunks)
    assert read_with_little_memory(store, nursery) == ["1", "True"]


def test_a_tensor_that_says_it_is_huge_is_refused_before_memory_is_taken(
    store: Path, nursery: Nursery
) -> None:
    from ckptstore.core.model import LeafContent, Node, Schema
    from ckptstore.objects.pages import split_pages
    from ckptstore.objects.schema import encode_schema

    schema = encode_schema(
        Schema(
            Node("dict", (0,), ("t",)), ("m/t",), ("tensor",), ("float32",), ((1 << 40,),), (-1,)
        )
    )
    (page,) = split_pages(("tensor",), [LeafContent(ids=digest(b"x"))])
    chunks = [
        (ChunkId(digest(data)), data, len(data), codecs.RAW, kind)
        for data, kind in ((schema, pack.SCHEMA), (page, pack.PAGE))
    ]
    append_commit(store, (("m", TreeRef(chunks[0][0], (chunks[1][0],))),), chunks)
    assert read_with_little_memory(store, nursery) == ["1", "True"]


def test_numbers_far_behind_the_log_are_not_looked_for(store: Path) -> None:
    """An entry called 999,999,999,999 must not make anybody count so far."""
    first = (store / log_key(1)).read_bytes()
    (store / log_key(999_999_999_999)).write_bytes(first)
    (store / checkpoint_key(999_999_999_000)).write_bytes(b"0" * 64 + b"\nx")
    report = check(store)
    assert not report.damaged
    assert any(finding.key == log_key(999_999_999_999) for finding in report.findings)


def test_json_nested_without_end_is_corrupt() -> None:
    with pytest.raises(Corrupt):
        canonical.decode(b"[" * 100_000 + b"]" * 100_000)


def test_what_is_made_obeys_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        store = make_store(tmp_path / "private", steps=1)
    finally:
        os.umask(before)
    assert [path for path in store.rglob("*") if path.stat().st_mode & 0o077] == []
