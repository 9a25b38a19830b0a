"""How are a tensor's raw bytes read and written: dtypes by name, memory views, any byte range?

Raw bytes are the elements in row-major order, little-endian (docs/format.md §3). They are moved as
integers, since some dtypes (bits, sub-byte integers, some fp8) have neither `copy_` nor `view`.

Copies that the caller waits for go through the device stream that is current when a source or
destination is made, on any copying thread: after earlier launches, before later ones.

Floats are restored as other floats on request (`destination`). Integers, booleans, complex numbers
and packed floats keep their dtype.
"""

import ctypes
import math
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from math import prod
from typing import Any, Literal, TypeAlias

import torch

from ckptstore.core.model import Shape
from ckptstore.errors import InvalidInput
from ckptstore.state import rounding as _fast_rounding  # noqa: F401 (registers itself)
from ckptstore.state.leaf_sources import StagedSource

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (getattr(torch, name) for name in dir(torch))
    if isinstance(dtype, torch.dtype)
}
"""Every dtype that this torch has, by its name."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

QUANTIZED = frozenset(dtype for name, dtype in DTYPES.items() if name.startswith(("qint", "quint")))
"""Dtypes whose tensors carry scales; their integers are stored, under an integer dtype."""

_EXPERIMENTAL = {"complex32": torch.int32, "bcomplex32": torch.int32}
"""By name, dtypes of which torch warns when a tensor is made, and one of their width to make it
of."""

_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_HUGE_PAGE = 2 << 20

ALONE_ELEMENTS = 1 << 14
"""At most so many elements torch reduces on the calling thread alone: threads of a pool that each
call more threads wait for each other."""


def dtype_of(name: str) -> torch.dtype:
    """The dtype called `name`; `InvalidInput` if this torch has none."""
    if name not in DTYPES:
        raise InvalidInput(
            f"this torch ({torch.__version__}) has no dtype {name[:40]!r}; read with the torch "
            "that wrote it or a newer one"
        )
    return DTYPES[name]


def new(shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A contiguous tensor of any bytes, all of which are to be written; the same whatever the
    caller has made the default device or dtype, in inference mode too.

    Raises `InvalidInput` where torch makes tensors without memory.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):  # else training could not write to it afterwards
            return new(shape, dtype, device)
    made = torch.empty(shape, dtype=dtype, device=device)
    if type(made) is not torch.Tensor:
        raise InvalidInput(
            f"torch makes {type(made).__name__}s here, which have no memory: leave FakeTensorMode, "
            "or the mode that traces, before a commit, a restore or a read"
        )
    return made


def check_surroundings() -> None:
    """Raise `InvalidInput` where torch makes tensors without memory (FakeTensorMode): what is
    copied there would be lost."""
    new((0,), torch.uint8)


def empty(name: str, shape: Shape) -> torch.Tensor:
    """A contiguous CPU tensor of any bytes, all of which are to be written."""
    dtype = dtype_of(name)
    stand_in = _EXPERIMENTAL.get(name)
    if stand_in is None:
        return in_huge_pages(new(shape, dtype))
    return as_dtype(in_huge_pages(new(shape, stand_in)), dtype, shape)


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A new CPU tensor, whose memory is asked to be huge pages: to take it page by page costs more
    than to fill it. Only a hint."""
    start, stop = (
        -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE,
        (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE,
    )
    if stop > start and tensor.is_cpu and hasattr(mmap, "MADV_HUGEPAGE"):
        _madvise()(start, stop - start, mmap.MADV_HUGEPAGE)
    return tensor


@cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def tensor_from(buffer: Any, name: str, shape: Shape) -> torch.Tensor:
    """A tensor over the memory of `buffer` (a memoryview, an mmap), which it keeps alive; of a copy
    if the buffer is read-only."""
    view = memoryview(buffer).cast("B")
    nbytes = dtype_of(name).itemsize * prod(shape)
    if len(view) != nbytes:
        raise InvalidInput(f"{len(view)} bytes for a tensor {name}{list(shape)}; wanted {nbytes}")
    if not nbytes:
        return empty(name, shape)
    return as_dtype(
        torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8),
        dtype_of(name),
        shape,
    )


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """The memory of a contiguous tensor as one of another dtype and shape of as many bytes; works
    for dtypes that `view` refuses."""
    offset = tensor.storage_offset() * tensor.itemsize // dtype.itemsize
    return over(tensor.untyped_storage(), dtype, offset, shape)


