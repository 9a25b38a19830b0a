"""What one of the rank processes does for the net: it commits what it is told to have, restores,
and says what it found."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import ckptstore
from ckptstore.distributed.collective import Collective
from ckptstore.distributed.coordinator import DONE
from ckptstore.state.shards import held_of
from ckptstore.storage.local import LocalStorage
from tests.net.ranks import (
    CHUNK_BYTES,
    Commit,
    Divided,
    Restore,
    T,
    Tie,
    differences,
    holders,
    is_container,
    merged,
    view,
)
from tests.support.patching import small_chunks_too

TIMEOUT_S = 200.0


@cache
def group_of(ranks: tuple[int, ...]) -> Any:
    """All ranks of the pool must ask for it."""
    return dist.new_group(list(ranks))


@cache
def mesh_of(ranks: tuple[int, ...], shape: tuple[int, ...]) -> DeviceMesh:
    """All ranks of the pool must ask for it."""
    return DeviceMesh("cpu", torch.tensor(ranks).view(shape))


def meet(
    rank: int, group: tuple[int, ...], meshes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    group_of(group)
    for ranks, shape in meshes:
        mesh_of(ranks, shape)


class Here:
    """This rank's store, and the objects of its state, which stay the same from commit to commit
    where only their contents change."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self.folder, self.how = folder, how
        self.small = ExitStack()
        self.small.enter_context(small_chunks_too())  # as long as this process lives
        self.store = self.opened()
        self.known: dict[str, tuple[Any, Any]] = {}
        self.pending: list[ckptstore.PendingCommit] = []

    def opened(self) -> ckptstore.Store:
        storage = ckptstore.Storage(chunk_bytes=CHUNK_BYTES, codec=self.how["codec"])
        background = ckptstore.Async(executor=self.how["executor"])
        return ckptstore.open(self.folder, storage=storage, threads=2, background=background)

    def state(self, commit: Commit, rank: int) -> dict[str, dict[str, Any]]:
        """What the rank commits, in its own order."""
        for pending in self.pending:
            pending.wait_staged(TIMEOUT_S)
        found: dict[str, Any] = {}
        paths = [path for path in commit.state if rank in holders(commit.state, path, commit.group)]
        for path in paths:
            if not isinstance(slot := commit.state[path], Tie):
                found[path] = self.object_of(path, slot, commit, rank)
        for path in paths:
            at = path
            while isinstance(slot := commit.state[at], Tie):
                at = slot.of
            found[path] = found[at]
        if commit.shuffled:
            Random(commit.shuffled + rank).shuffle(paths)
        state: dict[str, dict[str, Any]] = {}
        if commit.empty_keys:
            state = {path.split("/")[0]: {} for path in commit.state}
        for path in paths:
            key, name = path.split("/")
            state.setdefault(key, {})[name] = found[path]
        return state

    def object_of(self, path: str, slot: Any, commit: Commit, rank: int) -> Any:
        if not isinstance(slot, Divided):
            return self.node_of(path, slot[rank])
        mesh = next(mesh for mesh in slot.meshes(commit.group) if rank in mesh)
        part = slot.part(mesh, rank)
        how = (slot.whole.shape, slot.whole.dtype, slot.placed(), mesh, slot.by_attributes)
        return self.filled(path, how, part, lambda: distributed(slot, mesh, part))

    def node_of(self, path: str, node: Any) -> Any:
        if isinstance(node, T):
            value = node.made()
            return self.filled(path, (node.shape, node.dtype), value, value.clone)
        if isinstance(node, dict):
            return {name: self.node_of(f"{path}/{name}", each) for name, each in node.items()}
        if is_container(node):
            return [self.node_of(f"{path}/{n}", each) for n, each in enumerate(node)]
        return node

    def filled(self, path: str, how: Any, value: torch.Tensor, make: Any) -> Any:
        """The tensor that was here before, written to, if it is of the same kind."""
        known = self.known.get(path)
        if known is None or known[0] != how:
            known = self.known[path] = how, make()
        else:
            local = known[1].to_local() if isinstance(known[1], DTensor) else known[1]
            local.copy_(value)
        return known[1]


def distributed(slot: Divided, mesh: tuple[int, ...], part: torch.Tensor) -> Any:
    whole = slot.whole
    made = DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format),
        mesh_of(mesh, slot.grid(mesh)),
        slot.placed(),
        run_check=False,
        shape=torch.Size(whole.shape),
        stride=torch.empty(whole.shape, device="meta").stride(),
    )
    return with_attributes(made) if slot.by_attributes else made


def with_attributes(made: DTensor) -> torch.Tensor:
    """A rank's part of a DTensor, as one that says by attributes what it is of the whole."""
    local: Any = made.to_local()
    boxes = held_of(made).holding.boxes
    local.global_shape = tuple(made.shape)
    local.global_offsets = tuple(box.offsets for box in boxes)
    local.local_offsets = tuple((0,) * local.ndim for _ in boxes)
    local.local_sizes = tuple(box.lengths for box in boxes)
    return local  # type: ignore[no-any-return]


_here: list[Here] = []


def begin(rank: int, folder: Path, how: dict[str, Any]) -> None:
    end(rank)
    _here.append(Here(folder, **how))


def end(rank: int) -> None:
    while _here:
        _here.pop().store.close()


def reopen(rank: int) -> None:
    here = _here[0]
    here.store.close()
    here.store, here.pending = here.opened(), []


