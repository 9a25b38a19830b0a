"""The application state of a snapshot, stateful objects by their keys, and how it is taken: the
settings that ranks agree on, the order of the states, and what a `_custom_tensor_prepare_func`
makes of tensors.
"""

import logging
import os
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ckptstore import Ranks, Store
from ckptstore.errors import InvalidInput
from ckptstore.interop.torchsnapshot import knobs
from ckptstore.interop.torchsnapshot.locator import SnapshotRef, place_to_take, store_at
from ckptstore.interop.torchsnapshot.reading import encode
from ckptstore.plugin.encoding import canonical
from ckptstore.plugin.pointers import Pointer, write_pointer
from ckptstore.plugin.ranks import Collective, collective_of
from ckptstore.plugin.snapshots import Snapshot
from ckptstore.plugin.tensors import is_distributed, with_local
from ckptstore.plugin.values import Stateful as Stateful
from ckptstore.plugin.values import stateful as native

logger = logging.getLogger("ckptstore")

LEAST_CHUNKS = 4
"""Commits and restores need memory for at most this many chunks (`repository.memory_budget`)."""

Prepare: TypeAlias = Callable[[str, torch.Tensor, bool], torch.Tensor]
"""From a path, a tensor, and whether only shape and dtype are wanted, to the tensor to store."""


AppState: TypeAlias = dict[str, Any]
"""Stateful objects by their keys."""


class StateDict(UserDict[str, Any]):
    """A stateful dictionary, for tensors and values outside of modules and optimizers.

    A restore sets the keys that the snapshot has and leaves others alone, as in TorchSnapshot. (A
    restored `ckptstore.StateDict` equals what was committed.)
    """

    def state_dict(self) -> dict[str, Any]:
        return self.data

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data.update(state_dict)


class RNGState(native.RNGState):
    """torch's random generator on the CPU, under the key `rng_state`, as in TorchSnapshot.

    After a restore it has the state that it had after the snapshot was taken. `ckptstore.RNGState`,
    which includes the generators of Python, numpy and CUDA, may replace it.
    """

    def state_dict(self) -> dict[str, Any]:
        return {"rng_state": torch.get_rng_state()}


class UnusableState(InvalidInput, RuntimeError):
    """An application state, or prepared tensors of it, cannot be a snapshot: change the call."""


def check_stateful(app_state: Mapping[str, Any]) -> None:
    """Raise `TypeError` for anything but a dict of stateful values, `UnusableState` for two random
    generators."""
    if not isinstance(app_state, Mapping):
        raise TypeError(
            f"app_state is a {type(app_state)}; wanted a dict of stateful objects by their keys: "
            f"{{'model': model}}"
        )
    for key, value in app_state.items():
        if not isinstance(value, Stateful):
            raise TypeError(
                f"app_state[{key!r}] is a {type(value)}; wanted something stateful: put it into a "
                "StateDict(…)"
            )
    if len(generators := generators_of(app_state)) > 1:
        raise UnusableState(
            f"app_state has several RNGState objects ({', '.join(generators)}) for the same "
            "generator; keep one"
        )


def generators_of(app_state: Mapping[str, Any]) -> dict[str, native.RNGState]:
    """The random generators in the state, by key."""
    return {key: value for key, value in app_state.items() if isinstance(value, native.RNGState)}


@dataclass(frozen=True, slots=True)
class Taking:
    """A snapshot to be taken: the path of rank 0 and its meaning, the store, and the ranks.

    Everything not named a replica by all ranks is private, by TorchSnapshot's rules. Prepared
    tensors are not those that DistributedDataParallel keeps equal, so their content is compared.
    """

    path: str
    place: SnapshotRef
    store: Store
    peers: Collective | None
    ranks: Ranks

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        app_state: Mapping[str, Any],
        pg: Any,
        replicated: Sequence[str] | None,
        storage_options: Mapping[str, Any] | None,
        prepare: Prepare | None,
    ) -> "Taking":
        """Find the snapshot's place, create its store if needed, and settle arguments that differ
        between ranks.

        Raises `TypeError` for values that are not stateful, `UnusableState` for globs that are no
        list.
        """
        check_stateful(app_state)
        if isinstance(replicated, str):
            raise UnusableState(
                f"replicated is {replicated!r}; wanted a list of globs: replicated=[{replicated!r}]"
            )
        peers = collective_of(pg)
        path, place, globs = _agree(peers, os.fspath(path), replicated or (), storage_options)
        store = store_at(place.store, storage_options)
        ranks = Ranks(process_group=pg, replicated=globs, compare=prepare is not None)
        return cls(path, place, store, peers, ranks)

    def point(self, commit: Snapshot) -> None:
        """Point the file at the path to the commit: one rank does."""
        if self.place.pointer is not None and (self.peers is None or self.peers.leads):
            write_pointer(self.place.pointer, Pointer(self.place.store, commit.id))

    def point_together(self, commit: Snapshot) -> None:
        """As `point`, before any rank goes on."""

        def point() -> bytes:
            self.point(commit)
            return b""

        if self.peers is None:
            point()
        else:
            self.peers.share("snapshot: point", point)


