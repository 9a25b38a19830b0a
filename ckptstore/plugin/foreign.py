"""Files of other programs, without running what they hold."""

from ckptstore.foreign.magic import (
    GGUF_MAGIC,
    HDF5_MAGIC,
    LEGACY_MAGIC,
    NPY_MAGIC,
    SAFETENSORS_HEADER_BYTES_MAX,
    TAR_MAGIC,
    TAR_MAGIC_AT,
    ZIP_MAGIC,
)
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
