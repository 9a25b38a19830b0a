"""Commits of parts: receipts must fit together before the log is asked."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.parts import GivenPart, PartsWritten
from ckptstore.commit.plan import extent_of
from ckptstore.commit.transaction import TreeContent
from ckptstore.core.ids import CommitId, SessionId
from ckptstore.errors import Conflict, InvalidInput
from ckptstore.log.sessions import Session
from ckptstore.state.flatten import flatten
from ckptstore.state.leaf_sources import FlatState
from ckptstore.store import internals_of


def test_a_writer_that_takes_another_s_number_is_refused_and_the_first_one_s_packs_stay(
    tmp_path: Path,
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        session = internals_of(store).parts_committer.open()
        first = _write(store, session.id, 0, 1.0)
        with pytest.raises(Conflict, match="is never replaced"):
            _write(store, session.id, 0, 2.0, elements=400_000)
        commit = _publish(store, session, *first)
        assert torch.equal(
            store.checkout(commit).state_dict()["model"]["weight"], torch.ones(300_000)
        )
        assert not store.fsck("data").findings


def test_a_receipt_that_comes_twice_is_found_before_the_log_names_its_packs(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        session = internals_of(store).parts_committer.open()
        flat, written = _write(store, session.id, 0, 1.0)
        trees = [TreeContent("0", flat.schema, written.contents)]
        with pytest.raises(InvalidInput, match="each needs a rank of its own"):
            internals_of(store).parts_committer.publish(
                session,
                CommitMetadata("main"),
                trees,
                None,
                [written.receipt] * 2,
                time.perf_counter(),
                [],
            )
        assert store.log() == []


def test_commits_whose_parts_are_written_before_either_is_published_are_both_whole(
    tmp_path: Path,
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        sessions, written = (
            [internals_of(store).parts_committer.open() for _ in range(2)],
            [],
        )
        for value, session in enumerate(sessions):
            written.append(_write(store, session.id, 0, float(value)))
        commits = [
            _publish(store, session, *each) for session, each in zip(sessions, written, strict=True)
        ]
    with ckptstore.open(tmp_path / "store") as store:
        for value, commit in enumerate(commits):
            assert torch.equal(
                store.checkout(commit).state_dict()["model"]["weight"],
                torch.full((300_000,), float(value)),
            )
        assert not store.fsck("data").findings


class Interrupting(GivenPart):
    """A part while whose write is prepared another is written."""

    interrupt: Callable[[], object]

    @property
    def leaf_bytes(self) -> int:  # type: ignore[override]
        self.interrupt()
        return self[2]


def test_what_one_write_leaves_for_the_next_is_not_used_by_one_of_other_parts(
    tmp_path: Path,
) -> None:
    elements, small = 600_000, ckptstore.Storage(chunk_bytes=1 << 16)
    with ckptstore.open(tmp_path / "store", storage=small) as store:
        committer = internals_of(store).parts_committer
        sessions = [committer.open() for _ in range(2)]
        flat = flatten({"model": {"weight": torch.full((elements,), 1.0)}})["model"]
        part = Interrupting(extent_of(flat, 0), flat.leaves[0], flat.leaves[0].nbytes)
        part.interrupt = lambda: _write(store, sessions[1].id, 1, 2.0)
        written = committer.write(sessions[0].id, 0, [part])
        commit = _publish(store, sessions[0], flat, written)
        stored = store.checkout(commit).state_dict()["model"]["weight"]
        assert torch.equal(stored, torch.ones(elements))


def test_who_publishes_without_having_written_takes_no_writer_s_name(tmp_path: Path) -> None:
    with (
        ckptstore.open(tmp_path / "store") as writer,
        ckptstore.open(tmp_path / "store") as publisher,
    ):
        session = internals_of(publisher).parts_committer.open()
        commit = _publish(publisher, session, *_write(writer, session.id, 0, 1.0))
        assert torch.equal(
            publisher.checkout(commit).state_dict()["model"]["weight"], torch.ones(300_000)
        )
        assert not publisher.fsck("data").findings


def _write(
    store: ckptstore.Store, session: SessionId, rank: int, value: float, elements: int = 300_000
) -> tuple[FlatState, PartsWritten]:
    flat = flatten({"model": {"weight": torch.full((elements,), value)}})["model"]
    part = GivenPart(extent_of(flat, 0), flat.leaves[0], flat.leaves[0].nbytes)
    return flat, internals_of(store).parts_committer.write(session, rank, [part])


def _publish(
    store: ckptstore.Store, session: Session, flat: FlatState, written: PartsWritten
) -> CommitId:
    trees = [TreeContent("model", flat.schema, written.contents)]
    return (
        internals_of(store)
        .parts_committer.publish(
            session,
            CommitMetadata("main"),
            trees,
            None,
            [written.receipt],
            time.perf_counter(),
            [],
        )
        .id
    )
