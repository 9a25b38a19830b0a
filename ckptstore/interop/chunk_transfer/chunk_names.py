"""What a chunk is called while it travels: a quick name, or its id, as in stores, for who looks
into one (docs/decisions/036-…, 040-…).

A name says which it is. Both are hashes of all of the bytes, and what has come counts when its name
is the one that was wanted. An id is BLAKE3, which takes four to six times as long; a quick name is
XXH3, which finds whatever breaks by itself and not what somebody breaks on purpose.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3
from xxhash import xxh3_128

from ckptstore.core.ids import CHUNK_ID_BYTES

_QUICK = b"XXH3 of a chunk."
"""How every quick name ends. No id that will ever be met does, and no number
(`protocol.encode_number`)."""


class Hash(Protocol):
    """A hash that is still being made."""

    def update(self, data: memoryview, /) -> object: ...

    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Naming:
    """One way to call chunks: a hash of all of their bytes, and what follows it in every name. Both
    together are as long as an id."""

    begin: Callable[..., Hash]
    ending: bytes = b""

    def __call__(self, data: bytes | memoryview) -> bytes:
        return self.begin(data).digest() + self.ending

    def of_pieces(self, pieces: Iterable[memoryview]) -> bytes:
        """The name of a chunk whose bytes come piece by piece."""
        begun = self.begin()
        for piece in pieces:
            begun.update(piece)
        return begun.digest() + self.ending


ids, quick_name = Naming(blake3), Naming(xxh3_128, _QUICK)

assert len(quick_name(b"")) == len(ids(b"")) == CHUNK_ID_BYTES

NAMINGS = {"blake3": ids, "xxh3": quick_name}
"""As descriptions and requests call them."""

BLAKE3, XXH3 = NAMINGS


def is_named(data: bytes | memoryview, name: bytes) -> bool:
    """Whether these are the bytes that `name` stands for."""
    return (quick_name if name.endswith(_QUICK) else ids)(data) == name
