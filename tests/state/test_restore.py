"""A restore into what is there: containers and tensors keep their identity, what does not fit is
said before a byte moves."""

import io
import random
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptstore.errors import InvalidInput
from ckptstore.state.stateful import RNGState, StateDict, reseeded
from tests.state.carrying import assert_same, carry
from tests.state.test_structures import Counting, Point


def test_a_plain_container_keeps_its_identity_and_its_tensors() -> None:
    ordered = OrderedDict(a=torch.zeros(1))
    state: Any = {
        "w": torch.zeros(3),
        "l": [1],
        "d": {"x": torch.zeros(2, 2).t(), "n": 0},
        "o": ordered,
        "t": (torch.zeros(2), 5),
    }
    there = [
        state,
        state["w"],
        state["l"],
        state["d"],
        state["d"]["x"],
        state["o"],
        state["o"]["a"],
        state["t"][0],
    ]
    ordered = OrderedDict(a=torch.ones(1))
    wanted = {
        "w": torch.ones(3),
        "l": [3, 4],
        "d": {"x": torch.rand(2, 2), "n": 7},
        "o": ordered,
        "t": (torch.ones(2), 6),
    }
    got = carry(wanted).restore(state)
    assert_same(got, wanted)
    now = [got, got["w"], got["l"], got["d"], got["d"]["x"], got["o"], got["o"]["a"], got["t"][0]]
    assert all(a is b for a, b in zip(now, there, strict=True))


def test_a_strict_restore_makes_a_plain_container_equal_to_the_commit() -> None:
    state: Any = {"stale": 1, "list": [1, 2, 3], "b": 0, "a": 0}
    carry({"a": 1, "new": torch.ones(1), "list": [{"x": 1}], "b": 2}).restore(state)
    assert_same(state, {"a": 1, "new": torch.ones(1), "list": [{"x": 1}], "b": 2})


def test_a_lenient_restore_keeps_values_only_the_target_has() -> None:
    state: Any = {"stale": 1, "t": torch.zeros(1), "d": {"x": 1}}
    carry({"d": {"y": 2}}).restore(state, strict=False)
    assert_same(state, {"stale": 1, "t": torch.zeros(1), "d": {"x": 1, "y": 2}})


def test_a_tensor_that_the_commit_lacks_is_missing() -> None:
    binding = carry({"a": 1, "d": {}}).bind(
        {"a": 0, "t": torch.zeros(1), "d": {"m/n": [nn.Linear(1, 1)], "v": 3}}
    )
    assert binding.missing == ["s/t", "s/d/m%2Fn/0"]


MISMATCHES = [
    (torch.ones(3), torch.ones(4), "float32[3]", "float32[4]"),
    (torch.ones(3), torch.ones(3, dtype=torch.float64), "float32[3]", "float64[3]"),
    (torch.ones(3), torch.ones(3, dtype=torch.int32), "float32[3]", "int32[3]"),
    (torch.ones(1), torch.ones(()), "float32[1]", "float32[]"),
    (5, torch.ones(()), "a value", "float32[]"),
    ({"a": 1}, torch.ones(1), "dict", "float32[1]"),
    (torch.ones(2), torch.empty(2, device="meta"), "float32[2]", "to_empty"),
    (torch.eye(2).to_sparse(), torch.eye(2), "torch.sparse_coo", "float32[2, 2]"),
]


@pytest.mark.parametrize(("committed", "target", "is_committed", "is_target"), MISMATCHES)
def test_another_shape_dtype_or_kind_is_a_mismatch_and_nothing_is_cast(
    committed: Any, target: Any, is_committed: str, is_target: str
) -> None:
    for strict in (True, False):
        binding = carry({"x": {"y": committed}}).bind({"x": {"y": target}}, strict=strict)
        (mismatch,) = binding.mismatched
        assert mismatch.path == "s/x/y"
        assert is_committed in mismatch.committed
        assert is_target in mismatch.target


def test_a_value_gives_way_to_a_tensor_and_none_to_anything() -> None:
    state: Any = {"a": None, "b": 3}
    carry({"a": torch.ones(1), "b": torch.ones(2)}).restore(state)
    assert_same(state, {"a": torch.ones(1), "b": torch.ones(2)})


def test_immutable_values_are_returned() -> None:
    assert carry(5).restore(3) == 5
    weight = torch.zeros(2)
    got = carry((torch.ones(2), 1)).restore((weight, 0))
    assert got[0] is weight
    assert got[1] == 1


def test_tied_targets_of_tied_leaves_are_filled_once() -> None:
    shared, target = torch.randn(3), torch.zeros(3)
    binding = carry([shared, shared]).bind([target, target])
    assert [not landing for landing in binding.destinations] == [False, True]


