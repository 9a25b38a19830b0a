"""Paths are a bijection in every view: each names each leaf once, and reading a path gives that
leaf's bytes."""

import os
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load

import ckptstore
from ckptstore.core.ids import ChunkId
from ckptstore.core.model import LeafContent, Node, Schema, TreeRef, leaves_of
from ckptstore.distributed.merge import Holder, RankTree, Ways, finish, merge
from ckptstore.distributed.restore import tree_of_rank
from ckptstore.interop.dcp import StoreReader
from ckptstore.interop.formats.exports import export
from ckptstore.interop.formats.imports import import_path
from ckptstore.interop.fsspec import url_of
from ckptstore.objects.schema import encode_schema
from ckptstore.restore.reader import Tree
from ckptstore.state.flatten import flatten
from tests.cli.running import call

MEMORY = Path("/dev/shm")
CHUNK_BYTES = 1 << 16
NAMES: tuple[Any, ...] = (
    *("a", "b", "a/b", "a.b", "a%2Fb", "%", "%25", "", "%empty", "0", "1", "01", "%int:1", "ä"),
    *("a b", "\n", "*", "[a]", "..", ".", "a/", "/a", "state", "params", "~", "'", '"', "@"),
)
OTHERS: tuple[Any, ...] = (0, 1, -1, True, None, 1.5, (1, "a"), b"a")
"""Keys of other types than strings, which look like them or like each other."""


class Drawn:
    """Random states of which every leaf has content of its own."""

    def __init__(self, random: Random) -> None:
        self.random, self.count = random, 0

    def state(self) -> dict[str, Any]:
        names = self.random.sample(NAMES, self.random.randint(1, 4))
        return {name: self.value(3) for name in names}

    def value(self, depth: int) -> Any:
        kinds = ("leaf",) if not depth else ("leaf", "leaf", "dict", "dict", "ordered", "list")
        kind = self.random.choice((*kinds, "tuple", "module", "empty") if depth else kinds)
        count = self.random.randint(0, 3)
        if kind in ("dict", "ordered"):
            keys = self.random.sample((*NAMES, *OTHERS), count)
            made = dict if kind == "dict" else OrderedDict
            return made((key, self.value(depth - 1)) for key in _distinct(keys))
        if kind in ("list", "tuple"):
            # With a tensor: a list of plain values is one leaf.
            items = [self.tensor(), *(self.value(depth - 1) for _ in range(count))]
            return items if kind == "list" else tuple(items)
        if kind == "module":
            module = torch.nn.Module()
            module.register_buffer("a", self.tensor())
            module.register_parameter("b", torch.nn.Parameter(self.tensor(), requires_grad=False))
            return module
        return {} if kind == "empty" else self.leaf()

    def leaf(self) -> Any:
        if self.random.random() < 0.6:
            tensor = self.tensor()
            return tensor if self.random.random() < 0.8 else tensor.numpy()
        self.count += 1
        return self.random.choice((self.count, f"text {self.count}", b"%d" % self.count))

    def tensor(self) -> torch.Tensor:
        self.count += 1
        return torch.full((2,), float(self.count), dtype=torch.float32)


def _distinct(keys: list[Any]) -> list[Any]:
    """Without those that Python takes for the same key."""
    return list(dict.fromkeys(keys))


Place = tuple[Any, ...]


