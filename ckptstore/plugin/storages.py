"""The contract of storages, for code that keeps objects in another place."""

from ckptstore.storage.contract import (
    PART_BYTES,
    Capabilities,
    OpenFile,
    as_bytes,
    check_key,
    check_size,
    check_writable,
    largest,
    name_taken,
    put_finished,
)