def test_tied_leaves_fill_targets_that_are_not_tied() -> None:
    shared = torch.randn(3)
    state = [torch.zeros(3), torch.zeros(3)]
    carry([shared, shared]).restore(state)
    assert_same(state, [shared, shared])
    assert state[0].data_ptr() != state[1].data_ptr()


def test_tied_targets_cannot_hold_two_contents() -> None:
    target = torch.zeros(3)
    for strict in (True, False):
        (mismatch,) = (
            carry([torch.ones(3), torch.full((3,), 2.0)])
            .bind([target, target], strict=strict)
            .mismatched
        )
        assert mismatch == ("s/1", "a content of its own", "one tensor for it and s/0")


def test_an_object_that_loads_its_state_itself_gets_a_tensor_for_each_content() -> None:
    target = torch.zeros(3)
    thing = Counting({"a": target, "b": target})
    carry(Counting({"a": torch.ones(3), "b": torch.full((3,), 2.0)})).restore(thing)
    assert (thing.state["a"].tolist(), thing.state["b"].tolist()) == ([1, 1, 1], [2, 2, 2])
    assert thing.state["a"] is target


def test_a_transposed_twin_of_a_target_gets_the_right_values() -> None:
    base, wanted = torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    carry([wanted, wanted.t()]).restore([base, base.t()])
    assert torch.equal(base, wanted)


def test_an_expanded_target_is_replaced_since_its_elements_share_memory() -> None:
    state = {"t": torch.zeros(1).expand(3)}
    carry({"t": torch.arange(3.0)}).restore(state)
    assert state["t"].tolist() == [0, 1, 2]


def test_a_target_that_wants_a_gradient_is_filled_where_it_stands() -> None:
    state = {
        "leaf": torch.zeros(2, requires_grad=True),
        "column": nn.Parameter(torch.zeros(2, 2).t()),
    }
    there = dict(state)
    wanted = {"leaf": torch.ones(2), "column": torch.rand(2, 2)}
    carry(wanted).restore(state)
    for key, tensor in there.items():
        assert state[key] is tensor
        assert torch.equal(tensor, wanted[key])
        assert tensor.requires_grad


def test_an_array_is_filled_where_it_stands_and_replaced_where_it_does_not_fit() -> None:
    state = {
        "a": np.zeros(3),
        "b": np.zeros(2),
        "c": np.zeros(3).astype("U3"),
        "d": np.arange(4.0)[::2],
    }
    a, d = state["a"], state["d"]
    carry(
        {"a": np.ones(3), "b": np.ones(5), "c": np.array(["x"]), "d": np.array([7.0, 8.0])}
    ).restore(state)
    assert state["a"] is a
    assert state["d"] is d
    assert (a.tolist(), d.tolist(), state["b"].tolist(), state["c"].tolist()) == (
        [1, 1, 1],
        [7, 8],
        [1] * 5,
        ["x"],
    )


@dataclass
class Progress:
    epoch: int
    best: Any = None


@dataclass(frozen=True)
class Setting:
    lr: float


def test_other_containers_are_changed_where_they_can_be() -> None:
    state: Any = {
        "progress": Progress(0, {"w": torch.zeros(1)}),
        "setting": Setting(1.0),
        "point": Point(torch.zeros(1)),
        "window": deque([torch.zeros(1)], maxlen=3),
        "array": bytearray(b"x"),
        "random": random.Random(1),
        "numpy": np.random.default_rng(1),
        "torch": torch.Generator().manual_seed(1),
    }
    wanted = {
        "progress": Progress(7, {"w": torch.ones(1)}),
        "setting": Setting(0.5),
        "point": Point(torch.ones(1), "y"),
        "window": deque([torch.ones(1), torch.ones(1)], maxlen=3),
        "array": bytearray(b"abc"),
        "random": random.Random(2),
        "numpy": np.random.default_rng(2),
        "torch": torch.Generator().manual_seed(2),
    }
    there, tensor = dict(state), state["progress"].best["w"]
    carry(wanted).restore(state)
    for key in ("progress", "window", "array", "random", "numpy", "torch"):
        assert state[key] is there[key]
    assert state["progress"].best["w"] is tensor
    for key in ("progress", "setting", "point", "window", "array"):
        assert_same(state[key], wanted[key])
    assert state["random"].random() == wanted["random"].random()
    assert state["numpy"].random() == wanted["numpy"].random()
    assert state["torch"].initial_seed() == 2


