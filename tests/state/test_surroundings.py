"""What a caller has set around a commit or a read changes neither: default device and dtype,
autocast, inference mode. Where torch makes tensors without memory, both are refused."""

import ast
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._device import _device_constructors

import ckptstore
from ckptstore.errors import InvalidInput
from tests.state.drawing import COMPOSITES, composite

PACKAGE = Path(ckptstore.__file__).parent


@contextmanager
def _default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch.device('meta')": lambda: torch.device("meta"),
    "default device meta": lambda: _default_device("meta"),
    "default dtype float64": lambda: _default_dtype(torch.float64),
    "default dtype bfloat16": lambda: _default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
}
if torch.cuda.is_available():
    SURROUNDINGS["torch.device('cuda')"] = lambda: torch.device("cuda")

WITHOUT_MEMORY: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "FakeTensorMode": FakeTensorMode,
    "FakeTensorMode beside real tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}


def made(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    module = torch.nn.Linear(70, 70)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 70)).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remarks that such tensors are experimental
        more = {
            "array": np.arange(4.0) + seed,
            "empty": torch.zeros(0, 3),
            "column": torch.randn(60, 50).T,
            "half": torch.randn(5, dtype=torch.complex32),
            # An empty nested tensor's own sizes are of torch's default dtype.
            **{n: composite(n, seed=seed) for n in COMPOSITES if n != "nested, of no tensors"},
        }
    return {
        "model": module,
        "optimizer": optimizer,
        "generator": torch.Generator().manual_seed(seed),
        "random": ckptstore.RNGState(),
        "more": more,
    }


def described(value: Any) -> str:
    """Equal for equal states."""
    with TemporaryDirectory() as folder, ckptstore.open(folder) as store:
        return store.commit({"x": value}).content_id


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store") as opened:
        yield opened


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_commit_is_the_same_whatever_surrounds_it(name: str, store: ckptstore.Store) -> None:
    state = made(1)
    plain = store.commit(state, step=0)
    with SURROUNDINGS[name]():
        inside = store.commit(state, step=1)
        store.commit_async(state, step=2).wait()
    assert inside.content_id == plain.content_id == store.checkout(2).content_id


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_reads_give_the_committed_values_on_the_cpu(name: str, store: ckptstore.Store) -> None:
    snapshot = store.commit(made(1), step=0)
    wanted = snapshot.state_dict()
    with SURROUNDINGS[name]():
        got = snapshot.state_dict()
        weight = snapshot.read("model/weight")
        mapped = snapshot.open("model/weight")
        target = torch.zeros(70, 70, device="cpu", dtype=torch.float32).t()
        snapshot.read_into(target, "model/weight")
    assert described(got) == described(wanted)
    for tensor in (weight, mapped, target):
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, wanted["model"]["weight"])
    weight.requires_grad_().square().sum().backward()  # which a tensor of inference mode refuses


@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.parametrize("has_stepped", [True, False])
def test_a_run_resumes_and_goes_on(has_stepped: bool, name: str, store: ckptstore.Store) -> None:
    state, target = made(1), made(2)
    store.commit(state, step=0)
    if not has_stepped:
        target["optimizer"] = torch.optim.AdamW(target["model"].parameters())
        target["more"] = {}
    with SURROUNDINGS[name]():
        store.resume(target)
    assert described(target) == described(state)
    for each in (state, target):
        each["model"](torch.ones(1, 70)).sum().backward()
        each["optimizer"].step()
    assert torch.equal(state["model"].weight, target["model"].weight)


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_where_tensors_have_no_memory_everything_is_refused_and_nothing_changes(
    name: str, store: ckptstore.Store
) -> None:
    state, target = made(1), made(2)
    snapshot = store.commit(state, step=0)
    before = described(target)
    landing = torch.zeros(70, 70).t()
    ways: list[Callable[[], object]] = [
        lambda: snapshot.read("model/weight"),
        lambda: snapshot.read_into(landing, "model/weight"),
        lambda: snapshot.open("model/weight"),
        lambda: snapshot.state_dict(),
        lambda: snapshot.state_dict(mmap=True),
        lambda: snapshot.restore(target),
        lambda: store.resume(target),
        lambda: store.commit(state, step=1),
        lambda: store.commit_async(state, step=1),
    ]
    with WITHOUT_MEMORY[name]():
        for way in ways:
            with pytest.raises(InvalidInput, match="leave FakeTensorMode"):
                way()
    assert described(target) == before
    assert not landing.any()
    assert [each.step for each in store.log()] == [0]


def test_a_target_of_fake_tensors_is_refused_with_its_path(store: ckptstore.Store) -> None:
    snapshot = store.commit({"first": torch.ones(9), "model": torch.nn.Linear(70, 70)})
    with FakeTensorMode():
        fake = torch.nn.Linear(70, 70)
    target = {"first": torch.zeros(9), "model": fake}
    with pytest.raises(InvalidInput, match="model/weight"):
        snapshot.restore(target)
    assert not target["first"].any()
    with pytest.raises(InvalidInput, match="FakeTensor"):
        snapshot.read_into(fake.weight.detach(), "model/weight")


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.functionalize])
def test_a_transform_around_a_read_changes_no_value(transform: Any, store: ckptstore.Store) -> None:
    weight = torch.randn(70, 70)
    snapshot = store.commit({"w": weight})
    found: list[torch.Tensor] = []

    def read(x: torch.Tensor) -> torch.Tensor:
        with suppress(InvalidInput):  # inside functionalize, which makes tensors without memory
            found.append(snapshot.read("w"))
        return x

    transform(read)(torch.ones(2, 3))
    assert all(torch.equal(each, weight) for each in found)


FACTORIES = {function.__name__ for function in _device_constructors()}
"""The functions that torch's default device applies to."""


def unnamed_allocations(source: str) -> list[int]:
    """The lines that make a tensor or a generator without saying of which dtype and where."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
        within = ast.unparse(node.func.value)
        if within.split(".")[0] != "torch":
            continue
        if name in FACTORIES or name.endswith("_quantized"):
            wanted = {"device", "dtype"}
        elif name == "frombuffer":
            wanted = {"dtype"}
        elif name in ("Generator", "UntypedStorage"):
            wanted = set() if node.args and name == "Generator" else {"device"}
        elif name in ("Tensor", "FloatTensor", "LongTensor", "ByteTensor"):
            wanted = {"never"}
        else:
            continue
        if not wanted <= given:
            found.append(node.lineno)
    return found


def test_every_allocation_names_its_device_and_its_dtype() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in unnamed_allocations(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.empty(3, dtype=torch.uint8)",
        "torch.zeros(3, device='cpu')",
        "torch.nested.nested_tensor([])",
        "torch.Generator()",
        "torch.Tensor(3)",
    ],
)
def test_the_check_finds_an_allocation_that_depends_on_what_surrounds_it(source: str) -> None:
    assert unnamed_allocations(source) == [1]
