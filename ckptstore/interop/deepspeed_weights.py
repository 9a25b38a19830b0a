"""The fp32 weights of a DeepSpeed checkpoint, without its optimizer states. Needs no DeepSpeed.

ZeRO keeps the weights that the optimizer updates as flat vectors, divided among the ranks. Stages 1
and 2 cut the vector of each parameter group into one piece per rank. Stage 3 cuts each parameter,
padded to a multiple of the ranks, so that a rank's vector has a piece of every parameter. Names and
shapes, buffers and frozen parameters are in the files of the model's states.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from ckptstore.errors import InvalidInput
from ckptstore.plugin.snapshots import Snapshot

RECORD = "deepspeed"
"""The key of what the commit says of itself; the other keys are names of files."""

_STATES = "optimizer_state_dict"
_PIECES = "single_partition_of_fp32_groups"
_FLAT = "fp32_flat_groups"
_PADDINGS = "param_alignment_paddings"
_NAMED = ("buffer_names", "param_shapes", "shared_params", "frozen_param_shapes")
_FROZEN = "frozen_param_fragments"
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


def fp32_weights(snapshot: Snapshot, *, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """The whole weights in fp32, by the names of the model's `state_dict`.

    Reads what ZeRO keeps of the weights and nothing of the optimizer's moments, which are two
    thirds of a checkpoint.

    Args:
        snapshot: A commit of `StoreCheckpointEngine`, of ZeRO stage 1, 2 or 3.
        exclude_frozen: Leave parameters out that are not trained.

    Raises:
        InvalidInput: DeepSpeed did not make the commit, or not with ZeRO, or it has model or expert
            parallel files.
        Corrupt: A chunk that is read is damaged.

    Example:
        >>> model.load_state_dict(fp32_weights(store.checkout("best:loss")))
    """
    check_made_by_deepspeed(snapshot)
    shards = _in_order(snapshot, _OPTIMIZER)
    states = _in_order(snapshot, _MODEL)
    vectors = [_vectors(snapshot, name) for name in shards]
    first = snapshot.state_dict(states[0], select=_NAMED)
    shapes = first.get("param_shapes")
    if not vectors or not shapes:
        raise InvalidInput(
            f"commit {snapshot.id[:12]} has no ZeRO states: snapshot.state_dict({states[0]!r}) "
            'has the weights under "module"'
        )
    found = {}
    for name in first.get("buffer_names") or ():
        buffer = snapshot.read(f"{states[0]}/module/{name}")
        found[name] = buffer.float() if buffer.is_floating_point() else buffer
    if not exclude_frozen and first.get("frozen_param_shapes"):
        found.update(_frozen(snapshot, states, first["frozen_param_shapes"]))
    whole = _divided_by_parameter if _FLAT in vectors[0] else _divided_by_group
    found.update(whole(shapes, vectors))
    for name, other in (first.get("shared_params") or {}).items():
        if other in found:
            found[name] = found[other]
    return found


def check_made_by_deepspeed(snapshot: Snapshot) -> None:
    """Raise `InvalidInput` if the commit is another trainer's."""
    keys = snapshot.keys()
    if RECORD not in keys:
        raise InvalidInput(
            f"commit {snapshot.id[:12]} was not made by StoreCheckpointEngine: it has "
            f"{', '.join(keys)}"
        )


def file_names(snapshot: Snapshot) -> list[str]:
    """The names of the files that DeepSpeed has handed over."""
    keys = snapshot.keys()
    return [key for key in keys if key != RECORD]


def _in_order(snapshot: Snapshot, pattern: re.Pattern[str]) -> list[str]:
    """The files of this kind, by rank."""
    found = {}
    for name in file_names(snapshot):
        match = pattern.fullmatch(name)
        if "_expert_" in name or (match and int(match[2])):
            raise InvalidInput(
                f"commit {snapshot.id[:12]} has {name}, of a model that is divided among ranks: "
                "write_files writes the files, and DeepSpeed's ds_to_universal.py puts them "
                "together"
            )
        if match:
            found[int(match[1] or 0)] = name
    return [found[rank] for rank in sorted(found)]


def _vectors(snapshot: Snapshot, name: str) -> dict[str, Any]:
    wanted = [f"{_STATES}/{each}" for each in (_PIECES, _FLAT, _PADDINGS)]
    return dict(snapshot.state_dict(name, select=wanted)[_STATES])


def _divided_by_group(
    shapes: Sequence[Mapping[str, Sequence[int]]], vectors: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stages 1 and 2: a group's vector is that of all ranks in a row."""
    paddings = vectors[0].get(_PADDINGS)
    for group, named in enumerate(shapes):
        vector = torch.cat([each[_PIECES][group] for each in vectors])
        between = paddings[group] if paddings else [0] * len(named)
        start = 0
        for (name, shape), padding in zip(named.items(), between, strict=True):
            yield name, vector.narrow(0, start, prod(shape)).view(*shape)
            start += prod(shape) + padding


def _divided_by_parameter(
    shapes: Sequence[Mapping[str, Sequence[int]]], vectors: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stage 3: each rank's vector has its piece of every parameter."""
    rows = [torch.cat(list(each[_FLAT])) for each in vectors]
    start = 0
    for name, shape in ((name, shape) for named in shapes for name, shape in named.items()):
        length = -(-prod(shape) // len(rows))
        pieces = torch.cat([row.narrow(0, start, length) for row in rows])
        yield name, pieces[: prod(shape)].view(*shape)
        start += length


def _frozen(
    snapshot: Snapshot, states: Sequence[str], shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Frozen parameters: whole in the one file, or a piece in the file of each rank."""
    for name, shape in shapes.items():
        pieces = [snapshot.read(f"{state}/{_FROZEN}/{name}").flatten() for state in states]
        yield name, torch.cat(pieces)[: prod(shape)].view(*shape)
