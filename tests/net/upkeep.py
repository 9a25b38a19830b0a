"""What is done to a history between its commits: what it is not asked to change stays as it was.

`h` is the history of the test. What is done says in `h.leaving` which steps may go.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptstore
from ckptstore.averages import combine, mean
from ckptstore.maintenance.check import Finding, Report, Severity
from tests.cli.running import call
from tests.net import places
from tests.net.training import same

GLOBS = ("optimizer/**", "masters/*", "ema/*", "model/p*", "views/*", "model/tie")


def alarms(report: Report) -> list[Finding]:
    """What somebody would have to see to; that a writer is at work is a note."""
    return [finding for finding in report.findings if finding.severity is not Severity.NOTE]


def collected(store: ckptstore.Store, *, dry_run: bool = False) -> None:
    """A gc of all that is dead. What is needed lies in packs that no gc condemned before: one that
    lies elsewhere can be read, and stays for ever."""
    report = store.gc(grace_s=0, max_unused=0.0, dry_run=dry_run)
    assert not report.problems, report.problems


# -- what makes a history smaller --


def compact(h: Any) -> None:
    policy = ckptstore.CompactPolicy(newest=0, every=h.random.randint(2, 4))
    assert not h.store.compact(policy).problems


def thin(h: Any) -> None:
    with suppress(ckptstore.InvalidInput):  # no commit has such a leaf
        h.store.forget(policy_of(h.random).thin(h.random.choice(GLOBS)))


def policy_of(random: Random) -> Any:
    return random.choice(
        (
            ckptstore.KeepLast(random.randint(2, 4)),
            ckptstore.KeepBest("loss", maximize=random.random() < 0.5, n=random.randint(1, 2)),
            ckptstore.KeepEverySteps(random.randint(2, 3)),
            ckptstore.KeepWithin(1),
            ckptstore.KeepPeriods("daily", 1),
        )
    )


def forget(h: Any) -> None:
    """By a policy, as it was planned and forecast."""
    policy = policy_of(h.random)
    plan = h.store.forget(policy, dry_run=True)
    forecast = h.store.forecast(policy)
    assert sum(run.forgotten for run in forecast.runs) == len(plan.forgotten)
    h.leaving |= {decision.row.step for decision in plan.forgotten}
    assert h.store.forget(policy).forgotten == plan.forgotten
    gc(h)


def undelete(h: Any) -> None:
    tagged = set(h.store.tags().values())
    infos = [info for info in h.commits()[1:] if info.id not in tagged]
    if infos:
        one = h.random.choice(infos).id
        h.store.forget(one)
        assert one in {info.id for info in h.store.forgotten()}
        assert h.store.undelete(one) == (one,)


def gc(h: Any) -> None:
    collected(h.store)


def on_workers(h: Any) -> None:
    """What moves chunks, by workers that find the stores by their places alone."""
    found = not (h.site.more or h.site.options or h.mirror.more or h.mirror.options)
    policy = ckptstore.CompactPolicy(newest=0, every=2)
    with ThreadPoolExecutor(2) as executor:
        on = h.store.on(executor) if found else h.store
        assert not on.compact(policy).problems
        assert not on.gc(grace_s=0, max_unused=0.0).problems
        to = h.mirror
        assert not on.push(to.place, create=True, force=True, storage=to.as_storage()).damaged


# -- what other stores get, and give --


def push(h: Any) -> None:
    to = h.mirror
    assert not h.store.push(to.place, create=True, force=True, storage=to.as_storage()).damaged


def mirror(h: Any) -> None:
    assert not h.store.mirror(h.mirror.place, storage=h.mirror.as_storage()).damaged


def pull(h: Any) -> None:
    if h.has_mirror():
        of = h.mirror
        assert not h.store.pull(of.place, force=True, storage=of.as_storage()).damaged


def mirrored(h: Any) -> None:
    """From now on until it is opened anew, each commit is uploaded when it is made."""
    h.reopen(mirror=ckptstore.Mirror(h.mirror.place, storage=h.mirror.as_storage()))
    assert h.store.flush_mirror()


def clone(h: Any) -> None:
    there = h.sites.new()
    of, to = h.site.as_storage(), there.as_storage()
    with ckptstore.clone(h.site.place, there.place, storage=of, to_storage=to) as other:
        assert [info.id for info in other.log()] == [info.id for info in h.store.log()]
        assert other.tags() == h.store.tags()
        h.look(other, h.random.choice(h.commits()).id)
    places.removed(h.sites, there)


# -- names --


def tag(h: Any) -> None:
    name, commit = h.random.choice(("best", "prod")), h.random.choice(h.commits()).id
    h.store.tag(name, commit)
    assert h.store.tags()[name] == commit
    assert h.store.checkout(name).id == commit


def untag(h: Any) -> None:
    for name in h.store.tags():
        h.store.untag(name)
    assert not h.store.tags()


def point(h: Any) -> None:
    """A file that names a commit, wherever its store is; a store in memory has none."""
    commit, file = h.random.choice(h.commits()).id, h.folder / "pointer.json"
    if h.site.place.startswith("memory:"):
        with pytest.raises(ckptstore.InvalidInput, match="cannot stand in a pointer"):
            ckptstore.write_pointer(file, h.store, commit)
        return
    ckptstore.write_pointer(file, h.store, commit)
    with ckptstore.open_pointer(file, storage=h.site.as_storage(), threads=1) as snapshot:
        assert snapshot.id == commit
        h.look_at(snapshot)


# -- questions, which change nothing --


def reopen(h: Any) -> None:
    h.reopen()
    assert h.store.chunk_bytes == h.chunk_bytes
    assert h.store.id == h.id


def check(h: Any) -> None:
    level = h.random.choice(("refs", "connectivity", "packs", "data"))
    report = h.store.fsck(level)
    assert not alarms(report), report.findings
    for info in h.store.log():
        h.store.checkout(info.id).verify()
    assert not h.store.sessions()


def repair(h: Any) -> None:
    """Nothing is damaged, so nothing is done."""
    place = [h.mirror.place] if h.has_mirror() else []
    done = h.store.repair(*place, apply=True, read_data="100%", storage=h.mirror.as_storage())
    assert not alarms(done.before), done.before.findings


def reindex(h: Any) -> None:
    done = h.store.reindex()
    assert not done.unreadable
    assert done.commits == len(h.store.log()) + len(h.store.forgotten(all_runs=True))


def ask(h: Any) -> None:
    infos = h.store.log()
    assert [usage.commit for usage in h.store.usage().commits] == [info.id for info in infos]
    assert set(h.store.runs()) == {info.run for info in infos}
    with suppress(ckptstore.NotFound):  # thinned away in all commits
        for row in h.store.history("views/*", run=h.store.run):
            if row.leaf in h.wanted.get(row.step, ()):
                assert row.elements == h.wanted[row.step][row.leaf].numel()


def diff(h: Any) -> None:
    """What is named as changed is what differs."""
    a, b = (h.store.checkout(h.random.choice(h.commits()).id) for _ in range(2))
    found = h.store.diff(a.id, b.id)
    changed = {change.path for change in found.changes}
    both = {leaf.path for leaf in a.leaves()} & {leaf.path for leaf in b.leaves()}
    for path in both - set(found.thinned):
        if path in h.wanted[a.step] and path in h.wanted[b.step]:
            assert same(a.read(path), b.read(path)) == (path not in changed), f"diff: {path}"


# -- commits that are made of others, or of files; they go again --


def average(h: Any) -> None:
    a, b = (h.store.checkout(h.random.choice(h.commits()).id) for _ in range(2))
    try:
        made = combine(h.store, [a.id, b.id], mean(2), select="model/*", run="averages")
    except (ckptstore.InvalidInput, ckptstore.Thinned):  # their leaves are not alike
        return
    for leaf in made.leaves("model/*"):
        x, y, got = (snapshot.read(leaf.path) for snapshot in (a, b, made))
        wanted = y
        if y.is_floating_point() and not same(x, y):
            wide = torch.float64 if y.dtype == torch.float64 else torch.float32
            wanted = (0.5 * x.to(wide) + 0.5 * y.to(wide)).to(y.dtype)
        assert same(got, wanted), f"average of {a.step} and {b.step}: {leaf.path}"
    h.store.forget(run="averages", all_commits=True)


def adopt(h: Any) -> None:
    """A directory, which is hollow for some time, comes back byte for byte."""
    state = h.training.state["model"].state_dict()
    tensors = {name: value.clone() for name, value in state.items()}
    with TemporaryDirectory(dir=h.folder) as folder:
        place = Path(folder) / "checkpoint"
        place.mkdir()
        save_file(tensors, place / "model.safetensors")
        (place / "notes.txt").write_text(str(h.step))
        wanted = {path.name: path.read_bytes() for path in place.iterdir()}
        hollow = h.random.random() < 0.5
        if hollow and h.site.place.startswith("memory:"):
            before = h.store.log()
            with pytest.raises(ckptstore.InvalidInput, match="cannot stand in a pointer"):
                h.store.adopt(place, hollow=True, step=0)
            assert h.store.log() == before
            return
        snapshot = h.store.adopt(place, hollow=hollow, step=0)
        holds = [name for name, commit in h.store.tags().items() if commit == snapshot.id]
        assert len(holds) == hollow
        if h.random.random() < 0.5:
            gc(h)
        target = place if hollow else place.with_name("written")
        snapshot.materialize(target)
        found = {path.name: path.read_bytes() for path in target.iterdir()}
        assert wanted == found
        if hollow:
            assert list(h.store.release(*holds).values()) == [snapshot.id]
        h.store.forget(snapshot.id)


# -- the command line, where it needs no more than a path --


def command(h: Any) -> None:
    if "://" in h.site.place or h.sites.postgres:
        return
    words = h.random.choice(LINES)
    root = logging.getLogger()
    handlers = list(root.handlers)
    try:
        done = call(*words, "-s", h.site.place)
    finally:
        root.handlers[:] = handlers  # those of the command write to what is closed now
    assert done.code == 0, f"{words}: {done.code} {done.err or done.out}"


LINES: tuple[tuple[str, ...], ...] = (
    ("log",),
    ("show", "latest"),
    ("ls", "latest"),
    ("diff", "latest", "latest"),
    ("history",),
    ("stats",),
    ("tag",),
    ("sessions",),
    ("which",),
    ("fsck",),
    ("reindex",),
    ("gc", "--now"),
    ("compact",),
)
