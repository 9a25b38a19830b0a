"""The trainers' side of commits that their workers make together: have the workers meet, hand each its rank's part, hear how it went.

The workers' addresses and a secret travel once through the trainers' own connections. From then on workers need no trainer: they finish the
commit that they hold whoever of the trainers dies. What failed on any rank makes the next commit meet anew, under another secret.
"""

import os
import subprocess
from collections.abc import Sequence

from ckptstore.commit.commit import CommitStats
from ckptstore.commit.progress import Watch
from ckptstore.commit.worker_client import Hired
from ckptstore.commit.worker_protocol import Message
from ckptstore.core.ids import CommitId
from ckptstore.distributed import framing
from ckptstore.distributed.collective import Peers
from ckptstore.distributed.commit import Prepare, RanksCommitted
from ckptstore.distributed.coordinator import Options
from ckptstore.distributed.messages import cause_of
from ckptstore.distributed.rendezvous import SECRET_BYTES
from ckptstore.distributed.worker_group import Parcels
from ckptstore.errors import CkptStoreError
from ckptstore.objects import canonical
from ckptstore.objects.documents import decode_document
from ckptstore.state.staging_buffers import Arena


class HiredRanks:
    """Makes commits like `distributed.commit.RanksCommitter`, in the worker processes of all ranks. One at a time."""

    def __init__(self, hired: Hired) -> None:
        self._hired = hired
        self._parcels = Parcels()
        self._groups: dict[Peers, int] = {}
        self._met: dict[Peers, subprocess.Popen[bytes]] = {}  # the worker that has met those of the others

    def commit(self, peers: Peers, prepare: Prepare, arena: Arena, options: Options, started: float, watch: Watch) -> RanksCommitted:
        """Have the state that lies in `arena` committed; see `RanksCommitter.commit`.

        Raises `Unavailable` with `causes` if a worker or a trainer is gone: the next call starts other workers for those that are.
        """
        with self._hired.lock:
            message = self._ready(peers, prepare, options, watch)
            try:
                done = self._hired.commit(Message({**message.says, "started": started}, message.blob), arena, watch, anew=False)
            except BaseException as error:
                self._met.pop(peers, None)
                if isinstance(error, CkptStoreError) and not error.causes:
                    error.causes = {peers.rank: str(cause_of(error))}
                raise
        commit = CommitId(done.says["done"])
        return RanksCommitted(commit, decode_document(done.blob, commit), CommitStats(**done.says["stats"]))

    def _ready(self, peers: Peers, prepare: Prepare, options: Options, watch: Watch) -> Message:
        """What to hand over, once all ranks have it and all workers have met."""
        found: list[Message] = []

        def describe() -> bytes:
            watch.starting()
            label, flats = prepare()
            found.append(self._parcels.parcel(flats, label, options, peers.timeout_s))
            return bytes([self._has_met(peers)])

        def all_of(handed_in: Sequence[bytes]) -> list[bytes]:
            return [bytes([all(each[0] for each in handed_in)])] * len(handed_in)

        if not peers.round("workers: ready", describe, all_of)[0]:
            self._meet(peers)
        found[0].says["group"] = self._groups[peers]
        return found[0]

    def _has_met(self, peers: Peers) -> bool:
        return self._hired.alive is not None and self._met.get(peers) is self._hired.alive

    def _meet(self, peers: Peers) -> None:
        """Start workers where there are none, and bring all of them together."""
        group = self._groups.setdefault(peers, len(self._groups))

        def open_door() -> bytes:
            self._met.pop(peers, None)
            return canonical.encode(self._hired.ask(Message({"door": True}), peers.timeout_s).says["addresses"])

        def invite(places: Sequence[bytes]) -> list[bytes]:
            secret = os.urandom(SECRET_BYTES)
            return [framing.join([secret, canonical.encode([canonical.decode(place) for place in places])])] * len(places)

        secret, places = framing.split(peers.round("workers: meet", open_door, invite), 2)
        invitation = {"rank": peers.rank, "places": canonical.decode(places), "timeout_s": peers.timeout_s}
        self._hired.tell(Message({"invitation": invitation, "group": group}, secret))
        if worker := self._hired.alive:
            self._met[peers] = worker
