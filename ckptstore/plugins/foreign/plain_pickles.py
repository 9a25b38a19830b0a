"""How do dates, paths, arrays and generators pass through a file of torch.save without trust in it?

torch reads tensors and containers of an untrusted file, and refuses other names. A closed table
here lists the names of values that a commit stores as they are. While torch reads, each such object
is a record of its name, arguments and state. Afterwards the table turns the record into the value,
from checked parts. No name in a file leads to a function that is not in the table.

The exporter's `Pickler` writes such values in forms that this reader knows and any unpickler reads.
"""

import builtins
import datetime as dt
import io
import pickle
import random
import sys
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import IO, Any, TypeAlias, cast

import numpy as np
import torch
from torch import serialization

from ckptstore.errors import InvalidInput, Unavailable
from ckptstore.plugin.tensors import MARK, jagged_of, nested_of
from ckptstore.plugin.values import IdentityDict, class_name, items_of, registered_classes
from ckptstore.plugin.work import forks


class Record:
    """An object of a file while it is read. A class below this one stands for each known name."""

    name = ""

    def __init__(self, *args: Any) -> None:
        self.state: Any = None

    def __new__(cls, *args: Any) -> "Record":
        made = super().__new__(cls)
        made.args = args
        return made

    args: tuple[Any, ...]

    def as_subclass(self, cls: object) -> "Record":
        """What torch asks a tensor with attributes for, before it sets them."""
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


Make: TypeAlias = Callable[[tuple[Any, ...], Any], Any]
"""Makes a value from the arguments and the state of its record."""


def _called(make: Callable[..., Any], *kinds: type) -> Make:
    """Call `make` with arguments of these kinds; without kinds, with any."""

    def made(args: tuple[Any, ...], state: Any) -> Any:
        if state is not None or not all(not kinds or type(arg) in kinds for arg in args):
            raise ValueError("its arguments are of other types")
        return make(*args)

    return made


def _uuid(args: tuple[Any, ...], state: Any) -> uuid.UUID:
    return uuid.UUID(int=state["int"])


def _buffer(args: tuple[Any, ...], state: Any) -> io.BytesIO:
    data, position, held = state
    buffer = io.BytesIO(data)
    buffer.seek(position)
    vars(buffer).update(held or {})
    return buffer


def _random(args: tuple[Any, ...], state: Any) -> random.Random:
    generator = random.Random()
    generator.setstate(state)
    return generator


def _torch_generator(args: tuple[Any, ...], state: Any) -> torch.Generator:
    (device,) = args
    generator = torch.Generator(device)
    generator.set_state(state[2])
    return generator


def _dtype(args: tuple[Any, ...], state: Any) -> np.dtype[Any]:
    """A dtype of numpy from its description. A state may say the byte order only: numpy takes
    fields and units of a state unchecked."""
    dtype: np.dtype[Any] = np.dtype(args[0])
    if state is not None:
        _, order, *more = state
        if any(part is not None for part in more[:3]) or len(more) > 6:
            raise ValueError("its fields or its unit are given as a state")
        dtype = dtype.newbyteorder(order if order in "<>" else "=")
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    return dtype


def _array(args: tuple[Any, ...], state: Any) -> np.ndarray[Any, Any]:
    _, shape, dtype, in_columns, data = state
    if not isinstance(dtype, np.dtype) or dtype.hasobject or not isinstance(data, bytes):
        raise ValueError("it holds Python objects")
    return _filled(shape, dtype, data, "F" if in_columns else "C")


def _filled(
    shape: tuple[int, ...], dtype: np.dtype[Any], data: bytes, order: Any
) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, bytearray(data) or bytearray(1), 0)
    if array.nbytes != len(data):
        raise ValueError("its bytes are not as many as its shape says")
    return array if order == "C" else array.reshape(shape[::-1]).T


def _scalar(args: tuple[Any, ...], state: Any) -> Any:
    dtype, data = args
    return _filled((), dtype, data, "C")[()]


