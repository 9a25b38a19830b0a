"""What does a `Manager` of torchft call?

`StoreTransport` replaces torchft's `HTTPTransport`, in a `Manager` or alone.
"""

import secrets
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ckptstore.errors import InvalidInput
from ckptstore.interop.torchft.connection import Deadline, Route
from ckptstore.interop.torchft.fetch import Peers
from ckptstore.interop.torchft.invitation import Invitation
from ckptstore.interop.torchft.offer import Stored, flatten_state, make_offer
from ckptstore.interop.torchft.receive import Received, Transfer
from ckptstore.interop.torchft.state_server import StateServer
from ckptstore.interop.torchft.wire import decode_invitation, encode_invitation
from ckptstore.plugin import stores
from ckptstore.plugin.addresses import listen, own_addresses
from ckptstore.plugin.model import CHUNK_BYTES, default_threads
from ckptstore.plugin.tensors import BufferPool, default_budget
from ckptstore.plugin.work import ThreadPool, behind, cached_property, free_bytes

try:
    from torchft.checkpointing.transport import CheckpointTransport
except ImportError as error:
    raise ImportError(
        f'StoreTransport needs torchft: pip install "ckptstore[torchft]" ({error})'
    ) from error

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ckptstore import Store

__all__ = ["Received", "StoreTransport"]

T = TypeVar("T")

PATIENCE_S = 10.0
"""A peer that sends no chunk within this time is passed over for now: others are asked, or the same
peer again with more patience.
"""

CONNECTIONS = 4


