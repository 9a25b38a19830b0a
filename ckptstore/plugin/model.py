"""What a commit is made of: ids, shapes and boxes, leaves, schemas, and the bounds of each."""

from ckptstore.core.config import CHUNK_BYTES, MIB, RUN_BYTES, check_chunk_bytes, default_threads
from ckptstore.core.geometry import (
    WIDTHS,
    Grid,
    box_of_region,
    grid,
    intersect,
    nbytes_of,
    width_of,
    within,
)
from ckptstore.core.ids import (
    CHECKSUM_BYTES,
    CHUNK_ID_BYTES,
    CONFIG_KEY,
    ROOT_ENTRIES,
    ChunkId,
    CommitId,
    HoldId,
    KeyId,
    SessionId,
    StoreId,
    check_run,
    check_tag,
    checksum,
    digest,
    hold_tag,
    log_key,
    new_hold_id,
    parse_chunk_id,
    parse_commit_id,
    parse_signature_key,
    random_digits,
    signature_key,
    signatures_prefix,
)
from ckptstore.core.model import (
    INLINE_BYTES,
    Box,
    CommitInfo,
    LeafContent,
    LeafKind,
    Node,
    Schema,
    Shape,
    Skipped,
    TreeRef,
    leaves_of,
)
from ckptstore.core.refs import Best, parse_ref
