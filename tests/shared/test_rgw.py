"""Ceph's S3 gateway dies and comes back in the middle of uploads: what was acknowledged is
there."""

import os
import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ckptstore.core.ids import CommitId
from ckptstore.errors import Unavailable
from ckptstore.storage import open_storage
from ckptstore.storage.contract import PART_BYTES
from tests.maintenance.collecting import state_of
from tests.maintenance.stores import assert_equal
from tests.shared.sites import Site
from tests.storage.test_backend import written
from tests.support.servers.proxy import proxy_to
from tests.support.servers.rgw import rgw_server
from tests.support.servers.s3 import clients, make_bucket, new_url

pytestmark = pytest.mark.skipif(
    "CKPTSTORE_TEST_S3" not in os.environ, reason="needs Ceph's server: `make test-real` starts it"
)


@pytest.mark.parametrize("client", clients())
def test_what_was_acknowledged_survives_the_death_of_the_gateway(
    client: str, tmp_path: Path
) -> None:
    acknowledged: dict[CommitId, int] = {}
    failures: list[BaseException] = []
    stop = threading.Event()
    with rgw_server() as rgw:
        make_bucket(rgw.server)
        site = Site(new_url(), rgw.server.options(deadline_s=5, client=client))
        site.open(tmp_path / "host").close()

        def write(me: int) -> None:
            try:
                with site.open(tmp_path / f"host-{me}", run=f"run-{me}") as store:
                    step = me * 1000
                    while not stop.is_set():
                        step += 1
                        try:
                            acknowledged[store.commit(content(step), step=step).id] = step
                        except Unavailable as error:
                            print(f"step {step}: {error}")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=write, args=(me,)) for me in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            before = len(acknowledged)
            while len(acknowledged) < before + 4 and not failures:
                stop.wait(0.02)
            rgw.kill()
            rgw.start()
        before = len(acknowledged)
        while len(acknowledged) < before + 2 and not failures:
            stop.wait(0.02)
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        with site.open(tmp_path / "another-host") as store:
            shown = {info.id: info.step for info in store.log()}
            assert acknowledged.items() <= shown.items()
            for commit, step in shown.items():
                assert step is not None
                assert_equal(store.checkout(commit).state_dict(), content(step))
            assert store.fsck().findings == ()


def test_objects_survive_gateways_that_die_within_the_end_of_their_upload(seed: int) -> None:
    """The gateway is killed some milliseconds after it was asked for the end. Both clients send
    uploads in one way."""
    chance = random.Random(seed)
    sent: dict[str, bytes] = {}
    with rgw_server() as rgw, proxy_to(rgw.server.address) as proxy:
        make_bucket(rgw.server)
        url, behind = new_url(), rgw.server.behind(proxy.endpoint)
        storage = open_storage(url, storage_options=behind.options(deadline_s=2))
        deaths: list[threading.Thread] = []

        def die() -> None:
            time.sleep(chance.uniform(0.001, 0.01))
            rgw.kill()
            rgw.start()

        def aim(data: bytes) -> bytes:
            if data.startswith(b"POST") and b"uploadId=" in data and not deaths:
                deaths.append(threading.Thread(target=die))
                deaths[0].start()
            return data

        proxy.faults.rewrite = aim
        for n in range(12):
            key, whole = f"packs/aa/{n}", chance.randbytes(PART_BYTES + 5)
            writer = written(storage, key, whole)
            with suppress(Unavailable):
                writer.finish()
                sent[key] = whole
            deaths.pop().join()
        storage = open_storage(url, storage_options=rgw.server.options())
        for upload, _ in list(storage.list("tmp/")):
            storage.delete(upload)
        time.sleep(3)  # the gateway's garbage collector
        assert sent
        for key, whole in sent.items():
            assert storage.read(key) == whole


def content(step: int) -> dict[str, object]:
    """More than one part of an upload."""
    return state_of(step, own=2_500_000)
