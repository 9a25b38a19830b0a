"""Every way to write, to read, every operation and every place, in one table each, from which the
properties of the net draw. A test compares the tables with the public names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch

import ckptstore
from ckptstore.interop.formats.exports import export
from ckptstore.interop.formats.imports import import_path
from tests.net import ranked
from tests.net.training import Tensors, tensors_of


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
    newest = h.store.log(1)[0]
    if any(leaf.gone for leaf in h.store.checkout(newest.id).leaves()):
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
    found = there(snapshot)
    state = snapshot.state_dict(select=found.__contains__, mmap=True)
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


READERS = (
    Reader("restore", ("Snapshot.restore", "Store.checkout"), restore),
    Reader("resume", ("Store.resume",), resume),
    Reader("read", ("Snapshot.read", "Snapshot.leaves"), read),
    Reader("slices", ("Snapshot.read",), read_slices),
    Reader("read_into", ("Snapshot.read_into",), read_into),
    Reader("mapped", ("Snapshot.open",), mapped),
    Reader("state_dict", ("Snapshot.state_dict",), state_dict),
    Reader("state_dict mapped", ("Snapshot.state_dict",), state_dict_mapped),
    Reader("selected", ("Snapshot.state_dict",), selected),
    Reader("converted", ("Snapshot.read",), converted),
    Reader("safetensors", ("$ export", "$ import"), through_files("safetensors")),
    Reader("torch", ("$ export", "$ import"), through_files("torch")),
)


RANKED = (
    Reader("whole", ("Ranks", "Snapshot.state_dict", "Snapshot.leaves"), ranked.whole),
    Reader("of_rank", ("Snapshot.of_rank",), ranked.of_rank),
    Reader("numbered", ("Snapshot.numbered",), ranked.numbered),
    Reader("only", ("Snapshot.only",), ranked.only),
    Reader("layout", ("Snapshot.layout",), ranked.layout),
)
"""Ways to read a commit of several ranks."""


# -- operations, each by a store of its own: P1 runs one within another --


class World:
    """A store and a mirror, and what each commit has, by step."""

    def __init__(self, folder: Path, states: dict[int, Any], coming: dict[int, Any]) -> None:
        self.folder, self.states, self.coming = folder, states, coming
        self.prepared: Any = None

    def at(self, folder: Path) -> "World":
        return World(folder, self.states, self.coming)

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def mirror(self) -> Path:
        return self.folder / "mirror"

    def compare(self, snapshot: ckptstore.Snapshot) -> None:
        """What a commit has is what was committed; a leaf that was thinned away is not there."""
        assert snapshot.step is not None
        wanted = (self.states | self.coming)[snapshot.step]
        here = there(snapshot)
        state = snapshot.state_dict(select=here.__contains__)
        assert state.keys() == here
        for name, value in state.items():
            equal = torch.equal(value, wanted[name]) if name != "n" else value == wanted[name]
            assert equal, f"step {snapshot.step}: {name} is not what was committed"


def op_commit(world: World, store: ckptstore.Store, step: int) -> None:
    world.compare(store.commit(world.coming[step], step=step))


def op_commit_async(world: World, store: ckptstore.Store, step: int) -> None:
    world.compare(store.commit_async(world.coming[step], step=step).wait())


def op_restore(world: World, store: ckptstore.Store, step: int) -> None:
    target = {
        name: torch.zeros_like(value) if name != "n" else 0
        for name, value in world.states[6].items()
    }
    store.checkout(6).restore(target, strict=False)
    for name, value in world.states[6].items():
        equal = torch.equal(target[name], value) if name != "n" else target[name] == value
        assert equal, f"restored {name} is not what was committed"


def op_read(world: World, store: ckptstore.Store, step: int) -> None:
    """One that was looked up before, so that its chunks may have moved meanwhile."""
    snapshot = world.prepared if step == 100 else store.checkout(6)
    for name in ("x", "y"):
        got = snapshot.read(name)
        assert torch.equal(got, world.states[6][name]), f"read {name} is not what was committed"


def op_gc(world: World, store: ckptstore.Store, step: int) -> None:
    store.gc(grace_s=0, max_unused=0.0)


def op_compact(world: World, store: ckptstore.Store, step: int) -> None:
    store.compact(ckptstore.CompactPolicy(newest=0, every=2))


def op_thin(world: World, store: ckptstore.Store, step: int) -> None:
    store.forget(ckptstore.KeepLast(3).thin("y"))


def op_forget(world: World, store: ckptstore.Store, step: int) -> None:
    """With its gc: steps 5 and 6 stay, unless two newer ones came, and are pinned by a tag."""
    store.tag("kept", 6)
    store.forget(ckptstore.KeepLast(2))
    store.gc(grace_s=0, max_unused=0.0)


def op_push(world: World, store: ckptstore.Store, step: int) -> None:
    store.push(world.mirror, force=True)


def op_pull(world: World, store: ckptstore.Store, step: int) -> None:
    store.pull(world.mirror, force=True)


OPERATIONS = (
    Operation("commit", ("Store.commit",), op_commit),
    Operation("commit_async", ("Store.commit_async", "PendingCommit"), op_commit_async),
    Operation("restore", ("Snapshot.restore",), op_restore),
    Operation("read", ("Snapshot.read",), op_read),
    Operation("gc", ("Store.gc", "$ gc"), op_gc),
    Operation("compact", ("Store.compact", "CompactPolicy", "$ compact"), op_compact),
    Operation("thin", ("Store.forget",), op_thin),
    Operation("forget", ("Store.forget", "Store.tag", "KeepLast", "$ forget"), op_forget),
    Operation("push", ("Store.push", "$ push"), op_push),
    Operation("pull", ("Store.pull", "$ pull"), op_pull),
)

# -- places, and what other tests try --

PLACES = (Entry("directory", ("open", "Store", "Storage", "Store.close"), ckptstore.open),)

APART: dict[str, str] = {
    "errors: tests/test_arguments.py and the tests of what raises them": (
        "Busy Cancelled CkptStoreError Conflict Corrupt InvalidInput NoSpace NotFound ReadOnly "
        "Thinned Unavailable Untrusted"
    ),
    "what a commit says about itself, and one line each of it": (
        "CommitProgress Snapshot Snapshot.close Snapshot.content_id Snapshot.keys "
        "Snapshot.links Snapshot.logical_bytes Snapshot.message Snapshot.metrics "
        "Snapshot.new_bytes Snapshot.parents Snapshot.run Snapshot.step Snapshot.time "
        "Store.chunk_bytes Store.id Store.log Store.runs Store.tags Store.url Store.worker_pid "
        "Store.staging Store.sessions Store.usage Store.forgotten Store.forecast Store.diff"
    ),
    "retention: tests/maintenance/test_retention.py": (
        "KeepBest KeepEverySteps KeepPeriods KeepWithin Store.undelete Store.untag"
    ),
    "objects and values: tests/state": "RNGState StateDict register_class register_value",
    "files and hollow directories: tests/interop/adopt": (
        "Store.adopt Store.release Snapshot.materialize write_pointer open_pointer $adopt "
        "$materialize $release"
    ),
    "mirrors by the store itself: tests/maintenance/mirror": (
        "Mirror Store.mirror Store.flush_mirror clone $clone"
    ),
    "checks and repair: tests/maintenance": (
        "Store.fsck Store.repair Store.reindex Store.doctor Snapshot.verify $fsck $repair "
        "$reindex $doctor $verify $migrate $sign $sessions"
    ),
    "questions and averages: tests/cli, tests/test_history.py, tests/test_averages.py": (
        "Store.history $average $bisect $completion $diff $history $init $log $ls $parted $plot "
        "$show $stats $tag $ui $undelete $watch $which"
    ),
}
"""Public names that no entry covers yet, by where they are tried."""
