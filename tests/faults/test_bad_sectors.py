"""A disk that cannot read what it has: damage to what lay there, and to nothing else. Training
resumes, and upkeep goes on."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore.core.ids import checkpoint_key, document_key
from ckptstore.log import log
from ckptstore.storage.reserve import RESERVE_KEY
from tests.maintenance.collecting import opened
from tests.support import strace
from tests.support.checker import assert_sound, view_of
from tests.support.fork_server import Nursery
from tests.support.strace import traced
from tests.support.workloads import CHUNK_BYTES, small

STEP = 3
READS = "read,pread64,preadv,preadv2"
OPENS = "openat,newfstatat"
Choice = Callable[[Path], str]


@pytest.fixture(autouse=True)
def _traceable() -> None:
    if reason := strace.problem():
        pytest.skip(reason)


@pytest.fixture
def place(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three commits, the last of which was followed by a checkpoint of the log."""
    place = scratch / "store"
    with ckptstore.open(place, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
        for step in range(STEP):
            monkeypatch.setattr(log, "CHECKPOINT_EVERY", STEP)
            store.commit(small(step), step=step)
    return place


def _newest(place: Path) -> tuple[str, str]:
    """The session and the id of the newest commit."""
    with opened(place) as handle:
        commit, row = max(handle.log.replay().commits.items(), key=lambda item: item[1].n)
    return row.session, commit


def data(place: Path) -> str:
    session, _ = _newest(place)
    return f"packs/{session[:2]}/{session}-0-0"


def metadata(place: Path) -> str:
    session, _ = _newest(place)
    return f"packs/{session[:2]}/{session}-0-1"


def document(place: Path) -> str:
    session, commit = _newest(place)
    return document_key(session, commit)  # type: ignore[arg-type]  # plain strings


def checkpoint(place: Path) -> str:
    return checkpoint_key(STEP)


def reserve(place: Path) -> str:
    return RESERVE_KEY


def catalog(place: Path) -> str:
    return "index/catalog.sqlite"


def chunk_index(place: Path) -> str:
    (run,) = (place / "index" / "chunks").iterdir()
    return str(run.relative_to(place))


CASES = [
    pytest.param(data, READS, STEP - 2, True, marks=pytest.mark.soak, id="data"),
    pytest.param(data, READS, STEP - 2, False, id="data, no index"),
    pytest.param(data, OPENS, STEP - 2, True, id="the inode of data"),
    pytest.param(document, READS, STEP - 2, True, id="document"),
    pytest.param(
        document, OPENS, STEP - 2, True, marks=pytest.mark.soak, id="the inode of a document"
    ),
    pytest.param(metadata, READS, STEP - 1, False, id="metadata, no index"),
    pytest.param(
        metadata, OPENS, STEP - 1, False, marks=pytest.mark.soak, id="the inode of metadata"
    ),
    pytest.param(checkpoint, READS, STEP - 1, True, marks=pytest.mark.soak, id="checkpoint"),
    pytest.param(
        checkpoint, OPENS, STEP - 1, True, marks=pytest.mark.soak, id="the inode of a checkpoint"
    ),
    pytest.param(
        reserve, OPENS, STEP - 1, True, marks=pytest.mark.soak, id="the inode of the reserve"
    ),
    pytest.param(catalog, READS, STEP - 1, True, marks=pytest.mark.soak, id="catalog"),
    pytest.param(
        catalog, OPENS, STEP - 1, True, marks=pytest.mark.soak, id="the inode of a catalog"
    ),
    pytest.param(chunk_index, READS, STEP - 1, True, id="chunk index"),
    pytest.param(
        chunk_index, OPENS, STEP - 1, True, marks=pytest.mark.soak, id="the inode of a chunk index"
    ),
]


@pytest.mark.parametrize(("choose", "calls", "resumed", "indexed"), CASES)
def test_what_cannot_be_read_is_damage_to_itself_alone(
    choose: Choice,
    calls: str,
    resumed: int,
    indexed: bool,
    place: Path,
    scratch: Path,
    nursery: Nursery,
) -> None:
    bad = choose(place)
    if not indexed:
        shutil.rmtree(place / "index")
    before = view_of(place)
    child = nursery.start("carry_on", place=str(place), step=STEP)
    code = traced(
        child,
        scratch / "log",
        "-P",
        str(place / bad),
        "-e",
        f"inject={calls}:error=EIO",
        calls=calls,
    )
    errors = [error[:2] for error in child.reports("error")]
    assert not code and errors == ([["collected", "Corrupt"]] if choose is document else []), (
        bad,
        code,
        child.reports("error"),
    )
    assert child.reports("resumed") == [[str(resumed)]]
    assert int(child.reports("looked")[0][0]) or bad.startswith(("index/", "reserve"))
    ((committed,),) = child.reports("committed")
    assert view_of(place).live == before.live | {committed}, (
        "whatever could not be read may be read again on another day"
    )
    with ckptstore.open(place) as store:
        assert_sound(place, {info.id: small(info.step or 0) for info in store.log()})
