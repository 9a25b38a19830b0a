"""A state dict committed as it is, `store.commit(model.state_dict())`: each tensor is a key."""

import copy
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.errors import InvalidInput
from ckptstore.repository.chunk_store import ObjectStore

KEYS = 1500
FEW = 60
"""Statements, or reads, that a commit of one key takes as well."""


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """Tensors of shapes of their own, so that no two schemas are the same, some in chunks."""
    return {f"{i}.weight": torch.full((i + 1, 3), float(i)) for i in range(KEYS)}


@contextmanager
def statements() -> Iterator[list[str]]:
    """What is sent to SQLite during a block; one statement for many rows counts once."""
    seen: list[str] = []

    class Connection(sqlite3.Connection):
        def execute(self, *args: Any) -> sqlite3.Cursor:
            seen.append(args[0])
            return super().execute(*args)

        def executemany(self, *args: Any) -> sqlite3.Cursor:
            seen.append(args[0])
            return super().executemany(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Connection))
        yield seen


def test_many_keys_take_no_more_statements_than_one(
    tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    with statements() as seen, ckptstore.open(tmp_path / "store") as store:
        for step in range(2):
            seen.clear()
            store.commit(state, step=step)
            assert 0 < len(seen) < FEW
        assert len(store.checkout(1).keys()) == KEYS


@contextmanager
def calls_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls of a method of `ObjectStore` during a block."""
    method, seen = getattr(ObjectStore, name), []

    def counted(self: ObjectStore, *args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return method(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, name, counted)
        yield seen


def test_many_keys_are_read_at_once(
    tmp_path: Path, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit(state, step=0)
        for use in (lambda: snapshot.state_dict(), snapshot.verify, store.usage):
            with calls_of("read_into", monkeypatch) as reads:
                use()
            assert 0 < len(reads) < FEW
        found = snapshot.state_dict()
    assert list(found) == list(state)
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize("flat", [True, False])
def test_a_push_looks_chunks_up_at_once(
    tmp_path: Path, state: dict[str, torch.Tensor], flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        store.commit(state if flat else {"model": state}, step=0)
        with calls_of("locate", monkeypatch) as looks:
            store.push(tmp_path / "mirror", create=True)
        assert 0 < len(looks) < FEW


PLAIN = st.one_of(
    st.sampled_from([(2,), (3,), (1, 2)]).map(lambda shape: torch.full(shape, 7.0)),
    st.sampled_from([1, "one", None, b"1"]),
    st.just({"w": torch.zeros(2)}),
)
STATES = st.dictionaries(st.sampled_from(["", "a", "b/c", "d", "e"]), PLAIN, min_size=1)


@settings(max_examples=30)
@given(STATES, STATES, st.booleans(), st.sampled_from(["refuse", "skip"]), st.booleans())
def test_a_shared_tree_is_restored_as_it_is_and_key_by_key_alike(
    state: dict[str, Any], target: dict[str, Any], strict: bool, mismatched: Any, like: bool
) -> None:
    """What fits, what does not and how that is said."""
    if like:  # else hardly any target has all keys
        target = {**state, **target}

    def restored() -> object:
        into = copy.deepcopy(target)
        try:
            report = snap.restore(into, strict=strict, mismatched=mismatched)
        except InvalidInput as error:
            return sorted(str(error).splitlines()), repr(into)
        lists = report.missing, report.unexpected, report.mismatched, report.replaced
        return [sorted(each) for each in lists], report.needed_bytes, repr(into)

    with tempfile.TemporaryDirectory() as name, ckptstore.open(Path(name, "store")) as store:
        snap = store.commit(state)
        as_it_is = restored()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ckptstore.snapshot.is_taken", lambda *given: False)
            assert restored() == as_it_is
