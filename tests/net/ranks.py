"""What ranks commit, drawn at random, and what their commit must be: the pure merge of their
states."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from random import Random
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.net.training import same
from tests.support.torch_release import OLD_TORCH

RANKS = 4
CHUNK_BYTES = 1 << 16
SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (0, 3),
    (1, 4),
    (7,),
    (3, 50),
    (130, 130),
    (1 << 14,),
    (517, 150),
    (9, 2, 1000),
    ((1 << 15) + 17,),
)
DTYPES = ("float32", "float32", "bfloat16", "float16", "float64", "int64", "uint8", "float8_e4m3fn")
ROUNDED = ("bfloat16", "float16")
KEYS = ("x", "y", "z")


@dataclass(frozen=True, slots=True)
class T:
    """A tensor; equal numbers of content give equal bytes, but of 16 bits the rounding of what
    float32 has."""

    shape: tuple[int, ...]
    dtype: str
    content: int

    def made(self) -> torch.Tensor:
        if self.dtype in ROUNDED:
            masters = content(self.content, 2 * self.nbytes).view(torch.float32)
            return masters.to(getattr(torch, self.dtype)).view(self.shape)
        return content(self.content, self.nbytes).view(getattr(torch, self.dtype)).view(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * getattr(torch, self.dtype).itemsize


@lru_cache(64)
def content(number: int, nbytes: int) -> torch.Tensor:
    """Bytes that nobody writes to."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@dataclass(frozen=True, slots=True)
