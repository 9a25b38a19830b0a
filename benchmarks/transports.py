"""A replica that joins: torchft's transport and ours, from a sender in another process, on this
host or over a link.

A turn is all that a recovery takes: the sender holds its state still and serves it, the receiver
receives it. As in a Manager, both begin at the same moment. What came is compared, untimed, with
what was sent. A replica that joins has no memory left over from the last time, so the C library's
free memory is returned before each turn.
"""

import ctypes
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks import states
from benchmarks.context import Context
from benchmarks.links import network
from benchmarks.measure import Entrant, Result, alternate
from benchmarks.states import State
from tests.support.servers.hosts import Host, within

_libc = ctypes.CDLL(None)

OURS, COMMITTED, THEIRS = "ckptstore", "ckptstore, committed", "torchft HTTPTransport"
IN_PLACE, IN_PLACE_COMMITTED = "ckptstore, in place", "ckptstore, in place, committed"
TIMEOUT = timedelta(seconds=120)
SLOW = "1gbit"
CHUNK_ELEMENTS = (1 << 20) // 4
EVERY = 20
"""One chunk of so many differs: 5 %."""


def full(context: Context) -> Result:
    """Everything travels."""
    return _full("torchft-full", "A replica without a state takes all of it from a peer", context)


def full_link(context: Context) -> Result:
    """Everything travels over a link."""
    return _full(
        "torchft-full-link",
        f"A replica without a state takes all of it over {context.link}/s",
        context,
        context.link,
    )


def recovery(context: Context) -> Result:
    """The receiver has a state of which one chunk of twenty is old."""
    return _recovery(
        "torchft-recovery",
        "A replica takes a state of which it lacks 5 % of the chunks from a peer",
        context,
    )


def recovery_link(context: Context) -> Result:
    """The same over a link."""
    title = f"A replica takes a state of which it lacks 5 % of the chunks over {context.link}/s"
    return _recovery("torchft-recovery-link", title, context, context.link)


def full_slow_link(context: Context) -> Result:
    """Everything travels over a link that is slower than any processor."""
    return _full(
        "torchft-full-slow-link",
        f"A replica without a state takes all of it over {SLOW}/s",
        context,
        SLOW,
    )


def recovery_slow_link(context: Context) -> Result:
    """One chunk of twenty travels over such a link."""
    title = f"A replica takes a state of which it lacks 5 % of the chunks over {SLOW}/s"
    return _recovery("torchft-recovery-slow-link", title, context, SLOW)


def _full(case: str, title: str, context: Context, rate: str = "") -> Result:
    state = states.gpt(context.scale)
    with sender(context, rate) as peer, ExitStack() as stack:
        entrants = [
            _entrant(OURS, "chunks", peer, state, receiving(stack)),
            _entrant(COMMITTED, "committed", peer, state, receiving(stack)),
            _entrant(THEIRS, "stream", peer, state, their_receiving()),
        ]
        series = alternate(case, entrants, context.rounds)
    return Result(case, title, "s", state.nbytes, series)


def _recovery(case: str, title: str, context: Context, rate: str = "") -> Result:
    state = states.gpt(context.scale)
    live = states.nest({path: tensor.clone() for path, tensor in state.tensors.items()})
    old = [(chunk, chunk.sub_(1).clone()) for chunk in _some_chunks(live)]

    def revert() -> None:
        for chunk, values in old:
            chunk.copy_(values)

    with sender(context, rate) as peer, ExitStack() as stack:
        entrants = [
            _entrant(
                IN_PLACE, "chunks", peer, state, receiving(stack, live, in_place=True), revert
            ),
            _entrant(
                IN_PLACE_COMMITTED,
                "committed",
                peer,
                state,
                receiving(stack, live, in_place=True),
                revert,
            ),
            _entrant(OURS, "chunks", peer, state, receiving(stack, live), revert),
            _entrant(THEIRS, "stream", peer, state, their_receiving()),
        ]
        series = alternate(case, entrants, context.rounds)
    return Result(case, title, "s", state.nbytes, series)


Receive = Callable[[str, int], Any]


@dataclass(frozen=True, slots=True)
class Sender:
    """A process that has the state. It answers what it is told in that order."""

    pipe: Connection

    def tell(self, *what: Any) -> None:
        self.pipe.send(what)

    def answer(self) -> Any:
        return self.pipe.recv()

    def ask(self, *what: Any) -> Any:
        self.tell(*what)
        return self.answer()


