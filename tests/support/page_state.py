"""What a page of the docs has at hand before its first block runs: names, files and servers.

Every page that shows Python has a small training: `model` (with `embedding`, `encoder` and
`layers`), `optimizer`, `app_state`, `train_one_step()`, `step`, `loss`, and the modules `torch` and
`ckptstore`. A page may have more, by the function below that bears its name. The current directory
is empty but for what that function puts there.
"""

import os
import signal
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import ckptstore
from demo import bugs
from tests.support.servers.s3 import environment_of, moto_server

Names = dict[str, Any]


def training() -> Names:
    """A model, its optimizer, and a function that trains it by one step."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(512, 64),
            "encoder": torch.nn.Linear(64, 64),
            "layers": torch.nn.ModuleList([torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)]),
        }
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    rows, wanted = torch.arange(32), torch.randn(32, 64)

    def train_one_step() -> float:
        x = model["encoder"](model["embedding"](rows))
        for layer in model["layers"]:
            x = x + torch.tanh(layer(x))
        loss = (x - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    app_state = {
        "model": model,
        "optimizer": optimizer,
        "random": ckptstore.RNGState(),
        "progress": {"step": 0},
    }
    return {
        "app_state": app_state,
        "ckptstore": ckptstore,
        "loss": 0.5,
        "model": model,
        "optimizer": optimizer,
        "step": 1000,
        "torch": torch,
        "train_one_step": train_one_step,
    }


def environment(stack: ExitStack, **variables: str) -> None:
    """Set variables until the page has been read."""
    stack.enter_context(patch.dict(os.environ, variables))


def commits(names: Names, steps: range = range(100, 1001, 100)) -> ckptstore.Store:
    """The store `checkpoints` with commits of a short training, closed with the page."""
    store = ckptstore.open("checkpoints")
    for step in steps:
        loss = names["train_one_step"]()
        names["app_state"]["progress"]["step"] = step
        store.commit(names["app_state"], step=step, metrics={"loss": loss, "val_loss": loss})
    return store


def async_page(names: Names, stack: ExitStack) -> None:
    names |= {"signal": signal, "first": 1, "last": 20}


def cli_page(names: Names, stack: ExitStack) -> None:
    """The runs `main` and `tune`."""
    commits(names).close()
    with ckptstore.open("checkpoints", run="tune") as store:
        for step in (10, 20):
            loss = names["train_one_step"]()
            store.commit(names["app_state"], step=step, metrics={"val_loss": loss})


def signing_page(names: Names, stack: ExitStack) -> None:
    """Some commits."""
    commits(names).close()


def stories_page(names: Names, stack: ExitStack) -> None:
    """The trainings of `python -m demo.bugs`."""
    bugs.main("checkpoints", lambda line: None)
    environment(stack, CKPTSTORE="checkpoints")


def data_loaders_page(names: Names, stack: ExitStack) -> None:
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # by torchdata


def distributed_page(names: Names, stack: ExitStack) -> None:
    """A state with the place in its data, which is each rank's own."""
    names["state"] = {
        "model": names["model"],
        "optimizer": names["optimizer"],
        "rng": ckptstore.RNGState(),
        "data": {"place": 0},
    }
    names["Ranks"] = ckptstore.Ranks


def formats_page(names: Names, stack: ExitStack) -> None:
    """Directories as Hugging Face has them, a file of `torch.save`, a training run."""
    from safetensors.torch import save_file

    stack.enter_context(commits(names)).tag("best", "best:loss")
    weights = {name: value.clone() for name, value in names["model"].state_dict().items()}
    Path("meta-llama").mkdir()
    save_file(weights, "meta-llama/model.safetensors")
    Path("meta-llama/config.json").write_text("{}")
    Path("out/checkpoint-500").mkdir(parents=True)
    save_file(weights, "out/checkpoint-500/adapter_model.safetensors")
    Path("out/checkpoint-500/trainer_state.json").write_text("{}")
    torch.save({"model": weights, "epoch": 3}, "epoch3.pt")
    environment(stack, CKPTSTORE="checkpoints")
    names["store"] = stack.enter_context(ckptstore.open("checkpoints"))


def fsspec_page(names: Names, stack: ExitStack) -> None:
    names["store"] = stack.enter_context(commits(names))


def gc_page(names: Names, stack: ExitStack) -> None:
    names["store"] = stack.enter_context(commits(names))
    environment(stack, CKPTSTORE="checkpoints")


