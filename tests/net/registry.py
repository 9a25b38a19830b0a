"""Every way to write, to read, every operation and every place, in one table each, from which the
properties of the net draw. A test compares the tables with the public names."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import torch

import ckptstore
from ckptstore.averages import combine, mean
from ckptstore.interop.formats.exports import export
from ckptstore.interop.formats.imports import import_path
from tests.net import places, ranked, upkeep
from tests.net.training import Tensors, tensors_of
from tests.shared.sites import Sites

BLOCK = 1 << 14
"""Elements of a block: one chunk of the store."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One way; `covers` are the public names that it calls."""

    name: str
    covers: tuple[str, ...]
    act: Callable[..., Any]


Writer = Reader = Operation = Entry

# -- ways to write --


def commit(store: ckptstore.Store, state: Mapping[str, Any], **label: Any) -> None:
    store.commit(state, **label)


def commit_in_the_background(**how: Any) -> Callable[..., None]:
    def act(store: ckptstore.Store, state: Mapping[str, Any], **label: Any) -> None:
        store.commit_async(state, background=ckptstore.Async(**how), **label).wait()

    return act


def commit_by_schedule(store: ckptstore.Store, state: Mapping[str, Any], **label: Any) -> None:
    with store.committing():
        store.every(steps=1)(state, **label)


WRITERS = (
    Writer("commit", ("Store.commit",), commit),
    Writer("commit_async", ("Store.commit_async", "Async"), commit_in_the_background()),
    Writer("lazy", ("Store.commit_async",), commit_in_the_background(staging="lazy")),
    Writer("trusting", ("Store.commit_async",), commit_in_the_background(trust_version=True)),
    Writer("every", ("Store.every", "Store.committing"), commit_by_schedule),
)

# -- ways to read; `h` is the history of the test --


def there(snapshot: Any) -> set[str]:
    return {leaf.path for leaf in snapshot.leaves() if not leaf.gone}


def tensors_there(h: Any, snapshot: Any, step: int) -> list[str]:
    """Names of tensors whose paths are their names."""
    found = there(snapshot)
    names = (name for name in h.wanted[step] if not name.startswith("optimizer/"))
    return [name for name in names if name in found]


def restore(h: Any, snapshot: Any, step: int) -> None:
    if any(leaf.gone for leaf in snapshot.leaves()):
        state_dict(h, snapshot, step)
        return
    target = h.training.build()
    if not any(name.startswith("optimizer/") for name in h.wanted[step]):
        target.pop("optimizer", None)
    snapshot.restore(target)
    h.check(tensors_of(target), step, h.wanted[step], "restore")
    assert target["plain"] == h.plain[step]


def resume(h: Any, snapshot: Any, step: int) -> None:
    newest = h.store.checkout("latest")  # in the mirror, maybe, where nobody forgot it
    if newest.step not in h.wanted or any(leaf.gone for leaf in newest.leaves()):
        return
    target = h.training.build()
    if not any(name.startswith("optimizer/") for name in h.wanted[newest.step]):
        target.pop("optimizer", None)
    found = h.store.resume(target)
    h.check(tensors_of(target), found.step, h.wanted[found.step], "resume")


def read(h: Any, snapshot: Any, step: int) -> None:
    names = tensors_there(h, snapshot, step)
    h.check({name: snapshot.read(name) for name in names}, step, names, "read")


def read_slices(h: Any, snapshot: Any, step: int) -> None:
    for name in tensors_there(h, snapshot, step):
        shape = h.wanted[step][name].shape
        if not shape or not shape[0]:
            continue
        start = h.random.randrange(shape[0])
        stop = h.random.randint(start + 1, shape[0])
        part = snapshot.read(name, (slice(start, stop),))
        wanted = h.wanted[step][name][start:stop]
        assert torch.equal(part.to(wanted.dtype).float(), wanted.float()), f"slice of {name}"


def read_into(h: Any, snapshot: Any, step: int) -> None:
    names, got = tensors_there(h, snapshot, step), dict[str, torch.Tensor]()
    for name in names:
        wanted = snapshot.read(name)
        got[name] = torch.zeros_like(wanted)
        snapshot.read_into(got[name], name)
    h.check(got, step, names, "read_into")


