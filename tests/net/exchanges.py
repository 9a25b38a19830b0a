"""Two or three stores that commit, thin, forget, collect, compact and tag, and send each other one
commit or all; one may be the fast tier of another, or become a clone of it. Each action says what
it may change, and the rest must be as it was."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import Any

import fsspec
import torch

import ckptstore
from ckptstore.core.ids import CommitId
from ckptstore.maintenance.retention import Policy
from tests.net import registry, upkeep
from tests.net.registry import Operation
from tests.net.training import CHUNK_BYTES, Tensors, Training, copies, same, tensors_of

TAGS = ("best", "prod", "last")
GLOBS = (
    "model/tie",
    "optimizer/**",
    "optimizer/*/exp_avg",
    "model/p0",
    "model/*",
    "ema/*",
    "masters/*",
    "**/p*",
)

Leaves = frozenset[str]


class Seen:
    """What a store shows: by step its commit and the leaves that this has, and its tags by step."""

    def __init__(self, store: ckptstore.Store, leaves: dict[CommitId, Leaves]) -> None:
        state = store._handle.log.replay(refresh=True)
        live = {commit: row for commit, row in state.commits.items() if not row.soft}
        infos = store.log()
        assert {info.id for info in infos} == set(live), "a listing lacks commits"
        assert store.tags() == dict(state.tags), "a listing lacks tags"
        self.ids: dict[int, CommitId] = {}
        for info in infos:
            assert info.step is not None and info.step not in self.ids, "two commits in one place"
            self.ids[info.step] = info.id
            if info.id not in leaves:
                there = store.checkout(info.id).leaves()
                leaves[info.id] = frozenset(leaf.path for leaf in there if not leaf.gone)
        self.leaves = {step: leaves[commit] for step, commit in self.ids.items()}
        self.replaced = set(state.replaced)
        self.forgotten = {row.step for row in state.commits.values() if row.soft} - set(self.ids)
        steps = {commit: step for step, commit in self.ids.items()}
        self.tags = {name: steps[commit] for name, commit in state.tags.items()}

    def shows(self, other: "Seen") -> bool:
        """Whether nothing changed from `other` to this."""
        return (self.ids, self.leaves, self.tags) == (other.ids, other.leaves, other.tags)


class Stores:
    """A commit is known by its step, which all stores number on. What was committed is known by
    step, as readers of the registry want it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, Random(seed)
        torch.manual_seed(seed)
        self.leaves: dict[CommitId, Leaves] = {}
        self.seen: dict[int, tuple[tuple[ckptstore.Store, int], Seen]] = {}
        self.counts, self.told = Counter[str](), list[str]()
        self.training = Training(self.random)
        self.wanted: dict[int, Tensors] = {}
        self.plain: dict[int, dict[str, Any]] = {}
        self.step = self.reading = 0
        self.places = [self.drawn(name) for name in "abc"[: self.random.choice((2, 3))]]
        self.stores = [self.open(who) for who in range(len(self.places))]
        for _ in range(4):
            commit(self, 0)

    @property
    def store(self) -> ckptstore.Store:
        """The one that is read from."""
        return self.stores[self.reading]

    def open(self, who: int, **options: Any) -> ckptstore.Store:
        storage = ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
        return ckptstore.open(self.place(who), threads=1, storage=storage, **options)

    def drawn(self, name: str) -> Path | str:
        """A directory, or an object storage in memory."""
        return self.folder / name if self.random.random() < 0.8 else f"memory:/{self.folder}/{name}"

    def place(self, who: int) -> Path | str:
        return self.places[who]

    def remove(self, who: int) -> None:
        place = self.place(who)
        if isinstance(place, Path):
            rmtree(place)
        else:
            fsspec.filesystem("memory").rm(place, recursive=True)

    def see(self, who: int) -> Seen:
        """What the store shows; it was looked at before if its log has not grown since."""
        store = self.stores[who]
        key = store, store._handle.log.replay(refresh=True).n
        if who not in self.seen or self.seen[who][0] != key:
            self.seen[who] = key, Seen(store, self.leaves)
        return self.seen[who][1]

    def other(self, who: int) -> int:
        return self.random.choice([each for each in range(len(self.stores)) if each != who])

    def act(self) -> None:
        """Do one random action; listings are complete after it."""
        actions, weights = zip(*ACTIONS, strict=True)
        action = self.random.choices(actions, weights)[0]
        who = self.random.choices(range(len(self.stores)), (6, 3, 3)[: len(self.stores)])[0]
        self.told.append(f"{action.name} {who}")
        action.act(self, who)
        for each in range(len(self.stores)):
            self.see(each)

    def tell(self, *what: object) -> None:
        self.told[-1:] = [" ".join(map(str, (*self.told[-1:], *what)))]

    # -- for readers --

    def check(self, got: Tensors, step: int, names: Iterable[str], where: str) -> None:
        for name in names:
            assert same(got[name], self.wanted[step][name]), (
                f"{where} of step {step}: {name} is not what was committed"
            )

    def look(self, who: int, commit: CommitId, way: registry.Reader) -> None:
        self.reading = who
        snapshot = self.store.checkout(commit)
        assert snapshot.step is not None
        way.act(self, snapshot, snapshot.step)

    def end(self) -> None:
        """All stores converge, and every byte of every leaf is what was committed."""
        for who in range(len(self.stores)):
            self.told.append(f"at the end: sync {who}")
            sync(self, who)
        for who, store in enumerate(self.stores):
            self.told.append(f"at the end: read {who}")
            upkeep.collected(store)
            for info in store.log():
                self.look(who, info.id, EVERYTHING)
                self.look(who, info.id, MAPPED)
                way = self.random.choice(WAYS)
                mappable = isinstance(self.place(who), Path) or way.name != "state_dict mapped"
                if mappable and self.random.random() < 0.3:
                    self.look(who, info.id, way)
            assert not store.fsck(read_data="100%").findings

    def close(self) -> None:
        for who, store in enumerate(self.stores):
            store.close()
            self.remove(who)