def ranks_of(group: tuple[int, ...], **how: Any) -> ckptstore.Ranks:
    return ckptstore.Ranks(process_group=group_of(group), timeout_s=TIMEOUT_S, **how)


def ranks_for(what: Commit) -> ckptstore.Ranks:
    options = what.options
    return ranks_of(
        what.group,
        replicated=options.replicated,
        private=options.private,
        compare=options.compare,
        canonical=options.canonical,
        trust_replicated=options.trust_replicated,
    )


def label_of(what: Commit) -> dict[str, Any]:
    """What a commit is called, and which ranks make it."""
    return {"step": what.step, "metrics": {"loss": what.step % 3}, "ranks": ranks_for(what)}


def commit(rank: int, what: Commit) -> None:
    """The commit of this rank's part; those in the background go on."""
    if rank not in what.group:
        return
    here, label = _here[0], label_of(what)
    state = here.state(what, rank)
    if what.way == "commit":
        here.store.commit(state, **label, memory_budget_bytes=what.budget)
        here.pending = []
    else:
        background = ckptstore.Async(staging="lazy" if what.way == "lazy" else "eager")
        here.pending.append(here.store.commit_async(state, **label, background=background))


class Raising(dict[str, Any]):
    """A part of the state that cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state today")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


CALLS = ("put", "put_new", "create", "read", "read_into", "size", "delete", "list", "sync_dirs")


@contextmanager
def failing_at(call: int) -> Iterator[None]:
    """The storage call of that number fails, on whatever thread, and all after it until the end."""
    count, lock = 0, Lock()

    def failing(function: Any) -> Any:
        def act(*args: Any, **how: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                due = count >= call
            if due:
                raise ckptstore.Unavailable("the cable is out")
            return function(*args, **how)

        return act

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(LocalStorage, name, failing(getattr(LocalStorage, name)))
        yield


@contextmanager
def interrupted_late() -> Iterator[None]:
    """This rank is interrupted once it has handed in what it wrote, and the commit was made."""
    real = Collective.round

    def interrupted(self: Collective, what: str, *args: Any, **how: Any) -> Any:
        found = real(self, what, *args, **how)
        if what == "commit: publish" and found[0] == DONE:
            raise KeyboardInterrupt
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collective, "round", interrupted)
        yield


def failing(how: str, call: int) -> AbstractContextManager[None]:
    if how == "storage":
        return failing_at(call)
    return interrupted_late() if how == "late" else nullcontext()


def commit_failing(rank: int, what: Commit, on: int, how: str, call: int) -> str:
    """A commit during which one rank fails; returns its outcome. How: its state raises, its
    storage fails from a call on, or it is interrupted late."""
    if rank not in what.group:
        return ""
    here = _here[0]
    wait(rank)
    state: dict[str, Any] = dict(here.state(what, rank))
    if rank == on and how == "raises":
        state["zz"] = Raising()
    try:
        with failing(how, call) if rank == on else nullcontext():
            here.store.commit(state, **label_of(what))
    except (ckptstore.CkptStoreError, ValueError, KeyboardInterrupt) as error:
        # of one rank alone its own
        return type(error).__name__
    return "made"


def wait(rank: int) -> None:
    here = _here[0]
    for pending in here.pending:
        pending.wait(TIMEOUT_S)
    here.pending = []


def restore(rank: int, what: Restore, of: Commit) -> list[str]:
    """Restore onto the ranks of another group; returns what this rank has that it should not."""
    if rank not in what.group:
        return []
    here, number = _here[0], what.group.index(rank)
    seen = view(what.targets(merged(of)), what.private.get(number, number))
    target = empty(seen, what.group, rank)
    ranks = ranks_of(what.group, broadcast=what.broadcast, private_from=what.private or None)
    here.store.checkout(of.step).restore(
        target, strict=what.strict, ranks=ranks, memory_budget_bytes=what.budget
    )
    return list(differences(*locals_of(seen, target, what.group, rank), f"rank {number}"))


def empty(node: Any, group: tuple[int, ...], rank: int) -> Any:
    """Objects like those of `node` with something else in them."""
    if isinstance(node, Divided):
        mesh = next(mesh for mesh in node.meshes(group) if rank in mesh)
        return distributed(node, mesh, junk(node.part(mesh, rank)))
    if isinstance(node, T):
        return junk(node.made())
    if isinstance(node, dict):
        return {name: empty(each, group, rank) for name, each in node.items()}
    return [empty(each, group, rank) for each in node] if is_container(node) else -1


def junk(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.clone(memory_format=torch.contiguous_format)
    made.view(-1).view(torch.uint8).fill_(77)
    return made


def locals_of(node: Any, got: Any, group: tuple[int, ...], rank: int) -> tuple[Any, Any]:
    """What is wanted and what was restored, with the rank's parts of distributed tensors."""
    if isinstance(node, dict):
        if node.keys() != got.keys():
            return node, got
        pairs = {name: locals_of(node[name], got[name], group, rank) for name in node}
        return {n: a for n, (a, _) in pairs.items()}, {n: b for n, (_, b) in pairs.items()}
    if is_container(node) and len(node) == len(got):
        items = [locals_of(a, b, group, rank) for a, b in zip(node, got, strict=True)]
        return [a for a, _ in items], [b for _, b in items]
    if isinstance(node, Divided):
        mesh = next(mesh for mesh in node.meshes(group) if rank in mesh)
        return node.part(mesh, rank), got.to_local() if isinstance(got, DTensor) else got
    return node, got