def delete_a_run_page(names: Names, stack: ExitStack) -> None:
    """Two runs beside `main`."""
    gc_page(names, stack)
    for run in ("noisy", "abandoned"):
        with ckptstore.open("checkpoints", run=run) as store:
            for step in (100, 200, 300):
                names["train_one_step"]()
                store.commit(names["app_state"], step=step)


def compact_page(names: Names, stack: ExitStack) -> None:
    gc_page(names, stack)


def values_page(names: Names, stack: ExitStack) -> None:
    names["store"] = stack.enter_context(commits(names, range(100, 101)))


def migrating_page(names: Names, stack: ExitStack) -> None:
    """Folders and state dicts as the scripts before had them."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file

    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # by DCP, in one process
    warnings.filterwarnings("ignore", ".*torch.jit.* is deprecated")  # in TorchSnapshot
    Path("ckpt").mkdir()
    names |= {
        "Path": Path,
        "dcp": dcp,
        "epochs": 3,
        "load_file": load_file,
        "resume_from": None,
        "save_file": save_file,
        "state_dict": {"model": names["model"].state_dict()},
        "train_one_epoch": names["train_one_step"],
    }


def mirrors_page(names: Names, stack: ExitStack) -> None:
    """The run `main`, and `run7` in the store on another disk."""
    stack.enter_context(commits(names)).tag("best", "best:loss")
    with ckptstore.open("nas/run7", run="run7") as other:
        other.commit(names["app_state"], step=5000)
    environment(stack, CKPTSTORE="checkpoints")
    names["store"] = stack.enter_context(ckptstore.open("checkpoints"))


def partial_page(names: Names, stack: ExitStack) -> None:
    """The commit that the page reads, and the models it restores into."""
    parts = dict(names["model"])

    def model(**more: torch.nn.Module) -> torch.nn.ModuleDict:
        made = torch.nn.ModuleDict({**parts, **more})
        made.register_parameter("w", torch.nn.Parameter(torch.ones(8, 32, 4)))
        return made

    committed = model(old=torch.nn.Linear(64, 64))
    state = {"model": committed, "ema": committed.state_dict(), "epoch": 3}
    store = stack.enter_context(ckptstore.open("checkpoints"))
    names["app_state"] = {**state, "data": {"place": 0}}
    names |= {
        "Model": lambda: model(old=torch.nn.Linear(64, 64)),
        "model": committed,
        "renamed": model(new=torch.nn.Linear(64, 64)),
        "snap": store.commit(state, step=1000),
        "state": state,
        "store": store,
        "tensor": torch.empty(128, 64),
        "token_ids": torch.tensor([3, 5]),
        "wrapped": torch.nn.ModuleDict({"backbone": model(old=torch.nn.Linear(64, 64))}),
    }


def repair_page(names: Names, stack: ExitStack) -> None:
    """A store and its mirror."""
    with commits(names, range(100, 301, 100)) as store:
        store.push("nas/checkpoints", create=True)


def engines_page(names: Names, stack: ExitStack) -> None:
    """A store with a commit."""
    stack.enter_context(commits(names))


def shared_store_page(names: Names, stack: ExitStack) -> None:
    """A server with the bucket that the page names, found by the environment as botocore has it."""
    import boto3

    server = stack.enter_context(moto_server())
    environment(
        stack,
        **environment_of(server),
    )
    boto3.client("s3").create_bucket(Bucket="bucket")


def torchft_page(names: Names, stack: ExitStack) -> None:
    """A store, and two peers that serve a state."""
    from ckptstore.interop.torchft import StoreTransport

    state = {"user": {"default": names["model"].state_dict()}}
    peers = [StoreTransport(timedelta(seconds=60)) for _ in range(2)]
    for peer in peers:
        stack.callback(peer.shutdown)
        peer.send_checkpoint([1], 1000, state, timedelta(seconds=60))
    names |= {
        "metadata_a": peers[0].metadata(),
        "metadata_b": peers[1].metadata(),
        "my_state_dict": names["model"].state_dict,
        "store": stack.enter_context(commits(names)),
        "timedelta": timedelta,
    }


def trackers_page(names: Names, stack: ExitStack) -> None:
    names["store"] = stack.enter_context(commits(names))


def prepared(page: Path, stack: ExitStack) -> Names:
    """The names that a page starts with; what must be undone is left to `stack`."""
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(1)  # the model is small
    names = training()
    own: Callable[[Names, ExitStack], None] | None
    if own := globals().get(f"{page.stem.replace('-', '_')}_page"):
        own(names, stack)
    return names
