"""What is a world of the protocol's model? A `State` of the fold, the pack objects that exist, and
where each actor stands.

Actors are naive: they append what they planned from what they saw, and the state's `check` at the
head of the log says what they may not. So a check that is taken away shows up as a loss.

A pack's chunks are a mask in its `bytes`, a commit's a string of letters in its `content`.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

from ckptstore.core.ids import CommitId, PackId, SessionId, StoreId
from ckptstore.core.model import PackRecord
from ckptstore.log.admission import Refusal, check
from ckptstore.log.entries import Body, Commit, Entry, Register
from ckptstore.log.state import State, apply, genesis, number

CHUNKS = "abc"
LETTERS = {
    mask: tuple(c for i, c in enumerate(CHUNKS) if mask >> i & 1)
    for mask in range(1 << len(CHUNKS))
}
BASES = {"b": "a", "c": "b"}
"""Where chunks are patches: the base of each. What is written without its base is written with it,
which stands for a chunk that is stored whole."""
MIXED_BASES = {"b": "a"}
"""Where a pack has a patch and, beside it, a whole chunk for which it may be referred to alone."""
STORE = StoreId("0" * 32)
KEPT = CommitId("k0")
THIN = CommitId("t0")

Placed: TypeAlias = tuple[str, PackId]
"""A chunk and a pack that holds it."""


@dataclass(frozen=True)
class Scope:
    """How much is explored, and which of the protocol's rules that are not checks the actors
    break."""

    wants: tuple[str, ...] = ("a", "bc")
    gcs: int = 1
    duplicate: bool = False
    copies: int = 1
    forgetting: bool = True
    undeleting: bool = True
    tagging: bool = False
    reading: bool = False
    lossy: bool = False
    reindexing: bool = False
    object_first: bool = False
    blind_undelete: bool = False
    stubborn_reader: bool = False
    hasty_writer: bool = False
    sparing: bool = False
    compacting: bool = False
    thinning: bool = False
    sending: bool = False
    patching: bool = False
    mixed: bool = False
    batching: bool = False
    forgetful_batch: bool = False
    shallow_writer: bool = False
    shallow_mark: bool = False
    shallow_undelete: bool = False


class Writer(NamedTuple):
    """`sent` is the number of an entry that is on its way."""

    step: str
    name: str
    reuse: frozenset[Placed]
    sent: int = 0


class Collector(NamedTuple):
    step: str
    mark: int = 0
    keep: frozenset[Placed] = frozenset()
    seen: frozenset[PackId] = frozenset()
    soft: tuple[CommitId, ...] = ()
    victim: PackId | None = None
    fence: int = 0
    copies: int = 0


class World(NamedTuple):
    state: State
    numbers: dict[PackId, int]
    objects: frozenset[tuple[PackId, int]]
    writers: tuple[Writer, ...]
    gcs: tuple[Collector, ...]
    undelete: tuple[CommitId, frozenset[PackId]] | None
    views: frozenset[frozenset[Placed]]
    kept: frozenset[CommitId]
    planned: frozenset[str] = frozenset()
    reader: frozenset[Placed] | None = None
    misled: str = ""
    compactor: str = "idle"
    thin: tuple[str, frozenset[PackId]] | None = None
    sender: tuple[str, CommitId | None] = ("idle", None)


Label: TypeAlias = tuple[object, ...]
Move: TypeAlias = tuple[Label, World]


def bases_of(scope: Scope) -> dict[str, str]:
    """The base of each chunk that is a patch."""
    return MIXED_BASES if scope.mixed else BASES if scope.patching else {}


def made_of(chunks: str | frozenset[str], scope: Scope) -> frozenset[str]:
    """Chunks, and the bases that they need, and so on."""
    return _made_of(chunks, scope.mixed, scope.patching)


@cache
def _made_of(chunks: str | frozenset[str], mixed: bool, patching: bool) -> frozenset[str]:
    bases = bases_of(Scope(mixed=mixed, patching=patching))
    found, left = frozenset[str](), frozenset(chunks)
    while left:
        found |= left
        left = frozenset(base for c, base in bases.items() if c in left) - found
    return found


def mask_of(chunks: str | set[str]) -> int:
    return sum(1 << CHUNKS.index(c) for c in chunks)


def session_of(name: str) -> SessionId:
    return SessionId(f"{name:-<24}")


def pack_of(name: str) -> PackId:
    return PackId(f"{session_of(name)}-0-0")


def record(pack: PackId, mask: int) -> PackRecord:
    return PackRecord(pack, mask, mask.bit_count(), False)


def commit_body(
    name: str, chunks: str, packs: tuple[PackRecord, ...], reused: frozenset[int], session: str = ""
) -> Commit:
    run = "main" if name.startswith("k") else name[:2]
    commit = CommitId(name[:2])
    return Commit(
        session_of(session or name),
        commit,
        chunks,
        run,
        None,
        (),
        "",
        (),
        (),
        packs,
        reused,
        (),
        0,
        0,
        0,
        0,
    )


def append(world: World, body: Body) -> World:
    """One entry at the head of the log; the table before it becomes a possible stale view."""
    state = world.state
    numbered = number(state, body)
    after = apply(state, Entry(state.n + 1, "", 0, STORE, 1, "", 0, numbered, "", 0))
    numbers = world.numbers
    if isinstance(numbered, Commit | Register) and numbered.packs:
        numbers = numbers | {p.id: p.number for p in numbered.packs}
    views = world.views
    if any(w.step != "end" for w in world.writers):
        views |= {table(state)}
    return world._replace(state=after, numbers=numbers, views=views)


def refusal(world: World, body: Body) -> Refusal | None:
    return check(world.state, number(world.state, body))


def table(state: State) -> frozenset[Placed]:
    """What a look-up finds: for each chunk one of the live packs that hold it."""
    found: dict[str, PackId] = {}
    for p in state.packs.values():
        if p.live:
            for c in LETTERS[p.bytes]:
                found[c] = min(p.id, found.get(c, p.id))
    return frozenset(found.items())


def start(scope: Scope) -> World:
    """A commit `k0` of the chunks a and b, not among the newest two of its run, so that it may be
    forgotten."""
    masks = (mask_of("ab"), mask_of("a"))[: 2 if scope.duplicate else 1]
    if scope.patching:  # each written by a commit of its own
        masks = (mask_of("a"), mask_of("b"), *masks[1:])
    if scope.mixed:
        masks = (mask_of("a"), mask_of("bc"), *masks[1:])
    owned = tuple(record(PackId(f"{session_of('k0')}-0-{i}"), mask) for i, mask in enumerate(masks))
    writers = tuple(Writer("look", f"w{i}", frozenset()) for i in range(len(scope.wants)))
    world = World(
        genesis(STORE, 1),
        {},
        frozenset((p.id, p.bytes) for p in owned),
        (),
        (Collector("idle"),) * scope.gcs,
        None,
        frozenset(),
        frozenset({KEPT}),
    )
    for body in (
        commit_body("k0", "b" if scope.patching or scope.mixed else "ab", owned, frozenset()),
        *(commit_body(name, "", (), frozenset()) for name in ("k1", "k2")),
    ):
        assert refusal(world, body) is None
        world = append(world, body)
    return world._replace(writers=writers)


def without(world: World, pack: PackId) -> World:
    return world._replace(objects=frozenset(o for o in world.objects if o[0] != pack))
