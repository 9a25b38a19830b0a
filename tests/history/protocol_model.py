"""Every interleaving of writers, gcs, readers, forget, undelete, tags and sessions declared over, by the product's own `check` and `apply`.

A world is a `State` of the fold, the pack objects that exist, and where each actor stands. Actors are naive: they append what they
planned from what they saw, and the state's `check` at the head of the log says what they may not. So a check that is taken away shows
up as a loss: a commit that was acknowledged and not forgotten, with a chunk in no pack that is both live and there; a tag of a forgotten
commit; a reader that finds no place of a chunk although it has replayed the log.

A pack's chunks are a mask in its `bytes`, a commit's a string of letters in its `content`. A writer's look-up may use any earlier
state, as a chunk index that lags does, and one that was lost and made anew. An answer may be lost: then the writer does not know
whether its entry is in the log, and one that is still on its way may arrive for as long as nobody takes its number.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeVar

from ckptstore.core.ids import CommitId, PackId, SessionId, StoreId
from ckptstore.core.model import PackRecord
from ckptstore.history import fold
from ckptstore.history.entries import Body, Commit, Condemn, Delete, Entry, Forget, Over, Register, Tag, Undelete
from ckptstore.history.fold import Code, State

CHUNKS = "abc"
LETTERS = {mask: tuple(c for i, c in enumerate(CHUNKS) if mask >> i & 1) for mask in range(1 << len(CHUNKS))}
STORE = StoreId("0" * 32)
KEPT = CommitId("k0")

Placed: TypeAlias = tuple[str, PackId]
"""A chunk and a pack that holds it."""

Condemning = TypeVar("Condemning", Condemn, Register)


@dataclass(frozen=True)
class Scope:
    """How much is explored, and which of the protocol's rules that are not checks the actors break."""

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
    undelete: frozenset[PackId] | None
    views: frozenset[frozenset[Placed]]
    kept: frozenset[CommitId]
    planned: frozenset[str] = frozenset()
    reader: frozenset[Placed] | None = None
    misled: str = ""


Label: TypeAlias = tuple[object, ...]
Move: TypeAlias = tuple[Label, World]


class Result(NamedTuple):
    """`path` leads to the world where `lost` is not empty; `complete` unless `limit` stopped the exploration."""

    worlds: int
    complete: bool
    lost: list[tuple[CommitId, list[str]]]
    path: list[str]


def mask_of(chunks: str | set[str]) -> int:
    return sum(1 << CHUNKS.index(c) for c in chunks)


def session_of(name: str) -> SessionId:
    return SessionId(f"{name:-<24}")


def pack_of(name: str) -> PackId:
    return PackId(f"{session_of(name)}-0-0")


def record(pack: PackId, mask: int) -> PackRecord:
    return PackRecord(pack, mask, mask.bit_count(), False)


def commit_body(name: str, chunks: str, packs: tuple[PackRecord, ...], reused: frozenset[int], session: str = "") -> Commit:
    run = "main" if name.startswith("k") else name[:2]
    commit = CommitId(name[:2])
    return Commit(session_of(session or name), commit, chunks, run, None, (), "", (), (), packs, reused, (), 0, 0, 0, 0)


def append(world: World, body: Body) -> World:
    """One entry at the head of the log; the table before it becomes a possible stale view."""
    state = world.state
    numbered = fold.number(state, body)
    after = fold.apply(state, Entry(state.n + 1, "", 0, STORE, 1, "", 0, numbered, "", 0))
    numbers = world.numbers
    if isinstance(numbered, Commit | Register) and numbered.packs:
        numbers = numbers | {p.id: p.number for p in numbered.packs}
    views = world.views
    if any(w.step != "end" for w in world.writers):
        views |= {table(state)}
    return world._replace(state=after, numbers=numbers, views=views)


def refusal(world: World, body: Body) -> fold.Refusal | None:
    return fold.check(world.state, fold.number(world.state, body))


def table(state: State) -> frozenset[Placed]:
    """What a look-up finds: for each chunk one of the live packs that hold it."""
    found: dict[str, PackId] = {}
    for p in state.packs.values():
        if p.live:
            for c in LETTERS[p.bytes]:
                found[c] = min(p.id, found.get(c, p.id))
    return frozenset(found.items())


