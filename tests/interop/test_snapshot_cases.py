"""TorchSnapshot 0.1.0's bugs, case by case, and the behavior of its interface here. Cases with
several ranks are in tests/distributed.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.interop.torchsnapshot import Snapshot, StateDict
from ckptstore.interop.torchsnapshot.manifest import ObjectEntry


def packs(store: Path) -> list[Path]:
    """The packs with tensors: those without a twin."""
    found = sorted(store.glob("packs/*/*"))
    return [
        path
        for path in found
        if not path.name.endswith(".2") and not path.with_name(f"{path.name}.2").exists()
    ]


@pytest.fixture
def taken(tmp_path: Path) -> tuple[Snapshot, StateDict]:
    state = StateDict(w=torch.arange(300_000.0), v=torch.ones(100_000))
    return Snapshot.take(str(tmp_path / "runs" / "a"), {"s": state}), state


def test_async_take_does_not_tear_cpu_tensors_of_128_mib_and_more(tmp_path: Path) -> None:
    large = torch.zeros((130 << 20) // 4)
    pending = Snapshot.async_take(str(tmp_path / "a"), {"s": StateDict(large=large)})
    large.fill_(1)
    assert not pending.wait().read_object("0/s/large").any()


def test_a_truncated_file_is_noticed(taken: tuple[Snapshot, StateDict], tmp_path: Path) -> None:
    snapshot, state = taken
    (pack,) = packs(tmp_path / "runs")
    with open(pack, "r+b") as file:
        file.truncate(1 << 20)
    with pytest.raises(ckptstore.CkptStoreError, match="s/"):
        snapshot.restore({"s": StateDict(w=torch.zeros(300_000), v=torch.zeros(100_000))})
    assert state["w"][-1] == 299_999


def test_a_flipped_bit_is_noticed(taken: tuple[Snapshot, StateDict], tmp_path: Path) -> None:
    snapshot, _ = taken
    (pack,) = packs(tmp_path / "runs")
    data = bytearray(pack.read_bytes())
    data[5000] ^= 1
    pack.write_bytes(data)
    with pytest.raises(ckptstore.Corrupt, match="s/"):
        snapshot.restore({"s": StateDict(w=torch.zeros(300_000), v=torch.zeros(100_000))})


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    weight = torch.randn(400_000)
    snapshot = Snapshot.take(str(tmp_path / "a"), {"s": StateDict(a=weight, b=weight)})
    assert snapshot.commit.new_bytes < 1.2 * weight.nbytes
    state = snapshot.get_state_dict_for_key("s")
    assert state["a"] is state["b"] and torch.equal(state["a"], weight)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "bfloat16", "complex64"]
)
def test_every_dtype_goes_in_and_comes_out(tmp_path: Path, dtype: str) -> None:
    made = torch.arange(16).to(getattr(torch, dtype))
    snapshot = Snapshot.take(str(tmp_path / "a"), {"s": StateDict(x=made)})
    into = torch.zeros_like(made)
    snapshot.restore({"s": StateDict(x=into)})
    assert torch.equal(into.view(torch.uint8), made.view(torch.uint8)) and into.dtype == made.dtype


def test_empty_tensors_among_others_are_no_trouble(tmp_path: Path) -> None:
    state = StateDict(
        empty=torch.zeros(0), also=torch.zeros(3, 0), full=torch.ones(5), none=torch.tensor(2.0)
    )
    snapshot = Snapshot.take(str(tmp_path / "a"), {"s": state})
    got = snapshot.get_state_dict_for_key("s")
    assert [tuple(got[key].shape) for key in state] == [(0,), (3, 0), (5,), ()]


def test_tuples_are_no_pickles(tmp_path: Path) -> None:
    snapshot = Snapshot.take(
        str(tmp_path / "a"), {"s": StateDict(betas=(0.9, 0.999), deep=((torch.ones(2), {"x": 1}),))}
    )
    entry = snapshot.get_manifest()["0/s/deep"]
    assert isinstance(entry, ObjectEntry) and (entry.obj_type, entry.serializer) == (
        "builtins.tuple",
        "ckptstore",
    )
    assert snapshot.read_object("0/s/betas") == (0.9, 0.999)
    assert torch.equal(snapshot.read_object("0/s/deep")[0][0], torch.ones(2))


class Code:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('ran')",)


def test_nothing_is_pickled_unless_it_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ckptstore.InvalidInput, match="allow_pickle"):
        Snapshot.take(str(tmp_path / "a"), {"s": StateDict(x=Code())})
    assert not (tmp_path / "a").exists()


@pytest.mark.pickles
def test_what_was_pickled_is_read_with_leave_only(tmp_path: Path) -> None:
    snapshot = Snapshot.take(
        str(tmp_path / "a"), {"s": StateDict(x=Code(), y=1)}, allow_pickle=True
    )
    assert isinstance(snapshot.get_manifest()["0/s/x"], ObjectEntry)
    assert snapshot.read_object("0/s/y") == 1
    for read in (
        lambda: snapshot.read_object("0/s/x"),
        lambda: snapshot.restore({"s": StateDict()}),
    ):
        with pytest.raises(ckptstore.InvalidInput, match="allow_pickle"):
            read()


def test_a_failed_overwrite_leaves_the_snapshot_before(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    Snapshot.take(path, {"s": StateDict(x=torch.ones(700))})

    class Failing(StateDict):
        def state_dict(self) -> dict[str, Any]:
            raise OSError("no such sensor")

    with pytest.raises(OSError, match="no such sensor"):
        Snapshot.take(path, {"s": StateDict(x=torch.zeros(700)), "t": Failing()})
    assert Snapshot(path).read_object("0/s/x").all()


def test_a_failure_in_the_background_is_raised_by_wait(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "b"

    class Taking(StateDict):
        def state_dict(self) -> dict[str, Any]:
            path.mkdir(parents=True)  # the pointer's path
            return super().state_dict()

    pending = Snapshot.async_take(str(path), {"s": Taking(x=1)})
    with pytest.raises(RuntimeError, match=r"was not taken.*no pointer file"):
        pending.wait()
    assert pending.done() and path.is_dir()
