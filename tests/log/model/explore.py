"""Does any interleaving of writers, gcs, readers, forget, undelete, tags and sessions declared over
lose something? All are explored.

Lost is a commit that was acknowledged and not forgotten, with a chunk in no pack that is both live
and there; a tag of a forgotten commit; a reader that finds no place of a chunk although it has
replayed the log.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from ckptstore.core.ids import CommitId, PackId, SessionId
from ckptstore.log.state import State
from tests.log.model.collectors import gc_moves
from tests.log.model.others import other_moves
from tests.log.model.world import KEPT, LETTERS, THIN, Label, Move, Scope, World, made_of, start
from tests.log.model.writers import writer_moves


class Result(NamedTuple):
    """`path` leads to the world where `lost` is not empty; `complete` unless `limit` stopped the
    exploration."""

    worlds: int
    complete: bool
    lost: list[tuple[CommitId, list[str]]]
    path: list[str]


def moves(world: World, scope: Scope) -> Iterator[Move]:
    for i in range(len(world.writers)):
        yield from writer_moves(world, i, scope)
    for i in range(len(world.gcs)):
        yield from gc_moves(world, i, scope)
    yield from other_moves(world, scope)


def lost(world: World, scope: Scope) -> list[tuple[CommitId, list[str]]]:
    have = {
        c
        for p in world.state.packs.values()
        if p.live and (p.id, p.bytes) in world.objects
        for c in LETTERS[p.bytes]
    }
    rows = {commit: row for commit, row in world.state.commits.items() if not row.soft}
    purged = [(commit, ["the commit itself"]) for commit in world.kept if commit not in rows]
    purged += [
        (commit, [f"the tag {tag}"])
        for tag, commit in world.state.tags.items()
        if commit not in rows
    ]
    purged += [(KEPT, [world.misled])] if world.misled else []
    one = {KEPT, THIN} & rows.keys()
    purged += [(c, ["it is there again"]) for c in one - world.kept]
    first = 1 if world.sender[0] != "end" else None
    purged += [(c, ["its place"]) for c in one if rows[c].place != (first or rows[c].place)]
    purged += [(c, ["its place alone"]) for c in one if len(one) > 1]
    purged += [(c, ["its place"]) for c in one if world.state.in_place_of(c) != c]
    return purged + [
        (commit, sorted(made_of(row.content, scope) - have))
        for commit, row in rows.items()
        if made_of(row.content, scope) - have
    ]


def key(world: World, scope: Scope) -> object:
    """Equal futures are one world: of all numbers only how stamps, forgets and fences lie to the
    marks that are in use matters."""
    state = world.state
    gcs = [gc for gc in world.gcs if gc.step != "idle"]
    marks = [gc.mark for gc in gcs]
    packs = frozenset(
        (p.id, p.bytes, p.live, *[p.stamp > mark for mark in marks]) for p in state.packs.values()
    )
    commits = frozenset(
        (c, row.soft > 0, *[row.soft > mark for mark in marks]) for c, row in state.commits.items()
    )
    fences = tuple(gc.fence == state.fence for gc in gcs)
    runners = tuple(
        (gc.step, gc.keep, gc.seen & state_ids(state), gc.soft, gc.victim, gc.copies)
        for gc in world.gcs
    )
    wanted = {
        c
        for w in world.writers
        if w.step != "end"
        for c in made_of(scope.wants[int(w.name[1])], scope)
    }
    views = (
        frozenset(
            frozenset(placed for placed in view if placed[0] in wanted) for view in world.views
        )
        if wanted
        else None
    )
    closed = frozenset(o for o, _ in world.objects if state.closed(SessionId(o[:24])))
    over = frozenset(state.over)
    writers = tuple((w.step, w.name, w.reuse, w.sent == state.n + 1) for w in world.writers)
    places = world.thin, frozenset(state.replaced.items())
    seen = world.reader, world.misled, world.sender
    others = world.planned, seen, frozenset(state.tags.items()), places
    return (
        packs,
        commits,
        fences,
        runners,
        over,
        closed,
        world.objects,
        writers,
        world.undelete,
        views,
        world.kept,
        others,
    )


def state_ids(state: State) -> frozenset[PackId]:
    return frozenset(p.id for p in state.packs.values())


def explore(scope: Scope, limit: int) -> Result:
    """Breadth first, so that the first world that lost something is reached by a shortest path."""
    first = start(scope)
    came_from: dict[object, tuple[object, Label] | None] = {key(first, scope): None}
    queue = deque([(key(first, scope), first)])
    while queue and len(came_from) < limit:
        here, world = queue.popleft()
        if bad := lost(world, scope):
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