WAYS = [way for way in registry.READERS if way.name not in ("facts", "numbered", "follow")]
"""Those need the labels and the order of a training's parameters, which stores do not exchange, or
set a tag, which they do."""

EVERYTHING = next(reader for reader in registry.READERS if reader.name == "state_dict")
MAPPED = next(reader for reader in registry.READERS if reader.name == "mapped")

# -- what one store does --


def commit(s: Stores, who: int) -> None:
    for _ in range(s.random.randint(1, 2)):
        s.step += 1
        s.training.train()
        state = dict(s.training.state)
        s.wanted[s.step], s.plain[s.step] = copies(tensors_of(state)), dict(state["plain"])
        label = {
            "tag": s.random.choice((*TAGS, (), (), ())),
            "metrics": {"loss": s.random.random()},
        }
        s.random.choice(registry.WRITERS).act(s.stores[who], state, step=s.step, **label)
        s.counts["commits"] += 1


def tag(s: Stores, who: int, names: Sequence[str] = TAGS) -> None:
    if ids := s.see(who).ids:
        s.stores[who].tag(s.random.choice(names), ids[s.random.choice(sorted(ids))])


def untag(s: Stores, who: int) -> None:
    for name in sorted(s.stores[who].tags()):
        s.stores[who].untag(name)


def thin(s: Stores, who: int) -> None:
    before = s.see(who)
    policy = ckptstore.KeepLast(s.random.randint(1, 3)).thin(s.random.choice(GLOBS))
    plan = None
    with suppress(ckptstore.InvalidInput):  # no commit has such a leaf
        plan = s.stores[who].forget(policy)
    after = s.see(who)
    thinned = {decision.row.step for decision in plan.thinned} if plan else set()
    assert set(after.ids) == set(before.ids)
    assert after.tags == before.tags
    for step, had in before.leaves.items():
        assert after.leaves[step] <= had
        assert step in thinned or after.ids[step] == before.ids[step]
    s.counts["thinned"] += len(thinned)


def forget(s: Stores, who: int) -> None:
    before = s.see(who)
    if not before.ids:
        return
    step = s.random.choice(sorted(before.ids))
    try:
        s.stores[who].forget(before.ids[step])
    except ckptstore.Conflict:
        s.counts["refused"] += 1
        assert s.see(who).shows(before)
    else:
        s.counts["forgotten"] += 1
        assert set(s.see(who).ids) == set(before.ids) - {step}


