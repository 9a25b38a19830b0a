"""Histories of a few commits, tags and packs, drawn at random: thinned, forgotten, purged, sent
again and brought back in any order."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from random import Random

from ckptstore.core.ids import CommitId, SessionId
from ckptstore.index.queries import Queries
from ckptstore.log.admission import check
from ckptstore.log.entries import (
    Body,
    Commit,
    Condemn,
    Delete,
    Entry,
    Forget,
    Reduced,
    Register,
    Tag,
    Undelete,
)
from ckptstore.log.state import State, apply, genesis, number
from tests.index.building import MODEL, OPTIMIZER, STORE, LogBuilder, record

COMMITS = tuple(CommitId(f"{i:064x}") for i in range(1, 9))
"""Few, so that each is committed, thinned from others and purged several times."""

TAGS = ("best", "prod")


class History:
    """A log, with its state after each entry."""

    def __init__(self, seed: int, length: int, *, admitted: bool) -> None:
        """With `admitted`, only what `check` admits is appended; else anything."""
        self._random, self._log = Random(seed), LogBuilder(seed)
        self.state = genesis(STORE, 1)
        self.counts: dict[str, int] = {}
        for _ in range(length):
            body = number(self.state, self._draw())
            if not admitted or check(self.state, body) is None:
                self.state = apply(self.state, self._log.append(body))
                name = type(body).__name__
                self.counts[name] = self.counts.get(name, 0) + 1

    @property
    def entries(self) -> list[Entry]:
        return self._log.entries

    def _draw(self) -> Body:
        random, state = self._random, self.state
        some = self._some(state.packs)
        live = [commit for commit, row in state.commits.items() if not row.soft] or COMMITS
        soft = [commit for commit, row in state.commits.items() if row.soft] or COMMITS
        match random.randrange(15):
            case 0 | 1 | 2:
                return self._commit(some)
            case 3 | 4 | 5:
                return self._reduced(some)
            case 6:
                return Tag(random.choice(TAGS), random.choice((None, random.choice(live))), some)
            case 7 | 8:
                return Forget((random.choice(live),), "test")
            case 9 | 10:
                back = random.sample(soft, min(len(soft), random.choice((1, 1, 2))))
                return Undelete(tuple(back), some)
            case 11 | 12 | 13:
                return Condemn(state.n, state.fence, some, tuple(sorted(self._some(soft))))
            case _ if random.random() < 0.5:
                return Delete(some)
        session = SessionId(self._log.digits(24))
        return Register(session, state.n, state.fence, (record(1, session),), some)

    def _commit(self, some: frozenset[int]) -> Commit:
        random, session = self._random, SessionId(self._log.digits(24))
        new = tuple(record(number, session) for number in range(random.randrange(3)))
        return Commit(
            session,
            random.choice(COMMITS),
            self._log.digits(64),
            random.choice("aaab"),
            random.randrange(4),
            tuple(random.sample(COMMITS, random.randrange(3))),
            "message",
            (("loss", random.choice((0.5, random.random()))),),
            tuple(random.sample(TAGS, random.choice((0, 0, 1)))),
            new,
            some,
            (("model", random.choice((MODEL, OPTIMIZER))),),
            logical_bytes=1000,
            new_bytes=10,
            leaves=3,
            document_bytes=500,
        )

    def _reduced(self, some: frozenset[int]) -> Reduced:
        random, plain = self._random, self._commit(some)
        columns = {field.name: getattr(plain, field.name) for field in fields(Commit)}
        thinned = random.choice(((), ("a/*",), ("a/*", "b/*")))
        replaces = random.choice((*self.state.commits, None))
        return Reduced(**columns, replaces=replaces, thinned=thinned, cast=())

    def _some(self, of: Iterable[object]) -> frozenset[object]:  # type: ignore[type-var]
        there = sorted(of)  # type: ignore[type-var]
        return frozenset(self._random.sample(there, min(len(there), self._random.randrange(3))))


def differences(queries: Queries, state: State) -> Iterator[str]:
    """What a catalog says otherwise than the state."""
    commits = {info.id: info for info in queries.log(forgotten=True)}
    asked = (
        ("position", queries.position(), state.position),
        (
            "commits",
            {
                (c, i.n, i.run, i.step, i.parents, i.forgotten, i.time_ns, i.thinned)
                for c, i in commits.items()
            },
            {
                (c, r.n, r.run, r.step, state.parents_of(c), r.soft != 0, r.time_ns, r.thinned)
                for c, r in state.commits.items()
            },
        ),
        (
            "ages",
            list(commits),
            sorted(commits, key=lambda c: state.commits[c].age, reverse=True),
        ),
        (
            "tags",
            {(tag.name, tag.commit) for tag in queries.tags()},
            {(name, c) for name, c in state.tags.items() if c in state.commits},
        ),
        (
            "runs",
            {info.run for info in queries.runs()},
            {row.run for row in state.commits.values() if not row.soft},
        ),
        (
            "packs",
            {
                (p.number, p.id, p.bytes, p.chunks, p.metadata, not p.condemned)
                for p in queries.packs()
            },
            {(number, *pack[:5]) for number, pack in state.packs.items()},
        ),
        (
            "metrics",
            {c: i.metrics for c, i in commits.items()},
            {c: dict(row.metrics) for c, row in state.commits.items()},
        ),
        (
            "schemas",
            set(queries.missing_schemas()),
            {schema for info in commits.values() for schema in info.schemas.values()},
        ),
    )
    yield from (f"{what}: {got}, wanted {wanted}" for what, got, wanted in asked if got != wanted)
