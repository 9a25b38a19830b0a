"""Steps of other actors in the model: declare sessions over, forget, undelete, tag and read the
first commit."""

from collections.abc import Iterator
from dataclasses import fields, replace

from ckptstore.core.ids import CommitId, PackId
from ckptstore.log.entries import Body, Commit, Forget, Over, Reduced, Register, Tag, Undelete
from tests.log.model.world import (
    KEPT,
    LETTERS,
    THIN,
    Move,
    Placed,
    Scope,
    World,
    append,
    commit_body,
    made_of,
    mask_of,
    pack_of,
    record,
    refusal,
    session_of,
)

COMPACTOR = "cp"
SENDER = "sd"


def other_moves(world: World, scope: Scope) -> Iterator[Move]:
    sessions = [w.name for w in world.writers if w.step != "end" and not w.name.endswith("'")]
    if len(world.gcs) > 1:
        sessions += [f"gc{i}{gc.copies}" for i, gc in enumerate(world.gcs) if gc.step == "swap"]
    if world.compactor == "written":
        sessions.append(COMPACTOR)
    if world.thin is not None:
        sessions.append(THIN)
    if world.sender[0] in ("write", "commit"):
        sessions.append(SENDER)
    for name in sessions:
        over = Over((session_of(name),))
        if session_of(name) not in world.state.over and refusal(world, over) is None:
            yield (name, "is declared over"), append(world, over)
    if scope.reading:
        yield from reader_moves(world, scope)
    if scope.tagging:
        yield from tag_moves(world)
    if scope.compacting:
        yield from compactor_moves(world)
    if scope.thinning:
        yield from thin_moves(world, scope)
    if scope.sending:
        yield from sender_moves(world)
    if not scope.forgetting:
        return
    if world.undelete is not None:
        commit, packs = world.undelete
        reused = frozenset(world.numbers[p] for p in packs if not scope.blind_undelete)
        undelete = Undelete((commit,), reused)
        if refusal(world, undelete) is None:
            kept = world.kept - {KEPT, THIN} | {commit}
            done = append(world, undelete)._replace(undelete=None, kept=kept)
            yield (f"{commit} is undeleted",), done
        else:
            yield ("the undelete is refused",), world._replace(undelete=None)
        return
    for commit in (KEPT, THIN):
        row = world.state.commits.get(commit)
        forget = Forget((commit,), "")
        if row is not None and not row.soft and refusal(world, forget) is None:
            kept = world.kept - {commit}
            yield (f"{commit} is forgotten",), append(world, forget)._replace(kept=kept)
        if row is not None and row.soft and scope.undeleting:
            needed = row.content if scope.shallow_undelete else made_of(row.content, scope)
            packs = _holders(world, needed)
            if packs is not None:
                yield (
                    (f"undelete looks up the packs of {commit}",),
                    world._replace(undelete=(commit, packs)),
                )


def _holders(world: World, chunks: str | set[str]) -> frozenset[PackId] | None:
    """The listed packs that hold some of `chunks`; None if one of these is in no pack."""
    packs = [p for p in world.state.packs.values() if p.bytes & mask_of(chunks)]
    found = {c for p in packs for c in LETTERS[p.bytes]}
    return frozenset(p.id for p in packs) if found >= set(chunks) else None


