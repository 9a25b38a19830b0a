"""What a chunk is called while it travels: its id, as in stores, or a quick name where no store takes part (docs/decisions/036-…).

A name says which it is. Both are hashes of all of the bytes, and what has come counts when its name is the one that was wanted. An id is
BLAKE3, which takes six times as long; a quick name is XXH3, which finds whatever breaks by itself and not what somebody breaks on purpose.
"""

from collections.abc import Callable
from typing import TypeAlias

from ckptstore.core.ids import CHUNK_ID_BYTES, digest

try:
    from xxhash import xxh3_128_digest
except ImportError as error:
    raise ImportError(f'StoreTransport needs xxhash: pip install "ckptstore[torchft]" ({error})') from error

Naming: TypeAlias = Callable[[bytes | memoryview], bytes]

_QUICK = b"XXH3 of a chunk."
"""How every quick name ends. No id that will ever be met does, and no number (`protocol.encode_number`)."""


def quick_name(data: bytes | memoryview) -> bytes:
    """XXH3-128 of `data`, as long as an id."""
    return xxh3_128_digest(data) + _QUICK


assert len(quick_name(b"")) == CHUNK_ID_BYTES

NAMINGS: dict[str, Naming] = {"blake3": digest, "xxh3": quick_name}
"""As descriptions and requests call them."""

BLAKE3, XXH3 = NAMINGS


def is_named(data: bytes | memoryview, name: bytes) -> bool:
    """Whether these are the bytes that `name` stands for."""
    return (quick_name if name.endswith(_QUICK) else digest)(data) == name
