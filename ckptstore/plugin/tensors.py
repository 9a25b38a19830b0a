"""Tensors in memory: their dtypes, shards and staging copies."""

from ckptstore.state import tensors
from ckptstore.state.checkpointable import is_checkpointable, is_whole
from ckptstore.state.composites import MARK, jagged_of, nested_of
from ckptstore.state.shards import (
    empty_local,
    held_of,
    is_distributed,
    is_dtensor,
    shape_of,
    with_local,
)
from ckptstore.state.staging import copy_task, prepare
from ckptstore.state.staging_buffers import Buffer, BufferPool, Copy, default_budget
from ckptstore.state.tensors import (
    DTYPES,
    FLOATS,
    Destination,
    TensorSource,
    converts,
    destination,
    dtype_of,
    empty,
    read_range,
)
