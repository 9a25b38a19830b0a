"""The mark on synthetic stores: live chunks against sets, and the cost of a million chunks."""

import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest

from benchmarks.gc_scale import make_store
from ckptstore.core.ids import ChunkId, document_key
from ckptstore.log.entries import Forget
from ckptstore.maintenance import silent
from ckptstore.maintenance.gc.mark import mark
from ckptstore.objects.documents import decode_document
from ckptstore.objects.pages import decode_page
from ckptstore.repository import footers
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool


def needed(handle: StoreHandle) -> set[ChunkId]:
    """What the commits that are not forgotten need, one by one."""
    state = handle.log.replay()
    handle.objects.sync(state)
    found: set[ChunkId] = set()
    for commit, row in state.commits.items():
        if row.soft:
            continue
        for _, tree in decode_document(
            handle.storage.read(document_key(row.session, commit)), commit
        ).trees:
            found |= {tree.schema, *tree.pages}
            for data in handle.objects.read_metadata_many(tree.pages).values():
                for leaf in decode_page(data).leaves:
                    found |= {ChunkId(leaf.ids[i : i + 32]) for i in range(0, len(leaf.ids), 32)}
    return found


@pytest.mark.parametrize("scattered", [False, True])
def test_what_is_live_is_what_the_commits_need(tmp_path: Path, scattered: bool) -> None:
    make_store(tmp_path / "store", commits=12, chunks=5_000, own=250, scattered=scattered)
    handle = StoreHandle(tmp_path / "store")
    state = handle.log.replay()
    by_age = sorted(state.commits, key=lambda commit: state.commits[commit].n)
    handle.log.append(Forget(tuple(by_age[:8:2]), ""))
    state = handle.log.replay()
    threads = ThreadPool(2)
    marked = mark(handle.storage, state, threads, silent)
    threads.close()
    live = []
    for use in marked.uses:
        table = footers.read_table(handle.storage, use.pack)
        rows = table[use.live]
        assert (len(rows), int(rows["stored"].sum())) == (use.live_chunks, use.live_bytes)
        live.extend(rows["chunk"].tolist())
    assert not marked.missing
    assert len(live) == len(set(live))
    assert set(live) == needed(handle)
    assert any(use.dead or use.sparse for use in marked.uses)
    handle.close()


@pytest.mark.soak
def test_a_million_chunks_are_marked_in_five_seconds_and_300_megabytes(tmp_path: Path) -> None:
    """CPU seconds of one thread's worth of work: what others do on the machine is not the mark's
    fault."""
    make_store(tmp_path / "store", commits=1000, chunks=100_000, own=1000)
    code = (
        "import sys, pathlib; from benchmarks.gc_scale import measure; "
        "print(measure(pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    found = literal_eval(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(
        f"{found['live']:,} chunks: {found['cpu_s']:.1f} s of CPU, {found['peak_bytes'] >> 20} MiB"
    )
    assert found["live"] > 1_000_000
    assert found["cpu_s"] < 5
    assert found["peak_bytes"] < 300_000_000
