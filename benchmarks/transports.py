"""A replica that joins: torchft's transport and ours, from a sender in another process, over the loopback interface.

A turn is all that a recovery takes: the sender holds its state still and serves it, the receiver receives it. What came is compared,
untimed, with what was sent.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks import states
from benchmarks.context import Context
from benchmarks.measure import Entrant, Result, alternate
from benchmarks.states import State

OURS, IN_PLACE, COMMITTED, THEIRS = "ckptstore", "ckptstore, in place", "ckptstore, in place, committed", "torchft HTTPTransport"
TIMEOUT = timedelta(seconds=120)
CHUNK_ELEMENTS = (1 << 20) // 4
EVERY = 20
"""One chunk of so many differs: 5 %."""


def full(context: Context) -> Result:
    """Everything travels."""
    state = states.gpt(context.scale)
    with sender(context) as ask, ExitStack() as stack:
        entrants = [
            _entrant(OURS, "chunks", ask, state, receiving(stack)),
            _entrant(THEIRS, "stream", ask, state, their_receiving()),
        ]
        series = alternate("torchft-full", entrants, context.rounds)
    return Result("torchft-full", "A replica without a state takes all of it from a peer", "s", state.nbytes, series)


def recovery(context: Context) -> Result:
    """The receiver has a state of which one chunk of twenty is old."""
    state = states.gpt(context.scale)
    live = states.nest({path: tensor.clone() for path, tensor in state.tensors.items()})
    old = [(chunk, chunk.sub_(1).clone()) for chunk in _some_chunks(live)]

    def revert() -> None:
        for chunk, values in old:
            chunk.copy_(values)

    with sender(context) as ask, ExitStack() as stack:
        entrants = [
            _entrant(COMMITTED, "committed", ask, state, receiving(stack, live, in_place=True), revert),
            _entrant(IN_PLACE, "chunks", ask, state, receiving(stack, live, in_place=True), revert),
            _entrant(OURS, "chunks", ask, state, receiving(stack, live), revert),
            _entrant(THEIRS, "stream", ask, state, their_receiving()),
        ]
        series = alternate("torchft-recovery", entrants, context.rounds)
    return Result("torchft-recovery", "A replica takes a state of which it lacks 5 % of the chunks from a peer", "s", state.nbytes, series)


Receive = Callable[[str, int], Any]
Ask = Callable[..., Any]


def receiving(stack: ExitStack, live: State | None = None, *, in_place: bool = False) -> Receive:
    from ckptstore.interop.torchft import StoreTransport

    state_dict = (lambda: live.app) if live else None
    transport: StoreTransport[Any] = StoreTransport(TIMEOUT, state_dict=state_dict, in_place=in_place)
    stack.callback(transport.shutdown)
    return lambda metadata, step: transport.recv_checkpoint(0, metadata, step, TIMEOUT)


def their_receiving() -> Receive:
    from torchft.checkpointing.http_transport import HTTPTransport

    transport: Any = HTTPTransport(TIMEOUT, num_chunks=0)
    return lambda metadata, step: transport.recv_checkpoint(0, metadata, step, TIMEOUT)


def _entrant(name: str, kind: str, ask: Ask, state: State, receive: Receive, before: Callable[[], object] = lambda: None) -> Entrant:
    got: list[Any] = []
    step = iter(range(1, 1 << 30))

    def act() -> None:
        number = next(step)
        got.append(receive(ask("send", kind, number), number))

    def after() -> None:
        ask("withdraw", kind)
        states.require_equal(state, states.State(got[0], dict(_by_path(got.pop()))), name)

    return Entrant(name, act, before, after)


def _by_path(app: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in app.items():
        yield from [(f"{path}{key}", value)] if isinstance(value, torch.Tensor) else _by_path(value, f"{path}{key}/")


def _some_chunks(state: State) -> list[torch.Tensor]:
    """One chunk of twenty, of all tensors."""
    return [chunk for tensor in state.tensors.values() for chunk in tensor.view(-1).split(CHUNK_ELEMENTS)][::EVERY]


@contextmanager
def sender(context: Context) -> Iterator[Ask]:
    """A process that has the state; `ask` has it send and withdraw."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, context.scale, context.folder()), daemon=True)
    process.start()

    def ask(*what: Any) -> Any:
        ours.send(what)
        return ours.recv()

    try:
        yield ask
    finally:
        ask("end")
        process.join()


def _serve(pipe: Connection, scale: float, folder: Path) -> None:
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
            transport = transports[what[1]]
            if what[0] == "send":
                transport.send_checkpoint([1], what[2], state.app, TIMEOUT)
                pipe.send(transport.metadata())
            else:
                transport.disallow_checkpoint()
                pipe.send(None)
        for transport in (transports["chunks"], transports["committed"]):
            transport.shutdown()
    pipe.send(None)
