"""The case of DCP on a store: the same `dcp.save` and `dcp.load`, with a store's writer and reader
and with DCP's own files.

Saves go to a fresh place and are durable; loads are in place, the files in the page cache, into
wiped memory that is compared with what was saved, outside the timed part. Creating and opening the
store is not timed, nor is creating DCP's folder.
"""

from contextlib import closing

import ckptstore
from benchmarks import states
from benchmarks.context import Context, Slot
from benchmarks.disk import settle
from benchmarks.measure import Entrant, Result, alternate
from benchmarks.peers import PEERS
from benchmarks.saves import peer_save
from benchmarks.states import State

SAVE, LOAD = "StoreWriter", "StoreReader"
DCP_SAVE, DCP_LOAD = "FileSystemWriter", "FileSystemReader"


def save(state: State, store: ckptstore.Store) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    from ckptstore.interop.dcp import StoreWriter

    dcp_save(state.app, storage_writer=StoreWriter(store, step=0), no_dist=True)


def load(into: State, store: ckptstore.Store) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    from ckptstore.interop.dcp import StoreReader

    dcp_load(into.app, storage_reader=StoreReader(store, 0), no_dist=True)


class FreshSave:
    """`dcp.save` to a new store, for each act anew."""

    def __init__(self, context: Context, state: State) -> None:
        self._slot, self._state = Slot(context), state

    def before(self) -> None:
        self._slot.fresh()
        self._store = ckptstore.open(self._slot.path)

    def act(self) -> None:
        save(self._state, self._store)

    def after(self) -> None:
        self._store.close()
        self._slot.clear()


def dcp_face(context: Context) -> Result:
    state = states.gpt(context.scale)
    into = states.blank(state)
    dcp = next(peer for peer in PEERS if peer.name == "DCP")
    files = context.folder()
    dcp.write(state, files)
    settle(files)
    fresh, theirs = FreshSave(context, state), peer_save(context, dcp, state)
    with closing(ckptstore.open(context.folder())) as store:
        save(state, store)

        def check(who: str) -> None:
            states.require_equal(state, into, who)

        entrants = [
            Entrant(SAVE, fresh.act, fresh.before, fresh.after),
            Entrant(DCP_SAVE, theirs.act, theirs.before, theirs.after),
            Entrant(
                LOAD, lambda: load(into, store), lambda: states.wipe(into), lambda: check(LOAD)
            ),
            Entrant(
                DCP_LOAD,
                lambda: dcp.load(files, into),
                lambda: states.wipe(into),
                lambda: check(DCP_LOAD),
            ),
        ]
        series = alternate("dcp-face", entrants, context.rounds)
    return Result(
        "dcp-face",
        "dcp.save, durable, and dcp.load, warm: on a store and on DCP's files",
        "s",
        state.nbytes,
        series,
    )
