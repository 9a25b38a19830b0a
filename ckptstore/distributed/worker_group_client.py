"""How do the trainers of many ranks commit through their worker processes?

They have the workers connect, hand each its rank's part, and wait for the outcome. The workers'
addresses and a secret travel once over the trainers' own connections. From then on the workers need
no trainer, and finish the commit even if trainers die. After a failure on any rank, the next commit
connects the workers anew with another secret.
"""

import os
import subprocess
from collections.abc import Sequence

from ckptstore.commit.commit import CommitStats
from ckptstore.commit.pending import Watch
from ckptstore.commit.worker_client import WorkerClient
from ckptstore.commit.worker_protocol import Message
from ckptstore.core.ids import CommitId
from ckptstore.distributed import framing
from ckptstore.distributed.collective import Collective
from ckptstore.distributed.commit import Prepare, RanksCommitted
from ckptstore.distributed.coordinator import Options
from ckptstore.distributed.framing import cause_of
from ckptstore.distributed.rendezvous import SECRET_BYTES
from ckptstore.distributed.worker_group import StagedParts
from ckptstore.errors import CkptStoreError
from ckptstore.objects import canonical
from ckptstore.objects.documents import decode_document
from ckptstore.state.staging_buffers import Buffer


class ProcessRanksCommitter:
    """Like `distributed.commit.RanksCommitter`, in the worker processes of all ranks. One commit at
    a time.
    """

    def __init__(self, worker_client: WorkerClient) -> None:
        self._worker_client = worker_client
        self._batches = StagedParts()
        self._groups: dict[Collective, int] = {}
        self._met: dict[
            Collective, subprocess.Popen[bytes]
        ] = {}  # the worker that is connected to the other ranks' workers

    def commit(
        self,
        peers: Collective,
        prepare: Prepare,
        arena: Buffer,
        options: Options,
        started: float,
        watch: Watch,
    ) -> RanksCommitted:
        """Commit the state in `arena`; see `RanksCommitter.commit`.

        Raises `Unavailable` with `causes` if a worker or a trainer is gone; the next call starts
        new workers in place of lost ones.
        """
        with self._worker_client.lock:
            message = self._ready(peers, prepare, options, watch)
            try:
                done = self._worker_client.commit(
                    Message({**message.says, "started": started}, message.blob),
                    arena,
                    watch,
                    anew=False,
                )
            except BaseException as error:
                self._met.pop(peers, None)
                if isinstance(error, CkptStoreError) and not error.causes:
                    error.causes = {peers.rank: str(cause_of(error))}
                raise
        commit = CommitId(done.says["done"])
        return RanksCommitted(
            commit, decode_document(done.blob, commit), CommitStats(**done.says["stats"])
        )

    def _ready(
        self, peers: Collective, prepare: Prepare, options: Options, watch: Watch
    ) -> Message:
        """The message for the worker, once all ranks have theirs and all workers are connected."""
        found: list[Message] = []

        def describe() -> bytes:
            watch.starting()
            label, flats = prepare()
            found.append(self._batches.batch(flats, label, options, peers.timeout_s))
            return bytes([self._has_met(peers)])

        def all_of(handed_in: Sequence[bytes]) -> list[bytes]:
            return [bytes([all(each[0] for each in handed_in)])] * len(handed_in)

        if not peers.round("workers: ready", describe, all_of)[0]:
            self._meet(peers)
        found[0].says["group"] = self._groups[peers]
        return found[0]

    def _has_met(self, peers: Collective) -> bool:
        return (
            self._worker_client.alive is not None
            and self._met.get(peers) is self._worker_client.alive
        )

    def _meet(self, peers: Collective) -> None:
        """Start missing workers and connect all of them."""
        group = self._groups.setdefault(peers, len(self._groups))

        def listen() -> bytes:
            self._met.pop(peers, None)
            return canonical.encode(
                self._worker_client.ask(Message({"listen": True}), peers.timeout_s).says[
                    "addresses"
                ]
            )

        def invite(places: Sequence[bytes]) -> list[bytes]:
            secret = os.urandom(SECRET_BYTES)
            return [
                framing.join(
                    [secret, canonical.encode([canonical.decode(place) for place in places])]
                )
            ] * len(places)

        secret, places = framing.split(peers.round("workers: meet", listen, invite), 2)
        invitation = {
            "rank": peers.rank,
            "places": canonical.decode(places),
            "timeout_s": peers.timeout_s,
        }
        self._worker_client.tell(Message({"invitation": invitation, "group": group}, secret))
        if worker := self._worker_client.alive:
            self._met[peers] = worker