def test_objects_with_a_state_are_handed_theirs_wherever_they_are() -> None:
    root, deep, module = Counting({"n": 0}), Counting({"t": torch.zeros(1)}), nn.Linear(2, 2)
    weight = module.weight.data_ptr()
    wanted = nn.Linear(2, 2)
    state = {"root": root, "list": [deep], "module": module}
    carry(
        {
            "root": Counting({"n": 1, "more": [1]}),
            "list": [Counting({"t": torch.ones(1)})],
            "module": wanted,
        }
    ).restore(state)
    assert state["root"] is root
    assert_same(root.state, {"n": 1, "more": [1]})
    assert_same(deep.state, {"t": torch.ones(1)})
    assert torch.equal(module.weight, wanted.weight)
    assert module.weight.data_ptr() == weight


def test_an_objects_own_tensors_are_reused() -> None:
    thing = Counting({"t": torch.zeros(3), "other": torch.zeros(2)})
    tensor = thing.state["t"]
    carry(Counting({"t": torch.ones(3), "other": torch.ones(5), "new": torch.ones(1)})).restore(
        thing
    )
    assert thing.state["t"] is tensor
    assert_same(thing.state, {"t": torch.ones(3), "other": torch.ones(5), "new": torch.ones(1)})


def test_a_state_dict_of_ours_is_filled_in_place() -> None:
    progress = StateDict(epoch=0, weight=torch.zeros(1))
    weight = progress["weight"]
    assert carry(StateDict(epoch=3, weight=torch.ones(1), more="x")).restore(progress) is progress
    assert progress == {"epoch": 3, "weight": weight, "more": "x"}
    assert weight.item() == 1
    nested = {"p": StateDict(a=1)}
    inner = nested["p"]
    carry({"p": StateDict(a=2)}).restore(nested)
    assert nested["p"] is inner
    assert type(inner) is StateDict
    assert inner == {"a": 2}


def test_a_torchsnapshot_like_object_and_a_plain_dict_take_each_others_state() -> None:
    thing = Counting({"a": 0})
    carry({"a": 1}).restore(thing)
    assert thing.state == {"a": 1}
    plain = {"a": 0}
    carry(Counting({"a": 2})).restore(plain)
    assert plain == {"a": 2}


def test_all_generators_are_set_and_taking_their_state_draws_nothing() -> None:
    def draws() -> Any:
        return random.random(), np.random.random(), torch.rand(2).tolist()

    carried = carry(RNGState())
    first = draws()
    assert carry(RNGState()).content != carried.content
    binding = carried.bind(RNGState())
    assert binding.late
    carried.finish(binding)
    assert draws() == first
    assert carry({"nested": [RNGState()]}).bind({"nested": [RNGState()]}).late
    assert not carry({"a": 1}).bind({"a": 1}).late


def test_seeds_that_follow_each_other_begin_different_streams() -> None:
    """torch takes 32 bits of a seed on the CPU, so that random ones would collide now and then."""
    before, drawn = RNGState().state_dict(), set()
    names = ["python", "torch", "numpy", "cuda"]
    for seed in range((1 << 32) - 3, (1 << 32) + 3):
        RNGState().load_state_dict(reseeded(before, names, seed))
        drawn |= {random.random(), float(np.random.random()), torch.rand(1).item()}
    RNGState().load_state_dict(before)
    assert len(drawn) == 18
    only_torch = reseeded(before, ["torch", "of a subclass"], 5)
    assert only_torch["python"] == before["python"] and only_torch.keys() == before.keys()
    assert not torch.equal(only_torch["torch"], before["torch"])


def test_a_buffer_is_replaced() -> None:
    state = {"b": io.BytesIO(b"old")}
    carry({"b": io.BytesIO(b"new!")}).restore(state)
    assert state["b"].read() == b"new!"


def test_many_small_tensors_need_no_new_memory() -> None:
    state = {f"k{i}": torch.zeros(4) for i in range(1000)}
    binding = carry({f"k{i}": torch.full((4,), float(i)) for i in range(1000)}).bind(state)
    assert all(
        [destination.tensor is state[f"k{i}"] for _, destination in landing] == [True]
        for i, landing in enumerate(binding.destinations)
    )


def test_an_unknown_codec_is_named_with_the_way_out() -> None:
    carried = carry({"a": Point(1)})
    assert carried.restore({"a": Point(0)}) == {"a": Point(1)}
    from ckptstore.state import stateful

    hidden = stateful._CLASSES.pop("tests.state.test_structures.Point")
    try:
        assert carried.restore({"a": Point(0)}) == {"a": Point(1)}
        with pytest.raises(InvalidInput, match="register_class"):
            carried.restore({"a": None})
    finally:
        stateful._CLASSES["tests.state.test_structures.Point"] = hidden
