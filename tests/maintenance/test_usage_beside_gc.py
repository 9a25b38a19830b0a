"""Sizes are told while a gc takes commits and packs away."""

from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import NotFound
from ckptstore.maintenance.retention import KeepLast
from ckptstore.plugins.reports import forecast, usage
from ckptstore.store import Store
from tests.maintenance.collecting import state_of

ASKS: dict[str, Callable[[Store], object]] = {
    "usage": lambda store: len(store.usage().commits),
    "forecast": lambda store: store.forecast(KeepLast(1)).runs[0].kept,
}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("when", ["a document", "a footer"])
def test_sizes_are_told_beside_a_gc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: str, when: str
) -> None:
    with ckptstore.open(tmp_path) as store, ckptstore.open(tmp_path) as other:
        for step in range(5):
            store.commit(state_of(step), step=step)

        def collect() -> None:
            monkeypatch.undo()
            other.forget(KeepLast(2))
            other.gc(grace_s=0, max_unused=0.0)

        def beside(function: Callable[..., object]) -> Callable[..., object]:
            def wrapped(*args: object, **more: object) -> object:
                collect()
                return function(*args, **more)

            return wrapped

        if when == "a document":
            for module in (usage, forecast):
                monkeypatch.setattr(module, "read_document", beside(module.read_document))
        else:
            monkeypatch.setattr(usage, "read_table", beside(usage.read_table))
        assert ASKS[ask](store) == 2


def test_an_object_that_is_missing_for_another_reason_is_an_error(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path) as store:
        for step in range(3):
            store.commit(state_of(step), step=step)
        next((tmp_path / "commits").iterdir()).unlink()
        with pytest.raises(NotFound):
            store.usage()
