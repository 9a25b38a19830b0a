"""How are `ckptstore.json`, a commit document and its layout encoded (docs/format.md §2, §7)? Pure.

A document is canonical JSON in one zstd frame, named by the hash of the JSON. A layout says how
many ranks made the commit, and how they held its leaves.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptstore.core.config import (
    CODECS,
    FORMAT_VERSION,
    READ_FEATURES,
    StoreConfig,
    check_chunk_bytes,
)
from ckptstore.core.ids import (
    CHUNK_ID_BYTES,
    ChunkId,
    CommitId,
    digest,
    parse_chunk_id,
    parse_commit_id,
    parse_store_id,
)
from ckptstore.core.model import (
    SHARED,
    Box,
    Cast,
    CastError,
    CommitDocument,
    Shape,
    Thinning,
    TreeRef,
)
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput
from ckptstore.objects import canonical
from ckptstore.objects.canonical import bits_float, field, float_bits
from ckptstore.objects.fields import (
    COMMITS,
    COUNT,
    SESSION,
    TEXT,
    Field,
    as_it_is,
    decode_fields,
    optional,
    pairs_of,
    parse_hash,
    parse_integer,
    parse_text,
    parse_time,
    tuple_of,
)
from ckptstore.objects.frames import compress, decompress
from ckptstore.storage.contract import DOCUMENT_BYTES_MAX

_VERSION = 1


def content_id(trees: Iterable[tuple[str, TreeRef]]) -> str:
    """The hash of the trees alone: it identifies the state, whatever its step, run or order of
    keys."""
    return digest(canonical.encode({key: list(_tree_texts(tree)) for key, tree in trees})).hex()


def encode_document(document: CommitDocument) -> tuple[CommitId, bytes]:
    """The commit's id and the bytes to store. Raises `InvalidInput` for content that canonical
    JSON cannot hold."""
    data = canonical.encode(_to_json(document))
    stored = compress(data)
    if (size := max(len(data), len(stored))) > DOCUMENT_BYTES_MAX:
        raise InvalidInput(
            f"a commit's document would have {size} bytes, wanted at most {DOCUMENT_BYTES_MAX}; "
            "say less in it"
        )
    return CommitId(digest(data).hex()), stored


def decode_document(stored: bytes, commit: CommitId | None) -> CommitDocument:
    """The inverse of `encode_document`, verified against the id `commit` if given. Raises
    `Corrupt`. Allocates at most 256 MiB."""
    data = decompress(stored, DOCUMENT_BYTES_MAX)
    if commit is not None and (got := digest(data).hex()) != commit:
        raise Corrupt(
            f"the document of commit {commit} does not match its id: got {got}; run `ckptstore "
            "fsck`"
        )
    document = _from_json(canonical.decode(data))
    if (got := content_id(document.trees)) != document.content:
        raise Corrupt(
            f"a commit document does not match its content id: wanted {document.content}, got "
            f"{got}; run `ckptstore fsck`"
        )
    return document


def _tree_texts(tree: TreeRef) -> tuple[str, str]:
    return tree.schema.hex(), b64encode(b"".join(tree.pages)).decode()


def _parse_tree(value: Any) -> TreeRef:
    ids = b64decode(parse_text(value["pages"]), validate=True)
    if len(ids) % CHUNK_ID_BYTES:
        raise ValueError(f"{len(ids)} bytes are no whole ids")
    pages = (ChunkId(ids[i : i + CHUNK_ID_BYTES]) for i in range(0, len(ids), CHUNK_ID_BYTES))
    return TreeRef(parse_chunk_id(value["schema"]), tuple(pages))


_FIELDS: Mapping[str, Field] = {
    "store": Field(as_it_is, parse_store_id),
    "session": SESSION,
    "run": TEXT,
    "step": optional(parse_integer),
    "message": TEXT,
    "time_ns": Field(str, parse_time),
    "parents": COMMITS,
    "metrics": pairs_of(float_bits, bits_float),
    "tags": tuple_of(parse_text),
    "keys": tuple_of(parse_text),
    "trees": pairs_of(
        lambda tree: dict(zip(("schema", "pages"), _tree_texts(tree), strict=True)), _parse_tree
    ),
    "layout": Field(lambda chunk: chunk and chunk.hex(), optional(parse_chunk_id).decode),
    "content": Field(as_it_is, parse_hash),
    "logical_bytes": COUNT,
    "new_bytes": COUNT,
    "leaves": COUNT,
}


def _parse_thinning(value: Any) -> Thinning:
    globs = tuple(map(parse_text, value["globs"]))
    return Thinning(parse_commit_id(value["source"]), globs)


def _parse_cast(value: Any) -> Cast:
    errors = (
        CastError(
            parse_text(path),
            parse_text(dtype),
            bits_float(absolute),
            bits_float(relative),
            parse_integer(nans),
            parse_integer(overflows),
        )
        for path, dtype, absolute, relative, nans, overflows in value["errors"]
    )
    return Cast(pairs_of(as_it_is, parse_text).decode(value["globs"]), tuple(errors))


def _cast_to_json(cast: Cast) -> dict[str, Any]:
    errors = [
        [e.path, e.dtype, float_bits(e.absolute), float_bits(e.relative), e.nans, e.overflows]
        for e in cast.errors
    ]
    return {"globs": dict(cast.globs), "errors": errors}


_OPTIONAL: Mapping[str, Field] = {
    "links": pairs_of(as_it_is, parse_text),
    "thinned": Field(
        lambda thinned: {"source": thinned.source, "globs": list(thinned.globs)}, _parse_thinning
    ),
    "cast": Field(_cast_to_json, _parse_cast),
}
"""Absent from the document of a commit without them."""


def _to_json(document: CommitDocument) -> dict[str, Any]:
    fields = {name: field.encode(getattr(document, name)) for name, field in _FIELDS.items()}
    present = {name: each for name in _OPTIONAL if (each := getattr(document, name))}
    more = {name: _OPTIONAL[name].encode(each) for name, each in present.items()}
    return {"ckptstore": _VERSION, **fields, **more}


def _from_json(obj: Any) -> CommitDocument:
    if (version := field(obj, "ckptstore", int)) != _VERSION:
        raise Corrupt(
            f"a commit document has version {version}; wanted {_VERSION}; read it with a newer "
            "ckptstore"
        )
    found = decode_fields(_FIELDS, obj, "a commit document")
    present = {name: field for name, field in _OPTIONAL.items() if name in obj}
    found |= decode_fields(present, obj, "a commit document")
    keys, names = set(found["keys"]), {name for name, _ in found["trees"]}
    own = names - {SHARED}
    if len(keys) < len(found["keys"]) or own - keys or (keys > own) != (SHARED in names):
        raise Corrupt(
            f"a commit document's 'keys' are damaged: wanted those of the trees {sorted(names)}, "
            f"got {list(found['keys'])}; run `ckptstore fsck`"
        )
    return CommitDocument(**found)


@dataclass(frozen=True, slots=True)
class LeafPlacement:
    """How ranks held one leaf: the ranks in `ranks[i]` had `boxes[i]`.

    Without boxes, `ranks` has one group: the ranks that had the whole leaf, or a leaf of at most
    512 bytes in any way.
    """

    mesh: Shape | None
    placements: tuple[str, ...]
    boxes: tuple[Box, ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def divided(self) -> bool:
        """Whether no single rank had to hold the whole leaf."""
        return len(self.boxes) > 1 or any(each != "R" for each in self.placements)

    def boxes_of(self, rank: int) -> tuple[Box, ...]:
        """The boxes that `rank` held."""
        return tuple(
            box for box, ranks in zip(self.boxes, self.ranks, strict=False) if rank in ranks
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Which ranks held which parts of the `leaves`. Keys are paths without a rank. Aliases, and
    leaves that one rank held whole, are absent."""

    world: int
    leaves: Mapping[str, LeafPlacement]
    dcp: Mapping[str, Any] | None = None
    """What DCP calls the leaves, where DCP saved them (`interop.dcp.names`)."""


