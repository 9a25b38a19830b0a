"""How is a server of this protocol reached, and how does it show that it is the one?"""

from dataclasses import dataclass, field
from typing import Any

HELLO_PATH = "/ckptstore/1/hello"

_WORD_CHARACTERS = 200
_PORTS = range(1 << 16)


@dataclass(frozen=True, slots=True)
class Invitation:
    """The secret `token` opens a server, and the public `instance` identifies it at one of its
    addresses."""

    instance: str
    token: str = field(repr=False)
    addresses: tuple[tuple[str, int], ...]


def invitation_of(said: Any) -> Invitation:
    """An invitation from JSON. Raises `ValueError`, which does not tell the token."""
    try:
        addresses = tuple((str(host), int(port)) for host, port in said["addresses"])
        found = Invitation(said["instance"], said["token"], addresses)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a field is absent, or something else: {error!r}") from None
    words = (found.instance, found.token, *(host for host, _ in addresses))
    if not all(type(word) is str and _is_word(word) for word in words):
        raise ValueError(f"wanted printable words of at most {_WORD_CHARACTERS} characters")
    if not all(port in _PORTS for _, port in addresses):
        raise ValueError(f"wanted ports below {_PORTS.stop}")
    return found


def _is_word(word: str) -> bool:
    """Whether `word` may stand in a header."""
    return word.isprintable() and len(word) <= _WORD_CHARACTERS
