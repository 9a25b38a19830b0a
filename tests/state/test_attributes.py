"""What an instance holds beside its content comes back with it, or the commit is refused by name:
alike for dataclasses, containers, streams, generators and tensors."""

import io
import random
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ckptstore
from ckptstore.errors import InvalidInput
from ckptstore.state.values import register_class
from tests.state.carrying import Carried, carry

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch:UserWarning"),
]

T = TypeVar("T")


@register_class
@dataclass
class Config:
    lr: float = 0.1
    layers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.warmup = int(self.lr * 1000)

    @cached_property
    def scale(self) -> float:
        return self.lr * 2


@register_class
class Tuned(Config):
    """A subclass without the decorator: `own` is no field."""

    def __init__(self, lr: float = 0.1, own: Any = None) -> None:
        super().__init__(lr)
        self.own = own


@register_class
@dataclass(slots=True)
class Slotted:
    lr: float = 0.1


@register_class
class WithSlot(Slotted):
    __slots__ = ("__hidden", "more")

    def hide(self, value: Any) -> None:
        self.__hidden = value

    def hidden(self) -> Any:
        return self.__hidden


@register_class
@dataclass(frozen=True)
class Frozen:
    lr: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", [int(self.lr * 10)])


@register_class
@dataclass
class Box(Generic[T]):
    item: T


class Pair(NamedTuple):
    a: Any
    b: Any


@register_class
class Point(Pair):
    """Instances have a dict, since this class has no slots."""


@register_class
class Named(torch.Tensor):
    pass


register_class(TwoTensor)


