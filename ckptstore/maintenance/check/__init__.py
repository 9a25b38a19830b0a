"""Findings of fsck, as frozen values: the object, chunk, leaf, pack and commits concerned, and
the next step."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from ckptstore.core.ids import ChunkId, CommitId, PackId, digest
from ckptstore.core.text import bytes_text, count_text
from ckptstore.errors import InvalidInput


class Level(IntEnum):
    """The depth of fsck; each level includes those before."""

    REFS = 1
    CONNECTIVITY = 2
    PACKS = 3
    DATA = 4


class Severity(StrEnum):
    """`damage` may cost a commit, `unread` was not readable and may be sound, `index` can be
    rebuilt from the store, a `note` costs nothing."""

    DAMAGE = "damage"
    UNREAD = "unread"
    INDEX = "index"
    NOTE = "note"


class Kind(StrEnum):
    """The category of a finding."""

    CONFIG = "config"
    ENTRY = "entry"
    CHECKPOINT = "checkpoint"
    REF = "ref"
    DOCUMENT = "document"
    SIGNATURE = "signature"
    TREE = "tree"
    CHUNK = "chunk"
    PACK = "pack"
    TWIN = "twin"
    CATALOG = "catalog"
    CHUNK_INDEX = "chunk-index"
    ORPHAN = "orphan"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem. `key` is the object it was found in, `entry` the number of a log entry.
    Because of it `commits` cannot be restored completely; `leaf` is one of their affected
    leaves. `next` is the step to take."""

    kind: Kind
    what: str
    next: str
    severity: Severity = Severity.DAMAGE
    key: str = ""
    entry: int = 0
    pack: PackId | None = None
    chunk: ChunkId | None = None
    leaf: str = ""
    commits: tuple[CommitId, ...] = ()

    def __str__(self) -> str:
        return "\n".join(lines_of([self]))


def lines_of(findings: Iterable[Finding]) -> Iterator[str]:
    """The findings as text, grouped by their next step, which is said once."""
    steps: dict[str, list[str]] = defaultdict(list)
    for finding in findings:
        steps[finding.next].append(f"{finding.severity}: {finding.what}")
    for step, found in steps.items():
        yield from found
        yield f"    next: {step}"


def severity_of(*, hidden: bool) -> Severity:
    """The severity of damage that costs a commit, which may be `hidden`: forgotten."""
    return Severity.NOTE if hidden else Severity.DAMAGE


def foreign(key: str, where: str = "there") -> Finding:
    """An object that the store did not make."""
    what = f"{key} is nothing that belongs {where}"
    return Finding(Kind.FOREIGN, what, "delete it if it is yours", Severity.NOTE, key)


def unread(kind: Kind, what: str, pack: PackId | None = None) -> Finding:
    """Storage did not return something. Its bytes may be sound, so it costs no commit, and `repair`
    leaves it alone (it has no key)."""
    step = "see to the permissions and the storage, then run fsck again"
    return Finding(kind, what, step, Severity.UNREAD, pack=pack)


