"""vLLM's own registry and loaders with the load format `ckptstore`: as far as they go without an
engine, which takes an accelerator or a build for CPUs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore

pytest.importorskip("vllm.model_executor.model_loader", reason="vLLM is not installed here")

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ckptstore.interop.serving import write_configuration
from ckptstore.interop.vllm import register


class Served(nn.Module):
    """A model as vLLM has it: it takes names and tensors, and says which it has taken."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def load_weights(self, weights: Any) -> set[str]:
        taken = dict(weights)
        self.load_state_dict(taken)
        return set(taken)


@pytest.mark.parametrize("named_by", ["a pointer file", "a URL"])
def test_a_commit_is_loaded_by_vllms_own_loader(
    tmp_path: Path, store: ckptstore.Store, named_by: str
) -> None:
    register()
    torch.manual_seed(1)
    trained = Served()
    snapshot = store.commit({"model": trained.state_dict()}, step=1)
    write_configuration(snapshot, tmp_path / "served", pointer=named_by == "a pointer file")
    url = f"ckptstore://{tmp_path / 'store'}@1"
    options = {"url": url, "key": "model"} if named_by == "a URL" else {}
    loader = get_model_loader(
        LoadConfig(load_format="ckptstore", model_loader_extra_config=options)
    )
    assert isinstance(loader, DefaultModelLoader)
    model = SimpleNamespace(
        model=str(tmp_path / "served"),
        revision=None,
        quantization=None,
        is_moe=False,
        multimodal_config=None,
    )
    loader.download_model(model)
    served = Served()
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        loader.load_weights(served, model)
    assert torch.equal(served.layer.weight, trained.layer.weight)


def test_an_option_that_nobody_knows_is_refused() -> None:
    register()
    with pytest.raises(ValueError, match="Unexpected extra config keys"):
        get_model_loader(LoadConfig(load_format="ckptstore", model_loader_extra_config={"num": 1}))
