"""What may a writer do next? It looks up what it can reuse, writes the rest, and appends its
commit.

Its look-up may use any earlier state, as a chunk index that lags does, and one that was lost and
made anew. An answer may be lost: then the writer does not know whether its entry is in the log, and
one that is still on its way may arrive for as long as nobody takes its number.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from ckptstore.core.model import PackRecord
from ckptstore.log.admission import Code
from ckptstore.log.entries import Commit, Register
from tests.log.model.world import (
    LETTERS,
    Move,
    Placed,
    Scope,
    World,
    Writer,
    append,
    commit_body,
    made_of,
    mask_of,
    pack_of,
    record,
    refusal,
    session_of,
    table,
    without,
)


def writer_moves(world: World, i: int, scope: Scope) -> Iterator[Move]:
    writer, want = world.writers[i], scope.wants[i]
    if writer.step == "end":
        return
    chunks = made_of(want, scope)
    lacking = frozenset(want) - {c for c, _ in writer.reuse}
    pack, fresh = (
        pack_of(writer.name),
        mask_of(made_of(lacking, scope) - {c for c, _ in writer.reuse}),
    )

    def put(**changes: object) -> tuple[Writer, ...]:
        # NamedTuple's own
        return (*world.writers[:i], writer._replace(**changes), *world.writers[i + 1 :])  # type: ignore[arg-type]

    if writer.step == "register":
        yield from _registering(world, writer, put, record(pack, fresh), scope)
    if writer.step == "look":
        views = world.views | {table(world.state)}
        views |= {frozenset[Placed]()} if scope.reindexing else set()
        for reuse in {_reusable(view, chunks, scope) for view in views}:
            if scope.shallow_writer:
                reuse = frozenset((c, p) for c, p in reuse if c in want)
            yield (
                (writer.name, "reuses", reuse),
                world._replace(writers=put(step="write", reuse=reuse)),
            )
    elif writer.step == "write":
        objects = world.objects | {(pack, fresh)} if fresh else world.objects
        batches = scope.batching and fresh and not writer.name.endswith("'")
        yield (
            (writer.name, "writes", LETTERS[fresh]),
            world._replace(writers=put(step="register" if batches else "commit"), objects=objects),
        )
    elif writer.step == "commit":
        packs = (record(pack, fresh),) if fresh else ()
        reused = frozenset(world.numbers[p] for _, p in writer.reuse)
        refused = refusal(world, body := commit_body(writer.name, want, packs, reused))
        if refused is None:
            yield (writer.name, "commits"), _acknowledge(world, body, put(step="end"))
            if scope.lossy:
                yield (
                    (writer.name, "commits and gets no answer"),
                    append(world, body)._replace(writers=put(step="unsure")),
                )
                yield (
                    (writer.name, "sends its entry"),
                    world._replace(writers=put(step="sent", sent=world.state.n + 1)),
                )
        elif refused.code is Code.PACKS_GONE:
            yield (
                (writer.name, "finds its packs gone"),
                world._replace(writers=put(step="look", reuse=frozenset())),
            )
        elif refused.code is Code.SESSION_OVER:
            retry = writer.name + "'"
            kept = commit_body(writer.name, want, packs, reused, session=retry)
            if packs and refusal(world, kept) is None:
                yield (
                    (retry, "commits with the pack of the session that is over"),
                    _acknowledge(world, kept, put(step="end")),
                )
            yield (
                (retry, "starts again"),
                world._replace(writers=put(step="look", name=retry, reuse=frozenset())),
            )
    else:
        yield from _unanswered(
            world,
            writer,
            put,
            commit_body(writer.name, want, (record(pack, fresh),) if fresh else (), frozenset()),
            scope,
        )


def _reusable(view: frozenset[Placed], chunks: frozenset[str], scope: Scope) -> frozenset[Placed]:
    """What a look-up in `view` finds of `chunks`, each with the bases that it needs."""
    there = {c for c, _ in view}
    return frozenset((c, p) for c, p in view if c in chunks and made_of(c, scope) <= there)


def _registering(
    world: World,
    writer: Writer,
    put: Callable[..., tuple[Writer, ...]],
    batch: PackRecord,
    scope: Scope,
) -> Iterator[Move]:
    """A mirror lists the packs of a large commit ahead, under a session of their own, and refers to
    them afterwards as to any pack; so it does to those of the bases of their patches."""
    state, own = world.state, writer.name + "'"
    body = Register(session_of(writer.name), state.n, state.fence, (batch,), frozenset())
    if refusal(world, body) is None:
        reuse = frozenset() if scope.forgetful_batch else writer.reuse
        reuse |= {(c, batch.id) for c in LETTERS[batch.bytes]}
        after = append(world, body)
        yield (
            (writer.name, "registers its pack"),
            after._replace(writers=put(step="commit", name=own, reuse=reuse)),
        )
    else:
        yield (
            (own, "starts again"),
            world._replace(writers=put(step="look", name=own, reuse=frozenset())),
        )


def _unanswered(
    world: World, writer: Writer, put: Callable[..., tuple[Writer, ...]], body: Commit, scope: Scope
) -> Iterator[Move]:
    """What becomes of an entry whose create was not answered. A writer that gives up deletes
    nothing, but for a hasty one."""
    pack = pack_of(writer.name)
    left = without(world, pack) if scope.hasty_writer else world
    if writer.step in ("sent", "gone") and writer.sent == world.state.n + 1:
        body = replace(body, reused=frozenset(world.numbers[p] for _, p in writer.reuse))
        after = put(step="unsure" if writer.step == "sent" else "end", sent=0)
        yield (writer.name, "has its entry arrive"), append(world, body)._replace(writers=after)
    if writer.step == "unsure":
        yield (
            (writer.name, "reads its entry"),
            world._replace(writers=put(step="end"), kept=world.kept | {body.commit}),
        )
        yield (writer.name, "gives up"), left._replace(writers=put(step="end"))
    if writer.step == "sent":
        yield (writer.name, "gives up"), left._replace(writers=put(step="gone"))
        if writer.sent <= world.state.n:
            yield (
                (writer.name, "reads another's entry at its number"),
                world._replace(writers=put(step="commit", sent=0)),
            )


def _acknowledge(world: World, body: Commit, writers: tuple[Writer, ...]) -> World:
    return append(world, body)._replace(writers=writers, kept=world.kept | {body.commit})
