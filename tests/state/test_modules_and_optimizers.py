"""Real modules and optimizers: their names, dtypes and memory after a restore. `test_training`
resumes whole runs."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ckptstore.errors import InvalidInput
from ckptstore.state.flatten import flatten
from tests.state.carrying import assert_same, carry, tensor_bytes
from tests.state.training import Case, Run, Tied


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which fight for the cores with whatever else
    runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def same_modules(got: nn.Module, wanted: nn.Module) -> None:
    assert_same(dict(got.state_dict()), dict(wanted.state_dict()))


def test_a_module_is_restored_in_the_memory_that_it_has() -> None:
    wanted, module = Tied(), Tied()
    wanted(torch.arange(5))
    tensors = {
        name: (id(tensor), tensor.data_ptr())
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    assert carry(wanted).restore(module) is module
    same_modules(module, wanted)
    assert {
        name: (id(tensor), tensor.data_ptr())
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    } == tensors
    assert module.seen == {"batches": 1}
    assert module.head.weight is module.embed.weight


def test_tied_weights_are_one_leaf_with_bytes_and_land_once() -> None:
    carried = carry(Tied())
    paths = carried.schema.paths
    assert carried.schema.aliases[paths.index("s/head.weight")] == paths.index("s/embed.weight")
    binding = carried.bind(Tied())
    assert binding.destinations[paths.index("s/head.weight")] == ()


def test_a_modules_metadata_comes_back() -> None:
    state = carry(Tied()).inflate()
    assert type(state) is OrderedDict
    assert state._metadata["norm"] == {"version": 2}  # type: ignore[attr-defined]
    Tied().load_state_dict(state)


def test_keys_that_only_one_side_has_are_said_and_left_out_when_lenient() -> None:
    small = nn.Sequential(OrderedDict(a=nn.Linear(2, 2)))
    large = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.Linear(2, 2)))
    assert carry(small).bind(large).missing == ["s/b.weight", "s/b.bias"]
    binding = carry(large).bind(small)
    assert binding.unexpected == ["s/b.weight", "s/b.bias"]
    assert [not landing for landing in binding.destinations] == [
        False,
        False,
        True,
        True,
    ]
    carry(large).restore(small, strict=False)
    assert torch.equal(small.a.weight, large.a.weight)
    fresh = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.Linear(2, 2)))
    kept = fresh.b.weight.clone()
    carry(small).restore(fresh, strict=False)
    assert torch.equal(fresh.b.weight, kept)


def test_shapes_and_dtypes_that_differ_are_mismatches() -> None:
    binding = carry(nn.Linear(2, 3)).bind(nn.Linear(2, 4).double())
    assert [mismatch.path for mismatch in binding.mismatched] == ["s/weight", "s/bias"]
    assert (binding.mismatched[0].committed, binding.mismatched[0].target) == (
        "float32[3, 2]",
        "float64[4, 2]",
    )


def test_a_meta_module_is_told_to_be_materialized() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    binding = carry(nn.Linear(2, 2)).bind(module)
    assert all("to_empty" in mismatch.target for mismatch in binding.mismatched)
    assert len(binding.mismatched) == 2


def test_a_module_with_its_own_loading_loads_itself() -> None:
    old = nn.Sequential(OrderedDict(old=nn.Linear(2, 2)))

    def rename(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", "new.")] = state.pop(key)

    new = nn.Sequential(OrderedDict(new=nn.Linear(2, 2)))
    new.register_load_state_dict_pre_hook(rename)
    carry(old).restore(new)
    assert torch.equal(new.new.weight, old.old.weight)
    with pytest.raises(InvalidInput, match="Unexpected key"):
        carry(nn.Sequential(OrderedDict(other=nn.Linear(2, 2)))).restore(new)


def test_a_lazy_module_takes_its_shapes_from_the_commit() -> None:
    wanted, lazy = nn.Linear(3, 2), nn.LazyLinear(2)
    carry(wanted).restore(lazy)
    assert torch.equal(lazy.weight, wanted.weight)


def test_a_quantized_parameter_or_a_sparse_buffer_is_restored() -> None:
    class Holder(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.register_buffer("sparse", (torch.eye(3) * scale).to_sparse())

    wanted, module = Holder(3.0), Holder(1.0)
    buffer = module.sparse
    carry(wanted).restore(module)
    assert torch.equal(module.sparse.to_dense(), torch.eye(3) * 3)
    assert module.sparse is buffer


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(compiled, id="whole"),
        pytest.param(lambda m: nn.Sequential(OrderedDict(embed=m)), id="no wrapper"),
        pytest.param(
            lambda m: nn.Sequential(OrderedDict(inner=compiled(m), module=nn.Linear(1, 1))),
            id="inside",
        ),
        pytest.param(lambda m: compiled(nn.Sequential(OrderedDict(inner=compiled(m)))), id="both"),
        pytest.param(lambda m: nn.DataParallel(m), id="DataParallel"),
        pytest.param(lambda m: compiled(nn.DataParallel(m)), id="compiled DataParallel"),
    ],
)
def test_wrappers_add_no_names_and_restore_their_own(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    wanted, fresh = wrap(Tied()), wrap(Tied())
    carried = carry(wanted)
    assert not any("_orig_mod" in path for path in carried.schema.paths)
    assert not any(".embed." in path and "module." in path for path in carried.schema.paths)
    carried.restore(fresh)
    same_modules(fresh, wanted)


def test_a_compiled_module_and_a_plain_one_have_one_content() -> None:
    module = Tied()
    plain, wrapped = carry(module), carry(compiled(module))
    assert (plain.schema, plain.content) == (wrapped.schema, wrapped.content)
    target = compiled(Tied())
    carry(module).restore(target)
    same_modules(target._orig_mod, module)


def test_a_module_of_ones_own_called_module_keeps_its_name() -> None:
    assert carry(nn.Sequential(OrderedDict(module=nn.Linear(1, 1)))).schema.paths == (
        "s/module.weight",
        "s/module.bias",
    )
    assert "s/module.embed.weight" in carry(AveragedModel(Tied())).schema.paths


def bf16_with_fp32_moments() -> tuple[nn.Module, torch.optim.Optimizer]:
    """An optimizer that keeps fp32 moments for bf16 parameters."""
    module = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    module(torch.randn(4, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.rand(state[name].shape)
    return module, optimizer


def bf16_without_a_step() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Linear(3, 3).bfloat16()
    return module, torch.optim.AdamW(module.parameters(), foreach=False)


@pytest.mark.parametrize("make_target", [bf16_with_fp32_moments, bf16_without_a_step])
def test_an_optimizers_state_keeps_its_own_dtype(
    make_target: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
) -> None:
    _, wanted = bf16_with_fp32_moments()
    module, optimizer = make_target()
    there = {id(state): state["exp_avg"].data_ptr() for state in optimizer.state.values()}
    carry(wanted).restore(optimizer)
    assert_same(optimizer.state_dict(), wanted.state_dict())
    assert optimizer.state[module.weight]["exp_avg"].dtype == torch.float32
    if there:
        assert {state["exp_avg"].data_ptr() for state in optimizer.state.values()} == set(
            there.values()
        )


def test_moments_in_a_list_keep_their_dtype_too() -> None:
    module = nn.Linear(2, 1).bfloat16()
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.state[module.weight] = {
        "history": [torch.rand(2), torch.rand(3)],
        "pair": (torch.rand(1), 1),
        "deep": {"x": torch.rand(1)},
    }
    other = torch.optim.SGD(nn.Linear(2, 1).bfloat16().parameters())
    carry(optimizer).restore(other)
    assert_same(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_an_optimizer_is_restored_in_the_memory_that_it_has() -> None:
    run = Run(Case("AdamW"), seed=1)
    run.train(2)
    carried = carry(run.optimizer)
    run.train(1)
    there = [
        tensor.data_ptr() for state in run.optimizer.state.values() for tensor in state.values()
    ]
    carried.restore(run.optimizer)
    assert [
        tensor.data_ptr() for state in run.optimizer.state.values() for tensor in state.values()
    ] == there


def test_an_optimizer_with_other_groups_is_refused() -> None:
    carried = carry(
        torch.optim.SGD([{"params": [torch.ones(1)]}, {"params": [torch.ones(1)]}], lr=0.1)
    )
    binding = carried.bind(torch.optim.SGD([torch.ones(1)], lr=0.1))
    (mismatch,) = binding.mismatched
    assert mismatch.path == "s/param_groups"
    assert mismatch.committed.startswith("2 groups") and "groups differ" in mismatch.target


def test_a_grad_scaler_comes_back() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1))
    scaler.update(512.0)
    other = torch.amp.GradScaler("cpu")
    carry(scaler).restore(other)
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 512.0


def test_an_optimizers_schema_does_not_change_from_step_to_step() -> None:
    run = Run(Case("AdamW", "MultiStepLR"), seed=1)
    run.train(1)
    schemas = {key: carry(value).schema for key, value in run.state.items()}
    run.train(3)
    for key in ("model", "optimizer", "average", "rng"):
        assert carry(run.state[key]).schema == schemas[key]


def test_a_module_restored_within_a_graph_does_not_give_stale_gradients() -> None:
    module = nn.Linear(2, 2, bias=False)
    x = torch.ones(1, 2, requires_grad=True)
    loss = module(x).sum()
    carry(nn.Linear(2, 2, bias=False)).restore(module)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_restored_bytes_are_those_of_the_commit() -> None:
    module = nn.Linear(8, 8)
    carried = carry(module)
    target = nn.Linear(8, 8)
    carried.restore(target)
    assert [tensor_bytes(tensor) for tensor in target.state_dict().values()] == carried.content


def test_an_optimizers_parameters_have_the_names_of_modules_whatever_mapping_holds_them() -> None:
    module = nn.Linear(20, 20)
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    module(torch.ones(20)).sum().backward()
    optimizer.step()
    state = {"net": module, "optimizer": optimizer}
    paths = [flatten(each)["optimizer"].schema.paths for each in (state, MappingProxyType(state))]
    assert paths[0] == paths[1]
    assert "optimizer/state/weight/momentum_buffer" in paths[0]
