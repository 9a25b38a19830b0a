"""How are chunks that were found in a store kept from gc, by a reader that commits nothing?"""

from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.log.log import Log
from ckptstore.log.sessions import open_session
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import Dedup, DedupHints


class GcPin:
    """A session that protects chunks found in the store from gc (unless forced) until `end`."""

    def __init__(self, objects: ObjectStore, log: Log, what: str) -> None:
        """Raises the storage error if the session cannot be opened."""
        self.objects = objects
        self._session = open_session(objects.storage, what)
        # Replay after opening the session: a gc that condemned packs earlier has not seen it.
        state = log.replay(refresh=True)
        objects.sync(state)
        self._dedup = Dedup(objects, state, DedupHints())

    def held(self, ids: bytes) -> dict[bytes, int]:
        """The raw size of each of `ids` that a live pack holds."""
        if not ids:
            return {}
        sizes = self.objects.locate(ids)["raw"].tolist()
        live = self._dedup.live(ids)
        return {
            ids[i * CHUNK_ID_BYTES : (i + 1) * CHUNK_ID_BYTES]: sizes[i]
            for i in range(len(sizes))
            if live[i]
        }

    def end(self) -> None:
        """Stop protecting the chunks. Idempotent."""
        self._session.end()
