"""Serve commits with vLLM: the load format `ckptstore` (docs/serving.md).

    vllm serve DIRECTORY --load-format ckptstore

DIRECTORY has the model's configuration and a pointer file of a commit, as
`ckptstore.interop.serving.write_configuration(snap, DIRECTORY, pointer=True)` writes it. Weights
are streamed from the store and verified; no file is written for them.

vLLM calls `register` itself (entry point `vllm.general_plugins`).
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from copy import copy
from typing import TYPE_CHECKING, Any

from ckptstore import open_pointer
from ckptstore.errors import NotFound
from ckptstore.interop.fsspec import open_url
from ckptstore.plugin.pointers import HOLLOW_POINTER
from ckptstore.plugins.adopt.commit_files import tensor_name
from ckptstore.plugins.adopt.manifest import MODEL

if TYPE_CHECKING:
    import torch

    from ckptstore.plugin.snapshots import Snapshot

LOAD_FORMAT = "ckptstore"
OPTIONS = ("url", "key")
"""What `--model-loader-extra-config` may have: the URL of a commit instead of a pointer file, and
the key with the weights."""


def register() -> None:
    """Register the load format with vLLM."""
    from vllm.model_executor.model_loader import register_model_loader

    register_model_loader(LOAD_FORMAT)(_loader_class())


def _loader_class() -> Any:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class CkptStoreModelLoader(DefaultModelLoader):  # type: ignore[misc]  # vllm has no types here
        """vLLM's loader with the weights of a commit in the place of those in files."""

        def __init__(self, load_config: Any) -> None:
            given = dict(load_config.model_loader_extra_config or {})
            self._own = {name: given.pop(name) for name in OPTIONS if name in given}
            own_config = copy(load_config)  # vLLM makes other loaders of the same
            own_config.model_loader_extra_config = given
            super().__init__(own_config)

        def download_model(self, model_config: Any) -> None:
            """The commit is there, or this raises `NotFound`."""
            _open(model_config.model, self._own).close()

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, "torch.Tensor"]]:
            # The parent computes from this how long the weights took.
            self.counter_before_loading_weights: float = time.perf_counter()
            for name, tensor in weights_of(source.model_or_path, self._own):
                yield source.prefix + name, tensor

    return CkptStoreModelLoader


def weights_of(directory: str, options: dict[str, str]) -> Iterator[tuple[str, "torch.Tensor"]]:
    """The weights of the commit that `options` or the pointer file in `directory` name, one after
    the other, read and verified."""
    with ExitStack() as stack:
        snapshot = stack.enter_context(_open(directory, options))
        key = options.get("key", MODEL)
        keys = snapshot.keys()
        if key not in keys:
            raise NotFound(
                f"commit {snapshot.id[:12]} has no key {key!r}; it has {', '.join(keys)}: give key"
            )
        for leaf in snapshot.only([key]).leaves():
            if leaf.kind == "tensor":
                yield tensor_name(leaf.path), snapshot.read(leaf.path)


def _open(directory: str, options: dict[str, str]) -> "Snapshot":
    if "url" in options:
        return open_url(options["url"])
    try:
        return open_pointer(f"{directory}/{HOLLOW_POINTER}")
    except NotFound as error:
        raise NotFound(
            f"{directory} names no commit: {error}; write_configuration(snap, directory, "
            "pointer=True) writes the pointer, or give the commit's URL with "
            '--model-loader-extra-config \'{"url": "ckptstore://STORE@REF"}\''
        ) from error
