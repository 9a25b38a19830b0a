"""Where names differ by what wrappers and libraries add, the error has the rename that works."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.errors import InvalidInput
from ckptstore.state.suggested_names import renaming_hint


def model() -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 2)})


def below(prefix: str) -> Callable[[str], str]:
    return lambda name: prefix + name


BEHIND = ["module.", "_orig_mod.", "module._orig_mod.", "model.", "ema.", "base_model.model."]


def called(error: pytest.ExceptionInfo[InvalidInput]) -> Any:
    """The rename that a message says to pass, as a reader would type it."""
    (text,) = re.findall(r": pass rename=(.*)$", str(error.value), re.MULTILINE)
    return eval(text)


def state_dict_of(module: nn.Module, name: Callable[[str], str]) -> dict[str, Any]:
    return {name(key): value for key, value in module.state_dict().items()}


@pytest.mark.parametrize("prefix", BEHIND)
@pytest.mark.parametrize("direction", ["out of a wrapper", "into a wrapper"])
def test_a_prefix_is_found_on_either_side(direction: str, prefix: str, tmp_path: Path) -> None:
    source, target = model(), model()
    outward = direction == "out of a wrapper"
    committed = state_dict_of(source, below(prefix if outward else ""))
    wanted: Any = target if outward else state_dict_of(target, below(prefix))
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit({"m": committed, "epoch": 3})
        with pytest.raises(InvalidInput) as raised:
            snapshot.restore({"m": wanted})
        if outward:
            assert f"all 4 names that the commit lacks are there behind {prefix!r}" in str(
                raised.value
            )
        snapshot.restore({"m": wanted}, rename=called(raised))
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value)


RENAMED = {
    "a compiled submodule": (
        ["layers.0._orig_mod.weight", "layers.1._orig_mod.weight"],
        ["layers.0.weight", "layers.1.weight"],
    ),
    "weight norm": (
        ["conv.weight_g", "conv.weight_v", "conv.bias"],
        [
            "conv.parametrizations.weight.original0",
            "conv.parametrizations.weight.original1",
            "conv.bias",
        ],
    ),
    "weight norm of the module itself": (
        ["weight_g", "weight_v"],
        ["parametrizations.weight.original0", "parametrizations.weight.original1"],
    ),
    "DenseNet": (
        [
            "features.denseblock1.denselayer1.norm.1.weight",
            "features.denseblock1.denselayer1.conv.2.weight",
        ],
        [
            "features.denseblock1.denselayer1.norm1.weight",
            "features.denseblock1.denselayer1.conv2.weight",
        ],
    ),
    "Vision Transformer": (
        ["encoder.layers.encoder_layer_0.mlp.linear_1.bias", "e.mlp.linear_2.bias"],
        ["encoder.layers.encoder_layer_0.mlp.0.bias", "e.mlp.3.bias"],
    ),
    "layer norm": (["norm.gamma", "norm.beta"], ["norm.weight", "norm.bias"]),
    "PEFT": (
        ["q.lora_A.weight", "q.lora_B.weight"],
        [
            "q.lora_A.default.weight",
            "q.lora_B.default.weight",
        ],
    ),
    "another prefix": (["old.a.weight", "old.a.bias"], ["new.deep.a.weight", "new.deep.a.bias"]),
}


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kind", RENAMED)
def test_known_names_are_brought_together(kind: str, backwards: bool, tmp_path: Path) -> None:
    there, here = RENAMED[kind]
    if backwards:
        there, here = here, there
        if kind == "a compiled submodule":
            pytest.skip("no table says where a wrapper stands in a name that lacks it")
    committed = {name: torch.full((3,), float(n)) for n, name in enumerate(there)}
    target = {name: torch.zeros(3) for name in here}
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit({"m": committed})
        with pytest.raises(InvalidInput) as raised:
            snapshot.restore({"m": target})
        snapshot.restore({"m": target}, rename=called(raised))
    assert [each.tolist() for each in target.values()] == [
        each.tolist() for each in committed.values()
    ]


@pytest.mark.parametrize(
    ("missing", "unexpected"),
    [
        (["m/a"], []),
        ([], ["m/a"]),
        (["m/head.weight"], ["m/neck.weigth"]),
        (["m/a.weight", "m/b.weight"], ["m/module.a.weight"]),
        (["m/a.weight", "m/b.weight"], ["m/x.a.weight", "m/y.b.weight"]),
        (["m"], ["n"]),
    ],
)
def test_where_no_rename_helps_none_is_suggested(missing: list[str], unexpected: list[str]) -> None:
    assert renaming_hint(missing, unexpected) == ""
