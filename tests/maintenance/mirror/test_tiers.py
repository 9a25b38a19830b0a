"""A fast disk with a mirror: durable locally at once, uploaded in the background; each heals the
other."""

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core import refs
from ckptstore.errors import InvalidInput, NotFound, Unavailable
from ckptstore.plugins.buckets.bucket import BucketStorage
from ckptstore.plugins.tiers import tiers
from ckptstore.store import Store
from tests.maintenance.stores import CHUNK_BYTES, assert_equal, files, flip
from tests.support.grouped import grouped

MIRROR = "memory://tiers/mirror"


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "frozen": torch.arange(50_000.0),
            "own": torch.randn(30_000, generator=generator),
        },
        "step": step,
    }


def opened(place: Path, **options: Any) -> Store:
    there = ckptstore.Mirror(MIRROR, keep_local=options.pop("keep_local", ()))
    return ckptstore.open(place, mirror=there, **grouped("storage", **options))


def in_mirror() -> dict[int | None, str]:
    with ckptstore.open(MIRROR, create=False) as there:
        return {info.step: info.id for info in there.log()}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "local"


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A switch that takes the mirror's storage away."""
    gone = threading.Event()
    for name in (
        "read",
        "read_into",
        "read_tail",
        "size",
        "put",
        "put_new",
        "create",
        "list",
        "delete",
    ):
        monkeypatch.setattr(BucketStorage, name, _unless(gone, getattr(BucketStorage, name)))
    return lambda on: gone.set() if on else gone.clear()


