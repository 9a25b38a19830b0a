"""How is everything in a store named, how do names become object keys, and how are commits
referred to?

A key is a path relative to the store's root. Text from a document becomes part of a key only
after one of the patterns here matched it (docs/format.md §1).

A ref is text that means a commit, parsed without knowing what any store holds:

    ref  =  [run "@"] base {"~" K}
    base =  step | "latest" | "best:" metric [":min" | ":max"] | tag
            | commit id or at least 6 of its first digits

`~K` is the K-th first parent, `~` the first. `run@` goes with a step, `latest` and `best:` only;
without it they are looked for in the run that the store was opened with.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Literal, NewType, TypeAlias

from blake3 import blake3
from xxhash import xxh3_128_digest

from ckptstore.errors import Corrupt, InvalidInput

ChunkId = NewType("ChunkId", bytes)
StoreId = NewType("StoreId", str)
SessionId = NewType("SessionId", str)
PackId = NewType("PackId", str)
CommitId = NewType("CommitId", str)

CHUNK_ID_BYTES = 32
CHECKSUM_BYTES = 16
CONFIG_KEY = "ckptstore.json"
TWIN_SUFFIX = ".2"

_STORE = re.compile(r"[0-9a-f]{32}")
_SESSION = re.compile(r"[0-9a-f]{24}")
_PACK = re.compile(r"([0-9a-f]{24})-(0|[1-9][0-9]{0,6})-(0|[1-9][0-9]{0,6})")
_COMMIT = re.compile(r"[0-9a-f]{64}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,199}")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,199}")


def digest(data: bytes | memoryview) -> bytes:
    """BLAKE3-256 of `data`, 32 bytes."""
    return blake3(data).digest()


def checksum(data: bytes | memoryview) -> bytes:
    """XXH3-128 of `data`, 16 bytes. Detects accidental damage in an eighth of the time, but no
    deliberate change."""
    return xxh3_128_digest(data)


def new_store_id() -> StoreId:
    return StoreId(secrets.token_hex(16))


def new_session_id() -> SessionId:
    return SessionId(secrets.token_hex(12))


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


def parse_chunk_id(text: object) -> ChunkId:
    return ChunkId(bytes.fromhex(_parse(_COMMIT, text, "chunk id")))


def check_tag(name: object) -> str:
    """`name` if it may be a tag, else `InvalidInput`."""
    return _check_label(_TAG, name, "tag")


def check_run(name: object) -> str:
    """`name` if it may be a run, else `InvalidInput`."""
    return _check_label(_RUN, name, "run")


def pack_key(pack: PackId) -> str:
    return f"packs/{pack[:2]}/{pack}"


def twin_key(pack: PackId) -> str:
    return pack_key(pack) + TWIN_SUFFIX


def document_key(session: SessionId, commit: CommitId) -> str:
    return f"commits/{session}-{commit}"


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
            f"{name!r:.80} cannot be a {noun}: wanted 1 to 200 letters, digits and _ . + - /, "
            f"beginning with a letter, a digit or _, without '..', '//' or a '/' at the end"
        )
    if noun == "tag" and (name == "latest" or name.isdecimal()):
        raise InvalidInput(
            f"{name!r} cannot be a tag: it already means "
            f"{'a step' if name.isdecimal() else 'the newest commit'}"
        )
    return name


_FORMS = (
    "a step, 'latest', 'best:METRIC' or 'best:METRIC:max', a tag, at least 6 digits of a commit "
    "id, 'RUN@STEP', "
    "any of them with '~K' behind"
)
_STEP_MAX = 2**53
"""Of the log's entries: no commit has a larger one."""
_PREFIX = re.compile(r"[0-9a-f]{6,64}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]*")
_RUN_AND_BASE = re.compile(r"(?:([^@:]*)@)?(.*)", re.DOTALL)
_ANCESTOR = re.compile(r"(.*?)((?:~[0-9]{0,9})+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Step:
    """The newest commit of a step; `prefix` if the digits may also begin a commit id."""

    step: int
    run: str | None = None
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest commit of a run."""

    run: str | None = None


@dataclass(frozen=True, slots=True)
class Best:
    """The commit of a run with the best value of a metric, the newest of equals."""

    metric: str
    order: Literal["min", "max"] = "min"
    run: str | None = None


@dataclass(frozen=True, slots=True)
class Name:
    """A tag, or else a commit id or the beginning of one (`prefix`)."""

    name: str
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class Ancestor:
    """The `generations`-th first parent of `base`."""

    base: "Step | Latest | Best | Name"
    generations: int


Ref: TypeAlias = Step | Latest | Best | Name | Ancestor


def parse_ref(ref: str | int) -> Ref:
    """The parsed form of `ref`; an integer is a step. Raises `InvalidInput` for anything else."""
    if isinstance(ref, int) and not isinstance(ref, bool) and abs(ref) <= _STEP_MAX:
        return Step(ref)
    if not isinstance(ref, str) or "\0" in ref or not ref.isprintable():
        raise InvalidInput(f"{ref!r:.80} is no ref: wanted {_FORMS}")
    ancestor = _ANCESTOR.fullmatch(ref)
    if not ancestor:
        return _parse_base(ref)
    base, tildes = ancestor.groups()
    generations = sum(int(k or 1) for k in tildes[1:].split("~"))
    return Ancestor(_parse_base(base), generations) if generations else _parse_base(base)


def _parse_base(text: str) -> Step | Latest | Best | Name:
    run, base = _RUN_AND_BASE.fullmatch(text).groups()  # type: ignore[union-attr]  # matches any text
    if run is not None:
        check_run(run)
    if re.fullmatch(r"-?[0-9]{1,18}", base):
        return Step(int(base), run, _prefix(base) if run is None else None)
    if base == "latest":
        return Latest(run)
    if base.startswith("best:"):
        return _parse_best(text, base.removeprefix("best:"), run)
    if run is None and _NAME.fullmatch(base):
        return Name(base, _prefix(base))
    raise InvalidInput(f"{text!r} is no ref: wanted {_FORMS}")


def _parse_best(text: str, wanted: str, run: str | None) -> Best:
    metric, _, order = wanted.rpartition(":")
    if order == "max" and metric:
        return Best(metric, "max", run)
    if order == "min" and metric:
        return Best(metric, "min", run)
    if not wanted:
        raise InvalidInput(
            f"{text!r} names no metric: wanted 'best:METRIC' (smallest) or 'best:METRIC:max' "
            "(largest)"
        )
    return Best(wanted, "min", run)


def _prefix(text: str) -> str | None:
    return text if _PREFIX.fullmatch(text) else None
