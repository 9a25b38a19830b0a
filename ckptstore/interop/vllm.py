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
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptstore import open_pointer
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.interop.fsspec import open_url
from ckptstore.plugin.pointers import HOLLOW_POINTER
from ckptstore.plugin.snapshots import contents_of
from ckptstore.plugins.adopt.commit_files import tensor_name
from ckptstore.plugins.adopt.manifest import MODEL
from ckptstore.plugins.reports.difference import compare

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


class WeightPatch(NamedTuple):
    """The elements of one tensor that changed: the fields of vLLM's `CheckpointWeightPatch`.

    `indices` count the elements of the whole tensor, row by row; `values` are the new ones.
    """

    name: str
    shape: tuple[int, ...]
    dtype: "torch.dtype"
    values: "torch.Tensor"
    indices: "torch.Tensor"


def weight_patches(
    before: "Snapshot", after: "Snapshot", key: str = MODEL
) -> Iterator[WeightPatch]:
    """The elements in which the weights of two commits differ, bit by bit, tensor by tensor.

    A tensor whose chunks are equal is not read; of the others both are, one after the other.

    Args:
        before: The commit whose weights the engine has.
        after: The commit that it is to have.
        key: The key with the weights.

    Raises:
        InvalidInput: vLLM cannot patch it: a leaf is new, gone, no float, of another shape or
            dtype, or has a NaN among the new values. Load all of `after` instead.
        NotFound: A commit has no such key.

    Example:
        >>> patches = [CheckpointWeightPatch(*patch) for patch in weight_patches(old, new)]
        >>> load_checkpoint_weight_patches(model, patches)
    """
    found = compare(*({key: contents_of(each).tree(key)} for each in (before, after)))
    for path in found.thinned:
        raise _not_patched(path, "it was thinned away")
    for change in found.changes:
        old, new = change.before, change.after
        if old is None or new is None or old.type != new.type:
            raise _not_patched(change.path, f"it was {_told(old)} and is {_told(new)}")
        yield _patch(change.path, before.read(change.path), after.read(change.path))


def _patch(path: str, old: Any, new: Any) -> WeightPatch:
    import torch

    if not isinstance(new, torch.Tensor) or not new.is_floating_point():
        raise _not_patched(path, "it is no tensor of floats")
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[new.itemsize]
    flat = new.reshape(-1)
    differ = old.reshape(-1).view(bits) != flat.view(bits)
    indices = differ.nonzero().reshape(-1)
    values = flat.view(bits)[indices].view(flat.dtype)  # torch 2.6 indexes no 8-bit floats
    if values.isnan().any():
        raise _not_patched(path, "a new value is NaN, by which vLLM marks what stays")
    small = indices.to(torch.int32) if len(flat) < 1 << 31 else indices
    return WeightPatch(tensor_name(path), tuple(new.shape), new.dtype, values, small)


def _told(leaf: Any) -> str:
    return "not there" if leaf is None else str(leaf.type)


def _not_patched(path: str, why: str) -> InvalidInput:
    return InvalidInput(f"{path} cannot be patched: {why}; load the whole commit instead")


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
