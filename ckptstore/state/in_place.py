"""How does an object of a target take new content, so that everybody who holds it sees it?

A list, deque, set or array is filled. An object of another class takes the state of the restored
one as pickle would give it. What can do neither is replaced, which a restore reports.
"""

import copyreg
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from itertools import chain
from typing import Any

import torch

from ckptstore.core.identity import IdentityDict, IdentitySet
from ckptstore.state import tensors
from ckptstore.state.codecs import values
from ckptstore.state.containers import slots_of
from ckptstore.state.stateful import STORED_AS_THEY_ARE

_MUTABLE = (list, dict, set, deque, bytearray)
_NESTED = (list, tuple, deque, set)

_VALUES = frozenset((bool, int, float, complex, str, bytes, type(None)))


def overwrite(target: Any, made: Any) -> Any:
    """`target` with the values of `made` where one tensor takes them from another as they are, else
    `made`."""
    if (
        not _is_block(target)
        or not _is_block(made)
        or target.dtype != made.dtype
        or target.shape != made.shape
    ):
        return made
    if tensors.is_writable_by_range(target):
        tensors.write_range(target, 0, tensors.memory_of(made))
    elif target.is_conj() or target.is_neg():
        with torch.no_grad():
            target.copy_(made)
    else:
        return made
    return target


