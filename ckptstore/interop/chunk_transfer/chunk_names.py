"""How is a chunk named while it travels? By a quick name or by its id, as stores do
(docs/decisions/036-…, 040-…).

A name shows its kind. Both are hashes of all bytes, and a received chunk counts when its name
matches. An id is a BLAKE3 hash, which takes four to six times as long. A quick name is an XXH3
hash, which detects accidental damage but not deliberate forgery.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3
from xxhash import xxh3_128

from ckptstore.core.ids import CHUNK_ID_BYTES

_QUICK = b"XXH3 of a chunk."
"""The suffix of every quick name. No id or number (`protocol.encode_number`) ends like this in
practice.
"""


class Hash(Protocol):
    """A hash in progress."""

    def update(self, data: memoryview, /) -> object: ...

    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Naming:
    """A kind of chunk name: a hash of all bytes, and a suffix. Together they are as long as an
    id.
    """

    begin: Callable[..., Hash]
    ending: bytes = b""

    def __call__(self, data: bytes | memoryview) -> bytes:
        return self.begin(data).digest() + self.ending

    def of_pieces(self, pieces: Iterable[memoryview]) -> bytes:
        """The name of a chunk given in pieces."""
        begun = self.begin()
        for piece in pieces:
            begun.update(piece)
        return begun.digest() + self.ending


ids, quick_name = Naming(blake3), Naming(xxh3_128, _QUICK)

assert len(quick_name(b"")) == len(ids(b"")) == CHUNK_ID_BYTES

NAMINGS = {"blake3": ids, "xxh3": quick_name}
"""By the keys that descriptions and requests use."""

BLAKE3, XXH3 = NAMINGS


def is_named(data: bytes | memoryview, name: bytes) -> bool:
    """Whether `name` is the name of these bytes."""
    return (quick_name if name.endswith(_QUICK) else ids)(data) == name
