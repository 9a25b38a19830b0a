"""What does a pickle say, without unpickling it? A walk over its opcodes gives inert values.

Names, calls and states become records. Nothing is imported, called or hashed, and memory grows
with the bytes of the pickle alone.
"""

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PICKLE_BYTES_MAX = 64 << 20


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
    for code, arg, position in pickletools.genops(file):
        if position is not None and position - begin > PICKLE_BYTES_MAX:
            raise ValueError("a pickle is too long")
        machine.step(code.name, arg)
    return machine.stack[-1]


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
        self.stack.append(Name(str(module), str(name)))

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
    """The items of a dict, also of one that a class stands for."""
    return value.items if isinstance(value, Pairs | Call) else []


def counts_of(value: Any) -> tuple[int, ...]:
    """A shape, as a tuple or a `torch.Size`. Raises `ValueError` for anything else."""
    if isinstance(value, Call) and str(value.function) == "torch.Size" and value.args:
        value = value.args[0]
    if not isinstance(value, tuple | list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{str(value)[:80]} is no shape")
    return tuple(value)
