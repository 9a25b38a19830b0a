"""How is everything in a store named, and how do names become object keys?

A key is a path relative to the store's root. Text from a document becomes part of a key only
after one of the patterns here matched it (docs/format.md §1).
"""

import os
import re
from collections.abc import Iterable
from typing import NewType

from blake3 import blake3
from xxhash import xxh3_128, xxh3_128_digest

from ckptstore.errors import Corrupt, InvalidInput

ChunkId = NewType("ChunkId", bytes)
StoreId = NewType("StoreId", str)
SessionId = NewType("SessionId", str)
PackId = NewType("PackId", str)
CommitId = NewType("CommitId", str)
KeyId = NewType("KeyId", str)
HoldId = NewType("HoldId", str)

CHUNK_ID_BYTES = 32
CHECKSUM_BYTES = 16
CONFIG_KEY = "ckptstore.json"
TWIN_SUFFIX = ".2"

ROOT_ENTRIES = frozenset(
    f"{CONFIG_KEY} packs commits log sessions signatures index tmp reserve quarantine".split()
)
"""What lies directly in the directory of a store."""

_STORE = re.compile(r"[0-9a-f]{32}")
_SESSION = re.compile(r"[0-9a-f]{24}")
_PACK = re.compile(r"([0-9a-f]{24})-(0|[1-9][0-9]{0,6})-(0|[1-9][0-9]{0,6})")
_COMMIT = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"signatures/([0-9a-f]{64})-([0-9a-f]{32})")
_HOLD = re.compile(r"[0-9a-f]{32}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,199}")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,199}")


def digest(data: bytes | memoryview) -> bytes:
    """BLAKE3-256 of `data`, 32 bytes."""
    return blake3(data).digest()


def checksum(data: bytes | memoryview) -> bytes:
    """XXH3-128 of `data`, 16 bytes. Detects accidental damage in an eighth of the time, but no
    deliberate change."""
    return xxh3_128_digest(data)


def checksum_of(parts: Iterable[bytes | memoryview]) -> bytes:
    """The checksum of parts, one behind the other."""
    found = xxh3_128()
    for part in parts:
        found.update(part)
    return found.digest()


def random_digits(nbytes: int) -> str:
    """`nbytes` of the system's random source, two hexadecimal digits each, as `secrets.token_hex`
    gives them: that module takes 8 ms to import."""
    return os.urandom(nbytes).hex()


def new_store_id() -> StoreId:
    return StoreId(random_digits(16))


def new_session_id() -> SessionId:
    return SessionId(random_digits(12))


def pack_id(session: SessionId, rank: int, n: int) -> PackId:
    return PackId(f"{session}-{rank}-{n}")


def pack_rank(pack: PackId) -> int:
    """The number of the writer that wrote a pack."""
    return int(pack.split("-")[1])


def pack_session(pack: PackId) -> SessionId:
    """The session that wrote `pack`."""
    return SessionId(pack[:24])


def parse_store_id(text: object) -> StoreId:
    return StoreId(_parse(_STORE, text, "store id"))


def parse_session_id(text: object) -> SessionId:
    return SessionId(_parse(_SESSION, text, "session id"))


def parse_pack_id(text: object) -> PackId:
    return PackId(_parse(_PACK, text, "pack id"))


def parse_commit_id(text: object) -> CommitId:
    return CommitId(_parse(_COMMIT, text, "commit id"))


def is_commit_id(text: str) -> bool:
    """Whether a ref is a whole commit id, which names one commit for ever."""
    return _COMMIT.fullmatch(text) is not None


def parse_chunk_id(text: object) -> ChunkId:
    return ChunkId(bytes.fromhex(_parse(_COMMIT, text, "chunk id")))


HOLDS = "held/"
"""The tags with this prefix are holds. Only `plugins.adopt` gives such
a name to a commit."""


def check_tag(name: object) -> str:
    """`name` if somebody may give it to a commit, else `InvalidInput`. Every name that comes from
    a user passes here."""
    tag = parse_tag(name)
    if is_hold(tag):
        raise InvalidInput(
            f"{tag[:80]!r} is not a name to give: tags that begin with {HOLDS!r} keep the commits "
            "of hollow directories; choose another name"
        )
    return tag


def parse_tag(name: object) -> str:
    """`name` if a log may have such a tag, which may be a hold; else `InvalidInput`."""
    return _check_label(_TAG, name, "tag")


def new_hold_id() -> HoldId:
    """An id for a hollow directory, which no other directory has."""
    return HoldId(random_digits(16))


def parse_hold_id(text: object) -> HoldId:
    return HoldId(_parse(_HOLD, text, "hold id"))


def hold_tag(hold: HoldId) -> str:
    """The tag that keeps the commit of the hollow directories with this id."""
    return HOLDS + hold


def is_hold(tag: str) -> bool:
    """Whether a tag is the hold of hollow directories (`plugins.adopt.adoption`)."""
    return tag.startswith(HOLDS)


def check_run(name: object) -> str:
    """`name` if it may be a run, else `InvalidInput`."""
    return _check_label(_RUN, name, "run")


def pack_key(pack: PackId) -> str:
    return f"packs/{pack[:2]}/{pack}"


def twin_key(pack: PackId) -> str:
    return pack_key(pack) + TWIN_SUFFIX


def document_key(session: SessionId, commit: CommitId) -> str:
    return f"commits/{session}-{commit}"


def signatures_prefix(commit: CommitId) -> str:
    return f"signatures/{commit}-"


def signature_key(commit: CommitId, key: KeyId) -> str:
    return f"{signatures_prefix(commit)}{key}"


def parse_signature_key(key: str) -> tuple[CommitId, KeyId] | None:
    """The commit and the key of a signature's object; None for another name."""
    found = _SIGNATURE.fullmatch(key)
    return (CommitId(found[1]), KeyId(found[2])) if found else None


def log_key(n: int) -> str:
    return f"log/{n:012d}"


def checkpoint_key(n: int) -> str:
    return f"log/checkpoint-{n:012d}"


def segment_key(n: int) -> str:
    return f"log/segment-{n:012d}"


def log_scratch_key(name: str) -> str:
    return f"log/scratch-{name}"


def footers_key(batch: int) -> str:
    return f"footers/{batch:012d}"


def session_key(session: SessionId) -> str:
    return f"sessions/{session}"


def _parse(pattern: re.Pattern[str], text: object, noun: str) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise Corrupt(
            f"not a {noun}: {str(text)[:80]!r}; wanted {pattern.pattern}; run `ckptstore fsck`"
        )
    return text


def _check_label(pattern: re.Pattern[str], name: object, noun: str) -> str:
    if (
        not isinstance(name, str)
        or not pattern.fullmatch(name)
        or "//" in name
        or ".." in name
        or name.endswith("/")
    ):
        raise InvalidInput(
            f"{name!r:.80} cannot be a {noun}: wanted 1 to 200 of A-Z a-z 0-9 _ . + - /, "
            f"beginning with a letter, a digit or _, without '..', '//' or a '/' at the end"
        )
    if noun == "tag" and (name == "latest" or name.isdecimal()):
        raise InvalidInput(
            f"{name!r} cannot be a tag: it already means "
            f"{'a step' if name.isdecimal() else 'the newest commit'}"
        )
    return name
