"""Whatever a document says, under hashes that are right: it is read, or refused as `Corrupt` or
`InvalidInput`, in little time and memory.

Damage that a hash finds is other tests' subject: here every document is sealed again after it was
changed. The documents are those of a real store; Hypothesis changes their bytes, or what their JSON
says.
"""

import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.contents import CommitContents
from ckptstore.core.ids import SessionId, digest
from ckptstore.core.model import CommitDocument
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput, NotFound
from ckptstore.log.entries import NewerEntry, decode_entry
from ckptstore.log.log_snapshots import decode_state, encode_state
from ckptstore.log.sessions import decode_session
from ckptstore.objects import canonical
from ckptstore.objects.documents import decode_config, decode_document
from ckptstore.objects.frames import compress, decompress
from ckptstore.objects.pack import TRAILER_BYTES, entries, parse_footer, parse_trailer
from ckptstore.objects.pages import decode_page, join_pages
from ckptstore.objects.schema import decode_schema
from ckptstore.repository.resolve_ref import find_commit
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.reader import Reader, Tree, by_key
from ckptstore.snapshot import Snapshot
from ckptstore.state import values
from tests.state.drawing import composite
from tests.state.test_structures import Config, Point
from tests.support.mutations import damaged, reworded

CPU_S = 5.0
PEAK_BYTES = 16 << 20
"""Much more than these small documents may need, much less than the sizes that a changed number
speaks of."""

HEAD_BYTES = 32
"""Of a pack's trailer, before its hash."""


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    weight = torch.randn(4, 5)
    nested = {
        "l": [1, 2.5, "x"],
        0: Point(weight, {"again": weight}),
        "c": Config(0.1, [torch.eye(3).to_sparse()]),
        "b": b"x" * 900,
    }
    quantized = composite("qint8", seed=1)
    return {
        "model": module,
        "rest": nested,
        "large": torch.arange(300_000),
        "q": {"q": quantized, "p": torch.nn.Parameter(weight)},
    }


@dataclass(frozen=True)
class Documents:
    """What a store consists of, as bytes, and the store."""

    handle: StoreHandle
    document: CommitDocument
    config: bytes
    commit: bytes
    schemas: dict[str, bytes]
    pages: dict[str, list[bytes]]
    tails: list[bytes]
    log: list[bytes]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Documents]:
    place = tmp_path_factory.mktemp("mutated") / "store"
    with ckptstore.open(place) as store:
        store.commit(state(), step=1, tag="t", metrics={"loss": 0.5}, message="m")
        snap = store.commit({**state(), "new": [torch.ones(3)]}, step=2)
        store.tag("other", 1)
    handle = StoreHandle(place, read_only=True)
    commit = next(place.glob(f"commits/*{snap.id}")).read_bytes()
    document = decode_document(commit, snap.id)
    read = handle.objects.read_metadata
    packs = [path.read_bytes() for path in place.glob("packs/*/*")]
    starts = [parse_trailer(pack[-TRAILER_BYTES:], len(pack)).footer_offset for pack in packs]
    yield Documents(
        handle,
        document,
        (place / "ckptstore.json").read_bytes(),
        decompress(commit, 1 << 20),
        {key: bytes(read(ref.schema)) for key, ref in document.trees},
        {key: [bytes(read(page)) for page in ref.pages] for key, ref in document.trees},
        [pack[start:] for pack, start in zip(packs, starts, strict=True)],
        [path.read_bytes() for path in sorted(place.glob("log/0*"))],
    )
    handle.close()


@contextmanager
def bounded() -> Iterator[None]:
    """Fails for what takes long or much memory; any error that is not one of those allowed passes
    through and fails as well."""
    tracemalloc.start()
    start = time.process_time()
    try:
        yield
    except (Corrupt, InvalidInput, NewerEntry):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.process_time() - start < CPU_S
    assert peak < PEAK_BYTES


# -- one document at a time: what is drawn, and what reads it --


def changed_json(data: bytes) -> st.SearchStrategy[bytes]:
    return reworded(data) | damaged(data)


def read_commit(data: bytes, known: Documents) -> None:
    """With the content id that belongs to its trees, where it has some."""
    decode_document(compress(data), None)


def sealed_commit(data: bytes) -> bytes:
    try:
        document = json.loads(data)
        document["content"] = digest(
            canonical.encode(
                {key: [tree["schema"], tree["pages"]] for key, tree in document["trees"].items()}
            )
        ).hex()
        return json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, TypeError, KeyError, AttributeError, CkptStoreError):
        return data


def read_footer(data: bytes, known: Documents) -> None:
    """A tail whose hash was made right again, at the end of as many bytes as it says."""
    body, head = data[:-TRAILER_BYTES], data[-TRAILER_BYTES:][:HEAD_BYTES]
    said = int.from_bytes(head[16:24], "little")
    trailer = parse_trailer(head + digest(body + head) + data[-8:], said + len(data))
    entries(parse_footer(body, trailer))


