"""Tensors whose bytes are not there are refused with their path, and nothing is read that is not
theirs."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.errors import InvalidInput


def _freed() -> torch.Tensor:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


def _end_of_a_freed_one() -> torch.Tensor:
    tensor = torch.ones(1000)
    end = tensor[500:]
    tensor.untyped_storage().resize_(0)
    return end


def _cut_short() -> torch.Tensor:
    tensor = torch.ones(100, 10)
    tensor.untyped_storage().resize_(3996)
    return tensor


def _strided() -> torch.Tensor:
    tensor = torch.ones(100, 10)
    column = tensor[:, 9]
    tensor.untyped_storage().resize_(3996)
    return column


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remark that such tensors are deprecated
        tensor = torch.quantize_per_tensor(torch.ones(1000), 0.1, 0, torch.qint8)
    tensor.untyped_storage().resize_(0)
    return tensor


def _parameter() -> torch.Tensor:
    return torch.nn.Parameter(_freed())


def _sparse() -> torch.Tensor:
    tensor = torch.ones(30, 30).to_sparse()
    tensor._values().untyped_storage().resize_(0)
    return tensor


def _never_made() -> torch.Tensor:
    return torch._efficientzerotensor((1000,))


def _functional() -> torch.Tensor:
    return torch._to_functional_tensor(torch.ones(1000))


WITHOUT = [
    _freed,
    _end_of_a_freed_one,
    _cut_short,
    _strided,
    _quantized,
    _parameter,
    _sparse,
    _never_made,
    _functional,
]


@pytest.mark.parametrize("make", WITHOUT)
@pytest.mark.parametrize("way", ["commit", "commit_async"])
def test_a_tensor_without_its_memory_is_refused_with_its_path(
    way: str, make: Callable[[], torch.Tensor], tmp_path: Path
) -> None:
    tensor = make()
    with ckptstore.open(tmp_path / "store") as store:
        with pytest.raises(
            InvalidInput, match=r"^model/w(/values)?: a tensor (whose storage has|without memory)"
        ):
            getattr(store, way)({"model": {"ok": torch.ones(3), "w": tensor}})
        assert store.log() == []
        store.commit({"model": {"ok": torch.ones(3), "w": torch.empty(0, 5)}})


@pytest.mark.parametrize(
    "transform",
    [torch.func.vmap, torch.func.functionalize, lambda f: torch.func.grad(lambda x: f(x).sum())],
)
def test_tensors_within_a_transform_are_refused(transform: Any, tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:

        def commit(x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(InvalidInput, match=r"^model/w: "):
                store.commit({"model": {"w": x * 2}})
            return x

        transform(commit)(torch.ones(4, 3))
        assert store.log() == []


class Counter:
    """Its state is no dict."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("state", [7, (1, 2), [torch.ones(3)], torch.arange(5), None, "x"])
@pytest.mark.parametrize(
    "wrap", [lambda made: made, lambda made: [made], lambda made: {"k": (made,)}]
)
def test_a_state_that_is_no_dict_comes_back_as_it_is(
    wrap: Callable[[Any], Any], state: Any, tmp_path: Path
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit({"x": wrap(Counter(state))})
        there = Counter(
            torch.zeros(5, dtype=torch.int64)
            if isinstance(state, torch.Tensor)
            else [torch.zeros(3)]
        )
        snapshot.restore({"x": wrap(there)})
        torch.testing.assert_close(
            there.state, state, rtol=0, atol=0
        ) if state is not None and state != "x" else None
        assert type(there.state) is type(state)
        assert type(snapshot.state_dict("x")) is type(
            wrap(state)
        )  # without the object, its state stands in its place


@pytest.mark.parametrize("inner", ["commit", "commit_async", "close"])
@pytest.mark.parametrize("outer", ["commit", "commit_async"])
def test_a_state_dict_that_commits_itself_is_an_error_and_no_hang(
    outer: str, inner: str, tmp_path: Path
) -> None:
    with ckptstore.open(tmp_path / "store") as store:

        class Commits:
            def state_dict(self) -> dict[str, Any]:
                getattr(store, inner)(*([] if inner == "close" else [{"a": 1}]))
                return {}

            def load_state_dict(self, state: Any) -> None: ...

        with pytest.raises(InvalidInput, match="do it before or after the commit"):
            getattr(store, outer)({"x": Commits()})
        assert store.log() == []
        store.commit({"a": 2})
