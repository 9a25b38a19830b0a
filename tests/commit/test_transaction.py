"""A transaction owns session, packs and undo: whatever interrupts it, its session ends."""

from pathlib import Path

import pytest

import ckptstore
from ckptstore.commit.transaction import Destination, Transaction
from ckptstore.log import sessions
from ckptstore.repository.pack_writer import PackSet
from ckptstore.store import internals_of


def test_an_undo_that_is_interrupted_leaves_no_session_that_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: PackSet) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PackSet, "drop", interrupted)
    with ckptstore.open(tmp_path / "store") as store:
        internals = internals_of(store)
        before = set(sessions._heart._sessions)
        to = Destination(internals.handle, internals.threads)
        with pytest.raises(KeyboardInterrupt), Transaction.begin(to):
            raise OSError("the block failed")
        assert sessions._heart._sessions == before
