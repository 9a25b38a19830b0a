"""What does a pickle say, without unpickling it? A walk over its opcodes gives inert values.

Names, calls and states become records. Nothing is imported, called or hashed, and memory grows
with the bytes of the pickle alone.
"""

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, cast

PICKLE_BYTES_MAX = 64 << 20
DIMENSIONS_MAX = 64
OPCODES_MAX = 4 << 20
"""Each opcode makes a few hundred bytes of records at most, however few bytes it has."""


class TooLarge(ValueError):
    """A file is not looked into, since that would take too much memory."""


@dataclass(slots=True, eq=False)
class Name:
    """A global name, such as `torch.float32`."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Pairs:
    """A dict: its items in order, also those with equal keys."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Call:
    """An object that a pickle makes by calling `function`, with what it adds to it later."""

    function: Any
    args: Any
    state: Any = None
    items: list[tuple[Any, Any]] = field(default_factory=list)
    added: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Persistent:
    """An object outside the pickle, by its id."""

    id: Any


class _Mark:
    pass


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_SET": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": Pairs,
    "MARK": _Mark,
}
_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def walk(file: io.BufferedReader | io.BytesIO) -> Any:
    """The value of the next pickle in `file`, which is then behind it.

    Raises `ValueError` or another of Python's errors for what is no pickle.
    """
    machine, begin = _Machine(), file.tell()
    bounded = cast(IO[bytes], _Bounded(file))  # of which `genops` uses three methods
    for number, (code, arg, position) in enumerate(pickletools.genops(bounded)):
        if position is not None and position - begin > PICKLE_BYTES_MAX:
            raise TooLarge(f"a pickle in it has more than {PICKLE_BYTES_MAX >> 20} MiB")
        if number >= OPCODES_MAX:
            raise TooLarge(f"a pickle in it has more than {OPCODES_MAX:,} operations")
        machine.step(code.name, arg)
    return machine.stack[-1]


class _Bounded:
    """A file that gives no text or bytes longer than a pickle may be, whatever length the pickle
    says that they have."""

    def __init__(self, file: io.BufferedReader | io.BytesIO) -> None:
        self._file, self.tell = file, file.tell

    def read(self, size: int) -> bytes:
        if size > PICKLE_BYTES_MAX:
            raise TooLarge(f"a pickle in it has a value of {size} bytes")
        return self._file.read(size)

    def readline(self) -> bytes:
        line = self._file.readline(PICKLE_BYTES_MAX)
        if len(line) == PICKLE_BYTES_MAX:
            raise TooLarge("a pickle in it has a name without an end")
        return line


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, arg: Any) -> None:
        stack = self.stack
        if constant := _CONSTANTS.get(name):
            stack.append(constant())
        elif name in _SIZES:
            stack[-_SIZES[name] :] = [tuple(stack[-_SIZES[name] :])]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if arg is None else int(arg)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[int(arg)])
        elif special := getattr(self, f"_{name.lower()}", None):
            special(arg)
        elif arg is not None:  # a number or a text
            stack.append(arg)
        else:
            raise ValueError(f"the opcode {name} has no meaning here")

    def _since_mark(self) -> list[Any]:
        at = next(i for i in reversed(range(len(self.stack))) if type(self.stack[i]) is _Mark)
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def _proto(self, arg: int | None) -> None:
        pass

    _frame = _stop = _proto

    def _ext1(self, arg: int) -> None:
        raise ValueError("names by number are not read")

    _ext2 = _ext4 = _next_buffer = _readonly_buffer = _ext1

    def _pop(self, _: None) -> None:
        self.stack.pop()

    def _pop_mark(self, _: None) -> None:
        self._since_mark()

    def _dup(self, _: None) -> None:
        self.stack.append(self.stack[-1])

    def _tuple(self, _: None) -> None:
        self.stack.append(tuple(self._since_mark()))

    def _list(self, _: None) -> None:
        self.stack.append(self._since_mark())

    _frozenset = _list

    def _dict(self, _: None) -> None:
        self.stack.append(Pairs(_paired(self._since_mark())))

    def _append(self, _: None) -> None:
        self._extend([self.stack.pop()])

    def _appends(self, _: None) -> None:
        self._extend(self._since_mark())

    _additems = _appends

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        (target.added if isinstance(target, Call) else target).extend(values)

    def _setitem(self, _: None) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1].items.append((key, value))

    def _setitems(self, _: None) -> None:
        pairs = _paired(self._since_mark())
        self.stack[-1].items.extend(pairs)

    def _global(self, arg: str) -> None:
        module, name = arg.split(" ", 1)
        self.stack.append(Name(module, name))

    def _stack_global(self, _: None) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name is no text")
        self.stack.append(Name(module, name))

    def _reduce(self, _: None) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.stack.append(Call(function, args))

    _newobj = _reduce

    def _newobj_ex(self, _: None) -> None:
        _, args, function = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(Call(function, args))

    def _obj(self, _: None) -> None:
        function, *args = self._since_mark()
        self.stack.append(Call(function, tuple(args)))

    def _inst(self, arg: str) -> None:
        args = self._since_mark()
        self._global(arg)
        self.stack.append(Call(self.stack.pop(), tuple(args)))

    def _build(self, _: None) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Call):
            self.stack[-1].state = state

    def _persid(self, arg: str) -> None:
        self.stack.append(Persistent(arg))

    def _binpersid(self, _: None) -> None:
        self.stack.append(Persistent(self.stack.pop()))


