"""The cases of a bucket: commits to one and restores from it, against the raw client, DCP through
fsspec and TorchSnapshot's S3 plugin.

The server is on the same host, so its processor time is taken from everybody, and bandwidth costs
nothing but that. The raw client is boto3's, in threads: parts and ranges of 8 MiB, eight on their
way. Opening a store and making a client is not timed. What was written is deleted after each act,
and every restore is compared with what was saved.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from s3fs import S3FileSystem

import ckptstore
from benchmarks import states
from benchmarks.bucket import Bucket, real_bucket
from benchmarks.context import Context
from benchmarks.measure import Entrant, Result, alternate
from benchmarks.saves import OURS
from benchmarks.states import State
from ckptstore.core.config import MIB
from ckptstore.storage.contract import PART_BYTES

PARTS_IN_FLIGHT = 8
RAW, DCP, SNAPSHOT = "raw client", "DCP, fsspec", "TorchSnapshot, S3 plugin"
CLIENTS = ((OURS, "obstore"), ("ckptstore, s3fs", "fsspec"))

Scenario = Callable[[State, str], object]


@dataclass(frozen=True, slots=True)
class Peer:
    """Writes a state to a place in the bucket, and fills a state from there."""

    name: str
    write: Scenario
    load: Scenario


class RawClient:
    """One object, in parts."""

    def __init__(self, there: Bucket) -> None:
        self._bucket, self._client = there.name, there.client(connections=PARTS_IN_FLIGHT)

    def write(self, state: State, url: str) -> None:
        what = {"Bucket": self._bucket, "Key": _key(url)}
        upload = self._client.create_multipart_upload(**what)["UploadId"]

        def send(numbered: tuple[int, memoryview]) -> dict[str, Any]:
            number, part = numbered
            answer = self._client.upload_part(
                **what, UploadId=upload, PartNumber=number, Body=bytes(part)
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(PARTS_IN_FLIGHT) as pool:
            parts = list(pool.map(send, enumerate(_parts(state), 1)))
        self._client.complete_multipart_upload(
            **what, UploadId=upload, MultipartUpload={"Parts": parts}
        )

    def load(self, state: State, url: str) -> None:
        def get(numbered: tuple[int, memoryview]) -> None:
            number, out = numbered
            wanted = f"bytes={number * PART_BYTES}-{number * PART_BYTES + len(out) - 1}"
            body = self._client.get_object(Bucket=self._bucket, Key=_key(url), Range=wanted)["Body"]
            while data := body.read(MIB):
                out[: len(data)] = data
                out = out[len(data) :]

        with ThreadPoolExecutor(PARTS_IN_FLIGHT) as pool:
            list(pool.map(get, enumerate(_parts(state))))


def _parts(state: State) -> list[memoryview]:
    """Tensors are a multiple of a part, so that parts lie in the object as they do here."""
    return [
        memory[start : start + PART_BYTES]
        for memory in state.memories()
        for start in range(0, len(memory), PART_BYTES)
    ]


def _key(url: str) -> str:
    return url.removeprefix("s3://").partition("/")[2]


def _dcp_write(state: State, url: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state.app, storage_writer=_fsspec().FsspecWriter(url, thread_count=2), no_dist=True)


def _dcp_load(state: State, url: str) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state.app, storage_reader=_fsspec().FsspecReader(url), no_dist=True)


def _fsspec() -> Any:
    """Where DCP has its writer and reader of URLs."""
    from torch.distributed import checkpoint

    if hasattr(checkpoint, "FsspecWriter"):
        return checkpoint
    from torch.distributed.checkpoint import _fsspec_filesystem  # before torch 2.15

    return _fsspec_filesystem


def _snapshot_write(state: State, url: str) -> None:
    from torchsnapshot import Snapshot, StateDict

    Snapshot.take(url, {key: StateDict(**tree) for key, tree in state.app.items()})


def _snapshot_load(state: State, url: str) -> None:
    from torchsnapshot import Snapshot, StateDict

    Snapshot(url).restore({key: StateDict(**tree) for key, tree in state.app.items()})


def _peers(there: Bucket) -> tuple[Peer, ...]:
    raw = RawClient(there)
    return (
        Peer(RAW, raw.write, raw.load),
        Peer(DCP, _dcp_write, _dcp_load),
        Peer(SNAPSHOT, _snapshot_write, _snapshot_load),
    )


class Place:
    """A place in the bucket, for each act anew."""

    def __init__(self, there: Bucket) -> None:
        self._there = there
        self.url = ""

    def fresh(self) -> None:
        self.url = self._there.new_url()

    def write(self, peer: Peer, state: State) -> None:
        peer.write(state, self.url)

    def clear(self) -> None:
        self._there.delete(_key(self.url))


def _restore(store: ckptstore.Store, into: State) -> None:
    store.checkout(0).restore(into.app)


class Commit:
    """Our commit to a store that was just made."""

    def __init__(self, there: Bucket, state: State, client: str) -> None:
        self._options, self._place, self._state = (
            {**there.storage_options, "client": client},
            Place(there),
            state,
        )

    def before(self) -> None:
        self._place.fresh()
        self._store = ckptstore.open(
            self._place.url, storage=ckptstore.Storage(options=self._options)
        )

    def act(self) -> None:
        self._store.commit(self._state.app, step=0)

    def after(self) -> None:
        self._store.close()
        self._place.clear()


@contextmanager
def bucket_of_a_case() -> Iterator[Bucket]:
    """The bucket, and the environment from which the peers take where it is and who they are."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder, real_bucket() as there:
        who = {"AWS_ACCESS_KEY_ID": there.key, "AWS_SECRET_ACCESS_KEY": there.secret}
        os.environ.update(
            AWS_ENDPOINT_URL=there.endpoint,
            AWS_DEFAULT_REGION="us-east-1",
            CKPTSTORE_CACHE=folder,
            **who,
        )
        try:
            yield there
        finally:
            os.environ.clear()
            os.environ.update(before)
            # Else a peer gets the one that it made for this bucket again, in the next case as well:
            # it is remembered by what it was told.
            S3FileSystem.clear_instance_cache()