def retain(s: Stores, who: int) -> None:
    """By a policy, which never takes a commit with a tag."""
    before = s.see(who)
    if not before.ids:
        return
    gone = {each.row.step for each in s.stores[who].forget(policy(s)).forgotten}
    after = s.see(who)
    assert set(after.ids) == set(before.ids) - gone
    assert after.tags == before.tags
    assert all(after.leaves[step] == before.leaves[step] for step in after.ids)
    s.counts["forgotten"] += len(gone)


def policy(s: Stores) -> Policy:
    n = s.random.randint(2, 4)
    drawn: Policy = s.random.choice(
        (
            ckptstore.KeepLast(n),
            ckptstore.KeepEverySteps(n),
            ckptstore.KeepBest("loss", n=n),
            ckptstore.KeepPeriods("hourly", 1),
            ckptstore.KeepWithin(3600),
        )
    )
    return drawn


def purge(s: Stores, who: int) -> None:
    forget(s, who)
    collect(s, who)


def undelete(s: Stores, who: int) -> None:
    forgotten = sorted(s.stores[who].forgotten(), key=lambda info: (info.step, info.n))
    if not forgotten:
        return
    before = s.see(who)
    try:
        s.stores[who].undelete(s.random.choice(forgotten).id)
    except ckptstore.Conflict:
        assert s.see(who).shows(before)
    else:
        s.counts["undeleted"] += 1
        assert set(s.see(who).ids) >= set(before.ids)


def collect(s: Stores, who: int) -> None:
    before = s.see(who)
    upkeep.collected(s.stores[who])
    assert s.see(who).shows(before)
    s.counts["gcs"] += 1


def compact(s: Stores, who: int) -> None:
    before = s.see(who)
    policy = ckptstore.CompactPolicy(newest=0, every=s.random.randint(2, 4))
    assert not s.stores[who].compact(policy).problems
    assert s.see(who).shows(before)


def reopen(s: Stores, who: int) -> None:
    s.stores[who].close()
    place, loses = s.place(who), s.random.random() < 0.5
    if isinstance(place, Path) and loses:
        rmtree(place / "index", ignore_errors=True)
    s.stores[who] = s.open(who)


# -- what is between two --


def send(s: Stores, who: int) -> None:
    """Send one commit, or all, to another store, by a push or a pull. Now and then somebody does
    something else in one of the two meanwhile, once the plan is made."""
    to = s.other(who)
    here, before = s.see(who), s.see(to)
    force, pull, everything, races = (s.random.random() < p for p in (0.6, 0.5, 0.4, 0.5))
    if not here.ids:
        return
    tagged = s.random.random() < 0.5 and sorted(here.tags.values())
    named = set(here.ids) if everything else {s.random.choice(tagged or sorted(here.ids))}
    refs = [] if everything else [here.ids[step] for step in named]
    s.tell("to", to, f"force={force}", f"pull={pull}", "all" if everything else named)
    meanwhile = Meanwhile(s, who, to) if races else None
    options = {"force": force, **({"progress": meanwhile.report} if meanwhile else {})}
    error: ckptstore.CkptStoreError | None = None
    try:
        if pull:
            s.stores[to].pull(s.place(who), *refs, **options)
        else:
            s.stores[who].push(s.place(to), *refs, **options)
    except (ckptstore.Conflict, ckptstore.NotFound) as refused:
        error = refused
    after = s.see(to)
    if meanwhile and meanwhile.seen:
        new_here, known = meanwhile.seen
        assert s.see(who).shows(new_here)
        check_received(s, after, known, named)
        allowed = {*here.tags.items(), *new_here.tags.items(), *known.tags.items()}
        assert set(after.tags.items()) <= allowed, "a tag that nobody set"
        if not force:
            assert after.tags.items() >= known.tags.items(), "a tag moved without force"
        s.counts["raced"] += 1
        return
    assert s.see(who).shows(here)
    if error:
        assert isinstance(error, ckptstore.Conflict) and not force
        assert any_moves(here, before, named)
        assert after.shows(before)
        s.counts["refused"] += 1
        return
    check_received(s, after, before, named)
    assert set(after.ids) == set(before.ids) | named - before.forgotten
    for step in named - set(before.ids) - before.forgotten:
        assert after.leaves[step] == here.leaves[step]
    moved = {name: step for name, step in here.tags.items() if step in named & set(after.ids)}
    assert after.tags == before.tags | moved, "other tags than those of what was named"
    s.counts["sent"] += len(set(after.ids.values()) - set(before.ids.values()))