def places(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Each leaf of a state by the keys that lead to it."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, dict):
        for key, below in value.items():
            yield from places(below, (*place, (type(key).__name__, key)))
    elif isinstance(value, list | tuple):
        for number, below in enumerate(value):
            yield from places(below, (*place, number))
    else:
        yield place, shown(value)


def shown(value: Any) -> Any:
    """A leaf's content, to compare."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def unique(names: list[str], where: str) -> list[str]:
    twice = [name for name, count in Counter(names).items() if count > 1]
    assert not twice, f"{where}: {twice} name several leaves"
    return names


class Views:
    """One commit in every view."""

    def __init__(self, folder: Path, store: ckptstore.Store, drawn: Drawn) -> None:
        self.folder, self.store, self.drawn = folder, store, drawn
        self.state = drawn.state()
        self.wanted = dict(places(self.state))
        self.snapshot = store.commit(self.state)
        self.paths = [leaf.path for leaf in self.snapshot.leaves()]

    def check(self) -> None:
        self.leaves()
        self.selected()
        self.views_of_views()
        self.listed()
        self.differences()
        self.dcp()
        self.files()
        for form, suffix in (("safetensors", ".safetensors"), ("torch", ".pt")):
            self.exported(form, suffix)

    def read(self, snapshot: ckptstore.Snapshot, paths: list[str]) -> list[Any]:
        return [shown(snapshot.read(path)) for path in paths]

    def leaves(self) -> None:
        unique(self.paths, "leaves")
        assert dict(places(self.snapshot.state_dict())) == self.wanted
        found = self.read(self.snapshot, self.paths)
        assert sorted(map(repr, found)) == sorted(map(repr, self.wanted.values())), "read"

    def selected(self) -> None:
        """A path selects its leaf where the state has it, with the rest of its list or tuple."""
        at = {repr(value): place for place, value in self.wanted.items()}
        for path in self.paths:
            value = shown(self.snapshot.read(path))
            found = dict(places(self.snapshot.state_dict(select=path.__eq__)))
            assert repr(value) in map(repr, found.values()), f"{path} selects another leaf"
            place = at[repr(value)]
            if not any(isinstance(each, int) for each in place):
                assert found == {place: value}, f"{path} selects {list(found)}"

    def views_of_views(self) -> None:
        key = self.drawn.random.choice(list(self.state))
        for snapshot in (self.snapshot.of_rank(0), self.snapshot.numbered()):
            assert [leaf.path for leaf in snapshot.leaves()] == self.paths
        own = [leaf.path for leaf in self.snapshot.only([key]).leaves()]
        assert [path for path in self.paths if path in set(own)] == own
        assert dict(places(self.snapshot.only([key]).state_dict())) == dict(
            places({key: self.state[key]})
        )

    def listed(self) -> None:
        place = str(self.folder / "store")
        listed = call("ls", self.snapshot.id, "-s", place, "--json").document["leaves"]
        assert sorted(leaf["path"] for leaf in listed) == sorted(self.paths)

    def differences(self) -> None:
        """Of a commit that differs in one leaf: that path alone."""
        if not (tensors := self.tensors()):
            return
        path = self.drawn.random.choice(tensors)
        other, content = self.snapshot.state_dict(), shown(self.snapshot.read(path))
        for tensor in tensors_of(other):
            if shown(tensor) == content:
                tensor[:] = -1.0
        difference = self.store.diff(self.snapshot.id, self.store.commit(other).id)
        assert [change.path for change in difference.changes] == [path]

    def dcp(self) -> None:
        with suppress(ckptstore.InvalidInput):  # two items would have one name: refused
            reader = StoreReader(self.store, self.snapshot.id, allow_pickle=True)
            metadata = reader.read_metadata()
            reader.close()
            assert metadata.planner_data is not None
            unique([repr(keys) for keys in metadata.planner_data.values()], "DCP")

    def files(self) -> None:
        """Those of keys with tensors, by URL."""
        system = fsspec.filesystem("ckptstore", skip_instance_cache=True)
        names = unique(system.ls(url_of(self.snapshot), detail=False), "fsspec")
        read: list[Any] = []
        for name in names:
            tensors = load(system.cat_file(name))
            read += [tensor.tolist() for tensor in tensors.values()]
        assert len(set(map(repr, read))) == len(read), "fsspec: a tensor is there twice"
        assert set(map(repr, read)) <= set(map(repr, self.wanted.values()))

    def exported(self, form: str, suffix: str) -> None:
        if form == "safetensors" and not self.tensors():
            return
        target = self.folder / f"exported{suffix}"
        refused = ""
        try:
            export(self.snapshot, target, format=form)  # type: ignore[arg-type]
        except ckptstore.InvalidInput as error:
            refused = str(error)
        if refused:
            assert form == "safetensors"
            assert "one name" in refused
            return
        again = import_path(self.store, target)
        target.unlink()
        leaves = again.leaves()
        unique([leaf.path for leaf in leaves], f"{form} import")
        found = self.read(again, [leaf.path for leaf in leaves if leaf.kind == "tensor"])
        wanted = self.read(self.snapshot, self.tensors())
        assert sorted(found) == sorted(wanted), f"{form} import"

    def tensors(self) -> list[str]:
        return [leaf.path for leaf in self.snapshot.leaves() if leaf.kind == "tensor"]


def tensors_of(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for below in value:
            yield from tensors_of(below)
    elif hasattr(value, "tolist"):
        yield value


def check_ranks(random: Random) -> None:
    """What ranks that have some things in common commit together, and what each has of it."""
    drawn = Drawn(random)
    states = [drawn.state()]
    for _ in range(random.randint(1, 2)):
        states.append({**drawn.state(), **states[0]} if random.random() < 0.3 else drawn.state())
        for key in states[0].keys() & states[-1].keys():
            if random.random() < 0.5:
                states[-1][key] = mixed(random, states[0][key], states[-1][key])
    flats = [flatten(state, allow_pickle=False, ranks=True) for state in states]
    trees = [
        [
            RankTree(key, flat.schema, encode_schema(flat.schema), Ways(whole, {}, whole), ())
            for key, flat in own.items()
            for whole in [[-1] * len(flat.schema)]
        ]
        for own in flats
    ]
    for tree in merge(trees):
        private = frozenset(i for i in range(len(tree.leaves)) if random.random() < 0.3)
        schema, found = finish(tree, private)
        unique(list(schema.paths), "ranks")
        # In the place of each leaf's content, the ranks whose it is.
        owners = [
            [holder for holder in tree.leaves[i].holders if rank in (None, holder.rank)]
            for i, rank in found
        ]
        contents = [LeafContent(repr(own).encode(), b"", 0) for own in owners]
        whole = Tree(tree.key, TreeRef(ChunkId(b""), ()), schema, contents, CHUNK_BYTES)
        for rank, own in enumerate(flats):
            if tree.key in own:
                check_rank(whole, rank, own[tree.key].schema)


def check_rank(whole: Tree, rank: int, had: Schema) -> None:
    """A rank's view has each leaf of the rank in its place, under a path of its own."""
    seen = tree_of_rank(whole, rank)
    assert seen is not None or not len(had)
    if seen is None:
        return
    unique(list(seen.schema.paths), f"of_rank({rank})")
    assert sorted(leaves_of(seen.schema.skeleton)) == [*range(len(seen.schema))]
    there = dict(leaves_at(seen.schema.skeleton))
    for place, leaf in leaves_at(had.skeleton):
        path = seen.schema.paths[there[place]]
        content = seen.contents[seen.numbers[path]].inline
        assert content is not None and repr(Holder(rank, leaf)) in content.decode(), path


def leaves_at(
    node: Node | int, place: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Each leaf of a skeleton by the keys that lead to it."""
    if isinstance(node, int):
        yield place, node
        return
    for key, child in zip(node.keys or range(len(node.children)), node.children, strict=True):
        yield from leaves_at(child, (*place, repr(key)))


def mixed(random: Random, one: Any, other: Any) -> Any:
    """Some of `one` in the place of `other`, or in it."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {**other, **{key: value for key, value in one.items() if random.random() < 0.5}}
    return one if random.random() < 0.5 else other


def draw(seed: int, counts: Counter[str]) -> None:
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        try:
            with ckptstore.open(Path(folder) / "store", threads=1) as store:
                for number in range(4):
                    Views(Path(folder), store, Drawn(Random(seed + number))).check()
                    counts["states"] += 1
            for number in range(40):
                check_ranks(Random(seed + number))
                counts["states of ranks"] += 1
        except BaseException as error:
            error.add_note(f"paths of seed {seed}: CKPTSTORE_NET_PATHS={seed} repeats them")
            raise


@pytest.mark.parametrize("seconds", [8, pytest.param(900, marks=pytest.mark.soak)])
@pytest.mark.timeout(3600)
def test_every_view_names_each_leaf_by_one_path(
    seed: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure names its states: CKPTSTORE_NET_PATHS=N draws them again."""
    monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path / "cache"))
    only = os.environ.get("CKPTSTORE_NET_PATHS")
    begun, counts = time.monotonic(), Counter[str]()
    while not counts or (not only and time.monotonic() - begun < seconds):
        draw(int(only) if only else seed + 40 * counts["states"], counts)
    print(f"from seed {seed}: {dict(counts)}")
