"""The chunk index: the footers of the store's packs, folded into LMDB on this host."""

from ckptstore.index.chunks.index import ChunkIndex
from ckptstore.index.chunks.records import LOCATED_DTYPE, LOCATION_DTYPE, Locations

__all__ = ["LOCATED_DTYPE", "LOCATION_DTYPE", "ChunkIndex", "Locations"]