def decode_layout(data: bytes) -> Layout:
    """The layout in a layout chunk. Raises `Corrupt`."""
    try:
        document = canonical.decode(data)
        leaves = {
            path: _placed(leaf)
            for tree in document["trees"].values()
            for path, leaf in tree.items()
        }
        return Layout(canonical.field(document, "world", int), leaves, document.get("dcp"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"a commit's layout is damaged: {error!r}; run `ckptstore fsck`") from error


def _placed(leaf: Mapping[str, Any]) -> LeafPlacement:
    return LeafPlacement(
        tuple(leaf["mesh"][0]) if leaf["mesh"] else None,
        tuple(leaf["placements"]),
        tuple(Box(tuple(offsets), tuple(lengths)) for offsets, lengths in leaf["boxes"]),
        tuple(tuple(ranks) for ranks in leaf["ranks"]),
    )


def encode_config(config: StoreConfig) -> bytes:
    """The bytes of the file, indented for people; its check covers the canonical form."""
    fields = {
        "ckptstore": FORMAT_VERSION,
        "store": config.store,
        "chunk_bytes": config.chunk_bytes,
        "codec": config.codec,
        "log": {"place": config.log_place, "generation": config.generation},
        "read": list(config.read),
        "write": list(config.write),
    }
    return json.dumps({**fields, "check": _check(fields)}, indent=1).encode() + b"\n"


def decode_config(data: bytes, where: str) -> StoreConfig:
    """The contents of `where`/ckptstore.json. Raises `InvalidInput` for a foreign file or
    another format, `Corrupt` for a damaged one."""
    try:
        fields = canonical.decode(data)
    except CkptStoreError as error:
        raise Corrupt(
            f"{where}/ckptstore.json is not JSON ({len(data)} bytes); write it again from a copy, "
            "or run `ckptstore repair`"
        ) from error
    if not isinstance(fields, dict) or not isinstance(fields.get("ckptstore"), int):
        raise InvalidInput(
            f"{where}/ckptstore.json is not a ckptstore's: it has no version under 'ckptstore'; is "
            "this the right directory?"
        )
    if fields["ckptstore"] > FORMAT_VERSION:
        raise InvalidInput(
            f"{where} is a store of format {fields['ckptstore']}; this ckptstore reads up to "
            f"{FORMAT_VERSION}: install a newer ckptstore"
        )
    if fields["ckptstore"] < FORMAT_VERSION:
        raise InvalidInput(
            f"{where} is a store of format {fields['ckptstore']}, and this ckptstore reads format "
            f"{FORMAT_VERSION}: `ckptstore export` its commits with the ckptstore that made "
            "it, and `ckptstore import` them into a new store"
        )
    check = fields.pop("check", None)
    if check != _check(fields):
        raise Corrupt(
            f"{where}/ckptstore.json was changed or damaged: its check does not match; run "
            "`ckptstore repair`"
        )
    config = _config(fields, where)
    if unknown := frozenset(config.read) - READ_FEATURES:
        raise InvalidInput(
            f"{where} needs {', '.join(sorted(unknown))} to be read, which this ckptstore does not "
            "know: install a newer one"
        )
    return config


def _config(fields: dict[str, object], where: str) -> StoreConfig:
    log, read, write, codec = (fields.get(k) for k in ("log", "read", "write", "codec"))
    if (
        isinstance(log, dict)
        and isinstance(log.get("place"), str)
        and isinstance(log.get("generation"), int)
        and isinstance(read, list)
        and isinstance(write, list)
        and codec in CODECS
    ):
        chunk_bytes = check_chunk_bytes(fields.get("chunk_bytes"))
        features = (tuple(map(str, read)), tuple(map(str, write)))
        return StoreConfig(
            parse_store_id(fields.get("store")),
            chunk_bytes,
            str(codec),
            log["place"],
            log["generation"],
            *features,
        )
    raise InvalidInput(
        f"{where}/ckptstore.json lacks a field or has one of the wrong type; wanted docs/format.md "
        "§2"
    )


def _check(fields: dict[str, object]) -> str:
    return digest(canonical.encode(fields)).hex()
