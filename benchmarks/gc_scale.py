"""How long gc's mark takes, and in how much memory, on a store of a million chunks: `python -m
benchmarks.gc_scale`.

The store is made up: its pages, documents, footers and log are real, but the chunks' bytes are
holes in sparse files, so that a million of them take seconds to make. Each commit refers to
`--chunks` chunks, `--own` of which no earlier commit has.

    --scattered     a commit's own chunks are spread over all of its leaf, so that it shares no page
    with another
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.status import status_bytes
from ckptstore.core.ids import (
    CHUNK_ID_BYTES,
    ChunkId,
    CommitId,
    SessionId,
    checksum,
    digest,
    document_key,
    new_session_id,
    pack_id,
    pack_key,
)
from ckptstore.core.model import (
    NO_BASE,
    CommitDocument,
    LeafContent,
    Node,
    PackEntry,
    PackRecord,
    Schema,
    TreeRef,
)
from ckptstore.core.text import bytes_text, seconds_text
from ckptstore.log import entries
from ckptstore.log.log import Log
from ckptstore.objects import pack
from ckptstore.objects.documents import content_id, encode_document
from ckptstore.objects.pages import split_pages
from ckptstore.objects.schema import encode_schema
from ckptstore.repository.init_store import init_store
from ckptstore.repository.pack_writer import OpenPack
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage

CHUNK_BYTES = 65536
PACK_CHUNKS = 1000

Ids = npt.NDArray[np.uint8]


def make_store(
    place: Path, *, commits: int, chunks: int, own: int, scattered: bool = False, seed: int = 0
) -> None:
    """Make a store of `commits` commits; only gc's mark and what reads no chunk of a tensor can
    work on it."""
    config = init_store(place)
    storage = open_storage(place, fsync=False)
    log = Log(storage, config.store, config.generation)
    random = np.random.default_rng(seed)
    schema = _schema(chunks)
    known: dict[ChunkId, int] = {}
    ids: Ids = np.empty((0, CHUNK_ID_BYTES), np.uint8)
    parents: tuple[CommitId, ...] = ()
    for step in range(commits):
        fresh = random.bytes((own if step else chunks) * CHUNK_ID_BYTES)
        new = np.frombuffer(fresh, np.uint8).reshape(-1, CHUNK_ID_BYTES)
        ids = new.copy() if not step else _with_new(ids, new, step, scattered=scattered)
        parents = (_commit(storage, log, schema, ids, new, step, parents, known),)
    log.close()
    storage.close()


def measure(place: Path) -> dict[str, float]:
    """Mark the store in this process; the memory is the process's peak."""
    from ckptstore.maintenance.gc.mark import mark

    handle = StoreHandle(place)
    state = handle.log.replay()
    threads = ThreadPool(2)
    started, started_cpu = time.perf_counter(), time.process_time()
    marked = mark(handle.storage, state, threads)
    mark_s, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    threads.close()
    handle.close()
    assert not marked.missing
    live = sum(use.live_chunks for use in marked.uses)
    return {
        "mark_s": mark_s,
        "cpu_s": cpu_s,
        "peak_bytes": status_bytes(
            "VmHWM"
        ),  # ru_maxrss would begin with what the parent had when it forked
        "live": live,
        "packs": len(marked.uses),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commits", type=int, default=1000)
    parser.add_argument(
        "--chunks", type=int, default=100_000, help="chunks that each commit refers to"
    )
    parser.add_argument(
        "--own", type=int, default=1000, help="chunks of a commit that no earlier one has"
    )
    parser.add_argument("--scattered", action="store_true")
    parser.add_argument("--dir", type=Path, help="where to make the store")
    parser.add_argument("--measure", type=Path, metavar="STORE", help="mark a store that is there")
    args = parser.parse_args()
    if args.measure:
        found = measure(args.measure)
        print(
            f"{int(found['live']):,} live chunks in {int(found['packs']):,} packs: marked in "
            f"{seconds_text(found['mark_s'])}, "
            f"CPU {seconds_text(found['cpu_s'])}, "
            f"peak memory {bytes_text(found['peak_bytes'])}"
        )
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        place = Path(directory) / "store"
        started = time.perf_counter()
        make_store(
            place, commits=args.commits, chunks=args.chunks, own=args.own, scattered=args.scattered
        )
        print(f"made in {seconds_text(time.perf_counter() - started)}")
        # In a process of its own, so that the memory is that of the mark.
        subprocess.run(
            [sys.executable, "-m", "benchmarks.gc_scale", "--measure", str(place)], check=True
        )


def _with_new(ids: Ids, new: Ids, step: int, *, scattered: bool) -> Ids:
    ids = ids.copy()
    if scattered:
        every = len(ids) // len(new)
        ids[step % every :: every][: len(new)] = new
    else:
        start = step * len(new) % len(ids)
        ids[start : start + len(new)] = new[: len(ids) - start]
    return ids


def _commit(
    storage: Storage,
    log: Log,
    schema: bytes,
    ids: Ids,
    new: Ids,
    step: int,
    parents: tuple[CommitId, ...],
    known: dict[ChunkId, int],
) -> CommitId:
    session = new_session_id()
    numbers = iter(range(1_000_000))
    data = [_data_pack(storage, session, next(numbers), part) for part in _parts(new)]
    pages = {
        ChunkId(digest(page)): page
        for page in split_pages(("tensor",), [LeafContent(ids=ids.tobytes())])
    }
    schema_id = ChunkId(digest(schema))
    metadata = {schema_id: (schema, pack.SCHEMA)} | {
        chunk: (page, pack.PAGE) for chunk, page in pages.items()
    }
    fresh = {chunk: part for chunk, part in metadata.items() if chunk not in known}
    packs = (*data, _metadata_pack(storage, session, next(numbers), fresh))
    trees = (("model", TreeRef(schema_id, tuple(pages))),)
    document = CommitDocument(
        log.state.store,
        session,
        "main",
        step,
        "",
        time.time_ns(),
        parents,
        (),
        (),
        ("model",),
        trees,
        None,
        content_id(trees),
        0,
        0,
        1,
    )
    commit, stored = encode_document(document)
    storage.put(document_key(session, commit), stored)
    reused = frozenset(range(1, log.state.next_pack))
    entry = log.append(
        entries.Commit(
            session,
            commit,
            document.content,
            "main",
            step,
            parents,
            "",
            (),
            (),
            packs,
            reused,
            (("model", schema_id.hex()),),
            0,
            0,
            1,
            len(stored),
        )
    )
    known.update(dict.fromkeys(fresh, entry.n))
    return commit


def _parts(new: Ids) -> Iterator[Ids]:
    for start in range(0, len(new), PACK_CHUNKS):
        yield new[start : start + PACK_CHUNKS]


def _data_pack(storage: Storage, session: SessionId, number: int, ids: Ids) -> PackRecord:
    name = pack_id(session, 0, number)
    table = np.zeros(len(ids), pack.FOOTER_DTYPE)
    table["chunk"] = np.ascontiguousarray(ids).view(f"V{CHUNK_ID_BYTES}")[:, 0]
    table["offset"] = np.arange(len(ids)) * CHUNK_BYTES
    table["stored"] = table["raw"] = CHUNK_BYTES
    table["base"], table["width"], table["kind"] = NO_BASE, 2, pack.TENSOR
    data_bytes = len(ids) * CHUNK_BYTES
    tail, _ = pack.encode_table(table, data_bytes, metadata=False)
    path = Path(storage.url, pack_key(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.seek(data_bytes)
        file.write(tail)
    return PackRecord(name, data_bytes + len(tail), len(ids), metadata=False)


def _metadata_pack(
    storage: Storage, session: SessionId, number: int, chunks: dict[ChunkId, tuple[bytes, int]]
) -> PackRecord:
    target = OpenPack(storage, pack_id(session, 0, number), metadata=True)
    for chunk, (data, kind) in chunks.items():
        target.pad_to(pack.align(target.offset, len(data)))
        nbytes, offset = len(data), target.append(data)
        target.entries.append(PackEntry(chunk, checksum(data), offset, nbytes, nbytes, 0, 1, kind))
    return target.close(ThreadPool(1).spread).record


def _schema(chunks: int) -> bytes:
    shape = (chunks, CHUNK_BYTES // 2)
    return encode_schema(
        Schema(
            Node("dict", (0,), ("w",)), ("model/w",), ("tensor",), ("bfloat16",), (shape,), (-1,)
        )
    )


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    main()
