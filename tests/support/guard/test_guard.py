"""The guard is in place, in every process of the suite, and ckptstore has one door to pickle."""

import _pickle
import io
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.errors import InvalidInput
from ckptstore.state import inflate
from tests.support.guard import sitecustomize as guard

NUMBER = b"\x80\x04K\x05."
"""5, pickled."""

ENTRANCES: dict[str, Callable[[], Any]] = {
    "pickle.loads": lambda: pickle.loads(NUMBER),
    "pickle.load": lambda: pickle.load(io.BytesIO(NUMBER)),
    "pickle.Unpickler": lambda: pickle.Unpickler(io.BytesIO(NUMBER)),
    "pickle._Unpickler": lambda: pickle._Unpickler(io.BytesIO(NUMBER)),  # type: ignore[attr-defined]
    "pickle._loads": lambda: pickle._loads(NUMBER),  # type: ignore[attr-defined]
    "pickle.dumps": lambda: pickle.dumps(5),
    "pickle.Pickler": lambda: pickle.Pickler(io.BytesIO()),
    "_pickle.loads": lambda: _pickle.loads(NUMBER),
    "_pickle.load": lambda: _pickle.load(io.BytesIO(NUMBER)),
    "_pickle.Unpickler": lambda: _pickle.Unpickler(io.BytesIO(NUMBER)),
    "torch.load": lambda: torch.load(io.BytesIO()),
    "torch.save": lambda: torch.save(5, io.BytesIO()),
    "a subclass": lambda: type("Mine", (pickle.Unpickler,), {})(io.BytesIO(NUMBER)),
    "ckptstore's own door": lambda: inflate.unpickled(NUMBER),
}


@pytest.fixture
def _unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusals of these tests are wanted."""
    monkeypatch.delenv(guard.REPORT)


@pytest.mark.usefixtures("_unwatched")
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_every_entrance_to_pickle_is_closed(entrance: str) -> None:
    with pytest.raises(guard.PickleReached):
        ENTRANCES[entrance]()


@pytest.mark.pickles
@pytest.mark.parametrize("entrance", ["pickle.loads", "_pickle.loads", "ckptstore's own door"])
def test_a_test_that_is_marked_may_pass(entrance: str) -> None:
    assert ENTRANCES[entrance]() == 5


def test_whoever_came_near_is_reported_even_if_somebody_swallows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(guard.REPORT, str(tmp_path / "report"))
    code = f"import pickle\ntry: pickle.loads({NUMBER!r})\nexcept BaseException: pass"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert (tmp_path / "report").read_text(encoding="utf-8") == "__main__ reached pickle.loads\n"


def _reach(answers: Any) -> None:
    try:
        pickle.loads(NUMBER)
    except guard.PickleReached:
        answers.send_bytes(b"refused")
    except BaseException as error:
        answers.send_bytes(
            type(error).__name__.encode()
        )  # another copy of the guard: `sitecustomize`
    else:
        answers.send_bytes(b"read")


@pytest.mark.usefixtures("_unwatched")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_process_is_guarded_as_well(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    answers, theirs = context.Pipe()
    process = context.Process(target=_reach, args=(theirs,))
    process.start()
    assert answers.recv_bytes() in (b"refused", b"PickleReached")
    process.join()


@pytest.mark.usefixtures("_unwatched")
def test_a_child_that_imports_torch_is_guarded_as_well() -> None:
    code = (
        f"import io, torch\ntry: torch.load(io.BytesIO({NUMBER!r}))\nexcept BaseException as "
        "error: print(type(error).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "PickleReached\n"


class Odd:
    """Nothing that the registry knows."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    def __hash__(self) -> int:
        return 0


@pytest.mark.pickles
def test_a_pickled_leaf_is_read_only_with_leave_on_every_road(tmp_path: Path) -> None:
    app_state = {"m": {"odd": Odd(), "w": torch.ones(3)}}
    with ckptstore.open(tmp_path / "store") as store:
        with pytest.raises(InvalidInput, match=r"m/odd: .*Odd.*register_value.*allow_pickle=True"):
            store.commit(app_state)
        assert store.log() == []
        snap = store.commit(app_state, allow_pickle=True)
        target: dict[str, Any] = {"m": {"odd": None, "w": torch.zeros(3)}}
        roads: list[Callable[..., Any]] = [
            lambda **leave: snap.read("m/odd", **leave),
            lambda **leave: snap.state_dict("m", **leave)["odd"],
            lambda **leave: snap.state_dict(**leave)["m"]["odd"],
            lambda **leave: (snap.restore(target, **leave), target["m"]["odd"])[1],
            lambda **leave: (store.resume(target, **leave), target["m"]["odd"])[1],
        ]
        for road in roads:
            with pytest.raises(InvalidInput, match=r"m/odd is a pickle.*allow_pickle=True"):
                road()
            assert target["m"]["w"].sum() == 0
        for road in roads:
            assert road(allow_pickle=True) == Odd()
        assert snap.read("m/w").sum() == 3
