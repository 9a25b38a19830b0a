"""import and export on a disk that fills up or fails at any call: one line that says so, nothing
lost, and the next try succeeds."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from shutil import copytree, rmtree
from typing import Any

import pytest

import ckptstore
from tests.cli.running import call
from tests.faults.test_full_disk import DISK_BYTES, ENOUGH, PAGE
from tests.faults.test_io_errors import READS, WRITES
from tests.support import mounts, strace
from tests.support.checker import assert_no_garbage_after_gc, assert_same, assert_sound, view_of
from tests.support.fork_server import Child, Nursery
from tests.support.mounts import leave_free, small_disk
from tests.support.strace import every_call, traced
from tests.support.workloads import CHUNK_BYTES, small

STEPS = 2
SAMPLED = 2


@pytest.fixture
def template(scratch: Path) -> Path:
    """A store, and a file whose content it does not have."""
    place = scratch / "template"
    with ckptstore.open(place, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
        for step in range(STEPS):
            store.commit(small(step), step=step)
    with ckptstore.open(
        scratch / "other", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
    ) as other:
        other.commit(small(STEPS), step=STEPS)
    done = call("-s", str(scratch / "other"), "export", "latest", str(scratch / "new.safetensors"))
    assert done.code == 0, done
    return place


@pytest.fixture
def disk(scratch: Path) -> Iterator[Path]:
    if reason := mounts.small_disk_problem():
        pytest.skip(reason)
    with small_disk(scratch / "disk", size_bytes=DISK_BYTES) as place:
        yield place


def _importing(place: Path, scratch: Path) -> list[str]:
    return ["-s", str(place), "import", str(scratch / "new.safetensors"), "--step", str(STEPS)]


def _document(child: Child) -> tuple[int, dict[str, Any]]:
    ((code, document),) = child.reports("exit")
    return int(code), json.loads(document)


def _check_import(
    place: Path, scratch: Path, child: Child, before: frozenset[str], where: str
) -> bool:
    """Whether the import that a fault struck succeeded; if not it has said so, and is repeated."""
    assert not child.wait(), where
    code, document = _document(child)
    committed = {document["commit"]} if code == 0 else set()
    if code:
        assert code == 1 and document["error"]["kind"] in ("Unavailable", "NoSpace"), (
            f"{where}: {document}"
        )
        assert str(place) in document["error"]["message"], f"{where}: {document}"
    assert view_of(place).live == before | committed, where
    again = call(*_importing(place, scratch), "--json")
    assert again.code == 0, f"{where}: {again}"
    with ckptstore.open(place) as store:
        whole = store.checkout(again.document["commit"]).state_dict()
        assert_same(whole["model"], small(STEPS)["model"], where)
        contents = {
            info.id: small(info.step or 0) if (info.step or 0) < STEPS else whole
            for info in store.log()
        }
    assert_sound(place, contents)
    assert_no_garbage_after_gc(place, contents)
    return not code


def _full(
    rooms: Sequence[int], template: Path, scratch: Path, disk: Path, nursery: Nursery
) -> list[bool]:
    fitted = []
    for room in rooms:
        place = copytree(template, disk / "store")
        ballast = leave_free(disk, room)
        child = nursery.run("command", words=_importing(place, scratch))
        ballast.unlink()
        fitted.append(
            _check_import(place, scratch, child, view_of(template).live, f"{room} bytes free")
        )
        rmtree(place)
    return fitted


def test_full_at_some_pages_of_an_import(
    template: Path, scratch: Path, disk: Path, nursery: Nursery, seed: int
) -> None:
    rooms = sorted(Random(seed).sample(range(0, ENOUGH // 4, PAGE), SAMPLED))
    fitted = _full([0, *rooms, ENOUGH], template, scratch, disk, nursery)
    assert not fitted[0] and fitted[-1], "the disk was never full, or always"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_full_at_every_page_of_an_import(
    template: Path, scratch: Path, disk: Path, nursery: Nursery
) -> None:
    fitted = _full(range(0, ENOUGH, PAGE), template, scratch, disk, nursery)
    assert not fitted[0] and fitted[-1], "the disk was never full, or always"
    print(f"full after each of {len(fitted)} pages: {fitted.count(True)} imports fitted")


def _traced(words: list[str], scratch: Path, nursery: Nursery, calls: str, *options: str) -> Child:
    child = nursery.start("command", words=words)
    assert not traced(child, scratch / "log", *options, calls=calls)
    return child


def _places(words: list[str], scratch: Path, nursery: Nursery, calls: str) -> list[tuple[str, int]]:
    if reason := strace.problem():
        pytest.skip(reason)
    child = _traced(words, scratch, nursery, calls)
    assert _document(child)[0] == 0, _document(child)
    return every_call(scratch / "log")


def _writes(template: Path, scratch: Path, nursery: Nursery) -> list[tuple[str, int]]:
    return _places(
        _importing(copytree(template, scratch / "counted"), scratch), scratch, nursery, WRITES
    )


def _imports(
    places: Sequence[tuple[str, int]], error: str, template: Path, scratch: Path, nursery: Nursery
) -> None:
    for name, n in places:
        place = copytree(template, scratch / "store")
        child = _traced(
            _importing(place, scratch),
            scratch,
            nursery,
            WRITES,
            "-e",
            f"inject={name}:error={error}:when={n}",
        )
        _check_import(
            place, scratch, child, view_of(template).live, f"{error} at {name} number {n}"
        )
        rmtree(place)


def _exporting(place: Path, scratch: Path) -> list[str]:
    return ["-s", str(place), "export", "1", str(scratch / "out.safetensors")]


def _reads(template: Path, scratch: Path, nursery: Nursery) -> list[tuple[str, int]]:
    places = _places(
        _exporting(copytree(template, scratch / "counted"), scratch), scratch, nursery, READS
    )
    (scratch / "out.safetensors").rename(scratch / "wanted.safetensors")
    return places


def _exports(
    places: Sequence[tuple[str, int]], template: Path, scratch: Path, nursery: Nursery
) -> None:
    out, wanted = scratch / "out.safetensors", (scratch / "wanted.safetensors").read_bytes()
    for name, n in places:
        where = f"EIO at {name} number {n}"
        place = copytree(template, scratch / "store")
        child = _traced(
            _exporting(place, scratch),
            scratch,
            nursery,
            READS,
            "-e",
            f"inject={name}:error=EIO:when={n}",
        )
        code, document = _document(child)
        if code:
            assert code == 1 and document["error"]["kind"] == "Unavailable" and not out.exists(), (
                f"{where}: {document}"
            )
            assert call(*_exporting(place, scratch)).code == 0, where
        assert out.read_bytes() == wanted, where
        out.unlink()
        rmtree(place)


def test_some_failing_writes_of_an_import(
    template: Path, scratch: Path, nursery: Nursery, seed: int
) -> None:
    _imports(
        Random(seed).sample(_writes(template, scratch, nursery), SAMPLED),
        "EIO",
        template,
        scratch,
        nursery,
    )


def test_some_failing_reads_of_an_export(
    template: Path, scratch: Path, nursery: Nursery, seed: int
) -> None:
    _exports(
        Random(seed).sample(_reads(template, scratch, nursery), SAMPLED), template, scratch, nursery
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_every_failing_write_of_an_import(
    error: str, template: Path, scratch: Path, nursery: Nursery
) -> None:
    places = _writes(template, scratch, nursery)
    _imports(places, error, template, scratch, nursery)
    print(f"{error} at each of {len(places)} calls of an import")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_failing_read_of_an_export(template: Path, scratch: Path, nursery: Nursery) -> None:
    places = _reads(template, scratch, nursery)
    _exports(places, template, scratch, nursery)
    print(f"EIO at each of {len(places)} reads of an export")
