"""Canonical CBOR, schemas, pages and patches, as they are stored and sent."""

from ckptstore.objects import canonical
from ckptstore.objects.canonical import field
from ckptstore.objects.codecs import PATCH
from ckptstore.objects.documents import (
    Layout,
    LeafPlacement,
    decode_config,
    decode_document,
    decode_layout,
)
from ckptstore.objects.pack import PAGE, PATCHED_DTYPE, bases_of
from ckptstore.objects.pages import decode_page, join_pages, split_pages
from ckptstore.objects.patches import BASES_MAX, DEPTH_MAX
from ckptstore.objects.patches import Link as Patch
from ckptstore.objects.patches import apply as apply_patches
from ckptstore.objects.schema import decode_schema, encode_schema
