"""The cases that save: into a fresh place, and again after nothing, little or one layer has
changed."""

from collections.abc import Callable
from itertools import count

import ckptstore
from benchmarks import limits, states
from benchmarks.context import Context, Slot
from benchmarks.disk import settle
from benchmarks.measure import Entrant, Result, alternate
from benchmarks.peers import Peer
from benchmarks.states import State

OURS = "ckptstore"
LIMIT_WRITE = "limit: write"
LIMIT_HASH = "limit: BLAKE3"
LIMIT_CHECKSUM = "limit: XXH3"
LIMIT_CHANGED = "limit: XXH3 of all, BLAKE3 and write of the change"


def peer_save(context: Context, peer: Peer, state: State) -> Entrant:
    slot = Slot(context)

    def act() -> None:
        peer.write(state, slot.path)
        settle(slot.path)

    return Entrant(peer.name, act, slot.fresh, slot.clear)


def limit_write(context: Context, state: State) -> Entrant:
    slot = Slot(context)
    return Entrant(LIMIT_WRITE, lambda: limits.write(state, slot.path), slot.fresh, slot.clear)


def limit_hashes(state: State) -> list[Entrant]:
    """Both hashes of every 1 MiB."""
    memories = limits.pieces(state, limits.CHUNK_BYTES)
    return [
        Entrant(LIMIT_HASH, lambda: limits.hash_chunks(memories, limits.blake3_of)),
        Entrant(LIMIT_CHECKSUM, lambda: limits.hash_chunks(memories, limits.xxh3)),
    ]


def limit_changed(context: Context, state: State, changed: Callable[[], State]) -> Entrant:
    slot = Slot(context)
    return Entrant(
        LIMIT_CHANGED,
        lambda: limits.save_changed(state, changed(), slot.path),
        slot.fresh,
        slot.clear,
    )


class FreshStore:
    """The first commit of a new store, for each act anew. Creating and opening the store is not
    timed."""

    def __init__(self, context: Context, state: State) -> None:
        self._slot = Slot(context)
        self._state = state

    def before(self) -> None:
        self._slot.fresh()
        self._store = ckptstore.open(self._slot.path)

    def act(self) -> None:
        self._store.commit(self._state.app, step=0)

    def after(self) -> None:
        self._store.close()
        self._slot.clear()

    def entrant(self) -> Entrant:
        return Entrant(OURS, self.act, self.before, self.after)


def first_save(context: Context, case: str, title: str, state: State) -> Result:
    peers = [peer_save(context, peer, state) for peer in context.peers]
    entrants = [FreshStore(context, state).entrant(), *peers, limit_write(context, state)]
    return Result(case, title, "s", state.nbytes, alternate(case, entrants, context.rounds))


def later_save(
    context: Context,
    case: str,
    title: str,
    state: State,
    change: Callable[[State, int], object],
    limit: Entrant | None = None,
) -> Result:
    """Every round changes the state once; ckptstore commits to one store, the peers write all of it
    to a fresh folder."""
    with ckptstore.open(context.folder()) as store:
        steps = count()
        store.commit(state.app, step=next(steps))
        ours = Entrant(OURS, lambda: store.commit(state.app, step=next(steps)))
        entrants = [
            ours,
            *(peer_save(context, peer, state) for peer in context.peers),
            *limit_hashes(state),
            *([limit] if limit else []),
        ]
        series = alternate(
            case, entrants, context.rounds, each_round=lambda number: change(state, number)
        )
    return Result(case, title, "s", state.nbytes, series)


def first(context: Context) -> Result:
    return first_save(context, "first", "first commit, durable", states.gpt(context.scale))


def tiny(context: Context) -> Result:
    return first_save(context, "tiny", "20,000 tensors of 256 bytes", states.tiny(context.scale))


def big(context: Context) -> Result:
    return first_save(context, "big", "one tensor of 1 GB", states.big(context.scale))


def unchanged(context: Context) -> Result:
    return later_save(
        context,
        "unchanged",
        "commit of an unchanged state",
        states.gpt(context.scale),
        lambda _state, _round: None,
    )


def one_percent(context: Context) -> Result:
    title = "commit after 1 % of the bytes changed, in 14 stretches"
    return later_save(
        context, "one-percent", title, states.gpt(context.scale), states.change_one_percent
    )


def one_layer(context: Context) -> Result:
    title = "commit after one layer of seven changed"
    state, last = states.gpt(context.scale), [0]

    def change(state: State, step: int) -> None:
        states.change_one_layer(state, step)
        last[0] = step

    limit = limit_changed(context, state, lambda: states.layer_of(state, last[0]))
    return later_save(context, "one-layer", title, state, change, limit)
