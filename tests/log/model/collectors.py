"""What may a gc do next? It marks, condemns, copies what is live in a sparse pack, delists, and
deletes objects."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from ckptstore.core.ids import PackId, SessionId
from ckptstore.log.entries import Condemn, Delete, Register
from ckptstore.log.state import State
from tests.log.model.world import (
    LETTERS,
    Collector,
    Move,
    Placed,
    Scope,
    World,
    append,
    bases_of,
    mask_of,
    pack_of,
    record,
    refusal,
    session_of,
    without,
)

Condemning = TypeVar("Condemning", Condemn, Register)


def gc_moves(world: World, i: int, scope: Scope) -> Iterator[Move]:
    gc, state = world.gcs[i], world.state
    listed = {p.id: p for p in state.packs.values()}

    def put(**changes: object) -> tuple[Collector, ...]:
        # NamedTuple's own
        return (*world.gcs[:i], gc._replace(**changes), *world.gcs[i + 1 :])  # type: ignore[arg-type]

    idle = (*world.gcs[:i], Collector("idle", copies=gc.copies), *world.gcs[i + 1 :])
    name = f"gc{i}{gc.copies}"
    match gc.step:
        case "idle":
            for spare in (False, True) if scope.sparing else (False,):
                marked = _mark(state, gc, scope, reverse=bool(i), spare=spare)
                yield (
                    (f"gc{i}", "marks", "what is forgotten, too" if spare else ""),
                    world._replace(gcs=(*world.gcs[:i], marked, *world.gcs[i + 1 :])),
                )
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
                for victim in sorted(
                    p
                    for p in gc.seen
                    if p in listed and listed[p].live and 0 < _assigned(gc, p) < listed[p].bytes
                ):
                    copied = world._replace(
                        objects=world.objects | {(pack_of(name), _assigned(gc, victim))}
                    )
                    yield (
                        (f"gc{i}", "copies", victim),
                        copied._replace(gcs=put(step="swap", victim=victim)),
                    )
        case "swap":
            assert gc.victim is not None
            copy = record(pack_of(name), _assigned(gc, gc.victim))
            body = Register(
                session_of(name), gc.mark, gc.fence, (copy,), frozenset({world.numbers[gc.victim]})
            )
            register = _settle(world, body)
            gone = (*world.gcs[:i], Collector("idle", copies=gc.copies + 1), *world.gcs[i + 1 :])
            if register is None:
                objects = frozenset(o for o in world.objects if o[0] != copy.id)
                yield (f"gc{i}", "gives up its copy"), world._replace(gcs=gone, objects=objects)
            else:
                after = append(world, register)
                done = put(step="delete", victim=None, fence=state.n + 1, copies=gc.copies + 1)
                yield (
                    (f"gc{i}", "registers its copy, condemns", set(register.condemn)),
                    after._replace(gcs=done),
                )
        case "delete":
            yield (f"gc{i}", "ends"), world._replace(gcs=idle)
            planned = {p for p in gc.seen if not _assigned(gc, p)} | {
                p.id for p in listed.values() if not p.live
            }
            for victim in sorted(planned & listed.keys()):
                delete = Delete(frozenset({world.numbers[victim]}))
                if scope.object_first and not listed[victim].live:
                    yield (
                        (f"gc{i}", "deletes the object of", victim),
                        without(world, victim)._replace(gcs=put(step="row", victim=victim)),
                    )
                elif refusal(world, delete) is None:
                    yield (
                        (f"gc{i}", "delists", victim),
                        append(world, delete)._replace(gcs=put(step="object", victim=victim)),
                    )
            for orphan, _ in world.objects:
                if orphan not in listed and state.closed(SessionId(orphan[:24])):
                    yield (
                        (f"gc{i}", "finds the orphan", orphan),
                        world._replace(gcs=put(step="object", victim=orphan)),
                    )
        case "object":
            assert gc.victim is not None
            yield (
                (f"gc{i}", "deletes the object of", gc.victim),
                without(world, gc.victim)._replace(gcs=put(step="delete", victim=None)),
            )
        case "row":
            assert gc.victim is not None
            delete = Delete(frozenset({world.numbers[gc.victim]}))
            after = world if refusal(world, delete) else append(world, delete)
            yield (
                (f"gc{i}", "delists", gc.victim),
                after._replace(gcs=put(step="delete", victim=None)),
            )


def _mark(state: State, gc: Collector, scope: Scope, *, reverse: bool, spare: bool) -> Collector:
    """Each chunk of a commit that is not forgotten is assigned to one of its packs; two runners may
    well choose differently. To `spare` is to treat what was just forgotten as if it were not. The
    bases of all patches in packs that stay are kept as well."""
    chunks = {c for row in state.commits.values() if spare or not row.soft for c in row.content}
    while True:
        keep = _keep(state, chunks, reverse=reverse)
        stay = {p for _, p in keep}
        held = {c for p in state.packs.values() if p.id in stay for c in LETTERS[p.bytes]}
        bases = {} if scope.shallow_mark else bases_of(scope)
        needed = {base for c, base in bases.items() if c in held}
        if needed <= chunks:
            break
        chunks |= needed
    seen = frozenset(p.id for p in state.packs.values() if p.live)
    soft = tuple(sorted(c for c, row in state.commits.items() if row.soft and not spare))
    return Collector("condemn", state.n, keep, seen, soft, None, state.fence, gc.copies)


def _keep(state: State, chunks: set[str], *, reverse: bool) -> frozenset[Placed]:
    holders = {
        c: sorted(
            (p.id for p in state.packs.values() if p.live and c in LETTERS[p.bytes]),
            reverse=reverse,
        )
        for c in chunks
    }
    return frozenset((c, packs[0]) for c, packs in holders.items() if packs)


def _assigned(gc: Collector, pack: PackId) -> int:
    return mask_of({c for c, p in gc.keep if p == pack})


def _settle(world: World, body: Condemning) -> Condemning | None:
    """`body` without what the log refuses, as a gc leaves it out and tries again; None if it must
    give up."""
    while refused := refusal(world, body):
        if not refused.packs and not refused.commits:
            return None
        if isinstance(body, Condemn):
            left = tuple(c for c in body.purge if c not in refused.commits)
            body = replace(body, packs=body.packs - refused.packs, purge=left)
        else:
            body = replace(body, condemn=body.condemn - refused.packs)
    return body