def _agree(
    peers: Collective | None,
    path: str,
    replicated: Sequence[str],
    storage_options: Mapping[str, Any] | None,
) -> tuple[str, SnapshotRef, tuple[str, ...]]:
    """The path of rank 0, its place, where a store is made if there is none, and the globs that
    every rank gave."""

    def answer(handed_in: list[bytes]) -> list[bytes]:
        (first, globs), *others = (canonical.decode(each) for each in handed_in)
        place = place_to_take(first, storage_options)
        store_at(place.store, storage_options, create=True)
        common = [glob for glob in globs if all(glob in theirs for _, theirs in others)]
        answered = canonical.encode([first, [place.store, place.tag, place.pointer], common])
        return [answered] * len(handed_in)

    own = canonical.encode([path, list(replicated)])
    answered = peers.round("snapshot: agree", lambda: own, answer) if peers else answer([own])[0]
    first, place, common = canonical.decode(answered)
    if peers and first != path:
        logger.warning(
            "rank %d was given the path %s; the path of rank 0 is used: %s", peers.rank, path, first
        )
    if peers and set(common) != set(replicated):
        logger.warning(
            "rank %d was given replicated=%s; the globs that all ranks were given are used: %s",
            peers.rank,
            list(replicated),
            common,
        )
    return first, SnapshotRef(*place), tuple(common)


@contextmanager
def collected(app_state: Mapping[str, Any], prepare: Prepare | None) -> Iterator[dict[str, Any]]:
    """The state in the order in which it is collected: the random generator first, since other
    states may draw from it, then by key, so that collectives of all ranks match.

    After the block the generator is as it was: taking a snapshot must not advance it.
    """
    first = generators_of(app_state)
    before = [(generator, generator.state_dict()) for generator in first.values()]
    rest = {key: app_state[key] for key in sorted(app_state) if key not in first}
    if prepare is not None:
        rest = {key: Prepared(key, value, prepare) for key, value in rest.items()}
    try:
        yield first | rest
    finally:
        for generator, state in before:
            generator.load_state_dict(state)


def budget_of(store: Store, wanted: int | None) -> int | None:
    """The memory budget of the call or the environment, raised to the store's minimum."""
    budget = wanted or knobs.get_memory_budget_bytes()
    return budget and max(budget, LEAST_CHUNKS * store.chunk_bytes)


class Prepared:
    """A stateful object whose tensors `_custom_tensor_prepare_func` replaces before anything is
    hashed or written.

    All results are held until the commit is made. The function is called once per tensor, with its
    last argument, `tracing`, false. Of a tensor that ranks divide, it gets this rank's part.
    """

    def __init__(self, key: str, stateful: Any, prepare: Prepare) -> None:
        self._key, self._stateful, self._prepare = key, stateful, prepare

    def state_dict(self) -> Any:
        return self._visit(native.state_of(self._stateful), encode(self._key))

    def load_state_dict(self, state_dict: Any) -> None:
        raise UnusableState(
            f"{self._key} was prepared to be stored; restore it into the object itself"
        )

    def _visit(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if type(value) is list:
            return [self._visit(child, f"{path}/{i}") for i, child in enumerate(value)]
        if type(value) in (dict, OrderedDict):
            made = type(value)(
                (key, self._visit(child, f"{path}/{encode(str(key))}"))
                for key, child in value.items()
            )
            if hasattr(value, "_metadata"):
                made._metadata = value._metadata
            return made
        return value

    def _tensor(self, tensor: Any, path: str) -> Any:
        if not is_distributed(tensor):
            return self._call(tensor, path)
        return with_local(tensor, lambda local: self._part(local, path))

    def _call(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        made = self._prepare(path, tensor, False)
        if made.shape != tensor.shape:
            raise UnusableState(
                f"_custom_tensor_prepare_func must keep the shape of a tensor: {path} is "
                f"{list(tensor.shape)}, it made {list(made.shape)}"
            )
        return made

    def _part(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        made = self._call(tensor, path)
        if type(made) is not torch.Tensor or made.layout is not torch.strided or made.is_quantized:
            raise UnusableState(
                f"_custom_tensor_prepare_func made {made.dtype} of {path}; a tensor that ranks "
                "divide must stay a plain tensor"
            )
        return made