def start(scope: Scope) -> World:
    """A commit `k0` of the chunks a and b, not among the newest two of its run, so that it may be forgotten."""
    masks = (mask_of("ab"), mask_of("a"))[: 2 if scope.duplicate else 1]
    owned = tuple(record(PackId(f"{session_of('k0')}-0-{i}"), mask) for i, mask in enumerate(masks))
    writers = tuple(Writer("look", f"w{i}", frozenset()) for i in range(len(scope.wants)))
    world = World(
        fold.genesis(STORE, 1),
        {},
        frozenset((p.id, p.bytes) for p in owned),
        (),
        (Collector("idle"),) * scope.gcs,
        None,
        frozenset(),
        frozenset({KEPT}),
    )
    for body in (commit_body("k0", "ab", owned, frozenset()), *(commit_body(name, "", (), frozenset()) for name in ("k1", "k2"))):
        assert refusal(world, body) is None
        world = append(world, body)
    return world._replace(writers=writers)


# -- writers ------------------------------------------------------------------------------------------------------------------------


def writer_moves(world: World, i: int, scope: Scope) -> Iterator[Move]:
    writer, want = world.writers[i], scope.wants[i]
    pack, fresh = pack_of(writer.name), mask_of(set(want) - {c for c, _ in writer.reuse})

    def put(**changes: object) -> tuple[Writer, ...]:
        return (*world.writers[:i], writer._replace(**changes), *world.writers[i + 1 :])  # type: ignore[arg-type]  # NamedTuple's own

    if writer.step == "look":
        for view in world.views | {table(world.state)} | ({frozenset[Placed]()} if scope.reindexing else set()):
            reuse = frozenset(placed for placed in view if placed[0] in want)
            yield (writer.name, "reuses", reuse), world._replace(writers=put(step="write", reuse=reuse))
    elif writer.step == "write":
        objects = world.objects | {(pack, fresh)} if fresh else world.objects
        yield (writer.name, "writes", LETTERS[fresh]), world._replace(writers=put(step="commit"), objects=objects)
    elif writer.step == "commit":
        packs = (record(pack, fresh),) if fresh else ()
        reused = frozenset(world.numbers[p] for _, p in writer.reuse)
        refused = refusal(world, body := commit_body(writer.name, want, packs, reused))
        if refused is None:
            yield (writer.name, "commits"), _acknowledge(world, body, put(step="end"))
            if scope.lossy:
                yield (writer.name, "commits and gets no answer"), append(world, body)._replace(writers=put(step="unsure"))
                yield (writer.name, "sends its entry"), world._replace(writers=put(step="sent", sent=world.state.n + 1))
        elif refused.code is Code.PACKS_GONE:
            yield (writer.name, "finds its packs gone"), world._replace(writers=put(step="look", reuse=frozenset()))
        elif refused.code is Code.SESSION_OVER:
            retry = writer.name + "'"
            kept = commit_body(writer.name, want, packs, reused, session=retry)
            if packs and refusal(world, kept) is None:
                yield (retry, "commits with the pack of the session that is over"), _acknowledge(world, kept, put(step="end"))
            yield (retry, "starts again"), world._replace(writers=put(step="look", name=retry, reuse=frozenset()))
    else:
        yield from _unanswered(
            world, writer, put, commit_body(writer.name, want, (record(pack, fresh),) if fresh else (), frozenset()), scope
        )


def _unanswered(world: World, writer: Writer, put: Callable[..., tuple[Writer, ...]], body: Commit, scope: Scope) -> Iterator[Move]:
    """What becomes of an entry whose create was not answered. A writer that gives up deletes nothing, but for a hasty one."""
    pack = pack_of(writer.name)
    left = _without(world, pack) if scope.hasty_writer else world
    if writer.step in ("sent", "gone") and writer.sent == world.state.n + 1:
        body = replace(body, reused=frozenset(world.numbers[p] for _, p in writer.reuse))
        after = put(step="unsure" if writer.step == "sent" else "end", sent=0)
        yield (writer.name, "has its entry arrive"), append(world, body)._replace(writers=after)
    if writer.step == "unsure":
        yield (writer.name, "reads its entry"), world._replace(writers=put(step="end"), kept=world.kept | {body.commit})
        yield (writer.name, "gives up"), left._replace(writers=put(step="end"))
    if writer.step == "sent":
        yield (writer.name, "gives up"), left._replace(writers=put(step="gone"))
        if writer.sent <= world.state.n:
            yield (writer.name, "reads another's entry at its number"), world._replace(writers=put(step="commit", sent=0))


