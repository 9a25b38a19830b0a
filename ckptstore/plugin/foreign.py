"""Files of other programs, without running what they hold."""

from ckptstore.foreign.kinds import check_comes_back, file_kind, is_safetensors, load_torch
from ckptstore.foreign.loaded import (
    DCP_METADATA,
    SNAPSHOT_METADATA,
    Piece,
    Placeholders,
    as_app_state,
    dtype_from,
    foreign_metadata,
    inside,
    located,
    read_json,
    shape_of,
)
from ckptstore.foreign.magic import (
    GGUF_MAGIC,
    LEGACY_MAGIC,
    NPY_MAGIC,
    SAFETENSORS_HEADER_BYTES_MAX,
    ZIP_MAGIC,
)
from ckptstore.foreign.plain_pickles import refused_by_torch, save
from ckptstore.foreign.sources import (
    Entry,
    Joined,
    Strided,
    Window,
    check_tiling,
    read_range,
    shape_around,
)
from ckptstore.foreign.strides import can_be_strided, gaps, is_row_major, scatter, span_bytes