def _unless(gone: threading.Event, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if gone.is_set():
            raise Unavailable("the network is down")
        return method(*args, **options)

    return call


def test_what_is_committed_here_arrives_there_with_its_tags(place: Path) -> None:
    with opened(place, chunk_bytes=CHUNK_BYTES) as store:
        ids = {
            step: store.commit(state(step), step=step, tag="best" if step == 1 else ()).id
            for step in range(3)
        }
        store.tag("best", 2)
        assert store.flush_mirror()
        with ckptstore.open(MIRROR) as there:
            assert there.tags() == {"best": ids[2]}
            assert_equal(there.checkout(1).state_dict(), state(1))
    assert in_mirror() == ids


def test_training_goes_on_while_the_mirror_is_away_and_what_is_missing_arrives_later(
    place: Path,
    away: Callable[[bool], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiers, "FIRST_PAUSE_S", 0.01)
    away(True)
    with caplog.at_level(logging.WARNING, "ckptstore"), opened(place) as store:
        for step in range(2):
            store.commit(state(step), step=step)
        assert not store.flush_mirror()
        assert_equal(store.checkout().state_dict(), state(1))
        target = state(0)
        assert store.resume(target) is not None
        away(False)
        assert store.flush_mirror()
    assert "commits continue" in caplog.text
    assert set(in_mirror()) == {0, 1}


def test_what_a_process_could_not_send_the_next_one_sends(
    place: Path, away: Callable[[bool], None]
) -> None:
    away(True)
    with opened(place) as store:
        store.commit(state(0), step=0)
    away(False)
    with opened(place) as store:
        assert store.flush_mirror()
    assert set(in_mirror()) == {0}


def test_a_new_disk_resumes_from_the_mirror_and_goes_on(place: Path) -> None:
    with opened(place, chunk_bytes=CHUNK_BYTES) as store:
        first = [store.commit(state(step), step=step).id for step in range(3)]
    rmtree(place)
    with opened(place) as store:
        assert store._handle.config.chunk_bytes == CHUNK_BYTES
        target = state(9)
        resumed = store.resume(target)
        assert resumed is not None and resumed.id == first[2]
        assert_equal(target, state(2))
        assert_equal(store.checkout(0).state_dict(), state(0))
        with pytest.raises(NotFound):
            store.checkout("nosuch")
        made = store.commit(state(3), step=3)
        assert made.parents == (first[2],)
    assert set(in_mirror()) == {0, 1, 2, 3}


def test_a_new_disk_begins_nothing_anew_while_the_mirror_is_away(
    place: Path, away: Callable[[bool], None]
) -> None:
    with opened(place) as store:
        store.commit(state(0), step=0)
    rmtree(place)
    away(True)
    with opened(place) as store:
        for look in (lambda: store.resume(state(9)), store.checkout):
            with pytest.raises(Unavailable, match="begin anew"):
                look()
        away(False)
        resumed = store.resume(state(9))
        assert resumed is not None and resumed.step == 0


def test_a_clock_that_was_set_back_makes_no_commit_older(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a host boots with a wrong time and then asks its network for the right one."""
    with opened(place) as store:
        with monkeypatch.context() as fast:
            ahead_ns = time.time_ns() + 3_600_000_000_000
            fast.setattr(time, "time_ns", lambda: ahead_ns)
            store.commit(state(1), step=1)
        store.commit(state(2), step=2)
        assert store.checkout("latest").step == 2
        assert store.resume(state(0)).step == 2


def test_what_follows_a_commit_is_newer_on_a_host_whose_clock_is_behind(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as fast:
        ahead_ns = time.time_ns() + 3_600_000_000_000
        fast.setattr(time, "time_ns", lambda: ahead_ns)
        with opened(place) as store:
            store.commit(state(0), step=0)
    rmtree(place)
    with opened(place) as store:
        store.resume(state(9))
        store.commit(state(1), step=1)
        store.commit(state(2), step=2)
        assert store.checkout("latest").step == 2
    with opened(tmp_path / "other") as store:
        assert store.checkout("latest").step == 2


def test_the_newest_of_both_is_resumed(place: Path, tmp_path: Path) -> None:
    """A job that moved to another host, went on there, and came back."""
    with opened(place) as store:
        store.commit(state(0), step=0)
    with opened(tmp_path / "other") as store:
        store.resume(state(9))
        store.commit(state(1), step=1)
    with opened(place) as store:
        target = state(9)
        assert store.checkout("latest").step == 1
        resumed = store.resume(target)
        assert resumed is not None and resumed.step == 1
        assert_equal(target, state(1))


def test_what_has_arrived_is_trimmed_here_and_read_there(place: Path) -> None:
    with opened(place, keep_local=ckptstore.KeepLast(2)) as store:
        for step in range(5):
            store.commit(state(step), step=step)
            assert store.flush_mirror()
        assert [info.step for info in store.log()] == [4, 3]
        assert_equal(store.checkout(1).state_dict(), state(1))
    assert set(in_mirror()) == set(range(5))


def test_a_relative_path_of_a_mirror_is_that_of_the_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some programs change their working directory, as Hydra does, and it is opened later."""
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    with ckptstore.open("local", mirror="mirror") as store:
        monkeypatch.chdir("run")
        store.commit(state(1), step=1)
        assert store.flush_mirror()
    assert not list((tmp_path / "run").iterdir())
    with ckptstore.open(tmp_path / "mirror", create=False) as there:
        assert [info.step for info in there.log()] == [1]


def test_nothing_is_trimmed_because_the_store_is_its_own_mirror(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "link").symlink_to(place)
    keep = ckptstore.KeepLast(1)
    with ckptstore.open(place, mirror=ckptstore.Mirror(tmp_path / "link", keep)) as store:
        for step in range(5):
            store.commit(state(step), step=step)
        assert not store.flush_mirror()
        assert [info.step for info in store.log()] == [4, 3, 2, 1, 0]
    assert "lead to the same store" in caplog.text


def test_a_trim_leaves_what_a_user_forgot_to_be_undeleted(
    place: Path, away: Callable[[bool], None]
) -> None:
    away(True)
    with opened(place, keep_local=ckptstore.KeepLast(2)) as store:
        for step in range(3):
            store.commit(state(step), step=step)
        assert store.forget(0).forgotten
        away(False)
        for step in range(3, 6):
            store.commit(state(step), step=step)
            assert store.flush_mirror()
        assert [info.step for info in store.log()] == [5, 4]
        assert 0 not in in_mirror()
        store.undelete(0)
        assert_equal(store.checkout(0).state_dict(), state(0))


def test_a_trim_leaves_what_the_mirror_has_forgotten_to_be_undeleted(place: Path) -> None:
    with opened(place, keep_local=ckptstore.KeepLast(3)) as store:
        for step in range(3):
            store.commit(state(step), step=step)
        assert store.flush_mirror()
        with ckptstore.open(MIRROR) as there:
            assert there.forget(0).forgotten
        store.commit(state(3), step=3)
        assert store.flush_mirror()
        assert [info.step for info in store.log()] == [3, 2, 1]
        store.undelete(0)
        assert_equal(store.checkout(0).state_dict(), state(0))


def test_nothing_is_trimmed_that_has_not_arrived(place: Path, away: Callable[[bool], None]) -> None:
    away(True)
    with opened(place, keep_local=ckptstore.KeepLast(2)) as store:
        for step in range(4):
            store.commit(state(step), step=step)
        assert not store.flush_mirror()
        assert [info.step for info in store.log()] == [3, 2, 1, 0]


def test_damage_here_is_read_around_and_healed(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(place, chunk_bytes=CHUNK_BYTES) as store:
        for step in range(3):
            store.commit(state(step), step=step)
    for path in files(place, "packs"):
        flip(path, 4200 if path.stat().st_size > 8000 else 20)
    with caplog.at_level(logging.WARNING, "ckptstore"), opened(place) as store:
        for step in range(3):
            assert_equal(store.checkout(step).state_dict(), state(step))
        assert store.flush_mirror()
    assert "instead" in caplog.text
    with ckptstore.open(place) as store:
        assert not store.fsck(read_data="100%").damaged
        for step in range(3):
            assert_equal(store.checkout(step).state_dict(), state(step))


@pytest.mark.parametrize("lost", ["*-0-0", "*-0-1*"], ids=["data", "metadata"])
def test_damage_here_does_not_lead_to_an_older_commit_while_the_mirror_is_away(
    place: Path, away: Callable[[bool], None], lost: str
) -> None:
    with opened(place) as store:
        for step in (1, 2):
            store.commit(state(step), step=step)
        assert store.flush_mirror(60)
    for pack in (place / "packs").rglob(lost):
        pack.unlink()
    rmtree(place / "index")
    target = state(0)
    with opened(place) as store:
        store.flush_mirror(60)  # the mirror was there
        away(True)
        with pytest.raises(Unavailable, match=r"does not answer.*open without mirror="):
            store.resume(target)
        away(False)
        found = store.resume(target)
        assert found and found.step == 2
    assert_equal(target, state(2))


def test_without_a_mirror_there_is_nothing_to_wait_for(place: Path) -> None:
    with ckptstore.open(place) as store:
        store.commit(state(0), step=0)
        assert store.flush_mirror()


def test_a_ref_that_is_ambiguous_in_the_mirror_is_not_said_to_be_absent(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refs, "_PREFIX", re.compile("[0-9a-f]{1,64}"))
    with ckptstore.open(MIRROR) as mirror:
        for step in range(17):
            mirror.commit({"step": step}, step=step + 1000)
        firsts = Counter(info.id[0] for info in mirror.log())
    first = max(firsts, key=lambda digit: (firsts[digit] > 1, digit))
    with opened(place) as store, pytest.raises(InvalidInput, match=r"begins several commit ids"):
        store.checkout(first)


@pytest.mark.parametrize("keep", [3, "last", [ckptstore.KeepLast(3), "last"]])
def test_what_is_no_policy_is_refused_when_the_mirror_is_named(keep: Any) -> None:
    with pytest.raises(InvalidInput, match="wanted policies"):
        ckptstore.Mirror("there", keep_local=keep)


def test_an_error_of_our_own_in_the_upload_is_raised_by_close_and_leaves_nothing_open(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a mistake in this code")

    before = set(threading.enumerate())
    monkeypatch.setattr(tiers.Tier, "_send", fail)
    store = opened(place)
    store.commit(state(1), step=1)
    with pytest.raises(RuntimeError, match="ended with an error; open"):
        store.close()
    assert not [thread.name for thread in threading.enumerate() if thread not in before]


@pytest.mark.timeout(60)
def test_a_store_is_closed_after_its_close_was_interrupted(
    place: Path, away: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(place)
    away(True)
    store.commit(state(1), step=1)
    flush = tiers.Tier.flush

    def interrupted(tier: tiers.Tier, timeout_s: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiers.Tier, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    monkeypatch.setattr(tiers.Tier, "flush", flush)
    store.close()
