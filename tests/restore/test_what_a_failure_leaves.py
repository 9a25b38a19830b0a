"""What a target holds after a restore that failed: all objects are asked before a byte is replaced,
`atomic` verifies before it, and `resume` ends in one commit."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.state import stateful


def described(value: Any) -> str:
    """Equal for equal states."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, dict):
        return str([(key, described(each)) for key, each in value.items()])
    if isinstance(value, list | tuple):
        return str(list(map(described, value)))
    return described(value.state_dict()) if hasattr(value, "state_dict") else repr(value)


def damage(store: ckptstore.Store, tensor: torch.Tensor) -> None:
    """Change a byte of `tensor` wherever it lies in a pack."""
    (wanted,) = (tensor.contiguous().view(torch.uint8).numpy().tobytes(),)
    place = Path(store.url.removeprefix("file://"))
    found = 0
    for path in place.rglob("packs/**/*"):
        if path.is_file() and (at := path.read_bytes().find(wanted)) >= 0:
            path.chmod(0o644)
            data = bytearray(path.read_bytes())
            data[at + 5] ^= 1
            path.write_bytes(data)
            found += 1
    assert found


class Stubborn:
    """Refuses every state, as an object of another configuration does."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise self.error


def scaler(*, enabled: bool) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", enabled=enabled)


def test_a_scaler_that_would_refuse_its_state_is_asked_first(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        for wrap in (lambda made: made, lambda made: {"inner": [made]}):
            source = {"m": nn.Linear(90, 90), "scaler": wrap(scaler(enabled=False))}
            snapshot = store.commit(source)
            target = {"m": nn.Linear(90, 90), "scaler": wrap(scaler(enabled=True))}
            before = described(target["m"])
            with pytest.raises(InvalidInput, match=r"(?s)nothing was changed.*scaler.*GradScaler"):
                snapshot.restore(target, strict=False)
            assert described(target["m"]) == before


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyError("no"), TypeError("no")])
@pytest.mark.parametrize("place", ["o", "o/inner/0"])
def test_what_an_object_raises_has_its_path_and_says_what_the_target_holds(
    place: str, error: Exception, tmp_path: Path
) -> None:
    def state(made: Any) -> dict[str, Any]:
        inner = made if place == "o" else {"inner": [made]}
        return {"a": {"n": 1}, "m": nn.Linear(3, 3), "o": inner, "z": {"n": 1}}

    with ckptstore.open(tmp_path / "store") as store:
        source = state(Stubborn(error))
        snapshot = store.commit(source)
        target = state(Stubborn(error))
        with pytest.raises(InvalidInput) as raised:
            snapshot.restore(target)
    said = str(raised.value)
    assert said.startswith(f"{place}: Stubborn refuses the committed state: {type(error).__name__}")
    assert "a, m and all tensors are as committed, what else o, z hold is as it was" in said
    assert raised.value.__cause__ is not None
    assert torch.equal(source["m"].weight, target["m"].weight)


def test_a_class_that_is_not_known_is_found_before_anything_changes(tmp_path: Path) -> None:
    import enum

    color = enum.Enum("color", {"red": 1})
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit({"a": {"w": torch.ones(300)}, "b": {"c": color.red}})
        target = {"a": {"w": torch.zeros(300)}, "b": {"c": None}}
        with pytest.raises(InvalidInput, match=r"^b/c: the class .*color is neither registered"):
            snapshot.restore(target)
    assert not target["a"]["w"].any()


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    value: Any


class Hidden(Exception):
    """Registered with a codec, then not."""


def test_a_class_of_a_container_is_found_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[Any, Any] = {}
    monkeypatch.setattr(stateful, "_REGISTERED", known)
    monkeypatch.setattr(stateful, "_REGISTERED_NAMES", names := {})
    ckptstore.register_value("hidden", Hidden, lambda each: {"x": torch.ones(3)}, Hidden)
    for made in (Pair(torch.ones(3), 1), Record(torch.ones(3)), Hidden()):
        with ckptstore.open(tmp_path / "store") as store:
            snapshot = store.commit({"a": {"w": torch.ones(300)}, "b": {"c": [made]}})
            names.clear()
            target = {"a": {"w": torch.zeros(300)}, "b": {"c": None}}
            with pytest.raises(InvalidInput, match=r"^b/c/0.*register"):
                snapshot.restore(target)
            assert not target["a"]["w"].any()
            names["hidden"] = known[Hidden]


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(90, 90), nn.Linear(90, 90))
    return {"model": module, "more": {"w": torch.randn(300), "text": "x" * 900}}


def test_an_atomic_restore_of_a_damaged_commit_changes_nothing(tmp_path: Path) -> None:
    source, target = state(1), state(2)
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit(source, step=1)
        snapshot.restore(target, atomic=True)
        assert described(target) == described(source)
        damage(store, source["more"]["w"])
        target = state(2)
        with pytest.raises(Corrupt, match="more/w"):
            snapshot.restore(target, atomic=True)
        assert described(target) == described(state(2))


def test_without_atomic_the_rest_may_be_replaced_as_documented(tmp_path: Path) -> None:
    source, target = state(1), state(2)
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit(source, step=1)
        damage(store, source["more"]["w"])
        with pytest.raises(Corrupt, match="more/w"):
            snapshot.restore(target)
        assert target["more"]["text"] == "x" * 900


class Average:
    """Its `load_state_dict` takes what is there, and keeps the rest."""

    def __init__(self, **shadow: torch.Tensor) -> None:
        self.shadow = shadow

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.shadow)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.shadow.update(state)


@pytest.mark.parametrize("kind", ["dict", "module", "average"])
def test_a_resume_that_falls_back_keeps_what_only_the_damaged_commit_had(
    kind: str, tmp_path: Path
) -> None:
    def make(seed: float, *names: str) -> dict[str, Any]:
        values = {name: torch.full((4000,), seed) for name in names}
        if kind == "average":
            return {"k": Average(**values)}
        if kind == "dict":
            return {"k": dict(values)}
        module = nn.Module()
        for name, value in values.items():
            module.register_buffer(name, value)
        return {"k": module}

    with ckptstore.open(tmp_path / "store") as store:
        old, new = make(1.0, "a", "b"), make(2.0, "a", "added", "b", "last")
        store.commit(old, step=1)
        store.commit(new, step=2)
        damage(store, torch.full((4000,), 2.0))
        target = make(9.0, "a", "added", "b", "last")
        resumed = store.resume(target, strict=kind == "average")
        assert resumed is not None
        assert resumed.step == 1
        (held,) = target.values()
        found = held if isinstance(held, dict) else held.state_dict()
        assert {name: set(value.tolist()) for name, value in found.items()} == {
            "a": {1.0},
            "b": {1.0},
            "added": {9.0},
            "last": {9.0},
        }


def test_a_second_damaged_commit_ends_in_no_mixture(tmp_path: Path) -> None:
    def make(seed: float, *names: str) -> dict[str, Any]:
        return {"k": {name: torch.full((4000,), seed) for name in names}}

    with ckptstore.open(tmp_path / "store") as store:
        store.commit(make(1.0, "a"), step=1)
        for step in (2, 3):
            store.commit(make(float(step), "a", "b"), step=step)
            damage(store, torch.full((4000,), float(step)))
        target = make(9.0, "a", "b")
        with pytest.raises(Corrupt, match="may hold bytes of commit"):
            store.resume(target, strict=False)
        assert [each.step for each in store.skipped] == [3, 2]


def test_a_resume_with_every_commit_damaged_says_what_the_target_holds(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        source = state(1)
        store.commit(source, step=1)
        damage(store, source["more"]["w"])
        with pytest.raises(Corrupt, match="may hold bytes of"):
            store.resume(state(2))


NARROWED: list[tuple[list[float], torch.dtype, str]] = [
    ([1.0, 1e6, -1e6], torch.float16, "2 values lie beyond the range of float16"),
    ([3.4e38], torch.bfloat16, "1 value lies beyond the range of bfloat16"),
    ([1e-12, 0.0], torch.float16, "all values, of which 1 are not zero, would become zero"),
    ([1.0, 1e4], torch.float8_e4m3fn, "1 value lies beyond the range of float8_e4m3fn"),
]


@pytest.mark.parametrize(("values", "dtype", "why"), NARROWED)
def test_a_conversion_that_loses_values_is_refused_unless_asked_for(
    values: list[float], dtype: torch.dtype, why: str, tmp_path: Path
) -> None:
    source = {"first": {"w": torch.ones(300)}, "m": {"w": torch.tensor(values * 100)}}
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit(source)
        target = {"first": {"w": torch.zeros(300)}, "m": {"w": torch.zeros(len(values) * 100)}}
        target["m"]["w"] = target["m"]["w"].to(dtype)
        why = why.replace("2 values", "200 values").replace("which 1", "which 100")
        why = why.replace("1 value lies", "100 values lie")
        ways: list[Callable[[Any], object]] = [
            lambda asked: snapshot.restore(target, dtype=asked),
            lambda asked: snapshot.read("m/w", dtype=asked),
            lambda asked: snapshot.read_into(target["m"]["w"], "m/w", dtype=asked),
            lambda asked: snapshot.state_dict(dtype=asked),
        ]
        for way in ways:
            with pytest.raises(InvalidInput, match=f"m/w: {why}"):
                way(dtype)
        if dtype != torch.bfloat16:  # whose range is nearly that of float32, so it is read once
            assert not target["first"]["w"].any()
        for way in ways:
            way((dtype, "unchecked"))
        wanted = source["m"]["w"].to(dtype)
        assert torch.equal(target["m"]["w"].view(torch.uint8), wanted.view(torch.uint8))


def head(n: int) -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, n)})


def test_mismatched_tensors_can_be_left_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = head(8), head(10)
    fresh = {name: value.clone() for name, value in target.state_dict().items()}
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit({"m": source})
        with pytest.raises(InvalidInput, match='mismatched="skip"'):
            snapshot.restore({"m": target})
        with caplog.at_level(logging.WARNING, "ckptstore"):
            report = snapshot.restore({"m": target}, mismatched="skip")
    assert report.mismatched == ("m/head.weight", "m/head.bias")
    (said,) = (each.getMessage() for each in caplog.records if "skip" in each.getMessage())
    assert "m/head.weight (the commit has float32[8, 8], the target has float32[10, 8])" in said
    for name, value in target.state_dict().items():
        wanted = fresh[name] if name.startswith("head") else source.state_dict()[name]
        assert torch.equal(value, wanted)


def test_skipped_weights_do_not_get_the_moments_of_others(tmp_path: Path) -> None:
    def trained(n: int) -> dict[str, Any]:
        module = head(n)
        optimizer = torch.optim.AdamW(module.parameters())
        module["head"](module["body"](torch.ones(1, 8))).sum().backward()
        optimizer.step()
        return {"m": module, "o": optimizer}

    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit(trained(8))
        target = trained(10)
        before = described(target)
        with pytest.raises(InvalidInput, match=r"o: its state is that of weights.*without=\['o'\]"):
            snapshot.restore(target, mismatched="skip")
        assert described(target) == before
        snapshot.restore(target, mismatched="skip", without=["o"])


@pytest.mark.parametrize("kind", ["another dtype", "another kind", "sparse"])
def test_any_mismatch_of_a_tensor_is_skipped(kind: str, tmp_path: Path) -> None:
    committed, target = {
        "another dtype": (torch.ones(9), torch.zeros(9, dtype=torch.int32)),
        "another kind": (5, torch.zeros(9)),
        "sparse": (torch.eye(3).to_sparse(), torch.zeros(3, 3)),
    }[kind]
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit({"k": {"x": committed, "tied": committed, "y": torch.ones(3)}})
        state = {"k": {"x": target, "y": torch.zeros(3), "tied": target.clone()}}
        report = snapshot.restore(state, mismatched="skip")
    assert set(report.mismatched) == {"k/x", "k/tied"}
    assert state["k"]["x"] is target
    assert not target.any()
    assert state["k"]["y"].all()
