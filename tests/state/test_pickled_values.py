"""Values that only pickle can hold are stored and read where that is allowed, and are marked."""

from typing import Any

import pytest
import torch

from ckptstore.core.model import Node, Schema
from ckptstore.errors import CkptStoreError, InvalidInput
from ckptstore.state.inflate import inflate
from ckptstore.state.leaf_sources import pickled_paths
from ckptstore.state.restore import bind
from tests.state.carrying import assert_same, carry


class Odd:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    def __hash__(self) -> int:
        return 0


@pytest.mark.pickles
def test_a_pickle_is_made_and_read_only_where_it_is_allowed_and_is_marked() -> None:
    state = {"a": torch.ones(1), "b": [Odd()]}
    with pytest.raises(InvalidInput, match=r"^s/b/0: .*Odd.*allow_pickle=True"):
        carry(state)
    carried = carry(state, allow_pickle=True)
    assert pickled_paths(carried.schema) == ["s/b/0"]
    with pytest.raises(InvalidInput, match=r"^s/b/0 is a pickle.*allow_pickle=True"):
        carried.inflate()
    assert carried.inflate(allow_pickle=True)["b"] == [Odd()]
    untouched = {"a": torch.zeros(1), "b": []}
    with pytest.raises(InvalidInput, match="s/b/0 is a pickle"):
        carried.restore(untouched)
    assert_same(untouched, {"a": torch.zeros(1), "b": []})
    target: Any = {"a": torch.zeros(1), "b": []}
    assert carried.restore(target, allow_pickle=True)["b"] == [Odd()]


@pytest.mark.pickles
def test_a_pickle_hidden_in_another_container_is_not_read() -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return pytest.fail, ("unpickled",)

    data = carry(Bomb(), allow_pickle=True).content[0]
    for inner in (
        Node("bytearray", (0,)),
        Node("BytesIO", (0,), attrs=(("position", 0),)),
        Node("list", (0,)),
        Node("pickle", (0,)),
    ):
        schema = Schema(Node("pickle", (inner,)), ("s",), ("bytes",), ("",), ((),), (-1,))
        for allow_pickle in (False, True):
            with pytest.raises(CkptStoreError):
                inflate(schema, [data], allow_pickle=allow_pickle)
        with pytest.raises(CkptStoreError):
            _restored(schema, data)


@pytest.mark.pickles
def test_an_unpicklable_value_is_reported() -> None:
    with pytest.raises(InvalidInput, match=r"^s/a: .*register_value"):
        carry({"a": lambda: 0}, allow_pickle=True)


class Raising:
    def __setstate__(self, state: Any) -> None:
        raise AttributeError("no attribute 'old_name'")


@pytest.mark.pickles
def test_what_a_pickled_objects_own_code_raises_is_said_as_that() -> None:
    made = Raising()
    made.n = 1  # type: ignore[attr-defined]
    carried = carry({"a": made}, allow_pickle=True)
    with pytest.raises(InvalidInput, match=r"cannot be made again: AttributeError: .*old_name"):
        carried.inflate(allow_pickle=True)


def _restored(schema: Schema, data: bytes) -> object:
    binding = bind({}, "s", schema)
    binding.receive({0: data})
    return binding.finish()