def wraps_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that dispatches to Python, and has no memory of its own."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):  # by far the most
        return False
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a contiguous CPU tensor where they are: flat, writable, format `B`. The view
    keeps the tensor alive."""
    nbytes = tensor.nbytes
    if not nbytes:
        return memoryview(bytearray())
    # FakeTensor is one that wraps others, and gives an address of 0, with a warning.
    address = 0 if wraps_others(tensor) else tensor.data_ptr()
    if not address:
        raise InvalidInput(f"a {type(tensor).__name__} has no memory to read or write: {_OUTSIDE}")
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    # whoever holds the view holds the array, and so the tensor
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def checked_address(tensor: torch.Tensor) -> int:
    """Where the elements of a tensor are; 0 if it has none. Raises `InvalidInput` if they are not
    all in memory that is there: its storage was freed or made smaller, or it is a stand-in of one
    of torch's transforms, which has none."""
    try:
        address, there = tensor.data_ptr(), tensor.untyped_storage().nbytes()
        is_all = there == tensor.nbytes and not tensor.storage_offset()
        if is_all and address and tensor.is_contiguous():  # by far the most
            return address
    except RuntimeError as error:  # NotImplementedError is one
        raise InvalidInput(
            "a tensor without memory of its own, inside of vmap, grad or the like, has no bytes: "
            f"{_OUTSIDE}"
        ) from error
    count = tensor.numel()
    if not count:
        return address
    if not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((n - 1) * abs(step) for n, step in steps)
    last = tensor.storage_offset() + count - 1
    needed = -(-(last + 1) * tensor.itemsize // _PER_BYTE.get(tensor.dtype, 1))
    if there < needed:
        raise InvalidInput(
            f"a tensor whose storage has {there} bytes needs {needed}: it was freed or made "
            "smaller (untyped_storage().resize_); "
            f"commit before that, or leave the tensor out"
        )
    if not address and not tensor.is_meta:
        raise InvalidInput(
            "a tensor without memory, as functionalize and zeros that are never made have it, has "
            f"no bytes: {_OUTSIDE}"
        )
    return address


_OUTSIDE = "commit outside of the transform, or materialize it (torch.zeros, clone())"


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one block of memory with strides, and its dtype says all about its
    elements."""
    return (
        tensor.layout is torch.strided
        and (tensor.is_cpu or not tensor.is_meta)
        and not tensor.is_nested
        and tensor.dtype not in QUANTIZED
    )


def is_resolved(tensor: torch.Tensor) -> bool:
    """Whether the memory has the elements as they are. The answer takes a release of the GIL."""
    return not tensor.is_conj() and not tensor.is_neg()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether `memory_of` may be used."""
    return tensor.is_cpu and tensor.is_contiguous() and is_resolved(tensor)


def is_writable_by_range(tensor: torch.Tensor) -> bool:
    """Whether `write_range` may be used: each element has memory of its own that holds its bytes as
    they are."""
    if not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        if any(n > 1 and stride == 0 for n, stride in steps):
            return False
    return is_resolved(tensor)


def read_range(tensor: torch.Tensor, start: int, stop: int, out: memoryview) -> None:
    """Copy the raw bytes `start:stop` of a strided tensor, on any device, to `out`.

    Besides `out` it needs memory only where `start` or `stop` lies within an element, or the tensor
    lives on another device and is not contiguous.
    """
    width = tensor.itemsize
    first, last = start // width, -(-stop // width)
    if start % width or stop % width:
        whole = bytearray((last - first) * width)
        read_range(tensor, first * width, last * width, memoryview(whole))
        out[:] = memoryview(whole)[start - first * width : stop - first * width]
        return
    if start == stop:
        return
    target = torch.frombuffer(out, dtype=torch.uint8)
    # torch itself flips the signs that a conjugate or negative view says to flip
    flips = tensor.is_conj() or tensor.is_neg()
    copied = tensor if flips else _integers(tensor)
    at = 0
    for run in _runs(copied, first * width // copied.itemsize, last * width // copied.itemsize):
        as_dtype(target[at : at + run.nbytes], run.dtype, run.shape).copy_(run)
        at += run.nbytes


def write_range(tensor: torch.Tensor, start: int, data: memoryview) -> None:
    """Copy `data` to the raw bytes from `start` on of a strided tensor on any device; both ends
    must be whole elements.

    The tensor's elements must not share memory (`is_writable_by_range`).
    """
    if not len(data):
        return
    filled = _integers(tensor)
    source = elements_of(data, filled.dtype)
    if tensor.is_cuda:
        # from torch's pool: the copy is then left to the device, in order with what is launched
        # next
        source = source.pin_memory()
    write_elements(filled, start // filled.itemsize, source, is_left=tensor.is_cuda)


def write_elements(
    tensor: torch.Tensor, first: int, values: torch.Tensor, *, is_left: bool = False
) -> None:
    """Copy a vector to a strided tensor's elements from number `first` on, in row-major order;
    converts as `Tensor.to` does. A copy that `is_left` to the device may end later."""
    at = 0
    with torch.no_grad():
        for run in _runs(tensor, first, first + len(values)):
            count = run.numel()
            run.copy_(values[at : at + count].view(run.shape), non_blocking=is_left)
            at += count


def quantized_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The stored integers of a quantized tensor, sharing its memory: as bytes in a row where
    several lie in one byte."""
    storage = tensor.untyped_storage()
    if tensor.dtype in _PER_BYTE:
        packed = quantized_nbytes(tensor.dtype, tuple(tensor.shape))
        return over(
            storage,
            torch.uint8,
            tensor.storage_offset() // _PER_BYTE[tensor.dtype],
            (packed,),
            (1,),
        )
    integers = {torch.quint8: torch.uint8, torch.qint8: torch.int8, torch.qint32: torch.int32}[
        tensor.dtype
    ]
    return over(storage, integers, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def quantized_nbytes(dtype: torch.dtype, shape: Shape) -> int:
    """Bytes of the integers of a quantized tensor."""
    return -(-dtype.itemsize * prod(shape) // _PER_BYTE.get(dtype, 1))


def elements_of(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The memory of `data`, whole elements, as a vector of `dtype`; of a copy if it is
    read-only, as the few bytes of a leaf in a page are: torch would warn of it, and to silence a
    warning is to change what other threads see meanwhile."""
    source = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
    return as_dtype(source, dtype, (len(data) // dtype.itemsize,))


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a strided tensor as integers of the element's width, in its shape; elements of
    16 bytes become two integers."""
    storage, shape, stride, offset = (
        tensor.untyped_storage(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
    )
    if tensor.itemsize == 16:
        return over(storage, torch.int64, 2 * offset, (*shape, 2), (*(2 * s for s in stride), 1))
    return over(storage, _INTEGERS[tensor.itemsize], offset, shape, stride)


def over(
    storage: Any, dtype: torch.dtype, offset: Any, shape: Shape, stride: tuple[int, ...] = ()
) -> torch.Tensor:
    """A tensor of the elements in a storage: in row-major order without `stride`."""
    if stand_in := _EXPERIMENTAL.get(DTYPE_NAMES[dtype]):
        return over(storage, stand_in, offset, shape, stride).view(dtype)
    return new((0,), dtype, storage.device).set_(storage, offset, shape, stride)


def _runs(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """The elements `start:stop` of a tensor's row-major order as parts of it, in order: whole rows
    wherever there are some."""
    tensor = tensor.view(-1) if tensor.is_contiguous() else _flatter(tensor)
    if tensor.dim() == 1:
        yield tensor[start:stop]
        return
    row = prod(tensor.shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from _runs(tensor[first], head, tail)
        return
    if head:
        yield from _runs(tensor[first], head, row)
        first += 1
    if first < last:
        yield tensor[first:last]
    if tail:
        yield from _runs(tensor[last], 0, tail)


def _flatter(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with neighbouring dimensions made one where their memory allows: a contiguous
    tensor becomes a vector."""
    shape, strides = [1], [1]
    for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if n == 1:
            continue
        if shape == [1]:
            shape, strides = [n], [stride]
        elif strides[-1] == n * stride:
            shape[-1], strides[-1] = shape[-1] * n, stride
        else:
            shape.append(n)
            strides.append(stride)
    return tensor.as_strided(shape, strides)


def current_stream(tensor: torch.Tensor) -> Any:
    """The stream that the calling thread launches on where the tensor lies; None for one in this
    host's memory."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def through(stream: Any) -> AbstractContextManager[Any]:
    """Within it, copies go through `stream`. Each thread has a current stream of its own, which may
    be another than the caller's."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class TensorSource(StagedSource):
    """The raw bytes of a strided tensor on any device, as of what the thread that makes this has
    launched there. Keeps the tensor alive; threads may stage side by side. With `known_ids`, it is
    read, and compared with its ids, only where the store lacks a chunk."""

    __slots__ = ("is_plain", "stream", "tensor")

    def __init__(self, tensor: torch.Tensor, known_ids: bytes | None = None) -> None:
        self.tensor, self.known_ids = tensor, known_ids
        is_here = tensor.is_cpu
        self.is_plain = is_here and tensor.is_contiguous() and is_resolved(tensor)
        self.stream = None if is_here else current_stream(tensor)
        self.nbytes, self.width = tensor.nbytes, tensor.itemsize

    def memory(self) -> memoryview | None:
        """The bytes where they are, or None if they must be staged (another device, not contiguous,
        a conjugate view)."""
        return memory_of(self.tensor) if self.is_plain else None

    def read_all(self) -> bytes:
        """A copy of the bytes: of small tensors in half the time of one through `memory`."""
        if self.is_plain:
            return ctypes.string_at(self.tensor.data_ptr(), self.nbytes)
        return super().read_all()

    def view(self, start: int, stop: int) -> memoryview | None:
        """A part of `memory`."""
        memory = self.memory()
        return None if memory is None else memory[start:stop]

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        """Copy the bytes `start:stop` to `out`."""
        with through(self.stream):
            read_range(self.tensor, start, stop, out)


class Destination:
    """Where the raw bytes of one leaf land: a strided tensor on any device whose elements have
    memory of their own.

    Either `memory` is filled, or every byte is handed to `write`, in any order and from any thread.
    On a device it lands ahead of what the thread that makes this launches next, and behind what it
    launched before. Bytes of another dtype, `committed`, are converted to the tensor's as they are
    handed over, chunk by chunk; what the tensor's dtype cannot hold is counted in `losses`, unless
    it is `unchecked`.
    """

    __slots__ = ("_committed", "losses", "nbytes", "stream", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        committed: torch.dtype | None = None,
        *,
        unchecked: bool = False,
    ) -> None:
        self.tensor = tensor
        self.stream = current_stream(tensor)
        self._committed = committed
        narrows = committed is not None and not unchecked and narrows_range(committed, tensor.dtype)
        self.losses = Losses(committed, tensor.dtype) if committed and narrows else None
        self.nbytes: int = (
            tensor.nbytes if committed is None else tensor.numel() * committed.itemsize
        )

    def memory(self) -> memoryview | None:
        """The tensor's own memory, writable, or None if bytes must be handed to `write`."""
        in_place = self._committed is None and is_plain(self.tensor)
        return memory_of(self.tensor) if in_place else None

    def write(self, start: int, data: memoryview) -> None:
        """Land `data`, whole elements, at byte `start` of the committed ones."""
        if self._committed is None:
            with through(self.stream):
                write_range(self.tensor, start, data)
        elif len(data):
            values = elements_of(data, self._committed)
            if self.losses:
                self.losses.count(values)
            with through(self.stream):
                write_elements(self.tensor, start // values.itemsize, values)


FLOATS = frozenset(
    dtype
    for dtype in DTYPES.values()
    if dtype.is_floating_point and dtype is not getattr(torch, "float4_e2m1fn_x2", None)
)
"""The dtypes that floats are converted from and to: one number to an element."""


AskedDtype: TypeAlias = torch.dtype | tuple[torch.dtype, Literal["unchecked"]]
"""A dtype to convert to; beside "unchecked", values that it cannot hold are accepted."""


def with_consent(given: Any) -> tuple[Any, bool]:
    """A dtype, and whether it comes as `(dtype, "unchecked")`: then values that it cannot hold may
    become infinite, NaN or zero."""
    if type(given) in (tuple, list) and len(given) == 2 and given[1] == "unchecked":
        return given[0], True
    return given, False


def losses(before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> tuple[int, int, int]:
    """Of elements that were converted to `dtype`, which are `before` and `after` in one that can
    be compared: how many lie beyond the range, how many were finite and not zero, and how many of
    these are not zero now."""
    finite = before.isfinite()
    given = finite & (before != 0)
    # Some dtypes have no infinity, or no sign: torch makes the largest number of what lies beyond.
    overflows = finite & (~after.isfinite() | (before.abs() > _range_of(dtype)))
    overflows |= (before.isinf() & ~after.isinf()) | ((before < 0) & (after > 0))
    return int(overflows.sum()), int(given.sum()), int((given & (after != 0)).sum())


@cache
def _range_of(dtype: torch.dtype) -> float:
    """The largest number that is rounded to a finite one."""
    info = torch.finfo(dtype)
    return float(info.max) + info.eps * math.ldexp(1, math.frexp(info.max)[1] - 2)


@cache
def _least_of(dtype: torch.dtype) -> float:
    """A number that surely does not become zero, nor another sign: none of a dtype without."""
    return math.inf if "e8m0" in DTYPE_NAMES[dtype] else torch.finfo(dtype).smallest_normal


@cache
def _differ_in_range(old: torch.dtype, new: torch.dtype) -> bool:
    return torch.finfo(old).max > 2 * torch.finfo(new).max


@cache
def narrows_range(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether finite values of `old` may lie beyond the range of `new`, or become zero there."""
    before, after = torch.finfo(old), torch.finfo(new)
    least, new_least = (each.smallest_normal * each.eps for each in (before, after))
    return before.max > _range_of(new) or least < new_least


class Losses:
    """What the values of a leaf of dtype `old` lose beside precision where they become `new`.
    Counts what is written to it, from any thread; nothing is kept."""

    def __init__(self, old: torch.dtype, new: torch.dtype) -> None:
        self._old, self._new = old, new
        self._counts = [0, 0, 0]
        self._lock = threading.Lock()

    def again(self) -> "Losses":
        """A count of its own of the same conversion."""
        return Losses(self._old, self._new)

    @property
    def losses(self) -> "Losses":
        """As a destination that only counts."""
        return self

    @property
    def is_likely(self) -> bool:
        """Whether the ranges differ by more than the rounding of the largest number."""
        return _differ_in_range(self._old, self._new)

    def memory(self) -> None:
        return None

    def write(self, start: int, data: memoryview) -> None:
        """Count the losses of `data`, whole elements."""
        if len(data):
            self.count(elements_of(data, self._old))

    def count(self, values: torch.Tensor) -> None:
        """Count the losses of a vector that is not empty."""
        is_small = len(values) <= ALONE_ELEMENTS
        for part in (values,) if is_small else values.split(ALONE_ELEMENTS):
            overflows, given, kept = self._of(part)
            with self._lock:
                self._counts[0] += overflows
                self._counts[1] += given
                self._counts[2] += kept

    def _of(self, before: torch.Tensor) -> tuple[int, int, int]:
        wide = before.to(torch.float32) if self._old.itemsize < 4 else before
        least, most = map(float, torch.aminmax(wide))
        if _least_of(self._new) <= max(-least, most) <= _range_of(self._new):
            return 0, 1, 1  # all is within the range, and not all becomes zero
        return losses(wide, before.to(self._new).to(wide.dtype), self._new)

    def said(self, *, whole: bool) -> str:
        """The losses in words, empty if there are none; that all is zero counts of a `whole`
        leaf."""
        overflows, given, kept = self._counts
        return lost_values(DTYPE_NAMES[self._new], overflows, given if whole else 0, kept)


def lost_values(name: str, overflows: int, given: int, kept: int) -> str:
    """What a conversion to the dtype called `name` loses beside precision, in words; empty if
    nothing."""
    if overflows:
        s, lie = ("", "lies") if overflows == 1 else ("s", "lie")
        return f"{overflows} value{s} {lie} beyond the range of {name}"
    if given and not kept:
        return f"all values, of which {given} are not zero, would become zero in {name}"
    return ""


def checked_dtype(dtype: Any) -> torch.dtype:
    """`dtype` if leaves can be converted to it, else `InvalidInput`."""
    asked, _ = with_consent(dtype)
    if isinstance(asked, torch.dtype) and asked in FLOATS:
        return asked
    known = ", ".join(sorted(str(each) for each in FLOATS))
    raise InvalidInput(
        f"dtype is {dtype!r}; wanted one of {known}: only floating leaves are converted, and only "
        "to floats"
    )


def wanted_dtype(dtype: Any) -> tuple[torch.dtype | None, bool]:
    """The checked dtype that a caller asks for, if any, and whether values that it cannot hold are
    accepted."""
    return None if dtype is None else checked_dtype(dtype), with_consent(dtype)[1]


def converts(committed: str, dtype: torch.dtype | None) -> bool:
    """Whether a leaf committed as `committed` becomes another one when `dtype` is asked for."""
    return dtype is not None and DTYPES.get(committed) in FLOATS - {dtype}


def destination(tensor: torch.Tensor, committed: str, *, unchecked: bool = False) -> Destination:
    """Where the bytes of a leaf committed as `committed` land in `tensor`, which has that dtype or
    is converted to."""
    same = DTYPE_NAMES[tensor.dtype] == committed
    return Destination(tensor, None if same else dtype_of(committed), unchecked=unchecked)