def read_checkpoint(data: bytes, known: Documents) -> None:
    frame = compress(data)
    store = known.handle.config.store
    decode_state(
        digest(frame).hex().encode() + b"\n" + frame, store, known.handle.config.generation
    )


def read_config(data: bytes, known: Documents) -> None:
    try:
        fields = json.loads(data)
        fields["check"] = digest(
            canonical.encode({key: value for key, value in fields.items() if key != "check"})
        ).hex()
        data = json.dumps(fields).encode()
    except (ValueError, TypeError, AttributeError, CkptStoreError):
        pass
    decode_config(data, "here")


def log_bodies(known: Documents) -> list[bytes]:
    return [entry[65:] for entry in known.log]


def checkpoint(known: Documents) -> bytes:
    return decompress(encode_state(known.handle.log.replay())[65:], 1 << 20)


Read = Callable[[bytes, Documents], object]
KINDS: dict[str, tuple[Callable[[Documents], list[bytes]], Read]] = {
    "commit document": (
        lambda known: [known.commit],
        lambda data, known: read_commit(sealed_commit(data), known),
    ),
    "schema": (lambda known: list(known.schemas.values()), lambda data, known: decode_schema(data)),
    "page": (
        lambda known: [page for pages in known.pages.values() for page in pages],
        lambda data, known: decode_page(data),
    ),
    "footer": (lambda known: known.tails, read_footer),
    "log entry": (
        log_bodies,
        lambda data, known: decode_entry(digest(data).hex().encode() + b"\n" + data),
    ),
    "checkpoint of the log": (lambda known: [checkpoint(known)], read_checkpoint),
    "ckptstore.json": (lambda known: [known.config], read_config),
    "session": (
        lambda known: [b'{"counter":1,"pid":3,"what":"x"}'],
        lambda data, known: decode_session(SessionId("0" * 24), data),
    ),
    "value": (
        lambda known: [b'["list",1,["float","3ff0000000000000"],["set","a"],["deque",3,1]]'],
        lambda data, known: values.decode_leaf(data),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_document_is_read_or_refused(kind: str, documents: Documents) -> None:
    originals, read = KINDS[kind]
    samples = originals(documents)

    @settings(max_examples=settings().max_examples * 2)
    @given(st.data())
    def change(data: st.DataObject) -> None:
        original = data.draw(st.sampled_from(samples))
        changed = data.draw(changed_json(original) if original[:1] in b"{[" else damaged(original))
        with bounded():
            read(changed, documents)

    for sample in samples:
        read(sample, documents)
    change()


# -- a whole commit: changed schemas and pages, then every way to read it --


def snapshot(known: Documents, name: str, schema: bytes, pages: list[bytes]) -> Snapshot:
    """The commit with another schema and other pages of one of its trees."""
    handle, document = known.handle, known.document
    described = decode_schema(schema)
    tree = Tree(
        name,
        dict(document.trees)[name],
        described,
        join_pages(pages, len(described)),
        handle.config.chunk_bytes,
    )
    reader = Reader(handle.config, handle.objects, ThreadPool(1))
    trees = by_key({**reader.trees(document.trees), name: tree}, document.keys)
    commit = find_commit(handle, "latest", None).id
    return Snapshot(CommitContents(reader, commit, document, trees=trees))


def test_a_commit_of_changed_schemas_and_pages_is_read_or_refused(documents: Documents) -> None:
    target = {**state(), "new": None}

    @given(st.data())
    def change(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(documents.schemas)))
        schema, pages = documents.schemas[name], documents.pages[name]
        key = documents.document.keys_of(name)[0]
        if data.draw(st.booleans()):
            schema = data.draw(changed_json(schema))
        else:
            pages = [data.draw(damaged(page)) for page in pages]
        with suppress(Corrupt):
            snap = snapshot(documents, name, schema, pages)
            for use in (
                lambda: snap.restore(target),
                lambda: snap.state_dict(key),
                lambda: snap.leaves(),
                lambda: snap.verify(),
            ):
                # A chunk that no pack holds is `NotFound`, as one is that was deleted.
                with bounded(), suppress(NotFound):
                    use()

    change()


@pytest.mark.parametrize("length", [2**33, 2**40, 2**60])
def test_a_tensor_that_says_it_is_huge_takes_no_memory_on_any_road(
    length: int, documents: Documents
) -> None:
    schema = json.loads(documents.schemas["new"])
    schema["shapes"] = [[length]]
    snap = snapshot(documents, "new", json.dumps(schema).encode(), documents.pages["new"])
    target: dict[str, Any] = {"new": None}
    roads: list[Callable[[], Any]] = [
        lambda: snap.restore(target, strict=False),
        lambda: snap.state_dict("new"),
        lambda: snap.read("new/0"),
        lambda: snap.read("new/0", slice(0, 2)),
        lambda: snap.open("new/0"),
        lambda: snap.verify(),
    ]
    for road in roads:
        with pytest.raises(Corrupt, match="new/0 name 12 bytes"):
            road()
    assert target == {"new": None}
