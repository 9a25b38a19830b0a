"""How does a replica of torchft that joins late get its peers' state? It takes only the chunks that
it lacks (docs/torchft.md).

`StoreTransport` needs torchft. The server and what travels need it not (`plugins.hosts`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptstore.interop.torchft.receive import Received
    from ckptstore.interop.torchft.transport import StoreTransport

__all__ = ["Received", "StoreTransport"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from ckptstore.interop.torchft import transport

        return getattr(transport, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