def _acknowledge(world: World, body: Commit, writers: tuple[Writer, ...]) -> World:
    return append(world, body)._replace(writers=writers, kept=world.kept | {body.commit})


# -- gc -----------------------------------------------------------------------------------------------------------------------------


def gc_moves(world: World, i: int, scope: Scope) -> Iterator[Move]:
    gc, state = world.gcs[i], world.state
    listed = {p.id: p for p in state.packs.values()}

    def put(**changes: object) -> tuple[Collector, ...]:
        return (*world.gcs[:i], gc._replace(**changes), *world.gcs[i + 1 :])  # type: ignore[arg-type]  # NamedTuple's own

    idle = (*world.gcs[:i], Collector("idle", copies=gc.copies), *world.gcs[i + 1 :])
    name = f"gc{i}{gc.copies}"
    match gc.step:
        case "idle":
            yield (f"gc{i}", "marks"), world._replace(gcs=(*world.gcs[:i], _mark(state, gc, reverse=bool(i)), *world.gcs[i + 1 :]))
        case "condemn":
            dead = frozenset(world.numbers[p] for p in gc.seen if not _assigned(gc, p))
            condemn = _settle(world, Condemn(gc.mark, gc.fence, dead, gc.soft))
            if condemn is None:
                yield (f"gc{i}", "was fenced: starts again"), world._replace(gcs=idle)
            else:
                after = append(world, condemn)._replace(gcs=put(step="repack", fence=state.n + 1))
                yield (f"gc{i}", "condemns", set(condemn.packs), "purges", condemn.purge), after
        case "repack":
            yield (f"gc{i}", "repacks no more"), world._replace(gcs=put(step="delete"))
            if gc.copies < scope.copies:
                for victim in sorted(p for p in gc.seen if p in listed and listed[p].live and 0 < _assigned(gc, p) < listed[p].bytes):
                    copied = world._replace(objects=world.objects | {(pack_of(name), _assigned(gc, victim))})
                    yield (f"gc{i}", "copies", victim), copied._replace(gcs=put(step="swap", victim=victim))
        case "swap":
            assert gc.victim is not None
            copy = record(pack_of(name), _assigned(gc, gc.victim))
            body = Register(session_of(name), gc.mark, gc.fence, (copy,), frozenset({world.numbers[gc.victim]}))
            register = _settle(world, body)
            gone = (*world.gcs[:i], Collector("idle", copies=gc.copies + 1), *world.gcs[i + 1 :])
            if register is None:
                objects = frozenset(o for o in world.objects if o[0] != copy.id)
                yield (f"gc{i}", "gives up its copy"), world._replace(gcs=gone, objects=objects)
            else:
                after = append(world, register)
                done = put(step="delete", victim=None, fence=state.n + 1, copies=gc.copies + 1)
                yield (f"gc{i}", "registers its copy, condemns", set(register.condemn)), after._replace(gcs=done)
        case "delete":
            yield (f"gc{i}", "ends"), world._replace(gcs=idle)
            planned = {p for p in gc.seen if not _assigned(gc, p)} | {p.id for p in listed.values() if not p.live}
            for victim in sorted(planned & listed.keys()):
                delete = Delete(frozenset({world.numbers[victim]}))
                if scope.object_first and not listed[victim].live:
                    yield (f"gc{i}", "deletes the object of", victim), _without(world, victim)._replace(gcs=put(step="row", victim=victim))
                elif refusal(world, delete) is None:
                    yield (f"gc{i}", "delists", victim), append(world, delete)._replace(gcs=put(step="object", victim=victim))
            for orphan, _ in world.objects:
                if orphan not in listed and state.closed(SessionId(orphan[:24])):
                    yield (f"gc{i}", "finds the orphan", orphan), world._replace(gcs=put(step="object", victim=orphan))
        case "object":
            assert gc.victim is not None
            yield (f"gc{i}", "deletes the object of", gc.victim), _without(world, gc.victim)._replace(gcs=put(step="delete", victim=None))
        case "row":
            assert gc.victim is not None
            delete = Delete(frozenset({world.numbers[gc.victim]}))
            after = world if refusal(world, delete) else append(world, delete)
            yield (f"gc{i}", "delists", gc.victim), after._replace(gcs=put(step="delete", victim=None))