@dataclass(frozen=True, slots=True)
class Looked:
    """Amounts that fsck has checked. `data_bytes` were read and verified, of `stored_bytes` in
    all."""

    entries: int = 0
    commits: int = 0
    packs: int = 0
    chunks: int = 0
    data_bytes: int = 0
    stored_bytes: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """All findings of one fsck."""

    level: Level
    findings: tuple[Finding, ...]
    looked: Looked = field(default_factory=Looked)

    @property
    def damaged(self) -> bool:
        """Whether anything was found that may cost a commit."""
        return any(finding.severity is Severity.DAMAGE for finding in self.findings)

    @property
    def unread(self) -> bool:
        """Whether storage did not return something: what it holds may be sound, or not."""
        return any(finding.severity is Severity.UNREAD for finding in self.findings)

    @property
    def damaged_commits(self) -> dict[CommitId, tuple[Finding, ...]]:
        """The commits that cannot be restored completely, with the reasons."""
        named: dict[CommitId, tuple[Finding, ...]] = {}
        for finding in self.findings:
            for commit in finding.commits:
                named[commit] = (*named.get(commit, ()), finding)
        return named

    def __repr__(self) -> str:
        return f"<fsck: {self.summary}>"

    def __str__(self) -> str:
        damaged = (
            f"{commit[:12]} cannot be restored whole: {count_text(len(found), 'finding')}, one of "
            f"the leaves is {found[0].leaf or 'unknown'}"
            for commit, found in self.damaged_commits.items()
        )
        return "\n".join((*lines_of(self.findings), *damaged, self.summary))

    @property
    def summary(self) -> str:
        """The verdict, and how far fsck looked."""
        looked = self.looked
        seen = [count_text(looked.entries, "log entry").replace("entrys", "entries")]
        if self.level >= Level.CONNECTIVITY:
            seen += [count_text(looked.commits, "commit"), count_text(looked.chunks, "chunk")]
        if self.level >= Level.PACKS:
            seen.append(count_text(looked.packs, "pack"))
        if self.level >= Level.DATA:
            read, stored = bytes_text(looked.data_bytes), bytes_text(looked.stored_bytes)
            seen.append(f"{read} of {stored} read")
        unread = looked.stored_bytes - looked.data_bytes
        verdict = "no damage to any commit" if self.findings else "no damage"
        if self.damaged:
            verdict = "damaged"
        elif self.unread:
            verdict = "not all could be read; no damage found in the rest"
        elif unread:
            verdict = f"{verdict} found"
        if self.level < Level.DATA and unread:
            seen.append(f"no data read (`ckptstore fsck --read-data` reads {bytes_text(unread)})")
        return f"{verdict}: {', '.join(seen)}"


@dataclass(frozen=True, slots=True)
class Share:
    """The amount of stored data to read: `percent` of all, or `bytes`."""

    percent: float = 100.0
    bytes: int | None = None

    def of(self, total_bytes: int) -> int:
        """The bytes to read out of `total_bytes`."""
        return min(
            total_bytes,
            self.bytes if self.bytes is not None else int(total_bytes * self.percent / 100),
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` of `count` of a check, from 1 on. A commit, a pack or an orphan is of one of
    them, whatever else the store has at the time: by the hash of its name."""

    number: int = 1
    count: int = 1

    def has(self, name: str) -> bool:
        """Whether this part has what is called so."""
        hashed = int.from_bytes(digest(name.encode())[:8], "little")
        return hashed % self.count == self.number - 1


WHOLE = Shard()

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_level(level: Level | str) -> Level:
    """The level of that name. Raises `InvalidInput`."""
    try:
        return Level[level.upper()] if isinstance(level, str) else Level(level)
    except (KeyError, ValueError) as error:
        raise InvalidInput(
            f"{level!r} is no level: wanted {', '.join(known.name.lower() for known in Level)}"
        ) from error


def parse_shard(text: str | None) -> Shard:
    """The part that `I/N` names, `WHOLE` for None. Raises `InvalidInput`."""
    if text is None:
        return WHOLE
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text) if isinstance(text, str) else None
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise InvalidInput(
            f"{text!r:.80} is no part of a check: wanted I/N, such as 1/8 to 8/8 for eight parts"
        )
    return Shard(int(found[1]), int(found[2]))


def parse_share(text: object) -> Share | None:
    """`5%`, `10G` (also `K`, `M`, `T`: powers of 1024), a number of bytes, or `all`, each as text;
    None reads nothing. Raises `InvalidInput`."""
    if text is None:
        return None
    if text == "all":
        return Share(percent=100.0)
    given = text.upper() if isinstance(text, str) else ""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)([%KMGT]?)", given)
    value, unit = (float(found[1]), found[2]) if found else (0.0, "")
    if not 0 < value < 1 << 60 or (unit == "%" and value > 100):
        raise InvalidInput(
            f"{text!r:.80} is no amount of data to read: wanted a share such as '5%', a size such "
            "as '10G', or 'all'"
        )
    return Share(percent=value) if unit == "%" else Share(bytes=int(value * (1 << _UNITS[unit])))
