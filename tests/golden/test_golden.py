"""A store of each format version from 3 on is read, continued and found sound, forever. Formats 1
and 2 were never released."""

import itertools
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.objects.codecs import DELTA
from tests.golden.contents import (
    METRICS,
    MOVED_STEPS,
    PLAIN_STEPS,
    TAGS,
    grown_state,
    moved_state,
    patched_state,
    plain_state,
    rounded_state,
    state,
)
from tests.golden.reader import reader

HERE = Path(__file__).parent
STORES = sorted(path.parent.relative_to(HERE) for path in HERE.glob("*/*/ckptstore.json"))
COMPACTED, PATCHED, ROUNDED = Path("v3/compacted"), Path("v3/patched"), Path("v3/rounded")
PLAIN, GROWN = Path("v3/plain"), Path("v3/grown")


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a, b)
        )
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)  # type: ignore[call-overload,index]
    if isinstance(a, set | frozenset):
        return type(a) is type(b) and sorted(map(repr, a)) == sorted(map(repr, b))  # type: ignore[call-overload]
    return type(a) is type(b) and repr(a) == repr(b)


def test_there_is_a_store_of_each_format_version() -> None:
    assert {str(path) for path in STORES} >= {
        "v3/raw",
        "v3/zstd",
        "v3/compacted",
        "v3/patched",
        "v3/rounded",
        "v3/plain",
        "v3/grown",
    }


@pytest.mark.parametrize(
    "name",
    [name for name in STORES if name not in (COMPACTED, PATCHED, ROUNDED, PLAIN, GROWN)],
    ids=str,
)
def test_a_store_of_an_earlier_version_is_read_and_continued(name: Path, tmp_path: Path) -> None:
    place = tmp_path / "store"
    shutil.copytree(HERE / name, place)
    with ckptstore.open(place) as store:
        for step, ref in ((1, "main@1"), (2, "main@2"), (3, "branch@3")):
            snapshot = store.checkout(ref)
            assert same(snapshot.state_dict(), state(step)) and snapshot.metrics == METRICS[step]
        assert store.checkout("branch@3").parents == (store.checkout("main@2").id,)
        assert store.tags() == {
            tag: store.checkout(f"main@{step}").id for tag, step in TAGS.items()
        }
        assert not store.fsck(read_data="100%").findings
        assert store.commit(state(2), step=4).content_id == store.checkout("main@2").content_id


def test_the_compacted_golden_store_has_all_forms_of_differences() -> None:
    packs = reader.Store(HERE / COMPACTED).chunks.values()
    lists, raw = set[bool](), set[bool]()
    for file, (_, _, offset, size, nbytes, _, codec, width, *_), _ in itertools.chain(*packs):
        if codec == DELTA:
            stored = file.read_bytes()[offset : offset + size]
            word, count = reader.word_of(width), nbytes // reader.word_of(width)
            sizes = struct.unpack_from(f"<{word}I", stored, 40)
            at = 60 + 4 * word + sum(sizes)
            lists |= {length > 0 for length in sizes}
            while at < size - nbytes % word:
                (length,) = struct.unpack_from("<I", stored, at)
                raw.add(length == count)
                at += 4 + length
    assert lists == raw == {False, True}


def test_a_compacted_golden_store_is_read_checked_and_collected(tmp_path: Path) -> None:
    place = tmp_path / "compacted"
    shutil.copytree(HERE / COMPACTED, place)
    with ckptstore.open(place) as store:
        store.forget([2])
        store.gc(grace_s=0, max_unused=0)
        for step in set(MOVED_STEPS) - {2}:
            assert same(store.checkout(step).state_dict(), moved_state(step))
        assert not store.fsck("data").findings


def test_a_patched_golden_store_is_read_checked_and_collected(tmp_path: Path) -> None:
    place = tmp_path / "patched"
    shutil.copytree(HERE / PATCHED, place)
    with ckptstore.open(place) as store:
        store.forget([1, 2])
        store.gc(grace_s=0, max_unused=0)
        for step in (3, 4):
            assert same(store.checkout(step).state_dict(), patched_state(step))
        assert not store.fsck("data").findings


def test_a_golden_store_of_rounded_masters_is_read_checked_and_collected(tmp_path: Path) -> None:
    place = tmp_path / "rounded"
    shutil.copytree(HERE / ROUNDED, place)
    with ckptstore.open(place) as store:
        store.tag("kept", 1)
        store.forget([2])
        store.gc(grace_s=0, max_unused=0)
        for key, leaves in rounded_state(1).items():
            for name, wanted in leaves.items():
                found = store.checkout(1).read(f"{key}/{name}")
                assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), name
        assert not store.fsck("data").findings


@pytest.mark.parametrize(("name", "of"), [(PLAIN, plain_state), (GROWN, grown_state)])
def test_a_golden_store_of_plain_values_is_read_continued_and_compared(
    name: Path, of: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    place = tmp_path / "plain"
    shutil.copytree(HERE / name, place)
    with ckptstore.open(place) as store:
        for step in PLAIN_STEPS:
            assert same(store.checkout(step).state_dict(), of(step))
        assert store.checkout(2).read("log/records/1031/loss") == 1 / 1032
        changes = {each.path: each.change for each in store.diff(1, 2).changes}
        assert changes["log/items/last/n"] == "changed"
        assert changes["log/records/1031/step"] == "added"
        again = store.commit(of(2), step=3)
        assert same(store.checkout(3).state_dict(), of(2))
        if name == GROWN:  # the other is from before chunks of values tapered off
            assert again.content_id == store.checkout(2).content_id
        assert not store.fsck("data").findings


def test_a_golden_store_can_be_read_where_it_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path))
    with ckptstore.open(HERE / "v3" / "raw", read_only=True) as store:
        assert same(store.checkout("best").state_dict(), state(2))
    assert not (HERE / "v3" / "raw" / "index").exists()


@pytest.mark.parametrize("version", [1, 2])
def test_a_store_of_an_unreleased_format_is_refused_with_what_to_do(
    tmp_path: Path, version: int
) -> None:
    shutil.copytree(HERE / "v3" / "raw", tmp_path / "store")
    config = tmp_path / "store" / "ckptstore.json"
    config.write_text(config.read_text().replace('"ckptstore": 3', f'"ckptstore": {version}'))
    with pytest.raises(
        ckptstore.InvalidInput, match=rf"format {version}, .* `ckptstore import` them"
    ):
        ckptstore.open(tmp_path / "store")