def _mark(state: State, gc: Collector, *, reverse: bool) -> Collector:
    """Each chunk of a commit that is not forgotten is assigned to one of its packs; two runners may well choose differently."""
    chunks = {c for row in state.commits.values() if not row.soft for c in row.content}
    holders = {c: sorted((p.id for p in state.packs.values() if p.live and c in LETTERS[p.bytes]), reverse=reverse) for c in chunks}
    keep = frozenset((c, packs[0]) for c, packs in holders.items() if packs)
    seen = frozenset(p.id for p in state.packs.values() if p.live)
    soft = tuple(sorted(c for c, row in state.commits.items() if row.soft))
    return Collector("condemn", state.n, keep, seen, soft, None, state.fence, gc.copies)


def _assigned(gc: Collector, pack: PackId) -> int:
    return mask_of({c for c, p in gc.keep if p == pack})


def _settle(world: World, body: Condemning) -> Condemning | None:
    """`body` without what the log refuses, as a gc leaves it out and tries again; None if it must give up."""
    while refused := refusal(world, body):
        if not refused.packs and not refused.commits:
            return None
        if isinstance(body, Condemn):
            left = tuple(c for c in body.purge if c not in refused.commits)
            body = replace(body, packs=body.packs - refused.packs, purge=left)
        else:
            body = replace(body, condemn=body.condemn - refused.packs)
    return body


def _without(world: World, pack: PackId) -> World:
    return world._replace(objects=frozenset(o for o in world.objects if o[0] != pack))


# -- everybody else -----------------------------------------------------------------------------------------------------------------


def other_moves(world: World, scope: Scope) -> Iterator[Move]:
    sessions = [w.name for w in world.writers if w.step != "end" and not w.name.endswith("'")]
    if len(world.gcs) > 1:
        sessions += [f"gc{i}{gc.copies}" for i, gc in enumerate(world.gcs) if gc.step == "swap"]
    for name in sessions:
        over = Over((session_of(name),))
        if session_of(name) not in world.state.over and refusal(world, over) is None:
            yield (name, "is declared over"), append(world, over)
    if scope.reading:
        yield from reader_moves(world, scope)
    if scope.tagging:
        yield from tag_moves(world)
    if not scope.forgetting:
        return
    if world.undelete is not None:
        reused = frozenset() if scope.blind_undelete else frozenset(world.numbers[p] for p in world.undelete)
        undelete = Undelete((KEPT,), reused)
        if refusal(world, undelete) is None:
            yield ("k0 is undeleted",), append(world, undelete)._replace(undelete=None, kept=world.kept | {KEPT})
        else:
            yield ("the undelete is refused",), world._replace(undelete=None)
        return
    row = world.state.commits.get(KEPT)
    forget = Forget((KEPT,), "")
    if row is not None and not row.soft and refusal(world, forget) is None:
        yield ("k0 is forgotten",), append(world, forget)._replace(kept=world.kept - {KEPT})
    if row is not None and row.soft and scope.undeleting:
        holders = [p for p in world.state.packs.values() if p.bytes & mask_of(row.content)]
        if {c for p in holders for c in LETTERS[p.bytes]} >= set(row.content):
            yield ("undelete looks up the packs of k0",), world._replace(undelete=frozenset(p.id for p in holders))


def tag_moves(world: World) -> Iterator[Move]:
    """A tag and a forget are both planned while the other is not there, and appended later."""
    row, tagged = world.state.commits.get(KEPT), "tag" in world.state.tags
    bodies: dict[str, Body] = {"forget": Forget((KEPT,), ""), "tag": Tag("tag", KEPT, frozenset())}
    for what, body in bodies.items():
        if what in world.planned:
            done = world._replace(planned=world.planned - {what})
            if refusal(world, body) is None:
                kept = world.kept - {KEPT} if what == "forget" else world.kept
                yield (f"the {what} of k0 is appended",), append(done, body)._replace(kept=kept)
            else:
                yield (f"the {what} of k0 is refused",), done
        elif row is not None and not row.soft and not tagged:
            yield (f"a {what} of k0 is planned",), world._replace(planned=world.planned | {what})
    if tagged:
        yield ("k0 is untagged",), append(world, Tag("tag", None, frozenset()))