def mapped(h: Any, snapshot: Any, step: int) -> None:
    got: Tensors = {}
    for name in tensors_there(h, snapshot, step):
        try:
            got[name] = snapshot.open(name, verify=h.random.random() < 0.5).clone()
        except ckptstore.InvalidInput as error:
            if "use read" not in str(error):
                raise
    h.check(got, step, got, "open")


def flat(state: Mapping[str, Any], names: list[str]) -> Tensors:
    """Tensors of a state of nested dicts by name."""
    return {name: state[(part := name.split("/", 1))[0]][part[1]] for name in names}


def state_dict(h: Any, snapshot: Any, step: int) -> None:
    state = snapshot.state_dict(select=there(snapshot).__contains__)
    names = tensors_there(h, snapshot, step)
    h.check(flat(state, names), step, names, "state_dict")


def state_dict_mapped(h: Any, snapshot: Any, step: int) -> None:
    """A store that is no local directory refuses, unless nothing is to be mapped."""
    found = there(snapshot)
    try:
        state = snapshot.state_dict(select=found.__contains__, mmap=True)
    except ckptstore.InvalidInput as error:
        if "use read" not in str(error):
            raise
        return
    names = tensors_there(h, snapshot, step)
    h.check(flat(state, names), step, names, "state_dict mmap")


def selected(h: Any, snapshot: Any, step: int) -> None:
    if names := tensors_there(h, snapshot, step):
        name = h.random.choice(names)
        h.check(flat(snapshot.state_dict(select=name), [name]), step, [name], "select")


def converted(h: Any, snapshot: Any, step: int) -> None:
    for name in tensors_there(h, snapshot, step):
        value = snapshot.read(name, dtype=torch.float32)
        if h.wanted[step][name].is_floating_point():
            assert torch.equal(value, h.wanted[step][name].float()), f"dtype of {name}"


def through_files(format: str) -> Callable[[Any, Any, int], None]:
    def act(h: Any, snapshot: Any, step: int) -> None:
        names = tensors_there(h, snapshot, step)
        selects = [name for name in names if name.startswith("model/")]
        if not selects or any(leaf.gone for leaf in snapshot.leaves()):
            return
        place = Path(h.folder) / "out"
        target = place / ("x.safetensors" if format == "safetensors" else "x.pt")
        place.mkdir()
        export(snapshot, target, format=format, select="model/**")  # type: ignore[arg-type]
        with ckptstore.open(place / "s", threads=1) as other:
            again = import_path(other, target)
            paths = {
                leaf.path.replace("%2F", "/").rsplit("/", 1)[-1]: leaf.path
                for leaf in again.leaves()
            }
            lacking = [name for name in selects if name.split("/")[1] not in paths]
            assert not lacking, f"export {format} of step {step} lacks {lacking}; it has {paths}"
            got = {name: again.read(paths[name.split("/")[1]]) for name in selects}
        h.check(got, step, selects, f"export {format}")
        rmtree(place)

    return act


def facts(h: Any, snapshot: Any, step: int) -> None:
    """What the commit says about itself, which thinning, mirrors and compaction leave as it is."""
    label = h.labels[step]
    assert (snapshot.message, snapshot.metrics) == (label["message"], label["metrics"])
    assert (snapshot.links, snapshot.run, snapshot.step) == (label["links"], h.store.run, step)
    keys = {leaf.path.split("/")[0] for leaf in snapshot.leaves()}
    assert keys <= set(snapshot.keys())
    assert snapshot.layout is None
    assert snapshot.id not in snapshot.parents
    assert snapshot.time <= datetime.now(UTC)
    assert snapshot.logical_bytes
    assert snapshot.new_bytes >= 0
    assert h.contents.setdefault(snapshot.id, snapshot.content_id) == snapshot.content_id


def narrowed(h: Any, snapshot: Any, step: int) -> None:
    """Some keys of it, as a commit of one rank."""
    keys = h.random.sample(snapshot.keys(), h.random.randint(1, len(snapshot.keys())))
    part = snapshot.only(keys).of_rank(0)
    assert set(part.keys()) == set(keys)
    names = [name for name in tensors_there(h, snapshot, step) if name.split("/")[0] in keys]
    h.check({name: part.read(name) for name in names}, step, names, "only, of_rank")


