"""Objects of a store by key, in whichever place."""

from ckptstore.storage import open_storage
from ckptstore.storage.contract import (
    COPY,
    Capabilities,
    FileRange,
    OpenFile,
    Storage,
    Writer,
    put_finished,
)
from ckptstore.storage.reserve import RESERVE_BYTES, RESERVE_KEY, ensure_reserve