def _nested(args: tuple[Any, ...], state: Any) -> torch.Tensor:
    return _with_attributes(nested_of(*args), state)


def _jagged(args: tuple[Any, ...], state: Any) -> torch.Tensor:
    (given,) = args
    lengths = {f"{each}_seqlen": given["_metadata_cache"].get(f"{each}_seqlen") for each in _ENDS}
    made = jagged_of(
        given["values"],
        given["offsets"],
        given["lengths"],
        jagged_dim=given["_ragged_idx"],
        # torch keeps a length as that of a tensor without elements.
        **{name: None if each is None else each.shape[0] for name, each in lengths.items()},
    )
    return _with_attributes(made.requires_grad_(given["requires_grad"]), state)


def _with_attributes(made: torch.Tensor, state: Any) -> torch.Tensor:
    for name, value in (state or {}).items():
        if not hasattr(made, name) and not MARK.fullmatch(name):
            setattr(made, name, value)
    return made


_ENDS = ("min", "max")
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def _bit_generator(args: tuple[Any, ...], state: Any) -> np.random.BitGenerator:
    (named,) = args
    name = named if isinstance(named, str) else named.__name__
    if name not in _BIT_GENERATORS:
        raise ValueError("no bit generator has this name")
    own, sequence = state if isinstance(state, tuple) else (state, None)
    generator = getattr(np.random, name)(sequence)
    generator.state = own
    return cast(np.random.BitGenerator, generator)


def _seed_sequence(args: tuple[Any, ...], state: Any) -> np.random.SeedSequence:
    entropy, spawned, _, pool_size, spawn_key = state or args[2]
    return np.random.SeedSequence(
        entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=spawned
    )


def _generator(args: tuple[Any, ...], state: Any) -> np.random.Generator:
    return np.random.Generator(args[0])


def _random_state(args: tuple[Any, ...], state: Any) -> np.random.RandomState:
    generator = np.random.RandomState()
    generator.set_state(state)
    return generator


_PATHS: dict[str, type[PurePath]] = {
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
    "PosixPath": Path,
    "WindowsPath": Path,
}
_TEXT_OR_NUMBERS = (str, int, bytes, dt.timedelta, dt.timezone, zoneinfo.ZoneInfo)
_NUMPY_CORE = ("numpy._core.multiarray", "numpy.core.multiarray")

_MADE: dict[str, Make] = {
    "builtins.bytes": _called(bytes, bytes),  # how protocol 2 writes b""
    "builtins.range": _called(range, int),
    "builtins.slice": _called(slice),
    "builtins.frozenset": _called(frozenset, list),
    "collections.deque": _called(deque),
    "collections.defaultdict": _called(defaultdict),
    **{
        f"datetime.{each.__name__}": _called(each, *_TEXT_OR_NUMBERS)
        for each in (dt.date, dt.time, dt.datetime, dt.timedelta, dt.timezone)
    },
    "decimal.Decimal": _called(Decimal, str),
    "fractions.Fraction": _called(Fraction, int),
    "uuid.UUID": _uuid,
    "zoneinfo.ZoneInfo": _called(zoneinfo.ZoneInfo, str),
    **{
        f"{module}.{name}": _called(cls, str)
        for name, cls in _PATHS.items()
        for module in ("pathlib", "pathlib._local")
    },
    "_io.BytesIO": _buffer,
    "random.Random": _random,
    "torch._C.Generator": _torch_generator,
    # torch reads them itself before 2.15; only here do they lie within their memory.
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch.nested._internal.nested_tensor._rebuild_njt": _jagged,
    "torch._dynamo.decorators._DimRange": lambda args, state: None,
    "numpy.dtype": _dtype,
    **{
        f"{module}.{name}": make
        for module in _NUMPY_CORE
        for name, make in (("_reconstruct", _array), ("scalar", _scalar))
    },
    "numpy.random._pickle.__generator_ctor": _generator,
    "numpy.random._pickle.__randomstate_ctor": _random_state,
    "numpy.random._pickle.__bit_generator_ctor": _bit_generator,
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": _seed_sequence,
}
"""What makes a value from its record, by the name in the file."""