def numbered(h: Any, snapshot: Any, step: int) -> None:
    """Moments by the number of their parameter, as torch has them."""
    gone = any(leaf.gone for leaf in snapshot.leaves("optimizer/**"))
    if gone or not h.orders[step]:
        return
    state = snapshot.numbered().state_dict("optimizer")["state"]
    got = {
        f"optimizer/{name}/{moment}": value
        for number, name in enumerate(h.orders[step])
        for moment, value in state[number].items()
    }
    h.check(got, step, got, "numbered")


def follow(h: Any, snapshot: Any, step: int) -> None:
    """From another commit to this one, by a tag that moves; or from none, where that has other
    leaves."""
    other = h.store.checkout(h.random.choice(h.commits()).id)
    common = there(snapshot) & there(other)
    names = [name for name in tensors_there(h, snapshot, step) if name in common]
    if not names:
        return
    target: dict[str, Any] = {name.split("/", 1)[0]: {} for name in names}
    h.store.tag("followed", other)
    with h.store.follow(h.store.run, target, ref="followed", select=names) as follower:
        assert follower.wait(0) is not None
        h.check(flat(target, names), other.step, names, "follow, at first")
        h.store.tag("followed", snapshot)
        try:
            follower.wait(0)
        except ckptstore.InvalidInput as error:
            if "does not fit" not in str(error):
                raise
            h.check(flat(target, names), other.step, names, "follow, refused")
        else:
            with follower.frozen() as commit:
                assert commit.id == snapshot.id
            h.check(flat(target, names), step, names, "follow")
    h.store.untag("followed")


FACTS = (
    *("Snapshot.message", "Snapshot.metrics", "Snapshot.links", "Snapshot.run", "Snapshot.step"),
    *("Snapshot.keys", "Snapshot.layout", "Snapshot.parents", "Snapshot.content_id"),
    *("Snapshot.logical_bytes", "Snapshot.new_bytes", "Snapshot.time"),
)

READERS = (
    Reader("restore", ("Snapshot", "Snapshot.restore", "Store.checkout"), restore),
    Reader("resume", ("Store.resume",), resume),
    Reader("read", ("Snapshot.read", "Snapshot.leaves"), read),
    Reader("slices", ("Snapshot.read",), read_slices),
    Reader("read_into", ("Snapshot.read_into",), read_into),
    Reader("mapped", ("Snapshot.open",), mapped),
    Reader("state_dict", ("Snapshot.state_dict",), state_dict),
    Reader("state_dict mapped", ("Snapshot.state_dict",), state_dict_mapped),
    Reader("facts", FACTS, facts),
    Reader("narrowed", ("Snapshot.only", "Snapshot.of_rank", "Snapshot.keys"), narrowed),
    Reader("numbered", ("Snapshot.numbered",), numbered),
    Reader("selected", ("Snapshot.state_dict",), selected),
    Reader("converted", ("Snapshot.read",), converted),
    Reader("follow", ("Store.follow",), follow),
    Reader("safetensors", (), through_files("safetensors")),
    Reader("torch", (), through_files("torch")),
)


RANKED = (
    Reader("whole", ("Ranks", "Snapshot.state_dict", "Snapshot.leaves"), ranked.whole),
    Reader("slices", ("Snapshot.read",), ranked.slices),
    Reader("of_rank", ("Snapshot.of_rank",), ranked.of_rank),
    Reader("numbered", ("Snapshot.numbered",), ranked.numbered),
    Reader("only", ("Snapshot.only",), ranked.only),
    Reader("layout", ("Snapshot.layout",), ranked.layout),
)
"""Ways to read a commit of several ranks."""


# -- operations, each by a store of its own: P1 runs one within another --


def contents(random: Random, blocks: Sequence[torch.Tensor], number: int) -> dict[str, Any]:
    """Tensors of blocks that other commits have too, in other places, and now and then of one that
    nobody else has; and the rounding of two."""
    x, y = (torch.cat(random.choices(blocks, k=count)) for count in (4, 2))
    state: dict[str, Any] = {"x": x, "tie": x, "y": y, "n": number}
    state |= {"hx": x.to(torch.bfloat16), "hy": y.to(torch.float16)}
    if random.random() < 0.8:
        state["own"] = torch.full((BLOCK + 5,), random.random())
    return state


