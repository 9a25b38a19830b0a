"""TorchSnapshot's interface on a store against TorchSnapshot itself: the same calls with another
import, opening the store included."""

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import states
from benchmarks.context import Context, Slot
from benchmarks.disk import settle
from benchmarks.measure import Entrant, Result, alternate
from benchmarks.peers import PEERS, Peer
from benchmarks.saves import OURS, peer_save
from benchmarks.states import State
from ckptstore.interop.torchsnapshot import Snapshot, StateDict

_PEER = next(peer for peer in PEERS if peer.name == "TorchSnapshot")


def _app_state(state: State) -> dict[str, Any]:
    return {key: StateDict(**tree) for key, tree in state.app.items()}


def _take(state: State, folder: Path) -> None:
    Snapshot.take(str(folder / "snapshot"), _app_state(state))


def _restore(folder: Path, into: State) -> None:
    Snapshot(str(folder / "snapshot")).restore(_app_state(into))


_FACE = Peer(OURS, _take, _restore, None)


def snapshot_take(context: Context) -> Result:
    """Ours is durable by itself; what TorchSnapshot wrote is synced within the timed part."""
    state, slot = states.gpt(context.scale), Slot(context)
    ours = Entrant(OURS, lambda: _FACE.write(state, slot.path), slot.fresh, slot.clear)
    series = alternate("snapshot-take", [ours, peer_save(context, _PEER, state)], context.rounds)
    return Result(
        "snapshot-take", "Snapshot.take into an empty folder, durable", "s", state.nbytes, series
    )


def snapshot_restore(context: Context) -> Result:
    state = states.gpt(context.scale)
    into = states.blank(state)
    entrants = []
    for peer in (_FACE, _PEER):
        folder = context.folder()
        peer.write(state, folder)
        settle(folder)
        check = partial(states.require_equal, state, into, peer.name)
        entrants.append(
            Entrant(peer.name, partial(peer.load, folder, into), partial(states.wipe, into), check)
        )
    series = alternate("snapshot-restore", entrants, context.rounds)
    return Result(
        "snapshot-restore",
        "Snapshot.restore in place, files in the page cache",
        "s",
        state.nbytes,
        series,
    )