def _paired(values: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(values[::2], values[1::2], strict=True))


def attributes(value: Any) -> dict[str, Any]:
    """The attributes that a pickle gives to an object: its state, by name."""
    state = value.state if isinstance(value, Call) else None
    if isinstance(state, tuple) and len(state) == 2:
        state = next((part for part in state if isinstance(part, Pairs)), None)
    pairs = state.items if isinstance(state, Pairs) else []
    return {key: item for key, item in pairs if isinstance(key, str)}


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """The items of a dict, also of one that a class stands for. Python 2 wrote an `OrderedDict` as
    a call with a list of pairs; these come first, as they do when it is called."""
    if isinstance(value, Pairs):
        return value.items
    if not isinstance(value, Call):
        return []
    return [*_given_items(value), *value.items]


def _given_items(call: Call) -> list[tuple[Any, Any]]:
    """The items that a call of a dict's class has as its argument."""
    if not is_name(call.function, *_DICTS) or not isinstance(call.args, tuple):
        return []
    given = call.args[0] if len(call.args) == 1 else None
    if isinstance(given, Pairs):
        return given.items
    pairs = given if isinstance(given, list) else []
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        return []
    return [(key, value) for key, value in pairs]


def is_dict(value: Any) -> bool:
    """Whether a value is a dict, or a call that makes one, whose items are `items_of`."""
    return isinstance(value, Pairs) or (
        isinstance(value, Call) and is_name(value.function, *_DICTS)
    )


def is_name(value: Any, *names: tuple[str, str]) -> bool:
    """Whether a value is one of these names, each a module and what it has."""
    return isinstance(value, Name) and (value.module, value.name) in names


def item_of(value: Any, wanted: str) -> Any:
    """The last item of a dict under a name. No other key is hashed, which a forged one may make
    endless."""
    found = [item for key, item in items_of(value) if isinstance(key, str) and key == wanted]
    return found[-1] if found else None


_DICTS = (
    ("collections", "OrderedDict"),
    ("builtins", "dict"),
    ("__builtin__", "dict"),
    ("collections", "Counter"),
)


def counts_of(value: Any) -> tuple[int, ...]:
    """A shape, as a tuple or a `torch.Size`. Raises `ValueError` for anything else."""
    if isinstance(value, Call) and is_name(value.function, ("torch", "Size")) and value.args:
        value = value.args[0]
    # The text of a value may be endless: one that has another twice has its text twice.
    if not isinstance(value, tuple | list) or len(value) > DIMENSIONS_MAX:
        raise ValueError("no shape")
    if not all(type(n) is int and n >= 0 for n in value):
        raise ValueError("no shape")
    return tuple(value)
