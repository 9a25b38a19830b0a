"""How is a value stored for an object that cannot be hashed, or that equals other objects? And how
are such objects told apart?"""

from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class IdentityDict(Generic[_Key, _Value]):
    """Values by the identity of their keys.

    It keeps its keys alive: another object cannot get the `id()` of a key that is gone.
    """

    def __init__(self, items: Iterable[tuple[_Key, _Value]] = ()) -> None:
        self._items = {id(key): (key, value) for key, value in items}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return id(key) in self._items

    def __getitem__(self, key: _Key) -> _Value:
        return self._items[id(key)][1]

    def __setitem__(self, key: _Key, value: _Value) -> None:
        self._items[id(key)] = key, value

    def items(self) -> Iterable[tuple[_Key, _Value]]:
        """Each key with its value."""
        return self._items.values()

    def get(self, key: _Key, default: _Value) -> _Value:
        """The value of `key`, or `default`."""
        found = self._items.get(id(key))
        return default if found is None else found[1]

    def setdefault(self, key: _Key, value: _Value) -> _Value:
        """The value of `key`, which becomes `value` if it has none."""
        return self._items.setdefault(id(key), (key, value))[1]


class IdentitySet(Generic[_Key]):
    """Objects by their identity, which it keeps alive."""

    def __init__(self, objects: Collection[_Key] = ()) -> None:
        self._items = dict(zip(map(id, objects), objects, strict=True))

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, each: object) -> bool:
        return id(each) in self._items

    def add(self, each: _Key) -> bool:
        """Add an object; returns whether it is new."""
        before = len(self._items)
        self._items[id(each)] = each
        return len(self._items) > before

    def update(self, others: "IdentitySet[_Key]") -> "IdentitySet[_Key]":
        """Add the objects of `others`; returns those that are here already."""
        both = IdentitySet([self._items[name] for name in self._items.keys() & others._items])
        self._items |= others._items
        return both

    def remove(self, others: "IdentitySet[_Key]") -> None:
        for name in others._items:
            self._items.pop(name, None)

    def isdisjoint(self, others: "IdentitySet[_Key]") -> bool:
        return self._items.keys().isdisjoint(others._items.keys())