def receiving(stack: ExitStack, live: State | None = None, *, in_place: bool = False) -> Receive:
    """Our receiver."""
    from ckptstore.interop.torchft import StoreTransport

    state_dict = (lambda: live.app) if live else None
    transport: StoreTransport[Any] = StoreTransport(
        TIMEOUT, state_dict=state_dict, in_place=in_place
    )
    stack.callback(transport.shutdown)

    return lambda metadata, step: transport.recv_checkpoint(0, metadata, step, TIMEOUT)


def their_receiving() -> Receive:
    from torchft.checkpointing.http_transport import HTTPTransport

    transport: Any = HTTPTransport(TIMEOUT, num_chunks=0)
    return lambda metadata, step: transport.recv_checkpoint(0, metadata, step, TIMEOUT)


def _entrant(
    name: str,
    kind: str,
    peer: Sender,
    state: State,
    receive: Receive,
    before: Callable[[], object] = lambda: None,
) -> Entrant:
    got: list[Any] = []
    step = iter(range(1, 1 << 30))
    metadata = peer.ask("metadata", kind)

    def prepare() -> None:
        before()
        return_free_memory()

    def act() -> None:
        number = next(step)
        peer.tell("send", kind, number)
        got.append(receive(metadata, number))
        peer.answer()

    def after() -> None:
        peer.ask("withdraw", kind)
        states.require_equal(state, states.State(got[0], dict(_by_path(got.pop()))), name)

    return Entrant(name, act, prepare, after)


def return_free_memory() -> None:
    """Return what the C library keeps of freed memory to the kernel, where it can (glibc)."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def _by_path(app: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in app.items():
        yield from (
            [(f"{path}{key}", value)]
            if isinstance(value, torch.Tensor)
            else _by_path(value, f"{path}{key}/")
        )


def _some_chunks(state: State) -> list[torch.Tensor]:
    """One chunk of twenty, of all tensors."""
    return [
        chunk
        for tensor in state.tensors.values()
        for chunk in tensor.view(-1).split(CHUNK_ELEMENTS)
    ][::EVERY]


@contextmanager
def sender(context: Context, rate: str) -> Iterator[Sender]:
    """A process that has the state: on this host, or with a `rate` on another one at the end of a
    link."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        there = None
        if rate:
            here, there = stack.enter_context(network(rate, rate))
            stack.enter_context(within(here.name))
        ours, theirs = spawn.Pipe()
        process = spawn.Process(
            target=_serve, args=(theirs, context.scale, context.folder(), there), daemon=True
        )
        process.start()
        peer = Sender(ours)
        try:
            yield peer
        finally:
            peer.ask("end")
            process.join()


def _serve(pipe: Connection, scale: float, folder: Path, host: Host | None) -> None:
    with within(host.name) if host else nullcontext():  # before there are other threads
        _serve_here(pipe, scale, folder, host)


def _serve_here(pipe: Connection, scale: float, folder: Path, host: Host | None) -> None:
    from torchft.checkpointing.http_transport import HTTPTransport

    import ckptstore
    from ckptstore.interop.torchft import StoreTransport

    state = states.gpt(scale)
    with ckptstore.open(folder / "store") as store:
        transports: dict[str, Any] = {
            "chunks": StoreTransport(TIMEOUT),
            "committed": StoreTransport(TIMEOUT, store),
            "stream": HTTPTransport(TIMEOUT, num_chunks=0),
        }
        store.commit(state.app)
        while (what := pipe.recv())[0] != "end":
            pipe.send(_do(transports[what[1]], what, state, host))
        for transport in (transports["chunks"], transports["committed"]):
            transport.shutdown()
    pipe.send(None)


def _do(transport: Any, what: Any, state: State, host: Host | None) -> str | None:
    if what[0] == "metadata":
        metadata: str = transport.metadata()
        # torchft names the host, which no name server knows there.
        return (
            metadata.replace(f"//{socket.gethostname()}:", f"//{host.address}:")
            if host
            else metadata
        )
    if what[0] == "send":
        transport.send_checkpoint([1], what[2], state.app, TIMEOUT)
    else:
        transport.disallow_checkpoint()
    return None
