"""How does `ckptstore.json` encode what a store is (docs/format.md §2)?"""

import json

from ckptstore.core.config import (
    CODECS,
    FORMAT_VERSION,
    READ_FEATURES,
    StoreConfig,
    check_chunk_bytes,
)
from ckptstore.core.ids import digest, parse_store_id
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput
from ckptstore.objects import canonical


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
    """The contents of `where`/ckptstore.json. Raises `InvalidInput` for a foreign file or a
    newer format, `Corrupt` for a damaged one."""
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
    check = fields.pop("check", None)
    if check != _check(fields):
        raise Corrupt(
            f"{where}/ckptstore.json was changed or damaged: its check does not match; run "
            "`ckptstore repair`"
        )
    config = _parse(fields, where)
    if unknown := frozenset(config.read) - READ_FEATURES:
        raise InvalidInput(
            f"{where} needs {', '.join(sorted(unknown))} to be read, which this ckptstore does not "
            "know: install a newer one"
        )
    return config


def _parse(fields: dict[str, object], where: str) -> StoreConfig:
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
