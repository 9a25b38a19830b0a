"""From a training to a model that answers, and back from the model to its run.

A small Llama is saved by transformers, adopted with a link to its MLflow run, loaded from the
commit without a file of weights, and read by another library through fsspec. Needs transformers
and mlflow-skinny.
"""

import os
import tempfile
from pathlib import Path

os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "DO_NOT_TRACK": "true"}

import fsspec
import mlflow
import torch
from safetensors.torch import load
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ckptstore
from ckptstore.interop import trackers
from ckptstore.interop.fsspec import CheckpointFileSystem, open_url, url_of
from ckptstore.interop.mlflow import log_commit
from ckptstore.interop.serving import from_pretrained

# As the entry point does where ckptstore is installed.
fsspec.register_implementation("ckptstore", CheckpointFileSystem, clobber=True)

with tempfile.TemporaryDirectory() as folder:
    root = Path(folder)
    mlflow.set_tracking_uri(f"file://{root}/mlruns")
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    model = LlamaForCausalLM(config).eval()
    tokens = torch.tensor([[1, 5, 9, 77]])

    with ckptstore.open(root / "checkpoints") as store:
        # A step of training: save, adopt with the run's link, and tell the run.
        with mlflow.start_run() as run:
            model.save_pretrained(root / "out")
            metrics = {"eval_loss": 0.31}
            snap = store.adopt(root / "out", step=500, metrics=metrics, links=trackers.links())
            log_commit(snap, "last")

        # Serve: no directory of weights, they are mapped from the store.
        served = from_pretrained(store.checkout("best:eval_loss"), AutoModelForCausalLM)
        with torch.no_grad():
            assert torch.equal(served(tokens).logits, model(tokens).logits)

        # Any library that reads files.
        with fsspec.open(url_of(snap, "model.safetensors")) as file:
            print(f"{len(load(file.read()))} tensors through fsspec")

        # Both ways: from the commit to its run, and from the run to its commit.
        link = store.checkout(500).links["mlflow"]
        assert link == f"runs:/{run.info.run_id}"
        assert [found.id for found in trackers.commits_of(store, link)] == [snap.id]
    tag = mlflow.get_run(run.info.run_id).data.tags["ckptstore.last"]
    with open_url(tag) as opened:
        assert opened.id == snap.id
        print(f"step {opened.step} of {sorted(opened.links)}: found from its run")
