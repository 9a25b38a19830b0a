"""What is checked at the entry of every public call, before it does anything?

* A signal handler runs between any two steps of the thread that it interrupts. If that thread is
within a call of this package, the handler's own call could wait for a lock that its own thread
holds, or see a state that is half changed. So the handler's call is refused.
* A text is never true: `maximize="min"` would maximize. Parameters that are annotated as booleans
take booleans alone.
* A call that looks at the history waits for this object's own commits in flight, unless it is
marked by `beside_commits`.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, wraps
from inspect import Parameter, signature
from types import FrameType, FunctionType
from typing import Any, TypeVar

from ckptstore.errors import InvalidInput

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = __name__.partition(".")[0]
_VARIADIC = 0x04
"""`inspect.CO_VARARGS`"""


def public_methods(kind: C) -> C:
    """Check the entries of all public methods that the class itself defines."""
    return _checked_methods(kind, waits=False)


def public_methods_of_store(kind: C) -> C:
    """`public_methods`, which also call `_settle` first, except those `beside_commits`: it waits
    for the commits in flight, and raises a failure that nobody has seen."""
    return _checked_methods(kind, waits=True)


def beside_commits(method: F) -> F:
    """Mark a method that does not wait for the commits in flight: it starts or follows them, or
    does not depend on what is committed."""
    method._beside_commits = True  # type: ignore[attr-defined]
    return method


def checked_fields(kind: C) -> C:
    """Check the booleans among the fields of a dataclass."""
    kind.__init__ = _checked(kind.__init__, kind.__name__, waits=False)  # type: ignore[misc]
    return kind


def public_call(function: F) -> F:
    """Check the entry of a function."""
    return _checked(function, function.__name__, waits=False)


def _checked_methods(kind: C, *, waits: bool) -> C:
    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType) and (not name.startswith("_") or name == "__call__"):
            own = waits and not getattr(method, "_beside_commits", False)
            setattr(kind, name, _checked(method, name, waits=own))
    return kind


def _checked(function: F, name: str, *, waits: bool) -> F:
    booleans = tuple(booleans_of(function))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_in_handler(name)
        for boolean in booleans:
            if boolean.name in kwargs:
                boolean.check(kwargs[boolean.name])
        if waits:
            args[0]._settle()
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Boolean:
    """A parameter that takes True and False alone, or also None, which stands for a default."""

    name: str
    optional: bool

    def check(self, value: object) -> None:
        """Raise `InvalidInput` unless `value` is one of these, of Python or of numpy."""
        if value is None and self.optional:
            return
        if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
            raise InvalidInput(f"{self.name} is {value!r:.80}; wanted True or False")


def booleans_of(function: Callable[..., Any]) -> Iterator[Boolean]:
    """The parameters that are annotated as booleans. Raises `TypeError` if one may be passed by
    position, because a number or a text for another parameter may end up in it."""
    for name, parameter in signature(function).parameters.items():
        if parameter.annotation in (bool, bool | None):
            if parameter.kind is not Parameter.KEYWORD_ONLY:
                raise TypeError(f"{function.__qualname__}: {name} is a boolean without a name")
            yield Boolean(name, parameter.annotation is not bool)


def refuse_in_handler(name: str) -> None:
    """Raise `InvalidInput` if a signal handler calls `name` while its thread is within a call of
    this package."""
    if threading.get_ident() != threading.main_thread().ident:
        return  # Python runs handlers on the main thread alone
    handler = _handler_above(sys._getframe(2))
    if handler is not None:
        raise InvalidInput(
            f"{name} was called by the signal handler {handler}, which interrupted a call of "
            "ckptstore: it would wait for what its own thread holds; let the handler set a flag "
            "and commit after the step, as "
            "`store.every(…, on_signal=signal.SIGTERM)` does (docs/async.md, Preemption)"
        )


def _handler_above(frame: FrameType | None) -> str | None:
    """The name of the signal handler that made this call, if it interrupted this package; else
    None. Such a handler's frame lies between the call's own frame and an older frame of this
    package. It is recognised by its argument, the interrupted frame."""
    others: list[FrameType] = []
    own = _own_frame(frame)
    while own is not None:  # rarely: most calls come from elsewhere alone
        while frame is not None and frame is not own:
            others.append(frame)
            frame = frame.f_back
        if handler := next(filter(_is_handler, others), None):
            return handler.f_code.co_qualname
        others.clear()
        frame = own.f_back
        own = _own_frame(frame)
    return None


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """The newest frame of this package from `frame` on; every public call walks the whole stack."""
    while frame is not None and not _is_own(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return frame


@lru_cache(1024)
def _is_own(module: Any) -> bool:
    return str(module).partition(".")[0] == _PACKAGE


def _is_handler(frame: FrameType) -> bool:
    """Whether a frame is that of a signal handler: its last argument is the interrupted frame."""
    code, interrupted = frame.f_code, frame.f_back
    count = code.co_argcount
    if interrupted is None or not (count > 1 or code.co_flags & _VARIADIC):
        return False
    names = code.co_varnames[:count]
    if code.co_flags & _VARIADIC:
        names += (code.co_varnames[count + code.co_kwonlyargcount],)
    values = [frame.f_locals.get(name) for name in names]
    return any(
        value is interrupted
        or (isinstance(value, tuple) and any(each is interrupted for each in value))
        for value in values
    )