def check_received(s: Stores, after: Seen, before: Seen, named: set[int]) -> None:
    """A store that received some of `named` lost nothing, and got nothing else."""
    assert set(before.ids) <= set(after.ids) <= set(before.ids) | named
    for step, had in before.leaves.items():
        assert after.leaves[step] >= had, f"step {step} lost {had - after.leaves[step]}"
        assert step in named or after.ids[step] == before.ids[step]


class Meanwhile:
    """What somebody does in one of the two stores while commits are on their way. `seen` is what
    the source and the target show then, or None if the moment never came."""

    def __init__(self, s: Stores, source: int, target: int) -> None:
        self.s, self.ends = s, (source, target)
        self.who = s.random.choices(self.ends, (1, 2))[0]
        self.action = s.random.choice((*[tag] * 5, untag, thin, forget, purge, commit, collect))
        self.names = tuple(s.see(source).tags) or TAGS
        self.at = s.random.choice((0, 0, 0, 1, 2))
        self.seen: tuple[Seen, Seen] | None = None
        s.tell("| meanwhile", self.action.__name__, self.who)

    def report(self, phase: str, done: int, total: int) -> None:
        """Called when `done` commits of `total` have arrived."""
        if done != min(self.at, total) or self.seen:
            return
        s, before = self.s, self.s.stores
        s.stores = [s.open(who) for who in range(len(before))]
        try:
            if self.action is tag:
                tag(s, self.who, sorted(self.names))
            else:
                self.action(s, self.who)
            self.seen = s.see(self.ends[0]), s.see(self.ends[1])
        finally:
            for store in s.stores:
                store.close()
            s.stores = before


def any_moves(here: Seen, there: Seen, named: set[int]) -> bool:
    """Whether a tag of `named` names another commit there."""
    return any(
        step in named and there.tags.get(name, step) != step for name, step in here.tags.items()
    )


def mirror(s: Stores, who: int) -> None:
    """As it is here."""
    to = s.other(who)
    here, before = s.see(who), s.see(to)
    s.tell("to", to)
    s.stores[who].mirror(s.place(to))
    after = s.see(to)
    check_received(s, after, before, set(here.ids))
    assert set(after.ids) == set(before.ids) | set(here.ids) - before.forgotten
    moved = {name: step for name, step in here.tags.items() if step in after.ids}
    assert after.tags == before.tags | moved


def clone(s: Stores, who: int) -> None:
    """In the place of a store that is lost."""
    source = s.other(who)
    s.tell("of", source)
    s.stores[who].close()
    s.remove(who)
    s.stores[who] = ckptstore.clone(s.place(source), s.place(who))
    assert s.see(who).shows(s.see(source))


def sync(s: Stores, who: int) -> None:
    """Push and pull, after which both have what either had and did not give away itself."""
    to = s.other(who)
    s.tell("with", to)
    store, place = s.stores[who], s.place(to)
    before = (s.see(who), s.see(to))
    results = (store.push(place, force=True), store.pull(place, force=True))
    here, there = s.see(who), s.see(to)
    assert set(here.ids) - there.forgotten <= set(there.ids), "a commit was not sent"
    assert set(there.ids) - here.forgotten <= set(here.ids), "a commit was not received"
    check_received(s, here, before[0], set(there.ids))
    check_received(s, there, before[1], set(here.ids))
    pinned = {commit for result in results for commit, _ in result.plan.pinned}
    for step in here.ids.keys() & there.ids.keys():
        for mine, other in ((here, there), (there, here)):
            gave_away = mine.ids[step] in other.replaced or mine.ids[step] in pinned
            lacking = mine.leaves[step] - other.leaves[step]
            assert gave_away or not lacking, f"step {step} lacks {lacking} after push and pull"
    for mine, other in ((here, there), (there, here)):
        tags = {name: step for name, step in mine.tags.items() if step in other.ids}
        assert tags.items() <= other.tags.items(), "tags differ after push and pull"
    again = (store.push(place, force=True), store.pull(place, force=True))
    sent = {commit for result in again for commit in result.sent}
    assert sent <= pinned, "what nothing held back was not sent at once"
    if sent:  # what was held back by one of the newest commits, of which there are newer ones now
        again = (store.push(place, force=True), store.pull(place, force=True))
        assert not any(result.sent for result in again), "the stores do not come to rest"
    s.counts["synced"] += 1