_BARE: dict[str, Any] = {
    "builtins.Ellipsis": ...,
    **{
        f"builtins.{name}": getattr(builtins, name)
        for name in ("dict", "float", "frozenset", "int", "list", "str", "tuple", "bool")
    },
    "numpy.ndarray": np.ndarray,
    "torch.nested._internal.nested_tensor.NestedTensor": torch.Tensor,
    **{
        f"numpy.random._{name.lower()}.{name}": getattr(np.random, name)
        for name in _BIT_GENERATORS
        if name != "PCG64DXSM"
    },
    "numpy.random._pcg64.PCG64DXSM": np.random.PCG64DXSM,
    "numpy.random.bit_generator.SeedSequence": np.random.SeedSequence,
}
"""What a name alone means: an argument of others, or a value itself."""

_RECORDS: dict[str, type[Record]] = {
    name: type(name.rpartition(".")[2], (Record,), {"name": name})
    for name in sorted({*_MADE, *_BARE})
}

_lock = forks.lock()
"""Held while records stand for names: torch has one table for all threads."""


@contextmanager
def known_names() -> Iterator[None]:
    """Let torch's reader accept names of plain values, and classes that the caller registered.

    torch's table of names is shared by the process. So a file that another thread reads meanwhile
    may yield records where it would have been refused; every reader must call `settled`.
    """
    with _lock:
        given = serialization.get_safe_globals()
        named = {each[1] if isinstance(each, tuple) else _path(each) for each in given}
        own: list[Any] = [(record, name) for name, record in _RECORDS.items() if name not in named]
        # torch takes what leaves the block from the caller's own table too
        own += [cls for cls in registered_classes() if _path(cls) not in named]
        with serialization.safe_globals(own):
            yield


def _path(each: Any) -> str:
    return f"{each.__module__}.{each.__qualname__}"


def settled(value: Any) -> Any:
    """The object that was read, with each record replaced by its value; lists and dicts are changed
    in place. Raises `InvalidInput` for a record of which no value can be made."""
    return _Settling().of(value)


class _Settling:
    def __init__(self) -> None:
        self._made = IdentityDict[Any, Any]()
        """What stands for each object."""

    def of(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, Record):
            return self._bare(value)
        if type(value) in _WHOLE or isinstance(value, torch.Tensor | type):
            return value
        if value not in self._made:
            self._made[value] = value  # for a container that holds itself
            self._made[value] = self._settle(value)
        return self._made[value]

    def _bare(self, record: type[Record]) -> Any:
        if record.name not in _BARE:
            raise InvalidInput(f"{record.name} stands in it alone; it is no value")
        return _BARE[record.name]

    def _settle(self, value: Any) -> Any:
        if isinstance(value, Record):
            return self._value_of(value)
        made = value
        if isinstance(value, tuple):
            settled = [(old, self.of(old)) for old in value]
            if any(new is not old for old, new in settled):
                made = getattr(type(value), "_make", type(value))([new for _, new in settled])
        elif isinstance(value, dict):
            items = [(self.of(key), self.of(item)) for key, item in value.items()]
            value.clear()
            for key, item in items:  # a Counter's update would count them
                value[key] = item
        elif isinstance(value, list):
            value[:] = map(self.of, value)
        elif isinstance(value, set):
            members = [*map(self.of, value)]
            value.clear()
            value.update(members)
        for name in _attributes(value):  # of a class that the caller registered
            held = self.of(old := getattr(value, name))
            if made is not value or held is not old:
                object.__setattr__(made, name, held)
        return made

    def _value_of(self, record: Record) -> Any:
        if record.name not in _MADE:
            raise InvalidInput(f"{record.name} is called in it; it makes no value")
        args, state = self.of(record.args), self.of(record.state)
        try:
            return _MADE[record.name](args, state)
        except Exception as error:  # what a forged file says may be anything
            raise InvalidInput(f"its {record.name} cannot be made: {error!s:.200}") from error


