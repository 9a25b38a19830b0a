"""Which checkpoints does torchtitan have beside commits? Directories `step-N`: with pointers, with
DCP's files, with safetensors for other programs."""

import os
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch.distributed.checkpoint
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from ckptstore.plugin.pointers import is_pointer
from ckptstore.plugin.ranks import leads_all

dcp: Any = torch.distributed.checkpoint
"""Asked for its functions when they are called: others may have replaced them."""


def step_directories(folder: str) -> dict[int, str]:
    """The directories `step-N` in `folder`, by N."""
    if "://" in folder or not os.path.isdir(folder):
        return {}
    found = [path for path in Path(folder).glob("step-*") if path.name[5:].isdecimal()]
    return {int(path.name[5:]): str(path) for path in found if path.is_dir()}


def is_dcp(directory: str) -> bool:
    return os.path.isfile(os.path.join(directory, ".metadata")) and not is_pointer(directory)


def write_hf(adapter: Any, weights: Mapping[str, Any], directory: str) -> None:
    """Write safetensors files as other programs of Hugging Face read them."""
    files = HuggingFaceStorageWriter(
        path=directory,
        save_distributed=True,
        fqn_to_index_mapping=adapter.fqn_to_index_mapping,
        enable_consolidation=True,
    )
    dcp.save(adapter.to_hf(dict(weights)), storage_writer=files)
    if leads_all():
        rmtree(os.path.join(directory, "sharded"), ignore_errors=True)


def load_hf(adapter: Any, model: Any, directory: str, quantized: bool) -> None:
    if adapter is None:
        raise ValueError("initial_load_in_hf needs a model that has an sd_adapter; it has none")
    state = adapter.to_hf(model.state_dict())
    dcp.load(state, storage_reader=adapter.get_hf_storage_reader(directory, quantized))
    model.load_state_dict(adapter.from_hf(state))


def load_dcp(weights: Any, others: Mapping[str, Any], directory: str) -> None:
    """Restore a directory that torchtitan wrote with DCP: the weights are at the top there."""
    flat = {**others, **weights.state_dict()}
    dcp.load(flat, checkpoint_id=directory)
    weights.load_state_dict(flat)
