"""How does a worker process take part in commits of many ranks? It connects to the other workers
and runs `distributed.commit` with them, without a trainer.
"""

from collections.abc import Mapping
from typing import Any

from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.pending import Watch
from ckptstore.commit.worker_protocol import Blob, Message, label_from, label_to, leaf_from
from ckptstore.core.config import StoreConfig
from ckptstore.core.model import Schema
from ckptstore.distributed.collective import Collective
from ckptstore.distributed.commit import RanksCommitter
from ckptstore.distributed.coordinator import Options
from ckptstore.distributed.describe import decode_description, encode_description
from ckptstore.distributed.rendezvous import Invitation, Listener
from ckptstore.distributed.tcp import SocketLink
from ckptstore.errors import Unavailable
from ckptstore.log.log import Log
from ckptstore.objects.documents import encode_document
from ckptstore.objects.schema import LastSchemas
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import FlatState, HeldLeaf, leaves_of

MEETING_S = 60.0
"""Time for all workers to connect. All of them are running when they are told to."""

_WAY_OUT = "the next commit starts other workers for those that are gone"


class WorkerGroup:
    """One rank's worker, for any number of groups of ranks."""

    def __init__(
        self, config: StoreConfig, objects: ObjectStore, log: Log, threads: ThreadPool
    ) -> None:
        self._committer = RanksCommitter(config, objects, log, threads)
        self._listener: Listener | None = None
        self._links: dict[int, SocketLink] = {}
        self._peers: dict[int, Collective | Exception] = {}
        self._schemas: dict[bytes, Schema] = {}

    def listen(self) -> Message:
        """Open a listener for the other workers and return its addresses."""
        if self._listener:
            self._listener.close()
        self._listener = Listener()
        return Message({"addresses": self._listener.addresses})

    def meet(self, message: Message) -> None:
        """Connect to the other workers of a group. If this fails, the commits of the group fail
        with the same error.
        """
        group, invited = message.says["group"], message.says["invitation"]
        places = [[(str(host), int(port)) for host, port in place] for place in invited["places"]]
        if group in self._links:
            self._links.pop(group).close()
        timeout_s = min(MEETING_S, invited["timeout_s"])
        try:
            assert self._listener is not None
            link = self._listener.connect(
                Invitation(invited["rank"], places, message.blob), timeout_s
            )
        except Exception as error:
            self._peers[group] = error
        else:
            self._links[group] = link
            self._peers[group] = Collective(
                link, invited["rank"], len(places), invited["timeout_s"], _WAY_OUT
            )
        finally:
            self._listener = None

    def commit(self, message: Message, arena: memoryview, watch: Watch) -> Message:
        """Write this rank's part of the commit that `StagedParts` described, and return the
        outcome.
        """
        says, peers = message.says, self._peers.get(message.says["group"])
        if not isinstance(peers, Collective):
            raise peers or Unavailable("the worker has not met the workers of other ranks")
        peers.timeout_s = says["timeout_s"]
        label, flats = label_from(says["label"]), self._flats(says, message.blob, arena)
        made = self._committer.commit(
            peers, lambda: (label, flats), Options(*says["options"]), says["started"], watch
        )
        stats = {name: getattr(made.stats, name) for name in made.stats.__slots__}
        return Message({"done": made.id, "stats": stats}, encode_document(made.document)[1])

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _flats(
        self, says: Mapping[str, Any], blob: bytes, arena: memoryview
    ) -> dict[str, FlatState]:
        trees = decode_description(blob[slice(*says["description"])], self._schemas)
        sources = (leaf_from(leaf, blob, arena) for leaf in says["sources"])
        flats = {}
        for tree in trees:
            leaves = [next(sources) for _ in range(len(tree.schema))]
            held = {
                n: HeldLeaf(holding, tuple((box, next(sources)) for box in holding.boxes))
                for n, holding in tree.held.items()
            }
            flats[tree.key] = FlatState(tree.schema, leaves, held, tree.marks)
        return flats


class StagedParts:
    """A trainer's message to its worker about its rank's part of a state."""

    def __init__(self) -> None:
        self._schemas = LastSchemas()

    def batch(
        self,
        flats: Mapping[str, FlatState],
        label: CommitMetadata,
        options: Options,
        timeout_s: float,
    ) -> Message:
        """A staged state: its description, and the location of each leaf's bytes."""
        blob = Blob()
        says = {
            "label": label_to(label),
            "options": [options.canonical, options.trust_replicated],
            "timeout_s": timeout_s,
            "description": blob.put(encode_description(flats, self._schemas)),
            "sources": [blob.leaf(source) for source in leaves_of(flats)],
        }
        return Message(says, bytes(blob.data))