class Divided:
    """A DTensor, or tensors that say by attributes what they are of a whole. The mesh has all ranks
    of the group, their first half, or each half has one."""

    whole: T
    placements: tuple[str, str]
    square: bool
    members: str
    by_attributes: bool = False

    def meshes(self, group: Sequence[int]) -> list[tuple[int, ...]]:
        half = max(1, len(group) // 2)
        if self.members == "half":
            return [tuple(group[:half])]
        if self.members == "twice" and len(group) == 2 * half:
            return [tuple(group[:half]), tuple(group[half:])]
        return [tuple(group)]

    def grid(self, mesh: Sequence[int]) -> tuple[int, ...]:
        n = len(mesh)
        return ((n // 2, 2) if n % 2 == 0 else (1, n)) if self.square else (n,)

    def placed(self) -> tuple[Any, ...]:
        """Torch's placements."""
        dims = len(self.whole.shape)
        if self.placements[0] == "strided" and dims and not OLD_TORCH:
            return (
                (_StridedShard(0, split_factor=2), Shard(0))
                if self.square
                else (_StridedShard(0, split_factor=3),)
            )
        chosen = self.placements if self.square else self.placements[:1]
        return tuple(
            Shard(min(int(name[1]), dims - 1)) if name[0] == "S" and dims else Replicate()
            for name in chosen
        )

    def part(self, mesh: Sequence[int], rank: int) -> torch.Tensor:
        """What `rank` has of the tensor, cut by torch's own placements."""
        local, shape = self.whole.made(), self.grid(mesh)
        where = divmod(mesh.index(rank), shape[1]) if self.square else (mesh.index(rank),)
        for placement, size, at in zip(self.placed(), shape, where, strict=True):
            if not placement.is_replicate():
                split = placement._split_tensor(local, size, with_padding=False, contiguous=True)
                local = split[0][at]
        return local


@dataclass(frozen=True, slots=True)
class Tie:
    """The object at another path."""

    of: str


Node = Any
"""A `T`, a plain value, or a dict or a list of these."""
Slot = dict[int, Node] | Divided | Tie
"""What stands under a path `key/name`: each rank's own, one of all ranks, or what is elsewhere."""
State = dict[str, Slot]


def holders(state: State, path: str, group: Sequence[int]) -> list[int]:
    """The ranks of the group that have something under a path."""
    slot = state[path]
    if isinstance(slot, Tie):
        return holders(state, slot.of, group)
    if isinstance(slot, Divided):
        return [rank for mesh in slot.meshes(group) for rank in mesh]
    return [rank for rank in group if rank in slot]


@dataclass(frozen=True, slots=True)
class Options:
    """Those of `Ranks` in a commit."""

    replicated: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    compare: bool = True
    canonical: bool = True
    trust_replicated: bool = True

    def is_private(self, path: str) -> bool:
        if any(fnmatchcase(path, glob) for glob in self.private):
            return True
        return not self.compare and not any(fnmatchcase(path, glob) for glob in self.replicated)


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of `group`, ranks of the pool in ascending order."""

    step: int
    group: tuple[int, ...]
    state: State
    options: Options
    way: str = "commit"
    budget: int | None = None
    shuffled: int = 0
    empty_keys: bool = False


@dataclass(frozen=True, slots=True)
class Restore:
    """One restore of `step` on the ranks of `group`, whose tensors are divided in other ways, drawn
    from `seed`. `private` says whose private leaves a rank takes, by number."""

    step: int
    group: tuple[int, ...]
    seed: int
    strict: bool
    private: dict[int, int]
    broadcast: bool | None
    budget: int | None

    def targets(self, node: Any, path: str = "") -> Any:
        """A merged node with a `Divided` in place of some tensors that all ranks get."""
        if isinstance(node, Split):
            return node
        if isinstance(node, dict):
            return {name: self.targets(each, f"{path}/{name}") for name, each in node.items()}
        if is_container(node):
            return [self.targets(each, f"{path}/{n}") for n, each in enumerate(node)]
        random = Random(f"{self.seed}{path}")
        if isinstance(node, T) and random.random() < 0.5:
            return divided(random, node, ("all", "twice"))
        return node


# -- the merge --


class Split(dict[int, Any]):
    """What each of several ranks has in one place, by its number in the group."""


def merged(commit: Commit) -> dict[str, Any]:
    """The whole state: `T` and values where ranks have one, `Split` where each has its own."""
    found: dict[str, Any] = {}
    numbers = {rank: i for i, rank in enumerate(commit.group)}
    options = commit.options if len(commit.group) > 1 else Options()
    for path in commit.state:
        at = path
        while isinstance(slot := commit.state[at], Tie):
            at = slot.of
        there = holders(commit.state, path, commit.group)
        key, name = path.split("/")
        if not there:
            continue
        if isinstance(slot, Divided):
            found.setdefault(key, {})[name] = slot.whole
        else:
            own = {numbers[rank]: slot[rank] for rank in there}
            found.setdefault(key, {})[name] = joined(own, path, options)
    if commit.empty_keys:
        for path in commit.state:
            found.setdefault(path.split("/")[0], {})
    return found


def joined(own: Mapping[int, Node], path: str, options: Options) -> Any:
    nodes = list(own.values())
    if all(isinstance(node, dict) for node in nodes):
        names = dict.fromkeys(name for node in nodes for name in node)
        return {
            name: joined(
                {i: node[name] for i, node in own.items() if name in node},
                f"{path}/{name}",
                options,
            )
            for name in names
        }
    if all(map(is_container, nodes)) and len({(type(node), len(node)) for node in nodes}) == 1:
        return [
            joined({i: node[n] for i, node in own.items()}, f"{path}/{n}", options)
            for n in range(len(nodes[0]))
        ]
    is_one = len({kind_of(node) for node in nodes}) == 1 and not any(map(is_container, nodes))
    if is_one and isinstance(nodes[0], T) and not nodes[0].nbytes:
        return nodes[0]
    if is_one and not options.is_private(path) and len(set(map(image, nodes))) == 1:
        return nodes[0]
    return Split(own)


def is_container(node: Node) -> bool:
    """A list of plain values is a value."""
    if isinstance(node, list):
        return any(
            isinstance(each, T | Divided | torch.Tensor | dict) or is_container(each)
            for each in node
        )
    return isinstance(node, dict)


def kind_of(node: Node) -> object:
    if isinstance(node, T):
        return node.shape, node.dtype
    return "container" if is_container(node) else "bytes" if isinstance(node, bytes) else "value"


def image(node: Node) -> object:
    if isinstance(node, T):
        return node.made().reshape(-1).view(torch.uint8).numpy().tobytes()
    return repr(node)


GONE = object()


def view(node: Any, i: int) -> Any:
    """What rank number `i` sees of a merged node; `GONE` if that is nothing."""
    if isinstance(node, Split):
        return node.get(i, GONE)
    if isinstance(node, dict):
        found = {name: view(each, i) for name, each in node.items()}
        return {name: each for name, each in found.items() if each is not GONE}
    if isinstance(node, list):
        items = [view(each, i) for each in node]
        return GONE if any(each is GONE for each in items) else items
    return node


def flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a merged node by path, those of a rank below its number."""
    if isinstance(node, dict) or is_container(node):
        for name, each in node.items() if isinstance(node, dict) else enumerate(node):
            yield from flat(each, f"{path}/{name}" if path else str(name))
    else:
        yield path, node


def differences(wanted: Any, got: Any, where: str) -> Iterator[str]:
    """What is not as in `wanted`, by path."""
    if isinstance(wanted, dict):
        if not isinstance(got, Mapping):
            yield f"{where} is {got!r:.60}, wanted {sorted(map(str, wanted))}"
        elif wanted.keys() != got.keys():
            yield f"{where} has {sorted(map(str, got))}, wanted {sorted(map(str, wanted))}"
        else:
            for name, each in wanted.items():
                yield from differences(each, got[name], f"{where}/{name}")
    elif isinstance(wanted, torch.Tensor):
        if not same(got, wanted):
            yield f"{where}: its part {wanted.dtype}{list(wanted.shape)} is another"
    elif is_container(wanted):
        if not isinstance(got, list) or len(got) != len(wanted):
            yield f"{where} is {got!r:.60}, wanted a list of {len(wanted)}"
        else:
            for n, each in enumerate(wanted):
                yield from differences(each, got[n], f"{where}/{n}")
    elif isinstance(wanted, T):
        if not isinstance(got, torch.Tensor) or not same(got, wanted.made()):
            told = f"{got.dtype}{list(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)
            yield f"{where} is not {wanted}, but {told:.60}"
    elif type(got) is not type(wanted) or got != wanted:
        yield f"{where} is {got!r:.60}, wanted {wanted!r:.60}"


# -- the draw --


def divided(
    random: Random, whole: T, members: Sequence[str] = ("all", "all", "half", "twice")
) -> Divided:
    names = ("R", "S0", "S0", "S1", "strided")
    placements = random.choice(names), random.choice(names[:4])
    by_attributes = "strided" not in placements and random.random() < 0.3
    square = random.random() < 0.5
    return Divided(whole, placements, square, random.choice(members), by_attributes)


@dataclass
class Draw:
    """A state that changes from commit to commit, for groups of ranks."""

    random: Random
    state: State = field(default_factory=dict)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    orders: int = 0

    def __post_init__(self) -> None:
        random = self.random
        self.unrest = random.choice((0.05, 1.0))
        self.divides = random.choice((0.0, 0.3, 0.3))  # without DTensors, groups are told the same
        for _ in range(random.choice((1, 2, 2, 2, 3))):
            size = random.choice((1, 2, 2, 2, 3, 3, 4, 4))
            group = set(random.sample(range(RANKS), size))
            if self.groups:  # groups share ranks, whose store object serves both
                group.add(random.choice(self.groups[0]))
            self.groups.append(tuple(sorted(group)))
        if all(len(group) == 1 for group in self.groups):
            self.groups.append(tuple(range(RANKS)))
        weight = T(random.choice(SHAPES[5:]), random.choice(DTYPES), random.randrange(1 << 30))
        self.state["x/w"] = dict.fromkeys(range(RANKS), weight)
        for _ in range(random.randint(1, 6)):
            self.add()
        self.options = self.new_options()
        self.empty_keys = random.random() < 0.3

    def change(self) -> list[str]:
        """Change contents, or what each rank's plan depends on. Returns what was changed."""
        told = []
        for act, chance in self.chances():
            if self.random.random() < chance:
                act()
                told.append(act.__name__)
        return told

    def chances(self) -> list[tuple[Callable[[], None], float]]:
        """What may change, and how often; in half of the jobs contents alone, mostly, as in a
        training."""
        table: list[tuple[Callable[[], None], float]] = [
            (self.refill, 0.9),
            (self.exchange, 0.15),
            (self.reshape, 0.12),
            (self.move, 0.12),
            (self.add, 0.1),
            (self.remove, 0.1),
            (self.reorder, 0.1),
            (self.choose, 0.2),
        ]
        return [(act, chance if chance > 0.5 else chance * self.unrest) for act, chance in table]

    def path(self) -> str:
        return self.random.choice(sorted(self.state))

    def add(self) -> None:
        path = f"{self.random.choice(KEYS)}/{self.random.choice('abcdefgh')}"
        untied = [each for each in self.state if not isinstance(self.state[each], Tie)]
        if path in self.state:
            return
        draw = self.random.random()
        if draw < 0.15 and untied:
            of = self.random.choice(sorted(untied))
            slot = self.state[of]
            if isinstance(slot, Divided) or all(isinstance(node, T) for node in slot.values()):
                self.state[path] = Tie(of)
        elif draw < 0.15 + self.divides:
            self.state[path] = divided(self.random, self.tensor())
        else:
            self.state[path] = self.own()

    def remove(self) -> None:
        path = self.path()
        if len(self.state) > 2 and not any(slot == Tie(path) for slot in self.state.values()):
            del self.state[path]

    def tensor(self, content: int | None = None) -> T:
        number = self.random.randrange(1 << 30) if content is None else content
        return T(self.random.choice(SHAPES), self.random.choice(DTYPES), number)

    def number(self) -> int:
        """Of content: now and then what another tensor may have."""
        return self.random.choice((self.random.randrange(1 << 30), self.random.randrange(3)))

    def own(self) -> dict[int, Node]:
        ranks = list(range(RANKS))
        if self.random.random() < 0.3:
            ranks = self.random.sample(ranks, self.random.randint(1, RANKS))
        first = self.node()
        how = self.random.choice(("alike", "alike", "contents", "some", "kinds"))
        return {
            rank: first
            if how == "alike" or (how == "some" and self.random.random() < 0.5)
            else self.node()
            if how == "kinds"
            else self.filled(first)
            for rank in ranks
        }

    def node(self, depth: int = 0) -> Node:
        draw = self.random.random()
        if draw < 0.6:
            return self.tensor(self.number())
        if draw < 0.85 or depth > 1:
            number = self.random.randint(0, 3)
            return self.random.choice(
                (number, number / 3, f"t{number}", None, True, [number, "a"], [], b"b" * number)
            )
        below = [self.node(depth + 1) for _ in range(self.random.randint(0, 3))]
        return below if self.random.random() < 0.5 else dict(zip("pqr", below, strict=False))

    def filled(self, node: Node) -> Node:
        """A node of the same structure with other contents."""
        if isinstance(node, T):
            return replace(node, content=self.number())
        if isinstance(node, dict):
            return {name: self.filled(each) for name, each in node.items()}
        if is_container(node):
            return [self.filled(each) for each in node]
        if isinstance(node, int) and not isinstance(node, bool):
            return self.random.randint(0, 9)
        return node

    def refill(self) -> None:
        """Other contents of most slots, on all ranks or on some."""
        for path, slot in self.state.items():
            if self.random.random() < 0.3:
                continue
            if isinstance(slot, Divided):
                self.state[path] = replace(slot, whole=self.filled(slot.whole))
            elif isinstance(slot, dict):
                self.refill_own(path, slot)

    def refill_own(self, path: str, slot: dict[int, Node]) -> None:
        new: dict[str, Node] = {}  # what was alike stays alike, mostly
        apart = self.random.random() < 0.15 * self.unrest
        for rank, node in slot.items():
            known = repr(node)
            if apart or known not in new:
                new[known] = self.filled(node)
            slot = slot | {rank: new[known]}
        self.state[path] = slot

    def exchange(self) -> None:
        """Two slots change places."""
        a, b = self.path(), self.path()
        if Tie not in (type(self.state[a]), type(self.state[b])):
            self.state[a], self.state[b] = self.state[b], self.state[a]
            self.break_ties()

    def reshape(self) -> None:
        """One tensor gets another shape or dtype, or one slot other nodes."""
        path = self.path()
        slot = self.state[path]
        if isinstance(slot, Divided):
            self.state[path] = replace(slot, whole=self.tensor())
        elif isinstance(slot, dict):
            self.state[path] = self.own()
            self.break_ties()

    def move(self) -> None:
        """Another mesh or other placements, other holders."""
        path = self.path()
        slot = self.state[path]
        if isinstance(slot, Divided):
            self.state[path] = replace(divided(self.random, self.tensor()), whole=slot.whole)
        elif isinstance(slot, dict):
            rank = self.random.randrange(RANKS)
            if rank in slot and len(slot) > 1:
                self.state[path] = {r: node for r, node in slot.items() if r != rank}
            else:
                self.state[path] = slot | {rank: self.random.choice(list(slot.values()))}

    def reorder(self) -> None:
        self.orders = self.random.choice((0, self.random.randrange(1, 1 << 30)))

    def choose(self) -> None:
        self.options = self.new_options()

    def break_ties(self) -> None:
        """Only tensors are tied."""
        for path, tie in list(self.state.items()):
            if isinstance(tie, Tie):
                slot = self.state[tie.of]
                if isinstance(slot, dict) and not all(isinstance(n, T) for n in slot.values()):
                    del self.state[path]

    def new_options(self) -> Options:
        random = self.random
        return Options(
            compare=random.random() < 0.8,
            canonical=random.random() < 0.7,
            trust_replicated=random.random() < 0.7,
            replicated=random.choice(((), ("some",), ("all",))),
            private=("p",) if random.random() < 0.4 else (),
        )

    def with_roundings(self) -> State:
        """The state, with the roundings of some slots of float32 tensors."""
        state = dict(self.state)
        for path, slot in self.state.items():
            dtype = (*ROUNDED, None)[sum(map(ord, path)) % 3]  # the same for as long as it is there
            if dtype and isinstance(slot, Divided) and slot.whole.dtype == "float32":
                state[f"{path}16"] = replace(slot, whole=replace(slot.whole, dtype=dtype))
            elif dtype and isinstance(slot, dict):
                tensors = {r: n for r, n in slot.items() if isinstance(n, T)}
                if len(tensors) == len(slot) and {n.dtype for n in tensors.values()} == {"float32"}:
                    half = {rank: replace(n, dtype=dtype) for rank, n in tensors.items()}
                    state[f"{path}16"] = half
        return state

    def commit(self, step: int) -> Commit:
        random, state = self.random, self.with_roundings()
        group = random.choice(self.groups)
        return Commit(
            step,
            group,
            state,
            self.fitting(state),
            way=random.choice(("commit", "commit", "eager", "lazy")),
            budget=random.choice((64 << 20, 256 << 20)) if random.random() < 0.1 else None,
            shuffled=self.orders,
            empty_keys=self.empty_keys,
        )

    def fitting(self, state: State) -> Options:
        """The options for what is true of the state: globs of replicas, and of private slots. What
        is tied has the same ones."""
        replicated, private = list[str](), list[str]()
        for path in sorted(state):
            at = path
            while isinstance(slot := state[at], Tie):
                at = slot.of
            if isinstance(slot, Divided):
                continue
            alike = len({repr(node) for node in slot.values()}) == 1
            kind = sum(map(ord, at)) % 4  # the same for as long as the slot is there
            of_all = self.options.replicated == ("all",)
            if alike and (of_all or (self.options.replicated and kind < 2)):
                replicated += [path, f"{path}/*"]
            elif kind == 2 and self.options.private:
                private += [path, f"{path}/*"]
        return replace(self.options, replicated=tuple(replicated), private=tuple(private))