@register_class
class Scaled(torch.Tensor):
    """It wraps a tensor, and has attributes of its own: `unit` comes back with its context, `cache`
    is made by it, and `calls` begins anew."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, unit: str) -> "Scaled":
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    def __init__(self, inner: torch.Tensor, unit: str) -> None:
        self.inner, self.unit, self.cache, self.calls = inner, unit, object(), 0

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, str]]:
        return ["inner"], {"unit": self.unit}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: dict[str, str], shape: Any, stride: Any
    ) -> "Scaled":
        return Scaled(inner["inner"], context["unit"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner.detach(), args[0].unit)
        return NotImplemented


def marked(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


ATTRIBUTES = {"name": "x", "count": 3, "shape": (1, [2.5, None]), "by": {"a": {1: 2}}}

KINDS: dict[str, Callable[[], Any]] = {
    "OrderedDict": lambda: OrderedDict(a=1, b=torch.ones(2)),
    "Counter": lambda: Counter("aab"),
    "namedtuple": lambda: Point(1, torch.ones(2)),
    "BytesIO": lambda: io.BytesIO(b"abc"),
    "Random": lambda: random.Random(1),
    "tensor": lambda: torch.ones(2),
    "tensor that requires grad": lambda: torch.ones(2, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "buffer": lambda: nn.Buffer(torch.ones(2)),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "subclass": lambda: torch.ones(2).as_subclass(Named),
    "subclass that requires grad": lambda: torch.ones(2).as_subclass(Named).requires_grad_(),
    "parameter of a subclass": lambda: nn.Parameter(torch.ones(2).as_subclass(Named)),
    "compressed": lambda: torch.eye(2).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(1)], layout=torch.jagged
    ),
    "wrapper": lambda: TwoTensor(torch.ones(2), torch.ones(2)),
    "wrapper that requires grad": lambda: TwoTensor(torch.ones(2), torch.ones(2)).requires_grad_(),
    "parameter of a wrapper": lambda: nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2))),
    "wrapper with attributes of its own": lambda: Scaled(torch.ones(2), "m"),
    "dataclass": lambda: Config(0.5, [1]),
    "subclass of a dataclass": lambda: Tuned(0.5, {"t": torch.ones(2)}),
    "frozen": lambda: Frozen(0.5),
}


def held(value: Any) -> dict[str, Any]:
    """What was set, and what `Config` and `Tuned` set."""
    return {
        name: each for name, each in vars(value).items() if name in (*ATTRIBUTES, "warmup", "own")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_attributes_come_back_in_new_objects_and_in_those_of_a_target(kind: str) -> None:
    made = marked(KINDS[kind](), **ATTRIBUTES)
    carried = carry({"s": made})
    new = carried.inflate()["s"]
    assert (type(new), repr(held(new))) == (type(made), repr(held(made)))
    target = {"s": KINDS[kind]()}
    there = target["s"]
    carried.restore(target)
    assert repr(held(target["s"])) == repr(held(made))
    if kind not in ("namedtuple", "frozen", "sparse"):
        assert target["s"] is there


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "dataclass" not in kind])
def test_an_attribute_that_cannot_be_stored_is_named(kind: str) -> None:
    made = marked(KINDS[kind](), pattern=re.compile("a"))
    with pytest.raises(InvalidInput, match=r"s/here.*pattern"):
        carry({"here": made})


def test_an_attribute_of_a_dataclass_that_cannot_be_stored_is_a_path() -> None:
    with pytest.raises(InvalidInput, match=r"^s/here/own: a re.Pattern cannot be stored"):
        carry({"here": Tuned(own=re.compile("a"))})


def restored(made: Any, target: Any, **options: Any) -> Any:
    state = {"s": target}
    carry({"s": made}).restore(state, **options)
    return state["s"]


def test_an_attribute_that_a_class_gives_and_somebody_changed_is_kept() -> None:
    made = Scaled(torch.ones(2), "m")
    made.calls, made.unit = 7, "km"
    got = carry({"s": made}).inflate()["s"]
    assert (got.calls, got.unit) == (7, "km")
    schema = carry({"s": Scaled(torch.ones(2), "m")}).schema
    assert "'attributes'" not in repr(schema.skeleton)


def test_attributes_in_slots_come_back() -> None:
    made = WithSlot(0.5)
    made.more = [1, 2]
    made.hide("x")
    got = restored(made, WithSlot())
    assert (got.lr, got.more, got.hidden()) == (0.5, [1, 2], "x")


def test_a_tensor_beside_the_fields_is_filled_in_place() -> None:
    target = Tuned(own=torch.zeros(2))
    there = target.own
    assert restored(Tuned(own=torch.ones(2)), target) is target
    assert target.own is there
    assert there.tolist() == [1, 1]


def test_what_was_computed_from_fields_that_change_is_computed_again() -> None:
    target = Config(0.1)
    assert target.scale == 0.2
    assert restored(Config(0.5), target).scale == 1.0


def test_what_only_the_target_holds_stays() -> None:
    target = marked(Tuned(), added_since=1)
    assert vars(restored(Tuned(0.5, 2), target))["added_since"] == 1
    assert target.own == 2


def test_what_was_stored_beside_fields_may_have_become_a_field() -> None:
    @dataclass
    class Newer:
        lr: float = 0.1
        layers: Any = None
        own: Any = None

    register_class(Newer, "newer")
    schema = carry(Tuned(0.5, 2))
    text = repr(schema.schema.skeleton).replace("tests.state.test_attributes.Tuned", "newer")
    from dataclasses import replace

    from ckptstore.core.model import Node  # noqa: F401  # what the text is made of

    newer = Carried(replace(schema.schema, skeleton=eval(text)), schema.content)
    got = newer.inflate()
    assert (type(got), got.lr, got.own) == (Newer, 0.5, 2)


def test_the_note_of_a_generic_is_no_content() -> None:
    got = carry(Box[int](3)).inflate()
    assert got == Box(3)


def test_marks_of_torch_itself_are_no_content() -> None:
    weight = torch.ones(2)
    torch._dynamo.mark_static_address(weight)
    torch._dynamo.mark_dynamic(weight, 0)
    assert vars(weight)
    assert carry({"w": weight}).schema == carry({"w": torch.ones(2)}).schema


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_marks_on_a_jagged_tensor_are_no_content() -> None:
    """Torch keeps its sizes in a capsule, and their number beside it: one without the other ends
    torch's next look at the sizes in an internal error."""
    rows = [torch.ones(2, 3), torch.ones(1, 3)]
    plain, looked_at = (torch.nested.nested_tensor(rows, layout=torch.jagged) for _ in range(2))
    with torch._C.DisableTorchFunctionSubclass():
        looked_at.size(), looked_at.stride()
    assert "_sym_sizes_capsule_len" in vars(looked_at)
    carried = carry({"t": looked_at})
    assert carried.schema == carry({"t": plain}).schema
    got = carried.inflate()["t"]
    with torch._C.DisableTorchFunctionSubclass():
        assert len(got.size()) == len(got.stride()) == 3


def test_classes_beside_the_content_need_no_registration_if_the_target_has_them() -> None:
    @dataclass
    class Inner:
        n: int = 0

    got = restored(Tuned(own=[Inner(3)]), Tuned(own=[Inner()]))
    assert got.own == [Inner(3)]


def test_extra_fields_of_pydantic_come_back() -> None:
    pydantic = pytest.importorskip("pydantic")

    @pydantic.dataclasses.dataclass(config={"extra": "allow"})
    class Settings:
        lr: float = 0.1

    register_class(Settings)
    got = restored(Settings(lr=0.5, seed=7), Settings())
    assert (got.lr, got.seed) == (0.5, 7)
    assert carry(Settings(lr=0.5, seed=7)).inflate().seed == 7


def test_a_state_dict_keeps_its_versions_where_a_target_has_others() -> None:
    made = nn.BatchNorm1d(2).state_dict()
    target = nn.BatchNorm1d(2).state_dict()
    target._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    got = restored(made, target)
    assert got is target
    assert got._metadata == made._metadata  # type: ignore[attr-defined]


def test_attributes_of_a_state_dict_are_refused_by_name(tmp_path: Path) -> None:
    progress = ckptstore.StateDict(step=1)
    progress.epoch = 3  # type: ignore[attr-defined]
    with (
        ckptstore.open(tmp_path / "store") as store,
        pytest.raises(InvalidInput, match="attribute 'epoch'"),
    ):
        store.commit({"progress": progress}, step=1)