def tier(s: Stores, who: int) -> None:
    """The store becomes the fast tier of another for some commits: whatever it gives away has
    arrived there, and everything can be read from both."""
    to = s.other(who)
    keep: Policy | tuple[()] = s.random.choice((policy(s), ()))
    s.tell("of", to, keep)
    before = s.see(who), s.see(to)
    s.stores[who].close()
    s.stores[who] = store = s.open(who, mirror=ckptstore.Mirror(s.place(to), keep_local=keep))
    assert store.flush_mirror()
    check_tier(s, (who, to), before, set())
    for action in s.random.choices((commit, commit, tag), k=s.random.randint(1, 3)):
        before, step = (s.see(who), s.see(to)), s.step
        action(s, who)
        assert store.flush_mirror()
        check_tier(s, (who, to), before, set(range(step + 1, s.step + 1)))
    here, there = s.see(who), s.see(to)
    for step in sorted(set(there.ids) - set(here.ids)):
        s.look(who, there.ids[step], EVERYTHING)
    if newest := max({*there.ids, *here.ids}, default=None):
        assert store.checkout("latest").step == newest
    reopen(s, who)
    s.counts["tiers"] += 1


def check_tier(s: Stores, ends: tuple[int, int], before: tuple[Seen, Seen], new: set[int]) -> None:
    """After an upload, with `new` commits: what the mirror had stays, it has what was here, and
    nothing left here that it lacks."""
    (was, there), (here, after) = before, (s.see(ends[0]), s.see(ends[1]))
    wanted = set(was.ids) | new
    assert set(here.ids) <= wanted
    assert was.tags.keys() <= here.tags.keys()
    check_received(s, after, there, wanted)
    assert wanted - there.forgotten <= set(after.ids)
    for step in set(was.ids) & set(after.ids) - set(here.ids):
        assert after.leaves[step] >= was.leaves[step] or was.ids[step] in after.replaced
    tags = {name: step for name, step in here.tags.items() if step in after.ids}
    assert tags.items() <= after.tags.items()


ACTIONS: tuple[tuple[Operation, int], ...] = (
    (Operation("commit", ("Store.commit", "Store.log", "Store.tags"), commit), 4),
    (Operation("tag", ("Store.tag",), tag), 1),
    (Operation("untag", ("Store.untag",), untag), 1),
    (Operation("thin", ("Store.forget",), thin), 4),
    (Operation("forget", ("Store.forget",), forget), 1),
    (
        Operation(
            "retain",
            ("KeepLast", "KeepEverySteps", "KeepBest", "KeepPeriods", "KeepWithin"),
            retain,
        ),
        1,
    ),
    (Operation("purge", ("Store.forget", "Store.gc"), purge), 2),
    (Operation("undelete", ("Store.undelete", "Store.forgotten", "$ undelete"), undelete), 1),
    (Operation("collect", ("Store.gc",), collect), 1),
    (Operation("compact", ("Store.compact",), compact), 1),
    (Operation("send", ("Store.push", "Store.pull"), send), 8),
    (Operation("mirror", ("Store.mirror",), mirror), 1),
    (Operation("clone", ("clone", "$ clone"), clone), 1),
    (Operation("sync", ("Store.push", "Store.pull"), sync), 1),
    (Operation("tier", ("Mirror", "Store.flush_mirror"), tier), 1),
    (Operation("reopen", ("open",), reopen), 1),
)