def thin_moves(world: World, scope: Scope) -> Iterator[Move]:
    """A thinning of k0 keeps the chunk a, looks it up, writes a page c, and appends a commit that
    takes the place of k0. A session that is over, or an entry that is refused, ends it."""
    thin = world.state.commits.get(THIN)
    if scope.tagging and thin is not None and not thin.soft and "tag" not in world.state.tags:
        yield ("t0 is tagged",), append(world, Tag("tag", THIN, frozenset()))
    row, pack = world.state.commits.get(KEPT), record(pack_of(THIN), mask_of("c"))
    if world.thin is None:
        there = any(name == pack.id for name, _ in world.objects)
        if row is None or row.soft or there or world.state.closed(session_of(THIN)):
            return
        if (found := _holders(world, "a")) is not None:
            yield ("thin looks up what k0 keeps",), world._replace(thin=("write", found))
        return
    step, holders = world.thin
    if step == "write":
        written = world.objects | {(pack.id, pack.bytes)}
        yield ("thin writes c",), world._replace(thin=("commit", holders), objects=written)
        return
    reused = frozenset(world.numbers[p] for p in holders)
    plain = commit_body(THIN, "ac", (pack,), reused)
    body = _reduced(replace(plain, run="main"), KEPT, ("b",))
    if refusal(world, body) is None:
        kept = world.kept - {KEPT} | {THIN}
        yield ("t0 takes the place of k0",), append(world, body)._replace(thin=None, kept=kept)
    else:
        yield ("the thinning is refused",), world._replace(thin=None)


def _reduced(plain: Commit, replaces: CommitId, thinned: tuple[str, ...]) -> Reduced:
    columns = {field.name: getattr(plain, field.name) for field in fields(Commit)}
    return Reduced(**columns, replaces=replaces, thinned=thinned, cast=())


def sender_moves(world: World) -> Iterator[Move]:
    """A mirror sends k0 once more after it was purged: in the place of t0 if it saw that one, else
    as it is."""
    step, replaces = world.sender
    pack, thin = record(pack_of(SENDER), mask_of("ab")), world.state.commits.get(THIN)
    match step:
        case "idle" if KEPT not in world.state.commits:
            seen = THIN if thin is not None and not thin.soft else None
            yield ("the sender plans k0, and saw", seen), world._replace(sender=("write", seen))
        case "write":
            written = world.objects | {(pack.id, pack.bytes)}
            sender = "commit", replaces
            yield ("the sender writes ab",), world._replace(sender=sender, objects=written)
        case "commit":
            plain = commit_body(KEPT, "ab", (pack,), frozenset(), SENDER)
            body = plain if replaces is None else _reduced(plain, replaces, ())
            done = world._replace(sender=("end", None))
            if refusal(world, body) is None:
                kept = world.kept - {THIN if replaces else None} | {KEPT}
                yield ("k0 is there again",), append(done, body)._replace(kept=kept)
            else:
                yield ("what the sender has is refused",), done


def compactor_moves(world: World) -> Iterator[Move]:
    """A compactor writes what it can read of k0's chunks to a pack of its own, and registers that.
    It condemns nothing: a gc finds two copies, and keeps one."""
    pack, row = pack_of(COMPACTOR), world.state.commits.get(KEPT)
    match world.compactor:
        case "idle" if row is not None and not row.soft:
            listed = {p.id for p in world.state.packs.values()}
            there = {c for p, mask in world.objects if p in listed for c in LETTERS[mask]}
            mask = mask_of(there & set(row.content))
            if mask:
                written = world.objects | {(pack, mask)}
                yield (
                    ("the compactor writes", LETTERS[mask]),
                    world._replace(compactor="written", objects=written),
                )
        case "written":
            mask = dict(world.objects).get(pack, 0)
            state = world.state
            register = Register(
                session_of(COMPACTOR), state.n, state.fence, (record(pack, mask),), frozenset()
            )
            done = world._replace(compactor="end")
            yield ("the compactor is killed",), done
            if mask and refusal(world, register) is None:
                yield ("the compactor registers its pack",), append(done, register)


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
    """A reader of k0 finds places, and reads them later; what is not there any more it looks up in
    the log's newest state."""
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
    """For each chunk one of the listed packs that hold it, condemned ones among them, and not the
    one that a gc would keep."""
    packs = world.state.packs.values()
    places = {c: max((p.id for p in packs if c in LETTERS[p.bytes]), default=None) for c in chunks}
    return frozenset((c, p) for c, p in places.items() if p is not None)