def s3_commit(context: Context) -> Result:
    state = states.slabs(context.scale)
    with bucket_of_a_case() as there:
        commits = [(name, Commit(there, state, client)) for name, client in CLIENTS]
        entrants = [Entrant(name, ours.act, ours.before, ours.after) for name, ours in commits]
        for peer in _peers(there):
            place = Place(there)
            entrants.append(
                Entrant(peer.name, partial(place.write, peer, state), place.fresh, place.clear)
            )
        series = alternate("s3-commit", entrants, context.rounds)
        return Result(
            "s3-commit", f"a commit to a bucket ({there.server})", "s", state.nbytes, series
        )


def s3_restore(context: Context) -> Result:
    state = states.slabs(context.scale)
    into = states.blank(state)
    wipe = partial(states.wipe, into)
    with bucket_of_a_case() as there:
        entrants, stores, place = [], [], there.new_url()
        for name, client in CLIENTS:
            store = ckptstore.open(
                place,
                storage=ckptstore.Storage(options={**there.storage_options, "client": client}),
            )
            store.commit(state.app, step=0)
            stores.append(store)
            check = partial(states.require_equal, state, into, name)
            entrants.append(Entrant(name, partial(_restore, store, into), wipe, check))
        for peer in _peers(there):
            url = there.new_url()
            peer.write(state, url)
            entrants.append(
                Entrant(
                    peer.name,
                    partial(peer.load, into, url),
                    wipe,
                    partial(states.require_equal, state, into, peer.name),
                )
            )
        series = alternate("s3-restore", entrants, context.rounds)
        for store in stores:
            store.close()
        return Result(
            "s3-restore", f"a restore from a bucket ({there.server})", "s", state.nbytes, series
        )
