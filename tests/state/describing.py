"""What an object is, bit for bit and type for type, as lines of text: equal lines, equal objects.

Written without any code of ckptstore's, so that a mistake there cannot hide itself, and comparable
across processes. Tensors that have one address, shape and strides are said to be tied, by number.
"""

import ctypes
import dataclasses
import io
import random
import struct
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator
from enum import Enum
from hashlib import sha256
from typing import Any

import numpy as np
import torch


def describe(value: Any) -> str:
    """Every fact about `value`, one a line."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # torch says that quantized and nested tensors are in beta whenever one looks at them
        return "\n".join(_Describer().lines(value, "·"))


def digest(value: Any) -> str:
    """A short name for `describe(value)`."""
    return sha256(describe(value).encode()).hexdigest()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a strided tensor in row-major order, read from its storage by numpy, whatever
    torch can do with its dtype."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.numel():
        return b""
    storage = tensor.untyped_storage()
    memory = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    elements: Any = np.frombuffer(memory, np.uint8)[tensor.storage_offset() * tensor.itemsize :]
    width = tensor.itemsize
    strides = (*(stride * width for stride in tensor.stride()), 1)
    return np.lib.stride_tricks.as_strided(elements, (*tensor.shape, width), strides).tobytes()


class _Describer:
    def __init__(self) -> None:
        self._seen: dict[Any, int] = {}
        self._alive: list[Any] = []

    def lines(self, value: Any, path: str) -> Iterator[str]:
        yield f"{path} {type(value).__module__}.{type(value).__qualname__} {self._own(value)}"
        for name, child in (*self._below(value), *_beside(value).items()):
            yield from self.lines(child, f"{path}/{name}")

    def _own(self, value: Any) -> str:
        """What `value` is beside its children."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        match value:
            case Enum():
                return repr(value)
            case np.ndarray() | np.generic():
                return (
                    f"{value.dtype.descr if value.dtype.names else value.dtype!r} "
                    f"{value.shape} "
                    f"{value.tobytes().hex()}"
                )
            case bool() | int() | None:
                return (
                    repr(value)
                    if type(value) is not int or value.bit_length() < 10_000
                    else hex(value)
                )
            case float():
                return struct.pack(">d", value).hex()
            case complex():
                return struct.pack(">2d", value.real, value.imag).hex()
            case defaultdict():
                return f"{len(value)} {value.default_factory}"
            case deque():
                return f"{len(value)} {value.maxlen}"
            case io.BytesIO():
                return f"{value.getvalue().hex()} {value.tell()}"
            case set() | frozenset():
                return " ".join(sorted(describe(item) for item in value))
            case torch.Generator():
                return f"{value.device} {raw_bytes(value.get_state()).hex()}"
            case dict() | list() | tuple():
                return str(len(value))
        if dataclasses.is_dataclass(value) or isinstance(
            value, random.Random | np.random.Generator | np.random.RandomState
        ):
            return ""
        if type(value).__module__.startswith("tests."):
            return ""
        return repr(value)

    def _below(self, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            yield from _parts(value)
        elif isinstance(value, dict):
            for i, (key, child) in enumerate(value.items()):
                yield f"{i}.key", key
                yield f"{i}", child
            if hasattr(value, "_metadata"):
                yield "_metadata", value._metadata
        elif isinstance(value, list | tuple | deque) and not isinstance(value, torch.Size):
            yield from ((str(i), child) for i, child in enumerate(value))
        elif isinstance(value, random.Random):
            yield "state", value.getstate()
        elif isinstance(value, np.random.Generator):
            yield "state", value.bit_generator.state
            yield "seeds", value.bit_generator.seed_seq.state
        elif isinstance(value, np.random.RandomState):
            yield "state", value.get_state(legacy=False)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from (
                (field.name, getattr(value, field.name)) for field in dataclasses.fields(value)
            )
        elif type(value).__module__.startswith("tests.") and hasattr(value, "data"):
            yield "data", value.data

    def _tensor(self, tensor: torch.Tensor) -> str:
        shape = [] if tensor.is_nested else list(tensor.shape)
        facts = f"{tensor.dtype} {shape} {tensor.layout} {tensor.requires_grad} {tensor.device}"
        if (
            tensor.layout != torch.strided
            or tensor.is_nested
            or hasattr(tensor, "__tensor_flatten__")
        ):
            return facts
        if tensor.is_quantized:
            return f"{facts} {self._tie(tensor)}"
        data = raw_bytes(tensor)
        return (
            f"{facts} {self._tie(tensor) if data else ''} "
            f"{data.hex() if len(data) < 64 else sha256(data).hexdigest()}"
        )

    def _tie(self, tensor: torch.Tensor) -> str:
        # An address is nobody else's only as long as its tensor lives.
        self._alive.append(tensor)
        memory = (
            tensor.data_ptr(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        return f"memory {self._seen.setdefault(memory, len(self._seen))}"


def _beside(value: Any) -> dict[str, Any]:
    """What an instance holds beside what it is."""
    if hasattr(value, "__tensor_flatten__") or isinstance(value, type | Enum):
        return {}
    of_these = dict | tuple | torch.Tensor | io.BytesIO | random.Random
    if not isinstance(value, of_these) and not dataclasses.is_dataclass(value):
        return {}
    known = {"_metadata", "gauss_next"}
    if dataclasses.is_dataclass(value):
        known |= {field.name for field in dataclasses.fields(value)}
    held = getattr(value, "__dict__", {})
    return {f".{name}": each for name, each in sorted(held.items()) if name not in known}


def _parts(tensor: Any) -> Iterator[tuple[str, Any]]:
    """What a tensor that is more than one block of memory consists of."""
    if hasattr(tensor, "__tensor_flatten__") and not tensor.is_nested:
        tensor = tensor.detach()
        names, context = tensor.__tensor_flatten__()
        yield "context", repr(context)
        yield from ((name, getattr(tensor, name)) for name in names)
    elif tensor.is_nested:
        tensor = tensor.detach()
        yield "buffer", tensor.values()
        yield "parts", [(list(each.shape), raw_bytes(each)) for each in tensor.unbind()]
        if tensor.layout == torch.jagged:
            yield from (
                ("offsets", tensor.offsets()),
                ("lengths", tensor.lengths()),
                ("ragged", tensor._ragged_idx),
            )
    elif tensor.layout == torch.sparse_coo:
        tensor = tensor.detach()
        yield from (
            ("coalesced", tensor.is_coalesced()),
            ("indices", tensor._indices()),
            ("values", tensor._values()),
        )
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        tensor = tensor.detach()
        yield from (
            ("rows", tensor.crow_indices()),
            ("columns", tensor.col_indices()),
            ("values", tensor.values()),
        )
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        tensor = tensor.detach()
        yield from (
            ("columns", tensor.ccol_indices()),
            ("rows", tensor.row_indices()),
            ("values", tensor.values()),
        )
    elif tensor.is_quantized:
        yield from _quantized_parts(tensor)


def _quantized_parts(tensor: Any) -> Iterator[tuple[str, Any]]:
    yield "scheme", tensor.qscheme()
    if tensor.qscheme() == torch.per_tensor_affine:
        yield from (("scale", tensor.q_scale()), ("zero", tensor.q_zero_point()))
    else:
        yield from (
            ("scales", tensor.q_per_channel_scales()),
            ("zeros", tensor.q_per_channel_zero_points()),
        )
        yield "axis", tensor.q_per_channel_axis()
    per_byte = {torch.quint4x2: 2, torch.quint2x4: 4}.get(tensor.dtype)
    if per_byte is None:
        yield "integers", tensor.int_repr()
        return
    start = tensor.storage_offset() // per_byte
    storage = tensor.untyped_storage()
    yield "bytes", bytes(storage[start : start + -(-tensor.numel() // per_byte)])