# torchft has no types for mypy
class StoreTransport(CheckpointTransport[T]):  # type: ignore[misc]
    """A `CheckpointTransport` that sends and receives states of any nesting as verified chunks;
    nothing is pickled.

    `timeout` limits calls without a timeout of their own. With `store`, chunks that it has are
    neither copied for serving nor requested. `state_dict` is a function that returns the live
    state, in the structure in which states are sent: its unchanged chunks are not requested, and
    `in_place` writes received leaves into its tensors. `meshes` are further meshes for DTensors,
    besides those of the live state. The server listens at `host` and `port`, by default on all
    addresses and a free port.

    Copies for serving take at most `staging_bytes`, by default half of the host's memory. A state
    of more than `max_bytes`, by default the free memory, is refused. Each peer gets up to
    `connections`; one that sends no chunk for `patience` is passed over.
    """

    def __init__(
        self,
        timeout: timedelta,
        store: "Store | None" = None,
        *,
        state_dict: Callable[[], Any] | None = None,
        in_place: bool = False,
        meshes: "Sequence[DeviceMesh]" = (),
        host: str = "",
        port: int = 0,
        staging_bytes: int | None = None,
        max_bytes: int | None = None,
        connections: int = CONNECTIONS,
        patience: timedelta = timedelta(seconds=PATIENCE_S),
    ) -> None:
        if in_place and state_dict is None:
            raise InvalidInput(
                "in_place writes into the tensors of the live state: pass state_dict, a function "
                "that gives it"
            )
        self._timeout_s, self._store = timeout.total_seconds(), store
        self._state_dict, self._in_place, self._meshes = state_dict, in_place, tuple(meshes)
        self._staging_bytes, self._max_bytes = staging_bytes, max_bytes
        self._connections, self._patience_s = connections, patience.total_seconds()
        self._chunk_bytes = store.chunk_bytes if store else CHUNK_BYTES
        self._threads = ThreadPool(default_threads())
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._left: dict[bytes, memoryview] = {}
        instance, token = secrets.token_hex(16), secrets.token_hex(32)
        self._server = StateServer(listen(host, port), instance, token, timeout_s=self._timeout_s)
        addresses = own_addresses(self._server.port, host)
        self._metadata = encode_invitation(Invitation(instance, token, addresses))
        self.staged_bytes = 0
        """Bytes that the last `send_checkpoint` copied."""
        self.received: Received | None = None
        """What the last successful `recv_checkpoint` took."""

    def metadata(self) -> str:
        """The addresses of this transport, and a token, which is a secret."""
        return self._metadata

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Snapshot `state_dict` and serve it as `step` to every peer with this transport's
        metadata, until the next call of this method or of `disallow_checkpoint`.

        Once this returns, the tensors may change. Raises `InvalidInput` for values that cannot
        travel, naming their path. Raises TimeoutError if peers still take the previous state after
        `timeout` and cannot be disconnected.
        """
        deadline = Deadline(
            timeout.total_seconds(), f"the state of step {step} could not be served"
        )
        with self._sending:
            self._server.withdraw(deadline.left())
            offer = make_offer(
                state_dict,
                step,
                chunk_bytes=self._chunk_bytes,
                pool=self._pool,
                threads=self._threads,
                stored=self._stored(),
            )
            self.staged_bytes = offer.staged_bytes
            self._server.post(offer)

    def disallow_checkpoint(self) -> None:
        """Stop serving. Waits for peers that are receiving; those not done after the transport's
        timeout are disconnected.
        """
        with self._sending:
            self._server.withdraw(self._timeout_s)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receive the state that the transport with this `metadata` serves as `step`; waits until
        it does.

        Raises TimeoutError after `timeout`, `Conflict` if another step is served, and
        `InvalidInput` for bad metadata or a state that cannot be received here. Raises
        `Unavailable` if the peer is gone (a slow one is waited for), and `Corrupt` if its chunks
        keep failing verification. Chunks received before a failure are kept for the next call.
        After a failure with `in_place`, the live tensors hold verified bytes of both states.
        """
        return self.recv_from([metadata], step, timeout)

    def recv_from(self, sources: Sequence[str], step: int, timeout: timedelta) -> T:
        """Like `recv_checkpoint`, from several transports that serve one state, in parallel. Failed
        peers are ignored as long as one is left.
        """
        if not sources:
            raise InvalidInput(
                "there is nobody to receive from: pass the metadata of at least one transport"
            )
        timeout_s, name = timeout.total_seconds(), secrets.token_hex(8)
        deadline = Deadline(timeout_s, f"the state of step {step} has not been received")
        patience_s = min(self._patience_s, max(timeout_s, 0.001))
        routes = [
            Route(invitation, name, patience_s)
            for invitation in dict.fromkeys(map(decode_invitation, sources))
        ]
        peers = Peers(routes, step, deadline, self._connections)
        with self._receiving:
            max_bytes = self._max_bytes if self._max_bytes is not None else free_bytes()
            store = self._store
            transfer = Transfer(
                peers,
                deadline,
                self._threads,
                flatten_state(self._state_dict()) if self._state_dict else None,
                self._in_place,
                stores.chunks_of(store) if store else None,
                stores.committed_chunks(store) if store else {},
                self._meshes,
                self._left,
                max_bytes if max_bytes is not None else 1 << 62,
                self._chunk_bytes,
            )
            try:
                state, self.received = transfer.run()
            except BaseException:
                self._left = transfer.kept()
                raise
            finally:
                peers.close()
            self._left = {}
            return state  # type: ignore[no-any-return]  # what was sent decides its type

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving and free memory, threads and the port; with `wait`, return when that is
        done. Idempotent.
        """
        self._server.close(wait=wait)
        self._left = {}
        if wait:
            self._release()
        else:
            behind(self._release, "ckptstore-transport-end")

    def _stored(self) -> Stored | None:
        """The chunks of the store to serve from there, kept from gc; None without a store that
        takes sessions."""
        if self._store is None:
            return None
        pin = stores.gc_pin(self._store, "serve")
        return Stored(pin, stores.committed_chunks(self._store)) if pin else None

    def _release(self) -> None:
        with self._sending:
            self._server.withdraw(0)
        self._threads.close()

    @cached_property
    def _pool(self) -> BufferPool:
        """Staging memory for served states, sized on first use."""
        return BufferPool(self._staging_bytes or default_budget())