_WHOLE = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
"""Types of values that hold no others: most of what is in a file."""


def _attributes(value: Any) -> list[str]:
    slots = [each for cls in type(value).__mro__ for each in cls.__dict__.get("__slots__", ())]
    return [name for name in (*getattr(value, "__dict__", ()), *slots) if hasattr(value, name)]


# -- how the exporter writes them --


class Pickler(pickle.Pickler):
    """Writes the values of a commit in the forms that `settled` reads."""

    def reducer_override(self, value: Any) -> Any:
        cls = type(value)
        # Neither pickles its attributes, but for this one, which is in the state.
        if cls in (Counter, random.Random) and (lost := vars(value).keys() - {"gauss_next"}):
            raise TypeError(f"it would lose its attributes: {', '.join(sorted(lost))}")
        if cls is deque:
            return deque, (list(value), value.maxlen)
        if cls is defaultdict:
            return defaultdict, (value.default_factory, dict(value))
        if cls in (dt.datetime, dt.time):  # protocol 2, torch.save's, drops the fold
            return value.__reduce_ex__(4)
        if cls is zoneinfo.ZoneInfo:
            return zoneinfo.ZoneInfo, (value.key,)
        if isinstance(value, PurePath):
            return cls, (str(value),)
        if isinstance(value, np.dtype):
            described = np.lib.format.dtype_to_descr(value)
            if np.dtype(described) == value:
                return np.dtype, (described,)
        return NotImplemented


def save(state: Any, file: IO[bytes], path: str = "") -> None:
    """`torch.save` in forms that `settled` reads. Raises `InvalidInput` for a state at `path` with
    an object that torch cannot write, `Unavailable` if the file cannot be written."""
    try:
        torch.save(state, file, pickle_module=sys.modules[__name__])
    except OSError:
        raise
    except Exception as error:  # of any class, by the object
        where = [at for at, value in outermost(state, path) if not _is_written(value)]
        if not where:
            raise Unavailable(f"cannot write a file of torch.save: {error}") from error
        raise InvalidInput(
            f"{where[0]} cannot be written by torch.save ({error!s:.200}); choose the rest with "
            "--select (select=…)"
        ) from error


def refused_by_torch(state: Any) -> list[tuple[str, str]]:
    """The objects in a state that `torch.load` refuses unless it is told to trust the file: the
    path of each, and its class."""
    found = [(path, type(value)) for path, value in outermost(state) if not _is_plain(value)]
    return [(path, class_name(cls)) for path, cls in found]


def outermost(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The objects in plain containers, each after its path."""
    if type(value) in (dict, OrderedDict, list, tuple):
        for key, child in items_of(value):
            yield from outermost(child, f"{path}/{key}" if path else str(key))
    else:
        yield path, value


def _is_written(value: Any) -> bool:
    sample = (
        torch.empty(0, dtype=value.dtype, device="cpu") if type(value) is torch.Tensor else value
    )
    try:
        torch.save(sample, io.BytesIO(), pickle_module=sys.modules[__name__])
    except Exception:  # of any class, by the object
        return False
    return True


_READ_BY_TORCH = (type(None), bool, float, str, torch.Tensor, torch.nn.Parameter)
"""With integers of up to 255 bytes."""


def _is_plain(value: Any) -> bool:
    if type(value) in _READ_BY_TORCH or (type(value) is int and value.bit_length() < 2000):
        return True
    if isinstance(value, np.ndarray | np.generic):
        return False
    data = io.BytesIO()
    save(value, data)
    data.seek(0)
    try:
        return not serialization.get_unsafe_globals_in_checkpoint(data)
    except pickle.UnpicklingError:  # of an opcode that torch does not read
        return False
