"""What torch.save, DCP and TorchSnapshot wrote, loaded without trust in it."""

from ckptstore.foreign.kinds import check_comes_back, file_kind, is_safetensors, load_torch
from ckptstore.foreign.loaded import (
    DCP_METADATA,
    SNAPSHOT_METADATA,
    FileBytes,
    Placeholders,
    as_app_state,
    dtype_from,
    foreign_metadata,
    inside,
    located,
    read_json,
    shape_of,
)
from ckptstore.foreign.plain_pickles import refused_by_torch, save
