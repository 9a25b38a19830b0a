"""doctor reports the abilities of a place and its problems, each with a next step."""

from dataclasses import replace
from pathlib import Path

import pytest

import ckptstore
from ckptstore.maintenance.disk_space import DiskRoom, expected_bytes
from ckptstore.plugins.reports.doctor import Check, StorageFacts, Verdict, doctor, judge
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.storage import open_storage
from tests.support.servers.proxy import proxy_to
from tests.support.servers.s3 import S3Server, new_url

FINE = StorageFacts("", "", "", 0.001, "ext4", False, "/cache", False, True, 0.0, -10.0)
ROOMY = DiskRoom(free=1 << 40, new=(1000, 5000, 2000), logical=9000, reserve=1 << 20)


def verdicts(checks: tuple[Check, ...]) -> dict[str, Verdict]:
    return {check.name: check.verdict for check in checks if check.verdict is not Verdict.OK}


def test_a_good_place_is_fine() -> None:
    checks = judge(FINE, ROOMY)
    assert verdicts(checks) == {}
    assert not any(check.next for check in checks)


@pytest.mark.parametrize(
    ("storage", "name", "verdict"),
    [
        (replace(FINE, writable="no right"), "write", Verdict.FAILED),
        (replace(FINE, exclusive="an object was created twice"), "exclusive", Verdict.FAILED),
        (replace(FINE, rename="reads as before"), "rename", Verdict.FAILED),
        (replace(FINE, fsync_s=0.5), "fsync", Verdict.WARNING),
        (replace(FINE, clock_skew_s=-60.0), "clock", Verdict.WARNING),
        (replace(FINE, newest_entry_s=3600.0), "time", Verdict.WARNING),
        (
            replace(FINE, network=True, filesystem="nfs4", index_network=True),
            "filesystem",
            Verdict.WARNING,
        ),
        (replace(FINE, locks=False), "locks", Verdict.WARNING),
    ],
)
def test_each_fault_has_its_verdict_and_a_next_step(
    storage: StorageFacts, name: str, verdict: Verdict
) -> None:
    checks = judge(storage, ROOMY)
    assert verdicts(checks) == {name: verdict}
    assert all(check.next for check in checks if check.verdict is not Verdict.OK)


@pytest.mark.parametrize(
    ("free", "verdict"),
    [
        (4999, Verdict.FAILED),
        (5000, Verdict.WARNING),
        (14_999, Verdict.WARNING),
        (15_000, Verdict.OK),
    ],
)
def test_free_space_is_compared_with_the_next_commit(free: int, verdict: Verdict) -> None:
    assert expected_bytes(ROOMY) == 5000
    assert verdicts(judge(FINE, replace(ROOMY, free=free))).get("space", Verdict.OK) is verdict


def test_who_may_not_write_is_not_told_to_make_room() -> None:
    full = DiskRoom(free=0, new=(1000,), logical=9000, reserve=0)
    read_only = replace(FINE, writable="Read-only file system", read_only=True)
    assert verdicts(judge(read_only, full)) == {"write": Verdict.FAILED}
    assert "space" in verdicts(judge(replace(FINE, writable="No space left"), full))


def test_a_bucket_has_no_end_and_no_reserve() -> None:
    assert verdicts(judge(FINE, DiskRoom(None, (10**18,), 10**18, None))) == {}


def test_an_object_whose_answer_was_lost_was_not_created_twice(s3: S3Server) -> None:
    url, lost = new_url(), list[bytes]()
    ckptstore.open(url, storage=ckptstore.Storage(options=s3.options())).close()
    direct = open_storage(url, storage_options=s3.options())
    with proxy_to(s3.address) as proxy:
        options = s3.behind(proxy.endpoint).options(deadline_s=8)
        handle = StoreHandle(url, storage_options=options)

        def lose(data: bytes) -> bytes:
            if not lost and any(key.endswith("-doctor.new") for key, _ in direct.list("tmp/")):
                lost.append(data)
                raise OSError("the connection broke")
            return data

        proxy.faults.spoil = lose
        checks = doctor(handle)
        handle.close()
    assert lost
    assert verdicts(checks).keys() <= {"fsync"}


def test_a_missing_reserve_is_a_warning() -> None:
    assert verdicts(judge(FINE, replace(ROOMY, reserve=None))) == {"reserve": Verdict.WARNING}


def test_a_real_store_is_examined_without_a_trace(store: Path) -> None:
    before = sorted(path for path in store.rglob("*") if "index" not in path.parts)
    handle = StoreHandle(store)
    checks = {check.name: check for check in doctor(handle)}
    handle.close()
    for name in ("write", "exclusive", "rename", "locks", "time"):
        assert checks[name].verdict is Verdict.OK, checks[name]
    assert sorted(path for path in store.rglob("*") if "index" not in path.parts) == before


def test_a_read_only_opening_is_told_so(store: Path) -> None:
    handle = StoreHandle(store, read_only=True)
    checks = {check.name: check for check in doctor(handle)}
    handle.close()
    assert checks["write"].verdict is Verdict.FAILED
    assert "exclusive" not in checks
    assert isinstance(ckptstore.open(store, read_only=True).log(), list)
