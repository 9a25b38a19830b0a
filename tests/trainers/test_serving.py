"""Models come from commits as they come from files, with transformers and PEFT; vLLM's loader has
a stand-in.
"""

import os
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from ckptstore.errors import Corrupt, InvalidInput, NotFound
from ckptstore.interop.fsspec import url_of
from ckptstore.interop.serving import (
    adapters,
    from_pretrained,
    load_adapter,
    write_configuration,
)
from ckptstore.objects.pointer_files import HOLLOW_POINTER
from ckptstore.store import Store


def llama(*, tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.max_new_tokens = 7
    return model


TOKENS = torch.tensor([[1, 5, 9, 77]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def mapped(tensor: torch.Tensor) -> bool:
    """Whether memory is a file's."""
    place = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        start, stop = (int(text, 16) for text in span.split("-"))
        if start <= place < stop:
            return "/packs/" in path
    return False


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.oldest
def test_an_adopted_model_is_the_one_of_its_files(
    store: Store, tmp_path: Path, tied: bool, mmap: bool
) -> None:
    model = llama(tied=tied)
    model.save_pretrained(tmp_path / "out", max_shard_size="100KB")
    snapshot = store.adopt(tmp_path / "out", step=5)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for model_class in (None, transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        found = from_pretrained(snapshot, model_class, mmap=mmap)
        assert type(found) is type(wanted)
        assert torch.equal(logits(found), logits(wanted))
        assert torch.equal(logits(found), logits(model))
        assert not any(each.is_meta for each in (*found.parameters(), *found.buffers()))
        assert found.generation_config.max_new_tokens == 7
        assert not found.training
        shared = found.lm_head.weight.data_ptr() == found.model.embed_tokens.weight.data_ptr()
        assert shared == tied
        assert mapped(found.model.embed_tokens.weight) == mmap


def test_a_materialized_view_loads_as_files_do(store: Store, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "out")
    view = store.adopt(tmp_path / "out").materialize(tmp_path / "view").path
    found = transformers.AutoModelForCausalLM.from_pretrained(view)
    assert torch.equal(logits(found), logits(model))


def test_a_commit_of_a_training_loop_is_a_model(store: Store, tmp_path: Path) -> None:
    model = llama(tied=True)
    optimizer = torch.optim.AdamW(model.parameters())
    snapshot = store.commit({"net": model, "optimizer": optimizer}, step=1)
    model(TOKENS).logits.sum().backward()
    optimizer.step()
    later = store.commit({"net": model, "optimizer": optimizer}, step=2)
    with pytest.raises(InvalidInput, match="which key"):
        from_pretrained(later)
    with pytest.raises(InvalidInput, match=r"config\.json"):
        from_pretrained(snapshot, key="net")
    model.config.save_pretrained(tmp_path / "config")
    for config in (model.config, tmp_path / "config"):
        for model_class in (transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM):
            found = from_pretrained(snapshot, model_class, config=config, key="net")
            same = snapshot.state_dict("net")
            assert all(torch.equal(found.state_dict()[name], same[name]) for name in same)


def test_arguments_of_from_pretrained_mean_what_they_mean(store: Store, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "out")
    found = from_pretrained(store.adopt(tmp_path / "out"), dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16 and found.lm_head.weight.dtype == torch.bfloat16


def test_training_on_mapped_weights_changes_no_pack(store: Store, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "out")
    snapshot = store.adopt(tmp_path / "out")
    found = from_pretrained(snapshot).train()
    optimizer = torch.optim.SGD(found.parameters(), lr=1.0)
    found(TOKENS).logits.square().mean().backward()
    optimizer.step()
    assert not torch.equal(found.lm_head.weight, model.lm_head.weight)
    snapshot.verify()
    assert torch.equal(logits(from_pretrained(snapshot)), logits(model))


def test_damage_is_found_where_weights_are_read(store: Store, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "out")
    snapshot = store.adopt(tmp_path / "out")
    wanted = model.lm_head.weight.detach().numpy().tobytes()
    for pack in (tmp_path / "store" / "packs").rglob("*"):
        data = bytearray(pack.read_bytes()) if pack.is_file() else bytearray()
        if (place := data.find(wanted)) >= 0:
            data[place] ^= 1
            pack.chmod(0o600)
            pack.write_bytes(data)
    with pytest.raises(Corrupt, match="lm_head"):
        from_pretrained(snapshot, mmap=False)


# -- diffusers --


@pytest.mark.filterwarnings("ignore")  # of diffusers, when it is imported
@pytest.mark.oldest
def test_a_model_of_diffusers_comes_from_a_commit(store: Store, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed here")
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()
    model.save_pretrained(tmp_path / "unet")
    snapshot = store.adopt(tmp_path / "unet")
    image = torch.randn(1, 3, 16, 16)
    for mmap in (True, False):
        found = from_pretrained(snapshot, diffusers.UNet2DModel, mmap=mmap)
        with torch.no_grad():
            assert torch.equal(found(image, 3).sample, model(image, 3).sample)
        assert mapped(found.conv_in.weight) == mmap and not found.training


# -- PEFT --


def lora(base: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config).eval()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # PEFT reads it
@pytest.mark.filterwarnings("ignore:Could not find a config file in  -")  # PEFT 0.19
@pytest.mark.oldest
def test_adapters_of_a_commit_are_listed_and_loaded(store: Store, tmp_path: Path) -> None:
    model = lora(llama(), 1)
    torch.manual_seed(2)
    model.add_adapter("style", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    for parameter, weight in model.named_parameters():
        if "style" in parameter:
            weight.data.normal_()
    model.save_pretrained(tmp_path / "out")
    (tmp_path / "out" / "runs" / "v1.2").mkdir(parents=True)
    (tmp_path / "out" / "style").rename(tmp_path / "out" / "runs" / "v1.2" / "style")
    snapshot = store.adopt(tmp_path / "out", step=1)
    name = "runs/v1.2/style"
    assert adapters(snapshot) == {"default": "", name: name}
    first = logits(model)
    model.set_adapter("style")
    second = logits(model)
    assert not torch.equal(first, second)

    found = load_adapter(llama(), snapshot)
    assert isinstance(found, peft.PeftModel)
    assert torch.equal(logits(found), first)
    assert load_adapter(found, store.checkout(1), name, as_name="style") is found
    load_adapter(found, snapshot, name)
    assert set(found.peft_config) == {"default", "style", "runs_v1_2_style"}
    found.set_adapter("style")
    assert torch.equal(logits(found), second)
    with pytest.raises(NotFound, match=r"default, runs/v1\.2/style"):
        load_adapter(llama(), snapshot, "none")
    assert adapters(store.commit({"a": 1}, step=2)) == {}


# -- vLLM: a stand-in with the parts of its loader that the plugin uses --


@dataclass
class LoadConfig:
    load_format: str = "ckptstore"
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)


class DefaultModelLoader:
    counter_before_loading_weights = 0.0

    @dataclass
    class Source:
        model_or_path: str
        revision: str | None = None
        prefix: str = ""

    def __init__(self, load_config: LoadConfig) -> None:
        if load_config.model_loader_extra_config:
            raise ValueError("Unexpected extra config keys")
        self.load_config = load_config

    def load_weights(self, model: Any, model_config: Any) -> None:
        model.load_weights(self._get_weights_iterator(self.Source(model_config.model)))  # type: ignore[attr-defined]


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is registered with the stand-in."""
    found: dict[str, Any] = {}

    def register_model_loader(load_format: str) -> Any:
        return lambda loader: found.setdefault(load_format, loader)

    package = types.ModuleType("vllm")
    executor = types.ModuleType("vllm.model_executor")
    loader = types.ModuleType("vllm.model_executor.model_loader")
    loader.register_model_loader = register_model_loader  # type: ignore[attr-defined]
    default = types.ModuleType("vllm.model_executor.model_loader.default_loader")
    default.DefaultModelLoader = DefaultModelLoader  # type: ignore[attr-defined]
    for module in (package, executor, loader, default):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


class Served:
    def load_weights(self, weights: Any) -> None:
        self.weights = dict(weights)


def test_the_plugin_of_vllm_streams_the_weights_of_a_commit(
    store: Store, tmp_path: Path, loaders: dict[str, Any]
) -> None:
    from ckptstore.interop.vllm import register

    register()
    model = llama()
    model.save_pretrained(tmp_path / "out")
    snapshot = store.adopt(tmp_path / "out", step=1)
    assert write_configuration(snapshot, tmp_path / "served", pointer=True) == [
        "config.json",
        "generation_config.json",
    ]
    assert (tmp_path / "served" / HOLLOW_POINTER).exists()
    assert transformers.AutoConfig.from_pretrained(tmp_path / "served").hidden_size == 64
    url = {"url": url_of(snapshot), "key": "model"}
    by_url = LoadConfig(model_loader_extra_config=url)  # two loaders are made of one, as vLLM may
    for place, given in ((tmp_path / "served", LoadConfig()), *[(tmp_path / "out", by_url)] * 2):
        served, config = Served(), types.SimpleNamespace(model=str(place))
        loader = loaders["ckptstore"](given)
        loader.download_model(config)
        loader.load_weights(served, config)
        wanted = model.state_dict()
        assert served.weights.keys() == wanted.keys()
        assert all(torch.equal(served.weights[name], wanted[name]) for name in wanted)
    source = DefaultModelLoader.Source(str(tmp_path / "served"), prefix="language_model.")
    assert all(
        name.startswith("language_model.") for name, _ in loader._get_weights_iterator(source)
    )


def test_the_plugin_of_vllm_says_what_it_lacks(
    store: Store, tmp_path: Path, loaders: dict[str, Any]
) -> None:
    from ckptstore.interop.vllm import register

    register()
    loader = loaders["ckptstore"](LoadConfig())
    with pytest.raises(NotFound, match="write_configuration"):
        loader.download_model(types.SimpleNamespace(model=str(tmp_path)))
    with pytest.raises(ValueError, match="Unexpected"):
        loaders["ckptstore"](LoadConfig(model_loader_extra_config={"num": 1}))
    url = {"url": url_of(store.commit({"net": {"w": torch.ones(3)}}, step=1))}
    loader = loaders["ckptstore"](LoadConfig(model_loader_extra_config=url))
    with pytest.raises(NotFound, match="give key"):
        loader.load_weights(Served(), types.SimpleNamespace(model=str(tmp_path)))


def test_the_example_runs_as_it_is() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "examples" / "trainers" / "track_and_serve.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    assert "21 tensors through fsspec" in done.stdout