class World:
    """A store and a mirror, and what each commit has, by step."""

    def __init__(self, sites: tuple[Sites, Sites], folder: Path, random: Random) -> None:
        """Six commits, of which the newest may have no chunk of its own, and a mirror with some of
        them and with one of another run that the store lacks."""
        self.sites, self.folder = sites, folder
        self.store, self.mirror = (kind.new() for kind in sites)
        generator = torch.Generator().manual_seed(random.getrandbits(32))
        blocks = [torch.rand(BLOCK, generator=generator) for _ in range(random.randint(3, 6))]
        self.states = {step: contents(random, blocks, step) for step in (*range(1, 8), 100, 200)}
        foreign = [torch.rand(2 * BLOCK, generator=generator) for _ in range(3)]
        self.states[7] = dict(zip(("x", "y", "own"), foreign, strict=True)) | {"n": 7}
        for step in (5, 6):
            self.states[step].pop("own", None)
        for step in (101, 201):
            self.states[step] = middle(self.states[5], self.states[6], self.states[6]["n"])
        self.files = {step: {"notes.txt": b"0", "x.bin": os.urandom(999)} for step in (102, 202)}
        self.held: list[tuple[str, torch.Tensor]] = []
        self.prepared: Any = None
        self.as_it_was: dict[str, int] = {}
        to = self.mirror.as_storage()
        with self.store.open(threads=1) as store:
            for step in range(1, 7):
                store.commit(self.states[step], step=step)
                if step == 3 and random.random() < 0.7:
                    store.push(self.mirror.place, create=True, storage=to)
            store.push(self.mirror.place, 6, create=True, storage=to)
        with self.mirror.open(create=False, threads=1, run="elsewhere") as store:
            store.commit(self.states[7], step=7)

    def copied(self) -> "World":
        """The same again, elsewhere, with nothing done to it."""
        again = copy(self)
        again.held, again.as_it_was = [], places.objects_of(self.mirror)
        again.store = places.copied(self.sites[0], self.store)
        again.mirror = places.copied(self.sites[1], self.mirror)
        return again

    def is_mirror_changed(self) -> bool:
        return places.objects_of(self.mirror) != self.as_it_was

    def remove(self) -> None:
        for sites, site in zip(self.sites, (self.store, self.mirror), strict=True):
            places.removed(sites, site)

    def look(self, store: ckptstore.Store) -> ckptstore.Snapshot:
        """The commit that all operations spare."""
        return store.checkout(6)

    def compare(self, snapshot: ckptstore.Snapshot) -> None:
        """What a commit has is what was committed; a leaf that was thinned away is not there."""
        assert snapshot.step is not None
        if snapshot.step in self.files:
            self.compare_files(snapshot)
            return
        here = there(snapshot)
        state = snapshot.state_dict(select=here.__contains__)
        assert state.keys() == here
        self.compare_state(state, snapshot.step)

    def compare_state(self, state: Mapping[str, Any], step: int) -> None:
        for name, value in state.items():
            wanted = self.states[step][name]
            equal = torch.equal(value, wanted) if name != "n" else value == wanted
            assert equal, f"step {step}: {name} is not what was committed"

    def compare_files(self, snapshot: ckptstore.Snapshot) -> None:
        with TemporaryDirectory(dir=self.folder) as folder:
            snapshot.materialize(folder)
            found = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        assert found == self.files[snapshot.step or 0], "an adopted directory comes back another"