def reader_moves(world: World, scope: Scope) -> Iterator[Move]:
    """A reader of k0 finds places, and reads them later; what is not there any more it looks up in the log's newest state."""
    row = world.state.commits.get(KEPT)
    if row is None or row.soft:
        return  # whoever reads what is forgotten may find it gone
    if world.reader is None:
        yield ("a reader locates k0",), world._replace(reader=_located(world, row.content))
        return
    gone = [c for c, p in sorted(world.reader) if all(p != there for there, _ in world.objects)]
    if not gone:
        yield ("the reader has read k0",), world._replace(reader=None)
    elif scope.stubborn_reader or {c for c, _ in _located(world, row.content)} < set(row.content):
        yield ("the reader finds no place",), world._replace(misled=f"{gone} of k0")
    else:
        yield ("the reader looks again",), world._replace(reader=_located(world, row.content))


def _located(world: World, chunks: str) -> frozenset[Placed]:
    """For each chunk one of the listed packs that hold it, condemned ones among them, and not the one that a gc would keep."""
    packs = world.state.packs.values()
    places = {c: max((p.id for p in packs if c in LETTERS[p.bytes]), default=None) for c in chunks}
    return frozenset((c, p) for c, p in places.items() if p is not None)


# -- exploration --------------------------------------------------------------------------------------------------------------------


def moves(world: World, scope: Scope) -> Iterator[Move]:
    for i in range(len(world.writers)):
        yield from writer_moves(world, i, scope)
    for i in range(len(world.gcs)):
        yield from gc_moves(world, i, scope)
    yield from other_moves(world, scope)


def lost(world: World) -> list[tuple[CommitId, list[str]]]:
    have = {c for p in world.state.packs.values() if p.live and (p.id, p.bytes) in world.objects for c in LETTERS[p.bytes]}
    rows = {commit: row for commit, row in world.state.commits.items() if not row.soft}
    purged = [(commit, ["the commit itself"]) for commit in world.kept if commit not in rows]
    purged += [(commit, [f"the tag {tag}"]) for tag, commit in world.state.tags.items() if commit not in rows]
    purged += [(KEPT, [world.misled])] if world.misled else []
    return purged + [(commit, sorted(set(row.content) - have)) for commit, row in rows.items() if set(row.content) - have]


def key(world: World, scope: Scope) -> object:
    """Equal futures are one world: of all numbers only how stamps, forgets and fences lie to the marks that are in use matters."""
    state = world.state
    gcs = [gc for gc in world.gcs if gc.step != "idle"]
    marks = [gc.mark for gc in gcs]
    packs = frozenset((p.id, p.bytes, p.live, *[p.stamp > mark for mark in marks]) for p in state.packs.values())
    commits = frozenset((c, row.soft > 0, *[row.soft > mark for mark in marks]) for c, row in state.commits.items())
    fences = tuple(gc.fence == state.fence for gc in gcs)
    runners = tuple((gc.step, gc.keep, gc.seen & state_ids(state), gc.soft, gc.victim, gc.copies) for gc in world.gcs)
    wanted = {c for w in world.writers if w.step != "end" for c in scope.wants[int(w.name[1])]}
    views = frozenset(frozenset(placed for placed in view if placed[0] in wanted) for view in world.views) if wanted else None
    closed = frozenset(o for o, _ in world.objects if state.closed(SessionId(o[:24])))
    over = frozenset(state.over)
    writers = tuple(w._replace(sent=int(w.sent == state.n + 1)) for w in world.writers)
    others = world.planned, world.reader, world.misled, frozenset(state.tags)
    return packs, commits, fences, runners, over, closed, world.objects, writers, world.undelete, views, world.kept, others


def state_ids(state: State) -> frozenset[PackId]:
    return frozenset(p.id for p in state.packs.values())


def explore(scope: Scope, limit: int) -> Result:
    """Breadth first, so that the first world that lost something is reached by a shortest path."""
    first = start(scope)
    came_from: dict[object, tuple[object, Label] | None] = {key(first, scope): None}
    queue = deque([(key(first, scope), first)])
    while queue and len(came_from) < limit:
        here, world = queue.popleft()
        if bad := lost(world):
            return Result(len(came_from), False, bad, _path(came_from, here))
        for label, after in moves(world, scope):
            there = key(after, scope)
            if there not in came_from:
                came_from[there] = (here, label)
                queue.append((there, after))
    return Result(len(came_from), not queue, [], [])


def _path(came_from: dict[object, tuple[object, Label] | None], here: object) -> list[str]:
    steps = []
    while (step := came_from[here]) is not None:
        here, label = step
        steps.append(" ".join(map(str, label)))
    return steps[::-1]