def _is_block(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and tensors.is_strided(value)


def can_change(value: Any) -> bool:
    """Whether somebody who holds `value` may expect to see what it becomes: by Python's convention
    an object with a hash of its own is a value, which never changes."""
    cls = type(value)
    if issubclass(cls, (*_MUTABLE, torch.Tensor)):
        return True
    if is_dataclass(cls):
        return not cls.__dataclass_params__.frozen  # type: ignore[attr-defined]  # it has them
    hashed_by: Any = cls.__hash__
    return cls not in STORED_AS_THEY_ARE and hashed_by in (None, object.__hash__)


class Fillings:
    """The objects of one target that were filled. Each is filled once: content of another place
    that differs gets an object of its own."""

    def __init__(self) -> None:
        self._contents: IdentityDict[Any, Any] = IdentityDict()

    def fill(self, target: Any, made: Any) -> tuple[Any, bool]:
        """`target` with the content of `made`, or `made` if it cannot take that; and whether all
        that somebody may hold of the target was filled."""
        if target is made or target is None:
            return made, True
        if isinstance(target, torch.Tensor):
            filled = overwrite(target, made)
            return filled, filled is target
        if not can_change(target):
            return (
                self._items(target, made) if type(target) is type(made) is tuple else (made, True)
            )
        if type(target) is not type(made) or not self._may_fill(target, made):
            return made, False
        content, whole = made, True
        if type(made) in (list, deque):
            content, whole = self._items(target, made)
        fill = _FILLS.get(type(target)) or (_fill_array if _is_array(target) else _fill_object)
        if not fill(target, content):
            return made, False
        self._contents[target] = made
        return target, whole

    def _may_fill(self, target: Any, made: Any) -> bool:
        if target in self._contents:
            return _are_equal(self._contents[target], made)
        return not isinstance(target, deque) or target.maxlen == made.maxlen

    def _items(self, target: Any, made: Any) -> tuple[Any, bool]:
        """The items of `made`, objects of `target` that took the content of those in their place
        among them."""
        if not any(type(item) in _NESTED for item in made):
            return made, True
        there = dict(enumerate(target))
        filled = [self.fill(there.get(number), item) for number, item in enumerate(made)]
        items = [item for item, _ in filled]
        return tuple(items) if type(made) is tuple else items, all(whole for _, whole in filled)


class PlainFilling:
    """Fills the lists and dicts of a target with those of plain values, each in its place.

    `containers_in` must know what the target has there, and it may have no container twice. With
    `clears`, a dict becomes what was committed; without it, entries that only it has stay. `left`
    are the keys that lead to what could not be filled: new values stand there.
    """

    def __init__(self, fillings: Fillings, *, clears: bool) -> None:
        self._fillings, self._clears = fillings, clears
        self.left: list[tuple[Any, ...]] = []

    def fill(self, target: Any, made: Any, keys: tuple[Any, ...] = ()) -> Any:
        """`target` with the content of `made`, or `made` where it cannot take that."""
        if target is None:
            return made
        if not _has_dict(made):
            filled, is_whole = self._fillings.fill(target, made)
            if not is_whole:
                self.left.append(keys)
            return filled
        below = (
            self._dict(target, made, keys) if type(made) is dict else self._rows(target, made, keys)
        )
        if type(target) is not type(made):
            if can_change(target):
                self.left.append(keys)
        elif type(made) is dict:
            if self._clears:
                target.clear()
            target.update(below)
            return target
        elif type(made) is list:
            target[:] = below
            return target
        return below

    def _dict(self, target: Any, made: dict[Any, Any], keys: tuple[Any, ...]) -> dict[Any, Any]:
        there = target if type(target) is dict else {}
        if _are_values(made.values()) and _are_values(there.values()):
            return made
        return {key: self.fill(there.get(key), each, (*keys, key)) for key, each in made.items()}

    def _rows(self, target: Any, made: Any, keys: tuple[Any, ...]) -> Any:
        there = target if type(target) in (list, tuple) else ()
        if _are_records(made) and _are_records(there):  # by far the most
            for n, row in enumerate(there[: len(made)]):
                if self._clears:
                    row.clear()
                row.update(made[n])
            return type(made)([*there[: len(made)], *made[len(there) :]])
        found = dict(enumerate(there))
        items = (self.fill(found.get(n), each, (*keys, n)) for n, each in enumerate(made))
        return type(made)(items)


def containers_in(target: Any) -> IdentitySet[Any] | None:
    """The lists and dicts at and below `target`, if it holds nothing but numbers and strings in
    these, each in one place, and in tuples; None otherwise."""
    found = IdentitySet[Any]()
    level = [target]
    while level:
        kinds = set(map(type, level))
        # a tuple never changes, so it may be in many places
        filled = [each for each in level if type(each) is not tuple] if tuple in kinds else level
        new = IdentitySet(filled)
        if not kinds <= {dict, list, tuple} or len(new) < len(filled) or len(found.update(new)):
            return None
        items = list(chain.from_iterable(map(dict.values if kinds == {dict} else _items_of, level)))
        level = [] if _are_values(items) else [each for each in items if type(each) not in _VALUES]
    return found


def _items_of(container: Any) -> Iterable[Any]:
    return container.values() if type(container) is dict else container


def _are_values(items: Iterable[Any]) -> bool:
    return set(map(type, items)) <= _VALUES


def _are_records(rows: Any) -> bool:
    """Whether all rows are dicts without containers, told in two passes in C."""
    return set(map(type, rows)) <= {dict} and _are_values(
        chain.from_iterable(map(dict.values, rows))
    )


def _has_dict(made: Any) -> bool:
    """Whether a plain value has paths below it: what is no dict, and has none, is one value."""
    return type(made) is dict or (type(made) in (list, tuple) and any(map(_has_dict, made)))


def _are_equal(one: Any, other: Any) -> bool:
    encoded = values.encode_value(one)
    return encoded is not values.NOT_A_VALUE and encoded == values.encode_value(other)


def _is_array(value: Any) -> bool:
    cls = type(value)
    return cls.__module__ == "numpy" and cls.__name__ == "ndarray"


def _fill_list(target: list[Any], made: list[Any]) -> bool:
    target[:] = made
    return True


def _fill_deque(target: deque[Any], made: Iterable[Any]) -> bool:
    target.clear()
    target.extend(made)
    return True


def _fill_set(target: set[Any], made: set[Any]) -> bool:
    target.clear()
    target.update(made)
    return True


def _fill_array(target: Any, made: Any) -> bool:
    if (target.dtype, target.shape) != (made.dtype, made.shape) or not target.flags.writeable:
        return False
    target[...] = made
    return True


_FILLS: dict[type, Callable[[Any, Any], bool]] = {
    list: _fill_list,
    deque: _fill_deque,
    set: _fill_set,
}


def _fill_object(target: Any, made: Any) -> bool:
    """Give `target` the state of `made` as pickle would give it to a new object; False if pickle
    makes a new object of more than its class."""
    try:
        reduced = made.__reduce_ex__(4)
    except TypeError:  # it cannot be pickled
        return False
    if not isinstance(reduced, tuple):
        return False
    make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    if make is not copyreg.__newobj__ or len(arguments) != 1:  # type: ignore[attr-defined]
        return False
    if hasattr(target, "__setstate__"):
        if state is None:
            return False
        target.__setstate__(state)
    else:
        _set_state(target, state)
    if isinstance(target, list):
        list.__setitem__(target, slice(None), list(items or ()))
    if isinstance(target, dict):
        dict.clear(target)
        dict.update(target, pairs or ())
    return True


def _set_state(target: Any, state: Any) -> None:
    own, in_slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    held = getattr(target, "__dict__", {})
    getstate: Any = type(target).__getstate__
    if getstate is object.__getstate__:  # a state of its own need not have all
        held.clear()
        for name in slots_of(type(target)):
            if hasattr(target, name):
                object.__delattr__(target, name)
    held.update(own or {})
    for name, value in (in_slots or {}).items():
        object.__setattr__(target, name, value)
