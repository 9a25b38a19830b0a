"""Tensors in memory: their dtypes, shards and staging copies."""

from ckptstore.state import tensors
from ckptstore.state.shards import empty_local, held_of, is_distributed, is_dtensor, with_local
from ckptstore.state.staging import copy_task, prepare
from ckptstore.state.staging_buffers import Buffer, BufferPool, Copy, default_budget
from ckptstore.state.sums import add_up, flat_tensor
from ckptstore.state.tensors import Destination, TensorSource, dtype_of