def middle(first: Mapping[str, Any], second: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The mean of two states."""
    found: dict[str, Any] = {"n": number}
    for name in ("x", "tie", "y", "hx", "hy"):
        mean = 0.5 * first[name].float() + 0.5 * second[name].float()
        found[name] = mean.to(first[name].dtype)
    return found


def op_commit(world: World, store: ckptstore.Store, step: int) -> None:
    world.compare(store.commit(world.states[step], step=step))


def op_commit_async(world: World, store: ckptstore.Store, step: int) -> None:
    pending: ckptstore.PendingCommit = store.commit_async(world.states[step], step=step)
    world.compare(pending.wait())


def op_restore(world: World, store: ckptstore.Store, step: int) -> None:
    target = {
        name: torch.zeros_like(value) if name != "n" else 0
        for name, value in world.states[6].items()
    }
    world.look(store).restore(target)
    world.compare_state(target, 6)


def op_read(world: World, store: ckptstore.Store, step: int) -> None:
    """One that was looked up before, so that its chunks may have moved meanwhile."""
    snapshot = world.prepared if step == 100 else world.look(store)
    world.compare_state({name: snapshot.read(name) for name in ("x", "y")}, 6)
    snapshot.verify()


def op_mmap(world: World, store: ckptstore.Store, step: int) -> None:
    """What is mapped stays to the end, whatever becomes of its pack."""
    snapshot = world.prepared if step == 100 else world.look(store)
    for name in ("x", "y"):
        try:
            world.held.append((name, snapshot.open(name)))
        except ckptstore.InvalidInput as error:
            if "use read" not in str(error):
                raise
    for name, tensor in world.held:
        world.compare_state({name: tensor}, 6)


def op_gc(world: World, store: ckptstore.Store, step: int) -> None:
    upkeep.collected(store)


def op_compact(world: World, store: ckptstore.Store, step: int) -> None:
    store.compact(ckptstore.CompactPolicy(newest=0, every=2))


def op_thin(world: World, store: ckptstore.Store, step: int) -> None:
    store.forget(ckptstore.KeepLast(3).thin("y"))


def op_forget(world: World, store: ckptstore.Store, step: int) -> None:
    """With its gc: steps 5 and 6 stay, unless two newer ones came, and are pinned by a tag."""
    store.tag("kept", 6)
    store.forget(ckptstore.KeepLast(2))
    upkeep.collected(store)


def op_undelete(world: World, store: ckptstore.Store, step: int) -> None:
    """Unless another operation has deleted, forgotten or undeleted it meanwhile."""
    with suppress(ckptstore.NotFound, ckptstore.Conflict):
        store.forget([2])
        store.undelete(2)


def op_push(world: World, store: ckptstore.Store, step: int) -> None:
    done = store.push(world.mirror.place, force=True, storage=world.mirror.as_storage())
    assert not done.damaged, done.damaged


def op_pull(world: World, store: ckptstore.Store, step: int) -> None:
    done = store.pull(world.mirror.place, force=True, storage=world.mirror.as_storage())
    assert not done.damaged, done.damaged


def op_repair(world: World, store: ckptstore.Store, step: int) -> None:
    """Nothing is damaged, whatever moves meanwhile."""
    to = world.mirror.as_storage()
    done = store.repair(world.mirror.place, apply=True, read_data="100%", storage=to)
    assert not upkeep.alarms(done.before), done.before.findings


def op_average(world: World, store: ckptstore.Store, step: int) -> None:
    world.compare(combine(store, [5, 6], mean(2), step=step + 1))


def op_reindex(world: World, store: ckptstore.Store, step: int) -> None:
    assert not store.reindex().unreadable


def op_fsck(world: World, store: ckptstore.Store, step: int) -> None:
    report = store.fsck(read_data="100%")
    assert not upkeep.alarms(report), report.findings


def op_adopt(world: World, store: ckptstore.Store, step: int) -> None:
    with TemporaryDirectory(dir=world.folder) as folder:
        for name, data in world.files[step + 2].items():
            (Path(folder) / name).write_bytes(data)
        snapshot = store.adopt(folder, step=step + 2)
    world.compare(snapshot)


OPERATIONS = (
    Operation("commit", ("Store.commit",), op_commit),
    Operation("commit_async", ("Store.commit_async", "PendingCommit"), op_commit_async),
    Operation("restore", ("Snapshot.restore",), op_restore),
    Operation("read", ("Snapshot.read", "Snapshot.verify"), op_read),
    Operation("mmap", ("Snapshot.open",), op_mmap),
    Operation("gc", ("Store.gc",), op_gc),
    Operation("compact", ("Store.compact", "CompactPolicy"), op_compact),
    Operation("thin", ("Store.forget", "KeepLast"), op_thin),
    Operation("forget", ("Store.forget", "Store.tag", "KeepLast"), op_forget),
    Operation("undelete", ("Store.forget", "Store.undelete"), op_undelete),
    Operation("push", ("Store.push",), op_push),
    Operation("pull", ("Store.pull",), op_pull),
    Operation("repair", ("Store.repair",), op_repair),
    Operation("average", (), op_average),
    Operation("reindex", ("Store.reindex",), op_reindex),
    Operation("fsck", ("Store.fsck",), op_fsck),
    Operation("adopt", ("Store.adopt", "Snapshot.materialize"), op_adopt),
)

# -- what is done to a history, beside commits --

POLICIES = ("KeepLast", "KeepBest", "KeepEverySteps", "KeepWithin", "KeepPeriods")

UPKEEP = (
    Entry("compact", ("Store.compact", "CompactPolicy"), upkeep.compact),
    Entry("thin", ("Store.forget",), upkeep.thin),
    Entry("forget", ("Store.forget", "Store.forecast", *POLICIES), upkeep.forget),
    Entry("undelete", ("Store.undelete", "Store.forgotten"), upkeep.undelete),
    Entry("gc", ("Store.gc",), upkeep.gc),
    Entry("on_workers", ("Store.on",), upkeep.on_workers),
    Entry("push", ("Store.push",), upkeep.push),
    Entry("pull", ("Store.pull",), upkeep.pull),
    Entry("mirror", ("Store.mirror",), upkeep.mirror),
    Entry("mirrored", ("Mirror", "Store.flush_mirror"), upkeep.mirrored),
    Entry("clone", ("clone", "Store.tags"), upkeep.clone),
    Entry("tag", ("Store.tag", "Store.tags"), upkeep.tag),
    Entry("untag", ("Store.untag",), upkeep.untag),
    Entry("point", ("write_pointer", "open_pointer", "Snapshot.close"), upkeep.point),
    Entry("reopen", ("Store.chunk_bytes", "Store.id", "Store.close"), upkeep.reopen),
    Entry("check", ("Store.fsck", "Snapshot.verify", "Store.sessions"), upkeep.check),
    Entry("repair", ("Store.repair",), upkeep.repair),
    Entry("reindex", ("Store.reindex",), upkeep.reindex),
    Entry("ask", ("Store.usage", "Store.runs", "Store.history", "Store.log"), upkeep.ask),
    Entry("diff", ("Store.diff",), upkeep.diff),
    Entry("average", (), upkeep.average),
    Entry("adopt", ("Store.adopt", "Snapshot.materialize", "Store.release"), upkeep.adopt),
    Entry("command", tuple(f"$ {words[0]}" for words in upkeep.LINES), upkeep.command),
)

RANKED_UPKEEP = tuple(
    each
    for each in UPKEEP
    if each.name in ("compact", "forget", "undelete", "gc", "mirror", "repair", "reindex")
)
"""What one process does to a history of commits of several ranks, of which some may have failed and
have left a session."""

# -- places, and what other tests try --

PLACES = tuple(
    Entry(kind.name, ("open", "Store", "Storage", "Store.close"), ckptstore.open)
    for kind in places.KINDS
)

APART: dict[str, tuple[str, ...]] = {
    # each error where it is raised and handled
    "tests/commit/test_commits.py": ("Busy", "Cancelled", "CommitProgress", "Store.staging"),
    "tests/commit/test_failed_saves.py": ("Health", "Store.health"),
    "tests/commit/test_process.py": ("Store.worker_pid",),
    "tests/maintenance/test_thin.py": ("Thinned",),
    "tests/maintenance/test_full_disk.py": ("NoSpace",),
    "tests/maintenance/test_signatures.py": ("Untrusted", "$ sign", "$ verify"),
    "tests/maintenance/test_forget.py": ("ReadOnly",),
    "tests/shared/test_faults.py": ("CkptStoreError", "Unavailable"),
    "tests/test_opening.py": ("Conflict", "Corrupt", "Store.url"),
    "tests/test_arguments.py": ("InvalidInput", "NotFound"),
    # states and ranks
    "tests/state/test_composites.py": ("register_class",),
    "tests/state/test_in_place.py": ("register_value",),
    "tests/interop/test_snapshots.py": ("RNGState", "StateDict"),
    # verbs
    "tests/cli/test_analysis.py": ("$ average", "$ bisect", "$ parted"),
    "tests/cli/test_changes.py": ("$ completion", "$ init", "$ migrate"),
    "tests/cli/test_plot.py": ("$ plot",),
    "tests/follow/test_command.py": ("$ follow",),
    "tests/cli/test_upkeep.py": ("$ forget",),
    "tests/follow/test_watch.py": ("$ watch",),
    "tests/interop/test_command.py": ("$ export", "$ import"),
    "tests/maintenance/mirror/test_command.py": ("$ pull", "$ push"),
    "tests/maintenance/test_commands.py": ("$ doctor", "$ repair"),
    "tests/maintenance/test_reports.py": ("Store.doctor",),
    "tests/ui/test_export.py": ("$ ui",),
}
"""Public names that no entry covers, by the test, file or folder that tries them instead."""
